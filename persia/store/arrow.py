"""Rows to and from Arrow: what ``Store.to_arrow`` and ``set_arrow`` do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import torch

from persia import errors


def _lists(values: torch.Tensor) -> pa.Array:
    """float32 [n, width] as n lists of a fixed size, without a copy."""
    flat = pa.array(values.contiguous().view(-1).numpy())
    return pa.FixedSizeListArray.from_arrays(flat, values.shape[1])


def to_arrow(
    ids: torch.Tensor, vectors: torch.Tensor, state: torch.Tensor | None
) -> pa.Table:
    """ids int64 [n], vectors float32 [n, dim] and, if it is asked for, state
    float32 [n, floats] as :meth:`persia.Store.to_arrow` returns them."""
    columns = {"id": pa.array(ids.numpy()), "vector": _lists(vectors)}
    if state is not None and state.shape[1]:
        columns["state"] = _lists(state)
    return pa.table(columns)


def _column(rows: pa.Table, name: str, where: str) -> pa.Array:
    column = rows.column(name).combine_chunks()
    if isinstance(column, pa.ChunkedArray):  # of no chunks, or too long
        column = pa.concat_arrays(column.chunks)
    if column.null_count:
        raise errors.InvalidArgument(
            f"{where}: {column.null_count} of {len(column)} are null; drop "
            "these rows"
        )
    return column


def _floats(rows: pa.Table, name: str, width: int) -> torch.Tensor:
    """A column of lists of numbers as float32 [n, width]."""
    where = f"column {name!r}"
    column = _column(rows, name, where)
    kind = column.type
    if not (
        pa.types.is_fixed_size_list(kind)
        or pa.types.is_list(kind)
        or pa.types.is_large_list(kind)
    ) or not pa.types.is_floating(kind.value_type):
        raise errors.DtypeError(
            f"{where} has type {kind}, need lists of floating numbers"
        )
    flat = column.flatten()
    lengths = column.value_lengths().to_numpy(zero_copy_only=False)
    if (lengths != width).any():
        wrong = int(np.flatnonzero(lengths != width)[0])
        raise errors.ShapeError(
            f"{where}: row {wrong} has {lengths[wrong]} numbers, need {width}"
        )
    if flat.null_count:
        raise errors.InvalidArgument(f"{where}: a number is null")
    numbers = flat.to_numpy(zero_copy_only=False).astype(np.float32)
    return torch.from_numpy(numbers).view(-1, width)


def from_arrow(
    rows: Any, dim: int, floats: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """ids int64 [n], vectors float32 [n, dim] and, if there is one, state
    float32 [n, floats] of what :meth:`persia.Store.set_arrow` is given."""
    if isinstance(rows, pa.RecordBatch):
        rows = pa.Table.from_batches([rows])
    if not isinstance(rows, pa.Table):
        raise errors.InvalidArgument(
            f"rows is a {type(rows).__name__}, need a pyarrow.Table"
        )
    for name in ("id", "vector"):
        if rows.column_names.count(name) != 1:
            raise errors.InvalidArgument(
                f"rows has the columns {rows.column_names}, need one {name!r}"
            )
    ids = _column(rows, "id", "column 'id'")
    if not pa.types.is_integer(ids.type):
        raise errors.DtypeError(
            f"column 'id' has type {ids.type}, need integers of 64 bits"
        )
    numbers = ids.to_numpy(zero_copy_only=False)
    signed = torch.from_numpy(
        numbers.view(np.int64).copy()  # Arrow's memory is read-only
        if numbers.dtype == np.uint64
        else numbers.astype(np.int64)
    )
    state = None
    if "state" in rows.column_names:
        state = _floats(rows, "state", floats)
    return signed, _floats(rows, "vector", dim), state
