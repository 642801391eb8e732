"""Eviction: every policy against a model of the hand in Python."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import persia
from persia import errors, eviction

F32 = np.float32
WINDOW = 64
PART = 8


@dataclass
class Row:
    id: int
    clock: int
    count: Any
    norm: Any


Scores = Callable[[int, list[Row]], Any]


@dataclass
class Hand:
    """One stripe that evicts, as csrc/table/hand.c does."""

    capacity: int
    scores: Scores
    slots: list[Row | None] = field(default_factory=list)
    listed: list[tuple[int, int]] = field(default_factory=list)
    at: int = 0
    evicted: list[int] = field(default_factory=list)

    def find(self, id: int) -> Row | None:
        for row in self.slots:
            if row is not None and row.id == id:
                return row
        return None

    def _window(self, clock: int) -> list[int]:
        step = math.ceil(len(self.slots) / WINDOW)
        slots = range(self.at, len(self.slots), step)
        self.at = self.at + 1 if self.at + 1 < step else 0
        return [
            slot
            for slot in slots
            if (row := self.slots[slot]) is not None and row.clock != clock
        ]

    def _evict(self, clock: int) -> int:
        while True:
            while self.listed:
                slot, was = self.listed.pop(0)
                row = self.slots[slot]
                if row is not None and row.clock == was != clock:
                    self.evicted.append(row.id)
                    self.slots[slot] = None
                    return slot
            slots = self._window(clock)
            rows = [row for s in slots if (row := self.slots[s])]
            if not rows:
                raise AssertionError("the test leaves a row to evict")
            scores = np.asarray(self.scores(clock, rows), F32)
            scores = np.where(np.isnan(scores), -np.inf, scores)
            order = np.argsort(-scores, kind="stable")
            for k in order[: math.ceil(len(rows) / PART)]:
                self.listed.append((slots[k], rows[k].clock))

    def add(self, id: int, clock: int) -> Row:
        row = Row(id, clock, F32(0), F32(0))
        if len(self.slots) < self.capacity:
            self.slots.append(row)
        else:
            self.slots[self._evict(clock)] = row
        return row


class Run:
    """A table of vectors of one element, and its model."""

    def __init__(
        self,
        policy: eviction.Eviction | str,
        scores: Scores,
        capacity: int,
        half_life: float = 0,
    ) -> None:
        self.bags = persia.EmbeddingBagCollection(
            optimizer=persia.optim.SGD(lr=1.0),
            tables=[
                persia.EmbeddingBagConfig(
                    "t",
                    1,
                    ["f"],
                    capacity=capacity,
                    eviction=policy,
                    init=("constant", 0.0),
                )
            ],
        )
        self.store = self.bags.store
        self.hand = Hand(capacity, scores)
        self.half_life = half_life
        self.clock = 0

    def push(self, old: list[int], new: int, grad: float) -> None:
        """An update of rows that are there, and of one that is not."""
        ids = [*old, new]
        out = self.bags(
            persia.JaggedBatch(
                ["f"], torch.tensor(ids), lengths=torch.ones(len(ids)).long()
            )
        ).values()
        out.backward(torch.full_like(out, grad))
        self.clock += 1
        rows = [self.hand.find(id) for id in old]
        for row in rows:
            assert row is not None
            row.count = self.decayed(row)
            row.clock = self.clock
        rows.append(self.hand.add(new, self.clock))
        for row in rows:
            assert row is not None
            row.count = F32(row.count + F32(1))
            row.norm = F32(row.norm + F32(grad))

    def decayed(self, row: Row) -> Any:
        """Its count now: halved, along straight lines."""
        if not self.half_life:
            return row.count
        halves = F32(F32(self.clock - row.clock) / F32(self.half_life))
        whole = math.floor(halves)
        part = F32(F32(1) - F32(F32(halves - F32(whole)) / F32(2)))
        return F32(F32(row.count * F32(2.0**-whole)) * part)

    def live(self) -> set[int]:
        return {row.id for row in self.hand.slots if row is not None}

    def check(self) -> None:
        assert set(self.store.ids("t").tolist()) == self.live()
        stats = self.store.stats()["tables"]["t"]
        assert stats["evicted"] == len(self.hand.evicted)
        # A TTL looks at 64 for 16 new rows more.
        most = WINDOW * stats["evicted"] + 4 * stats["created"]
        assert stats["candidates"] <= most


def age(clock: int, rows: list[Row]) -> Any:
    return [clock - row.clock for row in rows]


def train(run: Run, steps: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for new in range(steps):
        # The lower the id the more often it is touched.
        live = np.array(sorted(run.live()), np.int64)
        some = rng.random(len(live)) < 1 / (2 + np.arange(len(live)))
        old = live[some][: run.hand.capacity - 1]
        run.push(old.tolist(), new, float(rng.integers(1, 50)))
        if new % 37 == 0 or new == steps - 1:
            run.check()


@pytest.mark.parametrize(
    ("policy", "capacity"),
    [
        ("lru", 3),
        ("lru", 64),
        ("lru", 150),
        (eviction.TTL(updates=10**6), 40),
    ],
)
def test_the_oldest_go(policy: Any, capacity: int) -> None:
    train(Run(policy, age, capacity), 5 * capacity, capacity)


@pytest.mark.parametrize("capacity", [3, 40, 150])
@pytest.mark.parametrize("half_life", [None, 7, 100])
def test_the_rarest_go(half_life: int | None, capacity: int) -> None:
    def rare(clock: int, rows: list[Row]) -> Any:
        return [-run.decayed(row) for row in rows]

    run = Run(eviction.LFU(half_life), rare, capacity, half_life or 0)
    train(run, 5 * capacity, capacity)


@pytest.mark.parametrize("capacity", [3, 40, 150])
def test_the_smallest_go(capacity: int) -> None:
    run = Run("norm", lambda _, rows: [-r.norm for r in rows], capacity)
    train(run, 5 * capacity, capacity)


# ---- expressions -----------------------------------------------------------

leaves = st.one_of(
    st.sampled_from(["age", "count", "norm"]),
    st.integers(0, 100).map(str),
    st.floats(0.001, 1000).map(lambda x: f"{x:.3f}"),
)
expressions = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from("+-*/"), inner).map(
            lambda x: f"({x[0]} {x[1]} {x[2]})"
        ),
        inner.map(lambda x: f"-{x}"),
        inner.map(lambda x: f"sqrt({x})"),
        st.tuples(st.sampled_from(["min", "max"]), inner, inner).map(
            lambda x: f"{x[0]}({x[1]}, {x[2]})"
        ),
    ),
    max_leaves=8,
)


def python_score(expression: str) -> Scores:
    """The same by numpy, in float32."""
    text = re.sub(r"\d+(\.\d+)?", r"F32(\g<0>)", expression)
    names = {
        "F32": F32,
        "sqrt": np.sqrt,
        "min": lambda a, b: np.where(b < a, b, a),
        "max": lambda a, b: np.where(b > a, b, a),
    }

    def scores(clock: int, rows: list[Row]) -> Any:
        columns = {
            "age": np.array(age(clock, rows), F32),
            "count": np.array([row.count for row in rows], F32),
            "norm": np.array([row.norm for row in rows], F32),
        }
        with np.errstate(all="ignore"):
            value = eval(text, {}, names | columns)
        return np.broadcast_to(value, len(rows))

    return scores


@settings(max_examples=25)
@given(expressions, st.integers(0, 2**32))
def test_expressions(expression: str, seed: int) -> None:
    run = Run(eviction.Score(expression), python_score(expression), 12)
    train(run, 60, seed)


@pytest.mark.parametrize(
    "expression",
    [
        *("", "age +", "age ** 2", "row", "__import__('os')", "min(age)"),
        *("1 2", "1" + "+1" * 99, "(" * 60 + "age" + ")" * 60),
        *("a" * 256, "age\0"),
    ],
)
def test_wrong_expressions(expression: str) -> None:
    with pytest.raises(errors.InvalidArgument, match=r"[Ss]core"):
        eviction.Score(expression)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: eviction.TTL(), "updates= or seconds="),
        (lambda: eviction.TTL(updates=1, seconds=1), "updates=.*seconds="),
        (lambda: eviction.TTL(updates=0), "updates"),
        (lambda: eviction.TTL(seconds=1.5), "seconds"),
        (lambda: eviction.LFU(half_life=0), "half_life"),
        (lambda: eviction.Score(3), "expression"),  # type: ignore[arg-type]
    ],
)
def test_wrong_options(make: Callable[[], object], says: str) -> None:
    with pytest.raises(errors.InvalidArgument, match=says):
        make()


# ---- stores ----------------------------------------------------------------


def test_rows_expire_below_a_capacity() -> None:
    run = Run("lru", age, 10**6)
    run.store.add_table(
        persia.EmbeddingBagConfig("brief", 1, eviction=eviction.TTL(updates=4))
    )
    bags = persia.EmbeddingBagCollection(
        store=run.store,
        tables=[
            persia.EmbeddingBagConfig(
                "brief", 1, ["f"], eviction=eviction.TTL(updates=4)
            )
        ],
    )
    for step in range(50):
        ids = torch.arange(step * 200, step * 200 + 200)
        bags(persia.JaggedBatch(["f"], ids)).values().sum().backward()
        assert bool(run.store.contains("brief", ids).all())
    stats = run.store.stats()["tables"]["brief"]
    assert stats["created"] == 50 * 200
    assert stats["rows"] == stats["created"] - stats["evicted"]
    assert stats["rows"] <= 8 * 200
    assert stats["candidates"] <= 4 * stats["created"]


def table(store: persia.Store, policy: Any) -> persia.EmbeddingBagCollection:
    return persia.EmbeddingBagCollection(
        store=store,
        tables=[
            persia.EmbeddingBagConfig(
                "t", 2, ["f"], capacity=8, eviction=policy
            )
        ],
    )


def touch(bags: persia.EmbeddingBagCollection, *ids: int) -> None:
    out = bags(persia.JaggedBatch(["f"], torch.tensor(ids)))
    out.values().sum().backward()


def test_counts_are_in_checkpoints(tmp_path: Path) -> None:
    store = persia.Store(persia.optim.SGD(lr=0.1))
    bags = table(store, "lfu")
    for id in range(8):
        for _ in range(8 - id):
            touch(bags, id)
    touch(bags, 7)  # the youngest, with two updates as 6 has
    touch(bags, 7)
    store.save(tmp_path)
    for policy, gone in ("lfu", 6), ("lru", 0), (eviction.LFU(100), 6):
        other = persia.Store(persia.optim.SGD(lr=0.1))
        loaded = table(other, policy)
        other.load(tmp_path)
        touch(loaded, 99)
        assert not bool(other.contains("t", [gone]).item())
        assert len(other.ids("t")) == 8
        other.save(tmp_path / str(gone), step=1)
        # and from a table without counts: all have one update
        again = persia.Store(persia.optim.SGD(lr=0.1))
        last = table(again, "lfu")
        again.load(tmp_path / str(gone))
        touch(last, 99, 100)
        assert bool(again.contains("t", [99, 100]).all())


def test_seconds_go_on_in_another_process(tmp_path: Path) -> None:
    """A life of 2^31 - 1 seconds: nothing expires; the column is there."""
    store = persia.Store(persia.optim.SGD(lr=0.1))
    policy = eviction.TTL(seconds=2**31 - 1)
    bags = table(store, policy)
    for id in range(20):
        touch(bags, id)
    assert len(store.ids("t")) == 8
    store.save(tmp_path)
    (rows,) = tmp_path.rglob("*.safetensors")
    assert b'"seen":{"dtype":"U32"' in rows.read_bytes()[:1000]
    other = persia.Store(persia.optim.SGD(lr=0.1))
    table(other, policy)
    other.load(tmp_path)
    assert len(other.ids("t")) == 8


def test_one_table_has_one_policy() -> None:
    store = persia.Store(persia.optim.SGD(lr=0.1))
    table(store, eviction.LFU(10))
    table(store, eviction.LFU(10))
    with pytest.raises(errors.SchemaMismatch, match="eviction"):
        table(store, eviction.LFU(11))
