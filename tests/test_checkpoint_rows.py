"""Row files that are read without a store; ``persia rows top``."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import persia
from persia import _core, errors
from persia.checkpoint import files
from persia.checkpoint.rows import read_rows
from persia.cli.app import app
from tests.remote import Servers

ROWS = 300


def train(store: persia.Store, data_type: str) -> None:
    """Ten updates, of ids 0 to 29, 30 to 59 and so on."""
    bags = persia.EmbeddingBagCollection(
        store=store,
        tables=[
            persia.EmbeddingBagConfig("t", 8, ["a"], data_type=data_type),
            persia.EmbeddingBagConfig("u", 4, ["a"]),
        ],
    )
    for ids in torch.arange(ROWS).split(30):
        out = bags(persia.JaggedBatch.from_dict({"a": ids[:, None]}))
        (out.values() * ids[:, None]).sum().backward()
        store.flush()  # two updates on their way may change places


@pytest.fixture(params=[0, 3], ids=["embedded", "servers"])
def store(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[persia.Store]:
    if request.param and not _core.GRPC[0].isdigit():
        pytest.skip("built without gRPC")
    servers = None
    if request.param:
        servers = Servers(request.param, checkpoints=str(tmp_path))
    where = "embedded" if servers is None else servers.text
    with persia.Store(persia.optim.Adagrad(lr=0.5), servers=where) as store:
        yield store
    if servers is not None:
        gc.collect()
        servers.close()


@pytest.mark.parametrize("data_type", ["fp32", "bf16", "int8"])
def test_rows_are_those_of_the_store(
    store: persia.Store, tmp_path: Path, data_type: str
) -> None:
    train(store, data_type)
    store.save(tmp_path / "out")
    root = files.root_of(tmp_path / "out")
    found = files.find(root, None)
    (table,) = (t for t in found.manifest.tables if t.name == "t")
    seen = []
    for rows in read_rows(root, found, table):
        vectors, state, _ = store.rows_and_state("t", rows.ids.copy())
        np.testing.assert_array_equal(rows.vectors, vectors.numpy())
        np.testing.assert_array_equal(rows.state, state.numpy())
        np.testing.assert_array_equal(rows.age, 9 - rows.ids // 30)
        seen += rows.ids.tolist()
    assert sorted(seen) == list(range(ROWS))


def test_top(store: persia.Store, tmp_path: Path) -> None:
    train(store, "fp32")
    store.set_rows("t", [77, 3], torch.tensor([[30.0] * 8, [20.0] * 8]))
    store.save(tmp_path / "out")

    def top(*words: str) -> list[dict[str, float]]:
        every = ["rows", "top", "t", "--checkpoint", str(tmp_path / "out")]
        every += words
        result = CliRunner().invoke(app, every)
        assert result.exit_code == 0, result.output
        if "--json" not in words:
            assert "age" in result.output
            return []
        found: list[dict[str, float]] = json.loads(result.output)
        return found

    first, second = top("--count", "2", "--json")
    assert (first["id"], second["id"]) == (77, 3)
    assert first["norm"] == pytest.approx(30 * 8**0.5)
    (largest,) = top("--by", "state", "--count", "1", "--json")
    assert largest["id"] == ROWS - 1  # its gradient was the largest
    oldest = top("--by", "age", "--count", "29", "--json")
    assert {row["age"] for row in oldest} == {9}
    top()


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    with persia.Store(persia.optim.SGD(lr=0.1), servers="embedded") as store:
        train(store, "fp32")
        store.save(tmp_path)
    root = files.root_of(tmp_path)
    found = files.find(root, None)
    table = found.manifest.tables[0]
    (path,) = tmp_path.glob(f"step-*/{table.files[0].name}")
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(errors.CorruptFile, match=path.name):
        list(read_rows(root, found, table))
    path.unlink()
    with pytest.raises(errors.StorageError, match=path.name):
        list(read_rows(root, found, table))
