"""Malformed rows of the input: counted and logged, or raised."""

from __future__ import annotations

import logging
from collections import Counter

from persia import errors

__all__ = ["Faults"]

log = logging.getLogger("persia.data")


class Faults:
    """Malformed rows: left out and counted, or raised if ``strict``.

    Attributes:
        count: how many there were.
        lines: what was wrong with the first 100 of them.
    """

    KEPT = 100
    LOGGED = 3  # of a kind

    def __init__(self, strict: bool) -> None:
        self.strict = strict
        self.count = 0
        self.lines: list[str] = []
        self._kinds: Counter[str] = Counter()

    def add(self, where: str, text: str, kind: str = "") -> None:
        """One malformed row.

        Args:
            where: the file and line.
            text: what is wrong.
            kind: the same text for the same fault: three are logged.
        """
        message = f"{where}: {text}"
        if self.strict:
            raise errors.MalformedData(
                f"{message}; strict=False counts such rows and leaves them out"
            )
        self.count += 1
        if len(self.lines) < self.KEPT:
            self.lines.append(message)
        self._kinds[kind] += 1
        if self._kinds[kind] <= self.LOGGED:
            last = self._kinds[kind] == self.LOGGED
            more = "; more of the kind are only counted" if last else ""
            log.warning("%s (left out%s)", message, more)
