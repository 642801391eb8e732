"""Any iterable of rows as batches: dicts, Arrow record batches, DataFrames."""

from __future__ import annotations

import os
from collections.abc import (
    Callable,
    Collection,
    Generator,
    Iterable,
    Iterator,
    Mapping,
)
from contextlib import closing
from functools import partial
from itertools import chain, islice
from typing import Any

import numpy as np
import pyarrow as pa

from persia import errors
from persia.base.check import kind
from persia.data.base import read_ahead
from persia.data.faults import MALFORMED_LIMIT
from persia.data.schema.encode import Encoder, asks, measure
from persia.data.schema.hashing import Bad
from persia.data.schema.inference import inferred, log_guess, with_odd
from persia.data.schema.schema import Schema
from persia.data.source import Part, Place, Source, wanted_rows
from persia.data.table import as_schema, as_table, check_columns, of_dicts

_DICTS = 8192  # made a table at a time
_SAMPLE = 10_000

_NEED = (
    "an iterable of dicts, of Arrow record batches or of DataFrames, or a "
    "function that returns one"
)


class Records(Source):
    """Any iterable of rows, as batches: read as it is iterated over.

    Its items are rows (dicts, named tuples, Spark's rows), or tables of any
    number of rows: Arrow record batches, as of Ray Data, or DataFrames. A
    torch ``IterableDataset`` of dicts is such an iterable, too.

    Args:
        source: the iterable, which is iterated over again in each epoch; or a
            function that returns one, and gets the epoch. A generator can be
            read once.
        schema: a :class:`Schema`, the path of a YAML file, or the name of a
            preset. None: inferred from the first rows, which are read twice.
        batch_size: samples of a batch; the last one may have fewer.
        strict: raise MalformedData at a malformed row, instead of counting it
            in ``malformed`` and leaving it out.
        malformed_limit: the share of the samples that one rule, such as that
            of a column, may leave out. Beyond it the iteration ends with
            LimitReached: after 10,000 samples, or at the end of 100 or more.
        shuffle: False, or a number of samples: so many are read at a time, and
            given out in an order decided by ``seed`` and ``epoch``.
        seed: of the shuffle.
        drop_last: leave out a last batch that is smaller.
        rank, world_size: take every world_size-th block of batch_size rows of
            the iterable; (0, 1) where each rank has an iterable of its own.

    Raises:
        SchemaMismatch: the rows lack a column of the schema, or have it with
            another type; or a label is neither 0 nor 1.
        InvalidArgument: the items are no rows; or the source is a generator
            and is iterated over a second time.
    """

    def __init__(
        self,
        source: Iterable[Any] | Callable[[int], Iterable[Any]],
        schema: Schema | str | os.PathLike[str] | None = None,
        batch_size: int = 1024,
        *,
        strict: bool = False,
        malformed_limit: float = MALFORMED_LIMIT,
        shuffle: bool | int = False,
        seed: int = 0,
        drop_last: bool = False,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if not callable(source) and not isinstance(source, Iterable):
            kind("source", source, (), _NEED)
        if isinstance(source, str | bytes | Mapping):
            kind("source", source, (), _NEED)
        self._source = source
        self._head: list[Any] = []  # of a generator, read for the schema
        self._used = False
        schema = None if schema is None else as_schema(schema)
        if schema is None or asks(schema):
            first = self._first(schema)
            if not first.num_rows:
                raise errors.SchemaMismatch(
                    "the source has no rows to infer a schema from"
                )
            if schema is None:
                schema, lines = inferred(first)
                log_guess("the source", lines)
            schema = measure(schema, first, "the source")
        super().__init__(
            schema,
            batch_size,
            samples=(0, None),
            strict=strict,
            malformed_limit=malformed_limit,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            rank=rank,
            world_size=world_size,
        )

    def _items(self) -> Iterator[Any]:
        source = self._source
        if callable(source) and not isinstance(source, Iterable):
            return iter(source(self.epoch))
        items = iter(source)
        if items is not source:
            return items
        if self._used:
            raise errors.InvalidArgument(
                "the source is a generator, which can be read once; pass a "
                "function that returns one, for several epochs"
            )
        self._used = True
        head, self._head = self._head, []
        return chain(head, items)

    def _first(self, schema: Schema | None) -> pa.Table:
        """The first rows; those of a generator are kept for the first
        epoch."""
        self._epoch = 0
        items = self._items()
        head, rows = list[Any](), 0
        for item in items:
            head.append(item)
            row = _row(item)
            rows += 1 if isinstance(row, Mapping) else len(_rows_of(row))
            if rows >= _SAMPLE:
                break
        if self._used:
            self._head, self._used = head, False
        odd: dict[str, str] = {}
        names = None if schema is None else schema.used_columns
        tables = [table for table, _ in _tables(iter(head), names, odd)]
        if not tables:
            return pa.table({})
        try:
            first = pa.concat_tables(tables, promote_options="permissive")
        except pa.ArrowException as error:
            raise errors.SchemaMismatch(
                f"the first rows have columns of several types: {error}; "
                "pass schema="
            ) from error
        return with_odd(first, odd)

    def _parts(
        self, shard: int, shards: int, place: Place
    ) -> Generator[Part, None, None]:
        encoder, first = Encoder(self.schema), 0
        columns = sorted(self.schema.used_columns)
        used = self.schema.used_columns
        read = partial(_tables, self._items(), used)
        with closing(read_ahead(read)) as tables:
            for table, bad in tables:
                numbers = np.arange(first, first + table.num_rows)
                first += table.num_rows
                check_columns(
                    self.schema, table.column_names, f"row {first} or before"
                )
                wanted = wanted_rows(
                    numbers, self.samples, self.batch_size, shard, shards
                )
                wanted &= numbers >= place.row
                early = [(int(numbers[i]), *bad[i]) for i in bad if wanted[i]]
                if bad:
                    wanted[list(bad)] = False
                table = table.select(columns)
                if not wanted.all():
                    table = table.filter(pa.array(wanted))
                    numbers = numbers[wanted]
                kept, numbers = self._encode(
                    encoder, table, numbers, lambda row: f"row {row}", early
                )
                if len(kept):
                    yield Part(kept, numbers, 0, 0)


def _tables(
    items: Iterator[Any],
    wanted: Collection[str] | None,
    odd: dict[str, str] | None = None,
) -> Iterator[tuple[pa.Table, Bad]]:
    """Items as tables, each with what is wrong with rows: many dicts become
    one. ``wanted``, ``odd``: see :func:`persia.data.table.as_table`."""
    seen: dict[str, None] = {}
    items = map(_row, items)
    for item in items:
        bad: Bad = {}
        if not isinstance(item, Mapping):
            yield as_table(item, wanted, bad, odd), bad
            continue
        rows = [item, *islice(_dicts(items), _DICTS - 1)]
        keys = dict.fromkeys(str(key) for row in rows for key in row)
        # A key that no row of this piece has, but earlier ones had, is null.
        seen.update(keys)
        names = [n for n in seen if wanted is None or n in wanted]
        yield of_dicts(rows, names, bad, odd), bad


def _rows_of(item: Any) -> range:
    """As many numbers as an item has rows."""
    rows = getattr(item, "num_rows", None)
    return range(len(item) if rows is None else rows)


def _row(item: Any) -> Any:
    """A row of Spark, or a named tuple, as a dict."""
    for name in ("asDict", "_asdict"):
        if hasattr(item, name):
            return getattr(item, name)()
    return item


def _dicts(items: Iterator[Any]) -> Iterator[Mapping[str, Any]]:
    for item in items:
        if not isinstance(item, Mapping):
            raise errors.InvalidArgument(
                f"an item is a {type(item).__name__} after others that were "
                f"dicts; need {_NEED}"
            )
        yield item
