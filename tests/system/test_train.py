"""``persia train`` with servers and ranks: the main job, distributed."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.text import Text

from persia import _core, checkpoint
from tests import ready
from tests.remote import Servers
from tests.system.processes import environment, marked, ranks
from tests.system.test_serve import serving

if not _core.GRPC[0].isdigit():
    pytest.skip("built without gRPC", allow_module_level=True)

PERSIA = [ready.python(), "-m", "persia"]
TORCHRUN = [ready.python(), "-m", "torch.distributed.run"]
RANKS = [*TORCHRUN, "--nproc-per-node", "2", "-m", "persia"]
WORLD = 2
TRAIN = ["train", "--samples", "20480", "--batch-size", "256", "--dim", "4"]
TRAIN += ["--eval-split", "0.2", "--threads", "1"]


@pytest.fixture
def mark() -> Iterator[str]:
    """A mark; nothing that has it outlives the test."""
    value = uuid.uuid4().hex
    yield value
    for pid in marked(value):
        os.kill(pid, signal.SIGKILL)


def ended(mark: str, *command: str) -> subprocess.CompletedProcess[str]:
    """A command that has ended, with or without success."""
    return subprocess.run(
        command,
        env=environment(mark),
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )


def output(mark: str, *command: str) -> str:
    """What a command prints, which must succeed."""
    done = ended(mark, *command)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not marked(mark)
    return Text.from_ansi(done.stdout).plain


def run(mark: str, *command: str) -> dict[str, str]:
    """The result table of a command, which must succeed."""
    return shown(output(mark, *command))


def of_one(*words: str) -> str:
    """What ``persia`` with these words prints."""
    done = ready.ended("-m", "persia", *words, env=environment(), timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr
    return Text.from_ansi(done.stdout).plain


def of_ranks(*words: str) -> str:
    """What two ranks of it print."""
    status, text = ranks(WORLD, "-m", "persia", *words, timeout=170)
    assert status == 0, text
    return Text.from_ansi(text).plain


def shown(text: str) -> dict[str, str]:
    """The result table as a dict, with the samples scored."""
    lines = text.splitlines()
    cells = [line.split("│") for line in lines if line.count("│") == 4]
    table = {row[1].strip(): row[2].strip() for row in cells}
    return table | {"samples": cells[0][3].split()[0]}


def rows(table: dict[str, str]) -> int:
    return int(table["rows"].replace(",", ""))


def test_servers_change_nothing_at_staleness_0() -> None:
    options = [*TRAIN, "--staleness", "0"]
    here = shown(of_one(*options))
    with serving("--shard", "0/2") as a, serving("--shard", "1/2") as b:
        addresses = f"{b.address},{a.address}"
        text = of_one(*options, "--servers", addresses)
        again = of_one(*options, "--servers", addresses)
        a.stop()
        b.stop()
    there = shown(text)
    for name in ("AUC", "log loss", "calibration", "rows"):
        assert there[name] == here[name]
    # The rows of an earlier job are told.
    assert "rows already" not in text
    assert f"the servers hold {here['rows']} rows already" in " ".join(
        again.split()
    )


def test_ranks_with_servers() -> None:
    alone = shown(of_one(*TRAIN))
    options = [*TRAIN, "--staleness", "4", "--wire-dtype", "fp16"]
    with contextlib.closing(Servers(2)) as servers:
        table = shown(of_ranks(*options, "--servers", servers.text))
    # Each rank has trained on its half: all ids of the data have a row.
    assert rows(table) == rows(alone)
    assert table["samples"] == alone["samples"] == "4,096"
    assert 0.6 < float(table["AUC"]) < float(table["planted AUC"])


def test_ranks_without_servers() -> None:
    table = shown(of_ranks(*TRAIN))
    assert 0.6 < float(table["AUC"]) < float(table["planted AUC"])
    # Three batches: the last one has no partner, and is left out.
    two, three = ([*TRAIN, "--samples", n] for n in ("512", "513"))
    trained = rows(shown(of_ranks(*two, "--staleness", "0")))
    assert rows(shown(of_ranks(*three, "--staleness", "0"))) == trained


def test_a_rank_that_fails_ends_the_cluster(mark: str, tmp_path: Path) -> None:
    # The second rank finds no data.
    script = tmp_path / "train.sh"
    script.write_text(
        f'[ "$RANK" = 0 ] || exec {ready.python()} -c "exit(3)"\n'
        f'exec {ready.python()} -m persia "$@"\n'
    )
    command = [*PERSIA, "launch", "--ps", "2", "--", *TORCHRUN]
    command += ["--nproc-per-node", "2", "--no-python", "sh", str(script)]
    done = ended(mark, *command, *TRAIN)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "job (pid" in done.stderr
    assert not marked(mark)


def test_an_error_of_one_rank_ends_all() -> None:
    words = ("-m", "persia", *TRAIN, "--save", "/proc/nothing/out")
    status, text = ranks(WORLD, *words)
    assert status == 1
    told = r"persia: error\[StorageError\]: (rank 0: )?saving into /proc/"
    lines = [line for line in text.splitlines() if "saving" in line]
    assert lines and all(re.match(told, line) for line in lines), lines


def test_a_lost_machine_ends_the_other_ranks() -> None:
    """It answers nothing more, nor says that it has ended."""
    job = str(Path(__file__).with_name("lost_job.py"))
    with contextlib.closing(Servers(2)) as servers:
        words = (job, *TRAIN, "--servers", servers.text)
        status, text = ranks(WORLD, *words)
    assert status == 1, text
    assert "persia: error[Unavailable]: " in text
    assert "Traceback" not in text


@pytest.mark.long
def test_ranks_do_not_begin_in_an_older_root(
    mark: str, tmp_path: Path
) -> None:
    options = [*TRAIN, "--samples", "2048", "--save", str(tmp_path / "out")]
    output(mark, *PERSIA, *options)
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}
    done = ended(mark, *RANKS, *options, "--keep", "1")
    assert done.returncode == 1
    assert "persia: error[StorageError]: " in done.stderr
    assert "batch" not in done.stdout
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")} == before
    output(mark, *RANKS, *options, "--resume", "auto", "--epochs", "2")
    assert checkpoint.read_extra(tmp_path / "out")["epoch"] == 2


def launched(folder: Path, *options: str) -> list[str]:
    return [*PERSIA, "launch", "--checkpoints", str(folder), *options, "--"]


def test_a_save_that_servers_cannot_make_is_told_before_the_training(
    tmp_path: Path,
) -> None:
    theirs, other = tmp_path / "theirs", tmp_path / "other"
    theirs.mkdir()
    options = [*TRAIN, "--samples", "100000000", "--save", str(other / "out")]
    with contextlib.closing(Servers(2, checkpoints=str(theirs))) as servers:
        words = ("-m", "persia", *options, "--servers", servers.text)
        status, text = ranks(WORLD, *words)
    assert status == 1
    assert f"Start all servers with --checkpoints {other}" in text
    assert "batch" not in text
    assert [left.name for left in (other / "out").iterdir()] == [".lock"]


@pytest.mark.long
@pytest.mark.timeout(500)
def test_what_a_cluster_saves_goes_on_anywhere(
    mark: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    two = launched(tmp_path, "--ps", "2")
    first = run(mark, *two, *RANKS, *TRAIN, "--save", str(out))
    resume = ["train", "--resume", str(out), "--threads", "1"]
    # In one process, on the ranks, on other servers: the same model.
    three = launched(tmp_path, "--ps", "3")
    for place in (PERSIA, RANKS, [*three, *PERSIA]):
        again = run(mark, *place, *resume)
        assert rows(again) == rows(first)
        assert again["AUC"] == first["AUC"]
        assert again["log loss"] == first["log loss"]
    # Servers that begin with its rows need no load.
    count = """
