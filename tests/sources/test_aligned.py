"""Columns beside the ids of a sequence: against lists of Python, over files of
all formats and sources in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import persia
from persia import errors, models
from persia.data import Files, Records, Schema, Table, prepare

N = 300
ROWS = dict[str, list[Any]]


def schema_of(most: int | None = None) -> Schema:
    history = {
        "column": "history",
        "separator": "|",
        "max_length": most,
        "aligned": [
            {"column": "when", "name": "time"},
            {"column": "watched", "dtype": "float32"},
            {"column": "action", "dtype": "id"},
        ],
    }
    return Schema(label="click", categorical=["user"], sequences=[history])


def rows() -> ROWS:
    rng = np.random.default_rng(0)
    out: ROWS = {n: [] for n in "click user history when watched".split()}
    out["action"] = []
    for _ in range(N):
        n = int(rng.integers(0, 6))
        out["click"].append(int(rng.integers(0, 2)))
        out["user"].append(f"u{rng.integers(0, 9)}")
        out["history"].append([f"i{i}" for i in rng.integers(0, 40, n)])
        out["when"].append(rng.integers(2**60, 2**61, n).tolist())
        out["watched"].append(rng.random(n).round(3).tolist())
        out["action"].append([f"a{i}" for i in rng.integers(0, 3, n)])
    return out


def texts(data: ROWS) -> pd.DataFrame:
    joined = {
        name: [
            "|".join(map(str, one)) if isinstance(one, list) else one
            for one in column
        ]
        for name, column in data.items()
    }
    return pd.DataFrame(joined)


def in_file(write: Callable[[ROWS, str], Any], name: str) -> Any:
    def made(data: ROWS, folder: Path, schema: Schema) -> Any:
        write(data, str(folder / name))
        return Files(str(folder / name), schema, 64)

    return made


CARRIERS: dict[str, Callable[[ROWS, Path, Schema], Any]] = {
    "parquet": in_file(
        lambda d, p: pq.write_table(pa.table(d), p), "a.parquet"
    ),
    "arrow": in_file(
        lambda d, p: feather.write_feather(pa.table(d), p), "a.feather"
    ),
    "csv": in_file(lambda d, p: texts(d).to_csv(p, index=False), "a.csv"),
    "json": in_file(
        lambda d, p: pd.DataFrame(d).to_json(p, orient="records", lines=True),
        "a.jsonl",
    ),
    "pandas": lambda d, _, s: Table(pd.DataFrame(d), s, 64),
    "texts": lambda d, _, s: Table(texts(d), s, 64),
    "records": lambda d, _, s: Records(
        pd.DataFrame(d).to_dict("records"), s, 64
    ),
}


def lists_of(batches: Iterable[persia.Batch]) -> dict[str, list[list[Any]]]:
    """The ids of each sample, and what lies beside them."""
    out: dict[str, list[list[Any]]] = {}
    for batch in batches:
        ids, lengths = batch.ids["history"]
        named = {"ids": ids} | batch.aligned["history"]
        for name, tensor in named.items():
            parts = torch.split(tensor, lengths.tolist())
            out.setdefault(name, []).extend(one.tolist() for one in parts)
    return out


def expected(data: ROWS, most: int | None) -> dict[str, list[list[Any]]]:
    def cut(values: list[Any]) -> list[Any]:
        return values if most is None else values[-most:]

    def ids(values: list[Any]) -> list[int]:
        return persia.hash_ids(cut(values)).tolist() if values else []

    return {
        "ids": [ids(one) for one in data["history"]],
        "time": [cut(one) for one in data["when"]],
        "watched": [np.float32(cut(one)).tolist() for one in data["watched"]],
        "action": [ids(one) for one in data["action"]],
    }


@pytest.mark.parametrize("most", [None, 3])
@pytest.mark.parametrize("carrier", CARRIERS)
def test_every_carrier_gives_what_the_lists_have(
    carrier: str, most: int | None, tmp_path: Path
) -> None:
    data = rows()
    batches = list(CARRIERS[carrier](data, tmp_path, schema_of(most)))
    assert lists_of(batches) == expected(data, most)
    assert batches[0].aligned["history"]["time"].dtype == torch.int64


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.lists(st.sampled_from(["a", "b", "", None]), max_size=4),
            st.lists(st.sampled_from([1.0, 2.0, None]), max_size=4),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_rows_without_an_entry_for_each_value_are_malformed(
    samples: list[tuple[list[str | None], list[float | None]]],
) -> None:
    """Values that are none have no id, and their entries go with them."""
    schema = Schema(
        sequences=[
            {"column": "a", "aligned": [{"column": "t", "dtype": "float64"}]}
        ]
    )
    table = pa.table(
        {
            "a": pa.array([one for one, _ in samples], pa.list_(pa.string())),
            "t": pa.array([one for _, one in samples], pa.list_(pa.float64())),
        }
    )
    data = Table(table, schema, malformed_limit=1)
    good = [(a, t) for a, t in samples if len(a) == len(t)]
    assert data.malformed == len(samples) - len(good)
    if not good:
        return
    (batch,) = data
    times = [y for a, t in good for x, y in zip(a, t, strict=True) if x]
    np.testing.assert_array_equal(
        batch.aligned["a"]["t"], np.array(times, np.float64)
    )
    assert batch.ids["a"][1].tolist() == [sum(map(bool, a)) for a, _ in good]


def test_entries_of_another_type_are_malformed() -> None:
    schema = Schema(
        sequences=[
            {"column": "a", "aligned": [{"column": "t", "dtype": "int64"}]}
        ]
    )
    frame = pd.DataFrame(
        {"a": ["x,y", "x", "y,z", ""], "t": ["1,2", "one", "3,4", ""]}
    )
    data = Table(frame, schema, malformed_limit=1)
    (batch,) = data
    assert batch.aligned["a"]["t"].tolist() == [1, 2, 3, 4]
    assert data.malformed == 1 and "one" in data.malformed_lines[0]


@pytest.mark.parametrize(
    "fields",
    [
        {"categorical": [{"column": "a", "aligned": ["t"]}]},
        {"sequences": [{"column": "a", "aligned": ["t", "t"]}]},
        {"sequences": [{"column": "a", "aligned": [{"colum": "t"}]}]},
    ],
)
def test_what_no_schema_can_say(fields: dict[str, Any]) -> None:
    with pytest.raises(errors.InvalidArgument):
        Schema(**({"categorical": ["x"]} | fields))


def test_times_of_a_file_reach_a_model_of_sequences() -> None:
    (batch,) = Table(pa.table(rows()), schema_of(4), N)
    items = persia.EmbeddingCollection(
        store=persia.Store(persia.optim.SGD(lr=0.1)),
        tables=[persia.EmbeddingConfig("item", 8, ["history"])],
    )
    model = models.HSTU(items, blocks=1, max_length=4)
    times = batch.aligned["history"]["time"]
    states, vectors = model(batch.ids, (times - times.min()).float())
    assert states.shape == vectors.shape == (len(times), 8)
    assert len(times) == len(batch.ids["history"][0])


def test_a_log_keeps_them_when_it_is_sorted(tmp_path: Path) -> None:
    data = rows()
    times = np.random.default_rng(1).permutation(N)
    texts(data).assign(at=times).to_csv(tmp_path / "log.csv", index=False)
    schema = schema_of().model_copy(update={"timestamp": "at"})
    done = prepare(str(tmp_path / "log.csv"), schema, tmp_path / "out")
    found = lists_of(Files([str(f) for f in done.files], str(done.schema)))
    order = np.argsort(times)
    data = {n: [column[i] for i in order] for n, column in data.items()}
    assert found == expected(data, None)
    assert Schema.load(done.schema).sequences[0].aligned
