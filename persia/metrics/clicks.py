"""Metrics of click models: all of an evaluation at once, and the AUC of a
stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from persia import errors

__all__ = ["BinaryMetrics", "Scores", "StreamingAUC", "auc", "logloss"]

Values = torch.Tensor | npt.NDArray[np.floating]
Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Scores:
    """How well logits of ``rows`` samples foretell their labels.

    ``auc`` and ``normalized_entropy`` are NaN where the labels are all equal
    (neither is defined there), ``calibration`` where there is no positive.
    """

    rows: int
    positives: int
    auc: float
    logloss: float
    """Mean cross entropy in nats."""
    normalized_entropy: float
    """Log loss over that of always answering the base rate; below 1 is
    better than knowing nothing but the rate."""
    calibration: float
    """Mean predicted probability over the base rate; 1 is unbiased."""


def auc(logits: Values, labels: Values) -> float:
    """Exact area under the ROC curve; equal scores count one half.

    Args:
        logits: [n] scores; only their order matters.
        labels: [n] of 0 and 1.

    Returns:
        The area, or NaN where all labels are equal.
    """
    x, y = as_arrays(logits, labels)
    return auc_of(x, y)


def logloss(logits: Values, labels: Values) -> float:
    """Mean cross entropy in nats of the sigmoids of [n] logits."""
    x, y = as_arrays(logits, labels)
    return _logloss(x, y)


class BinaryMetrics:
    """Keeps the logits and labels of an evaluation and scores them exactly.

    Memory: 5 bytes a sample.
    """

    def __init__(self) -> None:
        self._logits: list[npt.NDArray[np.float32]] = []
        self._labels: list[npt.NDArray[np.bool_]] = []

    def reset(self) -> None:
        """Forgets all updates."""
        self._logits, self._labels = [], []

    def update(self, logits: Values, labels: Values) -> None:
        """Adds one batch: logits [n] and labels [n]."""
        x, y = as_arrays(logits, labels)
        self._logits.append(x.astype(np.float32))
        self._labels.append(y > 0.5)

    def gather(self) -> None:
        """Adds what the other ranks of the job have added; all call it."""
        mine = (
            np.concatenate([np.empty(0, np.float32), *self._logits]),
            np.concatenate([np.empty(0, np.bool_), *self._labels]),
        )
        world = torch.distributed.get_world_size()
        found: list[Any] = [None] * world
        torch.distributed.all_gather_object(found, mine)
        self._logits = [logits for logits, _ in found]
        self._labels = [labels for _, labels in found]

    def compute(self) -> Scores:
        """The scores of everything added so far."""
        x = np.concatenate([np.empty(0, np.float32), *self._logits])
        y = np.concatenate([np.empty(0, np.bool_), *self._labels])
        x, y = x.astype(np.float64), y.astype(np.float64)
        rows, positives = len(y), int(y.sum())
        loss = _logloss(x, y)
        return Scores(
            rows=rows,
            positives=positives,
            auc=auc_of(x, y),
            logloss=loss,
            normalized_entropy=ratio(loss, entropy_of(positives, rows)),
            calibration=ratio(sigmoid(x).sum(), positives),
        )


class StreamingAUC:
    """AUC of a stream in constant memory, from two histograms of the logits.

    The logits in [-limit, limit] fall into ``bins`` equal bins, those outside
    into the first or the last.  A pair of one positive and one negative in the
    same bin counts one half, whatever its order; so the true AUC lies within
    ``error()`` of ``compute()``, where ``error()`` is half the share of such
    pairs: a bound, no estimate.  With the defaults a bin is 1/128 of a logit
    wide, and the bound is about 0.001 for logits of unit variance.
    """

    def __init__(self, bins: int = 4096, limit: float = 16.0) -> None:
        if bins < 2 or not limit > 0:
            raise errors.InvalidArgument(
                f"StreamingAUC(bins={bins}, limit={limit}): bins must be at "
                "least 2 and limit positive"
            )
        self._bins = bins
        self._limit = limit
        self._counts = torch.zeros(2, bins, dtype=torch.int64)

    def reset(self) -> None:
        """Forgets all updates."""
        self._counts.zero_()

    def update(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        """Adds one batch: float logits [n] (NaN is refused) and labels [n]."""
        x = logits.detach().reshape(-1).float()
        if bool(x.isnan().any()):
            raise errors.InvalidArgument("StreamingAUC: a logit is NaN")
        bins = self._bins
        index = ((x + self._limit) * (bins / (2 * self._limit))).floor_()
        index = index.clamp_(0, bins - 1).long()
        index += (labels.reshape(-1) > 0.5).long() * bins
        counts = torch.bincount(index.cpu(), minlength=2 * bins)
        self._counts += counts.view(2, bins)

    def compute(self) -> float:
        """The AUC so far, within ``error()``; NaN if all labels are equal."""
        negative, positive = self._counts.double().numpy()
        return area_under(negative, positive)

    def error(self) -> float:
        """The most by which ``compute()`` can differ from the exact AUC."""
        negative, positive = self._counts.double().numpy()
        pairs = negative.sum() * positive.sum()
        return ratio(0.5 * (positive * negative).sum(), pairs)


def as_arrays(logits: Values, labels: Values) -> tuple[Array, Array]:
    x, y = _array(logits), _array(labels)
    if x.shape != y.shape:
        raise errors.ShapeError(
            f"metrics: {len(x)} logits but {len(y)} labels"
        )
    if np.isnan(x).any():
        raise errors.InvalidArgument(
            f"metrics: {int(np.isnan(x).sum())} logits are NaN"
        )
    wrong = np.flatnonzero((y != 0) & (y != 1))
    if len(wrong):
        raise errors.InvalidArgument(
            f"metrics: label {wrong[0]} is {y[wrong[0]]:g}, need 0 or 1; "
            "make one of a rating by a threshold"
        )
    return x, y


def _array(values: Values) -> Array:
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu().double().numpy()
    return np.asarray(values, dtype=np.float64).reshape(-1)


def sigmoid(x: Array) -> Array:
    return np.asarray(0.5 * (1 + np.tanh(0.5 * x)))


def ratio(a: float, b: float) -> float:
    return float(a / b) if b else float("nan")


def cross_entropy(x: Array, y: Array) -> float:
    """The sum over all samples, in nats."""
    # Of the margin: x * y is no number where x is infinite and y is 0.
    return float(np.logaddexp(0, np.where(y == 1, -x, x)).sum())


def _logloss(x: Array, y: Array) -> float:
    return ratio(cross_entropy(x, y), len(x))


def entropy_of(positives: float, rows: float) -> float:
    """Of a label, in nats; 0 where all are equal."""
    if not 0 < positives < rows:
        return 0.0
    rate = positives / rows
    return float(-rate * np.log(rate) - (1 - rate) * np.log1p(-rate))


def auc_of(x: Array, y: Array) -> float:
    order = np.argsort(x)
    x, y = x[order], y[order]
    starts = np.flatnonzero(np.append(True, x[1:] != x[:-1])[: len(x)])
    positive = np.add.reduceat(y, starts) if len(x) else y
    negative = np.add.reduceat(1 - y, starts) if len(x) else y
    return area_under(negative, positive)


def area_under(negative: Array, positive: Array) -> float:
    """The statistic of Mann and Whitney, from the negatives and positives
    of each distinct score, in ascending order."""
    below = np.cumsum(negative) - negative
    area = (positive * (below + 0.5 * negative)).sum()
    return ratio(area, negative.sum() * positive.sum())
