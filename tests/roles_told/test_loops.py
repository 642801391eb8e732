"""A loop that is left before its end: the next one has the rest of the epoch,
all of it, before the epoch ends. And the end of a pass for ranks that find no
batch."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import pytest

import persia
from persia import _core
from persia.data import Sender
from tests.remote import Servers
from tests.roles import Workers
from tests.roles_told.job import (
    Trainer,
    batch,
    cluster,
    counts,
    fed,
    missing,
    number_of,
    send,
)
from tests.test_roles import in_thread
from tests.test_roles_failures import wait_for

if not _core.GRPC[0].isdigit():
    pytest.skip("built without gRPC", allow_module_level=True)

pytestmark = pytest.mark.timeout(60)

EPOCHS, BATCHES = 30, 7


class Stop(Exception):
    """Of a loop's body."""


def loop(trainer: Trainer, staleness: int) -> Any:
    """Over the rest of the epoch."""
    return persia.DataLoader(trainer.stream, trainer.model, staleness)


def broken(trainer: Trainer, staleness: int, most: int) -> list[int] | None:
    """A loop that breaks; None: it was at its end."""
    seen = []
    for one in loop(trainer, staleness):
        trainer.step(one)
        seen.append(number_of(one))
        if len(seen) == most:
            return seen
    return seen if seen else None


def raised(trainer: Trainer, staleness: int, most: int) -> list[int] | None:
    """One whose body raises."""
    seen = []
    try:
        for one in loop(trainer, staleness):
            trainer.step(one)
            seen.append(number_of(one))
            if len(seen) == most:
                raise Stop
    except Stop:
        pass
    return seen if seen else None


def in_hand(trainer: Trainer, staleness: int, most: int) -> list[int] | None:
    """One that breaks with a batch that it does not train."""
    seen = []
    for one in loop(trainer, staleness):
        if len(seen) == most:
            one.skip()
            seen.append(number_of(one))
            return seen
        trainer.step(one)
        seen.append(number_of(one))
    return seen if seen else None


@pytest.mark.parametrize("leave", [broken, raised, in_hand])
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("staleness", [0, 8])
def test_the_rest_of_an_epoch(
    staleness: int,
    workers: int,
    leave: Callable[[Trainer, int, int], list[int] | None],
) -> None:
    """Each epoch ends with all of its batches, however often it is left, and
    the loader's flush() ends."""
    with cluster(workers) as (servers, some):
        trainer = Trainer(servers, some)
        with Sender(some.addresses, timeout=8) as sender:

            def feed() -> None:
                for epoch in range(EPOCHS):
                    send(sender, epoch * BATCHES, (epoch + 1) * BATCHES)
                    sender.end()

            join = in_thread(feed)
            for epoch in range(EPOCHS):
                seen: list[int] = []
                while not trainer_is_through(trainer, epoch):
                    seen += leave(trainer, staleness, 1 + epoch % 6) or []
                want = range(epoch * BATCHES, (epoch + 1) * BATCHES)
                assert sorted(seen) == list(want)
            join()
            sender.flush(8)
        trainer.flush()
        if leave is not in_hand:
            assert missing(counts(servers, EPOCHS * BATCHES)) == 0


@pytest.mark.parametrize("workers", [1, 2])
def test_the_last_batch_of_an_epoch_that_was_not_trained(workers: int) -> None:
    """A body that raises before it trains it: the next loop has that batch
    alone, though the rank knew that all were given to it."""
    with cluster(workers) as (servers, some):
        trainer = Trainer(servers, some)
        with Sender(some.addresses, timeout=8) as sender:
            for epoch in range(6):
                send(sender, 3 * epoch, 3 * epoch + 3)
                sender.end()
                for n, one in enumerate(loop(trainer, 8)):
                    if n == 2:
                        time.sleep(0.3)  # the look-ahead hears of the end
                        break
                    trainer.step(one)
                del one
                trainer.epoch(8)
            sender.flush(8)
        trainer.flush()
        assert counts(servers, 18) == [(1, 1)] * 18


def trainer_is_through(trainer: Trainer, epoch: int) -> bool:
    """Whether it has heard the end of this epoch, from 0."""
    return bool(trainer.stream.stats()["epochs"] > epoch)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("staleness", [0, 8])
def test_a_loop_that_a_loss_ends(staleness: int, workers: int) -> None:
    """UpdatesLost in the middle of an epoch: the loop that follows has the
    rest; nothing is trained twice but what the server lost."""
    with cluster(workers) as (servers, some):
        trainer = Trainer(servers, some)
        with Sender(some.addresses, timeout=8) as sender:
            for epoch in range(4):
                first = epoch * BATCHES
                send(sender, first, first + BATCHES)
                sender.end()
                trainer.open(staleness)
                assert trainer.train(3) == 3
                trainer.store.flush()
                servers.kill(epoch % 2)
                servers.restart(epoch % 2)
                assert trainer.train() == BATCHES - 3
                trainer.flush()
                want = range(first + BATCHES)
                assert sorted(trainer.seen) == list(want)
            sender.flush(8)
        assert trainer.told


