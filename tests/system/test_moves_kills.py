"""kill -9 of servers with logs and of ``persia scale ps``, in the middle of
moves: each shard is at one server, no update is lost or done twice."""

from __future__ import annotations

import contextlib
import random
import re
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import persia
from persia import _core
from tests.system.test_moves import Processes, finish, shards_of

if not _core.GRPC[0].isdigit():
    pytest.skip("built without gRPC", allow_module_level=True)

SHARDS = 4
IDS = torch.arange(100)
PLACES = ("0-1/4", "2-3/4", "")


class Cluster:
    """Two servers with two shards each, and one that joins, with logs; one
    trains meanwhile, on a thread.

    Attributes:
        servers: their addresses, which stay.
    """

    def __init__(self, processes: Processes, durable: str) -> None:
        self._processes = processes
        self._durable = durable
        self._running: list[subprocess.Popen[str]] = []
        self.servers: list[str] = []
        for i in range(len(PLACES)):
            process, address = self._start(i, 0)
            self._running.append(process)
            self.servers.append(address)
        self._store = persia.Store(
            persia.optim.SGD(lr=1.0),
            servers=self.servers[:2],
            job="counted",
            timeout=120.0,
        )
        self._bags = persia.EmbeddingBagCollection(
            store=self._store,
            tables=[
                persia.EmbeddingBagConfig(
                    "t", embedding_dim=2, feature_names=["f"], init=0.0
                )
            ],
        )
        self._times = 0
        self._error: BaseException | None = None
        self._over = threading.Event()
        self._add()
        # So that a move takes a while.
        more = torch.arange(1_000, 400_000)
        self._store.set_rows("t", more, torch.ones(len(more), 2))
        self._thread = threading.Thread(target=self._train)
        self._thread.start()

    def _start(self, i: int, port: int) -> tuple[subprocess.Popen[str], str]:
        place = ("--shard", PLACES[i]) if PLACES[i] else ("--join", "x:1")
        if not PLACES[i] and self.servers:
            place = ("--join", self.servers[0])
        log = self._processes.folder / ("log" if PLACES[i] else "joined")
        return self._processes.server(
            *place,
            *("--durable", self._durable, "--log", str(log)),
            *("--port", str(port)),
        )

    def _add(self) -> None:
        batch = persia.JaggedBatch(["f"], IDS)
        (-self._bags(batch).values().sum()).backward()
        self._store.flush()
        self._times += 1

    def _train(self) -> None:
        try:
            while not self._over.is_set():
                self._add()
        except BaseException as error:
            self._error = error

    def kill(self, *which: int) -> None:
        """kill -9, and they start again."""
        for i in which:
            self._running[i].kill()
            self._running[i].wait()
        for i in which:
            port = int(self.servers[i].rpartition(":")[2])
            self._running[i], address = self._start(i, port)
            assert address == self.servers[i]

    def limit_files(self, i: int, limits: tuple[int, int]) -> None:
        """Bytes of a file that a server may write."""
        pid = self._running[i].pid
        resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)

    def scale(self, to: int) -> subprocess.Popen[str]:
        """The command, which runs."""
        return self._processes.scale(to, self.servers)

    def settle(self, to: int) -> None:
        """The command, until it has done it: shards are each at one
        server."""
        for _ in range(20):
            command = self.scale(to)
            said, _ = command.communicate(timeout=100)
            if command.returncode == 0:
                break
        else:
            raise AssertionError(said)
        here = self.check_owners()
        assert [len(some) > 0 for some in here] == [i < to for i in range(3)]

    def check_owners(self) -> list[list[int]]:
        """The shards of each server: each is at one."""
        here = [shards_of(address, SHARDS) for address in self.servers]
        assert sorted(n for some in here for n in some) == [*range(SHARDS)]
        return here

    def check(self) -> None:
        """Rows have each update once."""
        self._over.set()
        self._thread.join()
        if self._error is not None:
            raise self._error
        self._add()
        rows = torch.as_tensor(self._store.rows("t", IDS.tolist())[:, 0])
        assert rows.tolist() == [self._times] * len(IDS)
        more = torch.as_tensor(self._store.rows("t", range(1_000, 400_000)))
        assert torch.equal(more, torch.ones_like(more))

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        self._store.close()


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    with contextlib.closing(Processes(tmp_path)) as made:
        yield made


def begun(cluster: Cluster, to: int) -> tuple[subprocess.Popen[str], int, int]:
    """A command whose first move has begun; source and target."""
    command = cluster.scale(to)
    assert command.stdout is not None
    found = re.search(r"from (\S+) to (\S+):", command.stdout.readline())
    assert found, finish(command)
    source, target = map(cluster.servers.index, found.groups())
    return command, source, target


def rounds(cluster: Cluster, seed: int, victims: list[str]) -> None:
    choose = random.Random(seed)
    to = 3
    for victim in victims:
        command, source, target = begun(cluster, to)
        time.sleep(choose.choice([0.0, 0.0, choose.random() * 1.5]))
        if victim in ("source", "both"):
            cluster.kill(source, *([target] if victim == "both" else []))
        elif victim == "target":
            cluster.kill(target)
        else:
            command.kill()
        command.communicate(timeout=100)
        cluster.settle(to)
        to = 5 - to
    cluster.check()


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_kills_of_each(processes: Processes) -> None:
    with contextlib.closing(Cluster(processes, "process")) as cluster:
        rounds(cluster, 1, ["source", "target", "command", "both"])


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("durable", ["process", "disk"])
def test_kills_again_and_again(durable: str, processes: Processes) -> None:
    choose = random.Random(durable)
    victims = choose.choices(["source", "target", "command", "both"], k=25)
    with contextlib.closing(Cluster(processes, durable)) as cluster:
        rounds(cluster, choose.randrange(1000), victims)


@pytest.mark.slow
@pytest.mark.timeout(100)
def test_an_interrupt(processes: Processes) -> None:
    """Ctrl-C: the move that has begun ends or is taken back."""
    with contextlib.closing(Cluster(processes, "process")) as cluster:
        command, _, _ = begun(cluster, 3)
        command.send_signal(signal.SIGINT)
        said = finish(command, 130)
        assert "the move was given up" in said or " is at " in said
        cluster.check_owners()
        cluster.settle(3)
        cluster.check()


@pytest.mark.slow
@pytest.mark.timeout(100)
def test_a_disk_that_takes_no_more(processes: Processes) -> None:
    """At the server that is to take shards: it says why, and the others
    serve."""
    with contextlib.closing(Cluster(processes, "process")) as cluster:
        _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
        cluster.limit_files(2, (4096, most))
        said = finish(cluster.scale(3), 1)
        assert "stays at" in said and "File too large" in said
        cluster.check_owners()
        cluster.limit_files(2, (most, most))
        cluster.settle(3)
        cluster.check()
