"""Columns of tables, and what is said of their malformed values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from persia import errors
from persia.data.schema.canonical import (
    HASH_VERSION,
    is_list,
    one_piece,
    plain,
)

Mask = npt.NDArray[np.bool_]
# (row of the piece, what is wrong, its kind)
Report = Callable[[int, str, str], None]


def column_of(
    table: pa.Table | pa.RecordBatch, name: str, version: int = HASH_VERSION
) -> pa.Array:
    """A column in one piece, without extension types and views."""
    return plain(one_piece(table.column(name)), version)


def need_text(column: pa.Array, name: str) -> None:
    """Raises unless values are alone.

    Raises:
        SchemaMismatch: the column has lists.
    """
    if is_list(column.type):
        raise errors.SchemaMismatch(
            f"column {name!r} has lists ({column.type}): list it under "
            "multivalued or sequences"
        )


def shortened(value: Any) -> str:
    """A value for a message, of 80 characters at most."""
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace")
    if isinstance(value, str):
        return repr(value[:80])
    return repr(value)[:80]


def tell(
    wrong: Mask, column: pa.Array, name: str, need: str, report: Report
) -> None:
    """Reports the rows whose value of a column is wrong."""
    for i in np.flatnonzero(wrong):
        try:
            value = column[int(i)].as_py()
        except (ValueError, OverflowError):  # a time that Python has not
            value = column[int(i)]
        text = f"column {name!r}: {shortened(value)} {need}"
        report(int(i), text, f"column {name}")
