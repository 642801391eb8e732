"""Child processes with what they print, and what is below them."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import os
import signal
import subprocess
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO

from persia.errors import InvalidArgument

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_LAST_LINES = 20
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl failed")


def end_with_parent(number: int = signal.SIGTERM) -> None:
    """The kernel sends this process the signal when its parent dies."""
    _prctl(_PR_SET_PDEATHSIG, number)


def become_reaper() -> None:
    """What children of this process leave behind becomes its own."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def exit_status(status: int) -> int:
    """Of waitpid(), as a shell has it: 128 + n for signal n."""
    code = os.waitstatus_to_exitcode(status)
    return 128 - code if code < 0 else code


class Process:
    """A child of the supervisor, with what it prints."""

    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        self.name = name
        self.command = list(command)
        self.status: int | None = None  # None: it runs
        self.last: collections.deque[str] = collections.deque(
            maxlen=_LAST_LINES
        )
        self.rest: dict[int, bytes] = {}  # descriptor -> unfinished line
        mine = os.getpid()

        def begin() -> None:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
            end_with_parent()
            if os.getppid() != mine:
                os._exit(1)

        server = name != "job"
        try:
            self.popen = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL if server else None,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=dict(environment),
                start_new_session=True,
                preexec_fn=begin,
            )
        except OSError as error:
            raise InvalidArgument(
                f"{command[0]} cannot be started: {error.strerror}"
            ) from None

    @property
    def pid(self) -> int:
        return self.popen.pid

    def pipes(self) -> Iterable[IO[bytes]]:
        assert self.popen.stdout is not None
        assert self.popen.stderr is not None
        return self.popen.stdout, self.popen.stderr

    def signal(self, number: int) -> None:
        """To it and the others of its process group."""
        if self.status is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    def end(self) -> str:
        """How it ended, in words."""
        assert self.status is not None
        if self.status > 128:
            with contextlib.suppress(ValueError):
                name = signal.Signals(self.status - 128).name
                return f"was ended by {name}"
        return f"exited with status {self.status}"

    def story(self, what: str) -> str:
        """What became of it, and its last lines."""
        lines = [f"{self.name} (pid {self.pid}) {what}"]
        if self.last:
            lines[0] += "; its last lines:"
            lines += [f"  {line}" for line in self.last]
        return "\n".join(lines)


def kill(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def descendants(root: int, without: Collection[int] = ()) -> list[int]:
    """All processes below one, whatever their sessions, but those that have
    ended, and ``without`` some and what is below these."""
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) not in without:
            with contextlib.suppress(OSError, ValueError):
                stat = Path(f"/proc/{name}/stat").read_text()
                state, parent = stat.rpartition(")")[2].split()[:2]
                if state not in "ZX":
                    parents[int(name)] = int(parent)
    found: list[int] = []
    level = {root}
    while level:
        level = {pid for pid, parent in parents.items() if parent in level}
        found += sorted(level)
    return found
