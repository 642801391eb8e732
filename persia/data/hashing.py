"""Values of any type to ids of 64 bits, whole columns at a time.

The id of a value is XXH64 of its text in UTF-8, read as a signed number. An
integer is its decimal digits, a float without a fraction is that integer, a
decimal has the digits of its scale (7.00), a boolean is "true" or "false", a
date or time is as ISO 8601 writes it, bytes are as they are. A missing value
(null, NaN) is the empty text.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import torch

from persia import _core, errors
from persia.data.base import check_salt

__all__ = [
    "as_array",
    "as_arrays",
    "hash_array",
    "hash_dictionary",
    "hash_ids",
    "ids_of_codes",
    "texts",
]

Ids = npt.NDArray[np.int64]


def hash_ids(values: Any, salt: int = 0) -> torch.Tensor:
    """The 64-bit ids of many values, as all data sources compute them.

    Element i is ``persia.datasets.value_hash(text of values[i], salt)``. The
    text of an integer is its decimal digits, so 7, 7.0 and "7" share an id; a
    missing value (None, NaN) has the id of the empty text.

    Args:
        values: n values: a pandas or polars Series, a NumPy array, an Arrow
            array, a tensor, or a list. Of strings, bytes, integers, floats,
            booleans, dates, or a categorical type.
        salt: another id for the same value, 0 to 2**64 - 1.

    Returns:
        int64 [n].

    Raises:
        DtypeError: values that have no text, such as lists.
    """
    salt = check_salt("hash_ids", salt)
    parts = [hash_array(part, salt) for part in as_arrays("values", values)]
    if not parts:
        return torch.empty(0, dtype=torch.int64)
    joined = parts[0] if len(parts) == 1 else np.concatenate(parts)
    return torch.from_numpy(joined)


def as_arrays(what: str, values: Any) -> list[pa.Array]:
    """Values of any container as Arrow arrays, one after the other."""
    if hasattr(values, "to_arrow"):  # polars
        values = values.to_arrow()
    if isinstance(values, pa.ChunkedArray):
        return list(values.chunks)
    if isinstance(values, pa.Array):
        return [values]
    if isinstance(values, str | bytes):
        raise errors.InvalidArgument(
            f"{what} is one {type(values).__name__}; need a Series, an array "
            "or a list (persia.datasets.value_hash takes one value)"
        )
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu().numpy()
    try:
        if isinstance(values, np.ndarray):
            array = _of_numpy(values)
        elif hasattr(values, "dtype") or isinstance(values, list | tuple):
            array = pa.array(values, from_pandas=True)
        else:
            array = pa.array(list(values), from_pandas=True)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
        return [_mixed(what, values, error)]
    except (pa.ArrowNotImplementedError, TypeError) as error:
        raise errors.DtypeError(
            f"{what} cannot be read as one column: {_first_line(error)}"
        ) from None
    if isinstance(array, pa.ChunkedArray):
        return list(array.chunks)
    return [array]


def as_array(what: str, values: Any) -> pa.Array:
    """As :func:`as_arrays`, in one piece."""
    parts = as_arrays(what, values)
    if not parts:
        return pa.array([], pa.null())
    return parts[0] if len(parts) == 1 else pa.concat_arrays(parts)


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def _of_numpy(values: npt.NDArray[Any]) -> pa.Array:
    if values.ndim == 2:
        flat = _of_numpy(np.ascontiguousarray(values).reshape(-1))
        if values.shape[1] == 0:
            return pa.array([[]] * len(values), pa.list_(flat.type))
        return pa.FixedSizeListArray.from_arrays(flat, values.shape[1])
    if values.ndim != 1:
        raise errors.ShapeError(
            f"an array of shape {values.shape} is no column; need [n], or "
            "[n, L] for a multi-valued one"
        )
    return pa.array(values, from_pandas=True)


def _mixed(what: str, values: Any, error: BaseException) -> pa.Array:
    """Values of several types, each by its text."""

    def text(value: Any) -> Any:
        if value is None or type(value).__name__ in ("NAType", "NaTType"):
            return None
        if isinstance(value, bytes):
            return value
        if type(value) is int:  # of any size
            return str(value).encode()
        if isinstance(value, list | tuple):
            return [text(one) for one in value]
        if not isinstance(value, str | float | bool | np.generic):
            raise errors.DtypeError(
                f"{what} cannot be read as one column: {_first_line(error)}"
            ) from None
        if value != value:
            return None
        out = texts(pa.array([value]))[0].as_py()
        return out.encode() if isinstance(out, str) else out

    parts = [text(value) for value in values]
    lists = any(isinstance(part, list) for part in parts)
    try:
        return pa.array(parts, pa.list_(pa.binary()) if lists else pa.binary())
    except (pa.ArrowInvalid, pa.ArrowTypeError) as wrong:
        raise errors.DtypeError(
            f"{what} cannot be read as one column: {_first_line(wrong)}"
        ) from None


def _is_text(kind: pa.DataType) -> bool:
    t = pa.types
    return bool(
        t.is_string(kind)
        or t.is_large_string(kind)
        or t.is_binary(kind)
        or t.is_large_binary(kind)
    )


def texts(array: pa.Array, what: str = "a column") -> pa.Array:
    """The text of each value, as strings or bytes; "" where it is missing."""
    kind, t = array.type, pa.types
    if t.is_dictionary(kind):
        return texts(array.dictionary_decode(), what)
    if t.is_null(kind):
        return pa.array([""] * len(array), pa.string())
    if isinstance(array, pa.ExtensionArray):
        return texts(array.storage, what)
    if _is_text(kind):
        out = array
    elif t.is_fixed_size_binary(kind):
        out = array.cast(pa.binary())
    elif t.is_floating(kind):
        out = _floats(array)
    elif t.is_nested(kind) or not _castable(kind):
        raise errors.DtypeError(
            f"{what} has the type {kind}, which has no text to hash; need "
            "strings, numbers, booleans, dates or bytes"
        )
    else:
        out = array.cast(pa.string())
    if out.null_count:
        out = pc.fill_null(out, pa.scalar("").cast(out.type))
    return out


def _castable(kind: pa.DataType) -> bool:
    try:
        pa.array([], kind).cast(pa.string())
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid):
        return False
    return True


def _floats(array: pa.Array) -> pa.Array:
    if pa.types.is_float16(array.type):
        array = array.cast(pa.float32())
    x = array.to_numpy(zero_copy_only=False).astype(np.float64)
    with np.errstate(invalid="ignore"):
        missing = np.isnan(x)
        whole = (np.floor(x) == x) & (np.abs(x) < 2.0**63)
    digits = np.where(whole, x, 0.0).astype(np.int64)
    out = pa.array(digits, mask=missing).cast(pa.string())
    if (whole | missing).all():
        return out
    return pc.if_else(pa.array(whole | missing), out, array.cast(pa.string()))


def hash_array(
    array: pa.Array,
    salt: int,
    *,
    strip: bool = False,
    out: Ids | None = None,
    what: str = "a column",
) -> Ids:
    """The ids of an array's values, int64 [n].

    Args:
        array: any type that has a text.
        salt: checked already.
        strip: leave out spaces and tabs around texts.
        out: where the ids go.
        what: it is, for messages.
    """
    if pa.types.is_dictionary(array.type):
        known = hash_dictionary(array.dictionary, salt, strip=strip)
        return ids_of_codes(array, known, out)
    column = texts(array, what)
    if out is None:
        out = np.empty(len(column), np.int64)
    _, offsets, data = column.buffers()
    wide = pa.types.is_large_string(column.type) or pa.types.is_large_binary(
        column.type
    )
    if len(column):
        _core.strings_hash(
            offsets, data, column.offset, len(column), wide, strip, salt, out
        )
    return out


def hash_dictionary(
    values: pa.Array, salt: int, *, strip: bool = False
) -> Ids:
    """The ids of a dictionary's n values, and that of a missing one behind
    them: int64 [n + 1]."""
    column = texts(values)
    empty = pa.array([""]).cast(column.type)
    return hash_array(pa.concat_arrays([column, empty]), salt, strip=strip)


def ids_of_codes(
    array: pa.DictionaryArray, known: Ids, out: Ids | None = None
) -> Ids:
    """The ids of a dictionary array's values, int64 [n].

    Args:
        array: whose codes are looked up.
        known: of :func:`hash_dictionary`.
        out: where the ids go.
    """
    codes = array.indices
    if codes.null_count:
        codes = pc.fill_null(codes.cast(pa.int64()), len(known) - 1)
    if out is None:
        out = np.empty(len(codes), np.int64)
    # A mode other than "raise" lets take() write to out without a copy.
    np.take(known, codes.to_numpy(), out=out, mode="clip")
    return out
