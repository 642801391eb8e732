"""The steps of a job as discrete events.

A rank looks a batch up at all servers, computes the dense part, and sends the
gradients to all servers. Batch n is looked up once all updates before
n - staleness are done; without staleness it leaves behind the update before
it, and the servers take them in that order.

Each piece of work has seconds of a processor. Where they are spent is a
machine: :class:`Apart` has one for each rank and server, with a link to the
network, :class:`Together` is one that all processes share.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np

Then = Callable[[], None]


class Times(NamedTuple):
    """Seconds of a processor.

    Attributes:
        server_call: a server's, of a lookup or an update, whatever its size.
        server_id: of a distinct id that is looked up and updated.
        client_call: a rank's, of a lookup or an update, for each server.
        client_id: of a distinct id.
        dense: of the dense part of a step, and of all else of a step.
    """

    server_call: float
    server_id: float
    client_call: float
    client_id: float
    dense: float


class Job(NamedTuple):
    """What runs.

    Attributes:
        servers, ranks: how many.
        ids: distinct ids of a batch.
        staleness: how many updates a lookup may miss.
        shards: of the tables; the fullest server has one more than others.
        server_cores, rank_cores: processors of each machine.
        width: processors that one piece of work uses at most.
        latency: seconds from one machine to another.
        network: bytes a second of a machine, each way.
        id_bytes: of a distinct id, there and back, of a lookup or an update.
        steps: of each rank.
    """

    servers: int
    ranks: int
    ids: float
    staleness: int
    shards: int = 0
    server_cores: int = 16
    rank_cores: int = 8
    width: int = 2
    latency: float = 1e-4
    network: float = 25e9 / 8
    id_bytes: tuple[float, float] = (46.0, 38.0)
    steps: int = 40


class Result(NamedTuple):
    """What a job did once all ranks had begun.

    Attributes:
        steps: a second, of all ranks together.
        busy: share of the processors of the busiest server.
        wait: seconds that a call waits at a server, on average.
        link: share of the busiest server's link.
    """

    steps: float
    busy: float
    wait: float
    link: float


class Clock:
    """Calls what is due, in order."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Then]] = []
        self._count = itertools.count()

    def at(self, time: float, then: Then) -> None:
        """``then`` is called at this time."""
        heapq.heappush(self._due, (time, next(self._count), then))

    def run(self) -> None:
        """Until nothing is due."""
        while self._due:
            self.now, _, then = heapq.heappop(self._due)
            then()


class Machines(Protocol):
    """Where work is done."""

    def dense(self, rank: int, seconds: float, then: Then) -> None:
        """The dense part of a rank."""

    def client(self, rank: int, seconds: float, then: Then) -> None:
        """Work of a rank beside it."""

    def call(
        self, rank: int, seconds: np.ndarray, ids: np.ndarray, then: Then
    ) -> None:
        """A call to each server: seconds and ids, [servers]."""


class Apart:
    """Each rank and server has a machine of its own. A server does one call
    after the other, each on all of its processors."""

    def __init__(self, clock: Clock, job: Job) -> None:
        self._clock, self._job = clock, job
        self._dense = np.zeros(job.ranks)
        self._client = np.zeros(job.ranks)
        self._from_rank = np.zeros(job.ranks)
        self._to_rank = np.zeros(job.ranks)
        self._server = np.zeros(job.servers)
        self._to_server = np.zeros(job.servers)
        self._from_server = np.zeros(job.servers)
        self.worked = np.zeros(job.servers)
        self.carried = np.zeros(job.servers)
        self.waited = 0.0
        self.calls = 0

    def _do(
        self, free: np.ndarray, rank: int, seconds: float, then: Then
    ) -> None:
        free[rank] = max(free[rank], self._clock.now) + seconds
        self._clock.at(float(free[rank]), then)

    def dense(self, rank: int, seconds: float, then: Then) -> None:
        self._do(self._dense, rank, seconds, then)

    def client(self, rank: int, seconds: float, then: Then) -> None:
        self._do(self._client, rank, seconds / self._job.rank_cores, then)

    def call(
        self, rank: int, seconds: np.ndarray, ids: np.ndarray, then: Then
    ) -> None:
        job, clock = self._job, self._clock
        there, back = (ids * size / job.network for size in job.id_bytes)

        def arrive() -> None:
            arrived = np.maximum(self._to_server, clock.now) + there
            self._to_server = arrived
            begin = np.maximum(self._server, arrived)
            self._server = begin + seconds / job.server_cores
            self._from_server = (
                np.maximum(self._from_server, self._server) + back
            )
            self.worked += seconds
            self.carried += np.maximum(there, back)
            self.waited += float((begin - arrived).sum())
            self.calls += job.servers
            end = max(
                float(self._from_server.max()),
                float(self._to_rank[rank] + back.sum()),
            )
            self._to_rank[rank] = end
            clock.at(end + job.latency, then)

        sent = max(clock.now, float(self._from_rank[rank]))
        self._from_rank[rank] = sent + float(there.sum())
        clock.at(float(self._from_rank[rank]) + job.latency, arrive)


class _Task:
    """Work that is left, in seconds of a processor."""

    def __init__(self, left: float, width: int, then: Then) -> None:
        self.left, self.width, self.then = left, width, then


