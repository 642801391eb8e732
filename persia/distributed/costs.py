"""What it costs to give a job more or fewer servers: what moves, for how
long, and what each server holds before and after."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from persia.distributed.rounds import foreseen
from persia.distributed.scaling import Move, may_begin, plan
from persia.distributed.status import ServerStatus
from persia.errors import InvalidArgument, Unavailable

#: Rows a second that a server sends while it sends, and the share of the
#: steps that moves take away: `benchmarks.elastic` of the source tree measures
#: both.
RATE = 1.0e6
SLOWS = 0.15

_PART = 1 << 20  # bytes of a message with rows
_PIECE = 8192  # rows of one, at most
_STRIPES = 8  # of a table, each with messages of its own
_FIXED = 512  # bytes of a message beside its rows, at most


class Shard(NamedTuple):
    """A shard's tables.

    Attributes:
        rows: of all of them.
        memory: bytes that they take.
        sent: bytes of its rows on their way to another server.
        messages: that bring them, at least.
    """

    rows: float
    memory: float
    sent: float
    messages: float


def shard_of(tables: Sequence[tuple[float, float, int]]) -> Shard:
    """A shard by the rows of its tables, the bytes of memory that a row takes
    with its part of the index, and those of the row itself."""
    messages = sum(
        max(
            rows / max(min(_PIECE, _PART // (row + 20)), 1),
            min(rows, _STRIPES),
        )
        for rows, _, row in tables
    )
    return Shard(
        sum(rows for rows, _, _ in tables),
        sum(rows * memory for rows, memory, _ in tables),
        sum(rows * row for rows, _, row in tables),
        math.ceil(messages) + len(tables) + 1,
    )


def shard_of_status(status: ServerStatus) -> Shard:
    """A shard as its server counts it."""
    return shard_of(
        [
            (t["rows"], t["bytes"] / max(t["rows"], 1), t["row_bytes"])
            for t in status.stats["tables"]
        ]
    )


@dataclasses.dataclass(frozen=True)
class ServerCost:
    """A server before and after: shards, rows, bytes of memory."""

    name: str
    shards: tuple[int, int]
    rows: tuple[float, float]
    memory: tuple[float, float]


@dataclasses.dataclass(frozen=True)
class ScaleCost:
    """What :func:`scale_cost` found.

    Attributes:
        moves: of shards.
        rows: that move.
        again: rows that are sent again, as they change meanwhile.
        bytes: of the messages between servers, at most.
        seconds: until all have ended.
        pause: seconds in which one shard takes no updates, the longest.
        steps: of the job, while shards move.
        steps_lost: that it would have made besides, without moves.
        servers: before and after.
    """

    moves: int
    rows: float
    again: float
    bytes: float
    seconds: float
    pause: float
    steps: float
    steps_lost: float
    servers: list[ServerCost]


def scale_cost(
    places: Mapping[str, Sequence[int]],
    to: int,
    shards: Sequence[Shard],
    *,
    rate: float = RATE,
    changes: float = 0.0,
    steps: float = 0.0,
    slows: float = SLOWS,
) -> ScaleCost:
    """What it costs that the first ``to`` servers share the shards.

    Args:
        places: the shards of each server, by its name.
        to: how many servers are to have shards.
        shards: what each of them holds.
        rate: rows a second that a server sends, while it sends.
        changes: of rows of one shard, a second.
        steps: of the job, a second.
        slows: share of the steps that moves take away.

    Raises:
        InvalidArgument: there are not so many servers, or shards; or a number
            is out of its range.
    """
    wrong = [
        f"{name} is {value!r}, need {need}"
        for name, value, need, good in (
            ("rate", rate, "more than 0", 0 < rate < math.inf),
            ("changes", changes, "0 or more", 0 <= changes < math.inf),
            ("steps", steps, "0 or more", 0 <= steps < math.inf),
            ("slows", slows, "0 to below 1", 0 <= slows < 1),
        )
        if not good
    ]
    if wrong:
        raise InvalidArgument("; ".join(wrong))
    moves = plan(places, to)
    after = {name: set(some) for name, some in places.items()}
    for move in moves:
        after[move.source].remove(move.shard)
        after[move.target].add(move.shard)
    moving = [shards[move.shard] for move in moves]
    copies = [foreseen(shard.rows, rate, changes) for shard in moving]
    rows = sum(shard.rows for shard in moving)
    # Of a row that is sent again the message is the same.
    sent = sum(
        (shard.sent + _FIXED * shard.messages)
        * (copy.rows / shard.rows if shard.rows else 1.0)
        for shard, copy in zip(moving, copies, strict=True)
    )
    seconds = _seconds(moves, [copy.seconds for copy in copies])

    def held(name: str, field: str) -> tuple[float, float]:
        before, then = (
            sum(getattr(shards[i], field) for i in some)
            for some in (places[name], after[name])
        )
        return before, then

    return ScaleCost(
        moves=len(moves),
        rows=rows,
        again=sum(copy.rows for copy in copies) - rows,
        bytes=sent,
        seconds=seconds,
        pause=max((copy.pause for copy in copies), default=0.0),
        steps=seconds * steps * (1 - slows),
        steps_lost=seconds * steps * slows,
        servers=[
            ServerCost(
                name,
                (len(places[name]), len(after[name])),
                held(name, "rows"),
                held(name, "memory"),
            )
            for name in places
        ],
    )


def _seconds(moves: Sequence[Move], each: Sequence[float]) -> float:
    """Until all moves have ended, those of different servers being made side
    by side."""
    spent = dict(zip(moves, each, strict=True))
    waiting, now = list(moves), 0.0
    ends: dict[Move, float] = {}
    while waiting or ends:
        for move in may_begin(waiting, list(ends), None):
            waiting.remove(move)
            ends[move] = now + spent[move]
        now = min(ends.values())
        ends = {move: end for move, end in ends.items() if end > now}
    return now


def even(servers: int, shards: int, count: int) -> dict[str, list[int]]:
    """Places as a job begins with them: so many servers share the shards, and
    the others up to ``count`` have none."""
    return {
        f"server {i}": list(
            range(i * shards // servers, (i + 1) * shards // servers)
        )
        if i < servers
        else []
        for i in range(count)
    }


def of_job(
    places: Mapping[str, Sequence[int]], to: int, found: Sequence[ServerStatus]
) -> ScaleCost:
    """What it costs a job that runs, as its servers count rows and updates.

    Args:
        places: of its shards.
        to: how many servers are to have shards.
        found: of :func:`persia.distributed.status.ask`.

    Raises:
        Unavailable: a server did not answer for its shards.
    """
    by_shard = {one.shard: one for one in found if one.stats}
    missing = sorted(
        {shard for some in places.values() for shard in some} - set(by_shard)
    )
    if missing:
        raise Unavailable(
            f"no server answered for the shards {missing}: try again"
        )
    shards = [shard_of_status(by_shard[i]) for i in sorted(by_shard)]
    # Each row that is looked up is updated in the same step.
    changes = max(
        (
            sum(rates["pulled"] for rates in one.table_rates.values())
            for one in by_shard.values()
        ),
        default=0.0,
    )
    steps = max(
        (one.rates["updates"] for one in by_shard.values()), default=0.0
    )
    return scale_cost(places, to, shards, changes=changes, steps=steps)
