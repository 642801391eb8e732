"""Files of tokens: of servers, with a line for each.

    ROLE[,ROLE...] NAME sha256:DIGEST [LAST DAY] [tables=...] [rate=...] \
[calls=...]

A server needs the digest alone, so a file that is read by others gives no
token away. All lines of a name are valid at once: a new token is given out
while the old one still is. What else the file has, such as comments, stays.

In the place of a digest a line may have ``peer:`` and a name that a client's
certificate has: a URI, or ``dns:`` and a host.
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
from typing import Any

from persia import _core
from persia.base.logs import audit, say
from persia.base.output import new_file
from persia.errors import InvalidArgument, StorageError

#: Seconds until servers have looked at a file that has changed.
TAKEN_S = 15.0
#: In place of a last day: the token has no end.
NEVER = "never"
_PEER = "peer:"
_HEAD = "# ROLES NAME TOKEN [LAST DAY] [tables=] [rate=] [calls=]"


@dataclasses.dataclass(frozen=True)
class Line:
    """A token, and what it is for.

    Attributes:
        roles: of ``ROLES``.
        name: of its owner; several lines may have the same.
        secret: "sha256:" and 64 digits, the token itself, or "peer:" and a
            name in a certificate.
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

    @property
    def peer(self) -> str | None:
        """The name in a certificate; None: it is a token."""
        found = self.secret.removeprefix(_PEER)
        return None if found == self.secret else found

    @property
    def told(self) -> dict[str, Any]:
        """What may be shown of it, as JSON has it."""
        return {
            "name": self.name,
            "roles": self.roles,
            "until": self.last_day,
            "peer": self.peer,
            "options": self.until(None).options,
        }

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
    return [one for line in _split(text) if (one := _line_of(line))]


def _split(text: str) -> list[str]:
    """Its lines, as the core has them: a form feed begins no line."""
    return text.removesuffix("\n").split("\n")


def _line_of(text: str) -> Line | None:
    """None: it is empty, or a comment. It was checked."""
    fields = text.split()
    if not fields or fields[0].startswith("#"):
        return None
    roles, name, secret, *options = fields
    return Line(tuple(roles.split(",")), name, secret, tuple(options))


