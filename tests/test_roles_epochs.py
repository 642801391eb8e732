"""Who dies, leaves or waits at the end of an epoch: each pass ends, and has
every batch."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from random import Random

import pytest

import persia
from persia import Stream, _core
from persia.data import Sender
from tests.remote import Servers
from tests.roles import Model, Workers, batches, open_store, servers, step
from tests.test_roles import in_thread
from tests.test_roles_failures import Trainer, wait_for

__all__ = ["servers"]

if not _core.GRPC[0].isdigit():
    pytest.skip("built without gRPC", allow_module_level=True)

pytestmark = [pytest.mark.timeout(60), pytest.mark.slow]


@pytest.fixture
def workers(servers: Servers) -> Iterator[Workers]:
    """Two, whose leases are longer than a test."""
    with contextlib.closing(
        Workers(servers.addresses, 2, lease=300.0)
    ) as both:
        yield both


def kill(sender: Sender) -> None:
    """What kill -9 leaves of a loader."""
    sender._core.close(False)


def test_a_new_worker_gets_batches_of_an_earlier_epoch(
    servers: Servers, workers: Workers
) -> None:
    """It first hears of the loader in its second epoch, then gets what another
    worker had of the first."""
    with Sender(workers.addresses, timeout=20, move_after=0.2) as sender:
        sender.send(next(batches(1)))
        sender.end()
        workers.restart(1)
        wait_for(lambda: workers.workers[1].stats()["streams"] == 1)
        workers.workers[0].close()
        wait_for(lambda: workers.workers[1].stats()["queued"] == 1)
        trainer = Trainer(servers, workers)
        trainer.epoch()
        assert trainer.n == 1
        sender.flush(20)


def test_a_pass_ends_when_workers_are_new_and_the_loader_left(
    servers: Servers,
) -> None:
    """One worker has heard of the loader only in its second epoch. The other
    is away at the end, and hears nothing of the loader when it is back."""
    with contextlib.closing(
        Workers(servers.addresses, 2, silence=3.0)
    ) as workers:
        trainer = Trainer(servers, workers)
        trainer.stream = Stream(workers.addresses, timeout=20, move_after=9)
        sender = Sender(workers.addresses, timeout=20)
        for batch in batches(4):
            sender.send(batch)
        loader = iter(persia.DataLoader(trainer.stream, trainer.model, 0))
        for _ in range(3):
            step(trainer.model, next(loader), trainer.dense)
        batch = next(loader)
        sender.end()
        wait_for(lambda: sender.stats()["done"] == 3)
        workers.restart(0)
        wait_for(lambda: workers.workers[0].stats()["streams"] == 1)
        sender.close()
        step(trainer.model, batch, trainer.dense)
        trainer.store.flush()
        workers.workers[1].close()
        rest: list[object] = []
        raised = in_thread(lambda: rest.append(next(loader, None)))
        wait_for(lambda: rest or trainer.stream.stats()["away"] == 1)
        workers.restart(1)
        raised()
        assert rest == [None]


def test_a_pass_waits_for_a_loader_that_starts_again(
    servers: Servers, workers: Workers
) -> None:
    """A worker is away for longer than the trainer's move_after, and nobody
    sends its batches to the other before the loader is back."""
    trainer = Trainer(servers, workers)
    trainer.stream = Stream(workers.addresses, timeout=30, move_after=0.2)
    first = Sender(workers.addresses, name="a", timeout=20, move_after=60)
    for batch in batches(4):
        first.send(batch)
    first.end()
    kill(first)
    workers.workers[0].close()
    ended: list[int] = []

    def train() -> None:
        trainer.epoch()
        ended.append(trainer.n)

    raised = in_thread(train)
    wait_for(lambda: workers.workers[1].stats()["trained"] == 2)
    wait_for(lambda: trainer.stream.stats()["away"] == 1)
    with pytest.raises(AssertionError):
        wait_for(lambda: ended, 1.5)
    with Sender(
        workers.addresses, name="a", timeout=20, move_after=0.2
    ) as second:
        for batch in batches(4):
            second.send(batch)
        second.end()
        raised()
    assert ended == [4]
    assert trainer.store.updates == 4


def test_a_later_take_gives_its_batch_to_an_earlier_one(
    servers: Servers, workers: Workers
) -> None:
    """Each loader sends one batch, to the first worker, and waits for it in
    the middle of an epoch.  The trainer's second Take waits at the other
    worker."""
    trainer = Trainer(servers, workers)
    loader = iter(persia.DataLoader(trainer.stream, trainer.model, 4))
    done: list[int] = []

    def send() -> None:
        for n in range(3):
            sender = Sender(workers.addresses, timeout=20)
            sender.send(next(batches(1)))
            sender.flush(20)
            done.append(n)
            kill(sender)

    raised = in_thread(send)
    for n in range(3):
        step(trainer.model, next(loader), trainer.dense)
        wait_for(lambda n=n: len(done) > n)
    raised()
    loader.close()
    assert trainer.stream.stats()["late"] == 0


def test_one_take_looks_at_all_workers(
    servers: Servers, workers: Workers
) -> None:
    """The same without staleness: the Take itself asks the other worker."""
    trainer = Trainer(servers, workers)
    loader = iter(persia.DataLoader(trainer.stream, trainer.model, 0))
    for _ in range(2):
        sender = Sender(workers.addresses, timeout=20)
        sender.send(next(batches(1)))
        raised = in_thread(lambda sender=sender: sender.flush(20))
        step(trainer.model, next(loader), trainer.dense)
        raised()
        kill(sender)
    loader.close()


def test_an_update_of_several_batches_outlives_a_worker(
    servers: Servers, workers: Workers
) -> None:
    """The batch in hand is sent to the other worker, which keeps it from this
    trainer; the pass ends all the same, and the update has both."""
    store = open_store(servers.text, update="step")
    model = Model(store)
    stream = Stream(workers.addresses, timeout=20, move_after=2)
    loader = iter(persia.DataLoader(stream, model, 3))
    with Sender(workers.addresses, timeout=20, move_after=0.2) as sender:
        for batch in batches(2):
            sender.send(batch)
        for _ in range(2):
            batch = next(loader)
            model(batch.dense, batch.ids).sum().backward()
        workers.workers[0].close()
        wait_for(lambda: workers.workers[1].stats()["withheld"] == 1)
        sender.end()
        assert next(loader, None) is None
        store.optimizer.step()
        store.flush()
        sender.flush(20)
    assert store.updates == 1
    assert stream.stats()["late"] == 0


def test_a_skipped_batch_is_not_sent_again(
    servers: Servers, workers: Workers
) -> None:
    """All servers know that it is through, also when loader and workers are
    others."""
    trainer = Trainer(servers, workers)
    with Sender(workers.addresses, name="a", timeout=20) as first:
        for batch in batches(3):
            first.send(batch)
        loader = persia.DataLoader(trainer.stream, trainer.model, 0)
        first.end()
        for n, batch in enumerate(loader):
            if n == 1:
                batch.skip()
            else:
                step(trainer.model, batch, trainer.dense)
        trainer.store.flush()
        first.flush(20)
        kill(first)
        workers.restart(0)
        workers.restart(1)
        first._core = _core_of(workers)
        for batch in batches(3):
            first.send(batch)
        assert first.stats()["passed"] == 3
    assert workers.stats("submitted") == 0


def _core_of(workers: Workers) -> _core.Sender:
    """That of another process with the same name."""
    return Sender(workers.addresses, name="a", timeout=20)._core


def test_flush_waits_as_long_as_batches_are_trained(
    servers: Servers, workers: Workers
) -> None:
    """Its timeout is that of one batch."""
    trainer = Trainer(servers, workers)
    with Sender(workers.addresses, timeout=20) as sender:
        for batch in batches(4):
            sender.send(batch)
        with pytest.raises(persia.errors.DeadlineExceeded):
            sender.flush(0.1)
        loader = iter(persia.DataLoader(trainer.stream, trainer.model, 0))
        raised = in_thread(lambda: sender.flush(6))
        for n in range(4):
            step(trainer.model, next(loader), trainer.dense)
            trainer.store.flush()
            wait_for(lambda n=n: sender.stats()["done"] == n + 1)
            if n < 3:
                with pytest.raises(AssertionError):
                    wait_for(lambda: False, 2.2)
        raised()
        loader.close()


def test_a_loader_that_is_ahead_does_not_lock_the_others_out(
    servers: Servers,
) -> None:
    """Its batches of the next epoch fill the queue."""
    with contextlib.closing(
        Workers(servers.addresses, loaders=2, queue_limit=4000)
    ) as workers:
        trainer = Trainer(servers, workers)
        ahead = Sender(workers.addresses, timeout=20)
        behind = Sender(workers.addresses, timeout=20)
        behind.send(next(batches(1)))
        ahead.end()

        def fill() -> None:
            for batch in batches(8):
                ahead.send(batch)
            ahead.end()

        def follow() -> None:
            for batch in batches(8, seed=1):
                behind.send(batch)
            behind.end()
            behind.end()

        filled = in_thread(fill)
        wait_for(lambda: workers.stats("bytes") > 3000)
        followed = in_thread(follow)
        trainer.epoch()
        assert trainer.n == 9
        trainer.epoch()
        assert trainer.n == 17
        filled()
        followed()
        ahead.close()
        behind.close()


class Loader:
    """A named loader in a thread, which a test kills and starts again."""

    def __init__(self, workers: Workers, name: str, epochs: int) -> None:
        self._workers, self._name, self._epochs = workers, name, epochs
        self._killed = threading.Event()
        self.begin()

    def begin(self) -> None:
        """From its first batch on."""
        self._killed.clear()
        self._join = in_thread(self._run)

    def _run(self) -> None:
        sender = Sender(
            self._workers.addresses,
            name=self._name,
            timeout=30,
            move_after=0.3,
        )
        for epoch in range(self._epochs):
            for batch in batches(PER_EPOCH, seed=epoch):
                if self._killed.is_set():
                    return kill(sender)
                sender.send(batch)
            sender.end()
        while not self._killed.is_set():
            with contextlib.suppress(persia.errors.DeadlineExceeded):
                sender.flush(0.2)
                return sender.close()
        return kill(sender)

    def kill(self) -> None:
        """Between two batches."""
        self._killed.set()
        self._join()

    def join(self) -> None:
        """All is trained."""
        self._join()


PER_EPOCH, EPOCHS = 12, 3
SEEDS = os.environ.get("PERSIA_TEST_SEEDS", "0,1").split(",")


@pytest.mark.slow
@pytest.mark.timeout(170)
@pytest.mark.parametrize("seed", SEEDS)
def test_each_pass_has_all_of_its_epoch(servers: Servers, seed: str) -> None:
    """Two loaders, three workers that start again or stay away, and one loader
    that starts again, at random: after each pass all batches up to its epoch
    are in the tables, and none of a later one."""
    random = Random(int(seed))
    with contextlib.closing(
        Workers(servers.addresses, 3, loaders=2, lease=300.0)
    ) as workers:
        trainer = Trainer(servers, workers)
        loaders = [Loader(workers, name, EPOCHS) for name in ("a", "b")]
        away: list[int] = []

        def at(n: int) -> None:
            if random.random() > 0.15:
                return
            what = random.randrange(4)
            if away:
                workers.restart(away.pop())
            elif what == 3:
                loaders[0].kill()
                loaders[0].begin()
            else:
                workers.workers[what].close()
                away.append(what)

        for epoch in range(1, EPOCHS + 1):
            trainer.epoch(staleness=random.randrange(4), at=at)
            assert trainer.store.updates == 2 * PER_EPOCH * epoch
        if away:
            workers.restart(away.pop())
        for loader in loaders:
            loader.join()
        assert trainer.stream.stats()["given_up"] == 0
