"""Outputs of commands: whole or not there, and never in place of an input."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from pyarrow import parquet as pq
from typer.testing import CliRunner

import persia
from persia import errors
from persia.base import output
from persia.base.output import new_file, new_folder
from persia.cli.app import app
from persia.cli.options import to_json
from persia.data import Schema, prepare
from persia.train import CSVLog

ROOT = Path(__file__).parents[2]
SCHEMA = "{label: y, categorical: [c], timestamp: t}"


def call(*args: object) -> str:
    words = [str(arg) for arg in args]
    result = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
    if isinstance(result.exception, errors.PersiaError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def log(path: Path, n: int, first: int = 0) -> Path:
    """A click log, latest first."""
    times = range(first + n, first, -1)
    frame = pd.DataFrame(
        {
            "t": times,
            "y": [i % 2 for i in times],
            "c": [f"c{i}" for i in times],
        }
    )
    frame.to_csv(path, index=False)
    return path


def contents(folder: Path) -> dict[str, bytes]:
    """All files below a folder, hidden ones too."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.fixture
def sorted_log(tmp_path: Path) -> Path:
    """A folder with what prepare made of a first log."""
    (tmp_path / "s.yaml").write_text(SCHEMA)
    out = tmp_path / "sorted"
    prepare(
        log(tmp_path / "a.csv", 50), tmp_path / "s.yaml", out, file_samples=9
    )
    return out


def bad_column(folder: Path) -> object:
    (folder / "bad.csv").write_text("t,y,d\n1,0,a\n")
    return folder / "bad.csv"


def bad_lines(folder: Path) -> object:
    (folder / "bad.csv").write_text("t,y,c\n" + "what\n" * 9)
    return folder / "bad.csv"


def bad_label(folder: Path) -> object:
    """That is found when most of the file was read."""
    text = log(folder / "bad.csv", 30_000).read_text().splitlines()
    text[20_000:] = [line.replace(",0,", ",7,") for line in text[20_000:]]
    (folder / "bad.csv").write_text("\n".join(text))
    return folder / "bad.csv"


@pytest.mark.parametrize(
    "make",
    [
        lambda folder: folder / "typo.csv",
        lambda folder: folder / "none-*.csv",
        lambda folder: folder,
        bad_column,
        bad_lines,
        bad_label,
        lambda folder: (
            "s3://bucket.invalid.persia/x?endpoint_override="
            "127.0.0.1:1&scheme=http&retry_limit_seconds=1"
        ),
    ],
)
def test_prepare_that_fails_leaves_the_former_output(
    sorted_log: Path, make: Callable[[Path], object]
) -> None:
    source = make(sorted_log.parent)
    before = contents(sorted_log.parent)
    with pytest.raises(errors.PersiaError):
        call(
            *("prepare", source, sorted_log, "--chunk-samples", 1000),
            *("--schema", sorted_log.parent / "s.yaml"),
        )
    assert contents(sorted_log.parent) == before


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError, MemoryError])
@pytest.mark.parametrize("where", ["_merge", "_runs", "_after"])
def test_prepare_that_is_interrupted(
    sorted_log: Path,
    error: type[BaseException],
    where: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = log(sorted_log.parent / "b.csv", 70)
    before = contents(sorted_log.parent)

    def fail(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(f"persia.data.sorting.{where}", fail)
    with pytest.raises(BaseException) as caught:  # noqa: PT011
        prepare(source, sorted_log.parent / "s.yaml", sorted_log)
    assert isinstance(caught.value, error)
    assert contents(sorted_log.parent) == before


def test_prepare_replaces_its_own_output_alone(sorted_log: Path) -> None:
    (sorted_log / "notes.txt").write_text("mine")
    (sorted_log / "part-mine.parquet").write_text("mine, too")
    sorted_log.chmod(0o750)
    source = log(sorted_log.parent / "b.csv", 20, 1000)
    made = prepare(
        source, sorted_log.parent / "s.yaml", sorted_log, file_samples=15
    )
    names = {"part-00000.parquet", "part-00001.parquet", "schema.yaml"}
    there = {path.name for path in sorted_log.iterdir()}
    assert there == names | {"notes.txt", "part-mine.parquet"}
    assert sum(pq.read_metadata(f).num_rows for f in made.files) == 20
    assert sorted_log.stat().st_mode & 0o777 == 0o750
    assert (sorted_log / "notes.txt").read_text() == "mine"
    assert not [p for p in sorted_log.parent.iterdir() if p.name[0] == "."]


def test_parts_of_another_program_are_refused(sorted_log: Path) -> None:
    """They have the names of ours, and no schema is beside them."""
    (sorted_log / "schema.yaml").unlink()
    before = contents(sorted_log)
    source = log(sorted_log.parent / "b.csv", 20, 1000)
    with pytest.raises(errors.InvalidArgument, match=r"part-00000\.parquet"):
        prepare(source, sorted_log.parent / "s.yaml", sorted_log)
    assert contents(sorted_log) == before


def test_an_output_that_holds_its_input_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "s.yaml").write_text(SCHEMA)
    inside = tmp_path / "data" / "raw"
    inside.mkdir(parents=True)
    log(inside / "a.csv", 30)
    prepare(inside / "a.csv", tmp_path / "s.yaml", tmp_path / "data" / "made")
    made = tmp_path / "data" / "made"
    (tmp_path / "link").symlink_to(tmp_path / "data")
    (tmp_path / "away").mkdir()
    (tmp_path / "away" / "in.csv").symlink_to(inside / "a.csv")
    monkeypatch.chdir(inside)
    before = contents(tmp_path)
    csv, schema = inside / "a.csv", tmp_path / "s.yaml"
    for source, out in (
        (csv, inside),
        (csv, tmp_path / "data"),
        (csv, tmp_path),
        ("a.csv", "."),
        ("a.csv", ".."),
        ("../raw/*.csv", tmp_path / "link" / "raw"),
        (tmp_path / "link" / "raw" / "a.csv", inside),
        (tmp_path / "away" / "in.csv", inside),
        (tmp_path / "away" / "in.csv", tmp_path / "away"),
        (f"file://{csv}", inside),
        (csv.parent / ".." / "raw" / "a.csv", inside),
        (made / "*.parquet", made),
        (made / "*.parquet", f"{made}/"),
        (str(tmp_path / "data" / "*" / "*.parquet"), tmp_path / "data"),
        (csv, csv),
    ):
        with pytest.raises(errors.PersiaError):
            call("prepare", source, out, "--schema", schema)
        assert contents(tmp_path) == before
    # The schema is an input, too.
    held = made / "schema.yaml"
    with pytest.raises(errors.InvalidArgument):
        prepare(made / "*.parquet", held, made)
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "schema.yaml").write_text(SCHEMA)
    with pytest.raises(errors.InvalidArgument):
        prepare(csv, tmp_path / "own" / "schema.yaml", tmp_path / "own")


