"""Ranks that train in step die in the middle of one: each batch is trained
once, and nothing is given up in silence."""

from __future__ import annotations

import pytest

from persia import _core
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
            sender.flush(20)
            assert sender.stats()["done"] == BATCHES
        assert missing(counts(servers, BATCHES)) == 0
        assert some.stats("failed") == some.stats("given_up") == 0


@pytest.mark.parametrize("workers", [1, 2])
def test_ranks_are_killed_in_step_after_step(workers: int) -> None:
    """More often than a batch is offered."""
    with cluster(workers) as (servers, some):
        with fed(some, BATCHES) as sender:
            ranks = Ranks(servers, some)
            for _ in range(6):
                ranks.step(0, 1)
                wait_for(lambda: some.stats("returning") == 1)
                ranks.kill()
                ranks.start()
            ranks.end()
            sender.flush(20)
        assert missing(counts(servers, BATCHES)) == 0
        assert some.stats("failed") == some.stats("given_up") == 0
