"""Where a loader, or a data source, is: what a checkpoint keeps of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from pyarrow import parquet as pq

import persia
from persia import errors
from persia.data import Files, Schema, Table
from persia.datasets import SyntheticCTR
from tests.loaders import Counter

ahead_or_not = pytest.mark.usefixtures("idle_core")


class Source:
    """Five batches an epoch, which say where they are."""

    def __init__(self) -> None:
        self.epoch = 0

    def __iter__(self) -> Iterator[persia.JaggedBatch]:
        for i in range(5):
            ids = torch.tensor([self.epoch * 100 + i])
            yield persia.JaggedBatch(["f"], ids)


class Advancing(Source):
    """Sets its epoch itself."""

    def __iter__(self) -> Iterator[persia.JaggedBatch]:
        yield from super().__iter__()
        self.epoch += 1


def lives(
    source: type[Source], kills: list[int], epochs: int, sets: str
) -> list[int]:
    """The batches that lives train of which all but the last are killed,
    after so many saves. Each saves after each batch and at the end of each
    epoch."""
    seen: list[int] = []
    state: Any = None
    for kill in [*kills, 10**9]:
        counter = Counter()
        loader = persia.DataLoader(source(), counter.model, 1)
        if state is not None:
            loader.load_state_dict(state)
        saves = 0
        data = loader.batches
        for epoch in range(data.epoch, epochs):
            if sets != "never":
                data.epoch = epoch
            for ids in loader:
                counter.model(ids).values().sum().backward()
                state, saves = loader.state_dict(), saves + 1
                seen.append(int(ids.values()))
                if saves == kill:
                    break
            if saves == kill:
                break
            if sets == "both":
                data.epoch = epoch + 1
            state, saves = loader.state_dict(), saves + 1
            if saves == kill:
                break
        counter.store.close()
        if saves != kill:
            break
    return seen


@ahead_or_not
@pytest.mark.parametrize("kills", [[k] for k in range(1, 13)] + [[6, 6], [3]])
@pytest.mark.parametrize(
    ("source", "sets"),
    [(Source, "before"), (Source, "both"), (Advancing, "never")],
)
def test_each_batch_is_trained_in_one_life(
    source: type[Source], sets: str, kills: list[int]
) -> None:
    expected = [e * 100 + i for e in range(2) for i in range(5)]
    assert lives(source, kills, 2, sets) == expected


@ahead_or_not
def test_the_end_of_an_epoch_is_the_beginning_of_the_next() -> None:
    counter = Counter()
    loader = persia.DataLoader(Source(), counter.model, 1)
    assert loader.state_dict() == {"batches": 0, "epoch": 0}
    for _ in range(2):  # the epoch is not set: it is the same one again
        with torch.no_grad():
            assert len(list(loader)) == 5
        assert loader.state_dict() == {"batches": 0, "epoch": 1}
    loader.batches.epoch = 1
    assert loader.state_dict() == {"batches": 0, "epoch": 1}
    with torch.no_grad():
        iterator = iter(loader)
        next(iterator)
        assert loader.state_dict() == {"batches": 1, "epoch": 1}
        del iterator
    loader.load_state_dict({"batches": 0, "epoch": 1})
    assert loader.state_dict() == {"batches": 0, "epoch": 1}
    plain = persia.DataLoader(list(Source()), counter.model, 1)
    with torch.no_grad():
        list(plain)
    assert plain.state_dict() == {"batches": 0, "epoch": None}


@ahead_or_not
def test_a_loop_that_is_left() -> None:
    """Where it was, until the source is set to another epoch."""
    counter = Counter()
    loader = persia.DataLoader(Source(), counter.model, 1)
    iterator = iter(loader)
    with torch.no_grad():
        next(iterator)
        next(iterator)
        del iterator
        assert loader.state_dict() == {"batches": 2, "epoch": 0}
        loader.batches.epoch = 1
        assert loader.state_dict() == {"batches": 0, "epoch": 1}
        # Of two iterators the one that began last counts.
        first, second = iter(loader), iter(loader)
        next(second)
        del first
        assert loader.state_dict()["epoch"] == 1
        del second


@ahead_or_not
def test_a_save_after_an_epoch_of_a_data_set(tmp_path: Path) -> None:
    """As the page on checkpoints has it, with the last epoch killed."""

    def life(epochs: int) -> list[float]:
        data = SyntheticCTR(samples=200, batch_size=50)
        bags = persia.EmbeddingBagCollection(
            [persia.EmbeddingBagConfig(key, 2, [key]) for key in data.keys],
            store=persia.Store(),
        )
        loader = persia.DataLoader(data, bags)
        if (tmp_path / "run" / "LATEST").exists():
            bags.store.load(tmp_path / "run", model=bags, loader=loader)
        seen = []
        for epoch in range(data.epoch, epochs):
            data.epoch = epoch
            for batch in loader:
                bags(batch.ids).values().sum().backward()
                seen.append((epoch, float(batch.label.sum())))
            bags.store.save(tmp_path / "run", model=bags, loader=loader)
        bags.store.close()
        return seen

    first, second, third = life(1), life(2), life(2)
    assert [epoch for epoch, _ in first + second] == [0] * 4 + [1] * 4
    assert third == []


def table(n: int = 60) -> pa.Table:
    return pa.table(
        {"y": [i % 2 for i in range(n)], "c": [f"c{i}" for i in range(n)]}
    )


SCHEMA = Schema(label="y", categorical=["c"])


def source_of(kind: str, tmp_path: Path) -> Any:
    if kind == "table":
        return Table(table(), SCHEMA, 4)
    if kind == "synthetic":
        return SyntheticCTR(samples=60, batch_size=4)
    pq.write_table(table(), tmp_path / "a.parquet")
    return Files(tmp_path / "a.parquet", SCHEMA, 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "context", "workers"),
    [
        ("table", "fork", 1),
        ("files", "fork", 2),
        ("synthetic", "fork", 1),
        ("table", "spawn", 1),
    ],
)
def test_workers_have_positions_of_their_own(
    kind: str, context: str, workers: int, tmp_path: Path
) -> None:
    """The process that trains knows none of them, and says so."""
    source = source_of(kind, tmp_path)
    before = source.state_dict()  # nothing was given out
    reader = torch.utils.data.DataLoader(
        source,
        batch_size=None,
        num_workers=workers,
        multiprocessing_context=context,
    )
    batches = iter(reader)
    next(batches)
    store = persia.Store()
    for call in (
        source.state_dict,
        lambda: source.state_dict(1),
        lambda: store.save(tmp_path / "out", loader=source),
    ):
        with pytest.raises(errors.InvalidArgument):
            call()
    assert not (tmp_path / "out").exists()
    del batches
    # A position is not taken to workers, either.
    source.load_state_dict(before | {"batches": 2})
    with pytest.raises(errors.InvalidArgument):
        next(iter(reader))
    # What was loaded is known, and what is read without workers.
    source.load_state_dict(before | {"batches": 2})
    assert source.state_dict()["batches"] == 2
    source.load_state_dict(before)
    if context == "fork":
        assert sum(map(len, reader)) == 60
    one = iter(source)
    next(one)
    assert source.state_dict()["batches"] == 1


@ahead_or_not
@pytest.mark.slow
def test_a_loader_over_workers_knows_its_position() -> None:
    counter = Counter()
    source = Table(table(), SCHEMA, 4)

    def make() -> persia.DataLoader[Any]:
        reader = torch.utils.data.DataLoader(
            source,
            batch_size=None,
            num_workers=2,
            multiprocessing_context="fork",
        )
        return persia.DataLoader(reader, counter.model, 1)

    def values(batches: Any) -> list[list[int]]:
        with torch.no_grad():
            return [batch.ids.values().tolist() for batch in batches]

    every = values(make())
    loader = make()
    iterator = iter(loader)
    with torch.no_grad():
        for _ in range(7):
            next(iterator)
    state = loader.state_dict()
    del iterator
    again = make()
    again.load_state_dict(state)
    assert values(again) == every[7:]


def test_many_sources_share_no_position() -> None:
    """Also beyond the number of marks that there are."""
    first = Table(table(), SCHEMA, 4)
    for _ in range(1 << 17):
        first.forget_position()
    assert len(list(first)) == 15
    assert first.state_dict()["batches"] == 15
