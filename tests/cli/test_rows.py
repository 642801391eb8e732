"""persia rows, of servers and of checkpoints."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import persia
from persia import _core, errors
from persia.cli.app import app
from tests.remote import Servers

IDS = [3, -7, 1000]


def call(*words: object) -> str:
    texts = ["rows", *map(str, words)]
    result = CliRunner().invoke(app, texts, env={"COLUMNS": "200"})
    if isinstance(result.exception, errors.PersiaError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def fill(store: persia.Store) -> None:
    """Row 3 is ones, with the state 1, 2, 3, 4; row -7 is twos; another
    optimizer, seed and type than those of a store without arguments."""
    store.add_table(
        persia.EmbeddingBagConfig("t", 4, init=0.5, data_type="bf16")
    )
    store.add_table(persia.EmbeddingBagConfig("u", 2))
    store.set_rows("u", [1], torch.ones(1, 2))
    state = torch.tensor([[1.0, 2.0, 3.0, 4.0], [0.0, 0.0, 0.0, 0.0]])
    values = torch.tensor([[1.0] * 4, [2.0] * 4])
    store.set_rows("t", IDS[:2], values, state)


def made(**more: Any) -> persia.Store:
    return persia.Store(
        persia.optim.Adagrad(lr=0.5, initial_accumulator_value=0.1),
        seed=5,
        **more,
    )


@pytest.fixture(params=["checkpoint", "servers"])
def where(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[tuple[list[str], torch.Tensor]]:
    """The options that lead to the rows; the vectors of IDS."""
    servers = None
    if request.param == "servers":
        if not _core.GRPC[0].isdigit():
            pytest.skip("built without gRPC")
        servers = Servers(3)
        more = {"servers": servers.text}
        words = ["--servers", servers.text]
    else:
        more = {"servers": "embedded"}
        words = ["--checkpoint", str(tmp_path / "out")]
    with made(**more) as store:
        fill(store)
        if servers is None:
            store.save(tmp_path / "out")
        yield words, store.rows("t", IDS)
    if servers is not None:
        gc.collect()
        servers.close()


def test_get(where: tuple[list[str], torch.Tensor]) -> None:
    words, vectors = where
    text = call("get", "t", *words, "--json", "--", *IDS)
    rows = json.loads(text)
    assert [row["id"] for row in rows] == IDS
    assert [row["present"] for row in rows] == [True, True, False]
    assert [row["vector"] for row in rows] == vectors.tolist()
    assert rows[0]["vector"] == [1.0] * 4
    assert rows[0]["state"] == [1.0, 2.0, 3.0, 4.0]
    assert rows[2]["state"] is None
    assert call("get", "t", 3, *words).split() == (
        "3 vector 1 1 1 1 state 1 2 3 4".split()
    )
    # The same id, as an unsigned number.
    (row,) = json.loads(call("get", "t", 2**64 - 7, *words, "--json"))
    assert (row["id"], row["vector"]) == (2**64 - 7, [2.0] * 4)


def test_explain(where: tuple[list[str], torch.Tensor]) -> None:
    words, _ = where
    here, absent = json.loads(call("explain", "t", 3, 1000, *words, "--json"))
    assert (here["id"], here["present"], here["norm"]) == (3, True, 2.0)
    assert here["state_norm"] == pytest.approx(30**0.5)
    assert not absent["present"] and absent["why"]
    assert ("shard" in here) == ("--servers" in words)
    assert "present=True" in call("explain", "t", 3, *words)


def test_a_look_changes_nothing(
    where: tuple[list[str], torch.Tensor],
) -> None:
    words, _ = where
    before = call("get", "t", 1000, *words, "--json")
    call("explain", "t", 1000, *words)
    assert call("get", "t", 1000, *words, "--json") == before


def test_wrong_words(where: tuple[list[str], torch.Tensor]) -> None:
    words, _ = where
    for wrong in (("v", 3), ("t", 2**64), ("t", 1 - 2**64)):
        with pytest.raises(errors.InvalidArgument):
            call("get", *words, "--", *wrong)


def test_wrong_places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("PERSIA_SERVERS", raising=False)
    with pytest.raises(errors.InvalidArgument):
        call("get", "t", 3)
    with pytest.raises(errors.StorageError):
        call("explain", "t", 3, "--checkpoint", tmp_path / "none")
    with pytest.raises(errors.InvalidArgument):
        call("get", "t", "three")
