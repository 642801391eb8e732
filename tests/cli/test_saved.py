"""persia evaluate, persia checkpoint and persia.train.load."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from typer.testing import CliRunner

import persia
from persia import errors
from persia.checkpoint.manifest import encode_manifest
from persia.cli.app import app
from persia.train import load


def call(*args: object) -> str:
    words = [str(arg) for arg in args]
    result = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
    if isinstance(result.exception, persia.errors.PersiaError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope="module")
def clicks(tmp_path_factory: Any) -> Path:
    """A click log in a Parquet file."""
    rng = np.random.default_rng(0)
    user, item = rng.integers(0, 50, (2, 6000))
    price = rng.normal(5.0, 2.0, 6000)
    click = (rng.random(6000) < 0.2 + 0.5 * (user % 7 == item % 7)).astype(int)
    frame = pd.DataFrame(
        {
            "user": [f"u{n}" for n in user],
            "item": item,
            "price": price,
            "click": click,
        }
    )
    path: Path = tmp_path_factory.mktemp("clicks") / "clicks.parquet"
    frame.to_parquet(path)
    return path


@pytest.fixture(scope="module")
def trained(
    clicks: Path, tmp_path_factory: Any
) -> tuple[Path, dict[str, Any]]:
    """A root with two checkpoints, and the scores of the last one."""
    out: Path = tmp_path_factory.mktemp("trained") / "out"
    log = out.parent / "log.csv"
    call(
        *("train", clicks, "--batch-size", 250, "--threads", 1),
        *("--save", out, "--save-every", 11, "--model", "deepfm"),
        *("--curves", log, "--eval-every", 22),
    )
    values = pd.read_csv(log).query("step == 22").set_index("name")["value"]
    return out, values.to_dict()


def test_what_was_held_out_is_read_by_the_schema_of_the_training(
    clicks: Path, tmp_path: Path
) -> None:
    """Not by what could be inferred of the files now."""
    data, out = tmp_path / "clicks.csv", tmp_path / "out"
    frame = pd.read_parquet(clicks).head(600)
    frame.to_csv(data, index=False)
    call("train", data, "--save", out, "--dim", 2, "--threads", 1)
    before = json.loads(call("evaluate", out, "--json").splitlines()[-1])
    # In the part that was trained prices are whole numbers now.
    frame.loc[: len(frame) - 61, "price"] = 7
    frame["late"] = range(len(frame))
    frame.to_csv(data, index=False)
    done = CliRunner().invoke(app, ["evaluate", str(out), "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout) == before and not done.stderr


def test_a_model_of_the_command_line_loads_in_one_call(
    trained: tuple[Path, dict[str, Any]], clicks: Path
) -> None:
    out, scores = trained
    model = load(out)
    assert model.config.model == "deepfm"
    held = model.evaluate(model.held_out())
    assert held.auc == pytest.approx(scores["eval/auc"])
    assert held.logloss == pytest.approx(scores["eval/logloss"])
    batch = next(iter(model.read(str(clicks), batch_size=64)))
    chances = model.predict(batch)
    assert chances.shape == (64,) and chances.dtype == torch.float32
    assert ((chances > 0) & (chances < 1)).all()
    # The columns are made as in the training: the same moments, too.
    assert load(out, step=11).schema == model.schema


def test_evaluate(
    trained: tuple[Path, dict[str, Any]], clicks: Path, tmp_path: Path
) -> None:
    out, scores = trained
    held = json.loads(call("evaluate", out, "--json"))
    assert held["auc"] == pytest.approx(scores["eval/auc"])
    frame = pd.read_parquet(clicks).sample(500, random_state=0)
    frame.to_parquet(tmp_path / "day.parquet")
    day = json.loads(call("evaluate", out, tmp_path / "day.parquet", "--json"))
    assert day["samples"] == 500
    assert day["positives"] == int(frame["click"].sum())
    assert f"{day['auc']:.5f}" in call(
        "evaluate", out, tmp_path / "day.parquet", "--batch-size", 77
    )
    earlier = json.loads(call("evaluate", out, "--step", 11, "--json"))
    assert earlier["auc"] != held["auc"]


def test_what_cannot_be_evaluated(
    trained: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    out, _ = trained
    with pytest.raises(errors.StorageError):
        load(out, step=3)
    frame = pd.DataFrame({"user": ["u1"], "click": [1]})
    frame.to_parquet(tmp_path / "other.parquet")
    with pytest.raises(errors.PersiaError):
        call("evaluate", out, tmp_path / "other.parquet")
    store = persia.Store(persia.optim.SGD(lr=1.0))
    store.save(tmp_path / "mine")
    with pytest.raises(errors.SchemaMismatch):
        load(tmp_path / "mine")


def test_checkpoint_ls_and_inspect(
    trained: tuple[Path, dict[str, Any]],
) -> None:
    out, _ = trained
    listed = json.loads(call("checkpoint", "ls", out, "--json"))
    assert [one["step"] for one in listed] == [11, 22]
    assert [one["latest"] for one in listed] == [False, True]
    one = json.loads(call("checkpoint", "inspect", out, "--json"))
    assert one == {k: v for k, v in listed[1].items() if k != "latest"}
    folder = out / "step-22"
    on_disk = sum(path.stat().st_size for path in folder.iterdir())
    assert one["bytes"] == on_disk - (folder / "manifest.json").stat().st_size
    assert {t["name"]: t["rows"] for t in one["tables"]} == {
        "user": 50,
        "item": 50,
    }
    assert "latest" in call("checkpoint", "ls", out)
    text = call("checkpoint", "inspect", out / "step-11")
    assert "adagrad" in text and "user" in text


def test_checkpoint_ls_of_damaged_ones(
    trained: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    """The others are listed all the same."""
    out = tmp_path / "out"
    shutil.copytree(trained[0], out)
    whole = json.loads(call("checkpoint", "ls", out, "--json"))
    manifest = out / "step-11" / "manifest.json"
    good = manifest.read_bytes()
    other = json.loads(good) | {"version": 99}
    for bad in (
        b"",
        good[:-9],
        good.replace(b"adagrad", b"adagrae"),
        b"[1]",
        encode_manifest(other),
    ):
        manifest.write_bytes(bad)
        listed = json.loads(call("checkpoint", "ls", out, "--json"))
        assert [one["step"] for one in listed] == [11, 22]
        assert listed[0]["damaged"] and "damaged" not in listed[1]
        assert listed[1]["bytes"] == whole[1]["bytes"]
        assert listed[1]["latest"]
        lines = call("checkpoint", "ls", out).splitlines()
        assert sum("damaged" in line for line in lines) == 1
        with pytest.raises((errors.CorruptFile, errors.SchemaMismatch)):
            call("checkpoint", "verify", out, "--step", 11)


def test_what_is_no_root(
    trained: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    out, _ = trained
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "half" / "step-3").mkdir(parents=True)  # no manifest
    for root in ("none", "empty", "file", "half"):
        for words in (
            ("checkpoint", "ls", tmp_path / root),
            ("checkpoint", "ls", tmp_path / root, "--json"),
            ("checkpoint", "inspect", tmp_path / root),
            ("checkpoint", "verify", tmp_path / root),
            ("rows", "get", "user", 1, "--checkpoint", tmp_path / root),
            ("rows", "explain", "user", 1, "--checkpoint", tmp_path / root),
            ("rows", "top", "user", "--checkpoint", tmp_path / root),
            ("evaluate", tmp_path / root),
            ("report", tmp_path / root, "--out", tmp_path / "r.html"),
            ("predict", tmp_path / root, out, "--out", tmp_path / "p.txt"),
            ("train", "--resume", tmp_path / root),
        ):
            with pytest.raises(errors.StorageError):
                call(*words)
    with pytest.raises(errors.StorageError):
        call("checkpoint", "ls", out / "step-11")
    with pytest.raises(errors.PersiaError):
        call("checkpoint", "ls", "")


def test_verify_names_what_is_damaged(
    trained: tuple[Path, dict[str, Any]],
) -> None:
    out, _ = trained
    call("checkpoint", "verify", out)
    path = next((out / "step-11").glob("*.safetensors"))
    good = path.read_bytes()
    for bad in (good[:-1], good[:-1] + bytes([good[-1] ^ 1]), None):
        if bad is None:
            path.unlink()
        else:
            path.write_bytes(bad)
        with pytest.raises(errors.CorruptFile, match=path.name):
            call("checkpoint", "verify", out, "--step", 11)
    path.write_bytes(good)
    call("checkpoint", "verify", out, "--step", 11)


def test_frames_are_predicted_with_and_without_labels(
    trained: tuple[Path, dict[str, Any]], clicks: Path
) -> None:
    model = load(trained[0])
    frame = pd.read_parquet(clicks)
    wanted = torch.cat([model.predict(b) for b in model.read(str(clicks))])
    assert torch.allclose(model.predict(frame), wanted)
    bare = frame.drop(columns="click").iloc[::-1]
    assert torch.allclose(model.predict(bare), wanted.flip(0))
    assert model.predict(frame[:0]).shape == (0,)
    one = {"user": ["u7"], "item": [3], "price": [5.0]}
    assert 0 < float(model.predict(one)) < 1
    with pytest.raises(errors.SchemaMismatch):
        model.predict(frame.drop(columns="user"))
    with pytest.raises(errors.MalformedData):
        model.predict(one | {"price": ["dear"]})


def test_predict_writes_a_probability_a_sample(
    trained: tuple[Path, dict[str, Any]], clicks: Path, tmp_path: Path
) -> None:
    """Those of the model in Python, from files without the label."""
    root, _ = trained
    bare = tmp_path / "bare.parquet"
    pd.read_parquet(clicks).drop(columns="click").head(700).to_parquet(bare)
    out = tmp_path / "out.txt"
    call("predict", root, bare, "--out", out, "--batch-size", 256)
    model = load(root)
    expected = torch.cat(
        [model.predict(batch) for batch in model.read(str(clicks))]
    )[:700]
    written = torch.tensor([float(x) for x in out.read_text().split()])
    torch.testing.assert_close(written, expected, rtol=1e-4, atol=1e-6)
