"""What a job needs next to have another number of servers.

One step at a time, from what is there: what carries it out looks again before
the next one. So it may be killed at any time, and another process continues.
Kubernetes is unknown here; :mod:`persia.kubernetes.gate` carries the steps
out.
"""

from __future__ import annotations

import dataclasses
import enum
from collections import Counter
from collections.abc import Mapping, Sequence

from persia.distributed.scaling import Move, plan


class Phase(enum.StrEnum):
    """What happens to the servers."""

    STEADY = "Steady"
    GROWING = "Growing"  # more begin
    MOVING = "Moving"  # shards go to those that are new
    DRAINING = "Draining"  # shards leave those that are to end
    BLOCKED = "Blocked"


@dataclasses.dataclass(frozen=True)
class Servers:
    """What is there. Servers have an order; the last ones end first.

    Attributes:
        addresses: of those that are to run, in their order.
        here: the shards of each server that answers, by its address.
        shards: of the job; 0: no server answers.
        waits: what must end before, as a move that runs; "": nothing.
        blocked: why nothing may change; "": it may.
    """

    addresses: Sequence[str]
    here: Mapping[str, Sequence[int]]
    shards: int
    waits: str = ""
    blocked: str = ""


@dataclasses.dataclass(frozen=True)
class Step:
    """What is to be done now; nothing, or one of ``count`` and ``move``.

    Attributes:
        phase: what happens to the servers.
        text: what is waited for, or what is wrong.
        count: so many servers are to run; None: as many as there are.
        move: is to begin; None: none is.
        left: all moves that are still to be made.
    """

    phase: Phase
    text: str = ""
    count: int | None = None
    move: Move | None = None
    left: Sequence[Move] = ()


def next_step(seen: Servers, want: int) -> Step:
    """The step that follows, on the way to a number of servers.

    More servers start before shards move to them. Shards leave a server
    before it ends. A server ends only if every shard of the job is at another
    one, and the last servers end one by one.

    Args:
        seen: what is there.
        want: the servers that are wanted. More than the job has shards are of
            no use, and do not begin.
    """
    count = len(seen.addresses)
    if seen.blocked:
        return Step(Phase.BLOCKED, seen.blocked)
    if not count:
        return Step(Phase.STEADY, "the servers are stopped")
    limit = ""
    if seen.shards and want > seen.shards:
        limit = f"the job has {seen.shards} shards, and each server needs one"
        want = seen.shards
    want = max(1, want)
    shrinks = want < count
    phase = Phase.DRAINING if shrinks else Phase.MOVING
    wrong = _wrong(seen)
    silent = [a for a in seen.addresses[:want] if a not in seen.here]
    here = {a: seen.here[a] for a in seen.addresses if a in seen.here}
    left = (
        plan(here, want) if not wrong and not silent and want <= count else []
    )
    if seen.waits:
        return Step(phase, seen.waits, left=left)
    if want > count:
        return Step(Phase.GROWING, f"{want - count} more begin", want)
    if wrong:
        return Step(Phase.BLOCKED, wrong)
    if silent:
        return Step(Phase.GROWING, f"{silent[0]} does not answer yet")
    if left:
        text = f"shards to move: {len(left)}"
        return Step(phase, text, move=left[0], left=left)
    if shrinks:
        last = seen.addresses[-1]
        return Step(phase, f"{last} has no shard, and ends", count - 1)
    return Step(Phase.STEADY, limit)


def _wrong(seen: Servers) -> str:
    """Why shards are not each at one server; "": they are."""
    if not seen.shards:
        return "no server answers"
    found = Counter(shard for some in seen.here.values() for shard in some)
    twice = sorted(shard for shard, n in found.items() if n > 1)
    if twice:
        return f"shards at two servers: {_list(twice)}"
    lost = sorted(set(range(seen.shards)) - found.keys())
    if not lost:
        return ""
    silent = [a for a in seen.addresses if a not in seen.here]
    return f"shards at no server that answers: {_list(lost)}; " + (
        f"no answer from {_list(silent)}"
        if silent
        else "a server was started again without its rows, and `persia scale "
        "ps` with `revive` lets them begin again"
    )


def _list(some: Sequence[object]) -> str:
    shown = ", ".join(map(str, some[:8]))
    return shown + (f" and {len(some) - 8} more" if len(some) > 8 else "")
