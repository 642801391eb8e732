"""persia.metrics against scikit-learn."""

import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import log_loss, roc_auc_score

from persia import errors
from persia.metrics import (
    AUC,
    GAUC,
    BinaryMetrics,
    Calibration,
    LogLoss,
    NormalizedEntropy,
    StreamingAUC,
    auc,
    logloss,
)


def sample(
    n: int, seed: int, ties: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.normal(-2.0, 1.3, n)
    y = (rng.random(n) < 1 / (1 + np.exp(-x))).astype(np.float64)
    if ties:
        x = np.round(x * 4) / 4
    return x, y


@pytest.mark.parametrize("ties", [False, True])
def test_exact_auc_and_logloss_agree_with_sklearn(ties: bool) -> None:
    x, y = sample(5000, 1, ties)
    assert auc(torch.from_numpy(x), torch.from_numpy(y)) == pytest.approx(
        roc_auc_score(y, x), abs=1e-12
    )
    assert logloss(x, y) == pytest.approx(
        log_loss(y, 1 / (1 + np.exp(-x))), rel=1e-9
    )


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.integers(-6, 6), st.booleans()), min_size=2, max_size=40
    ).filter(lambda rows: len({label for _, label in rows}) == 2)
)
def test_exact_auc_of_any_small_sample(rows: list[tuple[int, bool]]) -> None:
    x = np.array([score for score, _ in rows], dtype=float)
    y = np.array([label for _, label in rows], dtype=float)
    assert auc(x, y) == pytest.approx(roc_auc_score(y, x), abs=1e-12)


@pytest.mark.parametrize("ties", [False, True])
def test_streaming_auc_is_within_its_own_bound(ties: bool) -> None:
    x, y = sample(20000, 2, ties)
    for bins in (32, 256, 4096):
        stream = StreamingAUC(bins=bins)
        for i in range(0, len(x), 1000):
            stream.update(
                torch.from_numpy(x[i : i + 1000]),
                torch.from_numpy(y[i : i + 1000]),
            )
        assert (
            abs(stream.compute() - roc_auc_score(y, x))
            <= stream.error() + 1e-12
        )
    assert stream.error() < 2e-3 or ties


def test_streaming_auc_counts_scores_beyond_its_range() -> None:
    stream = StreamingAUC(bins=64, limit=1.0)
    stream.update(
        torch.tensor([-50.0, 50.0, float("inf"), 0.0]),
        torch.tensor([0.0, 1, 1, 0]),
    )
    assert stream.compute() == 1.0
    assert stream.error() == 0.0


def test_batches_score_as_one() -> None:
    x, y = sample(3000, 3)
    metrics = BinaryMetrics()
    for part in np.array_split(np.arange(3000), 7):
        metrics.update(torch.from_numpy(x[part]), torch.from_numpy(y[part]))
    scores = metrics.compute()
    p = 1 / (1 + np.exp(-x))
    rate = y.mean()
    entropy = -rate * np.log(rate) - (1 - rate) * np.log(1 - rate)
    assert (scores.samples, scores.positives) == (3000, int(y.sum()))
    assert scores.auc == pytest.approx(roc_auc_score(y, x), abs=1e-6)
    assert scores.logloss == pytest.approx(log_loss(y, p), rel=1e-6)
    assert scores.normalized_entropy == pytest.approx(
        log_loss(y, p) / entropy, rel=1e-6
    )
    assert scores.calibration == pytest.approx(p.mean() / rate, rel=1e-6)


def test_extreme_logits_stay_finite() -> None:
    metrics = BinaryMetrics()
    metrics.update(torch.tensor([-800.0, 800.0]), torch.tensor([0.0, 1.0]))
    scores = metrics.compute()
    assert scores.logloss == 0.0
    assert scores.auc == 1.0
    assert scores.calibration == 1.0


def test_metrics_that_are_not_defined_are_nan() -> None:
    assert math.isnan(auc(np.zeros(3), np.ones(3)))
    assert math.isnan(auc(np.zeros(0), np.zeros(0)))
    assert math.isnan(BinaryMetrics().compute().auc)
    assert math.isnan(StreamingAUC().compute())
    metrics = BinaryMetrics()
    metrics.update(torch.zeros(3), torch.zeros(3))
    scores = metrics.compute()
    assert scores.samples == 3
    assert scores.logloss == pytest.approx(math.log(2))
    assert math.isnan(scores.normalized_entropy)
    assert math.isnan(scores.calibration)


def test_bad_input_is_named() -> None:
    with pytest.raises(errors.ShapeError, match=r"3 scores .*2 labels"):
        auc(np.zeros(3), np.zeros(2))
    with pytest.raises(errors.InvalidArgument, match=r"1 scores .*NaN"):
        auc(np.array([0.0, np.nan]), np.array([0.0, 1.0]))
    with pytest.raises(errors.InvalidArgument, match="label 1 is 2,"):
        auc(np.zeros(2), np.array([0.0, 2.0]))
    with pytest.raises(errors.InvalidArgument, match="NaN"):
        StreamingAUC().update(
            torch.tensor([float("nan")]), torch.tensor([1.0])
        )
    with pytest.raises(errors.InvalidArgument, match="bins"):
        StreamingAUC(bins=1)