def test_taobao_into_its_own_folder_is_refused(tmp_path: Path) -> None:
    texts = {
        "raw_sample.csv": "user,time_stamp,adgroup_id,pid,nonclk,clk\n"
        "1,5,1,p,1,0\n",
        "ad_feature.csv": "adgroup_id,cate_id,campaign_id,customer,brand,"
        "price\n1,1,1,1,1,1\n",
        "user_profile.csv": "userid,cms_segid,cms_group_id,"
        "final_gender_code,age_level,pvalue_level,shopping_level,"
        "occupation,new_user_class_level \n1,0,0,0,0,0,0,0,0\n",
    }
    logs, ads = tmp_path / "logs", tmp_path / "ads"
    logs.mkdir()
    ads.mkdir()
    for name, text in texts.items():
        (logs / name).write_text(text)
    # One of the files that are joined lies elsewhere.
    (logs / "ad_feature.csv").rename(ads / "a.csv")
    (logs / "ad_feature.csv").symlink_to(ads / "a.csv")
    before = contents(tmp_path)
    for out in (logs, ads, tmp_path):
        with pytest.raises(errors.InvalidArgument):
            call("prepare", f"taobao:{logs}", out)
        assert contents(tmp_path) == before
    call("prepare", f"taobao:{logs}", tmp_path / "out")
    (logs / "user_profile.csv").unlink()
    before = contents(tmp_path)
    with pytest.raises(errors.StorageError):
        call("prepare", f"taobao:{logs}", tmp_path / "out")
    assert contents(tmp_path) == before


@pytest.mark.long
@pytest.mark.slow
def test_a_kill_leaves_one_output_or_the_other(sorted_log: Path) -> None:
    """At random moments; what was left is removed by the next run."""
    source = log(sorted_log.parent / "b.csv", 20_000, 1000)
    code = (
        "import sys; from persia.data import prepare; print(flush=True); "
        "[prepare(*sys.argv[1:4], chunk_samples=500, file_samples=n) "
        "for n in (3000, 5000) * 100]"
    )
    words = [str(p) for p in (source, sorted_log.parent / "s.yaml")]
    old = contents(sorted_log)
    seen = []
    for delay in (0.0, 0.3, 0.6, 0.9, 1.2, 1.5):
        process = subprocess.Popen(
            [sys.executable, "-c", code, *words, str(sorted_log)],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
        )
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        files = sorted(sorted_log.glob("*.parquet"))
        rows = [pq.read_metadata(file).num_rows for file in files]
        seen.append(rows)
        assert contents(sorted_log) == old or sum(rows) == 20_000
    prepare(source, sorted_log.parent / "s.yaml", sorted_log)
    assert seen
    assert not [p for p in sorted_log.parent.iterdir() if p.name[0] == "."]


