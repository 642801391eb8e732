"""One text for one value: what ids are hashes of.

An id depends on the value alone, whatever format, type, unit, zone, writer or
piece of the data brought it. A value has a logical type, which types of Arrow
and of Python are mapped to, and a logical type has one text:

=============  ==================================  ==========================
logical type   types of Arrow (Python's alike)     text
=============  ==================================  ==========================
missing        null, NaN                           the empty text
text           string, large, view                 as it is
bytes          binary, large, view, fixed size     as they are
number         integers, floats, decimals          decimal digits
boolean        bool, ``arrow.bool8``               ``true``, ``false``
date           date32, date64                      ``2024-01-31``
instant        timestamp of any unit and zone      ``2024-01-31 23:59:59.5``
time           time32, time64                      ``23:59:59.5``
duration       duration of any unit                its seconds, a number
UUID           ``arrow.uuid``                      its text in lower case
period         ``pandas.period``                   as pandas writes it
the value's    dictionary, run-end encoded, other  that of the value
               extension types
=============  ==================================  ==========================

Digits have neither an exponent nor zeros at the end of a fraction, so 7, 7.0
and 7.00 are ``7``; a float has the fewest digits that give it back. Fractions
of seconds have no zeros at their end. An instant is in UTC, with or without a
zone.
Structs, maps, unions, intervals and lists of lists have no text.

That is version 2 of the hash. Version 1, of models that were trained before
it, has the texts that pyarrow's casts give: see :func:`texts`.
"""

from __future__ import annotations

import datetime
import json
import sys
from decimal import Decimal
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from persia import errors

HASH_VERSION = 2

Mask = npt.NDArray[np.bool_]

_HEX = np.frombuffer(
    "".join(f"{i:02x}" for i in range(256)).encode(), np.uint8
).reshape(256, 2)
_TICKS = {"s": 1, "ms": 1000, "us": 10**6, "ns": 10**9}
_OF_PANDAS = {"Timestamp": "nanosecond", "Timedelta": "nanoseconds"}
_ODD_TIME = "<"  # begins what pyarrow writes for a time out of its range


def is_text(kind: pa.DataType) -> bool:
    """Whether values of a type are texts or bytes with offsets."""
    t = pa.types
    return bool(
        t.is_string(kind)
        or t.is_large_string(kind)
        or t.is_binary(kind)
        or t.is_large_binary(kind)
    )


def is_list(kind: pa.DataType) -> bool:
    """Whether values of a type are lists, once they are plain."""
    t = pa.types
    return bool(
        t.is_list(kind) or t.is_large_list(kind) or t.is_fixed_size_list(kind)
    )


def one_piece(column: Any) -> pa.Array:
    """A column of chunks as one array."""
    if not isinstance(column, pa.ChunkedArray):
        return column
    one = column.num_chunks == 1
    column = column.chunk(0) if one else column.combine_chunks()
    if isinstance(column, pa.ChunkedArray):  # of no chunks, or too long
        column = (
            pa.concat_arrays(column.chunks)
            if column.num_chunks
            else pa.array([], column.type)
        )
    return column


def plain(array: pa.Array, version: int = HASH_VERSION) -> pa.Array:
    """Values without extension types, views and run ends; lists as such.

    Args:
        array: of any type; that of a list's values stays.
        version: of the hash; in version 1 an extension type is its storage.
    """
    t = pa.types
    if isinstance(array, pa.ExtensionArray):
        array = array.storage if version == 1 else _of_extension(array)
        return plain(array, version)
    kind = array.type
    if t.is_run_end_encoded(kind):
        return plain(pc.run_end_decode(array), version)
    if t.is_string_view(kind):
        return array.cast(pa.large_string())
    if t.is_binary_view(kind):
        return array.cast(pa.large_binary())
    if t.is_list_view(kind) or t.is_large_list_view(kind):
        lengths = pc.fill_null(array.value_lengths(), 0).to_numpy()
        offsets = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        return pa.LargeListArray.from_arrays(offsets, array.flatten())
    if t.is_dictionary(kind) and _is_odd(kind.value_type):
        values = plain(array.dictionary, version)
        return pa.DictionaryArray.from_arrays(array.indices, values)
    return array


