"""``persia train --resume`` where data loaders send the batches."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from persia import _core
from tests.system.processes import wait_until
from tests.system.test_roles import finish, serving, start

if not _core.GRPC[0].isdigit():
    pytest.skip("built without gRPC", allow_module_level=True)

pytestmark = pytest.mark.timeout(300)

DATA = ["--data", "synthetic", "--samples", "10000", "--epochs", "2"]
DATA += ["--batch-size", "50", "--eval-split", "0"]
BATCHES = 2 * 10000 // 50


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[tuple[str, str]]:
    """The addresses of two servers, and of a worker."""
    with contextlib.ExitStack() as stack:
        at = ["--checkpoints", str(folder)]
        servers = ",".join(
            stack.enter_context(serving("ps", "--shard", f"{i}/2", *at))
            for i in range(2)
        )
        yield (
            servers,
            stack.enter_context(serving("worker", "--servers", servers)),
        )


def feed(workers: str) -> subprocess.Popen[str]:
    return start(
        *("-m", "persia", "feed", *DATA, "--job", "j", "--workers", workers)
    )


def train(
    root: Path, servers: str, workers: str, *more: str
) -> subprocess.Popen[str]:
    """A trainer that saves, begun or (``more``) continued."""
    return start(
        *("-m", "persia", "train", "--servers", servers, "--save", str(root)),
        *("--workers", workers, "--save-every", "50", "--threads", "1"),
        *(more or DATA),
    )


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def step_of(root: Path) -> int:
    """Batches in the dense part of the latest checkpoint, as Adam counts
    them itself."""
    folder = root / (root / "LATEST").read_text().strip()
    dense = torch.load(folder / "dense.pt", weights_only=True)
    states = dense["optimizer"]["state"].values()
    return int(next(iter(states))["step"])


def wait_for(root: Path, step: int) -> None:
    """Until a checkpoint of so many batches is the latest one."""
    latest = root / "LATEST"
    wait_until(
        lambda: (
            latest.exists()
            and int(latest.read_text().strip().removeprefix("step-")) >= step
        ),
        120,
    )


def test_a_trainer_is_killed(tmp_path: Path) -> None:
    """The others run on: the loader sends again what the checkpoint lacks."""
    root = tmp_path / "out"
    with cluster(tmp_path) as (servers, workers):
        loader = feed(workers)
        trainer = train(root, servers, workers)
        wait_for(root, 50)
        kill(trainer)
        assert 50 <= step_of(root) < BATCHES
        output = finish(train(root, servers, workers, "--resume", str(root)))
        assert "batches from embedding workers" in output
        assert "lost" not in finish(loader)
    assert step_of(root) == BATCHES


def test_all_are_killed(tmp_path: Path) -> None:
    """In the second epoch; each batch is trained once in the end."""
    root = tmp_path / "out"
    with cluster(tmp_path) as (servers, workers):
        loader = feed(workers)
        trainer = train(root, servers, workers)
        wait_for(root, BATCHES // 2 + 50)
        kill(trainer)
        kill(loader)
    saved = step_of(root)
    assert BATCHES // 2 < saved < BATCHES
    with cluster(tmp_path) as (servers, workers):
        loader = feed(workers)
        finish(train(root, servers, workers, "--resume", str(root)))
        finish(loader)
    assert step_of(root) == BATCHES
