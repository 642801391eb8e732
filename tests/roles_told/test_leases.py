"""A rank holds a batch for longer than its lease: the batch is trained once,
whatever travels, and the rank does not get it a second time."""

from __future__ import annotations

import time

import pytest

from persia import _core
from persia.data import Sender
from tests.roles_told.job import (
    Trainer,
    cluster,
    counts,
    missing,
    send,
)
from tests.test_roles import in_thread

if not _core.GRPC[0].isdigit():
    pytest.skip("built without gRPC", allow_module_level=True)

pytestmark = pytest.mark.timeout(60)

LEASE = 0.4


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("rows", [False, True], ids=["bags", "rows"])
def test_late_gradients(rows: bool, staleness: int, workers: int) -> None:
    """Of pooled values and of rows."""
    with cluster(workers, lease=LEASE) as (servers, some):
        trainer = Trainer(servers, some, rows=rows)
        with Sender(some.addresses, timeout=8) as sender:
            send(sender, 0, 6)
            sender.end()
            trainer.open(staleness)
            assert trainer.train(2) == 2
            one = trainer.next()
            assert one is not None
            time.sleep(3 * LEASE)
            trainer.step(one)
            del one
            assert trainer.train() == 3
            sender.flush(8)
            assert sender.stats()["done"] == 6
        trainer.flush()
        assert sorted(trainer.seen) == list(range(6))
        assert missing(counts(servers, 6)) == 0
        assert some.stats("failed") == some.stats("given_up") == 0


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("rows", [False, True], ids=["bags", "rows"])
@pytest.mark.parametrize("staleness", [2, 8])
def test_a_lease_ends_while_a_step_is_collected(
    staleness: int, rows: bool, workers: int
) -> None:
    """An update of three batches, whose last one arrives late: the rank gets
    each of them once, and the update has them all."""
    with cluster(workers, lease=LEASE) as (servers, some):
        trainer = Trainer(servers, some, rows=rows, update="step")
        with Sender(some.addresses, timeout=8) as sender:

            def feed() -> None:
                for first in (0, 3):
                    send(sender, first, first + 2)
                    time.sleep(6 * LEASE)
                    send(sender, first + 2, first + 3)
                sender.end()

            join = in_thread(feed)
            trainer.open(staleness)
            for n in range(6):
                assert trainer.train(1) == 1
                if n % 3 == 2:
                    trainer.store.optimizer.step()
            assert trainer.train() == 0
            join()
            sender.flush(8)
        trainer.flush()
        assert sorted(trainer.seen) == list(range(6))
        assert missing(counts(servers, 6)) == 0
        assert trainer.store.updates == 2
        assert some.stats("queued") == some.stats("leased") == 0


@pytest.mark.parametrize("workers", [1, 2])
def test_a_batch_in_hand_is_not_had_again(workers: int) -> None:
    """Others of the rank's Takes wait meanwhile."""
    with cluster(workers, lease=LEASE) as (servers, some):
        trainer = Trainer(servers, some)
        with Sender(some.addresses, timeout=8) as sender:
            send(sender, 0, 3)
            trainer.open(staleness=8)
            held = [trainer.next() for _ in range(3)]
            time.sleep(6 * LEASE)  # more than four leases
            for one in held:
                assert one is not None
                trainer.step(one)
            del one, held
            send(sender, 3, 6)
            sender.end()
            assert trainer.train() == 3
            sender.flush(8)
        trainer.flush()
        assert sorted(trainer.seen) == list(range(6))
        assert missing(counts(servers, 6)) == 0


def test_another_has_trained_a_batch_of_an_update() -> None:
    """After its lease, and its worker was started again since: the others of
    the update do not wait for it."""
    with cluster(2, lease=3.0) as (servers, some):
        one, other = (
            Trainer(servers, some, update="step", rank=i, world_size=2)
            for i in range(2)
        )
        with Sender(some.addresses, timeout=8) as sender:
            send(sender, 0, 2)
            one.open(4)
            assert one.train(2) == 2
            some.restart(1)
            other.open(4)
            assert other.train(1) == 1
            other.store.optimizer.step()
            other.flush()
            sender.close(ended=False)
        some.restart(1)
        one.store.optimizer.step()
        one.flush()
        assert missing(counts(servers, 2)) == 0
        one.close()
        other.close()
