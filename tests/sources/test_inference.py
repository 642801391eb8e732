"""A schema that is inferred says what it took each column for, and why."""

from __future__ import annotations

import datetime as dt
import json
import logging
import tempfile
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet as pq

from persia import errors, hash_ids
from persia.data import Files, Records, Schema, Table, infer
from persia.data.schema import inference

pandas = pytest.importorskip("pandas")

N = 200


@pytest.fixture(autouse=True)
def _anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inference, "logged", set())


def frame(**columns: Any) -> Any:
    base = {"user_id": [i % 50 for i in range(N)], "click": [0, 1] * (N // 2)}
    return pandas.DataFrame(base | columns)


def csv(path: Path, table: Any, **options: Any) -> Path:
    table.to_csv(path, index=False, **options)
    return path


def test_a_line_for_each_column(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    table = frame(
        price=[i / 7 for i in range(N)],
        same=["x"] * N,
        text=[f"t{i}" for i in range(N)],
        none=[None] * N,
    )
    path = csv(tmp_path / "a.csv", table)
    with caplog.at_level(logging.WARNING, "persia.data"):
        Files(path)
        Files(path)
        for data in (table, pa.Table.from_pandas(table)):
            infer(data)
        list(Records(table.to_dict("records")))
    records = [r.getMessage() for r in caplog.records if "guess" in r.message]
    assert len(records) == 3  # once for each source
    for text in records:
        for name in table.columns:
            assert any(
                line.strip().startswith(f"{name}: ")
                for line in text.splitlines()
            ), (name, text)
        assert text.count("left out") == 3


def test_the_first_file_with_rows(tmp_path: Path) -> None:
    table = pa.Table.from_pandas(frame(c=["a", "b"] * (N // 2)))
    for i, part in enumerate((table.slice(0, 0), table)):
        pq.write_table(part, tmp_path / f"{i}.parquet")
        with pa.ipc.new_file(tmp_path / f"{i}.arrow", part.schema) as out:
            out.write_table(part)
        with pa.ipc.new_stream(tmp_path / f"{i}.arrows", part.schema) as out:
            out.write_table(part)
        csv(tmp_path / f"{i}.csv", part.to_pandas())
        csv(tmp_path / f"{i}.tsv", part.to_pandas(), sep="\t")
        text = "".join(json.dumps(row) + "\n" for row in part.to_pylist())
        (tmp_path / f"{i}.jsonl").write_text(text)
    for suffix in ("parquet", "arrow", "arrows", "csv", "tsv", "jsonl"):
        data = Files(tmp_path / f"*.{suffix}")
        assert sorted(data.keys) == ["c", "user_id"], suffix
        assert sum(len(batch) for batch in data) == N, suffix
        with pytest.raises(errors.SchemaMismatch):
            Files(tmp_path / f"0.{suffix}")


@pytest.mark.parametrize("word", ["\\N", "None", "N/A", "<NA>", "-", "NULL"])
def test_words_for_no_value(word: str, tmp_path: Path) -> None:
    price: list[Any] = [i / 7 for i in range(N)]
    user: list[Any] = [i % 50 for i in range(N)]
    price[3] = user[4] = None
    table = frame(price=price).assign(user_id=user)
    path = csv(tmp_path / "a.csv", table, na_rep=word)
    data = Files(path)
    assert (data.dense_names, data.keys) == (["price"], ["user_id"])
    (batch,) = data
    expected = hash_ids(table["user_id"])  # 7.0 and none, of floats
    assert batch.ids.values().tolist() == expected.tolist()
    assert data.malformed == 0
    texts = table.astype(object).where(table.notna(), word)
    found = infer(texts.assign(price=texts["price"].astype(str)))
    assert [d.column for d in found.dense] == ["price"]


def test_decimal_commas(tmp_path: Path) -> None:
    table = frame(
        price=[1234.5 + i for i in range(N)], age=[0.5 * i for i in range(N)]
    )
    path = csv(tmp_path / "a.csv", table, sep=";", decimal=",")
    data = Files(path)
    assert data.schema.delimiter == ";"
    assert data.dense_names == ["price", "age"]
    assert {d.decimal for d in data.schema.dense} == {","}
    (batch,) = data
    plain = Schema(
        dense=[
            d.model_copy(update={"decimal": "."}) for d in data.schema.dense
        ],
        categorical=["user_id"],
        label="click",
    )
    (expected,) = Table(table, plain)
    assert batch.dense.tolist() == expected.dense.tolist()
    (tmp_path / "b.csv").write_text('x;n;y\n"1.234,5";a;1\n"-2,5";b;0\n')
    schema = Schema(
        label="y",
        dense=[{"column": "x", "decimal": ","}],
        categorical=["n"],
        delimiter=";",
    )
    (batch,) = Files(tmp_path / "b.csv", schema)
    assert batch.dense.tolist() == [[1234.5], [-2.5]]


def test_decimal_commas_are_measured(tmp_path: Path) -> None:
    """Moments and quantiles of numbers with commas, also where no column is
    an id."""
    table = frame(price=[1234.5 + i for i in range(N)])
    table = table[["price", "click"]]
    path = csv(tmp_path / "a.csv", table, sep=";", decimal=",")
    found, plain = Files(path).schema, Table(table).schema
    assert found.categorical[0].decimal == ","
    assert found.categorical[0].buckets == plain.categorical[0].buckets
    (tmp_path / "s.yaml").write_text(found.to_yaml())
    again = Schema.load(tmp_path / "s.yaml")
    (batch,), (expected,) = Files(path, again), Table(table, plain)
    assert batch.ids.values().tolist() == expected.ids.values().tolist()
    dense = [{"column": "price", "decimal": ",", "standardise": True}]
    more: Any = {"categorical": ["click"], "delimiter": ";"}
    data = Files(path, Schema(label="click", dense=dense, **more))
    moments = data.schema.dense[0].standardise
    assert moments.mean == pytest.approx(table["price"].mean())


@pytest.mark.parametrize("mark", [",", ";", "\t", "|"])
def test_the_delimiter_by_trial(mark: str, tmp_path: Path) -> None:
    """Quotes hold other marks, more of them than there are fields."""
    table = frame(note=["a;b|c,d\te, f; g" + "x" * (i % 9) for i in range(N)])
    table.columns = ["user_id", "click", "note, of; all|kinds\tof, marks"]
    data = Files(csv(tmp_path / "a.csv", table, sep=mark))
    assert data.schema.delimiter == mark
    assert sum(len(batch) for batch in data) == N
    assert data.malformed == 0


@pytest.mark.parametrize(
    ("unit", "ticks"), [("s", 1), ("ms", 10**3), ("us", 10**6), ("ns", 10**9)]
)
def test_units_of_epochs(unit: str, ticks: int) -> None:
    table = frame(timestamp=[(1_700_000_000 + i) * ticks for i in range(N)])
    data = Table(table)
    assert data.schema.time_unit == unit
    (batch,) = data
    assert batch.timestamp.tolist() == [1_700_000_000 + i for i in range(N)]


def test_ids_as_decimals() -> None:
    table = pa.Table.from_pandas(frame()).append_column(
        "key",
        pa.array(
            [Decimal(10**20 + i) for i in range(N)], pa.decimal128(38, 0)
        ),
    )
    found = infer(table)
    assert [c.feature for c in found.features] == ["user_id", "key"]
    assert not found.dense


def test_booleans_of_text(tmp_path: Path) -> None:
    table = frame(flag=[True, False, False, True] * (N // 4))
    table["click"] = [i * i for i in range(N)]
    schema = Schema(label=None, categorical=["flag"])
    path = csv(tmp_path / "a.csv", frame(flag=[True, False] * (N // 2), z=1.5))
    data = Files(path)
    (batch,) = data
    (expected,) = Table({"flag": [True, False] * (N // 2)}, schema)
    at = data.keys.index("flag")
    assert at >= 0
    assert batch.ids["flag"][0].tolist() == expected.ids.values().tolist()


NAMES = st.text(min_size=1, max_size=8).filter(lambda s: s.isprintable())


@settings(max_examples=60)
@given(st.data())
def test_yaml_round_trip(data: Any) -> None:
    """All that was given or measured is kept, defaults, too."""
    names = data.draw(st.lists(NAMES, min_size=3, max_size=3, unique=True))
    number = st.floats(allow_nan=False, allow_infinity=False)
    schema = Schema(
        dense=[
            {
                "column": names[0],
                "missing": data.draw(number),
                "log": data.draw(st.booleans()),
                "standardise": {
                    "mean": data.draw(number),
                    "std": data.draw(st.floats(1e-9, 1e9)),
                },
                "decimal": data.draw(st.sampled_from(".,")),
            }
        ],
        categorical=[
            {
                "column": names[1],
                "type": data.draw(st.sampled_from([None, "number", "time"])),
                "hash_salt": data.draw(st.integers(0, 2**64 - 1)),
            }
        ],
        label={"column": names[2], "values": {data.draw(NAMES): 1, "0": 0.0}},
        missing=data.draw(st.lists(NAMES)),
        quote=data.draw(st.sampled_from(['"', "'", None])),
        strip=data.draw(st.booleans()),
        delimiter=data.draw(st.sampled_from(",;\t|")),
        hash_version=data.draw(st.sampled_from([1, 2])),
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "s.yaml")
        path.write_text(schema.to_yaml(), encoding="utf-8")
        again = Schema.load(path)
    assert again == schema
    assert "delimiter" in again.model_fields_set


def test_what_was_measured_is_kept(tmp_path: Path) -> None:
    table = frame(
        price=[i / 7 for i in range(N)], time=[dt.datetime(2024, 1, 1)] * N
    )
    path = csv(tmp_path / "a.csv", table, sep=";")
    schema = Schema(
        dense=[{"column": "price", "standardise": True}],
        categorical=[
            "user_id",
            {"column": "price", "name": "b", "buckets": 4},
        ],
        label="click",
        timestamp="time",
    )
    data = Files(path, schema)
    (tmp_path / "s.yaml").write_text(data.schema.to_yaml())
    again = Schema.load(tmp_path / "s.yaml")
    assert again == data.schema
    assert again.delimiter == ";"


@pytest.mark.parametrize(
    "texts",
    [
        ["2024-03-04 21:59:26", "2024-03-05 00:00:00.5"],
        ["2024-03-04T21:59:26Z", "2024-03-05T01:00:00+02:00"],
        ["2024-03-04", "2024-03-05"],
    ],
)
def test_texts_of_times_in_each_format(
    texts: list[str], tmp_path: Path
) -> None:
    """CSV's reader makes times of them; other formats have texts."""
    rows = pa.table(
        {
            "user": [f"u{i % 7}" for i in range(40)],
            "seen": [texts[i % 2] for i in range(40)],
            "label": [i % 2 for i in range(40)],
        }
    )
    pq.write_table(rows, tmp_path / "a.parquet")
    csv(tmp_path / "a.csv", rows.to_pandas())
    lines = "".join(json.dumps(row) + "\n" for row in rows.to_pylist())
    (tmp_path / "a.jsonl").write_text(lines)
    seconds = []
    for name in "a.parquet", "a.csv", "a.jsonl":
        data = Files(tmp_path / name, batch_size=40)
        assert data.schema.timestamp == "seen", name
        (batch,) = data
        seconds.append(batch.timestamp.tolist())
    assert seconds[0] == seconds[1] == seconds[2]
    odd = rows.set_column(1, "seen", pa.array([*texts * 19, "soon", "late"]))
    assert Table(odd, batch_size=40).schema.timestamp is None
