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
_FULL = 0.85  # share of the memory limit that is the right size
_WAITS = 0.5  # share of a call's time before its work begins, the same
_AHEAD = 60.0  # seconds of growth of the rows that must fit, too

#: Roles, as in ``persia_load{role="..."}``.
SERVER, WORKER, LOADER = "server", "embedding-worker", "loader"


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
            return {LOADER: 1.0, WORKER: 1.0, "trainer": 1.0}
        span = now - then
        e = min((stats["starved_ns"] - starved) / _NS / span, 1.0)
        b = min((stats["blocked_ns"] - blocked) / _NS / span, 1.0)
        return {
            LOADER: 1 + e - b,
            WORKER: (cpu - used) / span / _CPU,
            "trainer": 1 + b - e,
        }


class ServerWindow:
    """The load of one server, and how fast its rows grow.

    Args:
        threads: that take its calls.
    """

    def __init__(self, threads: int = 1) -> None:
        self._threads = threads
        self._seen: collections.deque[
            tuple[float, float, int, float, float]
        ] = collections.deque()

    def add(
        self,
        now: float,
        cpu: float,
        used: float,
        limit: float,
        rows: int,
        made: int,
        waited: float = 0.0,
        worked: float = 0.0,
    ) -> tuple[float, float]:
        """Takes in counters; the load, and the bytes that its rows grow by in
        a second. A shard that arrives is no growth.

        Args:
            now: seconds, of any clock that does not go back.
            cpu: seconds of processors that it has used, by processor.
            used: bytes of all tables.
            limit: bytes that they may have; 0: there is no limit.
            rows: of all tables.
            made: rows that were made, without those that were evicted.
            waited: seconds of all calls until a thread had them.
            worked: seconds of all calls from then until they were answered.
        """
        seen = self._seen
        if seen and made < seen[-1][2]:  # a shard has left
            seen.clear()
        seen.append((now, cpu, made, waited, worked))
        while len(seen) > 2 and seen[1][0] <= now - WINDOW:
            seen.popleft()
        then, before, had, *times = seen[0]
        span = now - then
        if span <= 0:
            return used / (_FULL * limit) if limit else 0.0, 0.0
        growth = (made - had) / span * used / max(rows, 1)
        soon = (used + growth * _AHEAD) / (_FULL * limit) if limit else 0.0
        busy = (cpu - before) / span / _CPU
        waits = _waits(
            waited - times[0], worked - times[1], span, self._threads
        )
        return max(busy, soon, waits), growth


def _waits(waited: float, worked: float, span: float, threads: int) -> float:
    """The load by calls that wait for a thread: the share of their time, as
    far as the threads are at work at all. Calls of a server that idles wait
    for the network alone."""
    if worked <= 0:
        return 0.0
    share = waited / (waited + worked)
    return share / _WAITS * min(worked / span / threads, 1.0)


def wanted(
    count: int, load: float, low: int, high: int, shards: int = 0
) -> int:
    """HPA's formula: ceil(count * load), and count within a tenth of 1.

    A shard is at one server as a whole. So the fullest server has
    ceil(shards / number) of them, and a number counts only if these fit.

    Args:
        count: how many there are.
        load: of the role; of servers that of the fullest one.
        low: at least so many.
        high: at most so many.
        shards: that servers share; 0: what they share can be divided.
    """
    near = abs(load - 1) <= _TOLERANCE
    found = min(max(count if near else math.ceil(count * load), low), high)
    if near or not shards:
        return found
    most = count if found <= count else max(min(high, shards), found)
    return min(
        range(found, most + 1),
        key=lambda n: max(_share(count, n, shards) * load, 1.0),
    )


def _share(before: int, after: int, shards: int) -> float:
    """What the fullest server has, of what it had with another number."""
    if not shards:
        return before / after
    return math.ceil(shards / after) / math.ceil(shards / before)


@dataclasses.dataclass(frozen=True)
class Decision:
    """A change of the number of processes.

    Attributes:
        role: of them.
        before: how many there are.
        after: how many there are to be.
        load: that it follows from.
        shards: that servers share; 0: none.
    """

    role: str
    before: int
    after: int
    load: float
    shards: int = 0

    @property
    def foreseen(self) -> float:
        """The load of the role after it, if the work stays the same."""
        return self.load * _share(self.before, self.after, self.shards)

    def __str__(self) -> str:
        return (
            f"scale: {self.role}s {self.before} -> {self.after}: load "
            f"{self.load:.2f}, 1 is the right size; {self.foreseen:.2f} "
            "foreseen"
        )


@dataclasses.dataclass(frozen=True)
class Limits:
    """How many processes of a role there may be, and how long more or fewer
    must have been wanted.

    Attributes:
        least: at least so many.
        most: at most so many.
        out: seconds for which more must have been wanted.
        into: seconds for which fewer must have been wanted.
        shards: of the job, for servers; 0: none.
    """

    least: int
    most: int
    out: float = 60.0
    into: float = 600.0
    shards: int = 0


@dataclasses.dataclass(frozen=True)
class Look:
    """What was seen at once.

    Attributes:
        at: seconds, of any clock that does not go back.
        loads: of roles; of one that did not answer there is none.
    """

    at: float
    loads: Mapping[str, float]


def plan(
    looks: Sequence[Look],
    counts: Mapping[str, int],
    spec: Mapping[str, Limits],
    budget: int | None = None,
) -> Decision | None:
    """The next change, or None: one at a time, without one that a short peak
    would undo.

    As with HPA's windows of stabilization a role grows to the least number
    that was wanted within ``out`` seconds, and shrinks to the greatest within
    ``into``. Servers go first, because one without memory ends the job; then
    the role with the greatest load. What grows goes before what shrinks.

    Args:
        looks: since the last change, oldest first. The last one is of now.
        counts: processes of each role. One that has none stays as it is.
        spec: the roles that may change.
        budget: processes of all these roles together, at most.
    """
    room = math.inf if budget is None else budget - sum(counts.values())
    out: list[Decision] = []
    into: list[Decision] = []
    for role, limits in spec.items():
        seen = _seen(looks, role)
        if not seen or role not in counts:
            continue
        count, load = counts[role], seen[-1][1]
        numbers = [
            (at, wanted(count, one, limits.least, limits.most, limits.shards))
            for at, one in seen
        ]
        spans = numbers[-1][0] - numbers[0][0]
        least = min(_within(numbers, limits.out))
        most = max(_within(numbers, limits.into))
        after = int(min(least, count + room))
        if after > count and spans >= limits.out:
            out.append(Decision(role, count, after, load, limits.shards))
        elif most < count and spans >= limits.into:
            into.append(Decision(role, count, most, load, limits.shards))
    out.sort(key=lambda d: (d.role != SERVER, -d.load))
    into.sort(key=lambda d: d.load)
    return next(iter([*out, *into]), None)


def _seen(looks: Sequence[Look], role: str) -> list[tuple[float, float]]:
    """The loads of a role, since it last did not answer."""
    found: list[tuple[float, float]] = []
    for look in reversed(looks):
        if role not in look.loads:
            break
        found.append((look.at, look.loads[role]))
    return found[::-1]


def _within(numbers: Sequence[tuple[float, int]], seconds: float) -> list[int]:
    then = numbers[-1][0] - seconds
    return [n for at, n in numbers if at >= then]
