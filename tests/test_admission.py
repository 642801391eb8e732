"""Admission after several sightings: what users see of it."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import persia
from persia import admission, errors
from tests import remote


def make(policy: Any, **more: Any) -> persia.EmbeddingBagCollection:
    return persia.EmbeddingBagCollection(
        optimizer=persia.optim.SGD(lr=1.0),
        tables=[
            persia.EmbeddingBagConfig("t", 2, ["f"], admission=policy, **more)
        ],
    )


def touch(bags: persia.EmbeddingBagCollection, ids: list[int]) -> None:
    out = bags(persia.JaggedBatch(["f"], torch.tensor(ids)))
    out.values().sum().backward()


@settings(max_examples=30)
@given(
    st.integers(2, 6),
    st.lists(st.lists(st.integers(0, 9), min_size=1), max_size=30),
)
def test_the_nth_update_makes_a_row(n: int, batches: list[list[int]]) -> None:
    bags = make(admission.Sightings(n, remember=1000))
    seen: dict[int, int] = {}
    refused = 0
    for batch in batches:
        touch(bags, batch)
        for id in set(batch):
            seen[id] = seen.get(id, 0) + 1
            refused += seen[id] < n
        rows = set(bags.store.ids("t").tolist())
        assert rows == {id for id, times in seen.items() if times >= n}
    assert bags.store.stats()["tables"]["t"]["refused"] == refused


@pytest.mark.parametrize(
    "policy",
    [
        admission.Probability(0.25),
        admission.Probability(np.float32(0.5)),
        admission.Sightings(np.int64(3), remember=1000),
    ],
)
def test_options_say_which_policy_it_was(policy: admission.Admission) -> None:
    options = policy.options()
    assert all(type(value) in (int, float) for value in options.values())
    assert admission.Admission.from_options(options) == policy


def test_rows_begin_with_the_update_that_makes_them() -> None:
    bags = make(admission.Sightings(3), init=("constant", 5.0))
    for _ in range(3):
        assert bags.store.rows("t", [7]).tolist() == [[5.0, 5.0]]
        touch(bags, [7])
    assert bags.store.rows("t", [7]).tolist() == [[4.0, 4.0]]


def test_sightings_are_in_checkpoints(tmp_path: Path) -> None:
    ids = np.arange(2000)
    bags = make(admission.Sightings(3))
    touch(bags, ids.tolist())
    touch(bags, ids[:1000].tolist())
    bags.store.save(tmp_path)
    again = make(admission.Sightings(3))
    again.store.load(tmp_path)
    touch(again, ids.tolist())
    assert sorted(again.store.ids("t").tolist()) == ids[:1000].tolist()
    again.store.save(tmp_path / "again")
    # Another n: the counts are the same.  Another size: an empty filter.
    for policy, rows in (
        (admission.Sightings(2), 2000),
        (admission.Sightings(3, remember=1 << 21), 0),
        ("all", 2000),
    ):
        other = make(policy)
        with warnings.catch_warnings():
            # New rows will begin otherwise.
            warnings.simplefilter("ignore", UserWarning)
            other.store.load(tmp_path)
        touch(other, ids.tolist())
        assert len(other.store.ids("t")) == rows


@pytest.mark.parametrize("shards", [1, 3])
def test_sightings_of_servers(tmp_path: Path, shards: int) -> None:
    """Two servers save, other ones load: each takes its ids' sightings."""
    ids = np.arange(500)

    def train(n: int, *batches: np.ndarray[Any, Any], load: bool) -> set[int]:
        servers = remote.Servers(n, checkpoints=str(tmp_path.parent))
        try:
            with persia.Store(
                persia.optim.SGD(lr=1.0), servers=servers.text
            ) as store:
                bags = persia.EmbeddingBagCollection(
                    store=store,
                    tables=[
                        persia.EmbeddingBagConfig(
                            "t",
                            2,
                            ["f"],
                            capacity=10_000,
                            eviction=persia.eviction.LFU(),
                            admission=admission.Sightings(2),
                        )
                    ],
                )
                if load:
                    store.load(tmp_path)
                for batch in batches:
                    touch(bags, batch.tolist())
                store.flush()
                if not load:
                    store.save(tmp_path)
                return set(store.ids("t").tolist())
        finally:
            servers.close()

    assert train(2, ids, ids[:100], load=False) == set(range(100))
    assert train(shards, ids[50:300], load=True) == set(range(300))


def test_a_file_of_sightings_that_was_altered(tmp_path: Path) -> None:
    bags = make(admission.Sightings(3))
    touch(bags, [1, 2, 3])
    bags.store.save(tmp_path)
    (path,) = tmp_path.rglob("*sightings*")
    raw = bytearray(path.read_bytes())
    for at in 3, 20, 500, len(raw) - 1:
        altered = bytearray(raw)
        altered[at] ^= 1
        path.write_bytes(altered)
        with pytest.raises(errors.CorruptFile):
            make(admission.Sightings(3)).store.load(tmp_path)
    path.write_bytes(raw[:-4])
    with pytest.raises(errors.CorruptFile):
        make(admission.Sightings(3)).store.load(tmp_path)
    path.write_bytes(raw)
    make(admission.Sightings(3)).store.load(tmp_path)


def test_the_filter_counts_as_memory() -> None:
    bags = make(admission.Sightings(2, remember=1 << 18))
    stats = bags.store.stats()
    assert 1 << 20 <= stats["tables"]["t"]["bytes"] < (1 << 20) + 4096
    assert stats["memory"] >= 1 << 20
    store = persia.Store(persia.optim.SGD(lr=1.0), memory_limit=1 << 20)
    with pytest.raises(errors.LimitReached):
        store.add_table(
            persia.EmbeddingBagConfig("t", 2, admission=admission.Sightings(2))
        )


@pytest.mark.parametrize(
    "make_one",
    [
        lambda: admission.Sightings(1),
        lambda: admission.Sightings(256),
        lambda: admission.Sightings(2.5),  # type: ignore[arg-type]
        lambda: admission.Sightings(2, remember=0),
        lambda: admission.Probability(0),
        lambda: admission.Probability("x"),  # type: ignore[arg-type]
    ],
)
def test_wrong_options(make_one: Any) -> None:
    with pytest.raises(errors.InvalidArgument):
        make_one()
