"""Ranks that train in step die in the middle of one: each batch is trained
once, and nothing is given up in silence."""

from __future__ import annotations

import pytest

from persia import _core
from tests.remote import Servers
from tests.roles_told.job import cluster, counts, fed, missing
from tests.roles_told.ranks import Ranks, threads_are_ranks
from tests.test_roles_failures import wait_for

__all__ = ["threads_are_ranks"]

if not _core.GRPC[0].isdigit():
    pytest.skip("built without gRPC", allow_module_level=True)

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.usefixtures("threads_are_ranks"),
]

BATCHES = 24


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("shape", ["0", "1", "none", "both"])
def test_ranks_in_a_step_are_killed(workers: int, shape: str) -> None:
    """One has returned the gradients of its batch, the other has not; or both
    or none of them have. All are killed and started again, as torchrun does
    it."""
    more = {"0": (1, 0), "1": (0, 1), "none": (0, 0), "both": (1, 1)}[shape]
    with cluster(workers) as (servers, some):
        with fed(some, BATCHES) as sender:
            ranks = Ranks(servers, some)
            ranks.step(5, 5)
            wait_for(lambda: sum(some.stats(n) for n in ("trained",)) == 10)
            ranks.step(5 + more[0], 5 + more[1])
            if more in ((1, 0), (0, 1)):
                wait_for(lambda: some.stats("returning") == 1)
            ranks.kill()
            ranks.start()
            ranks.end()
            sender.flush(8)
            assert sender.stats()["done"] == BATCHES
        assert missing(counts(servers, BATCHES)) == 0
        assert some.stats("failed") == some.stats("given_up") == 0


def test_a_batch_is_sent_again_where_the_epoch_had_ended() -> None:
    """A rank looks there once more: another worker, which has not ended, has
    none that is its turn."""
    with cluster(3) as (servers, some):
        with fed(some, 8, move_after=2.0) as sender:
            ranks = Ranks(servers, some)
            ranks.step(1, 1)
            wait_for(lambda: some.stats("trained") == 2)
            some.workers.pop(1).close()  # it has the fifth, which is next
            ranks.end()
            sender.flush(8)
        assert missing(counts(servers, 8)) == 0
        assert some.stats("failed") == some.stats("given_up") == 0


@pytest.mark.long  # threads stand for processes: late ones fail it at times
@pytest.mark.parametrize("workers", [1, 2])
def test_ranks_are_killed_in_step_after_step(workers: int) -> None:
    """Less often than a batch is offered."""
    with cluster(workers) as (servers, some):
        with fed(some, BATCHES) as sender:
            ranks = Ranks(servers, some)
            for _ in range(3):
                ranks.step(0, 1)
                wait_for(lambda: some.stats("returning") == 1)
                ranks.kill()
                ranks.start()
            ranks.end()
            sender.flush(8)
        assert missing(counts(servers, BATCHES)) == 0
        assert some.stats("failed") == some.stats("given_up") == 0


@pytest.mark.long  # the same
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("kills", [True, False], ids=["ranks-too", "alone"])
def test_a_server_starts_again_within_a_step(
    workers: int, kills: bool
) -> None:
    """One server has applied the step, the other was away, and returns
    without rows.  The step is completed; what the ranks, or the loader, knew
    to be trained is counted."""
    with cluster(workers) as (servers, some):
        with fed(some, BATCHES) as sender:
            ranks = Ranks(servers, some, lost="continue")
            ranks.step(5, 5)
            wait_for(lambda: sender.stats()["done"] == 10)
            servers.kill(1)
            ranks.step(6, 6)
            wait_for(lambda: step_of(servers, 0) == 6)
            if kills:
                ranks.kill()
                ranks.start()
            servers.restart(1)
            ranks.end()
            sender.flush(8)
            gone = missing(counts(servers, BATCHES))
            wait_for(lambda: sender.stats()["lost"] == gone)
        assert gone == 10
        if not kills:
            assert sum(one.trainer.lost for one in ranks.now) == gone
        assert some.stats("failed") == some.stats("given_up") == 0


def step_of(servers: Servers, shard: int) -> int:
    """The last one that this server has applied."""
    way = servers.shards[shard].channel(5.0)
    try:
        step: int = way.stats()["step"]
        return step
    finally:
        way.close()
