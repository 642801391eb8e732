"""Servers whose checkpoints are in a bucket: processes, kills, and a bucket
that refuses."""

from __future__ import annotations

import contextlib
import re
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from pyarrow import fs

from persia import _core, errors
from persia.checkpoint import files
from tests import ready
from tests.checkpoints import Trained, assert_same_rows
from tests.cli.test_saved import call
from tests.system.processes import environment, ranks, wait_until
from tests.system.test_serve import Serving, serving
from tests.test_checkpoint_remote import listing

if not _core.GRPC[0].isdigit():
    pytest.skip("built without gRPC", allow_module_level=True)

Uri = Callable[[str], str]
TABLES = ("u", "i")


class Gate:
    """A proxy of a bucket that gives other answers on request.

    Attributes:
        endpoint: its address.
        of: names of the files whose writing it answers.
        status: of these answers; 0: none; 200: the bucket answers.
        seen: such requests.
    """

    def __init__(self, endpoint: str) -> None:
        self.refuse("", 200)
        host, _, port = endpoint.partition(":")
        self._there = host, int(port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def refuse(self, of: str, status: int) -> None:
        self.of, self.status, self.seen = of, status, 0

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                bucket = socket.create_connection(self._there)
                for way in (
                    (client, bucket, self._may_pass),
                    (bucket, client, lambda data: 200),
                ):
                    threading.Thread(
                        target=self._pass, args=way, daemon=True
                    ).start()

    def _may_pass(self, data: bytes) -> int:
        """The status of the answer, which 200 leaves to the bucket."""
        head = re.match(rb"(?:PUT|POST) (\S+) HTTP", data)
        if not head or not self.of:
            return 200
        if not re.search(self.of, head[1].decode()):
            return 200
        self.seen += 1
        return self.status

    def _pass(
        self,
        source: socket.socket,
        target: socket.socket,
        may_pass: Callable[[bytes], int],
    ) -> None:
        with contextlib.suppress(OSError), source, target:
            while data := source.recv(1 << 16):
                status = may_pass(data)
                if status == 200:
                    target.sendall(data)
                    continue
                if status:
                    source.sendall(
                        f"HTTP/1.1 {status} No\r\nContent-Length: 0\r\n"
                        "Connection: close\r\n\r\n".encode()
                    )
                    return
                while source.recv(1 << 16):
                    pass


@pytest.fixture
def gate(
    endpoint: str, uri: Uri, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Gate]:
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with contextlib.closing(Gate(endpoint)) as made:
        yield made


@pytest.fixture
def far(gate: Gate, uri: Uri) -> Uri:
    """The URI of a path behind the gate."""
    options = f"scheme=http&endpoint_override={gate.endpoint}"
    return lambda path: f"s3://bucket/{path}?{options}"


@contextlib.contextmanager
def served(shards: int, *flags: str) -> Iterator[Serving]:
    """A process with all shards."""
    every = ("--shard", f"0-{shards - 1}/{shards}" if shards > 1 else "0/1")
    with serving("--threads", "1", *every, *flags) as one:
        yield one


def trained(of: Serving) -> Trained:
    return Trained("adam", "fp32", servers=of.address, timeout=60)


def test_rows_over_restarts(uri: Uri, bucket: fs.FileSystem) -> None:
    """From the checkpoint of the job, or from what servers saved on exit."""
    place = ("--checkpoints", uri("jobs"))
    exits = ("--restore", "out", "--or-empty", "--save-on-exit", "out")
    alone = Trained("adam", "fp32")
    alone.train(0, 5)
    with served(2, *place, *exits) as one:
        job = trained(one)
        job.train(0, 3)
        job.store.save(uri("jobs/out"), **job.state())
        job.train(3, 5)
        job.store.close()
        assert "saved out" in one.stop()
    # The later one: of the exit.
    with served(2, *place, *exits) as one:
        job = trained(one)
        for table in TABLES:
            assert_same_rows(alone.store, job.store, table)
        job.store.close()
        one.stop()
    # Rows of two tables, and their description: those before are removed.
    assert len(listing(bucket, "jobs/out-1-of-2")) == 3
    # Another number of shards finds the job's.
    with served(3, *place, "--restore", "out") as one:
        job = trained(one)
        before = Trained("adam", "fp32")
        before.store.load(uri("jobs/out"), **before.state())
        for table in TABLES:
            assert_same_rows(before.store, job.store, table)
        job.store.close()


def test_a_server_is_killed_in_the_middle_of_an_upload(
    gate: Gate, far: Uri, bucket: fs.FileSystem, tmp_path: Path
) -> None:
    """The save fails by name, the checkpoint before it stays, and the next
    save leaves nothing of it, in the bucket and on the disk."""
    flags = ("--checkpoints", far("jobs"))
    local = tmp_path / "local"
    local.mkdir()
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(local))
        one = stack.enter_context(served(2, *flags))
        job = trained(one)
        job.train(0, 2)
        job.store.save(far("jobs/out"), **job.state())
        job.train(2, 4)
        gate.refuse("step-4.*shard-1-of-2", 0)
        caught: list[BaseException] = []

        def save() -> None:
            try:
                job.store.save(far("jobs/out"), **job.state())
            except BaseException as error:
                caught.append(error)

        saving = threading.Thread(target=save)
        saving.start()
        wait_until(lambda: gate.seen)
        one.process.send_signal(signal.SIGKILL)
        one.process.communicate(timeout=60)
        gate.refuse("", 200)
        port = one.address.rpartition(":")[2]
        again = Serving(
            "--port",
            port,
            "--threads",
            "1",
            "--shard",
            "0-1/2",
            *flags,
            "--restore",
            "out",
        )
        stack.callback(again.process.communicate, timeout=60)
        stack.callback(again.process.kill)
        saving.join(120)
        (error,) = caught
        assert isinstance(error, errors.Unavailable), error
        assert "save again" in str(error)
        root = files.root_of(far("jobs/out"))
        assert root.steps() == [2]
        assert any("step-4" in name for name in listing(bucket, "jobs/out"))
        assert "unfinished" in call("checkpoint", "ls", far("jobs/out"))
        # One folder for each shard that lives.
        assert len([*local.glob("persia-files-*")]) == 2
        job.store.load(far("jobs/out"), **job.state())
        job.train(2, 5)
        job.store.save(far("jobs/out"), **job.state(), step=9)
        assert root.steps() == [2, 9]
        assert not any(
            "step-4" in name for name in listing(bucket, "jobs/out")
        )
        job.store.close()


