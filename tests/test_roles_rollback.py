"""A checkpoint is loaded into servers whose workers and loaders run on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import persia
from persia import _core
from persia.data import Sender, feeding
from persia.data.feeding import Loader
from persia.errors import RowsReplaced
from tests.remote import Servers
from tests.roles import CountingTrainer, Workers
from tests.roles_told import job
from tests.test_roles import in_thread
from tests.test_roles_failures import wait_for

if not _core.GRPC[0].isdigit():
    pytest.skip("built without gRPC", allow_module_level=True)

pytestmark = pytest.mark.timeout(120)


def send(sender: Sender, first: int, last: int) -> None:
    """Batch n has one sample, of id n."""
    for i in range(first, last):
        ids = persia.JaggedBatch(["user"], torch.tensor([i]))
        sender.send(persia.Batch(None, ids, torch.zeros(1)))


def is_replaced(sender: Sender) -> bool:
    """Whether another sender is to send what a load undid."""
    try:
        sender.skip(0)
    except RowsReplaced:
        return True
    return False


def has_begun_again(workers: Workers, times: int) -> bool:
    """Summed over the workers."""
    return workers.stats("restores") == times


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    """Two shards."""
    with contextlib.closing(Servers(2, checkpoints=str(tmp_path))) as both:
        yield both


@pytest.fixture
def workers(servers: Servers) -> Iterator[Workers]:
    """Two embedding workers."""
    with contextlib.closing(Workers(servers.addresses, 2)) as both:
        yield both


@pytest.fixture(params=[0, 2])
def trainer(
    request: pytest.FixtureRequest, servers: Servers, workers: Workers
) -> CountingTrainer:
    """It counts how often each sample was trained."""
    return CountingTrainer(servers, workers, staleness=request.param)


def test_a_new_loader_sends_what_was_undone(
    workers: Workers, trainer: CountingTrainer, tmp_path: Path
) -> None:
    """Also what workers had reported as trained."""
    with Sender(workers.addresses, name="job") as sender:
        send(sender, 0, 10)
        sender.flush(30)
        trainer.store.save(tmp_path / "out")
        send(sender, 10, 40)
        sender.flush(30)
        sender.close(ended=False)
    assert trainer.counts(40) == [1.0] * 40
    trainer.store.load(tmp_path / "out")
    assert trainer.counts(40) == [1.0] * 10 + [0.0] * 30
    with Sender(workers.addresses, name="job") as sender:
        send(sender, 0, 50)
        sender.flush(30)
        assert sender.stats()["passed"] == 10
    assert trainer.counts(50) == [1.0] * 50


def test_a_running_loader_reports_what_is_lost(
    workers: Workers, trainer: CountingTrainer, tmp_path: Path
) -> None:
    """It keeps no batch that was trained, and no other one can send it."""
    with Sender(workers.addresses) as sender:
        send(sender, 0, 10)
        sender.flush(30)
        trainer.store.save(tmp_path / "out")
        send(sender, 10, 40)
        sender.flush(30)
        assert sender.stats()["lost"] == 0
        trainer.store.load(tmp_path / "out")
        wait_for(lambda: sender.stats()["lost"] == 30)
        send(sender, 40, 50)
        sender.flush(30)
        assert sender.stats()["lost"] == 30
    assert trainer.counts(50) == [1.0] * 10 + [0.0] * 30 + [1.0] * 10


def test_what_a_load_undid_is_sent_again(
    workers: Workers, trainer: CountingTrainer, tmp_path: Path
) -> None:
    """The loader that has sent it says no more of it then."""
    with Sender(workers.addresses, name="job") as sender:
        assert sender.claim() == "own"
        send(sender, 0, 10)
        sender.flush(30)
        trainer.store.save(tmp_path / "out")
        send(sender, 10, 40)
        sender.flush(30)
        trainer.store.load(tmp_path / "out")
        wait_for(lambda: is_replaced(sender))
        for call in (
            lambda: send(sender, 40, 41),
            sender.flush,
            sender.end,
            sender.claim,
        ):
            with pytest.raises(RowsReplaced):
                call()
        assert sender.stats()["lost"] == 30
        sender.close(ended=False)
    with Sender(workers.addresses, name="job") as sender:
        wait_for(lambda: sender.claim() == "own")
        send(sender, 0, 50)
        sender.flush(30)
        assert sender.stats()["passed"] == 10
        sender.end()
    assert trainer.counts(50) == [1.0] * 50
    assert Sender(workers.addresses, name="job").claim() == "ended"


def test_a_loader_in_the_place_of_one_is_heard(
    servers: Servers, tmp_path: Path
) -> None:
    """Also in an epoch that the one before had ended."""
    n = 3
    with contextlib.closing(
        Workers(servers.addresses, 2, silence=3.0)
    ) as both:
        trainer = job.Trainer(servers, both)
        trainer.open()
        with Sender(both.addresses, name="job") as sender:
            assert sender.claim() == "own"
            job.send(sender, 0, n)
            sender.end()
            assert trainer.train(1) == 1
            sender.close(ended=False)
        one = in_thread(lambda: trainer.train(n - 1))
        with Sender(both.addresses, name="job") as sender:
            wait_for(lambda: sender.claim() == "own")
            job.send(sender, 0, n)
            sender.flush(10)
            with Sender(both.addresses, name="job") as third:
                assert third.claim() == "held"
        one()
        assert job.counts(servers, n) == [(1, 1)] * n


def test_what_was_passed_over_is_lost_by_a_load(
    servers: Servers, tmp_path: Path
) -> None:
    """Also behind a batch that no server has had."""
    with contextlib.closing(Workers(servers.addresses, 2)) as both:
        trainer = job.Trainer(servers, both)
        trainer.store.save(tmp_path / "out")
        with Sender(both.addresses, name="job") as sender:
            job.send(sender, 0, 6)
            (second,) = both.addresses[1:]
            one: Any = SimpleNamespace(addresses=[second])
            half = job.Trainer(servers, one)
            half.open()
            assert half.train(3) == 3  # 1, 3 and 5
            half.flush()
            half.close()
            sender.close(ended=False)
        with Sender(both.addresses, name="job") as sender:
            job.send(sender, 0, 6)
            assert sender.stats()["passed"] == 3
            trainer.store.load(tmp_path / "out")
            wait_for(lambda: is_replaced(sender))
            assert sender.stats()["lost"] == 3
            sender.close(ended=False)
        with Sender(both.addresses, name="job") as sender:
            job.send(sender, 0, 6)
            assert sender.stats()["passed"] == 0
            sender.end()
            assert trainer.epoch() == 6
            sender.flush(8)
        assert job.counts(servers, 6) == [(1, 1)] * 6


def test_a_part_is_free_after_a_load(
    workers: Workers, trainer: CountingTrainer, tmp_path: Path
) -> None:
    """Loaders of several parts do not wait for each other: any of them may
    send what a load undid."""
    with Sender(workers.addresses, name="job") as sender:
        assert sender.claim() == "own"
        send(sender, 0, 10)
        sender.flush(30)
        trainer.store.save(tmp_path / "out")
        send(sender, 10, 40)
        sender.end()
        sender.flush(30)
        trainer.store.load(tmp_path / "out")
        with Sender(workers.addresses, name="job") as other:
            wait_for(lambda: other.claim() == "own")
            send(other, 0, 40)
            other.flush(30)
        assert is_replaced(sender)
    assert trainer.counts(40) == [1.0] * 40


def test_each_batch_is_trained_once_or_lost(
    workers: Workers, trainer: CountingTrainer, tmp_path: Path
) -> None:
    """Whatever is in the queues, at ranks, or on its way."""
    with Sender(workers.addresses) as sender:
        send(sender, 0, 10)
        sender.flush(30)
        trainer.store.save(tmp_path / "out")
        trainer.most = 30
        send(sender, 10, 80)
        wait_for(lambda: trainer.batches == 30)
        trainer.store.load(tmp_path / "out")
        trainer.most = 1 << 62
        send(sender, 80, 100)
        sender.flush(30)
        lost = sender.stats()["lost"]
    counts = trainer.counts(100)
    assert set(counts) <= {0.0, 1.0}
    assert counts[:10] == [1.0] * 10
    assert counts[40:] == [1.0] * 60
    assert counts.count(0.0) == lost


def trained(workers: Workers, trainer: CountingTrainer, out: Path) -> None:
    """40 batches, the first 10 of them in a checkpoint."""
    with Sender(workers.addresses, name="job") as sender:
        send(sender, 0, 10)
        sender.flush(30)
        trainer.store.save(out)
        send(sender, 10, 40)
        sender.flush(30)
        sender.close(ended=False)


def test_training_continues_at_once(
    workers: Workers, trainer: CountingTrainer, tmp_path: Path
) -> None:
    """Before workers have asked which rows servers have."""
    for _ in range(4):
        with Sender(workers.addresses) as sender:
            send(sender, 0, 9)
            sender.flush(30)
            trainer.store.save(tmp_path / "out")
            send(sender, 9, 19)
            sender.flush(30)
            trainer.store.load(tmp_path / "out")
            send(sender, 100, 120)
            sender.flush(30)
        assert trainer.counts(120)[100:] == [1.0] * 20
        trainer.store.erase("t", list(range(120)))


def test_a_loader_that_has_not_begun_goes_back(
    workers: Workers, trainer: CountingTrainer, tmp_path: Path
) -> None:
    """It knew at its start what was trained then."""
    trained(workers, trainer, tmp_path / "out")
    with Sender(workers.addresses, name="job") as sender:
        assert sender.position == 40
        for _ in range(2):
            trainer.store.load(tmp_path / "out")
            wait_for(lambda: sender.position == 10)
        assert sender.stats()["lost"] == 0
        send(sender, 0, 50)
        sender.flush(30)
        assert sender.stats()["passed"] == 10
    assert trainer.counts(50) == [1.0] * 50


def test_what_was_passed_over_is_sent_again(
    workers: Workers, trainer: CountingTrainer, tmp_path: Path
) -> None:
    """Also if it was another loader's; loaded twice it is lost once."""
    trained(workers, trainer, tmp_path / "out")
    with Sender(workers.addresses, name="job") as sender:
        sender.skip(40)
        sender.skip(45)  # there are no batches
        send(sender, 45, 50)
        sender.flush(30)
        for want in 2, 4:
            trainer.store.load(tmp_path / "out")
            wait_for(partial(has_begun_again, workers, want))
            wait_for(lambda: is_replaced(sender))
            assert sender.stats()["lost"] == 35
        sender.close(ended=False)
    with Sender(workers.addresses, name="job") as sender:
        send(sender, 0, 60)
        sender.flush(30)
        assert sender.stats()["passed"] == 10
    assert trainer.counts(60) == [1.0] * 60


