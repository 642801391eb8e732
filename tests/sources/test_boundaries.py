"""Nothing but Persia's errors leaves a public call, and what is malformed is
counted."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import random
import struct
import uuid
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet as pq

import persia
from persia import errors
from persia.data import Files, Records, Schema, Table, infer
from persia.data.formats.read_json import DEPTH
from persia.data.kafka.values import Values, Written
from tests.ready import ended

pandas = pytest.importorskip("pandas")

HALF = "\ud83d"
S = Schema(categorical=["x"], label="y")
GOOD = {"x": "a", "y": 1}


def lines(path: Path, rows: list[str]) -> Path:
    path.write_text("".join(row + "\n" for row in rows))
    return path


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


ODD_ROWS = [
    json.dumps({"x": HALF, "y": 1}),
    *(f'{{"x": {nested(n)}, "y": 1}}' for n in (1500, 20_000)),
    '{"x": "a", "y": 1',
    "[" * 20_000,
    '{"x": {"a": 1}, "y": 1}',
    '{"x": [1, 2], "y": 1}',
]


@pytest.mark.parametrize("odd", ODD_ROWS, ids=range(len(ODD_ROWS)))
def test_an_odd_object_is_malformed(odd: str, tmp_path: Path) -> None:
    good = json.dumps(GOOD)
    path = lines(tmp_path / "a.jsonl", [good, odd, good])
    data = Files(path, S)
    assert sum(len(batch) for batch in data) == 2
    assert data.malformed == 1
    with pytest.raises(errors.MalformedData):
        list(Files(path, S, strict=True))
    values = Values(S, Written.checked("json", None, None, None), False)
    for _ in range(2):  # it never stops an iteration twice
        rows, wrong = values.rows([good.encode(), odd.encode(), good.encode()])
        assert rows is not None
        assert (len(rows), list(wrong)) == (2, [1])


@pytest.mark.parametrize("odd", ODD_ROWS[:2], ids=range(2))
def test_an_odd_field_that_is_not_used(odd: str, tmp_path: Path) -> None:
    """It is read over, unless no parser should see it."""
    row = odd.replace('"x"', '"z"').replace('"y"', '"x": "a", "y"')
    data = Files(lines(tmp_path / "a.jsonl", [row, json.dumps(GOOD)]), S)
    count = sum(len(batch) for batch in data)
    assert count + data.malformed == 2
    assert count == 2 - ("[[" in row)


def test_brackets_over_several_lines(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", ['{"x":[', *["["] * 30_000])
    lines(tmp_path / "b.jsonl", [json.dumps(GOOD)])
    data = Files([tmp_path / "b.jsonl", path], S, malformed_limit=1)
    assert sum(len(batch) for batch in data) == 1
    assert data.malformed == 30_001
    values = Values(S, Written.checked("json", None, None, None), False)
    message = b'{"x":' + b"[\n" * 30_000
    assert list(values.rows([message, json.dumps(GOOD).encode()])[1]) == [0]


def test_deep_but_not_too_deep(tmp_path: Path) -> None:
    deep = {"z": json.loads(nested(DEPTH - 1))} | GOOD
    (batch,) = Files(lines(tmp_path / "a.jsonl", [json.dumps(deep)]), S)
    assert len(batch) == 1


def test_fields_that_files_may_lack(tmp_path: Path) -> None:
    lines(tmp_path / "a.jsonl", ['{"y": 1}'])
    lines(tmp_path / "b.jsonl", ['{"y": 1}', json.dumps(GOOD)])
    data = Files(tmp_path / "*.jsonl", S)
    assert sum(len(batch) for batch in data) == 3
    with pytest.raises(errors.SchemaMismatch):
        list(Files(tmp_path / "a.jsonl", S))


ZOO: list[Any] = [
    *(None, 1, -1, 2**63, 2**64, 10**40, 1.5, float("nan"), float("inf")),
    *(True, "", "a", HALF, b"\xff", bytearray(b"a"), 1j, object(), type),
    *([], [1], [[1]], [HALF], {"a": 1}, {1, 2}, (1, "a"), lambda: 1),
    *(
        dt.date(1, 1, 1),
        dt.datetime(9999, 12, 31),
        dt.time(1),
        dt.timedelta(9),
    ),
    *(dt.datetime(2024, 1, 1, tzinfo=dt.UTC), Decimal("NaN"), Decimal("1e99")),
    *(
        uuid.UUID(int=1),
        np.float16(1),
        np.datetime64("2024", "Y"),
        np.void(b"a"),
    ),
    *(np.datetime64("NaT"), pandas.NaT, pandas.NA, pandas.Timestamp.max),
    *(pandas.Interval(0, 1), pandas.Period("2024"), torch.tensor(1)),
    *(np.array([1]), torch.zeros(2), pa.scalar(1), Ellipsis, NotImplemented),
]
COLUMNS: list[Any] = [
    *(
        torch.zeros(2, dtype=kind)
        for kind in (torch.bfloat16, torch.complex64)
    ),
    *(torch.zeros(2).to_sparse(), torch.zeros((2, 2, 2)), np.zeros(2, "V3")),
    *(np.array([1j, 2]), np.array(["a", 1], object), np.zeros((2, 0))),
    *(pa.array([{"a": 1}] * 2), pa.array([[[1]]] * 2), pa.nulls(2)),
    *(pandas.Series([1, "a"]), pandas.Series(pandas.interval_range(0, 2))),
    *(range(2), "ab", 5, None, {"a": 1}, np.array(["2024"] * 2, "M8[ps]")),
    pa.array([10**15, 1], pa.timestamp("s")),
    pa.array([(1, 2, 3)] * 2, pa.month_day_nano_interval()),
    np.array([1, 2], np.longdouble),
]


def tried(call: Any, *args: Any, **options: Any) -> None:
    """Calls; Persia's errors alone may occur."""
    with contextlib.suppress(errors.PersiaError):
        call(*args, **options)


