"""What sources share that read rows piece by piece: blocks of rows, their
shuffle, and the position after each batch."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import astuple, dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from persia import errors
from persia.base.check import whole
from persia.data.base import Dataset, pair, read_ahead
from persia.data.batches.batch import Batch
from persia.data.batches.rows import Rows
from persia.data.faults import MALFORMED_LIMIT, Faults, check_limit
from persia.data.schema.encode import Encoder, LabelError, encode_rows
from persia.data.schema.schema import Schema

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Place:
    """A place in the data: a row of a unit (a file or a row group).

    Attributes:
        unit: its number, in the order of reading.
        before: rows of all units before it.
        row: of the unit, malformed ones counted.
        mark_row: a row at or before it
        mark_byte: that begins at this byte of the unit's text.
    """

    unit: int = 0
    before: int = 0
    row: int = 0
    mark_row: int = 0
    mark_byte: int = 0

    @property
    def mark(self) -> tuple[int, int]:
        return self.mark_row, self.mark_byte


@dataclass(frozen=True)
class Part:
    """Rows of one unit, with the number that each has in it, and a mark at
    or before the first of them."""

    rows: Rows
    numbers: Ints
    unit: int
    before: int
    mark: tuple[int, int] = (0, 0)

    def place(self, at: int, more: int = 0) -> Place:
        row = int(self.numbers[at]) + more
        return Place(self.unit, self.before, row, *self.mark)

    def drop(self, n: int) -> Part:
        rest = self.rows.take(slice(n, len(self.rows)))
        return replace(self, rows=rest, numbers=self.numbers[n:])


Block = tuple[Rows, Place, Place]  # from here to there


class Source(Dataset):
    """A source that reads a schema's columns piece by piece."""

    schema: Schema

    def __init__(
        self,
        schema: Schema,
        batch_size: int,
        *,
        samples: tuple[int, int | None],
        strict: bool,
        malformed_limit: float = MALFORMED_LIMIT,
        shuffle: bool | int,
        seed: int,
        drop_last: bool,
        rank: int,
        world_size: int,
    ) -> None:
        super().__init__(
            batch_size,
            seed=seed,
            drop_last=drop_last,
            rank=rank,
            world_size=world_size,
        )
        self.samples = check_samples(samples)
        if shuffle is True:
            raise errors.InvalidArgument(
                "shuffle=True: give the number of samples that are read at a "
                "time and mixed, such as shuffle=100_000"
            )
        self.shuffle = whole("shuffle", shuffle or 0, 0, 2**63 - 1)
        self._faults = Faults(strict, check_limit(malformed_limit))
        self._set_schema(schema)

    def _copy(self) -> Self:
        """What is malformed counts for each by itself."""
        part = super()._copy()
        part._faults = Faults(self._faults.strict, self._faults.limit)
        return part

    @property
    def malformed_limit(self) -> float:
        """The share of the samples that one rule may leave out: beyond it
        the iteration ends with LimitReached."""
        return self._faults.limit

    @malformed_limit.setter
    def malformed_limit(self, limit: float) -> None:
        self._faults.limit = check_limit(limit)

    def _set_schema(self, schema: Schema) -> None:
        self.schema = schema
        self.keys = [c.feature for c in schema.features]
        self.dense_names = [c.column for c in schema.dense]

    @property
    def malformed(self) -> int:
        """Malformed rows seen so far in this process."""
        return self._faults.count

    @property
    def malformed_lines(self) -> list[str]:
        """What was wrong with the first 100 of them: "file:line: text"."""
        return self._faults.lines

    @property
    def _room(self) -> int:
        """Rows of a block: whole batches."""
        return self.batch_size * max(1, -(-self.shuffle // self.batch_size))

    def _batches(self, shard: int, shards: int) -> Iterator[Batch]:
        for batch, _ in self._batches_from(shard, shards, 0, None):
            yield batch

    def _batches_from(
        self, shard: int, shards: int, begin: int, at: Any
    ) -> Iterator[tuple[Batch, Any]]:
        if at is None:  # only their number is known
            return islice(self._cut(shard, shards, Place()), begin, None)
        try:
            place = Place(*map(int, at["place"]))
            block, skip = int(at["block"]), int(at["skip"])
        except (LookupError, TypeError, ValueError):
            raise errors.InvalidArgument(
                f"no position of such a data source: {at!r}"
            ) from None
        return self._cut(shard, shards, place, block, skip)

    def _cut(
        self,
        shard: int,
        shards: int,
        place: Place,
        block: int = 0,
        skip: int = 0,
    ) -> Generator[tuple[Batch, Any], None, None]:
        """The batches of the blocks from one on, without its first ones."""
        size = self.batch_size
        blocks = self._blocks(shard, shards, place)
        if not self.shuffle:  # a large block is not read ahead
            blocks = read_ahead(partial(self._blocks, shard, shards, place), 2)
        with closing(blocks):
            for rows, start, end in blocks:
                order = self._order(block, len(rows))
                count = -(-len(rows) // size)
                for j in range(skip, count):
                    low, high = j * size, min((j + 1) * size, len(rows))
                    if high - low < size and self.drop_last:
                        return
                    cut = slice(low, high)
                    part = rows.take(cut if order is None else order[cut])
                    last = j + 1 == count
                    yield (
                        part.batch(self.keys),
                        {
                            "place": list(astuple(end if last else start)),
                            "block": block + last,
                            "skip": 0 if last else j + 1,
                        },
                    )
                block, skip = block + 1, 0

    def _order(self, block: int, n: int) -> Ints | None:
        if not self.shuffle:
            return None
        rng = np.random.default_rng((self.seed, self.epoch, block))
        return rng.permutation(n)

    def _blocks(
        self, shard: int, shards: int, place: Place
    ) -> Generator[Block, None, None]:
        """All rows of the shard from a place on, in blocks."""
        room, pending, held = self._room, list[Part](), 0
        parts = read_ahead(partial(self._parts, shard, shards, place), 2)
        with closing(parts):
            for part in parts:
                pending.append(part)
                held += len(part.rows)
                while held >= room:
                    start, taken, n = pending[0].place(0), list[Rows](), room
                    while n:
                        one = pending.pop(0)
                        if len(one.rows) > n:
                            taken.append(one.rows.take(slice(0, n)))
                            pending.insert(0, one.drop(n))
                            n = 0
                        else:
                            taken.append(one.rows)
                            n -= len(one.rows)
                    held -= room
                    end = pending[0].place(0) if pending else one.place(-1, 1)
                    yield Rows.join(taken), start, end
        if held:
            start, end = pending[0].place(0), pending[-1].place(-1, 1)
            yield Rows.join([p.rows for p in pending]), start, end
        self._faults.check()

    @abstractmethod
    def _parts(
        self, shard: int, shards: int, place: Place
    ) -> Generator[Part, None, None]:
        """The well-formed rows of the shard from a place on; no part is
        empty."""

    def _encode(
        self,
        encoder: Encoder,
        table: pa.Table | pa.RecordBatch,
        numbers: Ints,
        where: Any,
        early: list[tuple[int, str, str]] | None = None,
    ) -> tuple[Rows, Ints]:
        """The well-formed rows of a table, with their numbers.

        Args:
            encoder: for tables of this kind.
            table: with the columns of the schema.
            numbers: of its rows.
            where: a function from a number to its file and line.
            early: what is known of rows that are not in the table.
        """
        wrong = early or []
        samples = len(numbers) + len(wrong)

        def report(row: int, text: str, kind: str) -> None:
            wrong.append((int(numbers[row]), text, kind))

        try:
            rows, ok = encode_rows(encoder, table, report)
        except LabelError as error:
            at = where(int(numbers[error.row]))
            raise errors.SchemaMismatch(f"{at}: {error}") from None
        except (errors.SchemaMismatch, errors.DtypeError) as error:
            at = where(int(numbers[0])) if len(numbers) else "the data"
            raise type(error)(f"{at}: {error}") from None
        for number, text, kind in sorted(wrong):
            self._faults.add(where(number), text, kind)
        self._faults.passed(samples)
        return rows, numbers if ok.all() else numbers[ok]


def check_samples(samples: tuple[int, int | None]) -> tuple[int, int | None]:
    """A range of samples: (first, end), where end may be None."""
    need = "(first, end) with 0 <= first <= end, or end None"
    first, end = pair("samples", samples, need)
    first = whole("the first of samples", first, 0, 2**63 - 1)
    if end is not None:
        end = whole("the end of samples", end, first, 2**63 - 1, " or None")
    return first, end


def wanted_rows(
    numbers: Ints,
    rows: tuple[int, int | None],
    size: int,
    shard: int,
    shards: int,
) -> npt.NDArray[np.bool_]:
    """Which rows, by their numbers in all data, a shard has: every shards-th
    block of ``size`` of the range ``rows``."""
    at = numbers - rows[0]
    wanted = at >= 0
    if rows[1] is not None:
        wanted &= numbers < rows[1]
    if shards > 1:
        wanted &= at // size % shards == shard
    return wanted
