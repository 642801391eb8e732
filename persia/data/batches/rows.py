"""Samples in memory, as columns of numbers and ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from persia.data.batches.batch import Batch
from persia.data.batches.jagged import JaggedBatch

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Array = npt.NDArray[Any]
Order = slice | Ints


@dataclass(frozen=True)
class Bags:
    """A feature of any number of ids a sample: those of sample i are
    values[offsets[i] : offsets[i + 1]].

    Attributes:
        values: int64 [m].
        offsets: int64 [n + 1].
        aligned: arrays [m, ...] by name, with an entry for each id.
    """

    values: Ints
    offsets: Ints
    aligned: Mapping[str, Array] = field(default_factory=dict)

    def take(self, order: Order) -> Bags:
        starts, ends = self.offsets[:-1][order], self.offsets[1:][order]
        if not isinstance(order, slice):
            return self.gather(starts, ends - starts)
        if len(starts) == 0:
            return self._of(slice(0, 0), np.zeros(1, np.int64))
        a, b = int(starts[0]), int(ends[-1])
        at = self.offsets[order.start : order.start + len(starts) + 1]
        return self._of(slice(a, b), at - a)

    def gather(self, starts: Ints, lengths: Ints) -> Bags:
        """Bags of the given parts of the values."""
        offsets = running(lengths)
        at = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], lengths)
        return self._of(at, offsets)

    def _of(self, at: Order, offsets: Ints) -> Bags:
        aligned = {name: array[at] for name, array in self.aligned.items()}
        return Bags(self.values[at], offsets, aligned)

    @property
    def lengths(self) -> Ints:
        return np.diff(self.offsets)

    @staticmethod
    def join(parts: Sequence[Bags]) -> Bags:
        """The bags of all parts, of which there is one at least."""
        return Bags(
            np.concatenate([bag.values for bag in parts]),
            running(np.concatenate([bag.lengths for bag in parts])),
            {
                name: np.concatenate([bag.aligned[name] for bag in parts])
                for name in parts[0].aligned
            },
        )


def running(lengths: Ints) -> Ints:
    """Where each of some lists begins, and where the last one ends."""
    out = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=out[1:])
    return out


@dataclass(frozen=True)
class Rows:
    """n samples.

    Attributes:
        singles: ids of the features of one id a sample, int64 [S, n].
        bags: the other features.
        tensors: arrays [n, ...] by the names of the tensors of a batch.
    """

    singles: Ints
    bags: list[Bags]
    tensors: Mapping[str, Array] = field(default_factory=dict)

    def __len__(self) -> int:
        if self.bags and not len(self.singles):
            return len(self.bags[0].offsets) - 1
        return int(self.singles.shape[1])

    @property
    def labels(self) -> list[Array]:
        """The labels [n] of each task."""
        label = self.tensors["label"]
        return [label] if label.ndim == 1 else list(label.T)

    def take(self, order: Order) -> Rows:
        """Some of the rows: a slice (from start to stop), or their places."""
        return Rows(
            self.singles[:, order],
            [bag.take(order) for bag in self.bags],
            {name: array[order] for name, array in self.tensors.items()},
        )

    @staticmethod
    def join(parts: Sequence[Rows]) -> Rows:
        """The rows of all parts, of which there is one at least."""
        if len(parts) == 1:
            return parts[0]
        return Rows(
            np.concatenate([p.singles for p in parts], 1),
            [
                Bags.join(many)
                for many in zip(*(p.bags for p in parts), strict=True)
            ],
            {
                name: np.concatenate([p.tensors[name] for p in parts])
                for name in parts[0].tensors
            },
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
        names = keys[len(self.singles) :]
        return Batch(
            ids=JaggedBatch(keys, torch.from_numpy(ids), lengths),
            tensors=_tensors(self.tensors),
            aligned={
                name: _tensors(bag.aligned)
                for name, bag in zip(names, self.bags, strict=True)
                if bag.aligned
            },
        )


def _tensors(arrays: Mapping[str, Array]) -> dict[str, torch.Tensor]:
    return {
        name: torch.from_numpy(np.ascontiguousarray(array))
        for name, array in arrays.items()
    }
