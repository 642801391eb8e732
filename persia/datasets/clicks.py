"""Clicks over time, made while they are read: ids of any number, of which
some are replaced in each window."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from persia import errors
from persia.base.check import number, whole
from persia.data.base import Dataset
from persia.data.batches.batch import Batch
from persia.data.batches.jagged import JaggedBatch
from persia.metrics import auc

BEGIN = 1_704_067_200.0  # the first row's time: 2024-01-01 in UTC

Words = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
# Which of several independent numbers a hash is for.
_LENGTH, _DENSE, _LABEL, _PHASE, _EFFECT = range(1, 6)
_CODES = {"T": 10**12, "B": 10**9, "G": 10**9, "M": 10**6, "": 1}


class ClickStream(Dataset):
    """A click log in time order, of any number of ids.

    Row r is a function of (seed, r) and of the options. Ids follow Zipf's
    law. A window is a span of time, such as a day; with ``churn`` this share
    of the ids is replaced by new ones from each window to the next, as items
    and users are. Each id has an effect on the clicks that never changes.

    A batch has ``dense`` float32 [B, dense], ``ids``, ``label`` float32 [B]
    and ``timestamp`` float64 [B].

    Args:
        samples: number of samples.
        batch_size: samples of a batch; the last one may have fewer.
        seed: random seed, 0 to 2**64 - 1.
        features: features ``C1``, ... with one id a sample.
        lists: features ``L1``, ... with 0 to ``max_length`` ids a sample.
        max_length: most ids of a list.
        dense: dense features ``I1``, ...
        vocabulary: ids of a feature at any time, 1 to 2**60.
        zipf: the k-th most frequent id has probability ~ k ** -zipf; above 0
            and not 1.
        churn: share of the ids that is new in each window, 0 to 1.
        window_samples: samples of a window.
        window: seconds of a window.
        ctr: about the share of clicks.
        signal: standard deviation of the logit that decides the clicks.
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
        features: int = 8,
        lists: int = 0,
        max_length: int = 20,
        dense: int = 0,
        vocabulary: int = 10_000,
        zipf: float = 1.05,
        churn: float = 0.0,
        window_samples: int = 100_000,
        window: float = 86_400.0,
        ctr: float = 0.25,
        signal: float = 1.5,
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
        self.samples = whole("samples", samples, 0, 2**62)
        self.start = whole("start", start, 0, 2**62)
        self.features = whole("features", features, 1, 1024)
        self.lists = whole("lists", lists, 0, 1024)
        self.max_length = whole("max_length", max_length, 1, 1 << 16)
        self.vocabulary = whole("vocabulary", vocabulary, 1, 2**60)
        self.window_samples = whole("window_samples", window_samples, 1, 2**62)
        self.window = number("window", window, 1e-9, 1e9)
        self.zipf = number("zipf", zipf, 1e-3, 10)
        self.churn = number("churn", churn, 0, 1)
        self.ctr = number("ctr", ctr, 1e-6, 1 - 1e-6)
        self.signal = number("signal", signal, 0, 100)
        if self.zipf == 1:
            raise errors.InvalidArgument("zipf is 1; need another exponent")
        self.keys = [f"C{i + 1}" for i in range(features)]
        self.keys += [f"L{i + 1}" for i in range(lists)]
        dense = whole("dense", dense, 0, 1024)
        self.dense_names = [f"I{i + 1}" for i in range(dense)]
        self._salt = _mix(np.array([seed], np.uint64))

    def __len__(self) -> int:
        """The number of batches."""
        full, rest = divmod(self.samples, self.batch_size)
        full += bool(rest) and not self.drop_last
        return len(range(self.rank, full, self.world_size))

    def __repr__(self) -> str:
        return (
            f"ClickStream(samples={self.samples}, features={len(self.keys)}, "
            f"vocabulary={self.vocabulary}, churn={self.churn}, "
            f"batch_size={self.batch_size})"
        )

    def test(self, samples: int = 200_000) -> ClickStream:
        """The samples that follow in time, to test on."""
        return self._range(self.start + self.samples, samples)

    def in_window(self, number: int) -> ClickStream:
        """The samples of one window."""
        return self._range(number * self.window_samples, self.window_samples)

    def _range(self, start: int, samples: int) -> ClickStream:
        part = copy.copy(self)
        part.forget_position()
        part.start, part.samples = start, samples
        return part

    def planted_auc(self) -> float:
        """The AUC of the effects that decided the clicks: the best that a
        model can reach."""
        logits, labels = [], []
        for first in range(0, self.samples, 1 << 14):
            n = min(1 << 14, self.samples - first)
            batch, logit = self._make(self.start + first, n)
            assert batch.label is not None
            labels.append(batch.label)
            logits.append(torch.from_numpy(logit))
        if not labels:
            return float("nan")
        return auc(torch.cat(logits), torch.cat(labels))

    def _batches(self, shard: int, shards: int) -> Iterator[Batch]:
        for batch, _ in self._batches_from(shard, shards, 0, None):
            yield batch

    def _batches_from(
        self, shard: int, shards: int, begin: int, at: Any
    ) -> Iterator[tuple[Batch, Any]]:
        size = self.batch_size
        first = (begin * shards + shard) * size
        for low in range(first, self.samples, shards * size):
            n = min(size, self.samples - low)
            if n == size or not self.drop_last:
                yield self._make(self.start + low, n)[0], None

    # ---- rows

    def _make(self, first: int, n: int) -> tuple[Batch, Floats]:
        """n samples, and the logits that decided their clicks."""
        rows = np.arange(first, first + n, dtype=np.uint64)
        key = _mix(rows * _GOLDEN + self._salt)
        now = rows.astype(np.float64) / self.window_samples
        columns, effects = [], []
        for f in range(self.features):
            ids, effect = self._ids(_mix(key + np.uint64(100 + f)), f, now)
            columns.append(ids)
            effects.append(effect)
        lengths = []
        for j in range(self.lists):
            ids, effect, length = self._bags(key, j, now)
            columns.append(ids)
            effects.append(effect)
            lengths.append(length)
        dense = np.empty((n, len(self.dense_names)), np.float32)
        for j in range(dense.shape[1]):
            value = _normal(_mix(key + np.uint64((_DENSE << 32) + j)))
            dense[:, j] = value
            effects.append(value)
        logit = np.log(self.ctr / (1 - self.ctr)) + self.signal * (
            np.sum(effects, 0) / np.sqrt(len(effects))
        )
        chance = _uniform(_mix(key + np.uint64(_LABEL << 32)))
        label = (chance < 1 / (1 + np.exp(-logit))).astype(np.float32)
        ones = np.ones(self.features * n, np.int64)
        batch = Batch(
            torch.from_numpy(dense) if dense.shape[1] else None,
            JaggedBatch(
                self.keys,
                torch.from_numpy(np.concatenate(columns).view(np.int64)),
                torch.from_numpy(np.concatenate([ones, *lengths]))
                if lengths
                else None,
            ),
            torch.from_numpy(label),
            timestamp=torch.from_numpy(BEGIN + now * self.window),
        )
        return batch, logit

    def _ids(
        self, draws: Words, feature: int, now: Floats
    ) -> tuple[Words, Floats]:
        """The ids of a feature, and their effects, of variance 1."""
        rank = self._ranks(_uniform(draws)).astype(np.uint64)
        own = np.uint64((feature + 1) << 44) + self._salt
        phase = _uniform(_mix(_mix(rank + own) + np.uint64(_PHASE)))
        window = np.floor(now)
        age = np.floor(window * self.churn + phase).astype(np.uint64)
        ids = _mix(_mix(rank + own) ^ _mix(age + np.uint64(7)))
        return ids, _normal(_mix(ids + np.uint64(_EFFECT)))

    def _bags(
        self, key: Words, number: int, now: Floats
    ) -> tuple[Words, Floats, npt.NDArray[np.int64]]:
        draw = _mix(key + np.uint64((_LENGTH << 32) + number))
        lengths = (_uniform(draw) * (self.max_length + 1)).astype(np.int64)
        row = np.repeat(np.arange(len(key)), lengths)
        starts = np.cumsum(lengths) - lengths
        place = np.arange(len(row)) - starts[row]
        draws = _mix(draw[row] + place.astype(np.uint64) * _GOLDEN)
        ids, effect = self._ids(draws, self.features + number, now[row])
        sums = np.bincount(row, effect, len(key))
        return ids, sums / np.sqrt(np.maximum(lengths, 1)), lengths

    def _ranks(self, u: Floats) -> Floats:
        """Ranks of 0 on by Zipf's law, from the inverse of its integral."""
        power, most = 1 - self.zipf, float(self.vocabulary)
        total = (most + 1) ** power - 1
        ranks = np.floor((1 + u * total) ** (1 / power)) - 1
        out: Floats = np.clip(ranks, 0, most - 1)
        return out


