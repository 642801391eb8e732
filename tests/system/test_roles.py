"""The four roles as processes: servers, embedding workers, data loaders and a
trainer."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

import persia
from persia import _core
from tests.ready import Ready, python
from tests.system import roles_counting, roles_job
from tests.system.processes import environment, wait_until

if not _core.GRPC[0].isdigit():
    pytest.skip("built without gRPC", allow_module_level=True)

JOB = Path(__file__).with_name("roles_job.py")
COUNTING = Path(__file__).with_name("roles_counting.py")
FEED = ["feed", "--data", "synthetic", "--eval-split", "0"]
FEED += ["--samples", str(roles_job.ROWS), "--seed", str(roles_job.SEED)]
FEED += ["--batch-size", str(roles_job.BATCH)]
SEEDS = os.environ.get("PERSIA_TEST_SEEDS", "0,1,2,4,8,12,18").split(",")


def start(*words: str) -> subprocess.Popen[str]:
    """A process of this source tree."""
    how = {
        "env": environment(),
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
    }
    if "serve" in words:  # without torch
        return subprocess.Popen([sys.executable, *words], text=True, **how)
    if "launch" in words:
        return subprocess.Popen([python(), *words], text=True, **how)
    return Ready(*words, **how)


def address_of(process: subprocess.Popen[str]) -> str:
    """Where it serves, as it says."""
    assert process.stdout is not None
    line = process.stdout.readline()
    found = re.match(r"serving .* on (\S+)$", line)
    assert found, line + process.communicate(timeout=60)[1]
    return found[1]


def start_worker(servers: str, port: str) -> tuple[subprocess.Popen[str], str]:
    """A worker process, and where it serves."""
    flags = ["--servers", servers, "--port", port]
    process = start("-m", "persia", "serve", "worker", *flags)
    return process, address_of(process)


@contextlib.contextmanager
def serving(role: str, *flags: str) -> Iterator[str]:
    """A server or worker; its address.  It must stop in peace."""
    process = start("-m", "persia", "serve", role, "--port", "0", *flags)
    try:
        yield address_of(process)
        process.send_signal(signal.SIGTERM)
        _, messages = process.communicate(timeout=60)
        assert process.returncode == 0, messages
    finally:
        process.kill()
        process.communicate(timeout=60)


@contextlib.contextmanager
def cluster(shards: int, workers: int) -> Iterator[tuple[str, str]]:
    """The addresses of servers, and of workers."""
    with contextlib.ExitStack() as stack:
        servers = ",".join(
            stack.enter_context(serving("ps", "--shard", f"{i}/{shards}"))
            for i in range(shards)
        )
        yield (
            servers,
            ",".join(
                stack.enter_context(serving("worker", "--servers", servers))
                for _ in range(workers)
            ),
        )


def finish(process: subprocess.Popen[str]) -> str:
    """What it printed; its exit status must be 0."""
    output, messages = process.communicate(timeout=120)
    assert process.returncode == 0, messages
    return output


@pytest.mark.parametrize(("shards", "workers"), [(2, 1), (1, 2)])
def test_the_same_bits_as_one_process(shards: int, workers: int) -> None:
    """Losses, rows and dense parameters without staleness."""
    with cluster(shards, 0) as (servers, _):
        want: Any = json.loads(finish(start(str(JOB), servers)))
    with cluster(shards, workers) as (servers, addresses):
        loader = start("-m", "persia", *FEED, "--workers", addresses)
        got = json.loads(finish(start(str(JOB), servers, addresses)))
        assert re.search(r"sent 20 batches, 5,000 samples", finish(loader))
    assert len(got["losses"]) == 20
    assert got == want


def test_train_takes_what_feed_sends() -> None:
    """Two epochs of the commands, and the score of what was held out."""
    flags = ["--data", "synthetic", "--samples", "4000", "--epochs", "2"]
    with cluster(2, 1) as (servers, workers):
        loader = start("-m", "persia", "feed", *flags, "--workers", workers)
        trainer = start(
            *("-m", "persia", "train", *flags, "--workers", workers),
            *("--servers", servers, "--model", "dcn", "--threads", "1"),
        )
        output = finish(trainer)
        assert "batches from embedding" in output
        assert re.search(r"AUC .* samples held out", output)
        assert "2 epochs" in finish(loader)


def test_wrong_commands_are_one_line() -> None:
    """They name what is missing."""
    for command, status, text in (
        (["serve", "worker"], 2, "PERSIA_SERVERS"),
        (["feed"], 2, "PERSIA_WORKERS"),
        (
            ["feed", "--workers", "a:1", "--loader", "2/2"],
            2,
            "0 to N - 1 of N",
        ),
        (
            ["feed", "--workers", "127.0.0.1:1", "--timeout", "0.2"],
            1,
            "Unavailable",
        ),
    ):
        process = start("-m", "persia", *command)
        _, messages = process.communicate(timeout=60)
        assert process.returncode == status
        assert messages.startswith("persia: error[")
        assert text in messages
        assert "Traceback" not in messages


def test_launch_starts_all_roles() -> None:
    """And ends them; one that fails ends the others."""
    flags = ["--data", "synthetic", "--feed", "--samples 3000"]
    flags = ["--ps", "2", "--embedding-workers", "2", "--loaders", "2", *flags]
    train = ["train", "--samples", "3000", "--model", "dcn", "--threads", "1"]
    job = [python(), "-m", "persia", *train]
    output = finish(start("-m", "persia", "launch", *flags, "--", *job))
    assert re.search(r"job +\| .*AUC .* samples held out", output)
    found = re.findall(r"worker\d +\| (\d+) batches were trained", output)
    assert sum(map(int, found)) == 3
    flags = ["--data", "synthetic", "--feed", "--samples none"]
    flags = ["--embedding-workers", "1", "--loaders", "1", *flags]
    job = [python(), "-c", "import time; time.sleep(600)"]
    process = start("-m", "persia", "launch", *flags, "--", *job)
    _, messages = process.communicate(timeout=120)
    assert process.returncode != 0
    assert "loader" in messages


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "staleness", [pytest.param(0, marks=pytest.mark.long), 2]
)
def test_launch_with_torchrun(staleness: int) -> None:
    """Two ranks share the batches; without staleness each has its half.  Else
    one may be at its end while another has batches ahead, which it skips."""
    flags = ["--data", "synthetic", "--feed", "--samples 4000 --epochs 2"]
    flags = ["--ps", "2", "--embedding-workers", "2", "--loaders", "1", *flags]
    train = ["-m", "persia", "train", "--samples", "4000", "--epochs", "2"]
    train += ["--model", "dcn", "--staleness", str(staleness)]
    ranks = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    job = [python(), *ranks, *train]
    output = finish(start("-m", "persia", "launch", *flags, "--", *job))
    assert re.search(r"job +\| .*2 ranks; batches from", output)
    assert re.search(r"job +\| .*AUC .* samples held out", output)
    found = re.findall(
        r"worker\d +\| (\d+) batches were trained, (\d+) skipped, 0 are left",
        output,
    )
    assert sum(int(n) for pair in found for n in pair) == 8
    if staleness == 0:
        assert found == [("4", "0"), ("4", "0")]


@pytest.mark.timeout(180)
def test_jobs_in_a_row_and_at_once() -> None:
    """Of 2 and 3 epochs, by the commands: without names one after the other,
    then beside each other with the names of their jobs."""

    def run(servers: str, workers: str, epochs: int, *job: str) -> list[Any]:
        flags = ["--samples", "3000", "--eval-split", "0", *job]
        flags += ["--epochs", str(epochs), "--workers", workers]
        train = ["--servers", servers, "--model", "dcn", "--threads", "1"]
        return [
            start("-m", "persia", "feed", "synthetic", *flags),
            start("-m", "persia", "train", "synthetic", *flags, *train),
        ]

    with cluster(1, 1) as (servers, workers):
        store = persia.Store(servers=servers, read_only=True)
        done = 0
        for jobs in [(2, ())], [(3, ())], [(2, ("a",)), (3, ("b",))]:
            processes = [
                run(servers, workers, n, *(["--job", *job] if job else []))
                for n, job in jobs
            ]
            for feed, train in processes:
                finish(train)
                assert "failed" not in finish(feed)
            done += sum(3 * n for n, _ in jobs)
            assert store.updates == done
        store.close()


def updates(store: persia.Store, least: int) -> None:
    """Waits for so many."""
    wait_until(lambda: store.updates >= least)


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("victim", ["worker", "trainer", "both"])
def test_each_batch_is_applied_once_whoever_is_killed(victim: str) -> None:
    """kill -9 of the worker, of the trainer, and of both at once."""
    job = str(COUNTING)
    with contextlib.ExitStack() as stack:
        servers = ",".join(
            stack.enter_context(serving("ps", "--shard", f"{i}/2"))
            for i in range(2)
        )
        worker, address = start_worker(servers, "0")
        processes = [worker]
        stack.callback(lambda: [p.kill() for p in processes])
        loader = start(job, "loader", address)
        trainer = start(job, "trainer", servers, address)
        processes += [loader, trainer]
        store = persia.Store(
            persia.optim.SGD(lr=1.0), servers=servers, read_only=True
        )
        stack.callback(store.close)
        for least in 20, 50:
            updates(store, least)
            if victim in ("worker", "both"):
                worker.kill()
                worker.wait()
            if victim in ("trainer", "both"):
                trainer.kill()
                trainer.wait()
                trainer = start(job, "trainer", servers, address)
                processes.append(trainer)
            if victim in ("worker", "both"):
                worker, _ = start_worker(servers, address.split(":")[1])
                processes.append(worker)
        assert "sent" in finish(loader)
        assert "late" in finish(trainer)
        store.add_table(roles_counting.config())
        rows = store.rows("count", torch.arange(roles_counting.IDS))
        want = roles_counting.expected()
        assert torch.equal(rows, want[:, None].expand(-1, 2))


class Counting:
    """A counting job whose processes the test kills.

    Two servers, two workers, one loader with a name, one trainer, which waits
    for finish() before the last batches.
    """

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self.job = str(COUNTING)
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        self.gate = Path(folder) / "gate"
        self.processes: dict[str, subprocess.Popen[str]] = {}
        self.all: list[subprocess.Popen[str]] = []
        stack.callback(self._kill_all)
        self.servers: list[str] = ["0", "0"]
        self.workers: list[str] = ["0", "0"]
        for i in range(2):
            self._begin(f"server{i}")
        for i in range(2):
            self._begin(f"worker{i}")
        self.store = persia.Store(
            persia.optim.SGD(lr=1.0),
            servers=",".join(self.servers),
            read_only=True,
            lost="continue",
        )
        stack.callback(self.store.close)
        self._begin("loader")
        self._begin("trainer")

    def _kill_all(self) -> None:
        for process in self.all:
            process.kill()
            process.communicate()

    def _begin(self, name: str) -> None:
        at = int(name[-1]) if name[-1].isdigit() else 0
        servers, workers = ",".join(self.servers), ",".join(self.workers)
        if name.startswith("server"):
            port = self.servers[at].rpartition(":")[2]
            process = start(
                *("-m", "persia", "serve", "ps", "--shard", f"{at}/2"),
                *("--port", port),
            )
            self.servers[at] = address_of(process)
        elif name.startswith("worker"):
            port = self.workers[at].rpartition(":")[2]
            process, self.workers[at] = start_worker(servers, port)
        elif name == "loader":
            process = start(self.job, "loader", workers, "count")
        else:
            gate = str(self.gate)
            process = start(self.job, "trainer", servers, workers, gate)
        self.processes[name] = process
        self.all.append(process)

    def kill(self, *names: str) -> None:
        """All at once."""
        for name in names:
            self.processes[name].kill()
        for name in names:
            self.processes[name].wait()

    def begin(self, *names: str) -> None:
        """Starts them again."""
        for name in names:
            self._begin(name)

    def finish(self) -> str:
        """What the trainer printed at its end."""
        self.gate.touch()
        output = finish(self.processes["trainer"])
        assert "sent" in finish(self.processes["loader"])
        return output

    def rows(self) -> torch.Tensor:
        """How often each id was counted."""
        self.store.add_table(roles_counting.config())
        ids = torch.arange(roles_counting.IDS)
        rows = self.store.rows("count", ids)
        assert torch.equal(rows[:, 0], rows[:, 1])
        return rows[:, 0]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("victims", "back"),
    [
        (["worker0", "loader"], ["worker0", "loader"]),
        pytest.param(["worker1"], [], marks=pytest.mark.long),
        pytest.param(["loader"], ["loader"], marks=pytest.mark.long),
        pytest.param(
            ["worker0", "trainer"], ["trainer"], marks=pytest.mark.long
        ),
        pytest.param(
            ["loader", "trainer"],
            ["trainer", "loader"],
            marks=pytest.mark.long,
        ),
    ],
)
def test_two_workers_and_a_named_loader_are_killed(
    victims: list[str], back: list[str]
) -> None:
    """kill -9, also of two at once; who is not started again stays away.
    Each batch is applied once."""
    with contextlib.ExitStack() as stack:
        job = Counting(stack)
        updates(job.store, 30)
        job.kill(*victims)
        job.begin(*back)
        job.finish()
        assert torch.equal(job.rows(), roles_counting.expected())


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", SEEDS)
def test_random_kills(seed: str) -> None:
    """Any roles but servers, at random moments."""
    random = Random(int(seed))
    with contextlib.ExitStack() as stack:
        job = Counting(stack)
        for least in 15, 40, 65:
            updates(job.store, least + random.randrange(20))
            names = ["worker0", "worker1", "loader", "trainer"]
            victims = random.sample(names, random.randint(1, 2))
            job.kill(*victims)
            time.sleep(2 * random.random())
            job.begin(*victims)
        job.finish()
        assert torch.equal(job.rows(), roles_counting.expected())


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_server_is_killed() -> None:
    """It comes back without its rows: no row is above the sum, and the
    trainer reports the loss."""
    with contextlib.ExitStack() as stack:
        job = Counting(stack)
        updates(job.store, 30)
        job.kill("server1")
        job.begin("server1")
        output = job.finish()
        rows, want = job.rows(), roles_counting.expected()
        assert (rows <= want).all()
        assert (rows < want).any()
        assert int(re.findall(r"lost (\d+)", output)[0]) > 0
