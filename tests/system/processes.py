"""Helpers of tests that start processes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

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
