"""``persia train --resume``: a run continues where it stopped."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from persia import checkpoint, errors
from persia.cli.app import app
from persia.data.batches.batch import Batch
from persia.data.sharing import Sharing
from persia.train import Trainer, position
from persia.train.config import TrainConfig, resolve
from persia.train.extra import Extra
from persia.train.run import Run
from persia.train.saved import saved_options
from persia.train.sources import open_data
from tests.cli.test_train import TINY, csv_file, run, shown


def test_a_finished_run_has_nothing_left_to_train(tmp_path: Path) -> None:
    folder, file = tmp_path / "out", tmp_path / "options.yaml"
    trained = run("--samples", "1000", "--dim", "2", "--save", str(folder))
    saved = sorted(p.stat().st_mtime_ns for p in folder.rglob("*"))
    file.write_text(f"resume: {folder}")
    done = CliRunner().invoke(app, ["train", "--config", str(file)])
    assert done.exit_code == 0, done.output
    words = " ".join(done.output.split())  # lines fold
    assert "1 epoch done, nothing left to train" in words
    assert "saved to" not in done.output
    assert sorted(p.stat().st_mtime_ns for p in folder.rglob("*")) == saved
    table = shown(done.output)
    assert table["AUC"] == trained["AUC"]
    assert not [name for name in table if "time in" in name]
    # To another folder it is a copy.
    run("--resume", str(folder), "--save", str(tmp_path / "copy"))
    assert (tmp_path / "copy" / "LATEST").exists()


class Stopping:
    """A data set that stops the trainer when batch ``at`` is read."""

    def __init__(self, run: Run, at: int) -> None:
        self.run, self.at, self.epoch = run, at, 0
        self.data = run.train

    def __iter__(self) -> Iterator[Batch]:
        for number, batch in enumerate(self.data):
            if number == self.at and self.epoch == 1:
                self.run.trainer.stop()
            yield batch


@pytest.mark.parametrize("model", ["dlrm", "deepfm", "dcn", "widedeep"])
def test_a_run_that_is_resumed_ends_as_if_it_had_not_stopped(
    model: str, tmp_path: Path
) -> None:
    config = TrainConfig(
        samples=4000,
        batch_size=256,
        epochs=2,
        staleness=0,
        model=model,  # type: ignore[arg-type]
        save=str(tmp_path / "out"),
        threads=1,
        seed=3,
    )
    whole = Run(config)
    assert whole.fit(lambda at: None)
    stopped = Run(config)
    data = Stopping(stopped, 7)
    assert not stopped.trainer.fit(data, config.epochs)
    assert stopped.trainer.epoch == 1
    assert 0 < stopped.trainer.batch < 16
    stopped.save()
    resumed = Run(config, tmp_path / "out")
    assert resumed.trainer.batch == stopped.trainer.batch
    assert resumed.fit(lambda at: None)
    assert resumed.trainer.samples < whole.trainer.samples
    assert resumed.result().scores == whole.result().scores
    assert resumed.result().rows == whole.result().rows
    fewer = ["--resume", str(config.save), "--samples", "1200"]
    done = CliRunner().invoke(app, ["train", *fewer])
    assert "nothing was left to train" in " ".join(done.output.split())


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[Batch]:
    """The batches that trainers train on from now on."""
    batches: list[Batch] = []
    train = Trainer._train

    def record(self: Trainer, batch: Batch) -> torch.Tensor:
        batches.append(batch)
        return train(self, batch)

    monkeypatch.setattr(Trainer, "_train", record)
    return batches


def samples(batches: list[Batch]) -> list[object]:
    """What there is of each sample of the batches, which it empties."""
    found: list[object] = []
    for batch in batches:
        assert batch.dense is not None and batch.label is not None
        bags = zip(
            *(
                torch.split(values, lengths.tolist())
                for values, lengths in batch.ids.to_dict().values()
            ),
            strict=True,
        )
        ids = [[bag.tolist() for bag in sample] for sample in bags]
        rest = zip(batch.dense.tolist(), batch.label.tolist(), strict=True)
        found += zip(ids, rest, strict=True)
    batches.clear()
    return found


@pytest.mark.parametrize(
    ("kind", "then"), [("file", 64), ("shuffled", 50), ("synthetic", 1000)]
)
def test_resume_with_another_batch_size_trains_on_the_rest(
    kind: str, then: int, tmp_path: Path, trained: list[Batch]
) -> None:
    folder = str(tmp_path / "out")
    options: dict[str, object] = {"samples": 1500}
    if kind != "synthetic":
        options = csv_file(tmp_path) | {"eval_split": 0.2}
    if kind == "shuffled":
        options["shuffle"] = 200
    options |= {"batch_size": 200, "dim": 2, "save": folder, "threads": 1}
    whole = Run(resolve(options))
    assert whole.fit(lambda at: None)
    every = samples(trained)
    stopped = Run(resolve(options))
    batches = iter(stopped.train)
    assert stopped.trainer.fit([next(batches) for _ in range(3)], 1)
    stopped.trainer.epoch, stopped.trainer.batch = 0, 3
    stopped.save()
    # Saved between the batches of its own size, then gone on with another.
    other = resolve(saved_options(folder), {"batch_size": then})
    Run(other, folder).save()
    assert Run(resolve(options), folder).trainer.batch == 3
    resumed = Run(other, folder)
    assert resumed.fit(lambda at: None)
    assert resumed.trainer.epoch == 1
    assert samples(trained) == every
    resumed.save()
    assert not any(
        checkpoint.read_extra(folder)[k] for k in ("batch", "samples")
    )


def test_resume_takes_learning_rates_of_flags(tmp_path: Path) -> None:
    folder = str(tmp_path / "out")
    options = {"samples": 1000, "save": folder, "dim": 2, "dense_lr": 0.01}
    saved = Run(resolve(options))
    saved.store.optimizer.param_groups[0]["lr"] = 0.03  # as a schedule would
    saved.save()

    def rates(flags: dict[str, object]) -> list[float]:
        run = Run(resolve(saved_options(folder), flags), folder)
        groups = run.store.optimizer.param_groups
        found = [groups[0]["lr"], groups[-1]["lr"]]
        return [*found, run.optimizer.param_groups[0]["lr"]]

    assert rates({}) == [0.03, 0.05, 0.01]
    assert rates({"lr": 0.5}) == [0.5, 0.5, 0.01]
    assert rates({"dense_lr": 0.2}) == [0.03, 0.05, 0.2]


def test_resume_within_other_data_is_refused(tmp_path: Path) -> None:
    folder = str(tmp_path / "out")
    options = csv_file(tmp_path) | {"batch_size": 100, "shuffle": 100}
    saved = Run(resolve(options, {"save": folder, "dim": 2}))
    saved.trainer.batch = 3
    saved.save()
    (tmp_path / "more.csv").write_text((tmp_path / "a.csv").read_text() * 2)
    (tmp_path / "b.yaml").write_text("{label: y, categorical: [c]}")
    for name, value, message in (
        ("data", str(tmp_path / "more.csv"), "data: .*'more.csv', .*a.csv"),
        ("schema", str(tmp_path / "b.yaml"), "schema: "),
        ("shuffle", 300, "shuffle: 300 here, 100 there"),
        ("batch_size", 64, "shuffle: 128 here, 100 there"),
        ("eval_split", 0.3, "eval-split: 0.3 here, 0.1 there"),
        ("seed", 7, "seed: 7 here, 0 there"),
    ):
        with pytest.raises(errors.InvalidArgument, match=message):
            Run(resolve(saved_options(folder), {name: value}), folder)
    # The same file at another place is the same data.
    (tmp_path / "moved").mkdir()
    moved = (tmp_path / "a.csv").rename(tmp_path / "moved/a.csv")
    again = resolve(saved_options(folder), {"data": str(moved)})
    assert Run(again, folder).trainer.batch == 3


def test_position_of_an_older_checkpoint(tmp_path: Path) -> None:
    config = resolve({"samples": 1000, "batch_size": 100})
    old = Extra.of(
        {"options": config.options(), "epoch": 1, "batch": 3}, tmp_path
    )
    data = open_data(config)[0]
    assert position.find(old, config, data, 2) == position.Position(1, 3)
    other = resolve(config.options(), {"batch_size": 64})
    with pytest.raises(errors.InvalidArgument, match="batch_size=100"):
        position.find(old, other, data, 1)
    assert position.find(
        dataclasses.replace(old, batch=0), other, data, 1
    ) == position.Position(1)


def test_position_of_several_ranks(tmp_path: Path) -> None:
    config = resolve({"samples": 10_000, "batch_size": 100})
    data = open_data(config)[0]
    saved = Extra(
        config.options(),
        epoch=0,
        batch=3,
        samples=600,
        ranks=2,
        source=position.source(config, data),
    )
    other = resolve(config.options(), {"batch_size": 70})
    assert position.find(saved, config, data, 1) == position.Position(0, 6)
    assert position.find(saved, other, data, 1) == position.Position(0, 8, 40)
    with pytest.raises(errors.InvalidArgument, match="600 samples"):
        position.find(saved, other, data, 2)
    # The lines of a file that each rank has left out are not known: other
    # ranks share what those before have left.
    config = resolve(csv_file(tmp_path), {"batch_size": 100})
    data = open_data(config)[0]
    saved = dataclasses.replace(
        saved,
        options=config.options(),
        source=position.source(config, data),
    )
    assert position.find(saved, config, data, 2) == position.Position(0, 3)
    left = (Sharing.even(2, 3),)
    found = position.find(saved, config, data, 1)
    assert found == position.Position(0, sharings=left)
    again = dataclasses.replace(saved, left=[left[0]], ranks=3, batch=2)
    found = position.find(again, config, data, 1)
    assert found.sharings == (*left, Sharing.even(3, 2))
    other = resolve(config.options(), {"batch_size": 70})
    with pytest.raises(errors.InvalidArgument):
        position.find(saved, other, data, 1)


def test_resume_goes_on_for_more_epochs(tmp_path: Path) -> None:
    folder = str(tmp_path / "out")
    first = run(*TINY, "--dim", "4", "--save", folder)
    again = run("--resume", folder)
    assert again["AUC"] == first["AUC"]  # its one epoch is done
    more = run("--resume", folder, "--epochs", "2")
    assert more["AUC"] != first["AUC"]
    extra = checkpoint.read_extra(folder)
    assert (extra["epoch"], extra["batch"]) == (2, 0)
    assert extra["options"]["dim"] == 4
    with pytest.raises(errors.SchemaMismatch, match="embedding_dim"):
        run("--resume", folder, "--dim", "8")


def test_a_schedule_goes_on_where_it_was(tmp_path: Path) -> None:
    options = [*TINY, "--warmup", "30", "--dense-lr", "0.01"]
    run(*options, "--save", str(tmp_path), "--save-every", "10")
    saved = saved_options(tmp_path) | {"save": str(tmp_path / "other")}
    there = Run(resolve(saved), tmp_path / "step-10")
    assert there.trainer.step == there.trainer.batch == 10
    assert there.optimizer.param_groups[0]["lr"] == pytest.approx(
        0.01 * 11 / 30
    )
