"""Metrics of click models: all of an evaluation at once, and the AUC of a
stream.

All take weights of the samples, as scikit-learn's ``sample_weight``: a sample
of weight 2 counts as two, one of weight 0 not at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from persia import errors
from persia.base.warning import warn

Values = torch.Tensor | npt.NDArray[np.floating]
Groups = torch.Tensor | npt.NDArray[np.integer]
Array = npt.NDArray[np.float64]
#: Scores of so many samples that lie in [0, 1] are probabilities.
_MANY = 20
_Part = tuple[
    npt.NDArray[np.float32],
    npt.NDArray[np.bool_],
    npt.NDArray[np.float32],
    npt.NDArray[np.int64],
]  # logits, labels, weights, groups


@dataclass(frozen=True)
class Scores:
    """How well logits of ``samples`` samples foretell their labels.

    ``samples`` and ``positives`` are numbers; in all others a sample counts
    by its weight, where there are weights. ``auc`` and ``normalized_entropy``
    are NaN where the labels are all equal (neither is defined there),
    ``calibration`` where there is no positive.

    Of several tasks, ``positives`` is the sum of those of the tasks, and all
    that follows it a mean over the tasks; ``tasks`` has the scores of each.
    """

    samples: int
    positives: int
    auc: float
    logloss: float
    """Mean cross entropy in nats."""
    normalized_entropy: float
    """Log loss over that of always answering the base rate; below 1 is
    better than knowing nothing but the rate."""
    calibration: float
    """Mean predicted probability over the base rate; 1 is unbiased."""
    gauc: float | None = None
    """As :class:`GAUC`; None where samples have no groups."""
    tasks: Mapping[str, Scores] = field(default_factory=dict)
    """Of each task, by its name; empty where there is one."""


def auc(
    scores: Values, labels: Values, weights: Values | None = None
) -> float:
    """Exact area under the ROC curve; equal scores count one half.

    Args:
        scores: [n], such as logits or probabilities; only their order
            matters.
        labels: [n] of 0 and 1.
        weights: [n] of the samples, 0 or more; None: all equal.

    Returns:
        The area, or NaN where all labels are equal.
    """
    return auc_of(*as_arrays(scores, labels, weights, "scores"))


def logloss(
    logits: Values, labels: Values, weights: Values | None = None
) -> float:
    """Mean cross entropy in nats.

    Args:
        logits: [n], scores before the sigmoid: ``torch.logit(p)`` of
            probabilities ``p``.
        labels: [n] of 0 and 1.
        weights: [n] of the samples, 0 or more; None: all equal.

    Warns:
        UserWarning: the logits look like probabilities.
    """
    return _logloss(*logit_arrays(logits, labels, weights))


class BinaryMetrics:
    """Keeps the logits and labels of an evaluation and scores them exactly.

    Memory: 9 bytes a sample, 17 with groups.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forgets all updates."""
        self._parts: list[_Part] = []

    def update(
        self,
        logits: Values,
        labels: Values,
        weights: Values | None = None,
        groups: Groups | None = None,
    ) -> None:
        """Adds one batch: logits [n], labels [n] and, where samples have
        them, weights [n] and groups [n], integers. All batches have groups,
        or none."""
        x, y, w = logit_arrays(logits, labels, weights)
        g = np.empty(0, np.int64)
        if groups is not None:
            g = groups_of(groups, len(x))
        part = x.astype(np.float32), y > 0.5, w.astype(np.float32), g
        self._parts.append(part)

    def gather(self) -> None:
        """Adds what the other ranks of the job have added; all call it."""
        world = torch.distributed.get_world_size()
        found: list[Any] = [None] * world
        torch.distributed.all_gather_object(found, self._joined())
        self._parts = found

    def compute(self) -> Scores:
        """The scores of everything added so far."""
        *values, g = self._joined()
        x, y, w = (part.astype(np.float64) for part in values)
        positive, all_of_it = (w * y).sum(), w.sum()
        loss = _logloss(x, y, w)
        return Scores(
            samples=len(y),
            positives=int(y.sum()),
            auc=auc_of(x, y, w),
            logloss=loss,
            normalized_entropy=ratio(loss, entropy_of(positive, all_of_it)),
            calibration=ratio((w * sigmoid(x)).sum(), positive),
            gauc=gauc_of(x, y, w, g) if len(g) else None,
        )

    def _joined(self) -> _Part:
        none = np.empty(0, np.float32)
        empty: _Part = none, none > 0, none, np.empty(0, np.int64)
        x, y, w, g = zip(empty, *self._parts, strict=True)
        groups = np.concatenate(g)
        if len(groups) not in (0, sum(map(len, x))):
            raise errors.ShapeError(
                "metrics: some batches have groups, others have none"
            )
        return np.concatenate(x), np.concatenate(y), np.concatenate(w), groups


class StreamingAUC:
    """AUC of a stream in constant memory, from two histograms of the scores.

    The scores in [-limit, limit] fall into ``bins`` equal bins, those outside
    into the first or the last.  A pair of one positive and one negative in the
    same bin counts one half, whatever its order; so the true AUC lies within
    ``error()`` of ``compute()``, where ``error()`` is half the share of such
    pairs: a bound, no estimate.  With the defaults a bin is 1/128
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
        self._counts = torch.zeros(2, bins, dtype=torch.float64)

    def reset(self) -> None:
        """Forgets all updates."""
        self._counts.zero_()

    def update(
        self,
        scores: torch.Tensor,
        labels: torch.Tensor,
        weights: torch.Tensor | None = None,
    ) -> None:
        """Adds one batch: float scores [n], such as logits (NaN is refused),
        labels [n] and, where samples have them, weights [n]."""
        x = scores.detach().reshape(-1).float()
        if bool(x.isnan().any()):
            raise errors.InvalidArgument("StreamingAUC: a score is NaN")
        bins = self._bins
        index = ((x + self._limit) * (bins / (2 * self._limit))).floor_()
        index = index.clamp_(0, bins - 1).long()
        index += (labels.reshape(-1) > 0.5).long() * bins
        if weights is not None:
            weights = weights.detach().reshape(-1).double().cpu()
        counts = torch.bincount(index.cpu(), weights, minlength=2 * bins)
        self._counts += counts.view(2, bins)

    def compute(self) -> float:
        """The AUC so far, within ``error()``; NaN if all labels are equal."""
        negative, positive = self._counts.numpy()
        return area_under(negative, positive)

    def error(self) -> float:
        """The most by which ``compute()`` can differ from the exact AUC."""
        negative, positive = self._counts.numpy()
        pairs = negative.sum() * positive.sum()
        return ratio(0.5 * (positive * negative).sum(), pairs)