def test_infinite_logits() -> None:
    """As of a model in half precision: they are scores like others."""
    x = torch.tensor([math.inf, math.inf, 0.0, -math.inf, -math.inf])
    y = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0])
    finite = x.clamp(-100, 100)
    assert auc(x, y) == auc(finite, y) == 3.0 / 6
    right = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0])
    assert logloss(x, right) == pytest.approx(math.log(2) / 5)
    assert logloss(x, y) == math.inf


def test_after_a_reset_nothing_is_left() -> None:
    exact, stream = BinaryMetrics(), StreamingAUC()
    for metrics in (exact, stream):
        metrics.update(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 0.0]))
        metrics.reset()
        metrics.update(torch.tensor([1.0, 2.0]), torch.tensor([0.0, 1.0]))
    assert exact.compute().samples == 2
    assert exact.compute().auc == stream.compute() == 1.0


def weighted(
    n: int, seed: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    x, y = sample(n, seed, ties=True)
    w = np.random.default_rng(seed).integers(0, 4, n).astype(np.float64)
    return x, y, w, np.repeat(np.arange(n), w.astype(int))


@pytest.mark.parametrize("fraction", [1.0, 0.37])
def test_weights_are_those_of_sklearn(fraction: float) -> None:
    x, y, w, _ = weighted(3000, 5)
    w = w * fraction
    p = 1 / (1 + np.exp(-x))
    area = roc_auc_score(y, x, sample_weight=w)
    loss = log_loss(y, p, sample_weight=w)
    assert auc(x, y, w) == pytest.approx(area, abs=1e-12)
    assert logloss(x, y, w) == pytest.approx(loss, rel=1e-9)
    metrics = BinaryMetrics()
    stream = StreamingAUC(bins=1 << 14)
    for part in np.array_split(np.arange(3000), 7):
        mine = [torch.from_numpy(a[part]) for a in (x, y, w)]
        metrics.update(*mine)
        stream.update(*mine)
    found = metrics.compute()
    assert found.auc == pytest.approx(area, abs=1e-9)
    assert found.logloss == pytest.approx(loss, rel=1e-6)
    assert found.calibration == pytest.approx(
        (w * p).sum() / (w * y).sum(), rel=1e-6
    )
    rate = (w * y).sum() / w.sum()
    entropy = -rate * math.log(rate) - (1 - rate) * math.log(1 - rate)
    assert found.normalized_entropy == pytest.approx(loss / entropy, rel=1e-6)
    assert (found.samples, found.positives) == (3000, int(y.sum()))
    assert stream.compute() == pytest.approx(area, abs=1e-9)


def test_a_weight_of_two_is_a_sample_twice() -> None:
    x, y, w, again = weighted(500, 6)
    users = np.random.default_rng(0).integers(0, 20, 500)
    for metric in (AUC, LogLoss, NormalizedEntropy, Calibration, GAUC):
        more = (users,) if metric is GAUC else ()
        once, twice = metric(), metric()
        once.update(x, y, *more, weights=w)
        twice.update(x[again], y[again], *(g[again] for g in more))
        assert once.compute() == pytest.approx(twice.compute(), abs=1e-12)


def test_a_sample_without_weight_counts_not_at_all() -> None:
    x, y = np.array([-np.inf, 1.0, -1.0]), np.array([1.0, 1.0, 0.0])
    w = np.array([0.0, 1.0, 1.0])
    assert logloss(x, y, w) == logloss(x[1:], y[1:])
    assert auc(x, y, w) == 1.0
    assert math.isnan(logloss(x, y, w * 0))


@pytest.mark.parametrize("wrong", [-1.0, math.nan, math.inf])
def test_bad_weights(wrong: float) -> None:
    x, y = np.zeros(2), np.array([0.0, 1.0])
    for call in (auc, logloss, BinaryMetrics().update, AUC().update):
        with pytest.raises(errors.InvalidArgument):
            call(x, y, np.array([1.0, wrong]))
        with pytest.raises(errors.ShapeError):
            call(x, y, np.ones(3))


@given(n=st.integers(20, 60), seed=st.integers(0, 99))
def test_probabilities_in_place_of_logits_warn(n: int, seed: int) -> None:
    """Only metrics whose value they change."""
    rng = np.random.default_rng(seed)
    p, y = rng.random(n), rng.integers(0, 2, n).astype(np.float64)
    exact = BinaryMetrics()
    streams = LogLoss(), NormalizedEntropy(), Calibration()
    for call in (logloss, exact.update, *(one.update for one in streams)):
        with pytest.warns(UserWarning, match="logit"):
            call(p, y)
        with warnings.catch_warnings(action="error"):
            call(np.log(p / (1 - p)), y)
    with warnings.catch_warnings(action="error"):
        assert auc(p, y) == pytest.approx(auc(np.log(p / (1 - p)), y))
        logloss(np.zeros(n), y)  # of a model that has learned nothing