def _mix(x: Words) -> Words:
    """The finaliser of SplitMix64: each bit depends on all bits."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    out: Words = x ^ (x >> np.uint64(31))
    return out


def _uniform(x: Words) -> Floats:
    out: Floats = (x >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return out


def _normal(x: Words) -> Floats:
    """About standard normal: a sum of four uniform numbers."""
    parts = [(x >> np.uint64(i)) & np.uint64(0xFFFF) for i in (0, 16, 32, 48)]
    total = np.sum([part.astype(np.float64) for part in parts], 0)
    out: Floats = (total / 65536 - 2) * np.sqrt(3.0)
    return out


def criteo_syn(
    parameters: float | str = "100T",
    samples: int = 2_000_000,
    batch_size: int = 1024,
    seed: int = 0,
    *,
    dim: int = 128,
    rank: int = 0,
    world_size: int = 1,
) -> ClickStream:
    """Clicks like Criteo's with as many ids as a model of a given size has.

    PERSIA's paper measures capacity so, with 6.25 T to 100 T parameters. A
    table holds the rows that were seen, so its memory grows with the ids
    that were drawn, not with the number of possible ones.

    Args:
        parameters: of the embeddings together: a number, or a text such as
            "6.25T" or "100T".
        samples: number of samples.
        batch_size: samples of a batch.
        seed: random seed.
        dim: numbers of an embedding.
        rank, world_size: take every world_size-th batch.

    Raises:
        InvalidArgument: no number of parameters, or less than one id for
            each of 26 features.
    """
    count = _count(parameters)
    return ClickStream(
        samples,
        batch_size,
        seed,
        features=26,
        dense=13,
        vocabulary=round(count / whole("dim", dim, 1, 4096) / 26),
        rank=rank,
        world_size=world_size,
    )


def kwai_video(
    samples: int = 2_000_000,
    batch_size: int = 1024,
    seed: int = 0,
    *,
    vocabulary: int = 50_000_000,
    rank: int = 0,
    world_size: int = 1,
) -> ClickStream:
    """Clicks shaped like those of short videos.

    PERSIA's paper trains on Kwai-video, which is not public. This has what
    such a log has: a few features of very many ids (user, video, author,
    music, ...), histories of up to 50 videos, a fifth of the ids new in each
    day, and clicks that are not rare.

    Args:
        samples: number of samples.
        batch_size: samples of a batch.
        seed: random seed.
        vocabulary: ids of a feature at any time.
        rank, world_size: take every world_size-th batch.
    """
    return ClickStream(
        samples,
        batch_size,
        seed,
        features=8,
        lists=2,
        max_length=50,
        vocabulary=vocabulary,
        churn=0.2,
        ctr=0.4,
        window_samples=max(1, samples // 8),
        rank=rank,
        world_size=world_size,
    )


def _count(parameters: float | str) -> float:
    if not isinstance(parameters, str):
        return number("parameters", parameters, 26, 1e17)
    found = re.fullmatch(r"([0-9.]+) ?([TBGM]?)", parameters.strip().upper())
    try:
        assert found is not None
        value = float(found[1]) * _CODES[found[2]]
    except (AssertionError, ValueError):
        raise errors.InvalidArgument(
            f"parameters is {parameters!r}; need a number or a text: 6.25T"
        ) from None
    return number("parameters", value, 26, 1e17)
