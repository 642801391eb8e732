"""How a shard that moves is copied: in rounds, until few rows are left."""

from __future__ import annotations

import math
from typing import NamedTuple

_SHARE = 0.25  # of the time in which it sends rows, before it needs more
_PAUSE = 0.01  # seconds that the last rows may take, about
_SHRINKS = 0.7  # of the rows before: more are no smaller round


class Rounds:
    """Decides after each round whether it was the last one.

    Attributes:
        share: of the time in which the next round sends rows.
    """

    def __init__(self) -> None:
        self.share = _SHARE
        self._before: float | None = None

    def is_last(self, rows: float, busy: float, left: float) -> bool:
        """Whether the shard is to be held now, and the rest to be sent.

        Args:
            rows: of the round.
            busy: seconds in which they were sent.
            left: rows that changed meanwhile.
        """
        if left * busy <= rows * _PAUSE:
            return True
        if self._before is not None and left > _SHRINKS * self._before:
            if self.share == 1.0:
                return True
            self.share = min(2 * self.share, 1.0)
        self._before = left
        return False


class Copy(NamedTuple):
    """What a copy of a shard takes.

    Attributes:
        rows: that are sent, those again that change meanwhile.
        seconds: in all.
        pause: seconds of them in which the shard takes no updates.
    """

    rows: float
    seconds: float
    pause: float


def foreseen(rows: float, rate: float, changes: float) -> Copy:
    """What the copy of a shard will take.

    Each change is of any row, all as likely as any other: rows that change
    more often than others make a copy shorter.

    Args:
        rows: of the shard.
        rate: rows a second while it sends.
        changes: of rows, a second.
    """
    rounds, sent, seconds, left = Rounds(), 0.0, 0.0, rows
    while True:
        busy = left / rate
        took = busy / rounds.share
        sent += left
        seconds += took
        changed = rows * -math.expm1(-changes * took / rows) if rows else 0.0
        if rounds.is_last(left, busy, changed):
            pause = changed / rate
            return Copy(sent + changed, seconds + pause, pause)
        left = changed
