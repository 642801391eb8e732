"""SIGTERM and Ctrl-C of every role, whatever it waits for: servers, workers,
a folder that hangs. No test measures a time: each process waits for something
that does not come within its timeout of ten minutes."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import persia
from persia import _core, errors
from persia.distributed.status import ask, ask_embedding
from tests.ready import Ready
from tests.system.processes import environment, wait_until

if not _core.GRPC[0].isdigit():
    pytest.skip("built without gRPC", allow_module_level=True)

SHIM = Path(__file__).with_name("hanging.c")
FOREVER = "600"
CONTAINER = ("unshare", "--pid", "--fork", "--mount-proc")


class Role:
    """A process of ``persia``; ``pid`` is its own, also in a container."""

    def __init__(self, *words: str, first: bool = False, **more: str) -> None:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        words = ("-m", "persia", *words)
        self.process: subprocess.Popen[str]
        if first or "LD_PRELOAD" in more:
            self.process = subprocess.Popen(
                [*(CONTAINER if first else ()), sys.executable, *words],
                env=environment(**more),
                text=True,
                **pipes,
            )
        else:
            self.process = Ready(*words, env=environment(**more), **pipes)
        self.pid = self.process.pid
        if first:
            self.pid = wait_until(functools.partial(_child, self.pid))

    def line(self, pattern: str) -> str:
        """The first group of the next line that has the pattern."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if found := re.search(pattern, line):
                return found[1] if found.groups() else line
        raise AssertionError(self.process.communicate(timeout=60)[1])

    def progresses(self) -> None:
        """Waits for its next line of progress."""
        assert self.process.stderr is not None
        if not any("samples/s" in line for line in self.process.stderr):
            raise AssertionError(self.process.communicate(timeout=60)[0])

    def end(self, *numbers: int) -> tuple[int, str]:
        """Its status after these signals, and what it wrote to stderr."""
        for number in numbers:
            os.kill(self.pid, number)
        _, messages = self.process.communicate(timeout=100)
        return self.process.returncode, messages


def _child(pid: int) -> int:
    """The process in the container, once it is Python and catches SIGTERM."""
    try:
        tasks = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return int(tasks[0]) if _catches(int(tasks[0])) else 0
    except (OSError, IndexError):
        return 0


def _catches(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"SigCgt:\s*(\w+)", status)
    return bool(found and int(found[1], 16) >> (signal.SIGTERM - 1) & 1)


@contextlib.contextmanager
def role(*words: str, first: bool = False, **more: str) -> Iterator[Role]:
    made = Role(*words, first=first, **more)
    try:
        yield made
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(made.pid, signal.SIGKILL)
        made.process.kill()
        made.process.communicate(timeout=60)


def tool(*words: str) -> int:
    """The status of a command that ends by itself."""
    return subprocess.run(
        [sys.executable, "-m", "persia", *words],
        env=environment(),
        stdout=subprocess.DEVNULL,
        timeout=60,
        check=False,
    ).returncode


@contextlib.contextmanager
def silent() -> Iterator[socket.socket]:
    """What takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(60)
        yield listener


def at(words: str, listener: socket.socket) -> list[str]:
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    return [word.replace("ADDRESS", address) for word in words.split()]


WAITING = [
    "feed synthetic --workers ADDRESS --timeout 600",
    "train synthetic --servers ADDRESS",
    "serve worker --servers ADDRESS --timeout 600",
]


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """See hanging.c."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    made = tmp_path_factory.mktemp("shim") / "hanging.so"
    command = [compiler, "-shared", "-fPIC", "-o", made, SHIM, "-ldl"]
    subprocess.run(command, check=True)
    return made


def hangs(shim: Path, call: str, path: str, when: Path) -> dict[str, str]:
    """Variables of a process whose calls of that path hang from some time."""
    return {
        "LD_PRELOAD": str(shim),
        "HANG_CALL": call,
        "HANG_PATH": path,
        "HANG_WHEN": str(when),
    }


@pytest.mark.parametrize(
    ("first", "early"),
    # The first process that waits: tests/roles_told/test_stops.py.
    [
        pytest.param(False, False, id=""),
        pytest.param(False, True, id="early", marks=pytest.mark.long),
        pytest.param(True, True, id="early, pid 1"),
    ],
)
@pytest.mark.parametrize("words", WAITING)
def test_what_waits_for_others(words: str, first: bool, early: bool) -> None:
    if first and subprocess.run([*CONTAINER, "true"], check=False).returncode:
        pytest.skip("may not make a namespace of processes")
    with (
        silent() as listener,
        role(*at(words, listener), first=first) as waiting,
    ):
        if early:
            wait_until(functools.partial(_catches, waiting.pid))
        else:
            listener.accept()
        status, messages = waiting.end(signal.SIGTERM)
        assert "Traceback" not in messages
        serves = words.startswith("serve") and not early
        assert status == (0 if serves else 143), messages


