"""``persia launch --autoscale --durable``: servers whose number changes are
found again by the next start, with their logs and ports."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from persia import _core, errors
from persia.distributed.autoscale import Autoscaler
from persia.distributed.driver import Driver, Role
from persia.distributed.kept import Job, Kept
from persia.distributed.launch import reserve_lasting
from persia.distributed.load import SERVER, Decision
from persia.distributed.processes import Process
from tests.ready import ended
from tests.system.processes import environment, marked, wait_until

GRPC = pytest.mark.skipif(
    not _core.GRPC[0].isdigit(), reason="built without gRPC"
)
JOB = Job(namespace="default", host="127.0.0.1", servers=1, shards=4)

#: Each step adds 1 to the first rows and makes more, until FOLDER/grown is
#: there. FOLDER/steps has how many were acknowledged. A life that begins
#: finds each of these once, and finishes the step after them, of which it may
#: find any rows.
COUNTING = """
import os, pathlib, sys, time
import torch
import persia

FIRST, MORE = 100, 150
folder = pathlib.Path(sys.argv[1])
state = folder / "steps"
store = persia.Store(persia.optim.SGD(lr=1.0), timeout=120.0)
config = persia.EmbeddingBagConfig("t", 16, feature_names=["f"], init=0.0)
bags = persia.EmbeddingBagCollection(store=store, tables=[config])

def counts(begin, end):
    rows = torch.as_tensor(store.rows("t", torch.arange(begin, end)))
    assert (rows == rows[:, :1]).all()
    return rows[:, 0]

def train(ids):
    (-bags(persia.JaggedBatch(["f"], ids)).values().sum()).backward()
    store.flush()

def done(steps, made):
    part = folder / "steps.part"
    part.write_text(f"{steps} {made}")
    os.replace(part, state)

def check(steps, made):
    assert (counts(0, FIRST) == steps).all(), (steps, counts(0, FIRST))
    assert (counts(FIRST, FIRST + made) == 1).all(), made

steps, made = 0, 0
if state.exists():
    steps, made = map(int, state.read_text().split())
    first, more = counts(0, FIRST), counts(FIRST, FIRST + made + MORE)
    assert ((first == steps) | (first == steps + 1)).all(), (steps, first)
    assert (more[:made] == 1).all() and (more[made:] <= 1).all(), more
    late = [(first == steps).nonzero(), FIRST + (more == 0).nonzero()]
    train(torch.cat(late)[:, 0])
    steps, made = steps + 1, made + MORE
    check(steps, made)
    done(steps, made)
print("life begins", flush=True)
while not (folder / "end").exists():
    more = 0 if (folder / "grown").exists() else MORE
    new = torch.arange(FIRST + made, FIRST + made + more)
    train(torch.cat([torch.arange(FIRST), new]))
    steps, made = steps + 1, made + more
    done(steps, made)
    time.sleep(0.05)
check(steps, made)
print("every update once after", steps, "steps", flush=True)
store.close()
"""


class Launch:
    """The command, which is the same in each life."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.log = folder, folder / "log"
        self.mark = uuid.uuid4().hex
        self.process: subprocess.Popen[str] | None = None
        self.lives = 0

    def start(self) -> None:
        self.lives += 1
        words = ["launch", "--ps", "1:2", "--shards", "4", "--autoscale"]
        words += ["--durable", "process", "--log", str(self.log)]
        words += ["--memory-limit", "12MiB", "--checkpoints", str(self.folder)]
        words += ["--scale-out-after", "1", "--scale-in-after", "20"]
        job = [sys.executable, "-c", COUNTING, str(self.folder)]
        with self.out.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "persia", *words, "--", *job],
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment(self.mark),
                text=True,
            )

    @property
    def out(self) -> Path:
        return self.folder / f"out{self.lives}"

    def until(self, text: str) -> None:
        """It prints that."""
        process = self.process
        assert process is not None
        wait_until(
            lambda: text in self.out.read_text() or process.poll() is not None,
            120,
        )
        assert text in self.out.read_text(), self.out.read_text()

    def here(self) -> list[int]:
        """The shards of the server that joined, as its disk says."""
        path = self.log / "ps1" / "default-of-4-at-join.moves"
        found = json.loads(path.read_text()) if path.exists() else {}
        return sorted(map(int, found.get("here", ())))

    def ports(self) -> dict[str, int]:
        found = json.loads((self.log / "launch.json").read_text())["ports"]
        return dict(found)

    def kill(self) -> None:
        """kill -9 of all."""
        while some := marked(self.mark):
            for pid in some:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        if self.process is not None:
            self.process.wait()


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    made = Launch(tmp_path)
    yield made
    made.kill()


