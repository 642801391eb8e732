"""Samples in memory, as columns of numbers and ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from persia.data.jagged import Batch, JaggedBatch

__all__ = ["Bags", "Rows"]

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Order = slice | Ints


@dataclass(frozen=True)
class Bags:
    """A feature of any number of ids a sample: those of sample i are
    values[offsets[i] : offsets[i + 1]]."""

    values: Ints
    offsets: Ints  # [n + 1]

    def take(self, order: Order) -> Bags:
        starts, ends = self.offsets[:-1][order], self.offsets[1:][order]
        if isinstance(order, slice):
            if len(starts) == 0:
                return Bags(self.values[:0], np.zeros(1, np.int64))
            a, b = int(starts[0]), int(ends[-1])
            at = self.offsets[order.start : order.start + len(starts) + 1]
            return Bags(self.values[a:b], at - a)
        return gather(self.values, starts, ends - starts)

    @property
    def lengths(self) -> Ints:
        return np.diff(self.offsets)


def running(lengths: Ints) -> Ints:
    """Where each of some lists begins, and where the last one ends."""
    out = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=out[1:])
    return out


def gather(values: Ints, starts: Ints, lengths: Ints) -> Bags:
    """Bags of the given parts of values."""
    offsets = running(lengths)
    at = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], lengths)
    return Bags(values[at], offsets)


@dataclass(frozen=True)
class Rows:
    """n samples.

    Attributes:
        singles: ids of the features of one id a sample, int64 [S, n].
        bags: the other features.
        dense: float32 [n, D], or None; so are label and weight [n].
        timestamp: float64 [n], seconds since 1970, or None.
    """

    singles: Ints
    bags: list[Bags]
    dense: Floats | None = None
    label: Floats | None = None
    weight: Floats | None = None
    timestamp: npt.NDArray[np.float64] | None = None

    def __len__(self) -> int:
        if self.bags and not len(self.singles):
            return len(self.bags[0].offsets) - 1
        return int(self.singles.shape[1])

    def take(self, order: Order) -> Rows:
        """Some of the rows: a slice (from start to stop), or their places."""

        def part(array: Any) -> Any:
            return None if array is None else array[order]

        return Rows(
            self.singles[:, order],
            [bag.take(order) for bag in self.bags],
            part(self.dense),
            part(self.label),
            part(self.weight),
            part(self.timestamp),
        )

    @staticmethod
    def join(parts: Sequence[Rows]) -> Rows:
        """The rows of all parts, of which there is one at least."""
        if len(parts) == 1:
            return parts[0]

        def joined(name: str) -> Any:
            arrays = [getattr(p, name) for p in parts]
            return None if arrays[0] is None else np.concatenate(arrays)

        bags = []
        for many in zip(*(p.bags for p in parts), strict=True):
            lengths = np.concatenate([bag.lengths for bag in many])
            values = np.concatenate([bag.values for bag in many])
            bags.append(Bags(values, running(lengths)))
        return Rows(
            np.concatenate([p.singles for p in parts], 1),
            bags,
            **{n: joined(n) for n in ("dense", "label", "weight")},
            timestamp=joined("timestamp"),
        )

    def batch(self, keys: list[str]) -> Batch:
        """The rows as a batch; its memory is shared where it can be."""
        values = [self.singles.reshape(-1)]
        lengths = None
        if self.bags:
            values += [bag.values for bag in self.bags]
            ones = np.ones(self.singles.size, np.int64)
            lengths = torch.from_numpy(
                np.concatenate([ones, *(bag.lengths for bag in self.bags)])
            )
        ids = values[0] if len(values) == 1 else np.concatenate(values)

        def tensor(array: Any) -> torch.Tensor | None:
            if array is None:
                return None
            return torch.from_numpy(np.ascontiguousarray(array))

        return Batch(
            tensor(self.dense),
            JaggedBatch(keys, torch.from_numpy(ids), lengths),
            tensor(self.label),
            weight=tensor(self.weight),
            timestamp=tensor(self.timestamp),
        )
