"""Files of tokens: of servers, with a line for each.

    ROLE[,ROLE...] NAME sha256:DIGEST [LAST DAY] [tables=...] [rate=...] \
[calls=...]

A server needs the digest alone, so a file that is read by others gives no
token away. All lines of a name are valid at once: a new token is given out
while the old one still is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import fcntl
import hashlib
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from persia import _core
from persia.base.logs import say
from persia.base.output import new_file
from persia.errors import InvalidArgument, StorageError

#: Seconds until servers have looked at a file that has changed.
TAKEN_S = 15.0
_HEAD = "# ROLES NAME TOKEN [LAST DAY] [tables=] [rate=] [calls=]"


@dataclasses.dataclass(frozen=True)
class Line:
    """A token, and what it is for.

    Attributes:
        roles: of ``ROLES``.
        name: of its owner; several lines may have the same.
        secret: "sha256:" and 64 digits, or the token itself.
        options: the last day, and limits.
    """

    roles: tuple[str, ...]
    name: str
    secret: str = dataclasses.field(repr=False)
    options: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        fields = (self.name, *self.roles, *self.options)
        wrong = next((f for f in fields if f.split() != [f]), None)
        if wrong is not None:
            raise InvalidArgument(
                f"{wrong!r}: the name, the roles and the limits of a token "
                "are words without spaces"
            )

    def __str__(self) -> str:
        fields = (",".join(self.roles), self.name, self.secret, *self.options)
        return " ".join(fields)

    @property
    def last_day(self) -> str | None:
        """On which it is valid, or the time until which it is."""
        return next((o for o in self.options if o[0].isdigit()), None)

    def until(self, last_day: str | None) -> Line:
        """The same token, valid until then."""
        others = tuple(o for o in self.options if not o[0].isdigit())
        first = () if last_day is None else (last_day,)
        return dataclasses.replace(self, options=first + others)


def check(text: str) -> None:
    """Raises InvalidArgument if a line is malformed."""
    try:
        _core.check_tokens(text)
    except ValueError as error:
        if isinstance(error, InvalidArgument):
            raise
        raise InvalidArgument("tokens: need text without NUL") from None


def lines_of(text: str) -> list[Line]:
    """The lines of a file.

    Raises:
        InvalidArgument: one of them is malformed; the text says which.
    """
    check(text)
    found = []
    for line in text.split("\n"):
        fields = line.split()
        if fields and not fields[0].startswith("#"):
            roles, name, secret, *options = fields
            found.append(
                Line(tuple(roles.split(",")), name, secret, tuple(options))
            )
    return found


def read_lines(path: Path) -> list[Line]:
    """Those of a file."""
    try:
        return lines_of(path.read_text(encoding="ascii"))
    except (OSError, UnicodeDecodeError) as error:
        raise StorageError(f"tokens: {path}: {error}") from None


def add(
    path: Path,
    name: str,
    roles: Sequence[str],
    last_day: str | None = None,
    options: Sequence[str] = (),
    to: Path | None = None,
) -> str:
    """Adds a line to a file, which is made if it is not there.

    Args:
        path: of the file.
        name: whose token.
        roles: what it is for.
        last_day: of the token; None: it has none.
        options: limits.
        to: a file for the token, which its owner alone can read.

    Returns:
        The token.

    Raises:
        InvalidArgument: a name, role or limit is malformed.
        StorageError: a file cannot be written; then neither has changed.
    """
    token = secrets.token_hex(32)
    line = Line(tuple(roles), name, _digest(token), tuple(options))
    with _client(path, to, token), _alone(path):
        before = read_lines(path) if path.exists() else []
        _write(path, [*before, line.until(last_day)])
    return token


def rotate(
    path: Path,
    name: str,
    days: int,
    last_day: str | None,
    to: Path | None = None,
) -> str:
    """Gives a name a new token; its others are valid for some days more.

    Args:
        path: of the file.
        name: whose token.
        days: for which the old ones are valid, today included.
        last_day: of the new one; None: it has none.
        to: a file for the new one, as of :func:`add`. It is written
            :data:`TAKEN_S` later: a client that reads it earlier would show
            a token that servers do not know yet.

    Returns:
        The token.

    Raises:
        InvalidArgument: the file has no such name.
        StorageError: a file cannot be written; then neither has changed.
    """
    token = secrets.token_hex(32)
    with _client(path, to, token):
        with _alone(path):
            _replace(path, name, days, last_day, _digest(token))
        if to is not None:
            say(f"{to} changes in {TAKEN_S:g} s, after {path}", aside=True)
            time.sleep(TAKEN_S)
    return token


def _replace(
    path: Path, name: str, days: int, last_day: str | None, digest: str
) -> None:
    before = read_lines(path)
    last = next((one for one in before[::-1] if one.name == name), None)
    if last is None:
        raise InvalidArgument(
            f"{path} has no token of {name!r}, but of "
            + ", ".join(sorted({one.name for one in before}))
        )
    today = datetime.datetime.now(datetime.UTC).date()
    end = str(today + datetime.timedelta(days=days - 1))
    new = dataclasses.replace(last, secret=digest).until(last_day)
    kept = [
        one.until(min(one.last_day or end, end)) if one.name == name else one
        for one in before
        if one.name != name or not _is_over(one, today)
    ]
    _write(path, [*kept, new])


@contextlib.contextmanager
def _client(path: Path, to: Path | None, token: str) -> Iterator[None]:
    """The file of a client: it changes if the block ends well."""
    if to is None:
        yield
        return
    with new_file(to, inputs=[path], mode=0o600) as file:
        file.write(token + "\n")
        file.flush()
        yield


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """One change of a file at a time: none is lost."""
    try:
        folder = os.open(Path(os.path.realpath(path)).parent, os.O_RDONLY)
    except OSError as error:
        raise StorageError(f"tokens: {path}: {error}") from None
    try:
        with contextlib.suppress(OSError):  # storage that locks no folders
            fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _digest(token: str) -> str:
    return f"sha256:{hashlib.sha256(token.encode()).hexdigest()}"


def _is_over(line: Line, today: datetime.date) -> bool:
    return line.last_day is not None and line.last_day[:10] < str(today)


def _write(path: Path, lines: Sequence[Line]) -> None:
    text = "\n".join([_HEAD, *map(str, lines), ""])
    lines_of(text)
    with new_file(path, mode=None if path.exists() else 0o600) as file:
        file.write(text)
