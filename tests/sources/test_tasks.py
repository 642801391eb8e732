"""Several labels, groups and carried columns: against pandas, over files of
all formats and sources in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch

import persia
from persia import errors
from persia.data import Files, Records, Schema, Table, infer, prepare
from persia.data.kafka.values import Values, Written

N = 500
SCHEMA = Schema(
    label=["click", {"column": "stars", "name": "liked", "threshold": 4}],
    categorical=["user", "item"],
    dense=["price"],
    group="user",
    carry=[
        "big",
        {"column": "price", "name": "raw", "dtype": "float64"},
        {"column": "item", "name": "request", "dtype": "id"},
        "rate",
    ],
)


def frame() -> pd.DataFrame:
    rng = np.random.default_rng(0)
    stars = rng.integers(1, 6, N).astype(float)
    stars[rng.random(N) < 0.3] = np.nan
    return pd.DataFrame(
        {
            "user": [f"u{i}" for i in rng.integers(0, 9, N)],
            "item": [f"i{i}" for i in rng.integers(0, 40, N)],
            "price": rng.random(N).round(3),
            "click": rng.integers(0, 2, N),
            "stars": stars,
            "big": rng.integers(2**60, 2**61, N),
            "rate": np.where(
                rng.random(N) < 0.1, np.nan, rng.random(N).round(6)
            ),
        }
    )


def in_file(write: Callable[[pd.DataFrame, str], Any], name: str) -> Any:
    def made(data: pd.DataFrame, folder: Path) -> Iterable[persia.Batch]:
        path = str(folder / name)
        write(data, path)
        return Files(path, SCHEMA, 64)

    return made


CARRIERS: dict[str, Callable[[pd.DataFrame, Path], Iterable[persia.Batch]]] = {
    "parquet": in_file(lambda f, p: f.to_parquet(p), "a.parquet"),
    "arrow": in_file(lambda f, p: f.to_feather(p), "a.feather"),
    "csv": in_file(lambda f, p: f.to_csv(p, index=False), "a.csv"),
    "json": in_file(
        lambda f, p: f.to_json(
            p, orient="records", lines=True, double_precision=15
        ),
        "a.jsonl",
    ),
    "pandas": lambda f, _: Table(f, SCHEMA, 64),
    "arrow table": lambda f, _: Table(pa.Table.from_pandas(f), SCHEMA, 64),
    "records": lambda f, _: Records(f.to_dict("records"), SCHEMA, 64),
}


def joined(batches: Iterable[persia.Batch], name: str) -> np.ndarray:
    return torch.cat([batch[name] for batch in batches]).numpy()


@pytest.mark.parametrize("carrier", CARRIERS)
def test_every_carrier_gives_what_pandas_has(
    carrier: str, tmp_path: Path
) -> None:
    data = frame()
    batches = list(CARRIERS[carrier](data, tmp_path))
    stars = data["stars"]
    liked = np.where(stars.isna(), np.nan, stars >= 4)
    np.testing.assert_array_equal(
        joined(batches, "label"),
        np.stack([data["click"], liked], 1).astype(np.float32),
    )
    for name, column in ("group", "user"), ("request", "item"):
        ids = persia.hash_ids(data[column])
        np.testing.assert_array_equal(joined(batches, name), ids)
    for name, column in ("big", "big"), ("raw", "price"), ("rate", "rate"):
        values = joined(batches, name)
        assert values.dtype == data[column].dtype
        np.testing.assert_array_equal(values, data[column])


def test_a_label_that_is_missing_is_nan_only_among_several() -> None:
    data = pd.DataFrame(
        {
            "a": ["x", "y", "z", "x"],
            "one": ["yes", None, "no", "yes"],
            "two": ["7", "-", "6", "other"],
        }
    )
    two = {"column": "two", "values": {"7": 1, "6": 0}}
    several = Schema(label=["one", two], categorical=["a"])
    table = Table(data, several, malformed_limit=1)
    nan = np.nan
    np.testing.assert_array_equal(
        joined(table, "label"), [[1, 1], [nan, nan], [0, 0]]
    )
    assert table.malformed == 1 and "other" in table.malformed_lines[0]
    alone = Table(
        data, Schema(label="one", categorical=["a"]), malformed_limit=1
    )
    np.testing.assert_array_equal(joined(alone, "label"), [1, 0, 1])
    assert alone.malformed == 1
    assert alone.tasks == [] and table.tasks == ["one", "two"]


@pytest.mark.parametrize(
    ("values", "dtype", "expected"),
    [
        (["7", "NA", "x"], "int64", [7]),
        (["7", "NA", "x"], "float64", [7, np.nan]),
        (["1", "no", "0"], "bool", [True, False]),
        ([1.5, None, 2.0], "float32", [1.5, np.nan, 2]),
        ([1.5, None, 2.0], "int64", [2]),
        ([True, False, None], None, [True, False]),
        ([1, 2, 3], "float32", [1, 2, 3]),
        (
            pd.to_datetime([86_400_000, None, 500], unit="ms"),
            None,
            [86400, np.nan, 0.5],
        ),
    ],
)
def test_what_a_carried_column_has_not_is_malformed(
    values: Any, dtype: str | None, expected: list[Any]
) -> None:
    data = pd.DataFrame({"a": ["x"] * 3, "c": values})
    carried = {"column": "c", "dtype": dtype}
    schema = Schema(categorical=["a"], carry=[carried])
    table = Table(data, schema, malformed_limit=1)
    np.testing.assert_array_equal(joined(table, "c"), expected)
    assert table.malformed == 3 - len(expected)


def test_a_message_may_lack_one_of_several_labels() -> None:
    schema = Schema(
        label=["click", "buy"],
        categorical=["user"],
        group="user",
        carry=[{"column": "n", "dtype": "int64"}],
    )
    written = Written.checked("json", None, None, None)
    values = Values(schema, written, False)
    rows, wrong = values.rows(
        [
            b'{"user": "a", "click": 1, "buy": 0, "n": 7}',
            b'{"user": "b", "click": 0, "n": 2305843009213693953}',
            b'{"user": "a", "click": null, "buy": true, "n": 9}',
            b'{"user": "a", "click": 1, "buy": 2, "n": 9}',
            b'{"user": "a", "click": 1, "buy": 1}',
        ]
    )
    assert rows is not None and list(wrong) == [3, 4]
    nan = np.nan
    np.testing.assert_array_equal(
        rows.tensors["label"], [[1, 0], [0, nan], [nan, 1]]
    )
    assert rows.tensors["n"].tolist() == [7, 2**61 + 1, 9]
    np.testing.assert_array_equal(
        rows.tensors["group"], persia.hash_ids(["a", "b", "a"])
    )
    with pytest.raises(errors.InvalidArgument):
        persia.data.Kafka(
            "127.0.0.1:1", "t", group="g", schema=SCHEMA, batch_size=8
        )


def test_no_digit_of_an_integer_of_json_is_lost(tmp_path: Path) -> None:
    """Though the field has a fraction, or too large a number, elsewhere."""
    path = tmp_path / "a.jsonl"
    whole = [2**61 + 1, 1.5, -(2**62) - 1, 2**70]
    lines = [f'{{"a": "x", "c": {n}, "g": {n}}}\n' for n in whole]
    path.write_text("".join(lines))
    schema = Schema(
        categorical=["a"],
        group="g",
        carry=[{"column": "c", "dtype": "int64"}],
    )
    (batch,) = Files(str(path), schema)
    assert batch["c"].tolist() == [whole[0], whole[2]]
    ids = persia.hash_ids([str(whole[0]), str(whole[2])])
    np.testing.assert_array_equal(batch["group"], ids)


@pytest.mark.parametrize("given", [None, "float64"])
def test_times_are_carried_as_seconds(given: Any, tmp_path: Path) -> None:
    """Those of Parquet, and texts of the other formats."""
    when = pd.date_range("2024-01-01", periods=9, freq="h", tz="Europe/Vienna")
    table = pd.DataFrame({"a": range(9), "when": when})
    carried: Any = {"column": "when", "dtype": given}
    schema = Schema(categorical=["a"], carry=[carried])
    table.to_parquet(tmp_path / "a.parquet")
    table.to_csv(tmp_path / "a.csv", index=False)
    lines: Any = {"orient": "records", "lines": True, "date_format": "iso"}
    table.to_json(tmp_path / "a.json", **lines)
    expected = [one.timestamp() for one in when]
    texts = {"a": range(9), "when": [one.isoformat() for one in when]}
    for data in (
        *(
            Files(tmp_path / f"a.{x}", schema)
            for x in ("parquet", "csv", "json")
        ),
        Table(table, schema),
        Table(texts, schema),
    ):
        (batch,) = data
        assert batch["when"].dtype == torch.float64
        assert batch["when"].tolist() == expected


def test_texts_are_carried_as_ids_alone() -> None:
    data = pd.DataFrame({"a": ["x", "y"], "c": ["some", "text"]})
    with pytest.raises(errors.SchemaMismatch):
        Table(data, Schema(categorical=["a"], carry=["c"]))


@pytest.mark.parametrize(
    "fields",
    [
        {"label": []},
        {"label": ["a", "a"]},
        {"label": ["a", {"column": "b", "treshold": 3}]},
        {"label": {"column": "a", "treshold": 3}},
        {"carry": ["a", "a"]},
        {"carry": ["label"]},
        {"carry": [{"column": "a", "name": "ids"}]},
        {"carry": [{"column": "a", "dtype": "text"}]},
        {"group": {"column": "a", "of": 3}},
    ],
)
def test_what_no_schema_can_say(fields: dict[str, Any]) -> None:
    with pytest.raises(errors.InvalidArgument) as caught:
        Schema(categorical=["x"], **fields)
    text = str(caught.value)
    assert "'threshold' meant" in text or "treshold" not in str(fields)


def test_a_schema_survives_its_yaml(tmp_path: Path) -> None:
    path = tmp_path / "schema.yaml"
    path.write_text(SCHEMA.to_yaml())
    again = Schema.load(path)
    assert again == SCHEMA and again.tasks == ["click", "liked"]
    assert Schema.of_checkpoint(SCHEMA.model_dump_json()) == SCHEMA


def test_labels_that_are_named_are_no_features(tmp_path: Path) -> None:
    data, path = frame(), str(tmp_path / "a.parquet")
    data["buy"] = data["click"] * (data["stars"] > 3)
    data.to_parquet(path)
    label = ["click", "buy"]
    schema = infer(data, label=label, group="user")
    files = Files(path, label=label, group="user")
    for found in schema, files.schema:
        assert found.tasks == label and found.group is not None
        assert not {"click", "buy"} & set(found.columns_of_features)
        assert "user" in found.columns_of_features
    assert files.tasks == label and Files(path, label=["buy"]).tasks == []
    # In a schema that is given they take the place of others.
    other = Files(path, SCHEMA, label=["stars", "buy"]).schema
    assert [one.threshold for one in other.labels] == [4, None]
    with pytest.raises(errors.InvalidArgument):
        Files(path, SCHEMA, label=["item"])
    for wrong in ({"label": ["none"]}, {"group": "none"}):
        with pytest.raises(errors.SchemaMismatch):
            Files(path, **wrong)  # type: ignore[arg-type]


def test_another_label_is_no_feature() -> None:
    """Whoever buys has clicked."""
    data = frame().drop(columns=["stars", "big", "rate"])
    data["buy"] = data["click"] * (data["price"] > 0.5)
    data["y"] = np.arange(N) % 7  # no label: it has seven values
    for label, expected in ([], "click"), (["buy"], "buy"):
        schema = infer(data, label=label)
        assert schema.tasks == [expected]
        assert schema.columns_of_features == {"user", "item", "price", "y"}


def test_a_split_looks_at_each_label(tmp_path: Path) -> None:
    data, path = frame(), str(tmp_path / "a.parquet")
    data["stars"] = np.where(np.arange(N) < N // 2, 5.0, np.nan)
    data.to_parquet(path)
    for source in Table(data, SCHEMA), Files(path, SCHEMA):
        with pytest.raises(errors.InvalidArgument):
            source.split(0.1)


def test_a_log_keeps_them_when_it_is_sorted(tmp_path: Path) -> None:
    data = frame()
    times = np.random.default_rng(1).permutation(N)
    data.assign(time=times).to_csv(tmp_path / "log.csv", index=False)
    schema = SCHEMA.model_copy(update={"timestamp": "time"})
    done = prepare(str(tmp_path / "log.csv"), schema, tmp_path / "out")
    batches = list(Files([str(f) for f in done.files], str(done.schema), 64))
    data = data.iloc[np.argsort(times)].reset_index(drop=True)
    expected = list(Table(data, SCHEMA, 64))
    for name in expected[0].tensors:
        np.testing.assert_array_equal(
            joined(batches, name), joined(expected, name), name
        )