def test_a_loader_keeps_its_part(
    workers: Workers, trainer: CountingTrainer, tmp_path: Path
) -> None:
    """Others have to wait until it can have said that it has it."""
    with (
        Sender(workers.addresses, name="job") as sender,
        Sender(workers.addresses, name="job") as other,
    ):
        assert sender.claim() == "own"
        send(sender, 0, 10)
        sender.flush(30)
        trainer.store.save(tmp_path / "out")
        for want in 2, 4, 6:
            trainer.store.load(tmp_path / "out")
            wait_for(partial(has_begun_again, workers, want))
            assert other.claim() == "held"
        send(sender, 10, 20)
        sender.flush(30)
        assert other.claim() == "held"
    assert trainer.counts(20) == [1.0] * 20


def test_workers_begin_again_once(
    workers: Workers, trainer: CountingTrainer, tmp_path: Path
) -> None:
    with Sender(workers.addresses) as sender:
        send(sender, 0, 10)
        sender.flush(30)
        trainer.store.save(tmp_path / "out")
        assert workers.stats("restores") == 0
        for want in 2, 4:
            trainer.store.load(tmp_path / "out")
            wait_for(partial(has_begun_again, workers, want))
        send(sender, 10, 20)
        sender.flush(30)
    assert trainer.counts(20) == [1.0] * 20
    assert workers.stats("restores") == 4


