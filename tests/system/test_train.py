"""``persia train`` with servers and ranks: the main job, distributed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.text import Text

from persia import _core
from tests.system.processes import environment, marked
from tests.system.test_serve import serving

if not _core.GRPC[0].isdigit():
    pytest.skip("built without gRPC", allow_module_level=True)

PERSIA = [sys.executable, "-m", "persia"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
RANKS = [*TORCHRUN, "--nproc-per-node", "2", "-m", "persia"]
TRAIN = ["train", "--rows", "20480", "--batch-size", "256", "--dim", "4"]
TRAIN += ["--eval-split", "0.2", "--threads", "1"]


@pytest.fixture
def mark() -> Iterator[str]:
    """A mark; nothing that has it outlives the test."""
    value = uuid.uuid4().hex
    yield value
    for pid in marked(value):
        os.kill(pid, signal.SIGKILL)


def run(mark: str, *command: str, **variables: str) -> dict[str, str]:
    """The result table of a command, which must succeed."""
    done = subprocess.run(
        command,
        env=environment(mark, **variables),
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not marked(mark)
    return shown(done.stdout)


def shown(output: str) -> dict[str, str]:
    """The result table as a dict, with the samples scored."""
    lines = Text.from_ansi(output).plain.splitlines()
    cells = [line.split("│") for line in lines if line.count("│") == 4]
    table = {row[1].strip(): row[2].strip() for row in cells}
    return table | {"samples": cells[0][3].split()[0]}


def rows(table: dict[str, str]) -> int:
    return int(table["rows"].replace(",", ""))


def test_servers_change_nothing_at_staleness_0(mark: str) -> None:
    options = [*PERSIA, *TRAIN, "--staleness", "0"]
    here = run(mark, *options)
    with serving("--shard", "0/2") as a, serving("--shard", "1/2") as b:
        addresses = f"{b.address},{a.address}"
        there = run(mark, *options, "--servers", addresses)
        a.stop()
        b.stop()
    for name in ("AUC", "log loss", "calibration", "rows"):
        assert there[name] == here[name]


def test_one_command_is_a_cluster(mark: str) -> None:
    alone = run(mark, *PERSIA, *TRAIN)
    launch = [*PERSIA, "launch", "--ps", "2", "--"]
    options = ["--staleness", "4", "--wire-dtype", "fp16"]
    table = run(mark, *launch, *RANKS, *TRAIN, *options)
    # Each rank has trained on its half: all ids of the data have a row.
    assert rows(table) == rows(alone)
    assert table["samples"] == alone["samples"] == "4,096"
    assert 0.6 < float(table["AUC"]) < float(table["planted AUC"])


def test_ranks_without_servers(mark: str) -> None:
    table = run(mark, *RANKS, *TRAIN)
    assert 0.6 < float(table["AUC"]) < float(table["planted AUC"])
    # Three batches: the last one has no partner, and is left out.
    two, three = ([*TRAIN, "--rows", n] for n in ("512", "513"))
    trained = rows(run(mark, *RANKS, *two, "--staleness", "0"))
    assert rows(run(mark, *RANKS, *three, "--staleness", "0")) == trained


def test_a_rank_that_fails_ends_the_cluster(mark: str, tmp_path: Path) -> None:
    # The second rank finds no data.
    script = tmp_path / "train.sh"
    script.write_text(
        f'[ "$RANK" = 0 ] || exec {sys.executable} -c "exit(3)"\n'
        f'exec {sys.executable} -m persia "$@"\n'
    )
    command = [*PERSIA, "launch", "--ps", "2", "--", *TORCHRUN]
    command += ["--nproc-per-node", "2", "--no-python", "sh", str(script)]
    done = subprocess.run(
        [*command, *TRAIN],
        env=environment(mark),
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "job (pid" in done.stderr
    assert not marked(mark)
