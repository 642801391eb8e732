"""Runs that save where earlier runs have saved, and what --resume keeps."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from typer.testing import CliRunner

import persia
from persia import checkpoint, errors
from persia.checkpoint.files import LocalRoot
from persia.cli.app import app
from persia.metrics import Scores
from persia.train import Trainer
from persia.train.config import give_way, resolve
from persia.train.roots import newest
from persia.train.run import Run
from persia.train.saved import saved_options
from tests.remote import Servers

TINY = ["--samples", "3000", "--batch-size", "256", "--dim", "2"]
TINY += ["--threads", "1", "--eval-split", "0.2"]


def run(*args: object) -> str:
    """What a run prints."""
    words = ["train", *map(str, args)]
    result = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
    if isinstance(result.exception, errors.PersiaError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    """All files below a folder, and when they were written."""
    return {
        str(path.relative_to(folder)): (
            path.stat().st_mtime_ns,
            path.read_bytes(),
        )
        for path in folder.rglob("*")
        if path.is_file()
    }


def steps(root: Path) -> list[int]:
    return LocalRoot(root).steps()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a root of three checkpoints and one of the best model."""
    folder = tmp_path_factory.mktemp("made")
    run(*TINY, "--save", folder / "out", "--save-every", 5, "--keep-best")
    assert steps(folder / "out") == [5, 10, 12]
    return folder


