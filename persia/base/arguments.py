"""The arguments of this process, as other users of the machine see them."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Sequence
from pathlib import Path

from persia.redaction import shown

_START, _END = 47, 48  # of arg_start and arg_end in /proc/PID/stat, from 0
_OPTIONS = (b"--token",)


def hide_secrets() -> None:
    """Overwrites keys in URLs, and tokens, in ``/proc/PID/cmdline``. That a
    process began with them cannot be changed, so files and variables of the
    environment are better places."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path("/proc/self/stat").read_text().rpartition(") ")[2]
        # The first two fields are gone.
        start, end = (int(fields.split()[i - 2]) for i in (_START, _END))
        words = Path("/proc/self/cmdline").read_bytes().split(b"\0")
        if not 0 < start < end or len(b"\0".join(words)) != end - start:
            return
        hidden = b"\0".join(_hidden(words))
        if hidden != b"\0".join(words):
            ctypes.memmove(start, hidden, end - start)


def _hidden(words: Sequence[bytes]) -> list[bytes]:
    """The words, each as long as it was."""
    found = []
    for before, word in zip((b"", *words), words, strict=False):
        name, equals, _ = word.partition(b"=")
        if before in _OPTIONS:
            text = b""
        elif name in _OPTIONS and equals:
            text = name + equals
        else:
            text = shown(word.decode("utf-8", "surrogateescape")).encode(
                "utf-8", "surrogateescape"
            )
            text = word if len(text) > len(word) else text
        found.append(text.ljust(len(word), b"*" if text != word else b" "))
    return found
