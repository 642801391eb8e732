"""The number of servers of a job whose rows grow, as it follows from the load.

Decisions are those of ``persia.distributed.load.plan``, moves those of
``persia.distributed.scaling.plan``, and how long a shard is copied says
``persia.distributed.rounds``: the functions that ``persia launch --autoscale``
calls. What is modelled is the time between: rows that grow, servers that
start, shards on their way.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

from persia.distributed.load import SERVER, Limits, Look, ServerWindow, plan
from persia.distributed.rounds import foreseen
from persia.distributed.scaling import Move, may_begin
from persia.distributed.scaling import plan as moves_to


@dataclasses.dataclass(frozen=True)
class Growth:
    """A job whose rows grow.

    Attributes:
        shards: of its tables.
        least, most: servers.
        rows: that there will be.
        fresh: rows that a sample makes, until all are there.
        row_bytes: of memory.
        limit: bytes of a server's memory.
        rate: rows a second that a server sends, while it sends.
        changes: of rows in a sample.
        slows: share of the steps that a server's moves take away.
        period: seconds between two looks at the load.
        start: seconds until a new server has joined.
        limits: of the decisions.
        side_by_side: moves of different servers are made at once.
    """

    shards: int
    least: int
    most: int
    rows: float
    fresh: float
    row_bytes: float
    limit: float
    rate: float
    changes: float
    slows: float
    period: float = 2.0
    start: float = 20.0
    out: float = 5.0
    into: float = 600.0
    side_by_side: bool = True


class Point(NamedTuple):
    """A moment.

    Attributes:
        seconds: since the begin.
        samples: so far.
        servers: that there are.
        fullest: share of its limit that the fullest server has.
        rate: samples a second.
        moving: shards on their way.
    """

    seconds: float
    samples: float
    servers: int
    fullest: float
    rate: float
    moving: int


class _Servers:
    """Where the shards are, and what moves."""

    def __init__(self, growth: Growth) -> None:
        self._growth = growth
        n, shards = growth.least, growth.shards
        self.places: dict[str, list[int]] = {
            str(i): list(range(i * shards // n, (i + 1) * shards // n))
            for i in range(n)
        }
        self._now = 0.0
        self._waiting: list[Move] = []
        self._running: list[tuple[float, Move]] = []

    @property
    def moving(self) -> int:
        return len(self._waiting) + len(self._running)

    @property
    def busy(self) -> int:
        """Servers that send or take a shard."""
        return 2 * len(self._running)

    def fullest(self) -> int:
        """Shards of the server with most."""
        return max(map(len, self.places.values()))

    def resize(self, to: int) -> None:
        """Begins to move shards."""
        for i in range(len(self.places), to):
            self.places[str(i)] = []
        self._waiting = moves_to(self.places, to)

    def step(self, now: float, rows: float, changes: float) -> None:
        """Ends moves that are due, and begins others.

        Args:
            now: seconds.
            rows: of a shard.
            changes: of them, a second.
        """
        took = foreseen(rows, self._growth.rate, changes).seconds
        most = None if self._growth.side_by_side else 1
        at = self._now
        self._now = now
        while self._waiting or self._running:
            running = [move for _, move in self._running]
            begun = may_begin(self._waiting, running, most)
            self._running += [(at + took, move) for move in begun]
            self._waiting = [m for m in self._waiting if m not in set(begun)]
            at, move = min(self._running, key=lambda one: one[0])
            if at > now:
                return
            self._running.remove((at, move))
            self.places[move.source].remove(move.shard)
            self.places[move.target].append(move.shard)

    def leave(self, to: int) -> None:
        """Servers without shards end."""
        self.places = dict(list(self.places.items())[:to])


def grow(
    growth: Growth,
    speed: Callable[[int], tuple[float, float]],
    seconds: float,
) -> Iterator[Point]:
    """The job from its begin, a point a look; it ends where a server is full.

    Args:
        growth: the job.
        speed: of so many servers: samples a second, and the share of the
            processors of the busiest one.
        seconds: after which it ends.
    """
    servers = _Servers(growth)
    spec = {
        SERVER: Limits(
            *(growth.least, growth.most, growth.out, growth.into),
            growth.shards,
        )
    }
    window, looks = ServerWindow(), list[Look]()
    now = samples = cpu = 0.0
    joined, target = math.inf, growth.least
    while now < seconds:
        count = len(servers.places)
        rate, busy = speed(count)
        # Moves slow the servers that take part; a step waits for the slowest.
        rate *= 1 - (growth.slows if servers.busy else 0.0)
        samples += rate * growth.period
        now += growth.period
        rows = min(growth.rows, growth.fresh * samples)
        share = rows / growth.shards
        servers.step(now, share, growth.changes * rate / growth.shards)
        held = servers.fullest() * share
        used = held * growth.row_bytes
        cpu += busy * growth.period
        load, _ = window.add(
            *(now, cpu, used, growth.limit, int(held)),
            int(rows / growth.shards * growth.shards / count),
        )
        yield Point(
            *(now, samples, count, used / growth.limit, rate),
            servers.moving,
        )
        if used > growth.limit:
            return
        if now >= joined:
            joined = math.inf
            servers.resize(target)
        if servers.moving or joined < math.inf:
            looks.clear()
            continue
        servers.leave(target)
        looks.append(Look(now, {SERVER: load}))
        keep = max(growth.out, growth.into) + growth.period
        looks = [look for look in looks if look.at >= now - keep]
        decision = plan(looks, {SERVER: count}, spec)
        if decision is not None:
            looks.clear()
            target = decision.after
            if target > count:
                joined = now + growth.start
            else:
                servers.resize(target)
