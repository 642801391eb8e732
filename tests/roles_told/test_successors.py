"""A second process of a rank has its place: the first one, which still runs,
does not take it back."""

from __future__ import annotations

import contextlib

import pytest

from persia import _core, errors
from persia.data import Sender
from tests.remote import Servers
from tests.roles import Workers
from tests.roles_told.gate import Gate
from tests.roles_told.job import Trainer, cluster, counts, missing, send
from tests.test_roles import in_thread
from tests.test_roles_failures import wait_for

if not _core.GRPC[0].isdigit():
    pytest.skip("built without gRPC", allow_module_level=True)

pytestmark = pytest.mark.timeout(60)

BATCHES = 6


def train(servers: Servers, sender: Sender, second: Trainer) -> None:
    """All batches are those of the second."""
    send(sender, 0, BATCHES)
    sender.end()
    assert second.train() == BATCHES
    sender.flush(8)
    second.flush()
    assert missing(counts(servers, BATCHES)) == 0


def test_one_that_waits_for_a_batch() -> None:
    with cluster() as (servers, workers):
        first, second = Trainer(servers, workers), Trainer(servers, workers)
        with Sender(workers.addresses, timeout=8) as sender:
            first.open()

            def wait() -> None:
                with pytest.raises(errors.Closed):
                    first.next()

            join = in_thread(wait)
            wait_for(lambda: workers.stats("starved_ns") > 0, 8)
            second.open()
            join()
            train(servers, sender, second)


def test_one_whose_connection_breaks() -> None:
    """It says Hello again."""
    with cluster() as (servers, workers):
        gate = Gate(workers.addresses[0])
        through = Workers(servers.addresses, 0)
        through.addresses.append(gate.address)
        first, second = Trainer(servers, through), Trainer(servers, workers)
        with (
            contextlib.closing(gate),
            Sender(workers.addresses, timeout=8) as sender,
        ):
            first.open()
            gate.shut()
            second.open()
            gate.drop()
            gate.open()
            with pytest.raises(errors.Closed):
                first.next()
            train(servers, sender, second)
