"""Metrics of clicks that follow a stream, over all ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from persia.base.warning import warn
from persia.distributed.ranks import all_sum, group_here
from persia.metrics.clicks import (
    Groups,
    StreamingAUC,
    Values,
    area_under,
    as_arrays,
    cross_entropy,
    entropy_of,
    gauc_of,
    groups_of,
    logit_arrays,
    ratio,
    sigmoid,
)

Array = npt.NDArray[np.float64]
_COARSE = 0.01  # error of an AUC


class Metric(ABC):
    """What follows a stream of batches and gives one number."""

    @abstractmethod
    def compute(self) -> float:
        """Of all updates since the last reset, of all ranks together; NaN
        where it is not defined. All ranks call it."""

    @abstractmethod
    def reset(self) -> None:
        """Forgets all updates."""


class SumMetric(Metric):
    """A metric that is a function of sums over the samples."""

    _places: int

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forgets all updates."""
        self._sums = np.zeros(self._places)

    def compute(self) -> float:
        """Of all updates since the last reset, of all ranks together; NaN
        where it is not defined. All ranks call it."""
        return self._of(_over_ranks(self._sums))

    @abstractmethod
    def _of(self, sums: Array) -> float:
        """The metric of the sums of all ranks."""


class LogLoss(SumMetric):
    """Mean cross entropy in nats of the sigmoids of the logits."""

    _places = 2

    def update(
        self, logits: Values, labels: Values, weights: Values | None = None
    ) -> None:
        """Adds one batch: logits [n], labels [n], weights [n] or None."""
        x, y, w = logit_arrays(logits, labels, weights)
        self._sums += cross_entropy(x, y, w), w.sum()

    def _of(self, sums: Array) -> float:
        return ratio(*sums)


class NormalizedEntropy(SumMetric):
    """Log loss over that of always answering the base rate (He et al., doi
    10.1145/2648584.2648589); below 1 is better than knowing but the rate."""

    _places = 3

    def update(
        self, logits: Values, labels: Values, weights: Values | None = None
    ) -> None:
        """Adds one batch: logits [n], labels [n], weights [n] or None."""
        x, y, w = logit_arrays(logits, labels, weights)
        self._sums += cross_entropy(x, y, w), (w * y).sum(), w.sum()

    def _of(self, sums: Array) -> float:
        loss, positives, n = sums
        return ratio(loss / n if n else 0.0, entropy_of(positives, n))


class Calibration(SumMetric):
    """Mean predicted probability over the base rate; 1 is unbiased."""

    _places = 2

    def update(
        self, logits: Values, labels: Values, weights: Values | None = None
    ) -> None:
        """Adds one batch: logits [n], labels [n], weights [n] or None."""
        x, y, w = logit_arrays(logits, labels, weights)
        self._sums += (w * sigmoid(x)).sum(), (w * y).sum()

    def _of(self, sums: Array) -> float:
        return ratio(*sums)


class AUC(Metric):
    """Area under the ROC curve in constant memory.

    It is that of :class:`StreamingAUC`, over all ranks: within ``error()`` of
    the exact one. It warns where that is more than 0.01, as where all
    probabilities are near 0.

    Args:
        bins, limit: see :class:`StreamingAUC`.
    """

    def __init__(self, bins: int = 4096, limit: float = 16.0) -> None:
        self._stream = StreamingAUC(bins, limit)
        self._least, self._most = np.inf, -np.inf

    def update(
        self, scores: Values, labels: Values, weights: Values | None = None
    ) -> None:
        """Adds one batch: scores [n], labels [n], weights [n] or None."""
        arrays = as_arrays(scores, labels, weights, "scores")
        self._least = arrays[0].min(initial=self._least)
        self._most = arrays[0].max(initial=self._most)
        self._stream.update(*map(torch.from_numpy, arrays))

    def compute(self) -> float:
        """Of all updates since the last reset, of all ranks together; NaN
        where all labels are equal. All ranks call it."""
        counts = self._counts()
        error = _error_of(counts)
        if error > _COARSE and self._least < self._most:
            warn(
                f"AUC: the exact one may differ by {error:.2g}, as most "
                f"scores, of {self._least:g} to {self._most:g}, are in few "
                "bins; give logits, another limit=, or more bins="
            )
        return area_under(*counts)

    def error(self) -> float:
        """The most by which ``compute()`` can differ from the exact AUC. All
        ranks call it."""
        return _error_of(self._counts())

    def reset(self) -> None:
        """Forgets all updates."""
        self._stream.reset()
        self._least, self._most = np.inf, -np.inf

    def _counts(self) -> Array:
        counts = self._stream._counts.numpy()
        return _over_ranks(counts.reshape(-1)).reshape(2, -1)


def _error_of(counts: Array) -> float:
    negative, positive = counts
    pairs = negative.sum() * positive.sum()
    return ratio(0.5 * (positive * negative).sum(), pairs)


class GAUC(Metric):
    """Mean of the exact AUCs of groups, such as users, weighted by their
    samples (Zhou et al., arXiv 1706.06978), by the sum of their weights where
    samples have any; groups whose labels are all equal have none and are left
    out.

    Memory: 25 bytes a sample, on each rank at ``compute()`` those of all
    ranks.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forgets all updates."""
        self._parts: list[tuple[Any, ...]] = []

    def update(
        self,
        scores: Values,
        labels: Values,
        groups: Groups,
        weights: Values | None = None,
    ) -> None:
        """Adds one batch: scores [n], labels [n], groups [n], integers, and
        weights [n] or None."""
        x, y, w = as_arrays(scores, labels, weights, "scores")
        self._parts.append((x, y > 0.5, w, groups_of(groups, len(x))))

    def compute(self) -> float:
        """Of all updates since the last reset, of all ranks together; NaN
        where no group has both labels. All ranks call it."""
        none = np.empty(0)
        empty = (none, none > 0, none, np.empty(0, np.int64))
        mine = tuple(map(np.concatenate, zip(empty, *self._parts)))
        parts = [mine]
        if (group := group_here()) is not None:
            parts = [()] * group.get_world_size()
            group.all_gather_object(parts, mine)
        x, y, w, g = (np.concatenate(part) for part in zip(*parts))
        return gauc_of(x, y.astype(np.float64), w, g)


def _over_ranks(sums: Array) -> Array:
    """The sums of all ranks, where there are several."""
    if group_here() is None:
        return sums
    return np.asarray(all_sum(sums.tolist()))
