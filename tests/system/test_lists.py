"""Embedding workers that join and leave while a job trains, by a list in a
file."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

import persia
from persia import _core
from persia.distributed.status import ask_embedding
from tests.system import roles_counting
from tests.system.processes import wait_until
from tests.system.test_moves import COUNTING, Processes, finish, processes

__all__ = ["processes"]

if not _core.GRPC[0].isdigit():
    pytest.skip("built without gRPC", allow_module_level=True)


def stats(address: str) -> dict[str, Any]:
    """The counters of a worker."""
    return ask_embedding([address], interval=0.0)[0].stats


def serve(
    processes: Processes, server: str
) -> tuple[subprocess.Popen[str], str]:
    """One more embedding worker."""
    return processes.serve(
        *("worker", "--servers", server, "--threads", "1", "--grace", "60")
    )


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_workers_join_and_leave(processes: Processes, tmp_path: Path) -> None:
    """Each batch is trained once, and a worker that gets SIGTERM has none
    left: trainers take what it has, the loader sends the rest to others."""
    _, server = processes.server()
    first, one = serve(processes, server)
    listed, gate = tmp_path / "workers", tmp_path / "gate"
    listed.write_text(f"{one}  # the first\n")
    trainer = processes.start(
        COUNTING, "trainer", server, f"file:{listed}", str(gate)
    )
    some = list(roles_counting.batches())
    with persia.data.Sender(f"file:{listed}", timeout=60.0) as sender:
        for batch in some[:30]:
            sender.send(batch)
        _, other = serve(processes, server)
        listed.write_text(f"{one}\n{other}\n")
        wait_until(lambda: stats(other)["streams"] and stats(other)["ranks"])
        for batch in some[30:60]:
            sender.send(batch)
        assert stats(other)["submitted"] == 15
        first.send_signal(signal.SIGTERM)
        gate.touch()
        for batch in some[60:]:
            sender.send(batch)
        said = finish(first)
        assert "0 skipped, 0 are left" in said
        listed.write_text(f"{other}\n")
        sender.end()
        sender.flush()
        counts = sender.stats()
        assert (counts["away"], counts["failed"], counts["lost"]) == (0, 0, 0)
    assert "late 0 lost 0" in finish(trainer)
    store = persia.Store(
        persia.optim.SGD(lr=1.0), servers=server, read_only=True
    )
    store.add_table(roles_counting.config())
    rows = store.rows("count", torch.arange(roles_counting.IDS))
    want = roles_counting.expected()
    assert torch.equal(rows, want[:, None].expand(-1, 2))
    store.close()
