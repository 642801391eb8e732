"""Helpers of tests that start processes."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from tests.ready import Ready

ROOT = Path(__file__).parents[2]

#: An environment variable by which a test finds whatever it has started,
#: however far removed.
MARK = "PERSIA_TEST_MARK"


def environment(mark: str = "", **more: str) -> dict[str, str]:
    """For a process that uses this source tree."""
    base = {k: v for k, v in os.environ.items() if "PERSIA" not in k}
    paths = {"PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    return base | paths | {MARK: mark} | more


def marked(mark: str) -> dict[int, str]:
    """The processes with a mark: pid -> command line."""
    found = {}
    wanted = f"{MARK}={mark}\0".encode()
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        try:
            if wanted in (folder / "environ").read_bytes() + b"\0":
                line = (folder / "cmdline").read_bytes()
                if line:  # else it is a zombie
                    found[int(folder.name)] = line.replace(
                        b"\0", b" "
                    ).decode()
        except OSError:
            continue
    return found


def is_there(pid: int) -> bool:
    """Whether it runs: one that has ended stays until its parent looks, and
    the first process of a container may never do."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


T = TypeVar("T")


def wait_until(condition: Callable[[], T], seconds: float = 60.0) -> T:
    """What the condition gives as soon as it is true; fails at the end."""
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds} s: {condition}")
        time.sleep(0.02)


def ranks(world: int, *words: str, timeout: float = 150) -> tuple[int, str]:
    """Runs the ranks of a job as torchrun does, but for its own process. Where
    one fails, it ends the others.

    Args:
        world: how many ranks.
        words: what follows the name of the interpreter.
        timeout: seconds.

    Returns:
        The first status that is not 0, else 0, and what they all print.
    """
    store = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )
    names = {
        "GROUP_RANK": "0",
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "OMP_NUM_THREADS": "1",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_RUN_ID": str(uuid.uuid4()),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": str(world),
    }
    with tempfile.TemporaryFile("w+") as output:
        every = [
            Ready(
                *words,
                env=environment(RANK=str(i), LOCAL_RANK=str(i), **names),
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            for i in range(world)
        ]

        def over() -> bool:
            statuses = [one.poll() for one in every]
            return None not in statuses or any(statuses)

        try:
            wait_until(over, timeout)
            status = next((n for n in (r.poll() for r in every) if n), 0)
        finally:
            for one in every:
                one.kill()
                one.wait()
        output.seek(0)
        return status, output.read()


def freeze(pid: int) -> None:
    """Stops a process; none of its threads runs when this returns."""
    os.kill(pid, signal.SIGSTOP)
    threads = Path(f"/proc/{pid}/task")
    wait_until(
        lambda: all(
            (one / "stat").read_text().rpartition(")")[2].split()[0] == "T"
            for one in threads.iterdir()
        )
    )