def test_a_folder_that_cannot_be_exchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On file systems without renameat2(), and within a mount point."""
    monkeypatch.setattr(output.ctypes, "CDLL", lambda _: object())
    for text in ("a", "b"):
        with new_folder(tmp_path / "o", inputs=[], own=bool) as folder:
            (folder / "x").write_text(text)
    assert contents(tmp_path) == {"o/x": b"b"}
    # A process was killed between the two renames.
    (tmp_path / "o").rename(tmp_path / f".o-{'0' * 16}.old")
    with (
        pytest.raises(errors.StorageError),
        new_folder(tmp_path / "o", inputs=[], own=bool),
    ):
        raise OSError
    assert contents(tmp_path) == {"o/x": b"b"}
    monkeypatch.setattr(Path, "is_mount", lambda _: True)
    with (
        pytest.raises(errors.StorageError),
        new_folder(tmp_path / "o", inputs=[], own=bool),
    ):
        pass
    (tmp_path / "o" / "x").unlink()
    with new_folder(tmp_path / "o", inputs=[], own=bool) as folder:
        assert folder.parent == tmp_path / "o"
        (folder / "y").write_text("c")
    assert contents(tmp_path) == {"o/y": b"c"}


def test_a_file_is_replaced_when_it_is_complete(tmp_path: Path) -> None:
    path, link = tmp_path / "a.txt", tmp_path / "link"
    path.write_text("old")
    path.chmod(0o640)
    link.symlink_to(path)

    def fail(error: type[BaseException]) -> None:
        with new_file(path) as file:
            file.write("half")
            raise error

    for error in (KeyboardInterrupt, ValueError):
        with pytest.raises(error):
            fail(error)
        assert contents(tmp_path) == {"a.txt": b"old", "link": b"old"}
    with new_file(link) as file:
        file.write("new")
    assert link.is_symlink() and path.read_text() == "new"
    assert path.stat().st_mode & 0o777 == 0o640
    path.chmod(0o440)
    bad: list[Any] = [tmp_path, tmp_path / "no" / "x", path / "x"]
    bad += [path] if os.geteuid() else []  # root may write it
    for name in bad:
        with pytest.raises(errors.StorageError), new_file(name):
            pass
    os.link(path, tmp_path / "same")
    with (
        pytest.raises(errors.InvalidArgument),
        new_file(tmp_path / "same", inputs=[tmp_path / "none", link]),
    ):
        pass
    with pytest.raises(errors.InvalidArgument), new_file("s3://b/x"):
        pass
    assert path.read_text() == "new"
    with new_file("/dev/null") as file:
        file.write("gone")
    assert Path("/dev/null").is_char_device()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The root of a model."""
    folder = tmp_path_factory.mktemp("model")
    frame = pd.DataFrame(
        {
            "user": [f"u{i % 9}" for i in range(400)],
            "item": [i % 7 for i in range(400)],
            "click": [int(i % 3 == 0) for i in range(400)],
        }
    )
    frame.to_csv(folder / "a.csv", index=False)
    call(
        *("train", folder / "a.csv", "--batch-size", 50, "--threads", 1),
        *("--dim", 2, "--save", folder / "out"),
    )
    return folder / "out"


def test_predict_and_report_replace_no_input(
    root: Path, tmp_path: Path
) -> None:
    data = tmp_path / "day.csv"
    data.write_bytes((root.parent / "a.csv").read_bytes())
    table = tmp_path / "log.csv"
    table.write_text("step,name,value\n1,train/loss,0.5\n")
    link = tmp_path / "link.csv"
    link.symlink_to(data)
    (folder,) = root.glob("step-*")
    before, saved = contents(tmp_path), contents(root)
    for out in (data, link, root / "LATEST", folder / "manifest.json"):
        with pytest.raises(errors.InvalidArgument):
            call("predict", root, data, "--out", out)
        with pytest.raises(errors.InvalidArgument):
            call("report", root, data, "--out", out)
    with pytest.raises(errors.InvalidArgument):
        call("report", root, data, "--curves", table, "--out", table)
    with pytest.raises(errors.InvalidArgument):  # what was held out
        call("report", root, "--out", root.parent / "a.csv")
    assert (contents(tmp_path), contents(root)) == (before, saved)


