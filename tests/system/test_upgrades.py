"""Servers, workers, loaders and trainers of two commits, and servers that are
restarted one after the other.

``PERSIA_TEST_OLD`` is another checkout with its own build: what runs before an
upgrade. Without it both are this tree.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import persia
from persia import _core
from tests.system import roles_counting
from tests.system.processes import ROOT, environment, wait_until
from tests.system.shards import free_port

if not _core.GRPC[0].isdigit():
    pytest.skip("built without gRPC", allow_module_level=True)

OLD = os.environ.get("PERSIA_TEST_OLD")
COUNTING = str(Path(__file__).with_name("roles_counting.py"))
BITS = Path(__file__).with_name("roles_job.py")
ROLES = ("server", "worker", "loader", "trainer")
old = pytest.mark.skipif(OLD is None, reason="PERSIA_TEST_OLD is not set")


class Job:
    """Two servers with logs, an embedding worker, a loader and a trainer, each
    of one of the two trees.

    Args:
        folder: of the logs, and of the file that lets the trainer end.
        trees: of a role where its Persia is; default: this tree.
    """

    def __init__(self, folder: Path, trees: dict[str, str]) -> None:
        self.folder = folder
        self.trees = trees
        self.gate = folder / "gate"
        self.all: list[subprocess.Popen[str]] = []
        self.ports = [str(free_port()) for _ in range(3)]
        self.servers = [self.server(i) for i in range(2)]
        self.worker = self.serve("worker", "worker", self.ports[2])

    @property
    def addresses(self) -> str:
        return ",".join(f"127.0.0.1:{port}" for port in self.ports[:2])

    def server(self, shard: int) -> subprocess.Popen[str]:
        log = str(self.folder / f"log{shard}")
        return self.serve(
            *("server", "ps", self.ports[shard], "--shard", f"{shard}/2"),
            *("--durable", "process", "--log", log),
        )

    def serve(
        self, role: str, what: str, port: str, *more: str
    ) -> subprocess.Popen[str]:
        words = ["-m", "persia", "serve", what, "--port", port, *more]
        if what == "worker":
            words += ["--servers", self.addresses]
        process = self.start(role, *words)
        assert process.stdout is not None
        line = process.stdout.readline()
        if line.startswith("recovered "):
            line = process.stdout.readline()
        assert re.match(r"serving .* on \S+$", line), line
        return process

    def start(self, role: str, *words: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, *words],
            env=environment(PYTHONPATH=self.trees.get(role, str(ROOT))),
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.all.append(process)
        return process

    def loader(self) -> subprocess.Popen[str]:
        worker = f"127.0.0.1:{self.ports[2]}"
        return self.start("loader", COUNTING, "loader", worker, "upgrade")

    def trainer(self) -> subprocess.Popen[str]:
        worker = f"127.0.0.1:{self.ports[2]}"
        return self.start(
            *("trainer", COUNTING, "trainer", self.addresses, worker),
            str(self.gate),
        )

    def check(self) -> None:
        """Each batch was applied once."""
        store = persia.Store(
            persia.optim.SGD(lr=1.0), servers=self.addresses, read_only=True
        )
        with contextlib.closing(store):
            store.add_table(roles_counting.config())
            rows = store.rows("count", torch.arange(roles_counting.IDS))
        want = roles_counting.expected()
        assert torch.equal(rows, want[:, None].expand(-1, 2))

    def kill(self) -> None:
        for process in self.all:
            process.kill()
            process.communicate()


@contextlib.contextmanager
def job(**trees: str) -> Iterator[Job]:
    with tempfile.TemporaryDirectory() as folder:
        one = Job(Path(folder), trees)
        try:
            yield one
        finally:
            one.kill()


def ended(process: subprocess.Popen[str]) -> str:
    """What it printed; it ends in peace."""
    output, messages = process.communicate(timeout=120)
    assert process.returncode == 0, messages
    return output


def stopped(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGTERM)
    ended(process)


@pytest.mark.slow
def test_servers_are_restarted_one_after_the_other() -> None:
    """And then the worker, while a job trains: no process of it fails, and no
    update is lost or doubled. With PERSIA_TEST_OLD they are of that tree at
    first: it reads their logs."""
    before = {"server": OLD, "worker": OLD} if OLD else {}
    with job(**before) as one:
        loader, trainer = one.loader(), one.trainer()
        store = persia.Store(
            persia.optim.SGD(lr=1.0), servers=one.addresses, read_only=True
        )
        with contextlib.closing(store):
            one.trees = {}
            for shard, least in enumerate((20, 40)):
                wait_until(lambda n=least: store.updates >= n)
                stopped(one.servers[shard])
                one.servers[shard] = one.server(shard)
            wait_until(lambda: store.updates >= 60)
        stopped(one.worker)
        one.serve("worker", "worker", one.ports[2])
        one.gate.touch()
        assert ended(trainer) == "late 0 lost 0\n"
        assert "sent" in ended(loader)
        one.check()


@old
@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "new",
    [
        which
        for n in range(len(ROLES))
        for which in itertools.combinations(ROLES, n)
    ],
    ids="+".join,
)
def test_roles_of_two_commits_count_each_batch_once(
    new: tuple[str, ...],
) -> None:
    """The roles in `new` are of this tree, the others are older."""
    assert OLD is not None
    with job(**{role: OLD for role in ROLES if role not in new}) as one:
        one.gate.touch()
        loader, trainer = one.loader(), one.trainer()
        assert ended(trainer) == "late 0 lost 0\n"
        assert "sent" in ended(loader)
        one.check()


@old
@pytest.mark.long
@pytest.mark.parametrize("role", ["server", "trainer"])
def test_bits_are_the_same(role: str) -> None:
    """Without staleness, with one role older."""
    assert OLD is not None
    results = []
    for trees in ({}, {role: OLD}):
        with job(**trees) as one:
            trainer = one.start("trainer", str(BITS), one.addresses)
            results.append(json.loads(ended(trainer)))
    assert results[0] == results[1]