def _is_odd(kind: pa.DataType) -> bool:
    t = pa.types
    return isinstance(kind, pa.BaseExtensionType) or bool(
        t.is_string_view(kind)
        or t.is_binary_view(kind)
        or t.is_run_end_encoded(kind)
    )


def _of_extension(array: pa.ExtensionArray) -> pa.Array:
    name = array.type.extension_name
    if name == "arrow.uuid":
        return _uuids(array.storage)
    if name == "arrow.bool8":
        return pc.not_equal(array.storage, 0)
    if name == "pandas.period":
        return _periods(array)
    return array.storage


def _uuids(raw: pa.Array) -> pa.Array:
    """The texts of UUIDs of 16 bytes each."""
    n = len(raw)
    given = np.frombuffer(raw.buffers()[1] or b"", np.uint8)
    given = given[16 * raw.offset : 16 * (raw.offset + n)].reshape(n, 16)
    digits = _HEX[given].reshape(n, 32)
    out = np.full((n, 36), ord("-"), np.uint8)
    at = 0
    for begin, end in (0, 8), (8, 12), (12, 16), (16, 20), (20, 32):
        out[:, at : at + end - begin] = digits[:, begin:end]
        at += end - begin + 1
    offsets = np.arange(n + 1, dtype=np.int64) * 36
    text = pa.LargeStringArray.from_buffers(
        n, pa.py_buffer(offsets), pa.py_buffer(out)
    )
    if raw.null_count:
        text = pc.if_else(raw.is_valid(), text, None)
    return text


def _periods(array: pa.ExtensionArray) -> pa.Array:
    pandas = sys.modules.get("pandas")  # which has made the type known
    if pandas is None:
        return array.storage
    freq = json.loads(array.type.__arrow_ext_serialize__())["freq"]
    numbers = pc.fill_null(array.storage, 0).to_numpy(zero_copy_only=False)
    found = pandas.PeriodIndex.from_ordinals(numbers, freq=freq)
    mask = array.storage.is_null().to_numpy(zero_copy_only=False)
    return pa.array(found.astype(str).to_numpy(object), pa.string(), mask=mask)


def texts(
    array: pa.Array, what: str = "a column", version: int = HASH_VERSION
) -> pa.Array:
    """The text of each value, as strings or bytes: "" where it is missing,
    and null where it has none, as an instant after the year 32767.

    Args:
        array: of any type.
        what: it is, for messages.
        version: of the hash.

    Raises:
        DtypeError: its type has no text.
    """
    array = plain(array, version)
    kind, t = array.type, pa.types
    if t.is_dictionary(kind):
        return texts(array.dictionary_decode(), what, version)
    if t.is_null(kind):
        return pa.array([""] * len(array), pa.string())
    if is_text(kind):
        out = array
    elif t.is_fixed_size_binary(kind):
        out = array.cast(pa.binary())
    elif t.is_integer(kind):
        out = array.cast(pa.string())
    elif t.is_floating(kind):
        out = _floats(array, version)
    elif t.is_nested(kind) or t.is_union(kind) or not _castable(kind):
        raise errors.DtypeError(
            f"{what} has the type {kind}, which has no text to hash; need "
            "strings, numbers, booleans, dates, times or bytes"
        )
    elif version == 1:
        out = array.cast(pa.string())
    else:
        return _moments(array)
    if out.null_count:
        out = pc.fill_null(out, pa.scalar("").cast(out.type))
    return out


def _castable(kind: pa.DataType) -> bool:
    if pa.types.is_interval(kind):
        return False
    try:
        pa.array([], kind).cast(pa.string())
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid):
        return False
    return True


def _moments(array: pa.Array) -> pa.Array:
    """Texts of decimals, booleans, dates, times, instants and durations."""
    kind, t = array.type, pa.types
    if t.is_decimal(kind):
        out = _decimals(array)
    elif t.is_duration(kind):
        out = _durations(array)
    elif t.is_timestamp(kind):
        out = _instants(array.cast(pa.int64()), kind.unit)
    elif t.is_time(kind):
        out = _without_zeros(array.cast(pa.string()))
    else:
        out = array.cast(pa.string())
    if t.is_temporal(kind) and not t.is_duration(kind):
        odd = pc.fill_null(pc.starts_with(out, _ODD_TIME), False)
        if pc.any(odd).as_py():
            out = pc.if_else(odd, "", out)  # null below
            known = pc.or_(pc.invert(odd), array.is_null())
            return pc.if_else(known, pc.fill_null(out, ""), None)
    return pc.fill_null(out, "")


