"""SIGTERM ends a process within its grace, whatever its peers do: also where
it is the first process of a container."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from persia import _core
from persia.data import Sender
from tests.ready import Ready
from tests.remote import Servers
from tests.roles_told.gate import Gate
from tests.roles_told.job import Trainer, send
from tests.system.processes import environment
from tests.test_roles_failures import wait_for

if not _core.GRPC[0].isdigit():
    pytest.skip("built without gRPC", allow_module_level=True)

pytestmark = [pytest.mark.timeout(120), pytest.mark.slow]

GRACE, TIMEOUT = 2, 60
SOON = 20  # seconds: more than the grace, less than the timeout


class Command:
    """A command of persia; what it prints."""

    def __init__(self, *arguments: str, before: tuple[str, ...] = ()) -> None:
        words = ("-m", "persia", *arguments)
        how = {
            "env": environment(OMP_NUM_THREADS="1", PYTHONUNBUFFERED="1"),
            "stdout": subprocess.PIPE,
            "stderr": subprocess.STDOUT,
        }
        self.process: subprocess.Popen[str] = (
            subprocess.Popen(
                [*before, sys.executable, *words], text=True, **how
            )
            if before or "launch" in arguments
            else Ready(*words, **how)
        )
        self.output = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output += line

    def find(self, pattern: str) -> str:
        """The first group in what it printed."""
        wait_for(lambda: re.search(pattern, self.output), 40)
        found = re.search(pattern, self.output)
        assert found
        return found[1]

    def stop(self, pid: int | None = None) -> int:
        """Its exit status after SIGTERM."""
        os.kill(pid or self.process.pid, signal.SIGTERM)
        status = self.process.wait(SOON)
        self._reader.join()
        return status

    def kill(self) -> None:
        """Whatever it does."""
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def started(*arguments: str, **more: tuple[str, ...]) -> Iterator[Command]:
    """A command that does not outlive the block."""
    command = Command(*arguments, **more)
    try:
        yield command
    finally:
        command.kill()


class Away:
    """Workers in another process, as the other helpers take them."""

    def __init__(self, *addresses: str) -> None:
        self.addresses = list(addresses)


@pytest.mark.parametrize("how", ["gone", "silent"])
@pytest.mark.parametrize("while_", ["idle", "lookups", "gradients"])
def test_a_worker_whose_servers_are_away(how: str, while_: str) -> None:
    """They are gone, or do not answer, while it has nothing to do, looks
    batches up, or pushes gradients."""
    with contextlib.ExitStack() as stack:
        servers = stack.enter_context(contextlib.closing(Servers(2)))
        gates = [
            stack.enter_context(contextlib.closing(Gate(address)))
            for address in servers.addresses
        ]
        worker = stack.enter_context(
            started(
                *("serve", "worker", "--port", "0", "--grace", str(GRACE)),
                *("--servers", ",".join(gate.address for gate in gates)),
                *("--timeout", str(TIMEOUT)),
            )
        )
        address = worker.find(r"serving .* on (\S+)")
        trainer = Trainer(servers, Away(address), timeout=60)  # type: ignore[arg-type]
        sender = Sender([address], timeout=60)
        send(sender, 0, 8)
        trainer.open(staleness=1)
        assert trainer.train(2) == 2
        trainer.flush()
        one = trainer.next()
        if how == "gone":
            for shard in (0, 1):
                servers.kill(shard)
        else:
            for gate in gates:
                gate.shut()
        if while_ == "lookups":
            one = None  # the next one is looked up
        elif while_ == "gradients":
            assert one is not None
            threading.Thread(
                target=with_no_error, args=(trainer, one), daemon=True
            ).start()
        time.sleep(1)
        assert worker.stop() == 0
        sender._core.close(False)


def with_no_error(trainer: Trainer, one: object) -> None:
    """It may never end."""
    with contextlib.suppress(Exception):
        trainer.step(one)  # type: ignore[arg-type]
        trainer.store.flush()


FIRST = ("unshare", "--pid", "--fork", "--kill-child")


def can_unshare() -> bool:
    """Whether a process may be the first one of its own namespace."""
    try:
        return subprocess.run([*FIRST, "true"], check=False).returncode == 0
    except OSError:
        return False


def child_of(pid: int) -> int:
    """The only one."""
    path = Path(f"/proc/{pid}/task/{pid}/children")
    wait_for(lambda: path.read_text().split(), 20)
    return int(path.read_text().split()[0])


WAITING = {
    "worker": "serve worker --port 0 --servers {silent}",
    "feed": "feed synthetic --workers {silent}",
    "feed-job": "feed synthetic --job a --workers {silent}",
    "feed-parts": "feed synthetic --job a --parts 2 --workers {silent}",
    "train": "train synthetic --servers {silent}",
    "train-roles": "train synthetic --servers {servers} --workers {silent}",
}


@pytest.mark.parametrize("command", WAITING.values(), ids=WAITING)
def test_the_first_process_of_a_container(command: str) -> None:
    """It waits for peers that do not answer."""
    if not can_unshare():
        pytest.skip("needs the right to make a namespace of processes")
    with contextlib.ExitStack() as stack:
        servers = stack.enter_context(contextlib.closing(Servers(1)))
        silent = stack.enter_context(
            contextlib.closing(Gate(servers.addresses[0]))
        )
        silent.shut()
        names = {"silent": silent.address, "servers": servers.text}
        one = stack.enter_context(
            started(*command.format(**names).split(), before=FIRST)
        )
        pid = child_of(one.process.pid)
        time.sleep(6)  # it has been imported, and waits
        assert one.process.poll() is None, one.output
        one.stop(pid)
        assert "Traceback" not in one.output
