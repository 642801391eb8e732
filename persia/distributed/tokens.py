"""Files of tokens: of servers, with a line for each.

    ROLE[,ROLE...] NAME sha256:DIGEST [LAST DAY] [tables=...] [rate=...] \
[calls=...]

A server needs the digest alone, so a file that is read by others gives no
token away. All lines of a name are valid at once: a new token is given out
while the old one still is.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import secrets
from collections.abc import Sequence
from pathlib import Path

from persia import _core
from persia.base.output import new_file, new_files
from persia.errors import InvalidArgument, StorageError

_HEAD = "# ROLES NAME TOKEN [LAST DAY] [tables=] [rate=] [calls=]"


@dataclasses.dataclass(frozen=True)
class Line:
    """A token, and what it is for.

    Attributes:
        roles: of ``ROLES``.
        name: of who has it; several lines may be of one.
        secret: "sha256:" and 64 digits, or the token itself.
        options: the last day, and limits.
    """

    roles: tuple[str, ...]
    name: str
    secret: str = dataclasses.field(repr=False)
    options: tuple[str, ...] = ()

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
) -> str:
    """Adds a line to a file, which is made if it is not there.

    Returns:
        The token: it is in no file yet.
    """
    before = read_lines(path) if path.exists() else []
    token = secrets.token_hex(32)
    line = Line(tuple(roles), name, _digest(token), tuple(options))
    _write(path, [*before, line.until(last_day)])
    return token


def rotate(path: Path, name: str, days: int, last_day: str | None) -> str:
    """Gives a name a new token; its others are valid for some days more.

    Args:
        path: of the file.
        name: whose token.
        days: for which the old ones are valid, today included.
        last_day: of the new one; None: it has none.

    Returns:
        The token: it is in no file yet.

    Raises:
        InvalidArgument: the file has no such name.
    """
    before = read_lines(path)
    last = next((one for one in before[::-1] if one.name == name), None)
    if last is None:
        raise InvalidArgument(
            f"{path} has no token of {name!r}, but of "
            + ", ".join(sorted({one.name for one in before}))
        )
    today = datetime.datetime.now(datetime.UTC).date()
    end = str(today + datetime.timedelta(days=days - 1))
    token = secrets.token_hex(32)
    new = dataclasses.replace(last, secret=_digest(token)).until(last_day)
    kept = [
        one.until(min(one.last_day or end, end)) if one.name == name else one
        for one in before
        if one.name != name or not _is_over(one, today)
    ]
    _write(path, [*kept, new])
    return token


def keep(path: Path, token: str) -> None:
    """Writes a token into a file of its own, for a client."""
    new_files([(path, token + "\n", 0o600)])


def _digest(token: str) -> str:
    return f"sha256:{hashlib.sha256(token.encode()).hexdigest()}"


def _is_over(line: Line, today: datetime.date) -> bool:
    return line.last_day is not None and line.last_day[:10] < str(today)


def _write(path: Path, lines: Sequence[Line]) -> None:
    text = "\n".join([_HEAD, *map(str, lines), ""])
    lines_of(text)
    mode = path.stat().st_mode & 0o777 if path.exists() else 0o600
    if path.exists():
        with new_file(path) as file:
            file.write(text)
        return
    new_files([(path, text, mode)])
