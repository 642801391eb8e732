"""Checkpoints of jobs of two ranks, with their tables on the
ranks or on servers: tests/system/checkpoint_job.py has what they do.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import persia
from tests.remote import Servers
from tests.system import checkpoint_job as job
from tests.system.processes import environment, marked, ranks, wait_until

WORLD = 2
SETTINGS = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}


def command(
    folder: Path, scenario: str, servers: str, root: Path
) -> list[str]:
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(WORLD)),
        *(job.__file__, str(folder), scenario, servers, str(root)),
    ]


def end(mark: str) -> None:
    """Ends what a test has left, if it failed."""
    for pid in marked(mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def launch(
    folder: Path, scenario: str, servers: str, root: Path, world: int = WORLD
) -> list[Any]:
    """What each rank returned."""
    words = (job.__file__, str(folder), scenario, servers, str(root))
    status, text = ranks(world, *words)
    assert status == 0, text
    return [torch.load(folder / f"{scenario}.{r}.pt") for r in range(world)]


@pytest.fixture(params=["ranks", "servers"])
def where(request: Any, tmp_path: Path) -> Iterator[Callable[[int], str]]:
    """Makes a place for tables: the ranks, or so many servers that write to
    tmp_path."""
    made = []

    def make(n: int) -> str:
        if request.param == "ranks":
            return "ranks"
        made.append(Servers(n, checkpoints=str(tmp_path)))
        return made[-1].text

    yield make
    for servers in made:
        servers.close()


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, tuple | list):
        return all(same(x, y) for x, y in zip(a, b, strict=True))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else bool(a == b)


def test_a_job_goes_on_with_the_same_bits(
    tmp_path: Path, where: Callable[[int], str]
) -> None:
    root = tmp_path / "out"
    whole = launch(tmp_path, "undisturbed", where(2), root)
    # A new job, on another number of servers.
    again = launch(tmp_path, "resumed", where(3), root)
    assert whole[0]["losses"] != whole[1]["losses"]
    for rank in range(WORLD):
        for result in again[rank]:
            assert same(result, whole[rank])
    # One process sees the rows of the moment of the save.
    store = persia.Store(persia.optim.Adam(lr=0.02))
    for name, dim, dtype in (("u", 8, "bf16"), ("i", 6, "fp32")):
        config = persia.EmbeddingBagConfig(name, dim, data_type=dtype)
        store.add_table(config)
    found = store.load(root)
    assert found.step == store.updates == job.SAVED
    assert store.stats()["tables"]["u"]["rows"] == found.rows["u"] > 0


def test_continue_with_rows_on_the_ranks(tmp_path: Path) -> None:
    """Every update counts once while they live, and they do not come back."""
    root = tmp_path / "out"
    for once, again in launch(tmp_path, "kept", "ranks", root):
        assert once == again == {4.0 * WORLD}
    for text in launch(tmp_path, "kept", "ranks", root):
        assert text.startswith("InvalidArgument: ")
        assert "the rows of this store are in its ranks" in text


def test_one_rank_fails(tmp_path: Path, where: Callable[[int], str]) -> None:
    results = launch(tmp_path, "failing", where(2), tmp_path / "out")
    for name, kind, words in (
        ("raises", "KeyError", "no such state"),
        ("unreadable", "InvalidArgument", "loader of rank 1"),
        ("path", "InvalidArgument", "give it as a string"),
        ("disk", "StorageError", "/proc/nothing"),
        ("load", "SchemaMismatch", "does not fit"),
        ("step", "StorageError", "no complete checkpoint of step 77"),
        ("pass", "InvalidArgument", "leave its loop first"),
    ):
        for result in results:
            assert result[name].startswith(f"{kind}: ")
            assert words in result[name]
    for result in results:
        assert result["rows"] == {4.0}
        assert result["files"] == [".lock", "LATEST", "step-2"]


def text_of(path: Path) -> str:
    return path.read_text() if path.exists() else ""


@pytest.mark.long
def test_ranks_are_killed_while_they_save(
    tmp_path: Path, where: Callable[[int], str]
) -> None:
    root = tmp_path / "out"
    latest = root / "LATEST"
    rng = random.Random(3)
    last = 0
    mark = str(tmp_path)
    for _ in range(3):
        for pid in tmp_path.glob("out.*"):
            pid.unlink()
        running = subprocess.Popen(
            command(tmp_path, "counting", where(2), root),
            env=environment(mark, **SETTINGS),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        victim = tmp_path / f"out.{rng.randrange(WORLD)}"
        before = text_of(latest)
        try:
            wait_until(partial(text_of, victim))
            wait_until(lambda: text_of(latest) != before)  # noqa: B023
            time.sleep(rng.random() / 2)
            os.kill(int(victim.read_text()), signal.SIGKILL)
            # The others notice, and torchrun ends.
            assert running.wait(60) != 0
            wait_until(lambda: not marked(mark))
        finally:
            end(mark)
            running.wait()

        store = persia.Store(persia.optim.SGD(lr=1.0))
        store.add_table(persia.EmbeddingBagConfig("t", 2, init=0.0))
        found = store.load(root)
        assert found.step >= last
        last = found.step
        rows = store.rows("t", torch.arange(job.ROWS))
        assert rows.eq(found.extra["pushes"]).all()


def test_ctrl_c_ends_the_work_of_all_ranks(tmp_path: Path) -> None:
    one, two = launch(tmp_path, "interrupted", "ranks", tmp_path / "out")
    told = "rank {}: interrupted (KeyboardInterrupt)"
    own = "KeyboardInterrupt: "
    assert one == 40 * [own, f"Interrupted: {told.format(1)}"]
    assert two == 40 * [f"Interrupted: {told.format(0)}", own]


@pytest.mark.long  # the next one is of three ranks
def test_a_rank_that_is_stopped_is_named(tmp_path: Path) -> None:
    zero, one = launch(tmp_path, "frozen", "ranks", tmp_path / "out")
    late = "DeadlineExceeded: rank {} of 2 has said nothing for too long"
    assert zero[0].startswith(late.format(1))
    assert one[1].startswith(late.format(0))


def test_a_rank_that_is_stopped_is_named_by_all_others(tmp_path: Path) -> None:
    said = launch(
        tmp_path, "frozen_of_three", "ranks", tmp_path / "out", world=3
    )
    late = "DeadlineExceeded: rank 1 of 3 has said nothing for too long"
    assert said[0][0].startswith(late)
    assert said[2][0].startswith(late)
