"""How many processes of a role a job needs.

Each role has one figure, its *load*: 1 is the right size, 2 that twice as many
are needed. From it the formula of Kubernetes' HorizontalPodAutoscaler makes
the number, here as there.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence

#: Seconds that a load is a mean of.
WINDOW = 30.0

_TOLERANCE = 0.1  # HPA's
_NS = 1e9
_CPU = 0.8  # share of the processors that is the right size


class LoadWindow:
    """The loads that one embedding worker sees, from its counters."""

    def __init__(self) -> None:
        self._seen: collections.deque[tuple[float, float, float, float]] = (
            collections.deque()
        )

    def add(
        self, now: float, stats: Mapping[str, float], cpu: float
    ) -> dict[str, float]:
        """Takes in counters; the loads, by role.

        Args:
            now: seconds, of any clock that does not go back.
            stats: ``starved_ns`` and ``blocked_ns`` of the worker.
            cpu: seconds of processors that it has used, by processor.
        """
        seen = self._seen
        seen.append((now, stats["starved_ns"], stats["blocked_ns"], cpu))
        while len(seen) > 2 and seen[1][0] <= now - WINDOW:
            seen.popleft()
        then, starved, blocked, used = seen[0]
        if now <= then:
            return {"loader": 1.0, "embedding-worker": 1.0, "trainer": 1.0}
        span = now - then
        e = min((stats["starved_ns"] - starved) / _NS / span, 1.0)
        b = min((stats["blocked_ns"] - blocked) / _NS / span, 1.0)
        return {
            "loader": 1 + e - b,
            "embedding-worker": (cpu - used) / span / _CPU,
            "trainer": 1 + b - e,
        }


def wanted(count: int, load: float, low: int, high: int) -> int:
    """HPA's formula: ceil(count * load), and count within a tenth of 1.

    Args:
        count: how many there are.
        load: of the role.
        low: at least so many.
        high: at most so many.
    """
    near = abs(load - 1) <= _TOLERANCE
    return min(max(count if near else math.ceil(count * load), low), high)


@dataclasses.dataclass(frozen=True)
class Decision:
    """A change of the number of processes.

    Attributes:
        role: of them.
        before: how many there are.
        after: how many there are to be.
        load: that it follows from.
    """

    role: str
    before: int
    after: int
    load: float

    def __str__(self) -> str:
        return (
            f"scale: {self.role}s {self.before} -> {self.after}: load "
            f"{self.load:.2f}, 1 is the right size"
        )


class Scaler:
    """Decides for one role, without a change that a short peak would undo.

    As HPA's windows of stabilization: out to the least number that was wanted
    within ``out`` seconds, in to the greatest within ``into``.

    Args:
        role: its name.
        low: at least so many processes.
        high: at most so many.
        out: seconds.
        into: seconds.
    """

    def __init__(
        self,
        role: str,
        low: int,
        high: int,
        out: float = 60.0,
        into: float = 600.0,
    ) -> None:
        self.role, self.low, self.high = role, low, high
        self._out, self._into = out, into
        self._wanted: collections.deque[tuple[float, int]] = (
            collections.deque()
        )
        self._began: float | None = None

    def decide(
        self, now: float, count: int, loads: Sequence[float]
    ) -> Decision | None:
        """What is to change now, if anything.

        Args:
            now: seconds, of any clock that does not go back.
            count: how many processes there are.
            loads: of the role, as each embedding worker sees it.
        """
        if not loads:  # none answers, or a process starts: begin again
            self._wanted.clear()
            self._began = None
            return None
        if self._began is None:
            self._began = now
        load = sum(loads) / len(loads)
        self._wanted.append((now, wanted(count, load, self.low, self.high)))
        while self._wanted[0][0] < now - max(self._out, self._into):
            self._wanted.popleft()
        least = min(self._since(now - self._out))
        most = max(self._since(now - self._into))
        after = count
        if least > count and now - self._began >= self._out:
            after = least
        elif most < count and now - self._began >= self._into:
            after = most
        if after == count:
            return None
        self._wanted.clear()
        self._began = now
        return Decision(self.role, count, after, load)

    def _since(self, then: float) -> list[int]:
        return [n for at, n in self._wanted if at >= then]
