"""Data loader, embedding worker, servers and trainer: that what four roles
train is what one process trains, and what is refused."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import persia
from persia import Stream, _core, errors
from persia.data import Sender
from tests.remote import Servers
from tests.roles import (
    KEYS,
    Model,
    Workers,
    batches,
    open_store,
    servers,
    step,
    train,
    workers,
)

ROOT = Path(__file__).parents[1]

__all__ = ["servers", "workers"]

if not _core.GRPC[0].isdigit():
    pytest.skip("built without gRPC", allow_module_level=True)


def in_thread(work: Callable[[], None]) -> Callable[[], None]:
    """Starts it; what is returned waits for its end, and raises its error."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def join() -> None:
        thread.join()
        if raised:
            raise raised[0]

    return join


@contextlib.contextmanager
def feeding(
    workers: Workers, *epochs: Iterable[persia.Batch]
) -> Iterator[None]:
    """A loader in a thread; its error is raised at the end."""

    def run() -> None:
        with Sender(workers.addresses, timeout=10) as sender:
            for epoch in epochs:
                for batch in epoch:
                    sender.send(batch)
                sender.end()

    join = in_thread(run)
    yield
    join()


def equal(a: Any, b: Any) -> bool:
    """Whether rows are the same bit by bit."""
    return all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(
    ("shards", "count"), [(1, 1), (2, 1), (3, 1), (1, 2), (2, 3)]
)
def test_the_same_bits_as_in_direct_mode(shards: int, count: int) -> None:
    """Without staleness, for any number of servers and workers."""
    with contextlib.ExitStack() as stack:
        direct = stack.enter_context(contextlib.closing(Servers(shards)))
        store = open_store(direct.text)
        want = train(store, list(batches(25)))
        servers = stack.enter_context(contextlib.closing(Servers(shards)))
        workers = stack.enter_context(
            contextlib.closing(Workers(servers.addresses, count))
        )
        store = open_store(servers.text)
        with feeding(workers, batches(25)):
            got = train(store, Stream(workers.addresses))
        embedded = train(
            persia.Store(persia.optim.Adam(lr=0.05)), list(batches(25))
        )
        assert len(got[0]) == 25
        for losses, rows in (want, embedded):
            assert got[0] == losses
            assert equal(got[1], rows)
        assert workers.stats("trained") == 25
        assert workers.stats("bytes") == 0


@pytest.mark.parametrize("wire_dtype", ["fp16", "bf16"])
def test_narrow_values_train_alike(
    servers: Servers, workers: Workers, wire_dtype: str
) -> None:
    """Rounded, but the loss is that of fp32 within what they resolve."""
    with contextlib.closing(Servers(1)) as direct:
        want, _ = train(open_store(direct.text), list(batches(15)))
    store = open_store(servers.text, wire_dtype=wire_dtype)
    with feeding(workers, batches(15)):
        got, _ = train(store, Stream(workers.addresses))
    assert got == pytest.approx(want, abs=0.02)


@pytest.mark.parametrize("staleness", [1, 4, None])
def test_every_batch_is_trained_once_within_the_bound(
    servers: Servers, workers: Workers, staleness: int | None
) -> None:
    """Several epochs of a loader are as many passes."""
    store = open_store(servers.text)
    model = Model(store)
    dense = torch.optim.SGD(model.parameters(), 0.1)
    loader = persia.DataLoader(
        Stream(workers.addresses), model, staleness=staleness
    )
    seen = []
    with feeding(workers, batches(20), batches(0), batches(7, seed=1)):
        for _ in range(3):
            seen.append(0)
            for batch in loader:
                step(model, batch, dense)
                seen[-1] += 1
    assert seen == [20, 0, 7]
    store.flush()
    assert workers.stats("trained") == 27
    assert workers.stats("failed") == workers.stats("again") == 0
    assert store.updates == 27
    if staleness is not None:
        found = store.stats()["lookahead"]["staleness"]
        assert max(found) <= staleness