def read(source: Any, *args: Any, **options: Any) -> None:
    list(source(*args, **options))


def rows_of(values: Any) -> None:
    for schema in (
        S,
        Schema(label="y", multivalued=["x"]),
        Schema(label="y", dense=["x"], categorical=["z"]),
        Schema(label="y", categorical=[{"column": "x", "hash": False}]),
        Schema(label="x", categorical=["z"]),
        Schema(label="y", timestamp="x", categorical=["z"]),
        Schema(label="y", categorical=[{"column": "x", "type": "time"}]),
    ):
        table = {"x": values, "y": [1] * 2, "z": ["a"] * 2}
        for strict in (True, False):
            tried(Table, table, schema, strict=strict)
            if isinstance(values, list):
                rows = [{"x": v, "y": 1, "z": "a"} for v in values]
                tried(read, Records, rows, schema, strict=strict)


@pytest.mark.parametrize("value", ZOO, ids=lambda v: type(v).__name__)
def test_odd_values(value: Any) -> None:
    for values in ([value, value], ["a", value], [value, 1], [[value], [1]]):
        tried(persia.hash_ids, values)
        tried(infer, {"x": values, "y": [0, 1]})
        rows_of(values)
    tried(persia.hash_ids, value)
    tried(Table, value, S)
    tried(Schema, categorical=value)
    tried(Schema, categorical=[{"column": "x", "separator": value}])
    tried(Schema, categorical=["x"], missing=value)
    tried(Schema.load, value)


@pytest.mark.parametrize("column", COLUMNS, ids=lambda v: type(v).__name__)
def test_odd_columns(column: Any) -> None:
    tried(persia.hash_ids, column)
    tried(infer, {"x": column, "y": [0, 1]})
    rows_of(column)


@settings(max_examples=50)
@given(st.lists(st.sampled_from(ZOO), min_size=2, max_size=2))
def test_odd_values_together(values: list[Any]) -> None:
    tried(persia.hash_ids, values)
    rows_of(values)


def test_values_that_crash_pyarrow() -> None:
    """An instant of NumPy before some others."""
    instant = np.datetime64("2024-01-02T12:00:00")
    for odd in np.float16(1), np.void(b"a"):
        for values in (
            [instant, odd],
            [None, instant, odd],
            [[instant], [odd]],
            [{"a": instant}, {"a": odd}],
            np.array([instant, odd], object),
            pandas.Series([instant, odd], dtype=object),
        ):
            tried(persia.hash_ids, values)
            tried(Table, {"x": values}, S)
    half = [instant, np.float16(0.5)]
    alone = [persia.hash_ids([v]).item() for v in half]
    assert persia.hash_ids(half).tolist() == alone


def test_an_odd_row_is_left_out() -> None:
    rows = [{"x": v, "y": 1} for v in ("a", HALF, "b", {"a": 1})]
    for data in (Table(rows, S, malformed_limit=1), Records(rows, S)):
        assert sum(len(batch) for batch in data) == 2
        assert data.malformed == 2


