"""What changed in the tables of a store, read by one who publishes it."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from persia import _core
from persia.serving.deltas.packet import Changes, Ids, PacketTable
from persia.serving.rows import TYPES
from persia.store.engine import engine_of
from persia.store.store import Store

_ROOM = 1 << 18  # rows of an answer


class _Answer(NamedTuple):
    """A reply of a shard; its rows are as those of a file."""

    rows: bytes
    gone: bytes
    erased: bytes
    reset: bool
    end: bool
    unknown: bool
    changed: int


class TableChanges:
    """What changed in a table, as its shards have said it.

    Args:
        answers: of each shard, from the first to the last.
        stride: bytes of a row.
    """

    def __init__(
        self, answers: Sequence[Sequence[_Answer]], stride: int
    ) -> None:
        self._answers = answers
        self._stride = stride

    @property
    def rows(self) -> int:
        """How many are here; one that changed meanwhile may be twice."""
        every = (a for some in self._answers for a in some)
        return sum(len(a.rows) for a in every) // self._stride

    @property
    def erased(self) -> Ids:
        """Int64 ids that were erased by hand, sorted."""
        every = (a.erased for some in self._answers for a in some)
        return np.unique(np.frombuffer(b"".join(every), np.int64))

    def merged(self) -> Changes:
        """The change of each id."""
        parts = [_last_of_each(some, self._stride) for some in self._answers]
        rows = [rows for rows, _ in parts]
        gone = [gone for _, gone in parts]
        return Changes(
            rows=rows[0] if len(rows) == 1 else np.concatenate(rows),
            gone=np.concatenate(gone),
            erased=self.erased,
        )


class Reader:
    """Reads what changed in tables of a store since it looked last.

    Args:
        store: of the tables.
        tables: which, and as what their rows are wanted.

    Raises:
        Unavailable, DeadlineExceeded: a server does not answer.
        AccessDenied: it wants the administration token.
    """

    def __init__(self, store: Store, tables: Sequence[PacketTable]) -> None:
        engine = engine_of(store)
        self._handle = engine.handle
        self._tables = [
            (engine.find(about.name).number, about) for about in tables
        ]
        self._shards = len(_core.ckpt_shards(self._handle))
        self._name = secrets.randbits(64) | 1
        self._pieces: dict[tuple[int, int], int] = {}
        # Of a round that failed: the next call continues with it.
        self._answers: dict[tuple[int, int], list[_Answer]] = {}
        for number, about in self._tables:
            for shard in range(self._shards):
                self._pieces[number, shard] = 0
                self._ask(number, shard, _core.CHANGES_BEGIN, about)

    def _ask(
        self, number: int, shard: int, verb: int, about: PacketTable
    ) -> _Answer:
        return _Answer(
            *_core.changes(
                self._handle,
                number,
                shard,
                verb,
                self._name,
                self._pieces[number, shard],
                _ROOM,
                TYPES[about.type],
            )
        )

    def read(self) -> tuple[list[TableChanges], bool]:
        """What changed in each table, and whether that is all of it. If not,
        the tables have to be read again: only ``erased`` counts.

        Raises:
            Unavailable, DeadlineExceeded: a server does not answer; another
                call loses nothing.
            InvalidArgument: rows of this type cannot hold a value.
        """
        for number, about in self._tables:
            for shard in range(self._shards):
                self._read_shard(number, shard, about)
        found, self._answers = self._answers, {}
        whole = not any(
            a.reset or a.unknown for some in found.values() for a in some
        )
        return [self._of(found, *table) for table in self._tables], whole

    def _of(
        self,
        found: Mapping[tuple[int, int], Sequence[_Answer]],
        number: int,
        about: PacketTable,
    ) -> TableChanges:
        stride = _core.rows_stride(TYPES[about.type], about.dim)
        shards = range(self._shards)
        return TableChanges([found[number, i] for i in shards], stride)

    def _read_shard(self, number: int, shard: int, about: PacketTable) -> None:
        here = self._answers.setdefault((number, shard), [])
        while not here or not (here[-1].end or here[-1].unknown):
            here.append(self._ask(number, shard, _core.CHANGES_NEXT, about))
            self._pieces[number, shard] += 1

    def count(self) -> int:
        """Rows that changed since.

        Raises: as :meth:`read`.
        """
        return sum(
            self._ask(number, shard, _core.CHANGES_COUNT, about).changed
            for number, about in self._tables
            for shard in range(self._shards)
        )

    def close(self) -> None:
        """Nothing is noted for it any more."""
        for number, about in self._tables:
            for shard in range(self._shards):
                self._ask(number, shard, _core.CHANGES_END, about)


def _ids(data: Sequence[bytes]) -> Ids:
    return np.frombuffer(b"".join(data), np.int64)


def _rows(data: bytes, stride: int) -> npt.NDArray[np.uint8]:
    return np.frombuffer(data, np.uint8).reshape(-1, stride)


def _last_of_each(
    answers: Sequence[_Answer], stride: int
) -> tuple[npt.NDArray[np.uint8], Ids]:
    """Rows, and ids gone, of the answers of a shard: of an id that is in
    several answers the last one counts. Those of one answer are distinct."""
    if len(answers) == 1:
        return _rows(answers[0].rows, stride), _ids([answers[0].gone])
    every, places = [], []  # places: below 0 of one that is gone
    rows = left = 0
    for a in answers:
        ids = _rows(a.rows, stride)[:, :8].copy().view(np.int64)[:, 0]
        n, k = len(ids), len(a.gone) // 8
        every += [_ids([a.gone]), ids]
        places.append(np.arange(-left - 1, -left - 1 - k, -1))
        places.append(np.arange(rows, rows + n))
        rows, left = rows + n, left + k
    ids, place = np.concatenate(every), np.concatenate(places)
    _, last = np.unique(ids[::-1], return_index=True)
    found = _rows(b"".join(a.rows for a in answers), stride)
    gone = _ids([a.gone for a in answers])
    if len(last) == len(ids):
        return found, gone
    kept = place[np.sort(len(ids) - 1 - last)]
    return found[kept[kept >= 0]], gone[-1 - kept[kept < 0]]
