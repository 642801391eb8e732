"""Embedding workers and data loaders that die, stay away, join and leave."""

from __future__ import annotations

import contextlib
import re
import time

import pytest
import torch
from typer.testing import CliRunner

import persia
from persia import Stream, _core
from persia.cli.app import app
from persia.data import Sender
from persia.distributed.status import ask_embedding
from persia.prometheus import EmbeddingWorkerCollector, embedding_worker_states
from tests.remote import Servers
from tests.roles import Model, Workers, batches, open_store, servers, step
from tests.test_roles import feeding, in_thread

__all__ = ["servers"]

pytestmark = pytest.mark.slow

if not _core.GRPC[0].isdigit():
    pytest.skip("built without gRPC", allow_module_level=True)


def wait_for(what: object, seconds: float = 30) -> None:
    """Until the callable says so."""
    assert callable(what)
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until
        time.sleep(0.02)


class Trainer:
    """A model, and what it has seen."""

    def __init__(self, servers: Servers, workers: Workers) -> None:
        self.store = open_store(servers.text)
        self.model = Model(self.store)
        self.dense = torch.optim.SGD(self.model.parameters(), 0.1)
        self.stream = Stream(workers.addresses, timeout=20, move_after=2)
        self.n = 0

    def epoch(self, staleness: int = 2, at: object = None) -> None:
        """One pass; at: called with the number of batches so far."""
        loader = persia.DataLoader(self.stream, self.model, staleness)
        for batch in loader:
            step(self.model, batch, self.dense)
            self.n += 1
            if callable(at):
                at(self.n)
        del batch
        self.store.flush()


def test_the_batches_of_a_worker_that_stays_away_move(
    servers: Servers,
) -> None:
    """To the one that is left; each is applied once, and the pass ends."""
    with contextlib.closing(Workers(servers.addresses, 2)) as workers:
        trainer = Trainer(servers, workers)
        moved: list[int] = []

        def feed() -> None:
            with Sender(workers.addresses, timeout=20, move_after=0.5) as s:
                for batch in batches(30):
                    s.send(batch)
                s.end()
                s.flush(60)
                stats = s.stats()
                moved.append(stats["moved"])
                assert stats["done"] == 30
                assert stats["away"] == 1

        raised = in_thread(feed)

        def at(n: int) -> None:
            if n == 8:
                workers.workers[0].close()

        trainer.epoch(at=at)
        raised()
        assert trainer.store.updates == 30
        assert trainer.stream.stats()["given_up"] == 0
        assert trainer.n - 30 <= trainer.stream.stats()["late"]
        assert moved[0] > 0
        assert workers.workers[1].stats()["resent"] > 0


def test_a_worker_that_returns_takes_part_again(servers: Servers) -> None:
    """Of the next epoch it gets its share."""
    with contextlib.closing(Workers(servers.addresses, 2)) as workers:
        trainer = Trainer(servers, workers)
        with Sender(workers.addresses, timeout=20, move_after=0.3) as sender:
            workers.workers[0].close()

            def feed() -> None:
                for batch in batches(6):
                    sender.send(batch)
                sender.end()

            raised = in_thread(feed)
            trainer.epoch()
            raised()
            workers.restart(0)
            wait_for(lambda: sender.stats()["away"] == 0)
            wait_for(lambda: trainer.stream.stats()["away"] == 0)
            raised = in_thread(feed)
            trainer.epoch()
            raised()
        assert trainer.n == trainer.store.updates == 12
        assert workers.workers[0].stats()["trained"] == 3
        assert workers.workers[1].stats()["trained"] == 9


def test_a_worker_that_starts_later_takes_part(servers: Servers) -> None:
    """Loader and trainer begin with those that are there."""
    with contextlib.closing(Workers(servers.addresses, 2)) as workers:
        workers.workers[1].close()
        trainer = Trainer(servers, workers)

        def feed() -> None:
            with Sender(workers.addresses, timeout=20, move_after=0.2) as s:
                for i, batch in enumerate(batches(20)):
                    s.send(batch)
                    if i == 9:
                        workers.restart(1)
                        wait_for(lambda: s.stats()["away"] == 0)

        raised = in_thread(feed)
        trainer.epoch()
        raised()
        assert trainer.n == trainer.store.updates == 20
        assert workers.workers[1].stats()["trained"] > 0


def test_no_worker_is_an_error(servers: Servers) -> None:
    """Within the timeout, at loader and trainer."""
    with contextlib.closing(Workers(servers.addresses, 2)) as workers:
        trainer = Trainer(servers, workers)
        trainer.stream = Stream(workers.addresses, timeout=1)
        sender = Sender(workers.addresses, timeout=1)
        sender.send(next(batches(1)))
        loader = iter(persia.DataLoader(trainer.stream, trainer.model))
        step(trainer.model, next(loader), trainer.dense)
        for worker in workers.workers:
            worker.close()
        with pytest.raises(persia.errors.Unavailable):
            next(loader)
        with pytest.raises(persia.errors.Unavailable):
            sender.send(next(batches(1)))
        with contextlib.suppress(persia.errors.PersiaError):
            trainer.store.flush()


