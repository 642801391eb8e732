"""Two commands that move shards at the same time."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from persia import _core, errors
from persia.distributed.scaling import Move, Progress, Scaling, plan
from tests.test_moves import SHARDS, addresses, scale, serving, sizes

if not _core.GRPC[0].isdigit():
    pytest.skip("built without gRPC", allow_module_level=True)

# The servers that the first command wants, and the moves of the second one
# after its first.
AT_ONCE = {
    "the target of the next": (1, [(2, 0, 2)]),
    "other servers": (3, [(0, 0, 1)]),
}


@pytest.mark.parametrize("case", AT_ONCE)
def test_two_commands_at_once(case: str, tmp_path: Path) -> None:
    """The first one does not say that all is as it was to be."""
    to, between = AT_ONCE[case]
    with serving(tmp_path) as servers, contextlib.ExitStack() as stack:
        names = addresses(servers)
        first, second = (stack.enter_context(Scaling(names)) for _ in range(2))
        second._by = "operator 7"
        moved: list[Move] = []

        def show(progress: Progress) -> None:
            done = (
                progress.move.shard
                in servers[names.index(progress.move.target)].shards.here()
            )
            if done and not moved:
                second.places()
                moved.extend(
                    Move(shard, names[source], names[target])
                    for shard, source, target in between
                )
                second.run(moved)

        with pytest.raises(errors.Unavailable, match="operator 7"):
            first.run(plan(first.places(), to), show)
        assert sum(sizes(servers)) == SHARDS
        first.run(plan(first.places(), to))
        assert sorted(sizes(servers)) == {1: [0, 0, 4], 3: [1, 1, 2]}[to]


def test_shards_that_another_command_moved(tmp_path: Path) -> None:
    """Since this one has looked."""
    with serving(tmp_path) as servers, Scaling(addresses(servers)) as scaling:
        wanted = plan(scaling.places(), 1)
        scale(servers, 3)
        with pytest.raises(errors.Unavailable):
            scaling.run(wanted)
        assert sizes(servers) == [2, 1, 1]


def test_a_pause_between_moves_is_no_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command that comes later waits for a move, and fails when the first
    command begins another one."""
    with serving(tmp_path) as servers, Scaling(addresses(servers)) as scaling:
        ask, looks = Scaling._ask, iter([7, 7, 0, 8])

        def other(self: Scaling, address: str, *words: Any) -> dict[str, Any]:
            answer = ask(self, address, *words)
            if address == servers[0].address and (number := next(looks)):
                answer |= {"state": _core.MOVED_RUNNING, "id": number}
                answer |= {"by": "operator 7"}
            return answer

        monkeypatch.setattr(Scaling, "_ask", other)
        with pytest.raises(errors.Unavailable, match="operator 7"):
            scaling.places()