@GRPC
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_kills_of_a_job_that_grows_and_shrinks(launch: Launch) -> None:
    """kill -9 of all of it, in the middle of a move and after it: the next
    start finds each shard, and no update is lost or done twice."""
    launch.start()
    wait_until(lambda: any(launch.log.glob("ps1/*.moves")), 120)
    (launch.folder / "grown").touch()
    launch.kill()
    ports = launch.ports()
    assert set(ports) == {"0", "1"}

    launch.start()
    launch.until("life begins")
    wait_until(lambda: len(launch.here()) == 2, 60)
    launch.kill()
    assert launch.ports() == ports

    launch.start()
    launch.until("life begins")
    assert launch.ports() == ports and len(launch.here()) == 2
    launch.until("servers 2 -> 1")
    wait_until(lambda: set(launch.ports()) == {"0"}, 60)
    assert launch.here() == []
    launch.kill()

    launch.start()
    launch.until("life begins")
    assert "ps1" not in launch.out.read_text()
    (launch.folder / "grown").unlink()
    wait_until(lambda: len(launch.here()) == 2, 120)
    launch.kill()

    launch.start()
    launch.until("life begins")
    (launch.folder / "end").touch()
    launch.until("every update once")
    assert launch.process is not None
    assert launch.process.wait(60) == 0, launch.out.read_text()


def started(log: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A job that does nothing."""
    words = ("launch", "--log", str(log), "--durable", "process", *words)
    return ended(
        *("-m", "persia", *words, "--", "true"), env=environment(), timeout=60
    )


@GRPC
@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_start_that_cannot_continue_the_logs(tmp_path: Path) -> None:
    """A port that is taken, another job: nothing is started, and the next
    start is as if that one had not been."""
    log, words = tmp_path / "log", ("--ps", "1:2", "--autoscale")
    done = started(log, *words)
    assert done.returncode == 0, done.stderr
    kept = (log / "launch.json").read_bytes()
    port = json.loads(kept)["ports"]["0"]
    with socket.create_server(("127.0.0.1", port)):
        done = started(log, *words)
    assert done.returncode != 0
    assert "Unavailable" in done.stderr and str(port) in done.stderr
    for other, code in (
        (("--ps", "1:3", "--autoscale"), "SchemaMismatch"),
        (("--ps", "2:2", "--shards", "4", "--autoscale"), "SchemaMismatch"),
        (("--ps", "1", "--shards", "4"), "InvalidArgument"),
    ):
        done = started(log, *other)
        assert done.returncode != 0
        assert code in done.stderr and "serving" not in done.stdout
    assert (log / "launch.json").read_bytes() == kept
    done = started(log, *words)
    assert done.returncode == 0, done.stderr
    assert f"127.0.0.1:{port}" in done.stdout


def test_what_is_kept(tmp_path: Path) -> None:
    """Of servers that joined those that were ever to get a shard."""
    kept = Kept(tmp_path, JOB)
    assert kept.ports() == {0: 0}
    kept.keep({0: 4000})
    kept.keep({1: 4001, 2: 4002})
    for server in (1, 2):
        kept.folder(server).mkdir()
    (kept.folder(2) / "default-of-4-at-join.moves").touch()
    assert Kept(tmp_path, JOB).ports() == {0: 4000, 2: 4002}
    kept.forget(2)
    assert Kept(tmp_path, JOB).ports() == {0: 4000}


def test_a_kept_port_is_not_one_that_the_system_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as to a connection, between two starts of the job."""
    given = tmp_path / "range"
    monkeypatch.setattr("persia.distributed.launch._GIVEN", given)
    given.write_text("20000\t60999\n")
    with reserve_lasting("127.0.0.1") as held:
        assert held.getsockname()[1] < 20000
    given.write_text("1024\t65535\n")
    with reserve_lasting("127.0.0.1") as held:  # where there is no other
        assert held.getsockname()[1] >= 1024
    with pytest.raises(errors.InvalidArgument):
        reserve_lasting("203.0.113.1")


def test_a_server_that_cannot_be_started() -> None:
    """The job continues with those that it has."""

    class Decided(Autoscaler):
        def ask(self, *_: object) -> list[str | Decision]:
            return [Decision(SERVER, 1, 2, 1.5)]

    def begin() -> Process:
        raise errors.StorageError("no room")

    said: list[str] = []
    Driver(
        Decided({}),
        {SERVER: Role([], begin, set())},
        lambda addresses, to: begin(),
        said.append,
        set(),
        1.0,
        None,
    ).step([])
    assert "stay at 1: no room" in said[-1]


def test_other_folders_of_logs(tmp_path: Path) -> None:
    """They are refused, as long as they may name servers."""
    Kept(tmp_path, JOB).keep({0: 4000})
    for field, value in {"namespace": "x", "host": "::1", "shards": 8}.items():
        with pytest.raises(errors.SchemaMismatch):
            Kept(tmp_path, JOB.model_copy(update={field: value}))
    (tmp_path / "launch.json").write_text("{")
    with pytest.raises(errors.CorruptFile):
        Kept(tmp_path, JOB)
    (tmp_path / "launch.json").unlink()
    assert Kept(tmp_path, JOB).ports() == {0: 0}
    (tmp_path / "default-of-4-at-0.moves").touch()
    with pytest.raises(errors.CorruptFile):
        Kept(tmp_path, JOB)
