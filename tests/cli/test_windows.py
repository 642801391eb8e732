"""Training in time: windows, drift, an AUC to reach."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score
from typer.testing import CliRunner

import persia
from persia import errors
from persia.cli.app import app
from persia.data import Table
from persia.datasets import ClickStream, criteo_syn, kwai_video
from persia.train.config import TrainConfig
from persia.train.run import Run
from persia.train.trainer import Progress
from persia.train.windows import Windows, part_of

DAY = 86_400


def times_of(batches: list[persia.Batch]) -> list[float]:
    parts = [b.timestamp for b in batches if b.timestamp is not None]
    return torch.cat(parts).tolist() if parts else []


def test_windows_cut_batches() -> None:
    rng = np.random.default_rng(1)
    times = np.sort(rng.integers(0, 9 * DAY, 400))
    times = times[(times // DAY) != 4]  # a day without samples
    data = Table(
        {
            "t": times.tolist(),
            "y": rng.integers(0, 2, len(times)).tolist(),
            "c": rng.integers(0, 9, len(times)).tolist(),
            "m": [["a"] * int(v) for v in rng.integers(0, 4, len(times))],
        },
        persia.data.Schema(
            label="y", timestamp="t", categorical=["c"], multivalued=["m"]
        ),
        batch_size=32,
    )
    windows, found = Windows(data, DAY), []
    while windows.next():
        batches = list(windows)
        assert {t // DAY for t in times_of(batches)} == {windows.now}
        found += batches
    assert times_of(found) == times.tolist()
    for key in ("c", "m"):
        there = torch.cat([b.ids[key][0] for b in found])
        assert torch.equal(there, torch.cat([b.ids[key][0] for b in data]))
    # What a loop leaves is passed.
    windows = Windows(data, DAY)
    days = []
    while windows.next():
        days.append(windows.now)
    assert days == sorted({t // DAY for t in times.tolist()})


def test_a_late_sample_is_in_the_window_that_is_read() -> None:
    times = [0, 1, DAY, 5, DAY + 1, 2 * DAY]
    columns = {"t": times, "y": [0, 1] * 3, "c": list("abcdef")}
    schema = persia.data.Schema(label="y", timestamp="t", categorical=["c"])
    windows, sizes = Windows(Table(columns, schema, batch_size=2), DAY), []
    while windows.next():
        sizes.append(sum(map(len, windows)))
    assert sizes == [2, 3, 1]


def test_a_part_of_a_batch() -> None:
    (batch,) = list(ClickStream(20, features=2, lists=1, dense=1))
    part = part_of(batch, 3, 11)
    for name in ("dense", "label", "timestamp"):
        assert torch.equal(getattr(part, name), getattr(batch, name)[3:11])
    values, lengths = batch.ids["L1"]
    ends = lengths.cumsum(0)
    first = int(ends[2])
    assert torch.equal(part.ids["L1"][0], values[first : int(ends[10])])
    assert torch.equal(part.ids["L1"][1], lengths[3:11])


def test_clicks_that_drift() -> None:
    options = {"window_samples": 2000, "vocabulary": 500, "dense": 2}
    data = ClickStream(8000, 64, churn=0.5, lists=1, **options)
    other = ClickStream(8000, 1000, churn=0.5, lists=1, **options)
    for name in ("C1", "L1"):
        a = torch.cat([b.ids[name][0] for b in data])
        assert torch.equal(a, torch.cat([b.ids[name][0] for b in other]))
    assert len(data) == len(list(data)) == 125
    days = [
        {int(v) for b in data.in_window(i) for v in b.ids["C1"][0]}
        for i in range(4)
    ]
    # Half of the ids are new in each window, and none of them returns.
    fresh = [len(b - a) / len(b) for a, b in itertools.pairwise(days)]
    assert all(0.3 < share < 0.75 for share in fresh)
    assert not days[0] & days[3]
    still = ClickStream(8000, 64, **options)
    same = [
        {int(v) for b in still.in_window(i) for v in b.ids["C1"][0]}
        for i in (0, 3)
    ]
    assert len(same[0] & same[1]) > 0.7 * len(same[0])
    # The effects of the ids, and nothing else, decide the clicks.
    every = list(still)
    ids = torch.stack([torch.cat([b.ids["C1"][0] for b in every])])[0]
    label = torch.cat([b.label for b in every if b.label is not None])
    _, at = ids.unique(return_inverse=True)
    means = torch.bincount(at, label) / torch.bincount(at)
    assert roc_auc_score(label, means[at]) > 0.55
    assert 0.7 < still.planted_auc() < 0.95
    with pytest.raises(errors.InvalidArgument):
        ClickStream(10, churn=2)
    with pytest.raises(errors.InvalidArgument):
        ClickStream(10, zipf=1)


def test_generators_of_the_papers_sizes() -> None:
    assert criteo_syn("100T", 10).vocabulary == round(100e12 / 128 / 26)
    assert criteo_syn(6.25e12, 10, dim=64).vocabulary == 3756009615
    (batch,) = list(criteo_syn("12.5T", 4000, 4000))
    assert batch.ids["C1"][0].unique().numel() > 500
    assert batch.dense is not None
    assert batch.dense.shape == (4000, 13)
    assert kwai_video(100).keys[-1] == "L2"
    with pytest.raises(errors.InvalidArgument):
        criteo_syn("many")
    with pytest.raises(errors.InvalidArgument):
        criteo_syn(3)


def config(folder: Path | None = None, **more: object) -> TrainConfig:
    options = {
        "data": "drift?windows=4&vocabulary=200&features=4",
        "samples": 2000,
        "batch_size": 64,
        "window": "1d",
        "dim": 4,
        "staleness": 0,
        "threads": 1,
    } | more
    if folder is not None:
        options["save"] = str(folder)
    return TrainConfig(**options)  # type: ignore[arg-type]


def test_each_window_is_scored_before_it_is_trained(tmp_path: Path) -> None:
    run = Run(config(batch_size=50))
    lines: list[str] = []
    assert run.fit(lambda at: None, lines.append)
    assert run.trainer.samples == 2000
    scores = run.result().windows
    assert [one.samples for one in scores] == [500] * 3
    days = [line.split()[1] for line in lines]
    assert days == [f"2024-01-0{day}" for day in (2, 3, 4)]
    # By hand: a model that has seen two windows, on the third.
    hand = Run(config(batch_size=50, window=None, samples=1000, eval_split=0))
    assert isinstance(run.train, ClickStream)
    for i in range(2):
        assert hand.trainer.fit(run.train.in_window(i), i + 1)
    assert hand.trainer.evaluate(run.train.in_window(2)) == scores[1]


def test_resume_within_a_window(tmp_path: Path) -> None:
    whole = Run(config())
    assert whole.fit(lambda at: None, lambda line: None)
    part = Run(config(tmp_path / "out"))

    def stop(at: Progress) -> None:
        if part.trainer.epoch == 1 and part.trainer.batch >= 3:
            part.trainer.stop()

    inner = part.trainer.fit
    part.trainer.fit = lambda *a, **k: inner(  # type: ignore[method-assign]
        *a, **(k | {"every": 0})
    )
    assert not part.fit(stop, lambda line: None)
    part.save()
    rest = Run(config(tmp_path / "out"), tmp_path / "out")
    assert (rest.trainer.epoch, rest.trainer.batch) == (1, 3)
    assert rest.fit(lambda at: None, lambda line: None)
    assert rest.trainer.samples + part.trainer.samples == 2000
    assert rest.result().windows == whole.result().windows[1:]


def test_what_windows_need(tmp_path: Path) -> None:
    for more in ({"epochs": 2}, {"shuffle": 5}, {"window": "1y"}):
        with pytest.raises((errors.InvalidArgument, ValueError)):
            config(**more)
    (tmp_path / "a.csv").write_text("y,c\n" + "0,a\n1,b\n" * 50)
    run = Run(config(data=str(tmp_path / "a.csv")))
    with pytest.raises(errors.InvalidArgument, match="timestamp"):
        run.fit(lambda at: None)


def test_a_malformed_line_counts_once(tmp_path: Path) -> None:
    lines = [f"{i % 2},c{i % 9},{i // 50 * DAY}\n" for i in range(200)]
    lines[70] = f"1,c1,{DAY},too many\n"
    (tmp_path / "a.csv").write_text("y,c,t\n" + "".join(lines))
    schema = tmp_path / "a.yaml"
    schema.write_text("label: y\ntimestamp: t\ncategorical: [c]\n")
    run = Run(config(data=str(tmp_path / "a.csv"), schema=str(schema)))
    assert run.fit(lambda at: None, lambda line: None)
    assert run.trainer.samples == 199
    assert run.result().malformed == 1
    assert [one.samples for one in run.result().windows] == [49, 50, 50]


def criteo_day(path: Path, seed: int, rows: int = 600) -> None:
    """A made day of Criteo's format; C1 decides the clicks."""
    rng = np.random.default_rng(seed)
    lines = []
    for _ in range(rows):
        first = int(rng.integers(0, 4))
        label = int(rng.random() < (0.9 if first < 2 else 0.1))
        rest = rng.integers(0, 5, 25)
        counts = rng.integers(0, 9, 13)
        values = [label, *counts, f"{first:08x}", *rest]
        lines.append("\t".join(map(str, values)) + "\n")
    path.write_text("".join(lines))


def test_an_auc_to_reach(tmp_path: Path) -> None:
    for day in range(3):
        criteo_day(tmp_path / f"day_{day}", day)
    options = ["--batch-size", "50", "--threads", "1", "--dim", "4"]
    options += ["--lr", "0.5", "--save", str(tmp_path / "out")]
    paths = str(tmp_path / "day_*")

    def run(*more: str) -> str:
        done = CliRunner().invoke(
            app, ["train", "--data", f"criteo:{paths}", *options, *more]
        )
        assert done.exit_code == 0, done.output
        return " ".join(done.output.split())

    output = run("--target-auc", "0.75", "--eval-every", "2", "--epochs", "9")
    found = re.search(r"target AUC │ 0.75 │ reached at step (\d+)", output)
    assert found is not None
    assert int(found[1]) < 9 * 24
    assert "of 600 samples held out" in output  # the last day
    output = run("--target-auc", "0.99", "--overwrite")
    assert "0.99 │ not reached" in output
