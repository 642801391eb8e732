"""``persia train``, as a user types it."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from pyarrow import csv as pa_csv
from pyarrow import parquet as pq
from rich.text import Text
from safetensors.numpy import load_file
from typer.testing import CliRunner

from persia import checkpoint, errors
from persia.base.options import read_yaml
from persia.cli.app import app
from persia.data import Files, Schema
from persia.datasets import Criteo
from persia.metrics import Scores
from persia.optim import ALGORITHMS
from persia.train import Trainer
from persia.train.config import resolve
from persia.train.elastic import Elastic
from persia.train.roots import best_root
from persia.train.run import Run
from persia.train.saved import saved_options
from tests.ready import Ready, ended
from tests.remote import Servers

ROOT = Path(__file__).parents[2]
DATA = Path(os.environ.get("PERSIA_TEST_DATA", ROOT.parent / "shared/data"))
TINY = ["--samples", "6000", "--batch-size", "256", "--threads", "1"]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}


def shown(output: str) -> dict[str, str]:
    """The result table as a dict."""
    lines = Text.from_ansi(output).plain.splitlines()
    cells = [line.split("│") for line in lines if line.count("│") == 4]
    return {row[1].strip(): row[2].strip() for row in cells}


def run(*args: str) -> dict[str, str]:
    """The result table of a run in this process."""
    result = CliRunner().invoke(app, ["train", *args], env={"COLUMNS": "200"})
    if result.exception is not None and result.exit_code == 1:
        raise result.exception
    assert result.exit_code == 0, result.output
    return shown(result.output)


def criteo_line(i: int) -> str:
    integers = [str((i * k) % 17) for k in range(13)]
    categories = [f"{(i * 31 + k) % 97:08x}" for k in range(26)]
    return "\t".join([str(int(i % 3 == 0)), *integers, *categories])


@pytest.mark.slow
def test_synthetic_end_to_end() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "persia", "train", *TINY],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    table = shown(done.stdout)
    assert 0.5 < float(table["AUC"]) < float(table["planted AUC"]) < 0.9
    assert float(table["normalised entropy"]) < 1.1
    assert int(table["rows"].replace(",", "")) > 1000
    assert float(table["bytes a row"]) > 4 * 16 * 2
    shares = [v for k, v in table.items() if k.startswith("time in ")]
    assert sum(float(share.rstrip("%")) for share in shares) == pytest.approx(
        100, abs=0.3
    )
    assert "samples/s" in done.stdout


def test_flags_override_the_file(tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    file.write_text("model: deepfm\ndim: 4\nbatch-size: 64\nstaleness: async")
    config = resolve(read_yaml(file), {"dim": 8, "staleness": "3"})
    assert (config.model, config.dim, config.batch_size) == ("deepfm", 8, 64)
    assert config.staleness == 3
    assert resolve(read_yaml(file)).staleness is None
    args = ["--config", str(file), "--samples", "2000", "--dim", "2"]
    table = run(*args)
    # 2 floats and 2 of Adagrad's state a row: far below those of dim 4.
    assert float(table["bytes a row"]) < 60


def test_options_survive_a_round_trip() -> None:
    config = resolve({"schema": "adult", "staleness": "async", "lr": 0.1})
    assert resolve(config.options()) == config
    # A later layer's way of evaluation takes the place of an earlier one's.
    layers = ({"eval_split": 0.2}, {"eval_data": "x"})
    assert resolve(*layers).eval_split is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dims": 4}, "dims: .*data, schema,"),
        ({"dim": 0}, "dim: .* 1, .*0"),
        ({"model": "mlp"}, "model: .*'mmoe' or .*, not 'mlp'"),
        ({"staleness": "never"}, "staleness: .*'never'"),
        ({"eval_data": "x", "eval_split": 0.1}, "eval_data.*eval_split"),
        ({"lr": -1.0}, "lr: .* 0"),
        ({"lr": float("inf")}, "lr: .*finite number, not inf"),
        ({"eps": 0.1, "optimizer": "sgd"}, "eps: sgd has none"),
        ({"optimizer": "lion"}, "optimizer: .*rowwise_adagrad.*'lion'"),
        ({"dense_lr": float("nan")}, "dense_lr: .*finite number, not nan"),
        ({"seed": 2**64}, "seed: .* 1844674407370955161"),
        ({"threads": 1025}, "threads: .* equal to 1024, not 1025"),
    ],
)
def test_wrong_options_are_named(
    options: dict[str, object], message: str
) -> None:
    with pytest.raises(errors.InvalidArgument, match=message):
        resolve(options)


def test_wrong_files_are_named(tmp_path: Path) -> None:
    text = tmp_path / "text.yaml"
    text.write_text("- a list")
    broken = tmp_path / "broken.yaml"
    broken.write_text("dim: [")
    with pytest.raises(errors.InvalidArgument, match="option: value"):
        read_yaml(text)
    with pytest.raises(errors.InvalidArgument, match=r"broken\.yaml: no YAML"):
        read_yaml(broken)
    with pytest.raises(errors.StorageError, match=r"none\.yaml"):
        read_yaml(tmp_path / "none.yaml")
    with pytest.raises(errors.StorageError, match="nowhere"):
        run("--data", str(tmp_path / "nowhere*.tsv"))
    with pytest.raises(errors.StorageError, match="no schema 'unknown'"):
        run("--data", str(text), "--schema", "unknown")
    with pytest.raises(errors.SchemaMismatch, match="no rows to infer"):
        run("--data", str(text))
    with pytest.raises(errors.InvalidArgument, match="--data"):
        run(str(text), "--data", str(text))
    with pytest.raises(errors.InvalidArgument, match="`schema"):
        run("--schema", "adult")
    for name, value in (
        ("--samples", "9"),
        ("--namespace", "n"),
        ("--wire-dtype", "fp16"),
    ):
        data = tmp_path / "day.tsv"
        data.write_text(criteo_line(0) + "\n")
        option = name.lstrip("-").replace("-", "_")
        with pytest.raises(errors.InvalidArgument, match=option):
            run("--data", str(data), name, value)
    with pytest.raises(errors.InvalidArgument, match="`shuffle"):
        run("--shuffle", "9")
    broken.write_text("resume: [3]")
    with pytest.raises(errors.InvalidArgument, match="resume"):
        run("--config", str(broken))
    with pytest.raises(errors.InvalidArgument, match="`save"):
        run("--save", "")
    for place in (broken, broken / "below", "/proc/none"):
        with pytest.raises(errors.StorageError, match=re.escape(str(place))):
            Run(resolve({"samples": 1000, "save": str(place)}))
    with pytest.raises(errors.PersiaError, match="nowhere"):
        run("--resume", str(tmp_path / "nowhere"))


@pytest.mark.slow
def test_an_error_is_a_line_not_a_traceback(tmp_path: Path) -> None:
    words = ("train", "--data", str(tmp_path / ":ant:none.tsv"))
    done = ended("-m", "persia", *words, env=environment(), timeout=150)
    assert done.returncode == 1
    assert "persia: error[StorageError]: " in done.stderr
    assert ":ant:none.tsv" in done.stderr
    assert "Traceback" not in done.stderr


def test_paths_are_shown_as_they_are(tmp_path: Path) -> None:
    options = [*TINY, "--save", str(tmp_path / "a[/b]:ant:")]
    done = CliRunner().invoke(app, ["train", *options])
    assert done.exit_code == 0, done.output
    folded = done.output.replace("\n", "")
    assert f"{tmp_path}/a[/b]:ant:" in folded


def test_malformed_lines_are_counted(tmp_path: Path) -> None:
    file = tmp_path / "day.tsv"
    lines = [criteo_line(i) for i in range(600)]
    lines[10] = "not\ta\tline"
    lines[20] = lines[20].replace("\t", "\tx", 1)
    file.write_text("\n".join(lines) + "\n")
    table = run("--data", str(file), "--batch-size", "64", "--dim", "4")
    assert table["malformed"] == "2"
    assert 0.0 <= float(table["AUC"]) <= 1.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"'.*a\.csv'"),
        ("y,x,c,m\n", r"'.*a\.csv'"),
        ("y,x,c,m\n" + "bad\n" * 100, r"a\.csv': 90 .*a\.csv:2: 1 columns"),
    ],
)
def test_no_usable_line_is_an_error(
    text: str, message: str, tmp_path: Path
) -> None:
    file, saved = tmp_path / "a.csv", tmp_path / "out"
    csv_file(tmp_path)
    file.write_text(text)
    options = ["--data", str(file), "--schema", str(tmp_path / "a.yaml")]
    with pytest.raises(errors.MalformedData, match=message):
        run(*options, "--save", str(saved))
    assert not saved.exists()


def test_without_a_part_held_out(tmp_path: Path) -> None:
    file = tmp_path / "day.tsv"
    file.write_text("".join(f"{criteo_line(i)}\n" for i in range(600)))
    options = ["--data", str(file), "--batch-size", "64", "--dim", "4"]
    table = run(*options, "--eval-split", "0", "--epochs", "2")
    assert "log loss" not in table
    assert 0.0 <= float(table["AUC"]) <= 1.0
    again = run(*options, "--eval-data", str(file), "--optimizer", "adam")
    assert "log loss" in again


def test_a_save_that_fails_leaves_the_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(run: Run) -> None:
        raise errors.StorageError("no space left on device")

    monkeypatch.setattr(Run, "save", full)
    options = [
        "--samples",
        "1000",
        "--dim",
        "2",
        "--save",
        str(tmp_path / "out"),
    ]
    done = CliRunner().invoke(app, ["train", *options])
    assert isinstance(done.exception, errors.StorageError)
    assert 0.0 <= float(shown(done.output)["AUC"]) <= 1.0


def test_synthetic_data_without_a_part_held_out() -> None:
    table = run("--samples", "2000", "--dim", "2", "--eval-split", "0")
    assert "log loss" not in table
    assert 0.0 <= float(table["AUC"]) <= 1.0


SCHEMA = "{label: y, dense: [x], categorical: [c], multivalued: [m]}"


def csv_file(folder: Path, rows: int = 1500) -> dict[str, object]:
    """The options of a CSV file with bags, and a malformed line."""
    lines = [f"{i % 3 // 2},{i},c{i % 9},{i % 2 * 'a,b'}" for i in range(rows)]
    quoted = ['{},{},{},"{}"'.format(*line.split(",", 3)) for line in lines]
    quoted[7] = "bad"
    (folder / "a.csv").write_text("\n".join(["y,x,c,m", *quoted, ""]))
    (folder / "a.yaml").write_text(SCHEMA)
    return {"data": str(folder / "a.csv"), "schema": str(folder / "a.yaml")}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_optimizers_have_the_constants_of_the_library(name: str) -> None:
    lr = {"lr": 5.0} if name == "sgd" else {}  # which has no default
    options = {"samples": 1000, "dim": 2, "optimizer": name}
    if lr:
        with pytest.raises(errors.InvalidArgument, match="lr"):
            resolve(options)
    store = Run(resolve(options | lr)).store
    assert store.optimizer.defaults == type(store.optimizer)(**lr).defaults


def test_eps_is_an_option(tmp_path: Path) -> None:
    folder = str(tmp_path / "out")
    options = {"samples": 1000, "dim": 2, "eps": 5e-4, "save": folder}
    saved = Run(resolve(options))
    assert saved.store.optimizer.param_groups[0]["eps"] == 5e-4
    saved.save()
    for flags, eps in (({}, 5e-4), ({"eps": 0.5}, 0.5)):
        run = Run(resolve(saved_options(folder), flags), folder)
        assert run.store.optimizer.param_groups[0]["eps"] == eps


@pytest.mark.slow
def test_ctrl_c_saves_and_exits(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    process = Ready(
        *("-m", "persia", "train", "--samples", "20000000"),
        *("--threads", "1", "--save", str(folder)),
        env={**environment(), "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        assert "dlrm of dim 16" in process.stdout.readline()
        time.sleep(3)  # some batches
        process.send_signal(signal.SIGINT)
        output, messages = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 130, messages
    assert "saved to" in output
    assert f"--resume {folder}" in output.replace("\n", "")
    extra = checkpoint.read_extra(folder)
    assert extra["epoch"] == 0
    assert extra["batch"] > 0


@pytest.mark.long
@pytest.mark.timeout(600)
def test_compiled_code_learns_the_same() -> None:
    options = ("--samples", "20000", "--batch-size", "256", "--staleness", "0")
    eager = run(*options)
    compiled = run(*options, "--compile")
    assert compiled["rows"] == eager["rows"]
    assert float(compiled["AUC"]) == pytest.approx(
        float(eager["AUC"]), abs=2e-3
    )
    assert "in compiled code" in compiled


@pytest.mark.skipif(
    not (DATA / "adult.data.gz").exists(),
    reason=f"no real data in {DATA} (set PERSIA_TEST_DATA)",
)
@pytest.mark.slow
@pytest.mark.parametrize("model", ["dlrm", "deepfm", "dcn", "widedeep"])
def test_adult(model: str) -> None:
    table = run(
        *("--data", str(DATA / "adult.data.gz"), "--schema", "adult"),
        *("--eval-data", str(DATA / "adult.test.gz"), "--model", model),
        *("--epochs", "3", "--batch-size", "512", "--eps", "5e-4"),
    )
    assert float(table["AUC"]) >= 0.905
    assert 0.9 < float(table["calibration"]) < 1.1


@pytest.mark.slow
def test_any_file_trains_by_an_inferred_schema(tmp_path: Path) -> None:
    options = csv_file(tmp_path)
    table = pa_csv.read_csv(
        options["data"],
        parse_options=pa_csv.ParseOptions(
            invalid_row_handler=lambda row: "skip"
        ),
    )
    parquet = tmp_path / "a.parquet"
    pq.write_table(table, parquet, row_group_size=100)
    first = run(str(options["data"]), "--dim", "2", "--batch-size", "64")
    again = run("--data", str(parquet), "--dim", "2", "--batch-size", "64")
    assert first["malformed"] == "1"
    assert "malformed" not in again
    assert first["rows"] == again["rows"]
    shown = CliRunner().invoke(app, ["schema", str(parquet)])
    assert shown.exit_code == 0, shown.output
    written = tmp_path / "found.yaml"
    written.write_text(shown.output)
    assert Schema.load(written) == Files(parquet).schema
    given = ["--schema", str(written), "--dim", "2", "--batch-size", "64"]
    assert run(str(parquet), *given)["rows"] == again["rows"]
    log = tmp_path / "day.tsv"
    log.write_text(f"{criteo_line(0)}\n{criteo_line(1)}\n")
    shown = CliRunner().invoke(app, ["schema", str(log)])
    written.write_text(shown.output)
    (batch,) = Files(log, written)
    (wanted,) = Criteo(log)
    assert torch.equal(batch.ids.values(), wanted.ids.values())
    torch.testing.assert_close(batch.dense, wanted.dense)
    unlabelled = tmp_path / "u.parquet"
    pq.write_table(table.drop_columns(["y"]), unlabelled)
    with pytest.raises(errors.InvalidArgument, match="persia schema"):
        run(str(unlabelled))
    shown = CliRunner().invoke(app, ["schema", str(unlabelled)])
    assert "# label" in shown.output


def test_a_rating_is_refused_before_the_training(tmp_path: Path) -> None:
    file, schema = tmp_path / "a.csv", tmp_path / "a.yaml"
    file.write_text(
        "user,item,stars\n"
        + "".join(f"{i % 9},{i % 7},{i % 5 + 1}\n" for i in range(300))
    )
    schema.write_text("{label: stars, categorical: [user, item]}")
    with pytest.raises(
        errors.SchemaMismatch, match=r"a\.csv:\d.*'stars'.*threshold"
    ):
        run(str(file), "--schema", str(schema))
    assert run(str(file), "--dim", "2")["rows"] == "16"  # stars of at least 3


def test_saves_scores_and_logs_on_the_way(tmp_path: Path) -> None:
    save, log = tmp_path / "saved", tmp_path / "log.csv"
    options = ["--save", str(save), "--save-every", "5", "--keep", "2"]
    options += ["--eval-every", "10"]
    options += ["--curves", str(log), "--curves-every", "4"]
    options += ["--warmup", "8", "--decay", "cosine", "--dense-lr", "0.01"]
    run(*TINY, *options)
    steps = {path.name for path in save.glob("step-*")}
    assert steps == {"step-20", "step-24"}
    table = pa_csv.read_csv(log).to_pandas()
    values = table.pivot(index="step", columns="name", values="value")
    assert list(values["eval/auc"].dropna().index) == [10, 20]
    assert list(values["train/loss"].dropna().index) == [4, 8, 12, 16, 20, 24]
    rates = values["train/dense_lr"].dropna()
    assert rates[4] == pytest.approx(0.01 * 5 / 8)
    assert rates[16] == pytest.approx(0.005)
    assert rates[24] == pytest.approx(0, abs=1e-9)
    assert (values["C1/rows"].dropna().diff().dropna() >= 0).all()


def scored(monkeypatch: pytest.MonkeyPatch, aucs: list[float]) -> list[int]:
    """Makes evaluations return these; the steps of those that were made."""
    steps: list[int] = []

    def evaluate(self: Trainer, dataset: object) -> Scores:
        steps.append(self.step)
        return Scores(9, 3, aucs[len(steps) - 1], 1.0, 1.0, 1.0)

    monkeypatch.setattr(Trainer, "evaluate", evaluate)
    return steps


def in_order(file: Path) -> dict[str, np.ndarray]:
    """The columns of a row file, by id."""
    columns = load_file(file)
    order = np.argsort(columns["ids"])
    return {name: values[order] for name, values in columns.items()}


def test_stops_after_scores_that_are_no_better(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = ["--save", str(tmp_path / "out"), "--keep-best"]
    every = [*TINY, *save, "--eval-every", "2", "--staleness", "0"]
    aucs = [0.6, 0.7, float("nan"), 0.7, 0.5, 0.4]
    steps = scored(monkeypatch, aucs)
    table = run(*every, "--early-stop", "3")
    assert steps == [2, 4, 6, 8, 10, 11]  # the stop is after a batch
    assert (table["best AUC"], table["AUC"]) == ("0.70000", "0.4000")
    assert checkpoint.read_extra(tmp_path / "out")["step"] == 11
    best = checkpoint.read_extra(tmp_path / "out-best")
    assert best["step"] == 4
    (folder,) = (tmp_path / "out-best").glob("step-*")
    monkeypatch.undo()
    # The rows and the model are those of a run that ends there.
    other = tmp_path / "other"
    short = Run(resolve(best["options"] | {"save": str(other)}))
    short.trainer.fit(itertools.islice(short.train, 4))
    short.save()
    short.close()
    (expected,) = other.glob("step-*")
    names = {path.name for path in expected.glob("*.safetensors")}
    assert names == {path.name for path in folder.glob("*.safetensors")}
    for name in names:
        mine, theirs = (in_order(f / name) for f in (folder, expected))
        assert mine.keys() == theirs.keys()
        for key in mine:
            np.testing.assert_array_equal(mine[key], theirs[key], key)


def test_the_last_model_may_be_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = [*TINY, "--save", str(tmp_path / "out"), "--keep-best"]
    steps = scored(monkeypatch, [0.6, 0.5, 0.7, 0.65, 0.69, 0.8])
    run(*every, "--eval-every", "10")
    assert steps == [10, 20, 24]
    assert checkpoint.read_extra(tmp_path / "out-best")["step"] == 24
    # A run that continues knows the best score of the run before.
    run("--resume", str(tmp_path / "out"), "--epochs", "2")
    assert steps[3:] == [30, 40, 48]
    assert checkpoint.read_extra(tmp_path / "out-best")["step"] == 48


def test_the_best_lies_beside_a_uri() -> None:
    assert best_root("a/b/") == "a/b-best"
    assert best_root("s3://b/c?region=x") == "s3://b/c-best?region=x"


@pytest.mark.parametrize(
    "options",
    [
        {"keep": 2},
        {"save_every": 10},
        {"save": "x", "save_every": 0},
        {"keep_best": True},
        {"early_stop": 0},
        {"early_stop": 1, "window": "1d"},
        {"early_stop": 1, "best_by": "accuracy"},
        {"accumulate": 0},
        {"precision": "fp8"},
    ],
)
def test_training_options_that_do_not_fit(options: dict[str, object]) -> None:
    with pytest.raises(errors.InvalidArgument):
        resolve(options)


@pytest.mark.parametrize(
    "label",
    ["number: true", "values: {'1': 1, '2': 2}", "values: {'1': 0, '2': -1}"],
)
def test_labels_that_are_no_clicks_are_refused_at_the_start(
    tmp_path: Path, label: str
) -> None:
    (tmp_path / "a.csv").write_text("id,price\n1,1\n2,2\n" * 60)
    (tmp_path / "a.yaml").write_text(
        f"categorical: [id]\nlabel: {{column: price, {label}}}\n"
    )
    schema = ["--schema", str(tmp_path / "a.yaml")]
    file = str(tmp_path / "a.csv")
    for options in (
        [file, "--eval-split", "0"],
        [file, "--target-auc", "0.9"],
        ["kafka://localhost:1/topic?group=g"],
    ):
        with pytest.raises(errors.InvalidArgument):
            run(*options, *schema)


@pytest.mark.parametrize("line", ["resume: [3]", "overwrite: 'no'"])
def test_what_a_configuration_says_of_checkpoints(
    tmp_path: Path, line: str
) -> None:
    file = tmp_path / "train.yaml"
    file.write_text(f"data: synthetic\n{line}\n")
    with pytest.raises(errors.InvalidArgument):
        run("--config", str(file))


def test_nothing_is_left_for_ranks_that_start_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those before were killed after their last step."""
    monkeypatch.setenv("PERSIA_RUN_ID", "left")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    words = [*TINY, "--dim", "2", "--dense-every", "5"]
    with contextlib.closing(Servers(1)) as servers:
        words += ["--servers", servers.text]
        with monkeypatch.context() as killed:
            killed.setattr(Elastic, "end", lambda self: None)
            run(*words)
        run(*words)
        assert servers.shards[0].channel(10.0).stats()["pushes"] == 24