@pytest.fixture
def earlier(made: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    for name, (_, data) in sorted(
        contents(made).items(), key=lambda item: item[1][0]
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return tmp_path


@pytest.mark.parametrize(
    "more",
    [
        [],
        ["--keep", 1],
        ["--keep-best"],
        ["--epochs", 3, "--save-every", 1],
        ["--save-minutes", 0.001, "--dim", 3],
        ["--window", "1d", "--data", "drift", "--eval-split", 0],
    ],
)
def test_a_new_run_does_not_begin_in_an_older_ones_root(
    earlier: Path, more: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Trainer, "fit", None)  # it is refused before that
    before = contents(earlier)
    root = earlier / "out"
    (earlier / "link").symlink_to(root)
    for path in (root, f"{root}/", earlier / "link", f"file://{root}"):
        if "--window" in more:
            words = ["--save", path, *more]
        else:
            words = [*TINY, "--save", path, *more]
        with pytest.raises(errors.StorageError):
            run(*words)
    (earlier / "link").unlink()
    assert contents(earlier) == before


def test_the_root_of_the_best_model_counts_as_well(earlier: Path) -> None:
    (earlier / "out").rename(earlier / "away")
    before = contents(earlier)
    options = [*TINY, "--save", earlier / "out", "--keep-best"]
    with pytest.raises(errors.StorageError):
        run(*options)
    with pytest.raises(errors.StorageError):
        run(*options, "--resume", "auto")
    assert contents(earlier) == before
    run(*options, "--overwrite")
    best = checkpoint.read_extra(earlier / "out-best")
    here = checkpoint.read_extra(earlier / "out")
    assert best["best"]["value"] == here["best"]["value"]
    assert len(steps(earlier / "out-best")) == 1


def test_a_checkpoint_is_no_root(earlier: Path) -> None:
    with pytest.raises(errors.InvalidArgument):
        run(*TINY, "--save", earlier / "out" / "step-5")
    with pytest.raises(errors.InvalidArgument):
        run(*TINY, "--save", earlier / "out" / "step-5", "--overwrite")


def test_overwrite_removes_the_earlier_ones_at_its_first_save(
    earlier: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = earlier / "out"
    before = contents(root)
    # As long as nothing is saved they stay.
    with pytest.raises(errors.StorageError):
        run("--data", earlier / "none.csv", "--save", root, "--overwrite")
    real = Trainer.fit

    def fail(*args: Any, **more: Any) -> bool:
        real(*args, **more)
        raise errors.LimitReached("here")

    monkeypatch.setattr(Trainer, "fit", fail)
    options = [*TINY, "--save", root, "--overwrite"]
    with pytest.raises(errors.LimitReached):
        run(*options)
    assert contents(root) == before
    monkeypatch.undo()
    output = run(*options, "--save-every", 7)
    assert "3 checkpoints" in output and str(root) in output
    assert steps(root) == [7, 12]
    assert newest(str(root)) == str(root)
    # It is no option of the run: what continues does not overwrite.
    assert "overwrite" not in saved_options(root)


def test_auto_begins_or_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "out"
    options = [*TINY, "--save", root, "--resume", "auto", "--save-every", 4]
    real = Run.save

    def save(self: Run) -> Any:
        folder = real(self)
        if self.trainer.step == 8:
            raise errors.LimitReached("killed after a save")
        return folder

    monkeypatch.setattr(Run, "save", save)
    with pytest.raises(errors.LimitReached):
        run(*options)
    monkeypatch.undo()
    assert steps(root) == [4, 8]
    (root / "LATEST").unlink()  # killed before that was written
    run("--resume", root, "--save", tmp_path / "copy", "--save-every", 99)
    assert steps(tmp_path / "copy") == [12]
    run(*options)
    assert steps(root) == [4, 8, 12]
    whole = tmp_path / "whole"
    run(*TINY, "--save", whole)
    extras = [checkpoint.read_extra(folder) for folder in (root, whole)]
    for extra in extras:
        del extra["options"], extra["best"]
    assert extras[0] == extras[1]
    # All is trained: nothing changes.
    before = contents(root)
    run(*options)
    assert contents(root) == before
    config = tmp_path / "o.yaml"
    config.write_text(f"resume: auto\nsave: {root}\nsamples: 3000\n")
    run("--config", config)
    assert contents(root) == before


def test_what_auto_and_overwrite_need(earlier: Path) -> None:
    root = earlier / "out"
    config = earlier / "o.yaml"
    config.write_text("overwrite: perhaps")
    for words in (
        [*TINY, "--resume", "auto"],
        [*TINY, "--overwrite"],
        [*TINY, "--save", root, "--resume", "auto", "--overwrite"],
        [*TINY, "--save", root, "--config", config],
    ):
        with pytest.raises(errors.InvalidArgument):
            run(*words)
    config.write_text(f"overwrite: true\nsave: {root}")
    run(*TINY, "--config", config)
    assert steps(root) == [12]


def test_an_older_checkpoint_continues_elsewhere(earlier: Path) -> None:
    """In its own root it would hide the later ones."""
    root = earlier / "out"
    before = contents(earlier)
    for words in (
        ["--resume", root / "step-5"],
        ["--resume", root / "step-10", "--keep", 1],
        ["--resume", root / "step-5", "--no-keep-best"],
    ):
        with pytest.raises(errors.StorageError):
            run(*words, "--save", root)
    assert contents(earlier) == before
    run("--resume", root / "step-5", "--save", earlier / "b", "--no-keep-best")
    assert steps(earlier / "b") == [10, 12]
    # Another root that has checkpoints of its own.
    with pytest.raises(errors.StorageError):
        run("--resume", earlier / "b", "--save", root, "--epochs", 2)
    run("--resume", root / "step-5", "--save", root, "--overwrite")
    assert steps(root) == [10, 12]


def test_the_latest_checkpoint_continues_in_its_root(earlier: Path) -> None:
    root = earlier / "out"
    save = ["--save", root, "--keep", 2]
    run("--resume", root, *save, "--epochs", 2)
    assert steps(root) == [20, 24]
    run("--resume", root / "step-24", *save, "--epochs", 3)
    assert steps(root) == [35, 36]


def scored(monkeypatch: pytest.MonkeyPatch, aucs: dict[int, float]) -> None:
    """Makes evaluations at steps return these."""

    def evaluate(self: Trainer, dataset: object) -> Scores:
        return Scores(9, 3, aucs[self.step], 1.0, 1.0, 1.0)

    monkeypatch.setattr(Trainer, "evaluate", evaluate)


def test_the_best_model_is_not_replaced_by_a_worse_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That a life has saved which was killed before its next save."""
    root, best = tmp_path / "out", tmp_path / "out-best"
    options = [*TINY, "--save", root, "--keep-best", "--eval-every", 2]
    scored(monkeypatch, {2: 0.6, 4: 0.5, 6: 0.9})
    real = Run.save

    def save(self: Run) -> Any:
        return real(self)

    def killed(self: Run) -> bool:
        if self.trainer.step == 6 and self.best.value == 0.9:
            raise errors.LimitReached("killed")
        return False

    monkeypatch.setattr(Run, "save", save)
    hooks = Run.make_hooks

    def then_killed(self: Run, tell: Any) -> Any:
        made = hooks(self, tell)
        return [*made, persia.train.Every(lambda: killed(self), steps=1)]

    monkeypatch.setattr(Run, "make_hooks", then_killed)
    with pytest.raises(errors.LimitReached):
        run(*options, "--save-every", 4)
    monkeypatch.setattr(Run, "make_hooks", hooks)
    assert checkpoint.read_extra(root)["step"] == 4
    assert checkpoint.read_extra(best)["step"] == 6
    # This life is unlucky.
    scored(monkeypatch, {6: 0.7, 8: 0.8, 10: 0.85, 12: 0.4})
    run(*options, "--resume", "auto")
    assert checkpoint.read_extra(best)["best"]["value"] == 0.9
    assert checkpoint.read_extra(root)["best"]["value"] == 0.85
    scored(monkeypatch, dict.fromkeys(range(40), 0.95))
    run("--resume", root, "--epochs", 2)
    assert checkpoint.read_extra(best)["best"]["value"] == 0.95
    # By another score nothing is known of it.
    with pytest.raises(errors.StorageError):
        run("--resume", root, "--epochs", 3, "--best-by", "logloss")
    assert checkpoint.read_extra(best)["best"]["value"] == 0.95


def fill(store: persia.Store, n: int) -> None:
    bags = persia.EmbeddingBagCollection(
        store=store, tables=[persia.EmbeddingBagConfig("t", 2, ["t"])]
    )
    ids = {"t": persia.hash_ids(range(n))}
    bags(ids).values().sum().backward()


def test_keep_removes_no_checkpoint_of_another_training(
    tmp_path: Path,
) -> None:
    """In Python, over three lives."""
    first = persia.Store()
    fill(first, 3)
    for step in (80, 90, 100):
        first.save(tmp_path, keep=2, step=step)
    assert steps(tmp_path) == [90, 100]
    second = persia.Store()
    fill(second, 4)
    for step in (1, 2, 3):
        second.save(tmp_path, keep=1, step=step)
    assert steps(tmp_path) == [90, 100, 3]
    third = persia.Store()
    fill(third, 5)
    third.load(tmp_path)  # continues the second
    for step in (4, 5):
        third.save(tmp_path, keep=1, step=step)
    assert steps(tmp_path) == [90, 100, 5]
    fourth = persia.Store()
    fill(fourth, 5)
    fourth.load(tmp_path, step=90)
    fourth.save(tmp_path, keep=1, step=6)
    assert steps(tmp_path) == [5, 6]


def test_resume_keeps_every_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {
        "servers": "a:1,b:2",
        "namespace": "job7",
        "wire_dtype": "bf16",
        "workers": "c:3",
        "device": "auto",
        "curves": "a.csv",
        "save": "out",
        "threads": 3,
        "schema": "adult",
    }
    saved = resolve(given).options()
    assert given.items() <= saved.items()
    assert resolve(saved) == resolve(given)
    # What the environment names is of this run.
    assert give_way(saved, ()) == (saved, [])
    monkeypatch.setenv("PERSIA_SERVERS", "d:4")
    monkeypatch.setenv("PERSIA_WORKERS", "c:3")
    monkeypatch.setenv("PERSIA_NAMESPACE", "job8")
    kept, lines = give_way(saved, {"namespace"})
    assert kept == {k: v for k, v in saved.items() if k != "servers"}
    assert len(lines) == 1
    assert "a:1,b:2" in lines[0] and "PERSIA_SERVERS=d:4" in lines[0]


def test_a_log_continues(tmp_path: Path) -> None:
    log, root = tmp_path / "log.csv", tmp_path / "out"
    run(*TINY, "--save", root, "--curves", log, "--curves-every", 6)
    assert sorted(set(pd.read_csv(log)["step"])) == [6, 12]
    run("--resume", root, "--epochs", 2)
    assert sorted(set(pd.read_csv(log)["step"])) == [6, 12, 18, 24]
    run("--resume", root, "--epochs", 3, "--curves", tmp_path / "b.csv")
    assert sorted(set(pd.read_csv(log)["step"])) == [6, 12, 18, 24]


def test_a_life_does_not_begin_anew_on_rows_of_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which torchrun starts again, with servers that have gone on."""
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    with contextlib.closing(Servers(1, checkpoints=str(tmp_path))) as servers:
        monkeypatch.setenv("PERSIA_SERVERS", servers.text)
        real = Run.fit

        def fail(*args: Any) -> bool:
            real(*args)
            raise errors.LimitReached("killed")

        monkeypatch.setattr(Run, "fit", fail)
        auto = [*TINY, "--save", tmp_path / "job", "--resume", "auto"]
        with pytest.raises(errors.LimitReached):
            run(*auto)
        monkeypatch.undo()
        monkeypatch.setenv("PERSIA_SERVERS", servers.text)
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
        assert steps(tmp_path / "job") == [0]  # before the first step
        for words in (TINY, [*TINY, "--save", tmp_path / "other"]):
            with pytest.raises(errors.StorageError):
                run(*words)
        run(*auto)
        assert steps(tmp_path / "job") == [0, 12]
    # The rows are those of one life: that of a run without failure.
    alone = tmp_path / "alone"
    monkeypatch.delenv("PERSIA_SERVERS")
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT")
    run(*TINY, "--save", alone)
    found = [
        {t.name: t.rows for t in checkpoint_of(root).tables}
        for root in (tmp_path / "job", alone)
    ]
    assert found[0] == found[1]


def test_a_job_does_not_begin_again_on_its_own_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where a machine joins, torchrun starts all ranks again, and counts no
    restart."""
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    with contextlib.closing(Servers(1)) as servers:
        monkeypatch.setenv("PERSIA_SERVERS", servers.text)
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "clicks")
        run(*TINY)
        with pytest.raises(errors.StorageError):
            run(*TINY)
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "other")
        run(*TINY)
        # torchrun was given no name.
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
        said: list[str] = []
        monkeypatch.setattr("persia.train.elastic.warn", said.append)
        run(*TINY)
        assert len(said) == 1


def checkpoint_of(root: Path) -> Any:
    from persia.checkpoint import files

    return files.find(files.root_of(root), None).manifest


def clicks(path: Path, columns: str = "user,item,click") -> Path:
    lines = [f"u{i % 9},{i % 7},{int(i % 3 == 0)}\n" for i in range(600)]
    path.write_text("".join([f"{columns}\n" if columns else "", *lines]))
    return path


@pytest.mark.parametrize("rest", ["missing", "columns", "header", "label"])
def test_eval_data_that_does_not_fit_is_found_before_the_training(
    tmp_path: Path, rest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, test = clicks(tmp_path / "a.csv"), tmp_path / "b.csv"
    if rest == "columns":
        clicks(test, "user,article,click")
    elif rest == "header":
        clicks(test, "")
    elif rest == "label":
        test.write_text("user,item,click\n" + "u1,1,maybe\n" * 99)
    monkeypatch.setattr(Trainer, "fit", None)
    (tmp_path / "more").mkdir()
    clicks(tmp_path / "more" / "a.csv")
    if test.exists():
        (tmp_path / "more" / "b.csv").write_bytes(test.read_bytes())
    paths: list[object] = [test]
    if rest in ("columns", "header"):  # also as the second of two
        paths.append(tmp_path / "more" / "*.csv")
    for path in paths:
        options = ["--batch-size", 64, "--dim", 2, "--eval-data", path]
        with pytest.raises(errors.PersiaError):
            run(data, *options, "--save", tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_eval_data_is_scored_as_a_whole(tmp_path: Path) -> None:
    """What was looked at before the training is not counted twice."""
    data = clicks(tmp_path / "a.csv")
    test = clicks(tmp_path / "b.csv")
    test.write_text(test.read_text() + "bad\n" * 3)
    options = ["--batch-size", 64, "--dim", 2, "--eval-data", test]
    assert "600 samples held out" in run(data, *options)


def test_no_line_held_out_that_is_usable_is_an_error(tmp_path: Path) -> None:
    data = clicks(tmp_path / "a.csv")
    data.write_text(data.read_text() + "u1,1,maybe\n" * 100)
    schema = tmp_path / "s.yaml"
    schema.write_text("{label: click, categorical: [user, item]}")
    options = ["--batch-size", 64, "--dim", 2, "--save", tmp_path / "out"]
    options += ["--schema", schema, "--malformed-limit", 1]
    with pytest.raises(errors.MalformedData):
        run(data, *options, "--eval-split", 0.1)
    assert checkpoint.read_extra(tmp_path / "out")["epoch"] == 1
    with pytest.raises(errors.MalformedData):
        CliRunner().invoke(
            app,
            ["evaluate", str(tmp_path / "out")],
            catch_exceptions=False,
        )