class Together:
    """One machine, whose processors all work shares alike."""

    def __init__(self, clock: Clock, job: Job, cores: int) -> None:
        self._clock, self._width, self._cores = clock, job.width, cores
        self._tasks: list[_Task] = []
        self._since = 0.0
        self._turn = 0

    def _rate(self) -> list[float]:
        """Processors of each task: none has more than its width."""
        rates = [0.0] * len(self._tasks)
        left, order = float(self._cores), list(range(len(rates)))
        order.sort(key=lambda i: self._tasks[i].width)
        for n, i in enumerate(order):
            rates[i] = min(self._tasks[i].width, left / (len(order) - n))
            left -= rates[i]
        return rates

    def _advance(self) -> None:
        passed = self._clock.now - self._since
        self._since = self._clock.now
        for task, rate in zip(self._tasks, self._rate(), strict=True):
            task.left -= passed * rate

    def _wait(self) -> None:
        """For the end of the first task."""
        self._turn += 1
        turn = self._turn
        ends = [
            task.left / rate
            for task, rate in zip(self._tasks, self._rate(), strict=True)
        ]
        if ends:
            soon = self._clock.now + max(min(ends), 0.0)
            self._clock.at(soon, lambda: self._end(turn))

    def _end(self, turn: int) -> None:
        if turn != self._turn:
            return
        self._advance()
        over = [task for task in self._tasks if task.left <= 1e-12]
        self._tasks = [task for task in self._tasks if task.left > 1e-12]
        for task in over:
            self._clock.at(self._clock.now, task.then)
        self._wait()

    def _add(self, seconds: float, width: int, then: Then) -> None:
        self._advance()
        self._tasks.append(_Task(seconds, width, then))
        self._wait()

    def dense(self, rank: int, seconds: float, then: Then) -> None:
        self._add(seconds, 1, then)

    def client(self, rank: int, seconds: float, then: Then) -> None:
        self._add(seconds, self._width, then)

    def call(
        self, rank: int, seconds: np.ndarray, ids: np.ndarray, then: Then
    ) -> None:
        left = len(seconds)

        def answered() -> None:
            nonlocal left
            left -= 1
            if not left:
                then()

        for one in seconds:
            self._add(float(one), self._width, answered)


class _Rank:
    """The steps of a rank."""

    def __init__(
        self,
        number: int,
        job: Job,
        times: Times,
        machines: Machines,
        draw: Callable[[], np.ndarray],
        done: Callable[[int], None],
    ) -> None:
        self._number, self._job, self._times = number, job, times
        self._machines, self._draw, self._done = machines, draw, done
        self._looked = 0  # lookups that have begun
        self._arrived: set[int] = set()
        self._dense = 0  # the batch that is computed next, or is
        self._computes = False
        self._updated: set[int] = set()
        self._settled = 0  # updates that are done, in order
        self._ids: dict[int, np.ndarray] = {}

    def go_on(self) -> None:
        """Begins all that may begin."""
        job = self._job
        while (
            self._looked < job.steps
            and self._looked - self._settled <= job.staleness
        ):
            self._look_up(self._looked)
            self._looked += 1
        if self._dense in self._arrived and not self._computes:
            self._computes = True
            self._machines.dense(
                self._number, self._times.dense, self._computed
            )

    def _client(self, then: Then) -> None:
        times, job = self._times, self._job
        seconds = (
            job.servers * times.client_call + job.ids * times.client_id / 2
        )
        self._machines.client(self._number, seconds, then)

    def _call(self, ids: np.ndarray, then: Then) -> None:
        times = self._times
        seconds = times.server_call + ids * times.server_id / 2
        self._machines.call(self._number, seconds, ids, then)

    def _look_up(self, n: int) -> None:
        self._ids[n] = self._draw()

        def arrived() -> None:
            self._arrived.add(n)
            self.go_on()

        self._client(lambda: self._call(self._ids[n], arrived))

    def _computed(self) -> None:
        n = self._dense
        self._computes = False
        self._dense += 1
        self._done(self._number)

        def updated() -> None:
            self._updated.add(n)
            self._settle()
            self.go_on()

        def sent() -> None:
            self._call(self._ids.pop(n), updated)
            if not self._job.staleness:  # the next lookup is right behind
                self._updated.add(n)
                self._settle()
                self.go_on()

        self._client(sent)
        self.go_on()

    def _settle(self) -> None:
        while self._settled in self._updated:
            self._updated.discard(self._settled)
            self._settled += 1


def play(
    job: Job, times: Times, cores: int | None = None, seed: int = 1
) -> Result:
    """A job from its first step on.

    Args:
        job: what runs.
        times: of the work.
        cores: processors of one machine that all processes share; None: each
            has its own.
        seed: of how the ids of a batch are divided.
    """
    clock = Clock()
    rng = np.random.default_rng(seed)
    shards = job.shards or job.servers
    sizes = np.full(job.servers, shards // job.servers, float)
    sizes[: shards % job.servers] += 1
    mean = job.ids * sizes / shards

    def draw() -> np.ndarray:
        return np.maximum(rng.normal(mean, np.sqrt(mean)), 0.0)

    machines: Apart | Together
    if cores is None:
        machines = Apart(clock, job)
    else:
        machines = Together(clock, job, cores)
    ends: list[list[float]] = [[] for _ in range(job.ranks)]

    def done(rank: int) -> None:
        ends[rank].append(clock.now)

    ranks = [
        _Rank(i, job, times, machines, draw, done) for i in range(job.ranks)
    ]
    for i, rank in enumerate(ranks):  # they do not begin at once
        clock.at(times.dense * i / job.ranks, rank.go_on)
    clock.run()
    # Without the first steps, and the last ones, when some ranks are through.
    first, last = job.steps // 5, job.steps * 4 // 5
    steps = sum((last - first) / (e[last] - e[first]) for e in ends)
    if isinstance(machines, Together):
        return Result(steps, 0.0, 0.0, 0.0)
    share = 1 / (clock.now * job.server_cores)
    return Result(
        steps,
        float(machines.worked.max() * share),
        machines.waited / machines.calls,
        float(machines.carried.max() / clock.now),
    )