def logit_arrays(
    logits: Values, labels: Values, weights: Values | None = None
) -> tuple[Array, Array, Array]:
    """As :func:`as_arrays`. Warns where the logits look like probabilities,
    whose sigmoids would be scored in silence."""
    x, y, w = as_arrays(logits, labels, weights)
    if len(x) >= _MANY and 0 <= x.min() < x.max() <= 1:
        warn(
            "metrics: all logits are in [0, 1], as probabilities are; logits "
            "are scores before the sigmoid: of probabilities p they are "
            "torch.logit(p)"
        )
    return x, y, w


def as_arrays(
    scores: Values,
    labels: Values,
    weights: Values | None = None,
    what: str = "logits",
) -> tuple[Array, Array, Array]:
    """float64 [n] each, checked; samples without weights have 1."""
    x, y = _array(scores), _array(labels)
    if x.shape != y.shape:
        raise errors.ShapeError(
            f"metrics: {len(x)} {what} but {len(y)} labels"
        )
    if np.isnan(x).any():
        raise errors.InvalidArgument(
            f"metrics: {int(np.isnan(x).sum())} {what} are NaN"
        )
    wrong = np.flatnonzero((y != 0) & (y != 1))
    if len(wrong):
        raise errors.InvalidArgument(
            f"metrics: label {wrong[0]} is {y[wrong[0]]:g}, need 0 or 1; "
            "make one of a rating by a threshold"
        )
    if weights is None:
        return x, y, np.ones_like(x)
    w = _array(weights)
    if w.shape != x.shape:
        raise errors.ShapeError(
            f"metrics: {len(x)} {what} but {len(w)} weights"
        )
    wrong = np.flatnonzero(~(np.isfinite(w) & (w >= 0)))
    if len(wrong):
        raise errors.InvalidArgument(
            f"metrics: weight {wrong[0]} is {w[wrong[0]]:g}, need a finite "
            "number of at least 0"
        )
    return x, y, w


