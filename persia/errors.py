"""The exceptions of Persia: one class per error code of the C core.

All derive from :class:`PersiaError`, and from the builtin exception that a
caller would expect (ValueError, TypeError, OSError, ...). Each message names
what was wrong, where, and the remedy. Messages may change; the class, its
``code`` and the names in a message do not.
"""

from __future__ import annotations

import re
from typing import ClassVar

from persia.redaction import shown

__all__ = [
    "AccessDenied",
    "CapacityReached",
    "Closed",
    "CorruptFile",
    "DeadlineExceeded",
    "DtypeError",
    "InternalError",
    "Interrupted",
    "InvalidArgument",
    "LimitReached",
    "MalformedData",
    "MissingFeature",
    "Moved",
    "NonFiniteGradient",
    "NotFound",
    "OffsetsError",
    "OutOfMemory",
    "PersiaError",
    "ProtocolError",
    "RestoreIncomplete",
    "RowsMissing",
    "RowsReplaced",
    "SchemaMismatch",
    "ShapeError",
    "StaleLineage",
    "StorageError",
    "TicketError",
    "Unavailable",
    "UpdatesLost",
    "UsedAfterFork",
]


class PersiaError(Exception):
    """The base of all exceptions of Persia.

    Attributes:
        code: the stable name of the kind of error, that of its class here.
            The command line prints it, and servers send it as the metadata
            ``persia-error``.
    """

    code: ClassVar[str] = "PersiaError"

    def __init__(self, *args: object) -> None:
        """Texts lose the keys and passwords of URLs."""
        super().__init__(
            *(shown(one) if isinstance(one, str) else one for one in args)
        )

    def __init_subclass__(cls) -> None:
        if cls.__module__ == __name__:
            cls.code = cls.__name__


_OPTION = re.compile(r"`([a-z][a-z0-9_]*)(?:=([^`]*))?`")


def flagged(text: str) -> str:
    """A text of the library as commands show it.

    The library knows of no command line: there an option is `name` or
    `name=value`, in backquotes, with the name that it has in Python. Commands
    show ``--name``, and ``--name value``.
    """

    def flag(found: re.Match[str]) -> str:
        name = "--" + found[1].replace("_", "-")
        return name if found[2] is None else f"{name} {found[2]}"

    return _OPTION.sub(flag, text)


def line_of(error: PersiaError) -> str:
    """An error as the command line prints it, in one line."""
    text = " ".join(flagged(str(error)).splitlines())
    return f"persia: error[{error.code}]: {text}"


class OutOfMemory(PersiaError, MemoryError):
    """The operating system gave no memory."""


class InvalidArgument(PersiaError, ValueError):
    """An argument is out of its range."""


class DtypeError(PersiaError, TypeError):
    """A tensor has the wrong dtype."""


class ShapeError(PersiaError, ValueError):
    """A tensor has the wrong rank or shape."""


class OffsetsError(PersiaError, ValueError):
    """Offsets or lengths are negative, fall, or do not add up."""


class MissingFeature(PersiaError, KeyError):
    """A configured feature is not in the batch."""

    def __str__(self) -> str:  # KeyError would print the repr of the message
        return Exception.__str__(self)


class NonFiniteGradient(PersiaError, FloatingPointError):
    """A gradient is NaN or infinite."""


class CapacityReached(PersiaError, RuntimeError):
    """A table is full and may not evict."""


class LimitReached(PersiaError, RuntimeError):
    """A configured limit was met."""


class TicketError(PersiaError, RuntimeError):
    """A batch's ticket cannot be used (again)."""


class CorruptFile(PersiaError, OSError):
    """A file is truncated or altered."""


class SchemaMismatch(PersiaError, ValueError):
    """What was declared differs from what is stored."""


class RowsMissing(PersiaError, RuntimeError):
    """The rows that belong to a state were not loaded."""


class StorageError(PersiaError, OSError):
    """Reading or writing a file failed."""


class UsedAfterFork(PersiaError, RuntimeError):
    """A store or table was used in a forked child."""


class Interrupted(PersiaError, RuntimeError):
    """A wait was interrupted by a signal."""


class DeadlineExceeded(PersiaError, TimeoutError):
    """A deadline passed."""


class Closed(PersiaError, RuntimeError):
    """The object was closed."""


class MalformedData(PersiaError, ValueError):
    """A line of input is malformed."""


class Unavailable(PersiaError, ConnectionError):
    """A server cannot be reached."""


class ProtocolError(PersiaError, ValueError):
    """A message is malformed."""


class AccessDenied(PersiaError, PermissionError):
    """A token or certificate is missing or wrong, or is not for the call.

    Attributes:
        is_known: whether a server knows the token that it was shown.
    """

    is_known = False


class StaleLineage(PersiaError, RuntimeError):
    """The server has other rows than those that the caller knew."""


class UpdatesLost(PersiaError, RuntimeError):
    """A server lost updates that it had acknowledged.

    They are earlier ones. A ``backward()`` that raises it is applied; a
    forward is to be called again. Load a checkpoint, or make the store with
    ``lost="continue"``. ``persia.data.Sender.flush()`` raises it for another
    reason: trainers took a batch too often without returning gradients.
    """


class RowsReplaced(PersiaError, RuntimeError):
    """Another client replaced the rows by a ``load``.

    The updates of this client that the rows before had, and these have not,
    are lost with them; so may be the update that raises it. It is raised
    once, as :class:`UpdatesLost` is. ``persia.data.Sender`` raises it, each
    time, when batches that are trained have to be sent again.
    """


class RestoreIncomplete(PersiaError, RuntimeError):
    """Servers hold rows of different restores, or none: a ``load`` was cut
    short.

    A store finds that when it opens, or when a load in place fails.
    Everything raises this but ``stats()``, ``load()``, ``close()`` and the
    making of tables, until one restore has reached every server.
    """


class Moved(PersiaError, RuntimeError):
    """A shard is at another server now; the last word of the text is its
    address. Stores follow it by themselves, so only clients that speak the
    protocol on their own see this.
    """


class NotFound(PersiaError, LookupError):
    """There is nothing of that name: a model, or a version of one."""


class InternalError(PersiaError, RuntimeError):
    """A bug in Persia."""
