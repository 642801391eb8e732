"""The four roles as processes: servers, embedding workers, data loaders and a
trainer."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from persia import _core
from tests.system import roles_job
from tests.system.processes import environment

if not _core.GRPC[0].isdigit():
    pytest.skip("built without gRPC", allow_module_level=True)

JOB = Path(__file__).with_name("roles_job.py")
FEED = ["feed", "--data", "synthetic", "--eval-split", "0"]
FEED += ["--rows", str(roles_job.ROWS), "--seed", str(roles_job.SEED)]
FEED += ["--batch-size", str(roles_job.BATCH)]


def start(*command: str) -> subprocess.Popen[str]:
    """A process of this source tree."""
    return subprocess.Popen(
        [sys.executable, *command],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@contextlib.contextmanager
def serving(role: str, *flags: str) -> Iterator[str]:
    """A server or worker; its address.  It must stop in peace."""
    process = start("-m", "persia", "serve", role, "--port", "0", *flags)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.match(r"serving .* on (\S+)$", line)
        assert found, line + process.communicate(timeout=60)[1]
        yield found[1]
        process.send_signal(signal.SIGTERM)
        _, messages = process.communicate(timeout=60)
        assert process.returncode == 0, messages
    finally:
        process.kill()
        process.communicate(timeout=60)


@contextlib.contextmanager
def cluster(shards: int, workers: int) -> Iterator[tuple[str, str]]:
    """The addresses of servers, and of workers."""
    with contextlib.ExitStack() as stack:
        servers = ",".join(
            stack.enter_context(serving("ps", "--shard", f"{i}/{shards}"))
            for i in range(shards)
        )
        yield (
            servers,
            ",".join(
                stack.enter_context(serving("worker", "--servers", servers))
                for _ in range(workers)
            ),
        )


def finish(process: subprocess.Popen[str]) -> str:
    """What it printed; its exit status must be 0."""
    output, messages = process.communicate(timeout=120)
    assert process.returncode == 0, messages
    return output


@pytest.mark.parametrize(("shards", "workers"), [(2, 1), (1, 2)])
def test_the_same_bits_as_one_process(shards: int, workers: int) -> None:
    """Losses, rows and dense parameters without staleness."""
    with cluster(shards, 0) as (servers, _):
        want: Any = json.loads(finish(start(str(JOB), servers)))
    with cluster(shards, workers) as (servers, addresses):
        loader = start("-m", "persia", *FEED, "--workers", addresses)
        got = json.loads(finish(start(str(JOB), servers, addresses)))
        assert re.search(r"sent 20 batches, 5,000 samples", finish(loader))
    assert len(got["losses"]) == 20
    assert got == want


def test_train_takes_what_feed_sends() -> None:
    """Two epochs of the commands, and the score of what was held out."""
    flags = ["--data", "synthetic", "--rows", "4000", "--epochs", "2"]
    with cluster(2, 1) as (servers, workers):
        loader = start("-m", "persia", "feed", *flags, "--workers", workers)
        trainer = start(
            *("-m", "persia", "train", *flags, "--workers", workers),
            *("--servers", servers, "--model", "dcn", "--threads", "1"),
        )
        output = finish(trainer)
        assert "batches from embedding" in output
        assert re.search(r"AUC .* samples held out", output)
        assert "2 epochs" in finish(loader)


def test_wrong_commands_are_one_line() -> None:
    """They name what is missing."""
    for command, text in (
        (["serve", "worker"], "PERSIA_SERVERS"),
        (["feed"], "PERSIA_WORKERS"),
        (["feed", "--workers", "a:1", "--shard", "2/2"], "0 to N - 1 of N"),
        (
            ["feed", "--workers", "127.0.0.1:1", "--timeout", "0.2"],
            "Unavailable",
        ),
    ):
        process = start("-m", "persia", *command)
        _, messages = process.communicate(timeout=60)
        assert process.returncode == 1
        assert messages.startswith("error: ")
        assert text in messages
        assert "Traceback" not in messages