def test_evaluation_changes_nothing(
    servers: Servers, workers: Workers
) -> None:
    """Under no_grad batches are read, and end without gradients."""
    store = open_store(servers.text)
    model = Model(store)
    dense = torch.optim.SGD(model.parameters(), 0.1)
    loader = persia.DataLoader(Stream(workers.addresses), model)
    with feeding(workers, batches(5), batches(6)):
        for batch in loader:
            step(model, batch, dense)
        updates = store.updates
        with torch.no_grad():
            found = [model(batch.dense, batch.ids) for batch in loader]
        assert store.updates == updates == 5
        del batch
    assert len(found) == 6
    direct = [
        model(b.dense, b.ids).detach() for b in batches(6)
    ]  # looked up by the model's own store
    assert all(map(torch.equal, found, direct))


def test_a_batch_without_a_backward_does_not_block(
    servers: Servers, workers: Workers
) -> None:
    """It is skipped, or abandoned; the loader need not keep it."""
    store = open_store(servers.text)
    model = Model(store)
    dense = torch.optim.SGD(model.parameters(), 0.1)
    with feeding(workers, batches(12)):
        loader = persia.DataLoader(Stream(workers.addresses), model)
        for i, batch in enumerate(loader):
            if i % 3 == 1:
                batch.skip()
            elif i % 3 == 0:
                step(model, batch, dense)
        del batch
    store.flush()
    assert store.updates == 4
    assert workers.stats("trained") == 4


@pytest.mark.parametrize("raises", [False, True])
def test_what_an_ended_loop_had_in_hand_is_offered_again(
    servers: Servers, workers: Workers, raises: bool
) -> None:
    """It is not trained; only a loop that continues has passed it over."""
    store = open_store(servers.text)
    model = Model(store)
    dense = torch.optim.SGD(model.parameters(), 0.1)
    loader = persia.DataLoader(Stream(workers.addresses), model, staleness=3)

    def loop(most: int) -> None:
        for n, batch in enumerate(loader):
            if n == most and raises:
                raise KeyError
            if n == most:
                break
            step(model, batch, dense)

    with feeding(workers, batches(20)):
        with contextlib.suppress(KeyError):
            loop(5)
        loop(99)
    store.flush()
    assert workers.stats("trained") == 20
    assert workers.stats("skipped") == 0


def test_after_a_break_the_next_loop_goes_on(
    servers: Servers, workers: Workers
) -> None:
    """What was asked for ahead is offered again."""
    store = open_store(servers.text)
    model = Model(store)
    dense = torch.optim.SGD(model.parameters(), 0.1)
    loader = persia.DataLoader(Stream(workers.addresses), model, staleness=3)
    n = 0
    with feeding(workers, batches(20)):
        for batch in loader:
            step(model, batch, dense)
            n += 1
            if n == 5:
                break
        for batch in loader:
            step(model, batch, dense)
            n += 1
        del batch
    store.flush()
    assert n == 20
    assert workers.stats("trained") == 20


def test_update_at_the_step(servers: Servers, workers: Workers) -> None:
    """With a GradScaler, whose skipped steps change nothing."""
    store = open_store(servers.text, update="step")
    model = Model(store)
    dense = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with feeding(workers, batches(9)):
        loader = persia.DataLoader(Stream(workers.addresses), model)
        for i, batch in enumerate(loader):
            dense.zero_grad()
            loss = model(batch.dense, batch.ids).mean()
            if i % 3 == 1:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.step(dense)
            scaler.step(store.optimizer)
            scaler.update()
        del batch
    store.flush()
    assert store.updates == 6
    assert workers.stats("trained") == 6


def test_the_ids_are_not_there(servers: Servers, workers: Workers) -> None:
    """Their values raise; a forward of another batch's does, too."""
    store = open_store(servers.text)
    model = Model(store)
    with feeding(workers, batches(2)):
        for batch in persia.DataLoader(Stream(workers.addresses), model):
            assert batch.ids.keys() == KEYS
            assert len(batch) == batch.ids.stride() == 8
            for look in (
                batch.ids.values,
                batch.ids.lengths,
                batch.ids.offsets,
                batch.ids.to_dict,
            ):
                with pytest.raises(errors.InvalidArgument):
                    look()
            batch.skip()
        with pytest.raises(errors.TicketError):
            model(batch.dense, batch.ids)


