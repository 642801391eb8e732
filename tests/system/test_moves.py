"""``persia scale ps`` with processes: four roles train meanwhile, and some are
killed."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import persia
from persia import _core
from tests.system import roles_counting
from tests.system.processes import environment

if not _core.GRPC[0].isdigit():
    pytest.skip("built without gRPC", allow_module_level=True)

COUNTING = str(Path(__file__).parent / "roles_counting.py")


class Processes:
    """Those of a test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.all: list[subprocess.Popen[str]] = []

    def start(self, *command: str) -> subprocess.Popen[str]:
        """Python with these arguments."""
        process = subprocess.Popen(
            [sys.executable, *command],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.all.append(process)
        return process

    def serve(self, *flags: str) -> tuple[subprocess.Popen[str], str]:
        """A process that serves, and its address."""
        process = self.start(
            "-m", "persia", "serve", flags[0], "--port", "0", *flags[1:]
        )
        assert process.stdout is not None
        for line in process.stdout:
            if found := re.match(r"serving .* on (\S+)$", line):
                return process, found[1]
        raise AssertionError(f"{flags}: {process.communicate()}")

    def server(self, *place: str) -> tuple[subprocess.Popen[str], str]:
        """A parameter server."""
        flags = ["--checkpoints", str(self.folder), "--threads", "1"]
        return self.serve("ps", *flags, *place)

    def scale(self, to: int, servers: list[str]) -> subprocess.Popen[str]:
        """The command, which runs."""
        options = ["--to", str(to), "--servers", ",".join(servers)]
        return self.start("-m", "persia", "scale", "ps", *options)

    def close(self) -> None:
        for process in self.all:
            process.kill()
            process.communicate()


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    with contextlib.closing(Processes(tmp_path)) as made:
        yield made


def finish(process: subprocess.Popen[str], status: int = 0) -> str:
    output, _ = process.communicate(timeout=100)
    assert process.returncode == status, output
    return output


def three(processes: Processes) -> list[tuple[subprocess.Popen[str], str]]:
    """Two servers with four shards each, and one that has joined."""
    first = processes.server("--shard", "0-3/8")
    second = processes.server("--shard", "4-7/8")
    return [first, second, processes.server("--join", first[1])]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_four_roles_train_meanwhile(processes: Processes) -> None:
    """Rows count each batch once, and no process has an error."""
    servers = [address for _, address in three(processes)]
    two = ",".join(servers[:2])
    _, worker = processes.serve(
        *("worker", "--servers", two, "--loaders", "1", "--threads", "1")
    )
    loader = processes.start(COUNTING, "loader", worker)
    gate = processes.folder / "gate"
    trainer = processes.start(COUNTING, "trainer", two, worker, str(gate))
    store = persia.Store(
        persia.optim.SGD(lr=1.0), servers=servers[:2], read_only=True
    )
    while store.updates < 10:
        time.sleep(0.05)
    for to in (3, 2):
        said = finish(processes.scale(to, servers))
        assert ("no shard" in said) == (to < 3)
    gate.touch()
    assert "sent" in finish(loader)
    assert "lost 0" in finish(trainer)
    store.add_table(roles_counting.config())
    rows = store.rows("count", torch.arange(roles_counting.IDS))
    want = roles_counting.expected()
    assert torch.equal(rows, want[:, None].expand(-1, 2))
    store.close()


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("victim", ["target", "command"])
@pytest.mark.parametrize("after", [0.0, 0.1, 0.2, 0.3])
def test_kills(victim: str, after: float, processes: Processes) -> None:
    """kill -9 in the middle: each shard is at one server, and no update is
    lost or done twice."""
    running = three(processes)
    servers = [address for _, address in running]
    store = persia.Store(
        persia.optim.SGD(lr=1.0), servers=servers[:2], timeout=60.0
    )
    bags = persia.EmbeddingBagCollection(
        store=store,
        tables=[
            persia.EmbeddingBagConfig(
                "t", embedding_dim=2, feature_names=["f"], init=0.0
            )
        ],
    )
    ids = torch.arange(100)

    def add() -> None:
        batch = persia.JaggedBatch(["f"], ids)
        (-bags(batch).values().sum()).backward()
        store.flush()

    add()
    command = processes.scale(3, servers)
    assert command.stdout is not None
    command.stdout.readline()  # it moves the first one
    times = 1
    until = time.monotonic() + after
    while time.monotonic() < until:
        add()
        times += 1
    if victim == "command":
        command.kill()
        add()
        times += 1
        finish(processes.scale(2, servers))
    else:
        had = shards_of(servers[2])
        running[2][0].kill()
        command.communicate(timeout=100)
        if had or shards_gone(servers[:2]):
            return  # it had them: they are lost with it
    add()
    times += 1
    rows = torch.as_tensor(store.rows("t", ids.tolist())[:, 0])
    assert rows.tolist() == [times] * 100
    store.close()


def shards_of(address: str, shards: int = 8) -> list[int]:
    """Those of a server."""
    from persia.distributed.moves import channel
    from persia.distributed.security import Security

    asked = channel(address, Security(), 10.0)
    with contextlib.closing(asked):
        answer = asked.move(
            *(_core.MOVE_STATUS, "default", 0, shards, 0, "", "")
        )
    return list(answer["here"])


def shards_gone(servers: list[str]) -> bool:
    """Whether another server has some."""
    return sum(len(shards_of(server)) for server in servers) < 8
