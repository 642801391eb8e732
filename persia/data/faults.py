"""Malformed rows of the input: counted and logged, or raised."""

from __future__ import annotations

import logging
from collections import Counter

from persia import errors
from persia.base.check import real

log = logging.getLogger("persia.data")


MALFORMED_LIMIT = 0.01
_EARLY = 10_000  # samples after which a share means something
_LEAST = 100  # ... at the end of the data


def check_limit(limit: float) -> float:
    """A limit, which is a share.

    Raises:
        InvalidArgument: it is none.
    """
    if not 0 <= real(limit) <= 1:
        raise errors.InvalidArgument(
            f"malformed_limit is {limit!r}, need a share, 0 to 1"
        )
    return float(limit)


class Faults:
    """Malformed rows: left out and counted, or raised if ``strict``.

    Args:
        strict: raise at the first one.
        limit: the share of the samples that one rule, such as that of a
            column, may leave out.

    Attributes:
        count: how many there were.
        lines: what was wrong with the first 100 of them.
    """

    KEPT = 100
    LOGGED = 3  # of a kind

    def __init__(self, strict: bool, limit: float = 1.0) -> None:
        self.strict = strict
        self.limit = limit
        self._samples = 0
        self.count = 0
        self.lines: list[str] = []
        self._kinds: Counter[str] = Counter()
        self._first: dict[str, str] = {}  # line of a kind

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
        self._first.setdefault(kind, message)
        if self._kinds[kind] <= self.LOGGED:
            last = self._kinds[kind] == self.LOGGED
            more = "; more of the kind are only counted" if last else ""
            log.warning("%s (left out%s)", message, more)

    def passed(self, samples: int) -> None:
        """So many more samples were read, malformed ones included.

        Raises:
            LimitReached: one rule leaves out more than the limit.
        """
        self._samples += samples
        if self._samples >= _EARLY:
            self.check()

    def check(self, least: int = _LEAST) -> None:
        """As :meth:`passed`, at the end of the data, which has as many samples
        as a share of it needs."""
        if self._samples < least or not self._kinds:
            return
        kind, count = self._kinds.most_common(1)[0]
        if count <= self.limit * self._samples:
            return
        raise errors.LimitReached(
            f"{count:,} of {self._samples:,} samples were left out by one rule"
            f" ({kind}), more than malformed_limit={self.limit:g}: "
            f"{self._first[kind]}; correct the data or the schema, or give a "
            "higher limit"
        )