@pytest.mark.parametrize("words", WAITING[:2])
def test_ctrl_c_of_what_waits(words: str) -> None:
    with silent() as listener, role(*at(words, listener)) as waiting:
        listener.accept()
        status, messages = waiting.end(signal.SIGINT)
        assert (status, "Traceback" in messages) == (130, False), messages


@pytest.mark.parametrize(
    ("words", "number"),
    [
        ("serve ps --port 0 --token-file PATH", signal.SIGTERM),
        ("evaluate PATH", signal.SIGINT),
        pytest.param(
            "train --resume PATH", signal.SIGTERM, marks=pytest.mark.long
        ),
        pytest.param(
            "checkpoint ls PATH", signal.SIGTERM, marks=pytest.mark.long
        ),
    ],
)
def test_a_file_hangs_before_a_command_has_begun(
    tmp_path: Path, shim: Path, words: str, number: int
) -> None:
    when, path = tmp_path / "when", tmp_path / "input"
    path.mkdir()
    (path / "LATEST").write_text("step-1\n")
    when.touch()
    line = words.replace("PATH", str(path)).split()
    with role(*line, **hangs(shim, "open", "/input", when)) as waiting:
        there = tmp_path / "when.hangs"
        wait_until(lambda: there.exists() or waiting.process.poll(), 150)
        while waiting.process.poll() is None:  # at most two are needed
            os.kill(waiting.pid, number)
            time.sleep(0.1)
        status, messages = waiting.end()
        assert status == 128 + number, messages
        assert "Traceback" not in messages, messages


@pytest.mark.parametrize(
    ("level", "call"), [("process", "write"), ("disk", "fsync")]
)
def test_a_client_names_a_log_that_hangs(
    tmp_path: Path, shim: Path, level: str, call: str
) -> None:
    when, log = tmp_path / "when", tmp_path / "log"
    words = f"serve ps --port 0 --durable {level} --log {log}".split()
    with role(*words, **hangs(shim, call, "/log-", when)) as server:
        address = server.line(r"on (\S+)")

        def step(timeout: float) -> None:
            with persia.Store(
                persia.optim.SGD(lr=1.0), servers=address, timeout=timeout
            ) as store:
                rows = persia.nn.Embedding(4, 2, store=store, name="rows")
                rows(torch.arange(4)).sum().backward()
                store.flush()

        step(60)
        when.touch()
        # The claim of its stream, or its update.
        with pytest.raises(errors.DeadlineExceeded, match="log"):
            step(1)
        (found,) = ask([address], interval=0)
        assert found.stats["log_waits_ns"] > 0
        when.unlink()
        step(60)


@pytest.mark.parametrize(
    ("call", "grace"),
    [
        ("open", "0"),
        ("rename", "2"),
        ("fsync", "0"),
        pytest.param("open", "2", marks=pytest.mark.long),
        pytest.param("rename", "0", marks=pytest.mark.long),
        pytest.param("fsync", "2", marks=pytest.mark.long),
    ],
)
def test_a_server_saves_into_a_folder_that_hangs(
    tmp_path: Path, shim: Path, call: str, grace: str
) -> None:
    when = tmp_path / "when"
    flags = ["--port", "0", "--checkpoints", str(tmp_path / "folder")]
    flags += ["--save-on-exit", "job", "--grace", grace]
    broken = hangs(shim, call, "job-0-of-1", when)
    with role("serve", "ps", *flags, **broken) as server:
        server.line("serving shard")
        when.touch()
        status, messages = server.end(signal.SIGTERM)
        assert status == 1
        assert messages.startswith("persia: error[DeadlineExceeded]")
        assert "job" in messages and messages.count("\n") == 1
    # It is no checkpoint; the next life begins without.
    with role("serve", "ps", *flags, "--restore", "job", "--or-empty") as next:
        next.line("serving shard")
        assert next.end(signal.SIGTERM) == (0, "")


