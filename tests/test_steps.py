"""The way to another number of servers, one step at a time."""

from __future__ import annotations

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from persia.distributed.scaling import Move
from persia.distributed.steps import Phase, Servers, next_step


@dataclasses.dataclass
class Job:
    """Servers that do what a step says."""

    here: list[set[int]]
    shards: int

    def seen(self, silent: frozenset[int] = frozenset()) -> Servers:
        names = [f"ps{i}" for i in range(len(self.here))]
        return Servers(
            names,
            {
                name: sorted(some)
                for i, (name, some) in enumerate(zip(names, self.here))
                if i not in silent
            },
            self.shards,
        )


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    shards = draw(st.integers(1, 12))
    count = draw(st.integers(1, 6))
    here: list[set[int]] = [set() for _ in range(count)]
    for shard in range(shards):
        here[draw(st.integers(0, count - 1))].add(shard)
    return Job(here, shards)


@given(jobs(), st.integers(1, 8), st.data())
def test_steps_lead_to_the_number(
    job: Job, want: int, data: st.DataObject
) -> None:
    """Whatever server is silent at times: one thing a step, and no server
    ends that has a shard."""
    most = 3 * job.shards + 2 * 8
    for _ in range(most):
        numbers = range(len(job.here))
        silent = data.draw(st.frozensets(st.sampled_from(numbers), max_size=1))
        step = next_step(job.seen(silent), want)
        if step.phase == Phase.STEADY:
            break
        if silent:  # it answers again
            before = [set(some) for some in job.here]
            _take(job, step.count, step.move, silent)
            if step.count is None and step.move is None:
                assert before == job.here
            continue
        assert (step.count is None) != (step.move is None)
        _take(job, step.count, step.move, silent)
    end = min(want, job.shards)
    while next_step(job.seen(), want).phase != Phase.STEADY:
        step = next_step(job.seen(), want)
        _take(job, step.count, step.move, frozenset())
        most -= 1
        assert most > -100
    assert len(job.here) == end
    sizes = sorted(map(len, job.here))
    assert sizes[-1] - sizes[0] <= 1 and sum(sizes) == job.shards


def _take(
    job: Job,
    count: int | None,
    move: Move | None,
    silent: frozenset[int],
) -> None:
    if move is not None:
        source, target = (int(a[2:]) for a in (move.source, move.target))
        assert not {source, target} & silent
        job.here[source].remove(move.shard)
        job.here[target].add(move.shard)
    if count is None:
        return
    if count > len(job.here):
        job.here += [set() for _ in range(count - len(job.here))]
        return
    assert count == len(job.here) - 1
    assert not job.here.pop()


@given(jobs(), st.integers(1, 8), st.data())
def test_what_is_wrong_changes_nothing(
    job: Job, want: int, data: st.DataObject
) -> None:
    """A shard at two servers or at none, another move, a reason of the
    platform."""
    seen = job.seen()
    shard = data.draw(st.integers(0, job.shards - 1))
    kinds = ["lost", "twice", "waits", "blocked"][len(job.here) == 1 :]
    kind = data.draw(st.sampled_from(kinds))
    if kind == "lost":
        for some in job.here:
            some.discard(shard)
        seen = job.seen()
    elif kind == "twice":
        for some in job.here[:2]:
            some.add(shard)
        if len(job.here) < 2:
            return
        for some in job.here[2:]:
            some.discard(shard)
        seen = job.seen()
    else:
        seen = dataclasses.replace(seen, **{kind: "why"})
    step = next_step(seen, want)
    assert step.move is None
    if kind in ("waits", "blocked"):
        assert step.count is None and step.text == "why"
    else:
        assert step.count in (None, min(want, job.shards))
        assert step.count is None or step.count > len(job.here)
    if kind == "blocked":
        assert step.phase == Phase.BLOCKED


def test_stopped_servers_stay_stopped() -> None:
    step = next_step(Servers([], {}, 0), 3)
    assert step.count is None and step.move is None
    assert step.phase == Phase.STEADY


def test_a_server_that_never_starts_can_end() -> None:
    """It has no shard, as the others have all."""
    seen = Servers(["a", "b", "c"], {"a": [0, 1], "b": [2]}, 3)
    assert next_step(seen, 3).phase == Phase.GROWING
    assert next_step(seen, 2).count == 2
    seen = dataclasses.replace(seen, here={"a": [0, 1]})
    assert next_step(seen, 2).phase == Phase.BLOCKED


def test_no_more_servers_than_shards() -> None:
    seen = Servers(["a", "b"], {"a": [0, 1], "b": [2]}, 3)
    assert next_step(seen, 9).count == 3
    seen = Servers(["a", "b", "c"], {"a": [0], "b": [2], "c": [1]}, 3)
    step = next_step(seen, 9)
    assert step.phase == Phase.STEADY and "3" in step.text