# ---- ranks that find no batch ----------------------------------------------


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("later", [False, True], ids=["held", "trained"])
def test_a_rank_that_begins_when_another_holds_the_rest(
    later: bool, workers: int
) -> None:
    """Its pass has no batch, and ends: before or when the other one's are
    trained."""
    with cluster(workers) as (servers, some):
        first = Trainer(servers, some, job="two", rank=0, world_size=2)
        with Sender(some.addresses, timeout=8) as sender:
            send(sender, 0, 3)
            sender.end()
            first.open(staleness=8)
            held = [first.next() for _ in range(3)]
            second = Trainer(servers, some, job="two", rank=1, world_size=2)
            ended: list[int] = []
            join = in_thread(lambda: ended.append(second.epoch(8)))
            if not later:
                wait_for(lambda: ended, 8)
            for one in held:
                assert one is not None
                first.step(one)
            del one, held
            assert first.train() == 0
            first.flush()
            wait_for(lambda: ended, 8)
            join()
            sender.flush(8)
        assert ended == [0]
        assert missing(counts(servers, 3)) == 0


def test_both_ranks_start_again_at_the_end() -> None:
    """With three batches left: one may get them all, and both passes end."""
    with cluster() as (servers, some):
        with Sender(some.addresses, timeout=8) as sender:
            send(sender, 0, 9)
            sender.end()
            ranks = pair(servers, some)
            for rank in ranks:
                rank.open(staleness=2)
                assert rank.train(3) == 3
                rank.flush()
            ranks = pair(servers, some)
            ended: list[int] = []
            joins = [
                in_thread(lambda rank=rank: ended.append(rank.epoch(8)))  # type: ignore[misc]
                for rank in ranks
            ]
            wait_for(lambda: len(ended) == 2, 10)
            for join in joins:
                join()
            sender.flush(8)
        assert sum(ended) == 3
        assert missing(counts(servers, 9)) == 0


def test_a_rank_between_passes_holds_nothing_up() -> None:
    """A worker was started again: its batches are sent to it once more. A
    rank that takes none says that it holds none of them."""
    with cluster(2) as (servers, some):
        with Sender(some.addresses, timeout=8) as sender:
            send(sender, 0, 8)
            sender.end()
            ranks = pair(servers, some)
            joins = [
                in_thread(lambda rank=rank: rank.epoch(2)) for rank in ranks
            ]  # type: ignore[misc]
            for join in joins:
                join()
            send(sender, 8, 14)
            some.restart(1)
            sender.end()
            assert ranks[0].epoch(2) == 6
            sender.flush(8)
        assert missing(counts(servers, 14)) == 0


def pair(servers: Servers, some: Workers) -> list[Trainer]:
    """Two ranks."""
    return [
        Trainer(servers, some, job="two", rank=rank, world_size=2)
        for rank in range(2)
    ]


# ---- what a loss means for the batch in hand -------------------------------


def test_a_loss_in_forward_and_backward() -> None:
    """Of the forward: the batch is not trained yet, and the same call does it
    now. Of the backward: it is trained."""
    with contextlib.closing(Servers(2)) as servers:
        trainer = Trainer(servers, None)
        for n in range(4):
            trainer.step(batch(n))
        trainer.flush()
        servers.kill(0)
        servers.restart(0)
        one = batch(4)
        with pytest.raises(persia.errors.UpdatesLost):
            trainer.forward(one)
        trainer.forward(one).backward()
        trainer.flush()
        loss = trainer.forward(batch(5))
        servers.kill(1)
        servers.restart(1)
        with trainer.telling():
            loss.backward()
        trainer.flush()
        assert trainer.told
        assert counts(servers, 6)[4:] == [(1, 0), (1, 1)]


class Backwards(Workers):
    """The same workers, in the other order."""

    def __init__(self, of: Workers) -> None:
        self.addresses = of.addresses[::-1]


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_rank_that_asks_first_where_nothing_is_left(staleness: int) -> None:
    """A worker that has none of an epoch's last batches has told a rank of
    that; the rank's next process asks this worker before the others, and
    takes part in that epoch all the same."""
    with cluster(2) as (servers, some):
        with fed(some, 5) as sender:  # the second worker has 2 and 4
            first = Trainer(servers, some)
            first.open(staleness)
            assert first.train(4) == 4
            time.sleep(0.3)  # the look-ahead asks both for more
            first.close()
            second = Trainer(servers, Backwards(some))
            assert second.epoch(staleness) == 1
            sender.flush(8)
            assert second.stream.stats()["epochs"] == 1
        assert counts(servers, 5) == [(1, 1)] * 5


@pytest.mark.parametrize("staleness", [0, 2])
def test_an_error_at_the_end_of_a_pass(
    staleness: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop has not heard the end: it begins again, and hears it."""
    with cluster() as (servers, some):
        trainer = Trainer(servers, some)
        prefetch_next = _core.prefetch_next

        def fails(*args: Any) -> None:
            if len(trainer.seen) == BATCHES and not trainer.told:
                time.sleep(0.3)  # the look-ahead is at the end
                raise persia.errors.UpdatesLost("of earlier batches")
            prefetch_next(*args)

        monkeypatch.setattr(_core, "prefetch_next", fails)
        with fed(some, BATCHES):
            assert trainer.epoch(staleness) == BATCHES
            assert len(trainer.told) == 1
            assert trainer.stream.stats()["epochs"] == 1
