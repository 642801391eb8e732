"""Values of any type to ids of 64 bits, whole columns at a time.

The id of a value is XXH64 of its text in UTF-8 (see
:mod:`persia.data.schema.canonical`), read as a signed number.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable
from decimal import Decimal
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import torch

from persia import _core, errors
from persia.base.check import whole
from persia.data.base import check_salt
from persia.data.boundary import guarded
from persia.data.schema.canonical import HASH_VERSION, is_mixed, plain, texts

Ids = npt.NDArray[np.int64]

# By row: (what is wrong with its value, the kind of it).
Bad = dict[int, tuple[str, str]]

# Units of NumPy that Arrow has not.
_UNITS: dict[Any, str] = {
    **{(unit, 1): "M8[s]" for unit in "hm"},
    **{(unit, 1): "M8[D]" for unit in "YMW"},
    **{("m", unit, 1): "m8[s]" for unit in "WDhm"},
}
_NESTED = {list, tuple, dict}
_INTEGER = re.compile(rb"[-+]?[0-9]{1,30}")


@guarded
def hash_ids(
    values: Any, salt: int = 0, *, hash_version: int = HASH_VERSION
) -> torch.Tensor:
    """The 64-bit ids of many values, as all data sources compute them.

    Element i is ``persia.datasets.value_hash(text of values[i], salt)``. The
    text depends on the value alone (see :doc:`/data`): that of an integer is
    its decimal digits, so 7, 7.0 and "7" share an id; a missing value (None,
    NaN) has the id of the empty text.

    Args:
        values: n values: a pandas or polars Series, a NumPy array, an Arrow
            array, a tensor, or a list. Of strings, bytes, numbers, booleans,
            dates, times, UUIDs, or a categorical type.
        salt: another id for the same value, 0 to 2**64 - 1.
        hash_version: 1 gives the ids of models trained before version 2.

    Returns:
        int64 [n].

    Raises:
        DtypeError: values that have no text, such as lists.
        MalformedData: a text with half a character (a lone surrogate), or a
            time out of the range of years.
    """
    salt = check_salt("hash_ids", salt)
    version = whole("hash_version", hash_version, 1, HASH_VERSION)
    parts = [
        hash_array(part, salt, what="values", version=version)
        for part in as_arrays("values", values)
    ]
    if not parts:
        return torch.empty(0, dtype=torch.int64)
    joined = parts[0] if len(parts) == 1 else np.concatenate(parts)
    return torch.from_numpy(joined)


def as_arrays(
    what: str, values: Any, bad: Bad | None = None
) -> list[pa.Array]:
    """Values of any container as Arrow arrays, one after the other.

    Args:
        what: they are, for messages.
        values: a Series, an array, a tensor, a list, or an iterable.
        bad: gets what is wrong with values that cannot be read, which are
            null then. None: the first of them is an error.

    Raises:
        DtypeError: they cannot be one column.
        MalformedData: a text has half a character.
    """
    if isinstance(values, str | bytes):
        raise errors.InvalidArgument(
            f"{what} is one {type(values).__name__}; need a Series, an array "
            "or a list (persia.datasets.value_hash takes one value)"
        )
    try:
        array = _as_arrow(values)
    except errors.PersiaError:
        raise
    except (
        pa.ArrowException,
        OverflowError,
        UnicodeEncodeError,
        TypeError,
    ) as error:
        if not hasattr(values, "__iter__") or isinstance(values, torch.Tensor):
            raise _unreadable(what, error) from None
        array = _mixed(what, values, error, bad)
    except Exception as error:  # of the library that made the values
        raise _unreadable(what, error) from None
    return (
        list(array.chunks) if isinstance(array, pa.ChunkedArray) else [array]
    )


def _as_arrow(values: Any) -> Any:
    if hasattr(values, "to_arrow"):  # polars
        # Its objects are addresses in Arrow.
        objects = str(values.dtype) == "Object"
        values = values.to_list() if objects else values.to_arrow()
    if isinstance(values, pa.Array | pa.ChunkedArray):
        return values
    if isinstance(values, torch.Tensor):
        values = _numpy_of(values)
    if isinstance(values, np.ndarray):
        return _of_numpy(values)
    if not hasattr(values, "dtype") and not isinstance(values, list | tuple):
        values = list(values)
    if isinstance(values, list | tuple) or values.dtype == object:
        return _of_objects(values)
    return pa.array(values, from_pandas=True)


def _of_objects(values: Any) -> pa.Array:
    """Values that have a type each.

    Raises:
        ArrowInvalid: they have several.
    """
    if _crashes(values):
        raise pa.ArrowInvalid("instants of NumPy beside other values")
    array = pa.array(values, from_pandas=True)
    if is_mixed(values, array.type):
        raise pa.ArrowInvalid("values of several types")
    return array


def _crashes(values: Iterable[Any]) -> bool:
    """Whether pyarrow ends the process: it does where some values of NumPy,
    such as float16, follow an instant of NumPy."""
    types = set(map(type, values))
    if types & _NESTED:
        inner = [
            one.values() if isinstance(one, dict) else one
            for one in values
            if type(one) in _NESTED
        ]
        if _crashes(list(chain.from_iterable(inner))):
            return True
    return np.datetime64 in types and len(types - {type(None)}) > 1


def _numpy_of(values: torch.Tensor) -> npt.NDArray[Any]:
    values = values.detach().cpu()
    if values.dtype == torch.bfloat16:
        values = values.float()
    found: npt.NDArray[Any] = values.numpy()
    return found


def as_array(what: str, values: Any, bad: Bad | None = None) -> pa.Array:
    """As :func:`as_arrays`, in one piece."""
    parts = as_arrays(what, values, bad)
    if not parts:
        return pa.array([], pa.null())
    return parts[0] if len(parts) == 1 else pa.concat_arrays(parts)


def _unreadable(what: str, error: BaseException) -> errors.DtypeError:
    text = (str(error) or type(error).__name__).splitlines()[0]
    return errors.DtypeError(f"{what} cannot be read as one column: {text}")


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
    if values.dtype.kind in "mM":
        unit = np.datetime_data(values.dtype)
        to = _UNITS.get(unit if values.dtype.kind == "M" else ("m", *unit))
        if to is not None:
            values = values.astype(to)
    if values.dtype == object:
        return _of_objects(values)
    return pa.array(values, from_pandas=True)


def _mixed(
    what: str, values: Any, error: BaseException, bad: Bad | None
) -> pa.Array:
    """Values of several types, each by its text."""
    parts: list[Any] = []
    for i, value in enumerate(values):
        try:
            parts.append(_text(value))
        except UnicodeEncodeError:
            text = f"{what}: {ascii(value)[:80]} has half a character"
            if bad is None:
                raise errors.MalformedData(
                    f"{text} (a lone surrogate), at {i}"
                ) from None
            bad.setdefault(i, (text, what))
            parts.append(None)
        except (TypeError, ValueError, pa.ArrowException) as wrong:
            if bad is None:
                shown = (
                    wrong if isinstance(wrong, errors.DtypeError) else error
                )
                raise _unreadable(what, shown) from None
            text = f"{what}: a {type(value).__name__} that has no text"
            bad.setdefault(i, (text, what))
            parts.append(None)
    known = [isinstance(part, list) for part in parts if part is not None]
    lists = sum(known) > len(known) / 2
    if any(known) and not all(known):
        if bad is None:
            raise _unreadable(what, error)
        odd = "one value among lists" if lists else "a list among values"
        for i, part in enumerate(parts):
            if part is not None and isinstance(part, list) != lists:
                bad.setdefault(i, (f"{what}: {odd}", what))
                parts[i] = None
    return pa.array(parts, pa.list_(pa.binary()) if lists else pa.binary())


def _text(value: Any) -> Any:
    """A value as bytes, None or a list of them.

    Raises:
        TypeError: it has no text.
    """
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return None
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return value.encode()
    if type(value) is int:  # of any size
        return str(value).encode()
    if isinstance(value, torch.Tensor):
        value = _numpy_of(value)
    if isinstance(value, np.ndarray) and value.ndim == 0:
        return _text(value[()])
    if isinstance(value, np.datetime64 | np.timedelta64) and np.isnat(value):
        return None
    if isinstance(value, Decimal) and not value.is_finite():
        return _text(float(value))
    if type(value).__name__ == "Period":  # of pandas
        return str(value).encode()
    if isinstance(value, list | tuple | np.ndarray):
        parts = [_text(one) for one in value]
        if any(isinstance(part, list) for part in parts):
            raise errors.DtypeError("a list of lists has no text")
        return parts
    if isinstance(value, uuid.UUID):
        return str(value).encode()
    for exact in "to_datetime64", "to_timedelta64":  # of pandas
        if hasattr(value, exact):
            value = getattr(value, exact)()
    out = texts(_as_arrow([value]))[0].as_py()
    if out == "" and value != value:  # NaN
        return None
    return out.encode() if isinstance(out, str) else out


def hash_array(
    array: pa.Array,
    salt: int,
    *,
    what: str = "a column",
    version: int = HASH_VERSION,
) -> Ids:
    """The ids of an array's values, int64 [n].

    Args:
        array: any type that has a text.
        salt: checked already.
        what: it is, for messages.
        version: of the hash.

    Raises:
        DtypeError: its type has no text.
        MalformedData: a value has none.
    """
    array = plain(array, version)
    if pa.types.is_dictionary(array.type):
        known = hash_dictionary(array.dictionary, salt, version=version)
        return ids_of_codes(array, known)
    column = texts(array, what, version)
    if column.null_count:
        at = int(np.argmin(column.is_valid().to_numpy(zero_copy_only=False)))
        raise errors.MalformedData(
            f"{what}: value {at} is a time out of the range that has a text"
        )
    return hash_texts(column, salt)


def hash_texts(
    column: pa.Array,
    salt: int,
    *,
    strip: bool = False,
    out: Ids | None = None,
) -> Ids:
    """The ids of texts, int64 [n].

    Args:
        column: strings or bytes, without nulls.
        salt: checked already.
        strip: leave out spaces and tabs around texts.
        out: where the ids go.
    """
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
    values: pa.Array,
    salt: int,
    *,
    strip: bool = False,
    version: int = HASH_VERSION,
) -> Ids:
    """The ids of a dictionary's n values, and that of a missing one behind
    them: int64 [n + 1]."""
    column = texts(values, version=version)
    empty = pa.array([""]).cast(column.type)
    column = pc.fill_null(pa.concat_arrays([column, empty]), "")
    return hash_texts(column, salt, strip=strip)


def integers(
    array: pa.Array,
    what: str,
    *,
    strip: bool = False,
    version: int = HASH_VERSION,
) -> tuple[Ids, npt.NDArray[np.bool_]]:
    """(values as ids of 64 bits, which values are integers of 64 bits).

    Integers from 2**63 to 2**64 - 1 are ids less 2**64, whatever their type.

    Args:
        array: integers, or what has the text of one.
        what: it is, for messages.
        strip: spaces and tabs around texts do not count.
        version: of the hash: its texts.
    """
    kind = array.type
    if pa.types.is_integer(kind):
        good = array.is_valid().to_numpy(zero_copy_only=False)
        array = pc.fill_null(array, 0) if array.null_count else array
        ids = array.to_numpy(zero_copy_only=False)
        ids = ids.view(np.int64) if ids.dtype == np.uint64 else ids
        return ids.astype(np.int64), good
    text = pc.fill_null(texts(array, what, version), "")
    if not pa.types.is_string(text.type):
        text = text.cast(pa.large_binary()).view(pa.large_string())
    if strip:
        text = pc.ascii_trim(text, " \t")
    try:
        if not pc.any(pc.match_substring(text, "x", ignore_case=True)).as_py():
            ids = text.cast(pa.int64()).to_numpy()
            return ids, np.ones(len(ids), bool)
    except pa.ArrowInvalid:
        pass
    wide = pa.types.is_large_string(text.type)
    text = text.view(pa.large_binary() if wide else pa.binary())
    known = text.dictionary_encode()
    found = [_integer(value) for value in known.dictionary.to_pylist()]
    each = np.array([0 if v is None else v for v in found], np.int64)
    is_one = np.array([v is not None for v in found], bool)
    at = known.indices.to_numpy()
    return each[at], is_one[at]


def _integer(text: bytes) -> int | None:
    if not _INTEGER.fullmatch(text):
        return None
    number = int(text)
    if 2**63 <= number < 2**64:
        number -= 2**64
    return number if -(2**63) <= number < 2**63 else None


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