def test_models_that_workers_cannot_serve(
    servers: Servers, workers: Workers
) -> None:
    """Are refused: tables elsewhere, several iterations."""
    store = open_store(servers.text)
    embedded = persia.EmbeddingBagCollection(
        store=persia.Store(servers="embedded"),
        tables=[persia.EmbeddingBagConfig("e", 4, feature_names=["user"])],
    )
    with pytest.raises(errors.InvalidArgument, match="a Stream: "):
        iter(persia.DataLoader(Stream(workers.addresses), embedded))
    with pytest.raises(errors.InvalidArgument, match=r"persia.DataLoader"):
        iter(Stream(workers.addresses))
    stream = Stream(workers.addresses)
    model = Model(store)
    first = iter(persia.DataLoader(stream, model))
    with pytest.raises(errors.InvalidArgument, match="Stream"):
        iter(persia.DataLoader(stream, model))
    first.close()


def test_ranks_of_other_models_are_refused(
    servers: Servers, workers: Workers
) -> None:
    """In one job: the model of a rank that is there counts. A later process
    of the same rank may have another one."""
    first = open_store(servers.text, job="one", rank=0, world_size=2)
    iter(persia.DataLoader(Stream(workers.addresses), Model(first))).close()
    tables = [persia.EmbeddingBagConfig("u", 4, feature_names=["user"])]
    for rank in (1, 0):
        store = open_store(servers.text, job="one", rank=rank, world_size=2)
        other = persia.EmbeddingBagCollection(store=store, tables=tables)
        loader = persia.DataLoader(Stream(workers.addresses), other)
        if rank == 1:
            with pytest.raises(errors.SchemaMismatch):
                iter(loader)
        else:
            iter(loader).close()


def test_a_loader_hears_of_bad_batches(
    servers: Servers, workers: Workers
) -> None:
    """And may go on with others."""
    model = Model(open_store(servers.text))
    iter(persia.DataLoader(Stream(workers.addresses), model)).close()
    good = next(batches(1))
    with Sender(workers.addresses, timeout=10) as sender:
        ids = persia.JaggedBatch(["user"], torch.arange(8))
        with pytest.raises(errors.MissingFeature, match="item"):
            sender.send(persia.Batch(good.dense, ids))
        with pytest.raises(errors.InvalidArgument):
            sender.send(good.ids)  # type: ignore[arg-type]
        sender.send(good)
        stats = sender.stats()
        assert (stats["sent"], stats["done"]) == (1, 0)
    with pytest.raises(errors.Closed):
        sender.send(good)
    with pytest.raises(errors.SchemaMismatch):
        Sender(workers.addresses, namespace="other", timeout=5)
    with pytest.raises(errors.Unavailable):
        Sender("127.0.0.1:1", timeout=0.2)


def test_a_full_queue_holds_the_loader_back(servers: Servers) -> None:
    """No more than its bytes are at the worker; all are trained."""
    limit = 4000
    with contextlib.closing(
        Workers(servers.addresses, queue_limit=limit)
    ) as workers:
        store = open_store(servers.text)
        model = Model(store)
        dense = torch.optim.SGD(model.parameters(), 0.1)
        with feeding(workers, batches(30)):
            loader = persia.DataLoader(Stream(workers.addresses), model)
            for batch in loader:
                assert workers.stats("bytes") <= limit
                step(model, batch, dense)
            del batch
        store.flush()
        assert workers.stats("trained") == 30


def test_servers_that_come_back(servers: Servers, workers: Workers) -> None:
    """A server that is started again loses rows, and training goes on."""
    store = open_store(servers.text, lost="continue")
    model = Model(store)
    dense = torch.optim.SGD(model.parameters(), 0.1)
    n = 0
    with feeding(workers, batches(20)):
        loader = persia.DataLoader(Stream(workers.addresses), model)
        for batch in loader:
            step(model, batch, dense)
            n += 1
            if n == 8:
                servers.kill(1)
                servers.restart(1)
        del batch
    store.flush()
    assert n == 20
    assert workers.stats("trained") == 20


