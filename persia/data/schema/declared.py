"""Values as the type that a schema declares, where a carrier has texts."""

from __future__ import annotations

import datetime
import re
from decimal import Decimal, InvalidOperation

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from persia.data.schema.canonical import digits, is_text
from persia.data.schema.columns import Mask
from persia.data.schema.schema import Schema

YES = ["1", "yes", "true", "y", "t"]
NO = ["0", "no", "false", "n", "f"]

_MOST = 400  # digits of a number, about those of the largest float
_TIME = re.compile(
    r"([0-9]{4}-[0-9]{2}-[0-9]{2})(?:[T ]([0-9]{2}):?([0-9]{2})"
    r"(?::?([0-9]{2})(?:[.,]([0-9]+))?)?)? ?(Z|UTC|[+-][0-9]{2}:?[0-9]{0,2})?"
)


def read_declared(
    column: pa.Array, kind: str, schema: Schema, name: str
) -> tuple[pa.Array, Mask]:
    """(the canonical texts of values, which values are of the type).

    Args:
        column: texts, bytes, or values of a type, which stay.
        kind: "number", "boolean" or "time".
        schema: with the texts of missing values.
        name: of the column.
    """
    good = np.ones(len(column), bool)
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if kind == "time" and pa.types.is_date(column.type):
        return column.cast(pa.timestamp("ms")), good
    if not is_text(column.type):
        return column, good
    read = {"number": _number, "boolean": _boolean, "time": _time}[kind]
    missing = set(schema.missing)
    known = column.dictionary_encode()
    found: list[str | None] = []
    for value in known.dictionary.to_pylist():
        if isinstance(value, bytes):
            value = value.decode("utf-8", "replace")
        text = value.strip()
        found.append("" if text in missing else read(text))
    each = pa.array(found, pa.string())
    indices = pc.fill_null(known.indices, len(found))
    out = pa.concat_arrays([each, pa.array([""])]).take(indices)
    return out, out.is_valid().to_numpy(zero_copy_only=False)


def _number(text: str) -> str | None:
    try:
        number = Decimal(text)
    except InvalidOperation:
        return None
    if not number.is_finite() or abs(number.adjusted()) > _MOST:
        return None
    return digits(number) if "_" not in text else None


def _boolean(text: str) -> str | None:
    lower = text.lower()
    return "true" if lower in YES else "false" if lower in NO else None


def _time(text: str) -> str | None:
    match = _TIME.fullmatch(text)
    if match is None:
        return None
    day, hour, minute, second, fraction, zone = match.groups()
    clock = f"{hour or '00'}:{minute or '00'}:{second or '00'}"
    try:
        time = datetime.datetime.fromisoformat(f"{day} {clock}")
        if zone and zone not in ("Z", "UTC"):
            sign = -1 if zone[0] == "-" else 1
            hours, minutes = int(zone[1:3]), int(zone[3:].strip(":") or 0)
            time -= sign * datetime.timedelta(hours=hours, minutes=minutes)
    except (ValueError, OverflowError):
        return None
    fraction = (fraction or "").rstrip("0")
    text = time.isoformat(" ", "seconds")
    return f"{text}.{fraction}" if fraction else text
