"""Metrics of rankings that follow a stream, over all ranks."""

from __future__ import annotations

from abc import abstractmethod

import numpy as np
import numpy.typing as npt
import torch

from persia import errors
from persia.base.check import whole
from persia.metrics.clicks import ratio
from persia.metrics.streams import SumMetric

Array = npt.NDArray[np.float64]
Values = torch.Tensor | npt.NDArray[np.floating]
Ids = torch.Tensor | npt.NDArray[np.integer]


class _AtK(SumMetric):
    """The mean of a score over all queries that have a relevant item."""

    _places = 2
    _binary: bool  # whether one item is as relevant as another

    def __init__(self, k: int) -> None:
        self.k = whole("k", k, 1, 2**31 - 1)
        super().__init__()

    def update(self, scores: Values, relevance: Values) -> None:
        """Adds some queries.

        Equal scores share their places: each counts with the mean of what
        the places would give.

        Args:
            scores: [q, n], of n items for each query.
            relevance: [q, n], 0 for an item that is not relevant, else how
                relevant it is, such as 1.

        Raises:
            ShapeError: they are not [q, n] both.
            InvalidArgument: a score is NaN, or a relevance below 0.
        """
        x, gain = _numpy(scores), _numpy(relevance).astype(np.float64)
        if x.ndim != 2 or x.shape != gain.shape:
            raise errors.ShapeError(
                f"{type(self).__name__}: scores {x.shape} and relevance "
                f"{gain.shape}; need [queries, items] both"
            )
        if np.isnan(x).any() or not (gain >= 0).all():
            raise errors.InvalidArgument(
                f"{type(self).__name__}: a score is NaN, or a relevance is "
                "below 0"
            )
        if self._binary:
            gain = (gain > 0).astype(np.float64)
        running = np.append(0.0, np.cumsum(self._discounts(x.shape[1])))
        counted = np.empty_like(gain)
        for row, out in zip(x, counted):
            ordered = np.sort(row)
            first = len(row) - np.searchsorted(ordered, row, "right")
            end = len(row) - np.searchsorted(ordered, row, "left")
            out[:] = (running[end] - running[first]) / (end - first)
        self._add((counted * gain).sum(1), gain)

    def update_ids(self, found: Ids, wanted: Ids) -> None:
        """Adds some queries whose items were searched for.

        Args:
            found: [q, m] ids, the best first, m at least k.
            wanted: the relevant ids, [q] or [q, w], each of relevance 1.

        Raises:
            ShapeError: another number of dimensions, queries or ids.
        """
        ids, right = _numpy(found), _numpy(wanted)
        right = right[:, None] if right.ndim == 1 else right
        if ids.ndim != 2 or right.ndim != 2 or len(ids) != len(right):
            raise errors.ShapeError(
                f"{type(self).__name__}: found {ids.shape} and wanted "
                f"{right.shape}; need [q, m] and [q] or [q, w]"
            )
        if ids.shape[1] < self.k:
            raise errors.ShapeError(
                f"{type(self).__name__}: {ids.shape[1]} ids were found for "
                f"each query, k is {self.k}; search for k"
            )
        hits = (ids[:, :, None] == right[:, None, :]).any(2)
        score = (hits * self._discounts(ids.shape[1])).sum(1)
        self._add(score, np.ones(right.shape))

    def _add(self, score: Array, gain: Array) -> None:
        best = self._best(gain)
        some = best > 0
        self._sums += (score[some] / best[some]).sum(), some.sum()

    def _of(self, sums: Array) -> float:
        return ratio(*sums)

    @abstractmethod
    def _discounts(self, n: int) -> Array:
        """What the n places of a ranking count."""

    @abstractmethod
    def _best(self, gain: Array) -> Array:
        """The denominator of each query, [q]."""


class RecallAtK(_AtK):
    """The share of the relevant items that are among the first k, mean over
    the queries that have any.

    Args:
        k: places of a ranking that count.
    """

    _binary = True

    def _discounts(self, n: int) -> Array:
        return (np.arange(n) < self.k).astype(np.float64)

    def _best(self, gain: Array) -> Array:
        return np.asarray(gain.sum(1))


class NDCGAtK(_AtK):
    """Discounted gain of the first k places over that of the best ranking
    (Järvelin and Kekäläinen, doi 10.1145/582415.582418), mean over the
    queries that have any relevant item. Place i, from 1, counts the relevance
    of its item over log2(i + 1).

    Args:
        k: places of a ranking that count.
    """

    _binary = False

    def _discounts(self, n: int) -> Array:
        counts = np.arange(n) < self.k
        return np.asarray(counts / np.log2(np.arange(n) + 2))

    def _best(self, gain: Array) -> Array:
        ordered = -np.sort(-gain, axis=1)
        return np.asarray((ordered * self._discounts(gain.shape[1])).sum(1))


def _numpy(values: Values | Ids) -> npt.NDArray[np.generic]:
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu()
        if values.dtype == torch.bfloat16:
            values = values.float()
        return np.asarray(values.numpy())
    return np.asarray(values)
