"""What stores tell of servers that fail, and what they do not tell twice.

The servers are in this process, behind real connections over loopback.
"""

from __future__ import annotations

import gc
import re
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import persia
from persia import JaggedBatch, errors
from persia.base import patience
from persia.distributed.server import ServeConfig, Server
from persia.store.engine import engine_of
from tests.system.processes import wait_until


class Shards:
    """All shards of a namespace, with a folder for checkpoints."""

    def __init__(self, n: int, folder: Path) -> None:
        self.folder = folder
        self.servers = [self._make(f"{i}/{n}", 0) for i in range(n)]
        self.addresses = [server.start() for server in self.servers]

    def _make(self, shard: str, port: int, **more: Any) -> Server:
        config = ServeConfig(
            port=port, shard=shard, checkpoints=self.folder, threads=1, **more
        )
        return Server(config)

    def kill(self) -> None:
        """Ends them and all that they have."""
        for server in self.servers:
            server.stop()
            server.close()

    def restart(self, restore: str | None = None) -> None:
        """New ones in their place, without rows or with those saved."""
        n = len(self.servers)
        ports = [int(a.rpartition(":")[2]) for a in self.addresses]
        self.servers = [
            self._make(f"{i}/{n}", port, restore=restore)
            for i, port in enumerate(ports)
        ]
        for server in self.servers:
            if restore:
                server.restore()
            server.start()


@pytest.fixture
def shards(tmp_path: Path) -> Iterator[Callable[[int], Shards]]:
    made: list[Shards] = []

    def make(n: int) -> Shards:
        made.append(Shards(n, tmp_path))
        return made[-1]

    yield make
    for one in made:
        one.kill()
    # A store that an exception's frames keep would have a name in the next
    # test's ledgers.
    gc.collect()


class Job:
    """One table that a shard refuses rows of beyond four."""

    def __init__(self, where: Shards) -> None:
        self.store = persia.Store(
            persia.optim.SGD(lr=1.0),
            servers=where.addresses,
            timeout=20.0,
            threads=1,
        )
        self.bags = persia.EmbeddingBagCollection(
            store=self.store,
            tables=[
                persia.EmbeddingBagConfig(
                    "t", embedding_dim=4, feature_names=["f"], capacity=8
                )
            ],
        )

    def forward(self, ids: list[int]) -> Tensor:
        out: Tensor = self.bags(JaggedBatch(["f"], torch.tensor(ids))).values()
        return out.sum()

    def step(self, ids: list[int]) -> None:
        self.forward(ids).backward()
        self.store.flush()

    def train(self, *batches: list[int]) -> None:
        """Steps of the batches of a loader."""
        source = [JaggedBatch(["f"], torch.tensor(ids)) for ids in batches]
        for one in persia.DataLoader(source, self.bags, staleness=1):
            self.bags(one).values().sum().backward()
            self.store.flush()

    @property
    def lost(self) -> int:
        return int(self.store.stats()["client"]["lost"])


@pytest.mark.parametrize("refused", [0, 2, 5])
def test_refused_updates_hide_none_that_were_lost(
    refused: int, shards: Callable[[int], Shards], tmp_path: Path
) -> None:
    where = shards(2)
    job = Job(where)
    job.step([1])
    for k in range(refused):
        with pytest.raises(errors.CapacityReached):
            job.step(list(range(100 * (k + 1), 100 * (k + 1) + 40)))
    job.store.save(tmp_path / "job")
    for _ in range(3):
        job.step([1])
    where.kill()
    where.restart("job")
    for _ in range(2):
        with pytest.raises(errors.UpdatesLost, match="lost 3 updates"):
            job.step([1])
    job.step([1])
    assert job.lost == 6


def two_errors(where: Shards) -> Job:
    """A NaN is to be told, and behind it that ten updates were lost."""
    job = Job(where)
    outs = [job.forward([7]) for _ in range(12)]
    for out in outs[:10]:
        out.backward()
    job.store.flush()
    where.kill()
    outs[10].backward()  # waits for the server
    (outs[11] * float("nan")).backward()
    where.restart()
    return job