def test_the_epoch_of_a_dead_loader_ends(servers: Servers) -> None:
    """After its silence; another one takes its place."""
    with contextlib.closing(Workers(servers.addresses, silence=3.0)) as w:
        trainer = Trainer(servers, w)
        lost = Sender(w.addresses, timeout=10)
        for batch in batches(5):
            lost.send(batch)
        lost._core.close(False)  # as kill -9 leaves it
        with pytest.warns(UserWarning, match="loader_silence"):
            trainer.epoch()
        assert trainer.stream.stats()["silent"] == 1
        assert trainer.n == 5
        assert w.stats("loaders_gone") == 1
        with feeding(w, batches(4)):
            wait_for(lambda: w.stats("loaders_gone") == 0)
            trainer.epoch()
        assert trainer.stream.stats()["silent"] == 0
        assert trainer.n == trainer.store.updates == 9


def test_a_loader_with_a_name_continues(servers: Servers) -> None:
    """Where the servers are, whatever became of worker and loader."""
    with contextlib.closing(Workers(servers.addresses, 1)) as workers:
        trainer = Trainer(servers, workers)
        first = Sender(workers.addresses, name="a", timeout=10)
        for batch in batches(20):
            first.send(batch)
        loader = iter(persia.DataLoader(trainer.stream, trainer.model, 1))
        for _ in range(7):
            step(trainer.model, next(loader), trainer.dense)
        loader.close()
        trainer.store.flush()
        first._core.close(False)
        workers.restart(0)
        with Sender(workers.addresses, name="a", timeout=10) as second:

            def feed() -> None:
                for batch in batches(20):
                    second.send(batch)
                second.end()
                second.flush(60)

            raised = in_thread(feed)
            trainer.epoch()
            raised()
            stats = second.stats()
        assert trainer.store.updates == 20
        assert stats["passed"] == 7
        assert (stats["sent"], stats["done"]) == (20, 20)
        with Sender(workers.addresses, name="b", timeout=10) as other:
            assert other.stats()["passed"] == 0


@pytest.mark.timeout(60)
def test_a_new_trainer_asks_all_workers(servers: Servers) -> None:
    """The first worker was started again when the loader had ended its epoch:
    the batch of that epoch is at the other one."""
    with contextlib.closing(Workers(servers.addresses, 2)) as workers:
        with Sender(workers.addresses, timeout=20) as sender:
            for batch in batches(2):
                sender.send(batch)
            sender.end()
            first = Trainer(servers, workers)
            loader = iter(persia.DataLoader(first.stream, first.model, 0))
            step(first.model, next(loader), first.dense)
            loader.close()
            first.store.flush()
            wait_for(lambda: sender.stats()["done"] == 1)
            workers.restart(0)
            wait_for(lambda: workers.workers[0].stats()["streams"] == 1)
            second = Trainer(servers, workers)
            second.epoch()
            assert second.n == 1
            sender.flush(20)
        assert second.store.updates == 2


def test_gradients_wait_for_their_batch(servers: Servers) -> None:
    """A worker was started again: the batch in the trainer's hand is not
    offered to it once more, and its gradients are applied."""
    with contextlib.closing(Workers(servers.addresses)) as workers:
        trainer = Trainer(servers, workers)
        with Sender(workers.addresses, timeout=20) as sender:
            for batch in batches(4):
                sender.send(batch)
            sender.end()
            loader = iter(persia.DataLoader(trainer.stream, trainer.model, 1))
            batch = next(loader)
            workers.restart(0)
            step(trainer.model, batch, trainer.dense)
            n = 1
            for batch in loader:
                step(trainer.model, batch, trainer.dense)
                n += 1
            del batch
            sender.flush(30)
        trainer.store.flush()
        assert n == trainer.store.updates == 4
        assert trainer.stream.stats()["late"] == 0


def test_metrics_and_status_of_a_worker(servers: Servers) -> None:
    """Where batches wait: each is in one state."""
    with contextlib.closing(Workers(servers.addresses)) as workers:
        trainer = Trainer(servers, workers)
        with Sender(workers.addresses, timeout=10) as sender:
            for batch in batches(5):
                sender.send(batch)
            loader = iter(persia.DataLoader(trainer.stream, trainer.model, 1))
            batch = next(loader)
            stats = workers.workers[0].stats
            wait_for(lambda: stats()["leased"] == 2 and not stats()["looking"])
            [status] = ask_embedding(workers.addresses, interval=0.01)
            assert not status.error
            states = embedding_worker_states(status.stats)
            assert (states["queued"], states["leased"]) == (3, 2)
            assert sum(states.values()) == 5
            found = {
                sample.name: sample.value
                for family in EmbeddingWorkerCollector(
                    stats, workers.workers[0]
                ).collect()
                for sample in family.samples
                if sample.labels.get("method", "Submit") == "Submit"
            }
            assert sender.stats()["sending_ns"] > 0
            assert found["persia_call_seconds_count"] == 5
            assert found["persia_call_seconds_sum"] > 0
            assert found["persia_embedding_worker_submitted_total"] == 5
            assert (
                found["persia_embedding_worker_bytes"] == stats()["bytes"] > 0
            )
            shown = CliRunner().invoke(
                app, ["status", "--workers", workers.addresses[0]]
            )
            assert shown.exit_code == 0
            row = re.search(r"127.0.0.1:\S+ .*", shown.output)
            assert row
            words = row[0].split()  # loaders, ranks, ... queued, leased
            assert words[2:4] == ["1", "1"]
            assert words[9:11] == ["3", "2"]
            del batch
            loader.close()
        [status] = ask_embedding(["127.0.0.1:1"], timeout=0.2)
        assert status.error.startswith("Unavailable")
