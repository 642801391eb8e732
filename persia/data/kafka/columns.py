"""Fields of many messages as a column."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from persia import errors
from persia.data.schema.hashing import as_array


def as_column(name: str, values: Sequence[Any], kind: Any) -> pa.Array:
    """Values of one field.

    Args:
        name: of the column.
        values: one a message.
        kind: the type of the column. None: that of its values.

    Raises:
        DtypeError: they cannot be one column.
    """
    if kind is None:
        return as_array(f"column {name!r}", values)
    try:
        return pa.array(values, kind)
    except (OverflowError, pa.ArrowInvalid) as error:
        raise errors.DtypeError(
            f"column {name!r} of the type {kind}: {error}"
        ) from None


def of_nanos(
    values: Sequence[Any], kind: Any, cut: bool
) -> tuple[list[Any], Any]:
    """Numbers of nanoseconds, or lists of them, in a unit that holds them.

    Args:
        values: one a message, whole numbers of any size.
        kind: the type of the column in ns.
        cut: off what is less than a microsecond.

    Returns:
        (the values in its unit, the type of the column)
    """
    lists = pa.types.is_list(kind)
    flat = [v for row in values for v in row or ()] if lists else values
    if not cut and any(v % 1000 for v in flat if v is not None):
        return list(values), kind
    one = kind.value_type if lists else kind
    one = (
        pa.timestamp("us", one.tz)
        if pa.types.is_timestamp(one)
        else pa.duration("us")
    )

    def micros(value: Any) -> Any:
        if value is None or isinstance(value, list):
            return value and [micros(v) for v in value]
        return value // 1000

    return [micros(v) for v in values], pa.list_(one) if lists else one
