"""Values of all logical types, whose ids every carrier has to give alike."""

from __future__ import annotations

import datetime as dt
import uuid
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa

__all__ = ["REFUSED", "VALUES", "Value", "table_of"]

NOON = dt.datetime(2024, 1, 2, 12, 0, 0, 500_000)
ONE = uuid.UUID("123e4567-e89b-12d3-a456-426614174000")
DAY = dt.date(2024, 1, 2)


@dataclass(frozen=True)
class Value:
    """A value of a logical type.

    Attributes:
        array: of Arrow, that holds it.
        text: whose hash its id is.
        id: with ``hash: false``. None: it is none.
    """

    array: pa.Array
    text: str
    id: int | None = None


def _integers() -> dict[str, Value]:
    out = {}
    for bits in (8, 16, 32, 64):
        for sign in ("int", "uint"):
            kind = getattr(pa, f"{sign}{bits}")()
            limits = np.iinfo(f"{sign}{bits}")
            for name, n in (("low", limits.min), ("high", limits.max)):
                as_id = int(n) - (1 << 64 if n >= 1 << 63 else 0)
                array = pa.array([int(n)], kind)
                out[f"{kind}_{name}"] = Value(array, str(n), as_id)
    return out


def _numbers() -> dict[str, Value]:
    def decimal(text: str, kind: Any) -> pa.Array:
        return pa.array([Decimal(text)], kind)

    half = np.array([0.5], np.float16)
    return {
        "float16": Value(pa.array(half, pa.float16()), "0.5"),
        "float32": Value(pa.array([0.1], pa.float32()), "0.1"),
        "float64": Value(pa.array([0.1]), "0.1"),
        "whole": Value(pa.array([7.0]), "7", 7),
        "negative_zero": Value(pa.array([-0.0]), "0", 0),
        "huge": Value(pa.array([1e22]), "1" + "0" * 22),
        "small": Value(pa.array([1e-7]), "0.0000001"),
        "decimal": Value(decimal("7.10", pa.decimal128(9, 2)), "7.1"),
        "decimal_whole": Value(decimal("7.00", pa.decimal128(18, 2)), "7", 7),
        "decimal_wide": Value(
            decimal(str(2**64 - 1), pa.decimal128(38, 0)), str(2**64 - 1), -1
        ),
        "decimal_small": Value(
            decimal("-0.0000001", pa.decimal128(20, 10)), "-0.0000001"
        ),
        "decimal256": Value(decimal("9" * 60, pa.decimal256(60, 0)), "9" * 60),
        "true": Value(pa.array([True]), "true"),
        "false": Value(pa.array([False]), "false"),
    }


def _texts() -> dict[str, Value]:
    out = {
        "text": Value(pa.array(["a b"]), "a b"),
        "one_code": Value(pa.array(["é"]), "é"),
        "combining": Value(pa.array(["e\u0301"]), "e\u0301"),
        "beyond": Value(pa.array(["\U0001f600"]), "\U0001f600"),
        "digits": Value(pa.array(["0042"]), "0042", 42),
        "binary": Value(pa.array([b"z\xc3\xa9"]), "zé"),
        "uuid": Value(pa.array([ONE]), str(ONE)),
    }
    text = pa.array(["v"])
    for name, kind in (
        ("large_text", pa.large_string()),
        ("text_view", pa.string_view()),
        ("binary_view", pa.binary_view()),
        ("fixed", pa.binary(1)),
    ):
        out[name] = Value(text.cast(pa.binary()).cast(kind), "v")
    out["code"] = Value(text.dictionary_encode(), "v")
    return out


def _times() -> dict[str, Value]:
    out = {
        "day": Value(pa.array([DAY]), "2024-01-02"),
        "day_64": Value(pa.array([DAY], pa.date64()), "2024-01-02"),
        "first_day": Value(pa.array([dt.date(1, 1, 1)]), "0001-01-01"),
        "last_day": Value(pa.array([dt.date(9999, 12, 31)]), "9999-12-31"),
        "time_s": Value(pa.array([43200], pa.time32("s")), "12:00:00"),
    }
    for unit, per in (("s", 1), ("ms", 10**3), ("us", 10**6), ("ns", 10**9)):
        for zone in (None, "UTC", "America/New_York"):
            kind = pa.timestamp(unit, zone)
            name = f"instant_{unit}_{(zone or 'naive').rpartition('/')[2]}"
            half = per // 2
            text = "2024-01-02 12:00:00" + (".5" if half else "")
            ticks = 1704196800 * per + half
            out[name] = Value(pa.array([ticks], kind), text)
        kind = pa.duration(unit)
        out[f"duration_{unit}"] = Value(pa.array([-90 * per], kind), "-90")
        if unit == "ns":
            continue
        for year, seconds in ((1, -62135596800), (9999, 253402300799)):
            text = dt.datetime(1970, 1, 1) + dt.timedelta(seconds=seconds)
            out[f"year_{year}_{unit}"] = Value(
                pa.array([seconds * per], pa.timestamp(unit)),
                text.isoformat(" "),
            )
    for kind in (pa.time32("ms"), pa.time64("us"), pa.time64("ns")):
        out[f"time_{kind.unit}"] = Value(
            pa.array([NOON.time()], kind), "12:00:00.5"
        )
    out["nanoseconds"] = Value(
        pa.array([1704196800_000000001], pa.timestamp("ns")),
        "2024-01-02 12:00:00.000000001",
    )
    return out


#: By the name of the column.
VALUES: dict[str, Value] = {
    "missing": Value(pa.array([None]), ""),
    **_integers(),
    **_numbers(),
    **_texts(),
    **_times(),
}

#: Which have no text.
REFUSED: dict[str, pa.Array] = {
    "struct": pa.array([{"a": 1}]),
    "map": pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64())),
    "lists": pa.array([[[1]]]),
    "interval": pa.array([(1, 2, 3)], pa.month_day_nano_interval()),
}


def table_of(arrays: dict[str, pa.Array]) -> pa.Table:
    """Each value, and for each a list of it: ``NAME`` and ``NAME_list``."""
    columns = dict(arrays)
    for name, array in arrays.items():
        if name not in REFUSED:
            offsets = pa.array([0, 1], pa.int32())
            columns[f"{name}_list"] = pa.ListArray.from_arrays(offsets, array)
    return pa.table(columns)