@pytest.mark.parametrize(
    ("level", "call"), [("process", "write"), ("disk", "fsync")]
)
def test_a_server_whose_log_hangs(
    tmp_path: Path, shim: Path, level: str, call: str
) -> None:
    when = tmp_path / "when"
    flags = ["--port", "0", "--grace", "2"]
    flags += ["--durable", level, "--log", str(tmp_path / "log")]
    broken = hangs(shim, call, "/log-", when)
    with role("serve", "ps", *flags, **broken) as server:
        address = server.line("serving shard").split()[-1]
        store = persia.Store(
            persia.optim.SGD(lr=1.0), servers=address, timeout=2
        )
        rows = persia.nn.Embedding(8, 4, store=store, name="rows")
        rows(torch.arange(8)).sum().backward()
        store.flush()
        total = rows(torch.arange(8)).sum()
        when.touch()
        total.backward()
        with pytest.raises(errors.DeadlineExceeded):
            store.flush()
        status, messages = server.end(signal.SIGTERM)
        assert "Traceback" not in messages, messages
        assert "not all was done" in messages
        assert status == 0
        store.close()


@pytest.mark.parametrize(
    ("level", "call", "error"),
    [
        ("process", "write", None),
        ("process", "write", errno.ENOSPC),
        pytest.param("process", "write", errno.EIO, marks=pytest.mark.long),
        pytest.param("disk", "fsync", None, marks=pytest.mark.long),
        ("disk", "fsync", errno.EIO),
    ],
)
def test_a_log_whose_disk_fails_for_a_while(
    tmp_path: Path, shim: Path, level: str, call: str, error: int | None
) -> None:
    """With one thread: updates wait, lookups continue; then nothing that was
    acknowledged is missing, also after a kill."""
    when = tmp_path / "when"
    flags = ["--durable", level, "--log", str(tmp_path / "log")]
    flags += ["--threads", "1", "--namespace", "n"]
    broken = hangs(shim, call, "/log-", when)
    if error is not None:
        broken["HANG_ERROR"] = str(error)

    class Client:
        def __init__(self, address: str, job: str, timeout: float) -> None:
            self.store = persia.Store(
                persia.optim.SGD(lr=1.0),
                servers=address,
                namespace="n",
                job=job,
                timeout=timeout,
            )
            self.rows = persia.nn.Embedding(
                8, 4, store=self.store, name="rows", init=0.0
            )

        def add(self, ids: torch.Tensor) -> None:
            (-self.rows(ids).sum()).backward()

        def get(self) -> torch.Tensor:
            with torch.no_grad():
                return self.rows(torch.arange(8))[:, 0]

    ids = torch.arange(8)
    with role("serve", "ps", "--port", "0", *flags, **broken) as server:
        address = server.line("serving shard").split()[-1]
        trainers = [Client(address, f"job{i}", 60) for i in range(2)]
        hurried = Client(address, "hurried", 1)
        watcher = Client(address, "watcher", 60)
        for client in (*trainers, hurried, watcher):
            client.add(ids)
            client.store.flush()
        late = -hurried.rows(ids[4:]).sum()
        when.touch()
        for client in trainers:  # these wait
            client.add(ids[:4])
        late.backward()
        with pytest.raises((errors.Unavailable, errors.DeadlineExceeded)):
            hurried.store.flush()
        for _ in range(5):
            assert (watcher.get() >= 4).all()
        assert tool("status", address, "--namespace", "n") == 0
        when.unlink()
        for client in trainers:
            client.store.flush()
            client.add(ids[:4])
            client.store.flush()
        for client in (*trainers, hurried):
            client.store.close()
        got = watcher.get()
        assert (got[:4] == 8).all()
        assert ((got[4:] == 4) | (got[4:] == 5)).all()
        watcher.store.close()
        server.process.kill()
    with role("serve", "ps", "--port", "0", *flags) as server:
        address = server.line("serving shard").split()[-1]
        assert torch.equal(Client(address, "new", 60).get(), got)


def test_a_second_signal_while_a_folder_hangs(
    tmp_path: Path, shim: Path
) -> None:
    when = tmp_path / "when"
    flags = ["--port", "0", "--checkpoints", str(tmp_path / "folder")]
    flags += ["--save-on-exit", "job", "--grace", FOREVER]
    broken = hangs(shim, "rename", "job-0-of-1", when)
    with role("serve", "ps", *flags, **broken) as server:
        server.line("serving shard")
        when.touch()
        os.kill(server.pid, signal.SIGTERM)
        server.line("stopping")
        # 1: the main thread was in a call that nothing interrupts.
        assert server.end(signal.SIGINT)[0] in (1, 130)