class Part:
    """A data set: of ids from first to last - 1, a batch each."""

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last = first, last
        self.epoch = 0

    def __iter__(self) -> Iterator[persia.Batch]:
        for i in range(self.first, self.last):
            ids = persia.JaggedBatch(["user"], torch.tensor([i]))
            yield persia.Batch(None, ids, torch.zeros(1))


def test_a_part_that_had_ended_is_sent_again(
    servers: Servers, tmp_path: Path
) -> None:
    """A load undid batches of a part that was closed, and none of the one
    that is open."""
    n = 6
    parts: Any = {"0/2": Part(0, n), "1/2": Part(n, 2 * n)}
    loader = Loader(epochs=1)
    with contextlib.closing(Workers(servers.addresses, loaders=2)) as one:
        trainer = CountingTrainer(servers, one, staleness=0)
        trainer.most = n - 2
        fed = in_thread(
            lambda: loader.send_parts(
                parts, lambda name: Sender(one.addresses, name=name)
            )
        )
        wait_for(lambda: trainer.batches == n - 2)
        trainer.store.save(tmp_path / "out")
        trainer.most = n
        wait_for(lambda: loader.counts()["streams"] == 1)  # one was closed
        trainer.store.load(tmp_path / "out")
        trainer.most = 1 << 62
        fed()
        assert trainer.counts(2 * n) == [1.0] * 2 * n