def _instants(ticks: pa.Array, unit: str) -> pa.Array:
    """In UTC, whatever the zone."""
    column = ticks.cast(pa.timestamp(unit))
    try:
        return column.cast(pa.timestamp("s")).cast(pa.string())
    except pa.ArrowInvalid:  # some have fractions of a second
        return _without_zeros(column.cast(pa.string()))


def _without_zeros(text: pa.Array) -> pa.Array:
    short = pc.replace_substring_regex(text, r"(\.[0-9]*?)0+$", r"\1")
    return pc.replace_substring_regex(short, r"\.$", "")


def _decimals(array: pa.Array) -> pa.Array:
    kind = array.type
    if kind.scale < 0:
        array = array.cast(pa.decimal256(76, 0))
    out = array.cast(pa.string())
    if kind.scale > 0:
        out = _without_zeros(_positional(out))
        out = pc.if_else(pc.equal(out, "-0"), "0", out)
    return out


def _durations(array: pa.Array) -> pa.Array:
    unit = _TICKS[array.type.unit]
    known = array.cast(pa.int64()).dictionary_encode()
    found = [digits(Decimal(v) / unit) for v in known.dictionary.to_pylist()]
    return pa.array(found, pa.string()).take(known.indices)


def digits(number: Decimal) -> str:
    """A number without exponent, without zeros at the end of a fraction."""
    text = f"{number:f}"
    if "." in text:
        text = text.rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def _positional(text: pa.Array) -> pa.Array:
    """Texts of numbers without exponents."""
    some = pc.match_substring_regex(text, "[eE]")
    if not pc.any(some).as_py():
        return text
    values = [
        v if v is None or "e" not in v.lower() else digits(Decimal(v))
        for v in text.to_pylist()
    ]
    return pa.array(values, pa.string())


def _floats(array: pa.Array, version: int) -> pa.Array:
    if pa.types.is_float16(array.type):
        array = array.cast(pa.float32())
    x = array.to_numpy(zero_copy_only=False).astype(np.float64)
    with np.errstate(invalid="ignore"):
        missing = np.isnan(x)
        whole = (np.floor(x) == x) & (np.abs(x) < 2.0**63)
    known = np.where(whole, x, 0.0).astype(np.int64)
    out = pa.array(known, mask=missing).cast(pa.string())
    if (whole | missing).all():
        return out
    rest = array.cast(pa.string())
    if version > 1:
        with np.errstate(invalid="ignore"):
            huge = (np.abs(x) >= 2.0**63) & np.isfinite(x)
        if huge.any():
            mask = pa.array(huge)
            exact = [str(int(v)) for v in x[huge]]
            rest = pc.replace_with_mask(rest, mask, pa.array(exact))
        rest = _positional(rest)
    return pc.if_else(pa.array(whole | missing), out, rest)


def is_mixed(values: Any, kind: pa.DataType) -> bool:
    """Whether a list that pyarrow takes for one type has values of several,
    or finer ones: it would change some of them."""
    t = pa.types
    if t.is_list(kind):
        lists = [v for v in values if isinstance(v, list | tuple | np.ndarray)]
        return is_mixed(list(chain.from_iterable(lists)), kind.value_type)
    if t.is_date(kind):
        return any(issubclass(v, datetime.datetime) for v in _types(values))
    if t.is_timestamp(kind) or t.is_duration(kind):
        fine = any(v.__name__ in _OF_PANDAS for v in _types(values))
        return fine and any(map(_nanoseconds, values))
    if t.is_float64(kind) and _types(values) & {np.float16, np.float32}:
        return True
    if t.is_integer(kind) or t.is_floating(kind):
        return bool(_types(values) & {bool, np.bool_})
    return False


def _nanoseconds(value: Any) -> Any:
    """Those of a time of pandas, which pyarrow leaves out."""
    name = _OF_PANDAS.get(type(value).__name__)
    return name is not None and getattr(value, name)


def _types(values: Any) -> set[type]:
    return set(map(type, values))