def read_lines(path: Path) -> list[Line]:
    """Those of a file."""
    return lines_of(_read(path))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
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
        InvalidArgument: a name, role or limit is malformed; the last day has
            passed; or `to` holds the token of another name.
        StorageError: a file cannot be written; then neither has changed.
    """
    token = secrets.token_hex(32)
    line = Line(tuple(roles), name, _digest(token), tuple(options))
    line = line.until(_asked(last_day, None))
    with _client(path, to, token), _alone(path):
        before = _read(path) if path.exists() else f"{_HEAD}\n"
        _check_client(before, name, to)
        _write(path, [*_split(before), line])
        audit("token added", file=path, **line.told)
    return token


def add_peer(
    path: Path,
    name: str,
    roles: Sequence[str],
    peer: str,
    last_day: str | None = None,
    options: Sequence[str] = (),
) -> None:
    """Adds a line for a certificate, as :func:`add` does for a token.

    Args:
        peer: a URI that the certificate has, or ``dns:`` and a host.

    Raises:
        InvalidArgument, StorageError: as :func:`add`.
    """
    line = Line(tuple(roles), name, _PEER + peer, tuple(options))
    line = line.until(_asked(last_day, None))
    with _alone(path):
        before = _read(path) if path.exists() else f"{_HEAD}\n"
        _write(path, [*_split(before), line])
        audit("token added", file=path, **line.told)


def rotate(
    path: Path,
    name: str,
    days: int,
    last_day: str | None,
    to: Path | None = None,
) -> str:
    """Gives a name a new token; its others are valid for some days more. Its
    lines for certificates stay.

    Args:
        path: of the file.
        name: whose token.
        days: for which the old ones are valid, of 24 hours from now.
        last_day: of the new one; None: that of the newest one; `NEVER`: it
            has none.
        to: a file for the new one, as of :func:`add`. It is written
            :data:`TAKEN_S` later: a client that reads it earlier would show
            a token that servers do not know yet.

    Returns:
        The token.

    Raises:
        InvalidArgument: the file has no such name; the last day has passed;
            or `to` holds the token of another name.
        StorageError: a file cannot be written; then neither has changed.
    """
    token = secrets.token_hex(32)
    with _client(path, to, token):
        with _alone(path):
            before = _read(path)
            _check_client(before, name, to)
            kept, new = _rotated(before, name, days, last_day, token, path)
            _write(path, [*kept, new])
            audit("token rotated", file=path, days=days, **new.told)
        if to is not None:
            say(f"{to} changes in {TAKEN_S:g} s, after {path}", aside=True)
            time.sleep(TAKEN_S)
    return token


def _rotated(
    text: str,
    name: str,
    days: int,
    last_day: str | None,
    token: str,
    path: Path,
) -> tuple[list[str | Line], Line]:
    """The lines of the file, and that of another token of a name."""
    now = datetime.datetime.now(datetime.UTC)
    end = f"{now + datetime.timedelta(days=days):%Y-%m-%dT%H:%M:%SZ}"
    every = [t for t in _of_name(text, name, path) if not t.peer]
    if not every:
        raise InvalidArgument(
            f"{name!r} has no token, but a certificate, which is renewed by "
            "who signed it"
        )
    last = every[-1]
    new = dataclasses.replace(last, secret=_digest(token))
    new = new.until(_asked(last_day, last.last_day))
    kept: list[str | Line] = []
    for line in _split(text):
        one = _line_of(line)
        if one is None or one.name != name or one.peer:
            kept.append(line)
        elif one.last_day is None or _end_of(one.last_day) > now:
            kept.append(one.until(min(one.last_day or end, end, key=_end_of)))
    return kept, new


def remove(path: Path, name: str) -> int:
    """Removes all lines of a name; servers refuse them when they have looked
    at the file.

    Returns:
        How many there were.

    Raises:
        InvalidArgument: the file has no such name, or no other one: servers
            need a line.
        StorageError: it cannot be written.
    """
    with _alone(path):
        text = _read(path)
        gone = _of_name(text, name, path)
        kept = [
            line
            for line in _split(text)
            if (one := _line_of(line)) is None or one.name != name
        ]
        _write(path, kept)
        audit("token removed", file=path, name=name, lines=len(gone))
    return len(gone)


def _of_name(text: str, name: str, path: Path) -> list[Line]:
    every = lines_of(text)
    found = [one for one in every if one.name == name]
    if not found:
        raise InvalidArgument(
            f"{path} has no token of {name!r}, but of "
            + ", ".join(sorted({one.name for one in every}))
        )
    return found


def _asked(last_day: str | None, before: str | None) -> str | None:
    """The last day of a new token.

    Raises:
        InvalidArgument: it has passed.
    """
    found = before if last_day is None else last_day
    if found is None or found == NEVER:
        return None
    if _end_of(found) <= datetime.datetime.now(datetime.UTC):
        raise InvalidArgument(
            f"a token until {found} would have ended: choose a later day, or "
            f"{NEVER!r}"
        )
    return found


def _end_of(last_day: str) -> datetime.datetime:
    """When a token ends: behind its last day, or at a time."""
    try:
        end = datetime.datetime.fromisoformat(last_day)
    except ValueError:
        raise InvalidArgument(
            f"{last_day!r}: the last day of a token is such as 2027-01-31, or "
            "2027-01-31T18:00:00Z"
        ) from None
    days = 0 if "T" in last_day else 1
    if end.year < datetime.MAXYEAR:
        end += datetime.timedelta(days=days)
    return end.replace(tzinfo=datetime.UTC)


def _check_client(text: str, name: str, to: Path | None) -> None:
    """Raises InvalidArgument if the file of a client holds the token of
    another name: it would lose it."""
    if to is None or not to.is_file():
        return
    with contextlib.suppress(OSError, UnicodeDecodeError):
        held = to.read_text(encoding="ascii").strip()
        either = held, _digest(held)
        for one in lines_of(text):
            if one.name != name and one.secret in either:
                raise InvalidArgument(
                    f"{to} holds the token of {one.name!r}: choose another "
                    "file, or remove it first"
                )


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


def _write(path: Path, lines: Sequence[str | Line]) -> None:
    text = "\n".join([*map(str, lines), ""])
    check(text)
    with new_file(path, mode=None if path.exists() else 0o600) as file:
        file.write(text)
