"""What changed in the tables of a store, read by one who publishes it."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from persia import _core
from persia.store.engine import engine_of
from persia.store.store import Store

Ids = npt.NDArray[np.int64]
_ROOM = 1 << 18  # rows of an answer


class TableChanges(NamedTuple):
    """What changed in a table.

    Attributes:
        ids: int64 [n] of rows that changed, each once.
        vectors: float32 [n, dim], as they are now.
        gone: int64 ids that have no row any more.
        erased: int64 ids that were erased by hand.
    """

    ids: Ids
    vectors: npt.NDArray[np.float32]
    gone: Ids
    erased: Ids


class _Answer(NamedTuple):
    """A reply of a shard."""

    ids: bytes
    vectors: bytes
    gone: bytes
    erased: bytes
    reset: bool
    end: bool
    unknown: bool


class Reader:
    """Reads what changed in tables of a store since it looked last.

    Args:
        store: of the tables.
        tables: their names.

    Raises:
        Unavailable, DeadlineExceeded: a server does not answer.
        AccessDenied: it wants the administration token.
    """

    def __init__(self, store: Store, tables: Sequence[str]) -> None:
        engine = engine_of(store)
        self._handle = engine.handle
        found = [engine.find(name) for name in tables]
        self._tables = [(t.number, t.config.embedding_dim) for t in found]
        self._shards = len(_core.ckpt_shards(self._handle))
        self._name = secrets.randbits(64) | 1
        self._pieces: dict[tuple[int, int], int] = {}
        for number, _ in self._tables:
            for shard in range(self._shards):
                self._ask(number, shard, _core.CHANGES_BEGIN)
                self._pieces[number, shard] = 0

    def _ask(self, number: int, shard: int, verb: int) -> _Answer:
        piece = self._pieces.get((number, shard), 0)
        return _Answer(
            *_core.changes(
                self._handle, number, shard, verb, self._name, piece, _ROOM
            )
        )

    def read(self) -> tuple[list[TableChanges], bool]:
        """What changed in each table, and whether that is all of it. If not,
        the tables have to be read again: only ``erased`` counts."""
        whole = True
        found = []
        for number, dim in self._tables:
            answers: list[_Answer] = []
            for shard in range(self._shards):
                whole &= self._read_shard(number, shard, answers)
            found.append(_merged(answers, dim))
        return found, whole

    def _read_shard(
        self, number: int, shard: int, answers: list[_Answer]
    ) -> bool:
        whole = True
        while True:
            answer = self._ask(number, shard, _core.CHANGES_NEXT)
            if answer.unknown:
                return False
            self._pieces[number, shard] += 1
            whole &= not answer.reset
            answers.append(answer)
            if answer.end:
                return whole

    def close(self) -> None:
        """Nothing is noted for it any more."""
        for number, shard in self._pieces:
            self._ask(number, shard, _core.CHANGES_END)


def _ids(data: Sequence[bytes]) -> Ids:
    return np.frombuffer(b"".join(data), np.int64)


def _merged(answers: Sequence[_Answer], dim: int) -> TableChanges:
    """Of an id that is in several answers the last one counts."""
    ids = _ids([a.ids for a in answers])
    vectors = np.frombuffer(
        b"".join(a.vectors for a in answers), np.float32
    ).reshape(len(ids), dim)
    gone = _ids([a.gone for a in answers])
    erased = np.unique(_ids([a.erased for a in answers]))
    order = _last_of_each(answers)
    if order is not None:
        rows, left = order
        ids, vectors, gone = ids[rows], vectors[rows], gone[left]
    return TableChanges(ids, vectors, gone, erased)


def _last_of_each(
    answers: Sequence[_Answer],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]] | None:
    """Places among the rows, and among those gone, that are not outdated;
    None: all of them."""
    if len(answers) < 2:
        return None
    every, places = [], []  # places: below 0 of one that is gone
    rows = left = 0
    for a in answers:
        n, k = len(a.ids) // 8, len(a.gone) // 8
        every.append(_ids([a.gone, a.ids]))
        places.append(np.arange(-left - 1, -left - 1 - k, -1))
        places.append(np.arange(rows, rows + n))
        rows, left = rows + n, left + k
    ids, place = np.concatenate(every), np.concatenate(places)
    _, last = np.unique(ids[::-1], return_index=True)
    if len(last) == len(ids):
        return None
    kept = place[np.sort(len(ids) - 1 - last)]
    return kept[kept >= 0], -1 - kept[kept < 0]