def groups_of(groups: Groups, n: int) -> npt.NDArray[np.int64]:
    """int64 [n], checked."""
    if isinstance(groups, torch.Tensor):
        groups = groups.detach().cpu().numpy()
    g = np.asarray(groups).reshape(-1)
    if g.dtype.kind not in "iu":
        raise errors.DtypeError(
            f"metrics: groups of dtype {g.dtype}, need integers; "
            "persia.hash_ids makes them of strings"
        )
    if len(g) != n:
        raise errors.ShapeError(f"metrics: {n} logits but {len(g)} groups")
    return g.astype(np.int64)


def _array(values: Values) -> Array:
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu().double().numpy()
    return np.asarray(values, dtype=np.float64).reshape(-1)


def sigmoid(x: Array) -> Array:
    return np.asarray(0.5 * (1 + np.tanh(0.5 * x)))


def ratio(a: float, b: float) -> float:
    return float(a / b) if b else float("nan")


def cross_entropy(x: Array, y: Array, w: Array) -> float:
    """The weighted sum over all samples, in nats."""
    # Of the margin: x * y is no number where x is infinite and y is 0.
    each = np.logaddexp(0, np.where(y == 1, -x, x))
    # A sample without weight counts not at all, however wrong.
    return float((w * np.where(w > 0, each, 0.0)).sum())


def _logloss(x: Array, y: Array, w: Array) -> float:
    return ratio(cross_entropy(x, y, w), w.sum())


def entropy_of(positives: float, samples: float) -> float:
    """Of a label, in nats; 0 where all are equal."""
    if not 0 < positives < samples:
        return 0.0
    rate = positives / samples
    return float(-rate * np.log(rate) - (1 - rate) * np.log1p(-rate))


def auc_of(x: Array, y: Array, w: Array) -> float:
    order = np.argsort(x)
    x, y, w = x[order], y[order], w[order]
    starts = np.flatnonzero(np.append(True, x[1:] != x[:-1])[: len(x)])
    positive, negative = w * y, w * (1 - y)
    if len(x):
        positive = np.add.reduceat(positive, starts)
        negative = np.add.reduceat(negative, starts)
    return area_under(negative, positive)


def area_under(negative: Array, positive: Array) -> float:
    """The statistic of Mann and Whitney, from the negatives and positives
    of each distinct score, in ascending order."""
    below = np.cumsum(negative) - negative
    area = (positive * (below + 0.5 * negative)).sum()
    return ratio(area, negative.sum() * positive.sum())


def gauc_of(
    x: Array, y: Array, w: Array, groups: npt.NDArray[np.int64]
) -> float:
    """The mean of the AUCs of the groups that have both labels, weighted by
    their samples."""
    if not len(x):
        return float("nan")
    order = np.lexsort((x, groups))
    x, y, w, groups = x[order], y[order], w[order], groups[order]
    new = np.append(True, groups[1:] != groups[:-1])  # a group begins
    scores = np.flatnonzero(new | np.append(True, x[1:] != x[:-1]))
    begins = np.flatnonzero(new[scores])  # of each group, its first score
    positive = np.add.reduceat(w * y, scores)
    negative = np.add.reduceat(w * (1 - y), scores)
    below = np.cumsum(negative) - negative
    counts = np.diff(np.append(begins, len(scores)))
    below -= np.repeat(below[begins], counts)
    area = np.add.reduceat(positive * (below + 0.5 * negative), begins)
    positive = np.add.reduceat(positive, begins)
    negative = np.add.reduceat(negative, begins)
    both = (positive > 0) & (negative > 0)
    weights = (positive + negative)[both]
    area = area[both] / (positive * negative)[both]
    return ratio((weights * area).sum(), weights.sum())
