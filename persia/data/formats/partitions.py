"""Columns that the folders of a file name, as Hive and Spark write them:
``dt=2024-01-01/part-0.parquet`` has the column ``dt``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import PrivateAttr

from persia.data.formats.paths import File
from persia.data.schema.schema import Schema

Values = dict[str, str | None]


def of_folders(schema: Schema, file: File) -> Values:
    """The columns of a schema that a file's folders name, with their values:
    texts; None: null. A column of the file with such a name is not read."""
    used = schema.used_columns
    return {n: v for n, v in file.partitions.items() if n in used}


class _InFile(Schema):
    """A schema, of which some columns are in no file."""

    _elsewhere: frozenset[str] = PrivateAttr(frozenset())

    @property
    def used_columns(self) -> set[str]:
        return super().used_columns - self._elsewhere


def in_file(schema: Schema, names: Iterable[str]) -> Schema:
    """What is read of a file, where folders name some of the columns."""
    elsewhere = frozenset(names)
    if not elsewhere:
        return schema
    inner = _InFile.model_construct(
        schema.model_fields_set,
        **{name: getattr(schema, name) for name in type(schema).model_fields},
    )
    inner._elsewhere = elsewhere
    return inner


def with_folders(table: Any, values: Values, text: bool = False) -> Any:
    """A table with the columns that folders name.

    Args:
        table: a table, or a batch of records.
        values: see :func:`of_folders`.
        text: it is of a text file: an empty line has no value there either.
    """
    if not values:
        return table
    columns = {
        name: table.column(name)
        for name in table.schema.names
        if name not in values
    }
    empty = _empty(columns.values(), table.num_rows) if text else None
    for name, value in values.items():
        column = pa.repeat(pa.scalar(value, pa.string()), table.num_rows)
        if text:
            column = pc.if_else(empty, "", pc.fill_null(column, ""))
        columns[name] = column
    make = type(table).from_arrays
    return make(list(columns.values()), list(columns))


def _empty(columns: Iterable[Any], rows: int) -> Any:
    """Where no column has a letter."""
    empty = pa.repeat(True, rows)
    for column in columns:
        lengths = pc.fill_null(pc.binary_length(column), 0)
        empty = pc.and_(empty, pc.equal(lengths, 0))
    return empty