@pytest.mark.parametrize(
    "status", [403, pytest.param(500, marks=pytest.mark.long)]
)
def test_a_bucket_that_refuses(
    gate: Gate, far: Uri, bucket: fs.FileSystem, status: int
) -> None:
    """The error has its answer; training continues, and saves again."""
    flags = ("--checkpoints", far("jobs"), "--save-on-exit", "out")
    with served(1, *flags) as one:
        job = trained(one)
        job.train(0, 2)
        job.store.save(far("jobs/out"), **job.state())
        gate.refuse("shard-0-of-1", status)
        with pytest.raises(errors.StorageError) as caught:
            job.store.save(far("jobs/out"), **job.state(), step=3)
        assert re.search(f"{status}|ACCESS_DENIED", str(caught.value))
        job.train(2, 4)
        assert files.root_of(far("jobs/out")).steps() == [2]
        gate.refuse("", 200)
        job.store.save(far("jobs/out"), **job.state())
        assert files.root_of(far("jobs/out")).steps() == [2, 4]
        job.store.close()
        # On exit it says so, too.
        gate.refuse("out-0-of-1", status)
        one.process.send_signal(signal.SIGTERM)
        output, messages = one.process.communicate(timeout=60)
        assert one.process.returncode == 1
        assert "out-0-of-1" in output + messages


@pytest.mark.long
def test_a_log_that_restores_from_a_bucket(uri: Uri, tmp_path: Path) -> None:
    flags = ("--checkpoints", uri("jobs"), "--durable", "process")
    flags += ("--log", str(tmp_path / "log"))
    with served(1, *flags) as one:
        job = trained(one)
        job.train(0, 2)
        job.store.save(uri("jobs/out"), **job.state())
        job.train(2, 4)
        job.store.load(uri("jobs/out"), **job.state())
        job.train(2, 3)
        job.store.close()
        one.process.kill()
    alone = Trained("adam", "fp32")
    alone.train(0, 3)
    with served(1, *flags) as one:
        job = trained(one)
        for table in TABLES:
            assert_same_rows(alone.store, job.store, table)
        job.store.close()


@pytest.mark.long
def test_a_bucket_that_hangs(gate: Gate, far: Uri) -> None:
    with served(1, "--checkpoints", far("jobs")) as one:
        job = trained(one)
        job.train(0, 2)
        gate.refuse("shard-0-of-1", 0)
        with pytest.raises((errors.StorageError, errors.DeadlineExceeded)):
            job.store.save(far("jobs/out"), **job.state())
        job.train(2, 4)
        assert files.root_of(far("jobs/out")).steps() == []
        gate.refuse("", 200)
        job.store.save(far("jobs/out"), **job.state())
        gate.refuse("shard-0-of-1", 0)
        with pytest.raises((errors.StorageError, errors.DeadlineExceeded)):
            job.store.save(far("jobs/out"), **job.state(), step=9)
        job.store.close()
        one.stop()  # although a thread may hang


@pytest.mark.long
@pytest.mark.timeout(1300)
def test_a_job_of_ranks_and_servers(uri: Uri) -> None:
    """`persia train`: saved, ended, and continued with other servers."""
    words = ["-m", "persia", "train", "--samples", "20480"]
    words += ["--batch-size", "256", "--dim", "4", "--threads", "1"]
    words += ["--save", uri("jobs/clicks"), "--save-every", "20"]
    words += ["--keep", "2", "--resume", "auto"]
    for life, n in enumerate((2, 3)):
        place = ("--checkpoints", uri("jobs"), "--restore", "clicks")
        with ExitStack() as stack:
            some = [
                stack.enter_context(
                    serving("--shard", f"{i}/{n}", *place, "--or-empty")
                )
                for i in range(n)
            ]
            listed = ",".join(one.address for one in some)
            status, said = ranks(
                2,
                *words,
                *("--servers", listed, "--epochs", str(life + 1)),
                timeout=600,
            )
            assert status == 0, said
            assert ("no checkpoint in" in said) == (life == 0)
    done = subprocess.run(
        [
            ready.python(),
            *"-m persia checkpoint ls".split(),
            uri("jobs/clicks"),
        ],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "latest" in done.stdout
    assert len(files.root_of(uri("jobs/clicks")).steps()) == 2