def test_lost_updates_are_raised_behind_another_error(
    shards: Callable[[int], Shards],
) -> None:
    job = two_errors(shards(1))
    with pytest.raises(errors.NonFiniteGradient):
        job.store.flush()
    with pytest.raises(errors.UpdatesLost, match="lost 10 updates"):
        job.store.flush()
    job.store.flush()


def test_a_close_tells_both_errors(shards: Callable[[int], Shards]) -> None:
    job = two_errors(shards(1))
    with pytest.raises(errors.NonFiniteGradient) as raised:
        job.store.close()
    assert "lost 10 updates" in raised.value.__notes__[0]


def test_all_servers_that_lost_updates_are_named(
    shards: Callable[[int], Shards],
) -> None:
    where = shards(2)
    job = Job(where)
    outs = [job.forward([1, 2, 3, 4]) for _ in range(8)]
    for out in outs[:6]:
        out.backward()
    job.store.flush()
    where.kill()
    where.restart()
    outs[6].backward()
    with pytest.raises(errors.UpdatesLost) as raised:
        job.store.flush()
    for address in where.addresses:
        assert re.search(rf"{re.escape(address)} .* 6\b", str(raised.value))


def test_a_load_forgets_the_errors_before_it(
    shards: Callable[[int], Shards], tmp_path: Path
) -> None:
    job = Job(shards(1))
    job.step([7])
    job.store.save(tmp_path / "job")
    (job.forward([7]) * float("nan")).backward()
    job.store.load(tmp_path / "job")
    job.step([7])
    assert job.store.updates == 2


def test_a_refusal_is_told_to_nobody_else(
    shards: Callable[[int], Shards], tmp_path: Path
) -> None:
    where = shards(2)
    job = Job(where)
    job.train([1])
    job.store.save(tmp_path / "job")
    with pytest.raises(errors.CapacityReached):
        job.train([1], list(range(100, 140)))
    job.store.close()
    for _ in range(2):
        job = Job(where)
        job.store.load(tmp_path / "job", resume="continue")
        job.train([1], [1], [1])
        job.store.close()


def test_a_pass_ends_though_leaving_fails(
    shards: Callable[[int], Shards], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(shards(1))
    connection = engine_of(job.store).connection

    def leave(settle: bool) -> None:
        raise errors.Unavailable("the server cannot be reached")

    monkeypatch.setattr(connection, "join", lambda stream, by_batch: True)
    monkeypatch.setattr(connection, "leave", leave)
    source = [JaggedBatch(["f"], torch.tensor([7]))] * 3
    loop = iter(persia.DataLoader(source, job.bags, staleness=0))
    for _ in range(3):
        job.bags(next(loop)).values().sum().backward()
    with pytest.raises(errors.Unavailable, match="cannot be reached"):
        next(loop)
    assert connection.passes._open == 0


def test_a_store_says_what_it_waits_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(patience, "_SAY_AFTER", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    with pytest.raises(persia.errors.Unavailable):
        persia.Store(servers=address, timeout=1.0)
    record = caplog.records[0]
    assert record.levelname == "WARNING" and record.name == "persia"
    # Which, and why.
    assert address in record.getMessage()
    assert "cannot be reached" in record.getMessage()


def test_a_store_says_that_a_server_is_away(
    shards: Callable[[int], Shards],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """In the middle of a training, which goes on when the server is back."""
    where = shards(2)
    job = Job(where)
    looking = threading.Thread(target=lambda: job.store.rows("t", [1, 2, 3]))
    job.store.rows("t", [1, 2, 3])
    monkeypatch.setattr(patience, "_SAY_AFTER", 0.05)
    monkeypatch.setattr(patience, "_SAY_AGAIN", 1000.0)
    where.servers[1].stop()
    where.servers[1].close()
    looking.start()

    def said(text: str) -> bool:
        return any(text in one.getMessage() for one in caplog.records)

    wait_until(lambda: said(where.addresses[1]))
    assert len(caplog.records) == 1
    where.servers[1] = where._make(
        "1/2", int(where.addresses[1].rpartition(":")[2])
    )
    where.servers[1].start()
    looking.join()
    wait_until(lambda: said("answer again"))
    assert len(caplog.records) == 2
