"""Rows as Arrow tables, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import persia
from persia import errors
from persia.store.engine import engine_of

N = 100


def make(optimizer: Any = None, dtype: str = "fp32") -> persia.Store:
    store = persia.Store(optimizer or persia.optim.Adam())
    store.add_table(persia.EmbeddingBagConfig("t", 3, data_type=dtype))
    return store


def filled(store: persia.Store) -> persia.Store:
    rng = np.random.default_rng(0)
    ids = torch.from_numpy(rng.integers(-(2**63), 2**63, N, dtype=np.int64))
    floats = engine_of(store).core.state_floats(0)
    store.set_rows(
        "t",
        ids,
        torch.from_numpy(rng.normal(size=(N, 3))),
        torch.from_numpy(rng.random((N, floats))),
    )
    return store


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "optimizer", [persia.optim.SGD, persia.optim.RowWiseAdagrad, None]
)
def test_there_and_back(tmp_path: Path, optimizer: Any, dtype: str) -> None:
    store = filled(make(optimizer and optimizer(lr=0.1), dtype))
    table = store.to_arrow("t", state=True)
    ids = torch.tensor(table.column("id").to_pylist())
    assert torch.equal(ids, store.ids("t").sort().values)
    expected, states, _ = store.rows_and_state("t", ids)
    assert torch.equal(torch.tensor(table["vector"].to_pylist()), expected)
    assert ("state" in table.column_names) == (optimizer != persia.optim.SGD)

    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=7)
    other = make(optimizer and optimizer(lr=0.1), dtype)
    other.set_arrow("t", pq.read_table(tmp_path / "rows.parquet"))
    vectors, others, found = other.rows_and_state("t", ids)
    assert found.all()
    assert torch.equal(vectors, expected)
    assert torch.equal(others, states)


def test_without_state_and_empty() -> None:
    store = make()
    empty = store.to_arrow("t", state=True)
    assert empty.num_rows == 0
    assert empty.column_names == ["id", "vector", "state"]
    store.set_arrow("t", empty)
    assert len(store.ids("t")) == 0
    assert filled(store).to_arrow("t").column_names == ["id", "vector"]


def test_other_types_of_the_same_values() -> None:
    """Lists of any kind, slices, chunks, unsigned ids, surplus columns."""
    ids = np.array([5, 2**64 - 1, 7, 8], dtype=np.uint64)
    values = [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0], [0.5, 1, 2]]
    for kind in (
        pa.list_(pa.float64()),
        pa.large_list(pa.float32()),
        pa.list_(pa.float32(), 3),
    ):
        table = pa.table(
            {"x": [0] * 4, "vector": pa.array(values, kind), "id": ids}
        )
        for rows in (
            table.slice(1),
            pa.concat_tables([table.slice(1, 1), table.slice(2)]),
            table.slice(1).to_batches()[0],
        ):
            store = make()
            store.set_arrow("t", rows)
            assert sorted(store.ids("t").tolist()) == [-1, 7, 8]
            got = store.rows("t", torch.tensor([-1, 7, 8]))
            assert got.tolist() == values[1:]


@pytest.mark.parametrize(
    ("columns", "error", "says"),
    [
        ({"id": [1]}, errors.InvalidArgument, "vector"),
        ({"vector": [[1.0] * 3]}, errors.InvalidArgument, "id"),
        ({"id": [1.5], "vector": [[1.0] * 3]}, errors.DtypeError, "id"),
        (
            {"id": [None, 1], "vector": [[1.0] * 3] * 2},
            errors.InvalidArgument,
            "id",
        ),
        ({"id": [1], "vector": [[1.0] * 4]}, errors.ShapeError, "row 0 has 4"),
        ({"id": [1], "vector": [1.0]}, errors.DtypeError, "vector"),
        ({"id": [1], "vector": [["a"]]}, errors.DtypeError, "vector"),
        (
            {"id": [1], "vector": [[1.0, None, 2.0]]},
            errors.InvalidArgument,
            "vector",
        ),
        (
            {"id": [1], "vector": [[1.0] * 3], "state": [[1.0]]},
            errors.ShapeError,
            "state",
        ),
        (
            {"id": [1], "vector": [[1.0, float("nan"), 0.0]]},
            errors.PersiaError,
            "finite",
        ),
    ],
)
def test_bad_tables_change_nothing(
    columns: dict[str, Any], error: type[Exception], says: str
) -> None:
    store = filled(make())
    before = store.to_arrow("t", state=True)
    with pytest.raises(error, match=says):
        store.set_arrow("t", pa.table(columns))
    assert store.to_arrow("t", state=True).equals(before)
    with pytest.raises(errors.InvalidArgument, match=r"rows.*pyarrow\.Table"):
        store.set_arrow("t", [columns])
