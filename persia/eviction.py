"""Which rows of a table go: ``eviction=`` of a table's configuration.

A table never looks for the one best row. It takes up to 64 rows that are
spread over the table, scores them, and evicts the eighth with the highest
scores, one for each new row. A row that the same update changed stays. A table
of up to 64 rows evicts by score exactly.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, ClassVar

from persia import _core, errors
from persia.base.check import kind, whole
from persia.base.options import seconds_of

__all__ = ["LFU", "LRU", "TTL", "Eviction", "Score", "SmallestNorm", "parse"]

_MOST = 2**63 - 1


class Eviction:
    """The base of all policies; use one of its subclasses.

    Attributes:
        policy: its name in checkpoints.
        needs_capacity: False: rows go below the capacity, too.
    """

    policy: ClassVar[str] = ""
    needs_capacity: ClassVar[bool] = True

    def options(self) -> dict[str, Any]:
        """Its options of a table, by the names of the core."""
        return {
            "full": _core.TABLE_OPTIONS["full"].index(self.policy),
            "evict_updates": 0,
            "evict_seconds": 0,
            "evict_score": "",
        }


class _Never(Eviction):
    """A full table refuses new rows."""

    policy = "raise"


@dataclass(frozen=True)
class LRU(Eviction):
    """Rows that no update has changed for longest."""

    policy = "evict_lru"


@dataclass(frozen=True)
class LFU(Eviction):
    """Rows with the fewest updates. A row takes 4 bytes more.

    Args:
        half_life: a row's count halves in so many updates of the table; None:
            never.
    """

    half_life: int | None = None
    policy = "evict_lfu"

    def __post_init__(self) -> None:
        if self.half_life is not None:
            whole("LFU: half_life", self.half_life, 1, _MOST, " (or None)")

    def options(self) -> dict[str, Any]:
        return super().options() | {"evict_updates": int(self.half_life or 0)}


@dataclass(frozen=True)
class TTL(Eviction):
    """Rows that no update has changed for a time. They go below the capacity,
    too, as new rows are made: every 16th new row looks at 64 rows. At
    capacity those that have the least time left go.

    Give one of both:

    Args:
        updates: of the table.
        seconds: by the clock of the process that has the rows, across
            restarts too. A row takes 4 bytes more.
    """

    updates: int | None = None
    seconds: int | None = None
    policy = "evict_ttl"
    needs_capacity = False

    def __post_init__(self) -> None:
        if (self.updates is None) == (self.seconds is None):
            raise errors.InvalidArgument(
                "TTL: give updates= or seconds=, and not both"
            )
        for name, most in ("updates", _MOST), ("seconds", 2**31 - 1):
            value = getattr(self, name)
            if value is not None:
                whole(f"TTL: {name}", value, 1, most)

    def options(self) -> dict[str, Any]:
        return super().options() | {
            "evict_updates": int(self.updates or 0),
            "evict_seconds": int(self.seconds or 0),
        }


@dataclass(frozen=True)
class SmallestNorm(Eviction):
    """Rows whose vector has the smallest L2 norm."""

    policy = "evict_norm"


@dataclass(frozen=True)
class Score(Eviction):
    """Rows with the highest value of an expression. A row takes 4 bytes more.

    Args:
        expression: of ``age`` (updates of the table since the row's last),
            ``count`` (the row's updates) and ``norm`` (L2, of its vector),
            with ``+ - * /``, parentheses, numbers, ``min(a, b)``,
            ``max(a, b)`` and ``sqrt(a)``. At most 255 bytes. It is compiled
            once and runs in C. Where it is NaN the row goes last.

    Raises:
        InvalidArgument: it is no such expression; says where.
    """

    expression: str
    policy = "evict_score"

    def __post_init__(self) -> None:
        kind("Score: expression", self.expression, str, "a string")
        if len(self.expression.encode()) > 255 or "\0" in self.expression:
            raise errors.InvalidArgument(
                "Score: the expression has more than 255 bytes, or a NUL"
            )
        _core.check_score(self.expression)

    def options(self) -> dict[str, Any]:
        return super().options() | {"evict_score": self.expression}


_NAMED: dict[str, type[Eviction]] = {
    "none": _Never,
    "lru": LRU,
    "lfu": LFU,
    "norm": SmallestNorm,
}


def as_eviction(where: str, value: Any) -> Eviction:
    """The policy of ``eviction=``: itself, a name, or None."""
    if isinstance(value, Eviction):
        return value
    word = str(value).lower()
    if word not in _NAMED:
        names = [name for name in _NAMED if name != "none"]
        raise errors.InvalidArgument(
            f"{where}: eviction is {value!r}, need None, one of {names} or an "
            "object of persia.eviction"
        )
    return _NAMED[word]()


def parse(text: str) -> Eviction:
    """The policy that an option names.

    Args:
        text: "lru", "lfu", "norm", "lfu:N" (half-life), "ttl:N" (updates),
            "ttl:7d" (time) or "score:EXPRESSION".

    Raises:
        ValueError: it is none of them.
    """
    word, _, argument = text.partition(":")
    if word == "score":
        return Score(argument)
    if word in ("lfu", "ttl") and re.fullmatch("[0-9]+", argument):
        number = int(argument)
        return TTL(updates=number) if word == "ttl" else LFU(number)
    if word == "ttl" and argument:
        return TTL(seconds=int(seconds_of(argument)))
    if text in _NAMED and text != "none":
        return _NAMED[text]()
    raise ValueError(
        "need lru, lfu, lfu:N, norm, ttl:N (updates), ttl:7d (time) or "
        "score:EXPRESSION"
    )
