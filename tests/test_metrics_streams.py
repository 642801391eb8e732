"""Streaming metrics against scikit-learn and plain loops."""

from __future__ import annotations

import itertools
import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import log_loss, ndcg_score, roc_auc_score

from persia import errors, metrics
from tests.system.processes import ranks

CLICKS = [
    metrics.AUC,
    metrics.LogLoss,
    metrics.NormalizedEntropy,
    metrics.Calibration,
]


def clicks(n: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Logits, labels and groups, some of one label only."""
    rng = np.random.default_rng(seed)
    x = rng.normal(-1.0, 1.5, n)
    y = (rng.random(n) < 1 / (1 + np.exp(-x))).astype(np.float64)
    names = rng.integers(-(2**63), 2**63 - 1, n // 5)
    return x, y, names[rng.integers(0, n // 5, n)]


def expected(x: np.ndarray, y: np.ndarray, groups: np.ndarray) -> Any:
    """What the metrics are, by scikit-learn and by loops."""
    p, rate = 1 / (1 + np.exp(-x)), y.mean()
    loss = log_loss(y, p)
    entropy = -rate * math.log(rate) - (1 - rate) * math.log(1 - rate)
    total = samples = 0.0
    for group in set(groups.tolist()):
        mine = groups == group
        if 0 < y[mine].sum() < mine.sum():
            total += roc_auc_score(y[mine], x[mine]) * mine.sum()
            samples += mine.sum()
    return {
        "AUC": roc_auc_score(y, x),
        "LogLoss": loss,
        "NormalizedEntropy": loss / entropy,
        "Calibration": p.mean() / rate,
        "GAUC": total / samples,
    }


def close(name: str, value: float, right: float) -> bool:
    """The bins of AUC are 1/128 of a logit wide."""
    return math.isclose(value, right, abs_tol=1e-4 if name == "AUC" else 1e-9)


@pytest.mark.parametrize("as_tensor", [True, False])
def test_batches_score_as_one(as_tensor: bool) -> None:
    x, y, g = clicks(2000, 1)
    right = expected(x, y, g)
    for kind in [*CLICKS, metrics.GAUC]:
        metric: Any = kind()
        for again in range(2):
            for part in np.array_split(np.arange(2000), 7):
                columns: list[Any] = [x[part], y[part]]
                columns += [g[part]] if kind is metrics.GAUC else []
                if as_tensor:
                    columns = [torch.from_numpy(c) for c in columns]
                metric.update(*columns)
            value = metric.compute()
            assert type(value) is float
            assert close(kind.__name__, value, right[kind.__name__]), again
            metric.reset()
        assert math.isnan(metric.compute())


def test_auc_is_within_its_own_bound() -> None:
    x, y, _ = clicks(2000, 2)
    for bins in (8, 64, 1024):
        metric = metrics.AUC(bins)
        metric.update(x, y)
        assert abs(metric.compute() - roc_auc_score(y, x)) <= metric.error()


def test_a_group_of_one_label_does_not_count() -> None:
    metric = metrics.GAUC()
    metric.update(
        np.array([1.0, 2, 3]), np.array([0, 1, 1]), np.array([7, 7, 9])
    )
    assert metric.compute() == 1.0
    metric.reset()
    metric.update(np.array([3.0]), np.array([1]), np.array([9]))
    assert math.isnan(metric.compute())


def by_loop(
    scores: np.ndarray, relevance: np.ndarray, k: int
) -> tuple[float, float]:
    """Recall and NDCG of one query: the mean over all orders of the items
    that the scores allow."""
    recalls, gains = [], []
    for order in itertools.permutations(range(len(scores))):
        ordered = scores[list(order)]
        if any(a < b for a, b in itertools.pairwise(ordered)):
            continue
        first = relevance[list(order)][:k]
        recalls.append((first > 0).sum() / (relevance > 0).sum())
        gains.append(sum(g / math.log2(i + 2) for i, g in enumerate(first)))
    ideal = sorted(relevance, reverse=True)[:k]
    best = sum(g / math.log2(i + 2) for i, g in enumerate(ideal))
    return float(np.mean(recalls)), float(np.mean(gains) / best)


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 2)), min_size=1, max_size=6
    ),
    st.integers(1, 7),
)
def test_rankings_with_ties_score_as_their_definition(
    items: list[tuple[int, int]], k: int
) -> None:
    scores = np.array([[s for s, _ in items]], float)
    relevance = np.array([[r for _, r in items]], float)
    recall, ndcg = metrics.RecallAtK(k), metrics.NDCGAtK(k)
    recall.update(scores, relevance)
    ndcg.update(scores, relevance)
    if not relevance.any():
        assert math.isnan(recall.compute()) and math.isnan(ndcg.compute())
        return
    right = by_loop(scores[0], relevance[0], k)
    assert recall.compute() == pytest.approx(right[0], abs=1e-12)
    assert ndcg.compute() == pytest.approx(right[1], abs=1e-12)


def test_ndcg_agrees_with_sklearn() -> None:
    rng = np.random.default_rng(3)
    scores = rng.integers(0, 20, (50, 30)).astype(float)
    relevance = rng.integers(0, 4, (50, 30)).astype(float)
    for k in (1, 5, 30, 100):
        metric = metrics.NDCGAtK(k)
        for part in np.array_split(np.arange(50), 4):
            metric.update(
                torch.from_numpy(scores[part]),
                torch.from_numpy(relevance[part]),
            )
        right = ndcg_score(relevance, scores, k=k)
        assert metric.compute() == pytest.approx(right, abs=1e-12)


def test_found_ids_score_as_their_ranking() -> None:
    rng = np.random.default_rng(4)
    scores = rng.normal(size=(20, 12))
    found = np.argsort(-scores, 1)[:, :6]
    wanted = np.stack([rng.permutation(12)[:3] for _ in range(20)])
    relevance = np.zeros((20, 12))
    np.put_along_axis(relevance, wanted, 1, 1)
    for kind, k in itertools.product(
        [metrics.RecallAtK, metrics.NDCGAtK], [1, 2, 6]
    ):
        one, other = kind(k), kind(k)
        one.update(scores, relevance)
        other.update_ids(torch.from_numpy(found << 40), wanted << 40)
        assert other.compute() == pytest.approx(one.compute(), abs=1e-12)
    single = metrics.RecallAtK(6)
    single.update_ids(found, found[:, 5])
    assert single.compute() == 1.0


def test_a_recommender_that_knows_nothing_finds_k_of_n() -> None:
    metric = metrics.RecallAtK(3)
    metric.update(np.zeros((4, 12)), np.eye(12)[:4])
    assert metric.compute() == pytest.approx(3 / 12)


def test_bad_input_is_named() -> None:
    for kind in CLICKS:
        with pytest.raises(errors.ShapeError, match=r"3 .*2 labels"):
            kind().update(np.zeros(3), np.zeros(2))
        with pytest.raises(errors.InvalidArgument, match="0 or 1"):
            kind().update(np.zeros(2), np.array([0.0, 2.0]))
    with pytest.raises(errors.DtypeError, match="float64"):
        metrics.GAUC().update(np.zeros(2), np.zeros(2), np.zeros(2))
    with pytest.raises(errors.ShapeError, match=r"2 logits .*3 groups"):
        metrics.GAUC().update(np.zeros(2), np.zeros(2), np.arange(3))
    recall = metrics.RecallAtK(5)
    with pytest.raises(errors.ShapeError, match=r"\[queries, items\]"):
        recall.update(np.zeros((2, 3)), np.zeros((2, 4)))
    with pytest.raises(errors.InvalidArgument, match="NaN"):
        recall.update(np.full((1, 2), np.nan), np.zeros((1, 2)))
    with pytest.raises(errors.ShapeError, match="3 ids"):
        recall.update_ids(np.zeros((2, 3)), np.zeros(2))
    with pytest.raises(errors.ShapeError):
        recall.update_ids(np.zeros((2, 5)), np.zeros(3))
    with pytest.raises(errors.InvalidArgument, match="k"):
        metrics.RecallAtK(0)


@settings(max_examples=60)
@given(st.integers(0, 40), st.integers(1, 6), st.integers(0, 2**32 - 1))
def test_gauc_with_ties_and_weights_is_that_of_a_loop(
    n: int, groups: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    x, y = rng.integers(-2, 3, n) / 2, rng.integers(0, 2, n) * 1.0
    w = rng.integers(0, 3, n) / 2
    g = rng.integers(0, groups, n)
    total = samples = 0.0
    for group in range(groups):
        mine = (g == group) & (w > 0)
        if 0 < y[mine].sum() < mine.sum():
            area = roc_auc_score(y[mine], x[mine], sample_weight=w[mine])
            total += area * w[mine].sum()
            samples += w[mine].sum()
    metric = metrics.GAUC()
    metric.update(x, y, g, w)
    if samples:
        assert metric.compute() == pytest.approx(total / samples, rel=1e-9)
    else:
        assert math.isnan(metric.compute())


def rank_of_two() -> None:
    """One rank has a third of the samples, the other the rest."""
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    x, y, g = clicks(900, 5)
    mine = slice(0, 300) if rank == 0 else slice(300, 900)
    right = expected(x, y, g)
    for kind in CLICKS:
        metric = kind()
        metric.update(x[mine], y[mine])
        name = kind.__name__
        for _ in range(2):  # compute() changes nothing
            assert close(name, metric.compute(), right[name]), name
    gauc = metrics.GAUC()
    gauc.update(x[mine], y[mine], g[mine])
    assert close("GAUC", gauc.compute(), right["GAUC"])
    for part in (mine, slice(0, 900) if rank == 0 else slice(0, 0)):
        tasks = metrics.TaskMetrics()
        if part.stop:  # else it has no update
            two = np.stack([x, -x], 1)[part], np.stack([y, 1 - y], 1)[part]
            tasks.update(*two, groups=g[part])
        tasks.gather()
        found = tasks.compute()
        assert found.samples == 900 and list(found.tasks) == ["0", "1"]
        for one in found.tasks.values():
            assert one.gauc is not None
            assert math.isclose(one.auc, right["AUC"], abs_tol=1e-6)
            assert math.isclose(one.gauc, right["GAUC"], abs_tol=1e-6)
    scores, relevance = x.reshape(30, 30), y.reshape(30, 30)
    queries = slice(0, 10) if rank == 0 else slice(10, 30)
    ndcg = metrics.NDCGAtK(7)
    ndcg.update(scores[queries], relevance[queries])
    assert close("", ndcg.compute(), ndcg_score(relevance, scores, k=7))
    recall = metrics.RecallAtK(7)
    if rank == 1:  # a rank without updates takes part
        recall.update(scores, relevance)
    alone = [by_loop_no_ties(s, r, 7) for s, r in zip(scores, relevance)]
    assert close("", recall.compute(), float(np.mean(alone)))
    torch.distributed.destroy_process_group()
    print("done")


def by_loop_no_ties(scores: np.ndarray, relevance: np.ndarray, k: int) -> Any:
    return relevance[np.argsort(-scores)[:k]].sum() / relevance.sum()


@pytest.mark.slow
def test_two_ranks_score_as_one() -> None:
    code = "from tests import test_metrics_streams as t; t.rank_of_two()"
    status, text = ranks(2, "-c", code)
    assert (status, text.count("done")) == (0, 2), text


@pytest.mark.parametrize(
    ("scale", "shift"), [(1.0, 0.0), (0.001, 0.0), (100.0, 0.0), (1.0, 100.0)]
)
def test_an_auc_of_coarse_bins_warns(scale: float, shift: float) -> None:
    x, y, _ = clicks(2000, 1)
    x = scale * x + shift
    metric = metrics.AUC()
    metric.update(x, y)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        auc = metric.compute()
    far = abs(auc - roc_auc_score(y, x)) > 0.01
    assert far == bool(found) == ((scale, shift) != (1.0, 0.0))


def test_equal_scores_are_no_matter_of_bins(recwarn: Any) -> None:
    metric = metrics.AUC()
    metric.update(np.zeros(100), np.arange(100) % 2)
    assert metric.compute() == 0.5
    assert not recwarn
