"""Values of Parquet whose type pyarrow does not know, or has no room for.

An instant of the old type INT96, which Spark writes by default, may be of any
year, while pyarrow reads it in nanoseconds and wraps around beyond the years
1677 to 2262. Parquet has no type for the intervals of Spark, which are plain
integers, and names its own interval a binary. A note of Spark in the file,
or the file's schema, says what they are.
"""

from __future__ import annotations

import json
import struct
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from persia import errors

Typed: TypeAlias = Any  # an Array or a ChunkedArray

_SPARK = b"org.apache.spark.sql.parquet.row.metadata"
_PARQUET = "INTERVAL"
_MONTHS = pa.month_day_nano_interval()
_NS_END = (2**63 - 1) // 1000  # microseconds that nanoseconds have room for


def instants(nanos: Typed, micros: Typed, what: str) -> Typed:
    """Instants of INT96, read twice: in the unit that holds all of them.

    Args:
        nanos: as timestamps in ns, which wrap around; or lists of them.
        micros: in us, which are cut off.
        what: they are, for messages.

    Raises:
        DtypeError: no unit of Arrow holds all of them.
    """
    fine, coarse = _ticks(nanos), _ticks(micros)
    if (np.abs(coarse) <= _NS_END).all():
        return nanos
    # Both wrap around alike, so this is what was cut off.
    if (fine != coarse * 1000).any():
        raise errors.DtypeError(
            f"{what} has instants beyond the years 1677 to 2262 and others "
            "with nanoseconds, and no type of Arrow holds both; round them "
            "to microseconds, or leave the column out"
        )
    return micros


def _item(kind: pa.DataType) -> pa.DataType:
    while pa.types.is_list(kind):
        kind = kind.value_type
    return kind


def _ticks(column: Typed) -> Any:
    while pa.types.is_list(column.type):
        column = pc.list_flatten(column)
    return pc.fill_null(column.cast(pa.int64()), 0).to_numpy()


def int96(fine: pa.Schema, coarse: pa.Schema) -> set[str]:
    """The columns that hold instants of INT96, or lists of them.

    Args:
        fine: what pyarrow reads, where they are in ns.
        coarse: the same where they are in us.
    """
    pairs = zip(fine, coarse, strict=True)
    return {
        one.name
        for one, other in pairs
        if pa.types.is_timestamp(_item(one.type)) and one.type != other.type
    }


def intervals(file: Any) -> dict[str, str]:
    """The columns of a file that hold intervals, or lists of them.

    Args:
        file: an open ParquetFile.

    Returns:
        By name: what Spark, or Parquet, calls the type.
    """
    found = {}
    names = file.schema_arrow.names
    for i in range(len(file.schema)):
        leaf = file.schema.column(i)
        if leaf.converted_type == _PARQUET:
            name = max(n for n in names if f"{leaf.path}.".startswith(f"{n}."))
            found[name] = _PARQUET
    try:
        note = json.loads((file.metadata.metadata or {}).get(_SPARK, b"{}"))
        for field in note.get("fields", ()):
            kind = field["type"]
            while isinstance(kind, dict):  # a list
                kind = kind.get("elementType")
            if str(kind).startswith("interval") and field["name"] in names:
                found[field["name"]] = kind
    except (AttributeError, KeyError, TypeError, ValueError):
        pass  # of another program
    return found


def as_interval(column: Typed, kind: str) -> Typed:
    """Integers of Spark, or binaries of Parquet, as what they are."""
    lists = pa.types.is_list(column.type)
    if kind != _PARQUET and not kind.endswith(("year", "month")):
        time = pa.duration("us")
        return column.cast(pa.list_(time) if lists else time)

    def read(value: Any) -> Any:
        if value is None or isinstance(value, list):
            return value and [read(v) for v in value]
        if kind != _PARQUET:
            return value, 0, 0
        months, days, millis = struct.unpack("<III", value)
        return months, days, millis * 10**6

    out = pa.list_(_MONTHS) if lists else _MONTHS
    return pa.array([read(v) for v in column.to_pylist()], out)
