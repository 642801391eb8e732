"""Several workers push in the stream of one loader, and know different things
of servers that begin again or load a checkpoint."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from persia import _core
from persia.data import Sender
from tests.remote import Servers
from tests.roles import Workers
from tests.roles_told.gate import Gate
from tests.roles_told.job import Trainer, counts, missing, send
from tests.test_roles import in_thread
from tests.test_roles_failures import wait_for

if not _core.GRPC[0].isdigit():
    pytest.skip("built without gRPC", allow_module_level=True)

pytestmark = pytest.mark.timeout(60)

FIRST, REST = 24, 12


class Both:
    """Workers of which the last one speaks through gates with the servers."""

    def __init__(self, servers: Servers, n: int) -> None:
        self.gates = [Gate(address) for address in servers.addresses]
        self.direct = Workers(servers.addresses, n - 1)
        self.gated = Workers([gate.address for gate in self.gates])

    @property
    def addresses(self) -> list[str]:
        return self.direct.addresses + self.gated.addresses

    def stats(self, name: str) -> int:
        return self.direct.stats(name) + self.gated.stats(name)

    def shut(self) -> None:
        for gate in self.gates:
            gate.shut()

    def open(self) -> None:
        for gate in self.gates:
            gate.open()

    def close(self) -> None:
        for gate in self.gates:
            gate.close()
        self.direct.close()
        self.gated.close()


@contextlib.contextmanager
def job(
    n: int, tmp_path: Path | None = None
) -> Iterator[tuple[Servers, Both]]:
    """Two servers and n workers."""
    folder = None if tmp_path is None else str(tmp_path)
    with (
        contextlib.closing(Servers(2, checkpoints=folder)) as servers,
        contextlib.closing(Both(servers, n)) as both,
    ):
        yield servers, both


@pytest.mark.parametrize("name", [None, "a"])
@pytest.mark.parametrize("shards", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_worker_that_is_late_and_an_empty_server(
    workers: int, shards: tuple[int, ...], name: str | None
) -> None:
    """Servers begin again without rows.  Others have pushed there before the
    last worker greets them."""
    with job(workers) as (servers, both):
        trainer = Trainer(servers, both, lost="continue")  # type: ignore[arg-type]
        with Sender(both.addresses, name=name, timeout=8) as sender:
            send(sender, 0, FIRST)
            trainer.open()
            assert trainer.train(FIRST) == FIRST
            sender.flush(8)
            trainer.flush()
            both.shut()
            for shard in shards:
                servers.kill(shard)
                servers.restart(shard)
            send(sender, FIRST, FIRST + REST)
            sender.end()
            before = both.stats("trained")
            rest: list[int] = []
            join = in_thread(lambda: rest.append(trainer.train()))
            if workers > 1:
                wait_for(lambda: both.stats("trained") > before, 8)
            both.open()
            join()
            sender.flush(8)
        trainer.flush()
        gone = missing(counts(servers, FIRST + REST))
        assert rest == [REST]
        assert gone == FIRST * len(shards)
        assert both.stats("failed") == both.stats("given_up") == 0


@pytest.mark.parametrize("shards", [(0,), (1,)])
@pytest.mark.parametrize("same", [False, True], ids=["late", "not-late"])
def test_a_worker_that_is_late_keeps_a_restore(
    same: bool, shards: tuple[int, ...], tmp_path: Path
) -> None:
    """A server begins again, then a checkpoint is loaded into both.  A worker
    that has seen neither must not take that back."""
    with job(2, tmp_path) as (servers, both):
        trainer = Trainer(servers, both, lost="continue")  # type: ignore[arg-type]
        with Sender(both.addresses, name="a", timeout=8) as sender:
            send(sender, 0, FIRST)
            trainer.open()
            assert trainer.train(FIRST) == FIRST
            sender.flush(8)
            trainer.store.save(tmp_path / "out")
            trainer.close()
            if not same:
                both.shut()
            for shard in shards:
                servers.kill(shard)
                servers.restart(shard)
            trainer.store.load(tmp_path / "out")
            both.open()
            wait_for(lambda: both.gated.stats("restores") >= 1, 8)
            send(sender, FIRST, FIRST + REST)
            sender.end()
            trainer.open()
            assert trainer.train() == REST
            sender.flush(8)
        trainer.flush()
        assert len({restore_of(servers, shard) for shard in (0, 1)}) == 1
        assert missing(counts(servers, FIRST + REST)) == 0
        other = Trainer(servers, None)
        assert other.store.rows("t", [0]).shape == (1, 4)


def restore_of(servers: Servers, shard: int) -> int:
    """The restore that the rows of a server stem from."""
    way = servers.shards[shard].channel(5.0)
    try:
        found: int = way.hello(servers.namespace, 0)["restore"]
        return found
    finally:
        way.close()


def test_a_part_that_only_a_killed_server_had() -> None:
    """An update of two batches is at all servers; one worker knows that, and
    the other does not when a server is started again without rows.  That one
    sends its part there once more, and must not wait for the other."""
    with job(2) as (servers, both):
        trainer = Trainer(servers, both, update="step")
        with (
            Sender(both.direct.addresses, timeout=8) as knows,
            Sender(both.gated.addresses, timeout=8) as waits,
        ):
            send(knows, 0, 1)
            send(waits, 1, 2)
            trainer.open()
            assert trainer.train(2) == 2
            both.gates[0].lose_replies()
            trainer.store.optimizer.step()
            wait_for(lambda: both.direct.stats("trained") == 1)
            servers.kill(0)
            servers.restart(0)
            both.open()
            trainer.flush()
            waits.flush(8)
        trainer.flush()
        found = counts(servers, 2)
        assert (found[0][1], *found[1]) == (1, 1, 1)
        assert missing(found) == trainer.lost == 1
        assert trainer.told
