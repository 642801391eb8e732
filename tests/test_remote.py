"""Stores whose tables are on servers, against embedded ones and plain counts.

The servers are in this process, behind real connections over loopback.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import persia
from persia import Batch, JaggedBatch, _core, errors
from persia.store.engine import engine_of
from tests.forks import in_child
from tests.remote import Servers
from tests.test_loader import Model, batches, same, state_of


@pytest.fixture
def servers() -> Iterator[Callable[..., Servers]]:
    """Makes servers, which end with the test."""
    made: list[Servers] = []

    def make(n: int = 2, namespace: str = "default", **more: Any) -> Servers:
        made.append(Servers(n, namespace, **more))
        return made[-1]

    yield make
    gc.collect()
    for one in made:
        one.close()


class Counter:
    """Row 7 counts updates, as in test_updates.py."""

    def __init__(self, where: Servers, **arguments: Any) -> None:
        arguments = {"timeout": 20.0, "threads": 1} | arguments
        self.store = persia.Store(
            persia.optim.SGD(lr=1.0), servers=where.text, **arguments
        )
        self.model = persia.EmbeddingBagCollection(
            store=self.store,
            tables=[
                persia.EmbeddingBagConfig(
                    "t", embedding_dim=4, feature_names=["f"], init=0.0
                )
            ],
        )

    @staticmethod
    def source(n: int) -> Iterator[Batch]:
        for _ in range(n):
            yield Batch(None, JaggedBatch(["f"], torch.tensor([7])))

    def loader(self, n: int, staleness: int | None = 1) -> Any:
        return persia.DataLoader(self.source(n), self.model, staleness)

    def forward(self, batch: Batch) -> tuple[int, Tensor]:
        out = self.model(batch.ids).values()
        return int(out[0, 0]), -out.sum()

    def train(self, n: int, staleness: int | None = 1) -> None:
        for batch in self.loader(n, staleness):
            self.forward(batch)[1].backward()

    @property
    def stats(self) -> dict[str, Any]:
        stats: dict[str, Any] = self.store.stats()
        return stats

    @property
    def value(self) -> int:
        return int(self.store.rows("t", [7])[0, 0])


# -- the same bits --------------------------------------------------------


def train(
    store: persia.Store, staleness: int | None = 0, weighted: bool = False
) -> tuple[Any, Tensor]:
    model = Model(store, weighted)
    dense = torch.optim.SGD(model.linear.parameters(), 0.1)
    loader: Any = persia.DataLoader(
        batches(12, weighted=weighted), model, staleness
    )
    for i, batch in enumerate(loader):
        loss = nn.functional.binary_cross_entropy_with_logits(
            model(batch.ids), batch.label
        )
        dense.zero_grad()
        loss.backward()
        dense.step()
        if store.update == "step" and i % 3 == 2:
            store.optimizer.step()
    store.flush()
    return state_of(store), model.linear.weight.detach()


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: persia.optim.SGD(lr=0.1, momentum=0.9),
    "adagrad": lambda: persia.optim.Adagrad(lr=0.1),
    "rowwise": lambda: persia.optim.RowWiseAdagrad(lr=0.1),
    "adam": lambda: persia.optim.Adam(lr=0.01),
    "adamw": lambda: persia.optim.AdamW(lr=0.01, max_grad_norm=0.1),
}


@pytest.mark.parametrize("shards", [1, 2, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_synchronous_has_the_bits_of_an_embedded_store(
    servers: Any, name: str, shards: int
) -> None:
    make = OPTIMIZERS[name]
    rows, weight = train(persia.Store(make(), seed=3))
    where = servers(shards)
    remote, other = train(persia.Store(make(), seed=3, servers=where.text))
    assert same(rows, remote)
    assert torch.equal(weight, other)


def test_batches_without_ids_are_updates_everywhere(servers: Any) -> None:
    def t_of_adam(**where: Any) -> tuple[int, torch.Tensor]:
        store = persia.Store(persia.optim.Adam(lr=0.1), **where)
        bags = persia.EmbeddingBagCollection(
            store=store, tables=[persia.EmbeddingBagConfig("t", 4)]
        )
        for n in (3, 0, 0, 3):
            ids = persia.JaggedBatch(
                ["t"], torch.arange(n), torch.tensor([n, 0])
            )
            bags(ids).values().sum().backward()
            store.flush()  # else shards may take updates in another order
        return store.updates, store.rows("t", torch.arange(3))

    updates, rows = t_of_adam()
    remote, others = t_of_adam(servers=servers(2).text)
    assert updates == remote == 4
    assert torch.equal(rows, others)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("update", ["backward", "step"])
def test_synchronous_bits_of_updates_and_weights(
    servers: Any, update: str, weighted: bool
) -> None:
    make = OPTIMIZERS["adagrad"]
    rows, weight = train(
        persia.Store(make(), update=update), weighted=weighted
    )
    store = persia.Store(make(), update=update, servers=servers(2).text)
    remote, other = train(store, weighted=weighted)
    assert same(rows, remote)
    assert torch.equal(weight, other)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_half_the_bytes_cost_little_accuracy(servers: Any, dtype: str) -> None:
    make = OPTIMIZERS["adagrad"]
    rows, _ = train(persia.Store(make()))
    store = persia.Store(make(), servers=servers(2).text, wire_dtype=dtype)
    remote, _ = train(store)
    for table, (vectors, *_) in rows.items():
        assert not torch.equal(vectors, remote[table][0])
        assert torch.allclose(vectors, remote[table][0], atol=0.05)
    store.close()
    full = persia.Store(make(), servers=servers(2, "full").text,
                        namespace="full")  # fmt: skip
    train(full)
    assert full.stats()["client"]["bytes_in"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)]
)
def test_compiled_training(servers: Any, backend: str) -> None:
    torch._dynamo.reset()
    results = []
    for where in (None, servers(2).text):
        store = persia.Store(persia.optim.Adagrad(lr=0.1),
                             servers=where or "embedded")  # fmt: skip
        model = Model(store)
        call: Any = torch.compile(model, backend=backend)
        for batch in persia.DataLoader(batches(8), model, 0):
            call(batch.ids).square().mean().backward()
        assert store.stats()["lookahead"]["prefetched"] == 16
        results.append(state_of(store))
    assert same(*results)


@pytest.mark.parametrize("reentrant", [False, True])
def test_synchronous_checkpointed_forwards_see_every_update(
    servers: Any, reentrant: bool
) -> None:
    from torch.utils.checkpoint import checkpoint

    c = Counter(servers())
    needs_grad = torch.zeros(1, requires_grad=True)

    def part(ids: JaggedBatch, x: Tensor) -> Tensor:
        return c.model(ids).values() + x

    seen = []
    for batch in c.loader(200, 0):
        out = checkpoint(part, batch.ids, needs_grad, use_reentrant=reentrant)
        seen.append(int(out[0, 0]))
        (-out.sum()).backward()
    assert seen == list(range(200))
    assert c.stats["lookahead"]["read"] == 0


def test_asynchronous_trains(servers: Any) -> None:
    store = persia.Store(persia.optim.Adagrad(lr=0.1),
                         servers=servers(2).text)  # fmt: skip
    rows, _ = train(store, None)
    assert all(bool(t[0].isfinite().all()) for t in rows.values())
    assert store.updates == 12


# -- the bound ------------------------------------------------------------


@pytest.mark.parametrize("staleness", [0, 1, 4])
def test_staleness_is_bounded_and_measured(
    servers: Any, staleness: int
) -> None:
    c = Counter(servers(2))
    for t, batch in enumerate(c.loader(80, staleness)):
        seen, loss = c.forward(batch)
        assert t - staleness <= seen <= t
        loss.backward()
    assert c.value == c.store.updates == 80
    loader = c.stats["lookahead"]
    assert sum(loader["staleness"].values()) == 80
    assert max(loader["staleness"]) <= staleness
    assert loader["prefetched"] == 80
    assert loader["abandoned"] == loader["dropped"] == 0


@pytest.mark.parametrize("seed", range(6))
def test_staleness_under_random_schedules(servers: Any, seed: int) -> None:
    rng = random.Random(seed)
    staleness = rng.randrange(4)
    c = Counter(servers(2))
    seen: list[int | None] = []
    updated: list[bool] = []
    losses: dict[int, Tensor] = {}
    for t, batch in enumerate(c.loader(100, staleness)):
        seen.append(None)
        updated.append(False)
        if rng.random() < 0.15:
            continue
        seen[t], losses[t] = c.forward(batch)
        back = t - rng.randrange(3)
        if back in losses and rng.random() < 0.8:
            try:
                losses.pop(back).backward()
                updated[back] = True
            except errors.TicketError:
                c.store.flush()
        if rng.random() < 0.1:
            batch.skip()
    applied = 0
    for one, was in zip(seen, updated, strict=True):
        assert one is None or applied - one <= staleness
        applied += was
    assert applied == c.value > 15


def test_without_a_loader_updates_are_under_way(servers: Any) -> None:
    c = Counter(servers(2))
    for batch in c.source(150):
        c.forward(batch)[1].backward()
    assert c.value == 150
    with torch.no_grad():  # evaluation sees all
        for t, batch in enumerate(c.source(20)):
            assert c.forward(batch)[0] == 150 + t
            with torch.enable_grad():
                c.forward(batch)[1].backward()


# -- rows by hand ---------------------------------------------------------


def test_rows(servers: Any) -> None:
    store = persia.Store(servers=servers(3).text)
    store.add_table(persia.EmbeddingConfig("t", 4, feature_names=["f"]))
    local = persia.Store()
    local.add_table(persia.EmbeddingConfig("t", 4, feature_names=["f"]))
    ids = torch.arange(-50, 50)
    assert torch.equal(store.rows("t", ids), local.rows("t", ids))
    assert not store.contains("t", ids).any()
    values = torch.rand(50, 4)
    store.set_rows("t", ids[::2], values)
    assert torch.equal(store.rows("t", ids[::2]), values)
    assert store.contains("t", ids).tolist() == [True, False] * 50
    assert torch.equal(store.ids("t").sort().values, ids[::2])
    kept, bag = store.to_torch("t")
    assert torch.equal(kept, ids[::2])
    assert torch.equal(bag.weight, values)
    arrow = store.to_arrow("t", state=True)
    assert arrow.num_rows == 50
    stats = store.stats()
    assert stats["tables"]["t"]["rows"] == 50
    assert stats["memory"] > 0
    assert len(stats["servers"]) == 3
    shards = {store.explain("t", int(i))["shard"] for i in ids}
    assert shards == {0, 1, 2}
    assert store.explain("t", -50)["present"]
    store.clear("t")
    assert len(store.ids("t")) == 0
    store.set_arrow("t", arrow)
    assert torch.equal(store.rows("t", ids[::2]), values)
    assert store.remote
    assert (store.rank, store.world_size) == (0, 1)


def test_tables_that_only_servers_have_are_named(servers: Any) -> None:
    where = servers(2)
    Counter(where).train(1)
    store = persia.Store(servers=where.text, job="notebook", read_only=True)
    with pytest.raises(errors.InvalidArgument, match=r"\['t'\].*add_table"):
        store.rows("t", [7])
    store.close()


def test_many_ids_are_listed_in_blocks(servers: Any) -> None:
    store = persia.Store(servers=servers(2, message_limit=1 << 20).text)
    store.add_table(persia.EmbeddingConfig("t", 2, feature_names=["f"]))
    ids = torch.randperm(200_000)
    store.set_rows("t", ids, torch.zeros(len(ids), 2))
    assert torch.equal(store.ids("t").sort().values, torch.arange(200_000))


def test_counters(servers: Any) -> None:
    c = Counter(servers(2))
    c.train(10)
    client = c.stats["client"]
    assert client["pushes"] == client["pulls"] == client["ids"] == 10
    assert client["distinct"] == 10
    assert client["bytes_out"] > client["bytes_in"] > 0
    for shard in c.stats["servers"]:
        assert shard["pushes"] == shard["updates"] == 10
    assert c.stats["tables"]["t"]["pushes"] == 10
    assert c.stats["pending"] == c.stats["updates_failed"] == 0


# -- several stores -------------------------------------------------------


def test_stores_of_one_process_share_tables(servers: Any) -> None:
    where = servers(2)
    one, two = Counter(where), Counter(where)
    one.train(20, 2)
    two.train(30, 0)
    one.train(5, 0)
    assert one.value == two.value == 55
    assert one.store.updates == two.store.updates == 55


def test_a_store_goes_on_where_its_rank_was(servers: Any) -> None:
    where = servers(2)
    for i in range(3):
        c = Counter(where)
        c.train(10)
        assert c.value == 10 * (i + 1)
        c.store.close()
        assert c.store.closed


def test_a_contradicting_table(servers: Any) -> None:
    where = servers(2)
    Counter(where)
    store = persia.Store(persia.optim.SGD(lr=1.0), servers=where.text)
    with pytest.raises(errors.SchemaMismatch, match="embedding_dim"):
        store.add_table(persia.EmbeddingConfig("t", 8, feature_names=["f"]))


def test_modules_without_a_store_share_one_and_no_table(
    servers: Any, monkeypatch: Any
) -> None:
    monkeypatch.setenv("PERSIA_SERVERS", servers(2).text)
    tables = [persia.EmbeddingConfig("a", 4, feature_names=["f"])]
    others = [persia.EmbeddingConfig("b", 4, feature_names=["f"])]
    one = persia.EmbeddingCollection(tables, optimizer=persia.optim.Adam())
    two = persia.EmbeddingCollection(others, optimizer=persia.optim.SGD(0.1))
    three = persia.EmbeddingCollection(tables)
    assert one.store is two.store is three.store
    assert one.store.remote
    groups = one.store.optimizer.param_groups
    assert [g["algorithm"] for g in groups] == ["adam", "sgd", "adam"]
    ids = persia.JaggedBatch(["f"], torch.tensor([7]))
    before = one.embeddings["a"].weight, three.embeddings["a"].weight
    one(ids)["f"].values().sum().backward()
    one.store.flush()
    assert one.store.contains(one.tables[0].name, [7]).all()
    assert not three.store.contains(three.tables[0].name, [7]).any()
    assert len(before[0]) == len(before[1]) == 0
    one.store.close()
    again = persia.EmbeddingCollection(tables, optimizer=persia.optim.Adam())
    assert again.store is not one.store
    again.store.close()


def test_pickle_connects_anew(servers: Any) -> None:
    where = servers(2)
    c = Counter(where)
    c.train(3)
    again = pickle.loads(pickle.dumps(c.store))
    assert int(again.rows("t", [7])[0, 0]) == 3
    again.close()


# -- errors ---------------------------------------------------------------


def test_servers_must_be_whole(servers: Any) -> None:
    where = servers(3)
    with pytest.raises(errors.SchemaMismatch, match="1"):
        persia.Store(servers=where.addresses[::2])
    with pytest.raises(errors.SchemaMismatch, match="other"):
        persia.Store(servers=where.text, namespace="other")


def test_a_server_that_is_not_there() -> None:
    started = time.monotonic()
    with pytest.raises(errors.Unavailable, match=r"127\.0\.0\.1:9"):
        persia.Store(servers="127.0.0.1:9", timeout=1.0)
    assert time.monotonic() - started < 20


def test_a_bad_gradient_is_raised_once(servers: Any) -> None:
    c = Counter(servers(2))
    iterator = iter(c.loader(10, 3))
    (c.forward(next(iterator))[1] * float("nan")).backward()
    with pytest.raises(errors.NonFiniteGradient, match="table t"):
        c.store.flush()
    c.store.flush()
    c.forward(next(iterator))[1].backward()
    c.store.flush()
    assert c.value == 1


def test_a_server_that_dies_is_an_error_with_its_address(
    servers: Any,
) -> None:
    where = servers(2)
    c = Counter(where, timeout=1.0)
    c.train(5)
    where.kill(1)
    with pytest.raises(errors.Unavailable, match=where.addresses[1]):
        c.train(50)
    with pytest.raises((errors.Unavailable, errors.DeadlineExceeded)):
        c.store.rows("t", torch.arange(20))
    with contextlib.suppress(errors.PersiaError):  # of an update, if one is
        c.store.close()  # left that nobody was told of
    assert c.store.closed


def test_lost_updates_are_raised_once(servers: Any) -> None:
    where = servers(2)
    c = Counter(where)
    c.train(5)
    shard = c.store.explain("t", 7)["shard"]
    where.kill(shard)
    where.restart(shard)
    with pytest.raises(errors.UpdatesLost, match="5 updates"):
        c.train(3, 0)
    c.train(3, 0)
    assert c.stats["client"]["lost"] == 5


def test_lost_updates_may_be_counted_only(servers: Any) -> None:
    where = servers(2)
    c = Counter(where, lost="continue")
    c.train(5)
    shard = c.store.explain("t", 7)["shard"]
    where.kill(shard)
    where.restart(shard)
    c.train(3, 0)
    assert c.value == 3
    assert c.stats["client"]["lost"] == 5
    assert c.stats["client"]["reconnects"] >= 1


def test_ctrl_c_while_a_server_is_away(servers: Any) -> None:
    where = servers(2)
    c = Counter(where, timeout=60.0)
    c.train(3)
    where.kill(0)
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        c.train(200, 2)
    assert time.monotonic() - started < 20
    where.restart(0)
    with pytest.raises(errors.UpdatesLost):
        c.train(3, 0)
    c.train(3, 2)  # the notebook cell runs again


def test_what_a_signal_s_handler_raises_ends_a_forward(
    servers: Any,
) -> None:
    class Alarm(Exception):
        pass

    def handler(*_: object) -> None:
        raise Alarm("of the handler")

    where = servers(1)
    c = Counter(where, timeout=60.0)
    where.kill(0)
    before = signal.signal(signal.SIGALRM, handler)
    try:
        for _ in range(2):
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            with pytest.raises(Alarm, match="of the handler"):
                c.model(JaggedBatch(["f"], torch.tensor([7])))
            assert _core.take_raised() is None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_close_after_a_failure_does_not_wait_for_the_rest(
    servers: Any,
) -> None:
    where = servers(1)
    c = Counter(where, timeout=1.0)
    c.train(3)
    where.kill(0)
    started = time.monotonic()
    with pytest.raises((errors.Unavailable, errors.DeadlineExceeded)):
        c.train(40, None)
    with contextlib.suppress(errors.PersiaError):
        c.store.close()
    assert time.monotonic() - started < 30


@pytest.mark.slow
def test_a_forked_child(servers: Any) -> None:
    c = Counter(servers(2))
    c.train(3)
    assert in_child(lambda: c.store.rows("t", [7]), c.store.close) == [
        "UsedAfterFork",
        "nothing",
    ]
    c.train(3)
    assert c.value == 6


def test_shards_are_those_of_the_core(servers: Any) -> None:
    c = Counter(servers(3))
    c.store.set_rows("t", range(100), torch.zeros(100, 4))
    here = [0, 0, 0]
    for i in range(100):
        here[_core.cluster_shard(engine_of(c.store).handle, i)] += 1
    shards = [
        _core.cluster_stats(engine_of(c.store).handle, s) for s in range(3)
    ]
    assert here == [sum(t["rows"] for t in s["tables"]) for s in shards]


@pytest.mark.filterwarnings("error::UserWarning")
def test_ranks_without_a_process_group_are_told_that_none_waits(
    servers: Callable[..., Servers],
) -> None:
    """They cannot agree on steps; once a store."""
    where = servers(1)
    one = Counter(where, rank=0, world_size=2, grad_division=False)
    with pytest.warns(UserWarning, match="init_process_group"):
        one.forward(next(one.source(1)))[1].backward()
    for batch in one.source(2):  # another one would be an error
        one.forward(batch)[1].backward()
    assert one.value == 3


def test_a_loop_without_a_loader_sees_its_own_updates(
    servers: Callable[..., Servers],
) -> None:
    c = Counter(servers(2))
    values = []
    for batch in c.source(20):
        value, loss = c.forward(batch)
        values.append(value)
        loss.backward()
    assert values == list(range(20))