def test_a_column_that_is_not_used(tmp_path: Path) -> None:
    """It is not converted, whatever it is."""
    odd = [{"a": 1}, HALF, object(), 2**70]
    rows = [{"x": "a", "y": 1, "z": v} for v in odd]
    frame = pandas.DataFrame(rows)
    for data in (
        *(Table(t, S) for t in (rows, frame, {c: frame[c] for c in frame})),
        Records(rows, S),
        Records([frame], S),
    ):
        assert sum(len(batch) for batch in data) == 4
    found = infer(frame.assign(y=[0, 1, 0, 1], x=["a", "b", "a", "b"]))
    assert [c.feature for c in found.features] == ["x"]


def many(path: Path, n: int, odd: int) -> Path:
    rows = [f"a{i % 9},{'odd' if i < odd else i % 7},1" for i in range(n)]
    return lines(path, ["x,d,y", *rows])


def test_more_malformed_rows_than_the_limit(tmp_path: Path) -> None:
    schema = Schema(categorical=["x"], dense=["d"], label="y")
    with pytest.raises(errors.LimitReached):
        list(Files(many(tmp_path / "a.csv", 1000, 11), schema))
    (batch,) = Files(many(tmp_path / "a.csv", 1000, 10), schema)
    assert len(batch) == 990
    data = Files(
        many(tmp_path / "a.csv", 1000, 500), schema, malformed_limit=0.5
    )
    assert sum(len(batch) for batch in data) == 500
    early = Files(many(tmp_path / "b.csv", 100_000, 5000), schema, 1000)
    with pytest.raises(errors.LimitReached):
        list(islice(early, 50))
    odd = ["odd" if i % 50 == 0 else 1 for i in range(200)]
    rows = [{"x": "a", "d": d, "y": 1} for d in odd]
    with pytest.raises(errors.LimitReached):
        list(Records(rows, schema))
    with pytest.raises(errors.InvalidArgument):
        Records(rows, schema, malformed_limit=2)


def seeds(folder: Path) -> dict[str, bytes]:
    """A small file of each format."""
    rows = [{"x": f"v{i}", "y": i % 2, "m": ["a", "b"]} for i in range(20)]
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, folder / "a.parquet")
    with pa.ipc.new_file(folder / "a.arrow", table.schema) as out:
        out.write_table(table)
    with pa.ipc.new_stream(folder / "a.arrows", table.schema) as out:
        out.write_table(table)
    lines(folder / "a.jsonl", [json.dumps(row) for row in rows])
    lines(
        folder / "a.csv", ["x,y,m", *(f"v{i},{i % 2},'a'" for i in range(9))]
    )
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir())}


CHILD = """
import logging, random, sys
from pathlib import Path
from persia import errors
from persia.data import Files, Schema
from persia.data.kafka.values import Values, Written
logging.disable()
from tests.sources.test_boundaries import fuzz
fuzz(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
"""


def fuzz(folder: Path, seed: int, rounds: int) -> None:
    """Reads damaged files and messages: Persia's errors alone may occur."""
    rng = random.Random(seed)
    schema = Schema(label="y", categorical=["x"], multivalued=["m"])
    known = seeds(folder)
    (size,) = struct.unpack("<I", known["a.parquet"][-8:-4])
    footer = size + 8
    forms = {"a.jsonl": "json", "a.arrows": "arrow"}
    for _ in range(rounds):
        name, raw = rng.choice(list(known.items()))
        data = bytearray(raw)
        for _ in range(rng.randint(1, 8)):
            # A damaged footer makes pyarrow end the process: it throws
            # where its metadata does not expect it.
            end = len(data) - footer if name == "a.parquet" else len(data)
            at = rng.randrange(end)
            piece = rng.choice(
                [b"[", b'"', b"\x00", b"\xff\xff", rng.randbytes(3)]
            )
            if rng.random() < 0.5 and at + len(piece) <= end:
                data[at : at + len(piece)] = piece
            else:
                data[at:at] = piece * rng.choice([1, 1, 500])
        path = folder / f"fuzzed{Path(name).suffix}"
        path.write_bytes(data)
        for one in (schema, None):
            tried(read, Files, path, one)
        if name in forms:
            written = Written.checked(forms[name], None, None, None)
            values = Values(schema, written, True)
            tried(values.rows, [bytes(data), None, b"{}"])


def run_fuzz(folder: Path, seed: int, rounds: int) -> None:
    words = ("-c", CHILD, str(folder), str(seed), str(rounds))
    ran = ended(*words, cwd=Path(__file__).parents[2], timeout=900)
    assert ran.returncode == 0, (seed, ran.returncode, ran.stderr[-3000:])


@pytest.mark.slow
def test_damaged_files(tmp_path: Path) -> None:
    run_fuzz(tmp_path, 1, 60)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2, 10))
def test_many_damaged_files(seed: int, tmp_path: Path) -> None:
    run_fuzz(tmp_path, seed, 5000)