def test_predict_and_report_that_fail_leave_the_former_output(
    root: Path, tmp_path: Path
) -> None:
    out, data = tmp_path / "out.txt", tmp_path / "day.csv"
    out.write_text("yesterday")
    good = (root.parent / "a.csv").read_text()
    for text in (good + "bad\n", "user,item,click\n", "user,click\nu1,1\n"):
        data.write_text(text)
        before = contents(tmp_path)
        with pytest.raises(errors.PersiaError):
            call("predict", root, data, "--out", out, "--batch-size", 64)
        assert contents(tmp_path) == before
    for text in ("user,item,click\n", "user,click\nu1,1\n"):
        data.write_text(text)
        before = contents(tmp_path)
        with pytest.raises(errors.PersiaError):
            call("report", root, data, "--out", out)
        assert contents(tmp_path) == before
    data.write_text(good)
    call("predict", root, data, "--out", out)
    assert len(out.read_text().split()) == 400


@pytest.mark.parametrize("text", ["\n", "\nuser,item\n", "user,item\n", "a"])
def test_a_log_changes_no_other_file(text: str, tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(text)
    with pytest.raises(errors.StorageError):
        CSVLog(path)
    assert path.read_text() == text


def test_certificates_are_replaced_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call("certs", tmp_path)
    before = contents(tmp_path)
    with pytest.raises(errors.StorageError):
        call("certs", tmp_path)
    real = os.fsync
    calls = []

    def full(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 3:
            raise OSError(28, "no space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(errors.StorageError):
        call("certs", tmp_path, "--force")
    monkeypatch.undo()
    assert contents(tmp_path) == before
    call("certs", tmp_path, "--force")
    assert contents(tmp_path)["token"] != before["token"]
    assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600


BAD = "user,item,click\n" + "u1,1,maybe\n" * 40


def test_nothing_to_score_is_an_error(root: Path, tmp_path: Path) -> None:
    data = tmp_path / "day.csv"
    for text in (BAD, "user,item,click\n", "user,item,click\n" + "x\n" * 9):
        data.write_text(text)
        for words in (
            ("evaluate", root, data),
            ("evaluate", root, data, "--json"),
            ("report", root, data, "--out", tmp_path / "r.html"),
        ):
            with pytest.raises(errors.MalformedData):
                call(*words)
    model = persia.train.load(root)
    with pytest.raises(errors.MalformedData):
        model.evaluate([])


def test_scores_are_json_and_tell_what_was_left_out(
    root: Path, tmp_path: Path
) -> None:
    data = tmp_path / "day.csv"
    data.write_text(BAD + "u1,1,1\nu2,2,1\n")  # one label: no AUC

    def refuse(name: str) -> Any:
        raise ValueError(name)

    text = call("evaluate", root, data, "--json")
    scores = json.loads(text, parse_constant=refuse)
    assert scores["auc"] is None
    assert (scores["samples"], scores["malformed"]) == (2, 40)
    assert "40" in call("evaluate", root, data)
    every = to_json({"a": [float("nan"), (float("-inf"), 1.5)], "b": None})
    assert json.loads(every, parse_constant=refuse) == {
        "a": [None, [None, 1.5]],
        "b": None,
    }


def test_a_schema_object_and_a_preset_are_no_inputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder of the preset's name may be the output."""
    monkeypatch.chdir(tmp_path)
    log(tmp_path / "a.csv", 5)
    schema = Schema(label="y", categorical=["c"], timestamp="t")
    monkeypatch.setattr(Schema, "load", lambda _: schema)
    for _ in range(2):
        assert prepare("a.csv", "avazu", "avazu").samples == 5


def test_a_pipe_has_no_schema(tmp_path: Path) -> None:
    """Its samples are read once; none is taken for another format's."""
    os.mkfifo(tmp_path / "pipe")
    result = CliRunner().invoke(app, ["schema", str(tmp_path / "pipe")])
    assert isinstance(result.exception, (SystemExit, errors.InvalidArgument))
    assert result.exit_code != 0 and "dense" not in result.stdout


@pytest.mark.parametrize("words", ["a.csv", "pipe --label y"])
def test_a_training_on_a_pipe_needs_a_schema(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not opened: nothing waits for a writer."""
    monkeypatch.chdir(tmp_path)
    os.mkfifo(words.split()[0])
    result = CliRunner().invoke(app, ["train", *words.split()])
    assert isinstance(result.exception, (SystemExit, errors.InvalidArgument))
    assert result.exit_code != 0
