"""Click logs made to order, with a model planted in them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from persia import _core
from persia.base.check import number, whole
from persia.data.base import Dataset
from persia.data.batches.batch import Batch
from persia.data.batches.jagged import JaggedBatch
from persia.metrics import auc

# Test rows begin here, far from any training row, and are the same ones
# whatever the number of training rows.
TEST_START = 1 << 40


class SyntheticCTR(Dataset):
    """A click log of any size, made while it is read.

    Each row is a function of (seed, its number) and of the options below;
    so any batch size gives the same rows, and ranges of rows are as good as
    files. Ids follow Zipf's law and are scattered over 64 bits. A planted
    model decides the clicks: effects of the ids, products of pairs of ids,
    and a function of the dense features. Its own AUC, the best that any model
    can expect, is about 0.80 with the default options.

    Args:
        samples: number of samples.
        batch_size: samples of a batch.
        seed: decides rows, ids and the planted model, 0 to 2**64 - 1.
        singles: features ``C1``, ``C2``, ... with one id a sample.
        multis: features ``M1``, ... with 0 to ``max_length`` ids a sample.
        max_length: most ids of a multi-valued feature.
        dense: dense features ``I1``, ..., about standard normal.
        vocabulary: ids of each single-valued feature; a multi-valued one
            has a tenth of them.
        zipf: the k-th most frequent id has probability ~ k ** -zipf.
        ctr: about the share of clicks.
        signal: standard deviation of the planted logit; it sets the AUC.
        start: number of the first row.
        drop_last: leave out a last batch that is smaller.
        rank, world_size: take every world_size-th batch.

    Raises:
        InvalidArgument: an option out of its range.
    """

    def __init__(
        self,
        samples: int,
        batch_size: int = 1024,
        seed: int = 0,
        *,
        singles: int = 26,
        multis: int = 2,
        max_length: int = 7,
        dense: int = 13,
        vocabulary: int = 10_000,
        zipf: float = 1.05,
        ctr: float = 0.25,
        signal: float = 1.35,
        start: int = 0,
        drop_last: bool = False,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        super().__init__(
            batch_size,
            seed=seed,
            drop_last=drop_last,
            rank=rank,
            world_size=world_size,
        )
        start = whole("start", start, 0, 2**63 - 1)
        samples = whole("samples", samples, 0, 2**63 - 1 - start)
        for name, count in [
            ("singles", singles),
            ("multis", multis),
            ("max_length", max_length),
            ("dense", dense),
            ("vocabulary", vocabulary),
        ]:
            whole(name, count, 0, 2**32 - 1)
        for name, value in [("zipf", zipf), ("ctr", ctr), ("signal", signal)]:
            number(name, value, 0)  # their ranges the core knows
        self.samples = samples
        self.start = start
        self.keys = [f"C{i + 1}" for i in range(singles)]
        self.keys += [f"M{i + 1}" for i in range(multis)]
        self.dense_names = [f"I{i + 1}" for i in range(dense)]
        self._options: dict[str, Any] = {
            "singles": singles,
            "multis": multis,
            "max_length": max_length,
            "dense": dense,
            "vocabulary": vocabulary,
            "zipf": zipf,
            "ctr": ctr,
            "signal": signal,
        }
        self._synth = _core.Synth(seed=seed, **self._options)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_synth": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._synth = _core.Synth(seed=self.seed, **self._options)

    def __len__(self) -> int:
        """The number of batches."""
        rank, world = self.rank, self.world_size
        full = self.samples // self.batch_size
        if not self.drop_last and self.samples % self.batch_size:
            full += 1
        return len(range(rank, full, world))

    def test(self, samples: int = 200_000) -> SyntheticCTR:
        """Other samples of the same log, to test on.

        They begin at row 2**40: the same ones for any number of training
        rows.
        """
        return SyntheticCTR(
            samples,
            self.batch_size,
            self.seed,
            start=TEST_START,
            drop_last=self.drop_last,
            rank=self.rank,
            world_size=self.world_size,
            **self._options,
        )

    def _batches(self, shard: int, shards: int) -> Iterator[Batch]:
        for first in range(
            shard * self.batch_size, self.samples, shards * self.batch_size
        ):
            n = min(self.batch_size, self.samples - first)
            if n == self.batch_size or not self.drop_last:
                yield self._read(self.start + first, n, None)

    def _read(
        self, first: int, n: int, logit: npt.NDArray[np.float32] | None
    ) -> Batch:
        synth = self._synth
        label = np.empty(n, np.float32)
        dense = np.empty((n, len(self.dense_names)), np.float32)
        ids = np.empty(synth.ids_room(n), np.int64)
        lengths = np.empty(len(self.keys) * n, np.int64)
        used = synth.read(first, n, label, logit, dense, ids, lengths)
        single = self._options["multis"] == 0
        return Batch(
            torch.from_numpy(dense) if dense.shape[1] else None,
            JaggedBatch(
                self.keys,
                torch.from_numpy(ids[:used]),
                None if single else torch.from_numpy(lengths),
            ),
            torch.from_numpy(label),
        )

    def _planted(self) -> tuple[torch.Tensor, torch.Tensor]:
        logits = np.empty(self.samples, np.float32)
        labels = np.empty(self.samples, np.float32)
        for first in range(0, self.samples, 1 << 14):
            part = slice(first, min(first + (1 << 14), self.samples))
            n = part.stop - first
            batch = self._read(self.start + first, n, logits[part])
            assert batch.label is not None
            labels[part] = batch.label.numpy()
        return torch.from_numpy(logits), torch.from_numpy(labels)

    def planted_logits(self) -> torch.Tensor:
        """The planted model's logits of all samples in order, float32
        [samples]."""
        return self._planted()[0]

    def planted_auc(self) -> float:
        """AUC of the planted model here; NaN without both labels."""
        return auc(*self._planted())