def test_a_part_that_waits_for_one_that_is_sent_again(
    servers: Servers, tmp_path: Path
) -> None:
    """A load undid batches of the second part alone.  The first one waits in
    the next epoch, which begins when the second has ended this one."""
    n = 5
    parts: Any = {"0/2": Part(0, n), "1/2": Part(n, 2 * n)}
    loader = Loader(epochs=2)
    with contextlib.closing(Workers(servers.addresses, loaders=2)) as one:
        trainer = CountingTrainer(servers, one, staleness=0)
        trainer.most = n
        fed = in_thread(
            lambda: loader.send_parts(
                parts, lambda name: Sender(one.addresses, name=name)
            )
        )
        wait_for(lambda: trainer.batches == n)
        trainer.store.save(tmp_path / "out")
        trainer.most = 2 * n - 2
        wait_for(lambda: loader.counts()["done"] == 2 * n - 2)
        trainer.store.load(tmp_path / "out")
        trainer.most = 1 << 62
        fed()
        assert trainer.counts(2 * n) == [2.0] * 2 * n


class Held:
    """A sender whose part another loader has, at the first claims."""

    def __init__(self, name: str, held: dict[str, int], sent: list[Any]):
        self.name, self.held, self.to = name, held, sent
        self.lineage = 1
        self.position = self.epochs = 0

    def claim(self, epochs: int) -> str:
        self.held[self.name] -= 1
        return "held" if self.held[self.name] >= 0 else "own"

    def skip(self, number: int) -> None:
        pass

    def send(self, batch: persia.Batch) -> None:
        self.position += 1

    def end(self) -> None:
        self.epochs += 1
        self.to.append((self.epochs, self.name))

    def flush(self, timeout: float | None) -> None:
        pass

    def stats(self) -> dict[str, int]:
        return {"failed": 0}

    def close(self, ended: bool = True) -> None:
        pass


def test_parts_that_were_held_are_sent_epoch_by_epoch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Workers have no room for all epochs of one part, and no epoch is
    trained without the others. They may not know at first who has a part."""
    monkeypatch.setattr(feeding, "_ASK", 0.01)
    held = {"0/3": 4, "1/3": 4, "2/3": 9}
    parts: Any = {name: Part(0, 2) for name in held}
    sent: list[Any] = []
    make: Any = lambda name: Held(name, held, sent)  # noqa: E731
    Loader(epochs=5).send_parts(parts, make)
    assert len(sent) == 15
    epochs = [epoch for epoch, _ in sent]
    assert epochs == sorted(epochs)


def test_parts_that_another_loader_keeps_are_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(feeding, "_ASK", 0.01)
    monkeypatch.setattr(feeding, "_UNSURE", 0.1)
    held = {"0/2": 0, "1/2": 100}
    parts: Any = {name: Part(0, 2) for name in held}
    sent: list[Any] = []
    make: Any = lambda name: Held(name, held, sent)  # noqa: E731
    Loader(epochs=3).send_parts(parts, make)
    assert [name for _, name in sent] == 3 * ["0/2"] + 3 * ["1/2"]
