"""What a process says besides its result: lines of text, or of JSON.

Commands set it up by ``--log-level`` and ``--log-format``. Elsewhere a line
is printed, and Python's ``logging`` does what its user decided.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, TextIO

from persia.errors import StorageError, flagged
from persia.redaction import shown

Level = Literal["debug", "info", "warning", "error"]
Format = Literal["text", "json"]

_ROOT = logging.getLogger("persia")
# Of this process. Lines of commands are those of users who asked for them;
# warnings of the library are on stderr.
_COMMAND = logging.getLogger("persia.command")


class _Handler(logging.Handler):
    """Writes to the streams that the process has when a line is written."""

    def __init__(self, form: Format, results: bool) -> None:
        super().__init__()
        self.form = form
        self.results = results

    def emit(self, record: logging.LogRecord) -> None:
        own = record.name == _COMMAND.name
        low = record.levelno <= logging.INFO
        aside = self.results or getattr(record, "aside", False)
        out = sys.stdout if own and low and not aside else sys.stderr
        text = flagged(shown(record.getMessage()))
        if self.form == "json":
            fields = {"message": text} | _about
            fields |= getattr(record, "fields", {})
            text = _line(record.levelname.lower(), record.created, fields)
        elif own and not low:
            text = f"{record.levelname.lower()}: {text}"
        with contextlib.suppress(OSError, ValueError):
            print(text, file=out, flush=True)


@contextlib.contextmanager
def said(
    level: Level = "info",
    form: Format = "text",
    results: bool = False,
    audits: Path | None = None,
) -> Iterator[None]:
    """Lines of this process within the block.

    Args:
        level: the least important ones that are written.
        form: "text", or "json": objects with time (UTC, ISO 8601), level,
            message and fields.
        results: stdout is for a result alone; all lines are on stderr.
        audits: the file of :func:`audit`.

    Raises:
        StorageError: that cannot be written.
    """
    if audits is not None:
        _audits.append(_opened(audits))
    handler, before = _Handler(form, results), _ROOT.level
    _forms.append(form)
    about = dict(_about)
    others = _ROOT.handlers[:]
    shows, formats = warnings.showwarning, warnings.formatwarning
    warnings.formatwarning = _format_warning
    _ROOT.handlers[:] = [handler]
    _ROOT.setLevel(level.upper())
    if form == "json":
        warnings.showwarning = _warned
    try:
        yield
    finally:
        warnings.showwarning, warnings.formatwarning = shows, formats
        _ROOT.handlers[:] = others
        _ROOT.setLevel(before)
        _about.clear()
        _about.update(about)
        if audits is not None:
            os.close(_audits.pop())


def describe(**about: Any) -> None:
    """What each object of JSON says of this process, such as its role, until
    the block of :func:`said` ends."""
    _about.update(about)


def audit(event: str, **fields: Any) -> None:
    """A line in the file of audits, if there is one: who changed what."""
    if not _audits:
        return
    line = _line("info", time.time(), {"event": event} | _about | fields)
    with contextlib.suppress(OSError):  # what is audited has happened
        os.write(_audits[-1], f"{line}\n".encode())


def lines_of_core() -> dict[str, Any]:
    """Where the core writes its lines, as arguments of what it serves."""
    return {
        "lines": 2,
        "lines_json": _forms[-1:] == ["json"],
        "audit": _audits[-1] if _audits else 0,
    }


def say(
    text: str, level: Level = "info", *, aside: bool = False, **fields: Any
) -> None:
    """A line of a command: on stdout, warnings and errors on stderr.

    Args:
        text: for people.
        level: how important it is.
        aside: it is on stderr in any case.
        fields: for programs; they are written as JSON alone.
    """
    number = logging.getLevelNamesMapping()[level.upper()]
    if any(isinstance(h, _Handler) for h in _ROOT.handlers):
        extra = {"fields": fields, "aside": aside}
        _COMMAND.log(number, "%s", text, extra=extra)
    else:
        low = number <= logging.INFO
        out: TextIO = sys.stdout if low and not aside else sys.stderr
        text = flagged(text)
        print(text if low else f"{level}: {text}", file=out, flush=True)


def error_line(code: str, text: str) -> str | None:
    """The line of an error that ends the process, as JSON; None where lines
    of this process are text."""
    if _forms[-1:] != ["json"]:
        return None
    fields = {"message": text} | _about | {"code": code}
    return _line("error", time.time(), fields)


def _opened(path: Path) -> int:
    try:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        return os.open(path, flags, 0o640)
    except OSError as error:
        raise StorageError(
            f"{path}: audits cannot be written there: {error.strerror}"
        ) from None


# Of the commands of this process, in their order.
_forms: list[Format] = []
_audits: list[int] = []  # file descriptors
_about: dict[str, Any] = {}


def _warned(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    _ROOT.warning("%s", message)


def _format_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    line: str | None = None,
) -> str:
    """Users of commands have no line of Python to look at."""
    return f"warning: {flagged(shown(str(message)))}\n"


def _line(level: str, at: float, fields: dict[str, Any]) -> str:
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at))
    return json.dumps(
        {
            "time": f"{whole}.{int(at % 1 * 1000):03d}Z",
            "level": level,
        }
        | fields,
        default=str,
    )
