"""store.erase and store.drop: rows and tables go, and begin anew."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import persia
from persia import errors
from tests.remote import Servers

IDS = torch.arange(-20, 20)


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    made = Servers(3, checkpoints=str(tmp_path))
    yield made
    gc.collect()
    made.close()


@pytest.fixture(params=["embedded", "servers"])
def bags(
    request: pytest.FixtureRequest,
) -> Iterator[persia.EmbeddingBagCollection]:
    where = None
    if request.param == "servers":
        where = request.getfixturevalue("servers").text
    with persia.Store(persia.optim.Adagrad(lr=0.5), servers=where) as store:
        yield persia.EmbeddingBagCollection(
            [persia.EmbeddingBagConfig("t", 4, ["f"])], store=store
        )


def train(bags: persia.EmbeddingBagCollection, ids: torch.Tensor) -> None:
    bags(persia.JaggedBatch(["f"], ids)).values().sum().backward()


def test_erased_rows_begin_anew(bags: Any) -> None:
    store = bags.store
    initial = store.rows("t", IDS)
    train(bags, IDS)
    once = store.rows("t", IDS)
    assert store.erase("t", [3, -7, 3, 1000]) == 2
    gone = torch.isin(IDS, torch.tensor([3, -7]))
    assert torch.equal(store.contains("t", IDS), ~gone)
    assert torch.equal(store.rows("t", IDS)[gone], initial[gone])
    assert torch.equal(store.rows("t", IDS)[~gone], once[~gone])
    assert store.stats()["tables"]["t"]["rows"] == len(IDS) - 2
    # State is fresh, too: another first step gives what the first one gave.
    train(bags, IDS[gone])
    assert torch.equal(store.rows("t", IDS)[gone], once[gone])
    assert store.erase("t", IDS) == len(IDS)
    assert store.erase("t", IDS) == 0
    assert store.erase("t", []) == 0
    assert len(store.ids("t")) == 0


def test_checkpoints_lack_erased_rows(bags: Any, tmp_path: Path) -> None:
    store = bags.store
    train(bags, IDS)
    store.erase("t", IDS[::2])
    store.save(tmp_path / "one")
    other = persia.Store(persia.optim.Adagrad(lr=0.5))
    other.add_table(persia.EmbeddingBagConfig("t", 4, ["f"]))
    other.load(tmp_path / "one")
    assert torch.equal(other.ids("t").sort().values, IDS[1::2])
    assert torch.equal(other.rows("t", IDS), store.rows("t", IDS))


def test_updates_of_before_are_applied_first(bags: Any) -> None:
    """A lookup that was before the erase makes the row anew."""
    store = bags.store
    initial = store.rows("t", IDS)
    out = bags(persia.JaggedBatch(["f"], IDS)).values()
    train(bags, IDS)
    assert store.erase("t", IDS) == len(IDS)
    out.sum().backward()
    once = store.rows("t", IDS)
    assert store.contains("t", IDS).all()
    torch.testing.assert_close(once, initial - 0.5)


def make(store: persia.Store, dim: int) -> persia.EmbeddingBagCollection:
    return persia.EmbeddingBagCollection(
        [persia.EmbeddingBagConfig("t", dim, ["f"])], store=store
    )


def test_a_dropped_table_begins_anew(bags: Any) -> None:
    store = bags.store
    initial = store.rows("t", IDS)
    train(bags, IDS)
    once = store.rows("t", IDS)
    store.drop("t")
    assert "t" not in store.tables
    assert store.stats()["tables"] == {}
    for call in (
        lambda: store.rows("t", IDS),
        lambda: store.drop("t"),
        lambda: train(bags, IDS),  # a module of the old table
    ):
        with pytest.raises(errors.InvalidArgument):
            call()
    same = make(store, 4)
    assert not store.contains("t", IDS).any()
    assert torch.equal(store.rows("t", IDS), initial)
    train(same, IDS)
    assert torch.equal(store.rows("t", IDS), once)
    with pytest.raises(errors.InvalidArgument):
        train(bags, IDS)
    store.drop("t")
    wide = make(store, 7)
    train(wide, IDS)
    assert store.rows("t", IDS).shape == (len(IDS), 7)
    groups = [g["table"] for g in store.optimizer.param_groups]
    assert groups == ["t (dropped)", "t (dropped)", "t"]


def test_checkpoints_lack_dropped_tables(bags: Any, tmp_path: Path) -> None:
    store = bags.store
    store.add_table(persia.EmbeddingBagConfig("u", 3, ["g"]))
    store.set_rows("u", [5], torch.ones(1, 3))
    train(bags, IDS)
    store.save(tmp_path / "before")
    store.drop("t")
    store.save(tmp_path / "after")
    other = persia.Store(persia.optim.Adagrad(lr=0.5))
    other.add_table(persia.EmbeddingBagConfig("u", 3, ["g"]))
    other.load(tmp_path / "after")  # strict: it has no other table
    assert other.ids("u").tolist() == [5]
    store.clear("u")
    store.load(tmp_path / "after")
    assert store.ids("u").tolist() == [5]
    again = make(store, 4)
    store.load(tmp_path / "before")
    assert torch.equal(store.ids("t").sort().values, IDS)
    train(again, IDS)


def test_schedulers_outlive_a_drop(bags: Any) -> None:
    store = bags.store
    schedule = torch.optim.lr_scheduler.ExponentialLR(store.optimizer, 0.1)
    store.drop("t")
    make(store, 4)
    schedule.step()
    assert store.optimizer.param_groups[0]["lr"] == pytest.approx(0.05)


def test_another_process_drops_it_too(servers: Servers) -> None:
    with (
        persia.Store(servers=servers.text, read_only=False) as one,
        persia.Store(servers=servers.text, job="other") as two,
    ):
        first, second = make(one, 4), make(two, 4)
        train(first, IDS)
        one.drop("t")
        with pytest.raises(errors.InvalidArgument):
            second(persia.JaggedBatch(["f"], IDS))
        wide = make(one, 6)
        train(wide, IDS)
        two.drop("t")  # its own, which is gone; not the new one
        assert one.contains("t", IDS).all()
        make(two, 6)
        assert torch.equal(two.rows("t", IDS), one.rows("t", IDS))


def test_wrong_arguments(bags: Any) -> None:
    with pytest.raises(errors.InvalidArgument):
        bags.store.erase("u", [1])
    with pytest.raises(errors.DtypeError):
        bags.store.erase("t", [1.5])


def test_a_store_that_only_reads_erases_nothing(servers: Servers) -> None:
    with persia.Store(servers=servers.text, read_only=True) as store:
        store.add_table(persia.EmbeddingBagConfig("t", 4, ["f"]))
        with pytest.raises(errors.InvalidArgument):
            store.erase("t", [1])
        with pytest.raises(errors.InvalidArgument):
            store.drop("t")