def test_a_worker_that_comes_back(servers: Servers, workers: Workers) -> None:
    """The trainer says Hello again; later batches are trained."""
    store = open_store(servers.text)
    model = Model(store)
    dense = torch.optim.SGD(model.parameters(), 0.1)
    stream = Stream(workers.addresses, timeout=10)
    with feeding(workers, batches(4)):
        for batch in persia.DataLoader(stream, model):
            step(model, batch, dense)
        del batch
    workers.restart(0)
    n = 0
    with feeding(workers, batches(6)):
        for batch in persia.DataLoader(stream, model):
            step(model, batch, dense)
            n += 1
        del batch
    store.flush()
    assert n == 6
    assert store.updates == 10


def test_the_page_on_roles(
    servers: Servers, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its loader and its trainer, as they stand there."""
    page = (ROOT / "docs" / "roles.md").read_text()
    loader, trainer = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    monkeypatch.setenv("PERSIA_SERVERS", servers.text)
    monkeypatch.setenv("PERSIA_WORKERS", ",".join(workers.addresses))
    thread = threading.Thread(target=exec, args=(loader, {}))
    thread.start()
    exec(trainer, {})
    thread.join()
    assert workers.stats("trained") == 100


def test_a_worker_that_loses_its_queue(
    servers: Servers, workers: Workers
) -> None:
    """The loader sends again what is not trained; no update is applied
    twice."""
    store = open_store(servers.text)
    model = Model(store)
    dense = torch.optim.SGD(model.parameters(), 0.1)
    stream = Stream(workers.addresses, timeout=20)
    n = 0

    def feed() -> None:
        with Sender(workers.addresses, timeout=20) as sender:
            for batch in batches(20):
                sender.send(batch)
            sender.end()
            sender.flush(60)
            stats = sender.stats()
            assert (stats["sent"], stats["done"]) == (20, 20)

    raised = in_thread(feed)
    for batch in persia.DataLoader(stream, model, staleness=2):
        step(model, batch, dense)
        n += 1
        if n == 7:
            workers.restart(0)
    del batch
    store.flush()
    raised()
    assert store.updates == 20
    assert 20 <= n <= 24
    # A Return whose answer the old worker could not send is late, too.
    assert n - 20 <= stream.stats()["late"] <= 4
    assert stream.stats()["lost"] == 0


def test_updates_that_a_server_lost_are_told(
    servers: Servers, workers: Workers
) -> None:
    """Once, by the trainer's store, as without workers."""
    store = open_store(servers.text)
    model = Model(store)
    dense = torch.optim.SGD(model.parameters(), 0.1)
    stream = Stream(workers.addresses, timeout=20)
    n = told = 0
    with feeding(workers, batches(20)):
        loader = iter(persia.DataLoader(stream, model))
        while True:
            try:
                batch = next(loader, None)
                if batch is None:
                    break
                step(model, batch, dense)
                n += 1
            except errors.UpdatesLost:
                told += 1
                loader.close()
                loader = iter(persia.DataLoader(stream, model))
            if n == 8:
                store.flush()
                servers.kill(1)
                servers.restart(1)
                n += 1
        del batch
    with contextlib.suppress(errors.UpdatesLost):
        store.flush()
        told -= 1
    told += 1
    assert told == 1
    assert stream.stats()["lost"] == 8


def test_several_loaders_and_workers(servers: Servers) -> None:
    """Each batch is trained once; the epoch ends with the last loader."""
    with contextlib.closing(
        Workers(servers.addresses, 2, loaders=2)
    ) as workers:
        store = open_store(servers.text)
        model = Model(store)
        dense = torch.optim.SGD(model.parameters(), 0.1)
        loader = persia.DataLoader(
            Stream(workers.addresses), model, staleness=2
        )
        seen = []
        with (
            feeding(workers, batches(13), batches(2)),
            feeding(workers, batches(6, seed=1), batches(9, seed=1)),
        ):
            for _ in range(2):
                seen.append(0)
                for batch in loader:
                    step(model, batch, dense)
                    seen[-1] += 1
            del batch
        store.flush()
        assert sum(seen) == 30
        assert workers.stats("trained") == store.updates == 30