import os
from persia.distributed import status
found = status.ask(os.environ["PERSIA_SERVERS"].split(","), interval=0)
print("rows", sum(table.rows for table in status.tables(found)))
"""
    begin = launched(tmp_path, "--ps", "3", "--restore", "out")
    done = ended(mark, *begin, ready.python(), "-c", count)
    assert f"job | rows {rows(first)}\n" in done.stdout, done.stderr


@pytest.mark.timeout(500)
def test_ctrl_c_saves_on_all_ranks_at_one_batch(
    mark: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    options = [*TRAIN, "--samples", "100000000", "--save", str(out)]
    process = subprocess.Popen(
        [*launched(tmp_path, "--ps", "2"), *RANKS, *options],
        env=environment(mark),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    while "epoch 1, batch" not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    printed, messages = process.communicate(timeout=120)
    assert f"job | saved to {out}" in printed, messages
    assert not marked(mark)
    extra = checkpoint.read_extra(out)
    assert extra["epoch"] == 0 and extra["batch"] > 0
    again = ["train", "--resume", str(out), "--samples", "1024"]
    assert float(shown(of_one(*again))["AUC"]) > 0.5


def test_windows_of_ranks_are_those_of_one_process() -> None:
    """Each rank has its part of each batch, and all score together."""
    command = ["train", "drift?windows=3&vocabulary=500", "--samples", "6000"]
    command += ["--window", "1d", "--staleness", "0", "--threads", "1"]

    def windows(text: str) -> list[tuple[str, float, int]]:
        found = re.findall(
            r"window (.*): AUC ([0-9.]+), .* of ([0-9,]+) samples", text
        )
        return [
            (name, float(auc), int(n.replace(",", "")))
            for name, auc, n in found
        ]

    one = windows(of_one(*command, "--batch-size", "256"))
    two = windows(of_ranks(*command, "--batch-size", "128"))
    assert len(one) == 2
    for (name, auc, n), (name2, auc2, n2) in zip(one, two, strict=True):
        assert (name, n) == (name2, n2) == (name, 2000)
        assert auc2 == pytest.approx(auc, abs=2e-4)
