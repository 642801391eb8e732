"""A server that is stopped and started again under a running worker."""

from __future__ import annotations

import signal
import socket
import subprocess
from pathlib import Path

import pytest

from persia import _core
from tests.ready import Ready
from tests.system.processes import environment
from tests.system.test_serve import Serving

if not _core.GRPC[0].isdigit():
    pytest.skip("built without gRPC", allow_module_level=True)

STEPS = 400
# Each update adds exactly 1 to each of ten rows.
WORKER = f"""
import persia, torch

store = persia.Store(persia.optim.SGD(lr=1.0), lost="raise", timeout=120)
bags = persia.EmbeddingBagCollection(
    store=store,
    tables=[persia.EmbeddingBagConfig("user", 4, init=("constant", 0.0))],
)
ids = persia.JaggedBatch.from_dict(
    {{"user": torch.arange(10).reshape(10, 1)}}
)
for step, batch in enumerate(
    persia.DataLoader([ids] * {STEPS}, bags, staleness=2)
):
    (-bags(batch).values()).sum().backward()
    if step % 50 == 0:
        print("step", step, flush=True)
    if step in (150, 350):  # the server has started again
        input()
store.flush()
print("rows", store.rows("user", range(10)).tolist())
counts = store.stats()["client"]
print("lost", counts["lost"])
print("reconnects", counts["reconnects"])
"""


@pytest.fixture
def port() -> str:
    """A port that was free a moment ago."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def test_sigterm_and_a_new_start_lose_nothing(
    port: str, tmp_path: Path
) -> None:
    flags = ["--port", port, "--checkpoints", str(tmp_path), "--grace", "20"]
    flags += ["--restore", "job", "--or-empty", "--save-on-exit", "job"]
    server = Serving(*flags)
    assert server.address, server.process.communicate()
    worker = Ready(
        *("-c", WORKER),
        env=environment(PERSIA_SERVERS=server.address),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        assert worker.stdout is not None
        for wanted in (50, 200):
            while worker.stdout.readline() != f"step {wanted}\n":
                assert worker.poll() is None, worker.communicate()
            assert "saved job: 10 rows" in server.stop(signal.SIGTERM)
            server = Serving(*flags)
            assert server.said[0] == "restored job: 10 rows", server.said
            assert worker.stdin is not None
            worker.stdin.write("\n")
            worker.stdin.flush()
        output, messages = worker.communicate(timeout=150)
    finally:
        worker.kill()
        server.process.kill()
        worker.communicate()
        server.process.communicate()
    assert worker.returncode == 0, messages
    lines = dict(line.split(" ", 1) for line in output.splitlines())
    assert lines["rows"] == str([[float(STEPS)] * 4] * 10)
    assert lines["lost"] == "0"
    assert int(lines["reconnects"]) >= 2
