"""Numbers and times among texts that are none: the oracle is pyarrow's cast
of each text by itself."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from persia.data import Schema
from persia.data.schema import encode
from persia.data.schema.encode import Encoder

NUMBERS = st.from_regex(
    r"[+-]?[0-9]{0,4}\.?[0-9]{0,3}([eE][+-]?[0-9]{1,3})?", fullmatch=True
)
TIMES = st.from_regex(
    r"[0-9]{4}-[01][0-9]-[0-3][0-9]([ T][0-2][0-9](:?[0-6][0-9]){0,2}"
    r"(\.[0-9]{1,7})?)?(Z|[+-][0-9]{2}(:?[0-9]{2})?)?",
    fullmatch=True,
)
WORDS = st.sampled_from(
    ["true", "FALSE", "nan", "inf", "0x10", "1_0", "odd", "t", "1e999", "٣"]
)
TEXTS = st.lists(
    st.one_of(NUMBERS, TIMES, WORDS, st.text(max_size=9)), min_size=1
)


def cast(text: str, kind: pa.DataType) -> Any:
    try:
        return pa.scalar(text).cast(kind)
    except pa.ArrowInvalid:
        return None


def number_of(text: str) -> float:
    """As it was before whole columns were looked at."""
    if text.lower() in ("true", "false"):
        return float(text.lower() == "true")
    found = cast(text, pa.float64())
    value = math.nan if found is None else float(found.as_py())
    return value if math.isfinite(value) else math.nan


def time_of(text: str) -> float:
    for zone in ("UTC", None):
        found = cast(text, pa.timestamp("us", zone))
        if found is not None:
            return float(found.value) / 1e6
    return math.nan


@settings(max_examples=200)
@given(TEXTS)
def test_texts_of_any_kind(texts: list[str]) -> None:
    schema = Schema(categorical=["x"], timestamp="t", missing=[])
    table = pa.table({"x": texts, "t": texts})
    numbers, missing, wrong, _ = Encoder(schema).numbers(table, "x")
    assert not missing.any()
    expected = np.array([number_of(text) for text in texts])
    assert np.array_equal(wrong, np.isnan(expected))
    assert np.array_equal(numbers[~wrong], expected[~wrong])
    rows, ok = Encoder(schema).encode(table, lambda *_: None)
    seconds = np.array(
        [
            time_of(text) if math.isnan(value) else value
            for text, value in zip(texts, expected, strict=True)
        ]
    )
    assert np.array_equal(ok, ~np.isnan(seconds))
    assert rows.tensors["timestamp"].tolist() == seconds[ok].tolist()


@pytest.mark.parametrize(
    ("odd", "most"),
    [
        (["odd"], 8),
        ([f"odd {i}" for i in range(4096)], 8),
        (["2024-02-30 01:00:00", "odd"], 60),
        (["0000-00-00 00:00:00"] * 999, 8),
        (["1e9999999"], 60),
    ],
)
@pytest.mark.parametrize("zone", ["", "Z"])
def test_a_few_odd_values_cost_a_few_casts(
    odd: list[str],
    most: int,
    zone: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []
    real = encode.cast_texts

    def count(*args: Any) -> Any:
        calls.append(args)
        return real(*args)

    monkeypatch.setattr(encode, "cast_texts", count)
    n = 1 << 14
    times = [
        f"2024-01-{i % 28 + 1:02} {i % 24:02}:{i // 60 % 60:02}:{i % 60:02}"
        for i in range(n)
    ]
    column = [f"{time}{zone if i % 2 else ''}" for i, time in enumerate(times)]
    column[100 : 100 + len(odd)] = odd
    wrong: list[int] = []
    encoder = Encoder(Schema(categorical=["c"], timestamp="t"))
    table = pa.table({"t": column, "c": column})
    rows, _ = encoder.encode(table, lambda row, *_: wrong.append(row))
    assert wrong == list(range(100, 100 + len(odd)))
    assert len(rows) == n - len(odd)
    assert len(calls) <= most
