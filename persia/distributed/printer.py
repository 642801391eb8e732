"""The lines of several processes in one terminal."""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Iterable
from typing import TextIO

from persia.errors import flagged


class Unprinted(Exception):
    """What the processes say cannot be written."""

    def __init__(self, stream: str, error: OSError) -> None:
        super().__init__(f"{stream} cannot be written: {error.strerror}")
        unread = isinstance(error, BrokenPipeError)
        self.status = 128 + signal.SIGPIPE if unread else 1


class Printer:
    """Lines with the name of who wrote them in front."""

    _COLOURS = (36, 33, 32, 35, 34, 31)

    def __init__(self, names: Iterable[str]) -> None:
        self.numbers = {name: i for i, name in enumerate(names)}
        self.width = max(map(len, self.numbers))
        self.lost: Unprinted | None = None  # the first line that was lost
        plain = bool(os.environ.get("NO_COLOR"))
        self.coloured = {
            stream: stream is not None and stream.isatty() and not plain
            for stream in (sys.stdout, sys.stderr)
        }

    def line(self, name: str, text: str, error: bool) -> None:
        stream = sys.stderr if error else sys.stdout
        label = f"{name:<{self.width}} |"
        if self.coloured[stream]:
            number = self.numbers[name]
            colour = self._COLOURS[number % len(self._COLOURS)]
            label = f"\033[{colour}m{label}\033[0m"
        self._write(stream, f"{label} {text}\n")

    def tell(self, text: str) -> None:
        """A word of our own."""
        self._write(sys.stderr, f"persia launch: {flagged(text)}\n")

    def _write(self, stream: TextIO | None, text: str) -> None:
        fd = _descriptor(stream)
        if stream is None or fd is None:
            return
        data = text.encode(stream.encoding or "utf-8", "backslashreplace")
        try:
            _write_all(fd, data)
        except OSError as error:
            name = "stderr" if stream is sys.stderr else "stdout"
            self.lost = self.lost or Unprinted(name, error)


def _descriptor(stream: TextIO | None) -> int | None:
    """None: it was closed by who started us (>&-), or is kept in memory,
    where what this process, a fork, writes would be lost."""
    if stream is None:
        return None
    try:
        return stream.fileno()
    except (OSError, ValueError):
        return None


def _write_all(fd: int, data: bytes) -> None:
    """Writes all, even if the descriptor does not block: who shares it with us
    may change that at any time, so it is waited for, and left as it is."""
    left = memoryview(data)
    while left:
        try:
            left = left[os.write(fd, left) :]
        except BlockingIOError:
            room = select.poll()
            room.register(fd, select.POLLOUT)
            room.poll()