@contextlib.contextmanager
def training(*flags: str) -> Iterator[tuple[Role, Role, Role, Role]]:
    """A server, a worker, a loader and a trainer that has trained."""
    many = ["synthetic", "--samples", "100000000"]
    with role("serve", "ps", "--port", "0") as server:
        servers = server.line(r"on (\S+)$")
        worker_flags = ["--servers", servers, "--timeout", FOREVER]
        with role(
            *("serve", "worker", "--port", "0", *worker_flags, *flags)
        ) as worker:
            workers = worker.line(r"on (\S+)$")
            with (
                role(*("feed", *many, "--workers", workers, *flags)) as loader,
                role(
                    *("train", *many, "--servers", servers),
                    *("--workers", workers, *flags),
                ) as trainer,
            ):
                trainer.progresses()
                yield server, worker, loader, trainer


def test_all_roles_when_the_servers_are_gone() -> None:
    with training("--grace", "2") as (server, worker, loader, trainer):
        server.process.kill()
        server.process.wait()
        status, messages = worker.end(signal.SIGTERM)
        assert status == 0, messages
        assert loader.end(signal.SIGTERM)[0] == 143
        # Its step fails, or does not end.
        status, messages = trainer.end(signal.SIGTERM)
        assert status in (1, 143) and "Traceback" not in messages


@pytest.mark.long
def test_all_roles_at_once() -> None:
    with training("--grace", "4") as roles:
        for one in roles:
            os.kill(one.pid, signal.SIGTERM)
        statuses = [one.end()[0] for one in roles]
        assert statuses[:3] == [0, 0, 143]
        assert statuses[3] in (1, 143)


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)]
)
def test_a_trainer_saves(tmp_path: Path, number: int, status: int) -> None:
    root = tmp_path / "out"
    flags = ["--samples", "100000000", "--save", str(root)]
    with role("train", "synthetic", *flags) as trainer:
        trainer.progresses()
        assert trainer.end(number)[0] == status
    assert (root / "LATEST").exists()


def test_a_trainer_saves_into_a_folder_that_hangs(
    tmp_path: Path, shim: Path
) -> None:
    when, root = tmp_path / "when", tmp_path / "out"
    flags = ["--samples", "100000000", "--save", str(root), "--grace", "2"]
    broken = hangs(shim, "rename", "out/", when)
    with role("train", "synthetic", *flags, **broken) as trainer:
        trainer.progresses()
        when.touch()
        status, messages = trainer.end(signal.SIGTERM)
        assert status == 143
        assert "error[DeadlineExceeded]" in messages
        # Else the batch has not ended in time.
        assert str(root) in messages or not (tmp_path / "when.hangs").exists()
    assert not (root / "LATEST").exists()


def test_launch_ends_what_does_not_end(tmp_path: Path, shim: Path) -> None:
    """All within one grace, though command, worker and server all hang."""
    when = tmp_path / "when"
    ignores = "import signal, time; signal.signal(15, signal.SIG_IGN);"
    ignores += "print('ready', flush=True); time.sleep(600)"
    flags = [
        "--embedding-workers",
        "1",
        "--checkpoints",
        str(tmp_path / "folder"),
    ]
    flags += ["--save-on-exit", "job", "--grace", "6"]
    broken = hangs(shim, "rename", "job-0-of-1", when)
    with role(
        *("launch", *flags, "--", sys.executable, "-c", ignores), **broken
    ) as launch:
        launch.line("ready")
        when.touch()
        status, messages = launch.end(signal.SIGTERM)
        assert status in (137, 143)
        # The server ends, or is ended, when the time of all is over.
        assert "killing job\n" in messages
        assert re.search(r"killing ps0|error\[DeadlineExceeded\]", messages)


def test_a_trainer_that_waits_for_a_batch(tmp_path: Path) -> None:
    """No loader sends any. It saves what it has at once."""
    root = tmp_path / "out"
    flags = ["--port", "0", "--checkpoints", str(tmp_path)]
    with role("serve", "ps", *flags) as server:
        servers = server.line(r"on (\S+)$")
        flags = ["--port", "0", "--servers", servers]
        with role("serve", "worker", *flags) as worker:
            workers = worker.line(r"on (\S+)$")
            flags = ["--servers", servers, "--workers", workers]
            flags += ["--save", str(root), "--grace", FOREVER]
            with role("train", "synthetic", *flags) as trainer:

                def waits() -> bool:
                    (found,) = ask_embedding([workers], interval=0)
                    return bool(found.stats and found.stats["ranks"])

                wait_until(waits)
                assert trainer.end(signal.SIGTERM)[0] == 143
    assert (root / "LATEST").exists()
