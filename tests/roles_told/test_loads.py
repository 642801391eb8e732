"""A checkpoint is loaded, and servers are started again before workers have
seen it: the store that loaded knows which restore is the last one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import persia
from persia import _core
from persia.data import Sender
from tests.roles_told.job import Trainer, batch, counts, missing, send
from tests.roles_told.kept import NAME, Kept
from tests.roles_told.test_streams_of_several import Both
from tests.test_roles_failures import wait_for

if not _core.GRPC[0].isdigit():
    pytest.skip("built without gRPC", allow_module_level=True)

pytestmark = pytest.mark.timeout(90)

FIRST, REST = 24, 12


def restores(servers: Kept) -> list[int]:
    """That the rows of each server stem from."""
    found = []
    for shard in servers.shards:
        assert shard is not None
        found.append(int(shard.hello()["restore"]))
    return found


class Again:
    """Ways in which a server is started again."""

    @staticmethod
    def stopped(servers: Kept, shard: int) -> None:
        """With what it saved on exit."""
        servers.stop(shard)
        servers.start(shard)

    @staticmethod
    def killed(servers: Kept, shard: int) -> None:
        """With the job's checkpoint."""
        servers.kill(shard)
        servers.start(shard)


@contextlib.contextmanager
def job(
    folder: Path, workers: int
) -> Iterator[tuple[Kept, Both, Trainer, Sender]]:
    """Two servers and workers, the last of them behind gates; a checkpoint of
    the first batches, which no rank has any more."""
    with (
        contextlib.closing(Kept(2, folder)) as servers,
        contextlib.closing(Both(servers, workers)) as both,  # type: ignore[arg-type]
        Sender(both.addresses, name="a", timeout=20) as sender,
    ):
        trainer = Trainer(servers, both, timeout=20)  # type: ignore[arg-type]
        send(sender, 0, FIRST)
        trainer.open()
        assert trainer.train(FIRST) == FIRST
        sender.flush(8)
        trainer.store.save(folder / NAME)
        trainer.close()
        yield servers, both, trainer, sender


def finish(servers: Kept, trainer: Trainer, sender: Sender) -> None:
    """What is sent now is trained once, and nothing is lost of what the
    checkpoint has.  A batch that a worker gave before it saw the load is given
    again."""
    send(sender, FIRST, FIRST + REST)
    sender.end()
    trainer.open()
    assert trainer.train() >= REST
    sender.flush(8)
    trainer.flush()
    assert trainer.told == []
    assert trainer.lost == 0
    assert missing(counts(servers, FIRST + REST)) == 0  # type: ignore[arg-type]
    first, second = restores(servers)
    assert first == second != 0


@pytest.mark.parametrize(
    "shards", [(0,), (1,), (0, 1)], ids=["0", "1", "both"]
)
@pytest.mark.parametrize("again", [Again.stopped, Again.killed])
@pytest.mark.parametrize(
    ("workers", "loads"), [(1, 1), (2, 2)], ids=["one", "two"]
)
def test_servers_start_again_after_a_load(
    tmp_path: Path,
    shards: tuple[int, ...],
    again: Callable[[Kept, int], None],
    workers: int,
    loads: int,
) -> None:
    """A worker sees only what is there then."""
    with job(tmp_path, workers) as (servers, both, trainer, sender):
        both.shut()
        for _ in range(loads):
            trainer.store.load(tmp_path / NAME)
            for shard in shards:
                again(servers, shard)
        both.open()
        finish(servers, trainer, sender)


@pytest.mark.parametrize(
    "shards", [(0,), (1,), (0, 1)], ids=["0", "1", "both"]
)
@pytest.mark.parametrize("again", [Again.stopped, Again.killed])
def test_servers_start_again_before_a_load(
    tmp_path: Path,
    shards: tuple[int, ...],
    again: Callable[[Kept, int], None],
) -> None:
    """What a late worker knows is of before both."""
    with job(tmp_path, 2) as (servers, both, trainer, sender):
        trainer.store.load(tmp_path / NAME)
        wait_for(lambda: both.stats("restores") == 2, 8)
        both.shut()
        for shard in shards:
            again(servers, shard)
        trainer.store.load(tmp_path / NAME)
        before = restores(servers)
        both.open()
        wait_for(lambda: both.stats("restores") == 4, 8)
        assert restores(servers) == before
        finish(servers, trainer, sender)


def test_servers_forget_and_load(tmp_path: Path) -> None:
    """They have rows of before all restores that a late worker knows."""
    with job(tmp_path, 2) as (servers, both, trainer, sender):
        for n in range(1, 4):
            trainer.store.load(tmp_path / NAME)
            wait_for(lambda n=n: both.stats("restores") == 2 * n, 8)
        both.shut()
        for shard in range(2):
            servers.kill(shard)
        for shard in range(2):
            servers.start(shard)
        with contextlib.closing(Trainer(servers, None).store) as other:  # type: ignore[arg-type]
            other.load(tmp_path / NAME)
        before = restores(servers)
        both.open()
        wait_for(lambda: both.gated.stats("restores") == 4, 8)
        assert restores(servers) == before
        send(sender, FIRST, FIRST + REST)
        sender.end()


@pytest.mark.parametrize("again", [Again.stopped, Again.killed])
@pytest.mark.parametrize(
    "shards", [(0,), (1,), (0, 1)], ids=["0", "1", "both"]
)
def test_another_store_keeps_the_restore(
    tmp_path: Path,
    shards: tuple[int, ...],
    again: Callable[[Kept, int], None],
) -> None:
    """It has seen neither that servers were started again nor the load: it
    reports the updates that are gone, once."""
    with contextlib.closing(Kept(2, tmp_path)) as servers:
        trainer = Trainer(servers, None)  # type: ignore[arg-type]
        for n in range(FIRST):
            trainer.step(batch(n))
        trainer.store.save(tmp_path / NAME)
        for n in range(FIRST, FIRST + REST):
            trainer.step(batch(n))
        trainer.flush()
        assert trainer.told == []
        for shard in shards:
            again(servers, shard)
        with contextlib.closing(Trainer(servers, None).store) as other:  # type: ignore[arg-type]
            other.load(tmp_path / NAME)
        before = restores(servers)
        with pytest.raises(persia.errors.RowsReplaced):
            trainer.step(batch(FIRST))
        for n in range(FIRST, FIRST + REST):
            trainer.step(batch(n))
        trainer.flush()
        assert trainer.told == []
        assert trainer.lost == REST
        assert restores(servers) == before
        assert missing(counts(servers, FIRST + REST)) == 0  # type: ignore[arg-type]
