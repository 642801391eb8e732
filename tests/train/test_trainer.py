"""persia.train: steps over several batches, hooks, schedules, logs."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import persia
from persia import errors
from persia.data.batches.batch import Batch
from persia.data.batches.jagged import JaggedBatch
from persia.metrics import Scores
from persia.train import Best, CSVLog, Every, Trainer, health


class Model(nn.Module):
    def __init__(self, store: persia.Store) -> None:
        super().__init__()
        self.bags = persia.EmbeddingBagCollection(
            store=store,
            tables=[persia.EmbeddingBagConfig("t", 4, ["a"])],
        )
        torch.manual_seed(1)
        self.linear = nn.Linear(4, 1)

    def forward(self, dense: Any, ids: Any) -> Tensor:
        out: Tensor = self.linear(self.bags(ids).values())
        return out[:, 0]


def data(samples: int, size: int) -> list[Batch]:
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 20, (samples,), generator=g)
    label = torch.randint(0, 2, (samples,), generator=g).float()
    return [
        Batch(
            None,
            JaggedBatch(
                ["a"], ids[at : at + size], lengths=torch.ones(size).long()
            ),
            label[at : at + size],
        )
        for at in range(0, samples, size)
    ]


def trainer_of(update: str = "backward", **options: Any) -> Trainer:
    store = persia.Store(persia.optim.SGD(lr=0.5), update=update)
    model = Model(store)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Trainer(model, optimizer, staleness=0, **options)


def weights(trainer: Trainer) -> tuple[Tensor, Tensor]:
    model: Any = trainer.model
    rows, _, _ = model.bags.store.rows_and_state("t", torch.arange(20))
    return rows, model.linear.weight.detach()


def test_accumulated_batches_are_one_larger_batch() -> None:
    one = trainer_of(update="step", accumulate=3)
    other = trainer_of(update="step")
    assert one.fit(data(96, 8)) and other.fit(data(96, 24))
    assert one.step == other.step == 4
    for mine, theirs in zip(weights(one), weights(other), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_data_hear_of_each_epoch() -> None:
    class Data(list[Batch]):
        def __init__(self) -> None:
            super().__init__(data(16, 8))
            self.epochs: list[int] = []

        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

    batches = Data()
    assert trainer_of().fit(batches, epochs=3)
    assert batches.epochs == [0, 1, 2]


def test_a_step_ends_with_the_epoch_and_with_a_stop() -> None:
    trainer = trainer_of(update="step", accumulate=4)
    assert trainer.fit(data(48, 8))
    assert trainer.step == 2 and not trainer.in_step
    batches = data(48, 8)
    trainer = trainer_of(update="step", accumulate=4)
    seen = []

    def stop(at: Any) -> None:
        seen.append(at)
        trainer.stop()

    assert not trainer.fit(batches, on_progress=stop, every=0.0)
    assert seen and not trainer.in_step and trainer.step == 1


def test_accumulation_needs_updates_by_step() -> None:
    with pytest.raises(errors.InvalidArgument, match="update"):
        trainer_of(accumulate=2)


def test_hooks_are_called_between_steps() -> None:
    trainer = trainer_of(update="step", accumulate=2)
    steps: list[int] = []

    def note() -> None:
        assert not trainer.in_step
        steps.append(trainer.step)

    hooks = [Every(note, steps=3)]
    assert trainer.fit(data(160, 8), 2, hooks=hooks)
    assert trainer.step == 20
    assert steps == [3, 6, 9, 12, 15, 18]
    always = []
    assert trainer.fit(
        data(160, 8), 3, hooks=[Every(lambda: always.append(0), minutes=1e-8)]
    )
    assert len(always) == 10
    due = iter([False, True] * 5)
    assert trainer.fit(
        data(160, 8),
        4,
        hooks=[Every(lambda: steps.append(-1), when=lambda: next(due))],
    )
    assert steps[6:] == [-1] * 5


@pytest.mark.parametrize(
    "when",
    [
        {},
        {"steps": 1, "minutes": 1.0},
        {"steps": 1, "when": bool},
        {"steps": 0},
        {"minutes": 0.0},
    ],
)
def test_bad_times(when: Any) -> None:
    with pytest.raises(errors.InvalidArgument):
        Every(print, **when)


def test_a_save_on_the_way_is_the_model_of_that_step(tmp_path: Path) -> None:
    trainer = trainer_of()
    model: Any = trainer.model

    def save() -> None:
        model.bags.store.save(tmp_path, model=model, step=trainer.step)

    assert trainer.fit(data(80, 8), hooks=[Every(save, steps=4)])
    halfway = trainer_of()
    assert halfway.fit(data(80, 8)[:4])
    loaded = trainer_of()
    there: Any = loaded.model
    there.bags.store.load(tmp_path, step=4, model=there)
    for mine, theirs in zip(weights(loaded), weights(halfway), strict=True):
        assert torch.equal(mine, theirs)


def test_mixed_precision_is_of_the_dense_part() -> None:
    trainer = trainer_of(autocast=torch.bfloat16)
    model: Any = trainer.model
    dtypes = set()
    model.linear.register_forward_hook(
        lambda module, args, out: dtypes.add(out.dtype)
    )
    assert trainer.fit(data(80, 8))
    trainer.evaluate(data(80, 8))
    assert dtypes == {torch.bfloat16}
    assert all(p.dtype == torch.float32 for p in model.parameters())


def test_a_batch_goes_to_a_gpu_from_pinned_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainer = trainer_of(device="cuda")
    pinned, moves = [], []

    def pin(tensor: Tensor) -> Tensor:
        pinned.append(tensor.clone())
        return pinned[-1]

    def move(batch: Batch, *args: Any, **options: Any) -> Batch:
        moves.append((batch, args, options))
        return batch

    monkeypatch.setattr(Tensor, "pin_memory", pin)
    monkeypatch.setattr(Batch, "to", move)
    (batch,) = data(4, 4)
    there = trainer._moved(batch)
    ((moved, args, options),) = moves
    assert moved is there
    assert moved.label is pinned[0]
    assert moved.ids is batch.ids
    assert args == (torch.device("cuda"),)
    assert options == {"non_blocking": True}
    # A batch of a source that has put it there already.
    there = Batch(None, batch.ids, torch.empty(4, device="meta")).pin_memory()
    assert len(pinned) == 1
    assert there.label is not None and there.label.is_meta


def test_ranks_agree_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed as dist

    from persia.distributed import ranks

    trainer = trainer_of(device="meta")  # where no value can be read
    trainer._ranks = 2
    dist.init_process_group(
        "gloo", store=dist.HashStore(), rank=0, world_size=1
    )
    groups = []
    reduce = dist.all_reduce

    def spy(tensor: Tensor, op: Any, group: Any = None) -> None:
        groups.append(group)
        reduce(tensor, op, group=group)

    try:
        monkeypatch.setattr(dist, "all_reduce", spy)
        assert trainer._agree(True, False) == [True, False]
        monkeypatch.setattr(ranks, "backends", lambda _: {"cuda": "nccl"})
        assert trainer._agree(False, True) == [False, True]
        assert groups == [None, ranks.side_group(dist)]
    finally:
        dist.destroy_process_group()


def test_a_scheduler_steps_with_the_optimizer() -> None:
    trainer = trainer_of(update="step", accumulate=2)
    trainer.scheduler = torch.optim.lr_scheduler.StepLR(
        trainer.optimizer, 1, gamma=0.5
    )
    assert trainer.fit(data(64, 8))
    assert trainer.optimizer.param_groups[0]["lr"] == 0.1 * 0.5**4


def test_csv(tmp_path: Path) -> None:
    path = tmp_path / "new" / "log.csv"
    CSVLog(path).log({"a": 0.5, "b, c": 2.0}, 3)
    CSVLog(path).log({"a": 0.25}, 4)
    with path.open(encoding="utf-8", newline="") as file:
        lines = list(csv.reader(file))
    assert lines == [
        ["step", "name", "value"],
        ["3", "a", "0.5"],
        ["3", "b, c", "2.0"],
        ["4", "a", "0.25"],
    ]
    (tmp_path / "other.csv").write_text("x,y\n1,2\n")
    with pytest.raises(errors.StorageError, match="columns"):
        CSVLog(tmp_path / "other.csv")
    with pytest.raises(errors.StorageError):
        CSVLog(tmp_path)


def test_health_counts_rows() -> None:
    trainer = trainer_of()
    model: Any = trainer.model
    assert trainer.fit(data(80, 8))
    found = health(model.bags.store)
    rows = len({int(i) for b in data(80, 8) for i in b.ids.values()})
    assert found["t/rows"] == found["t/created"] == rows
    assert 0 < found["t/unseen"] < 1
    assert found["staleness/max"] == 0


def scores(auc: float, logloss: float) -> Scores:
    return Scores(10, 3, auc, logloss, 1.0, 1.0)


def test_the_best_score_and_how_long_ago() -> None:
    best = Best("logloss", patience=2)
    values = [0.7, 0.6, 0.6, 0.65, 0.5, math.nan, 0.5]
    found = [best.update(scores(0.5, x), 10 * i) for i, x in enumerate(values)]
    assert found == [True, True, False, False, True, False, False]
    assert (best.value, best.step, best.since) == (0.5, 40, 2)
    assert best.stalled
    other = Best("logloss", patience=3)
    other.load_state_dict(best.state_dict())
    assert (other.value, other.step, other.stalled) == (0.5, 40, False)
    assert not other.update(scores(0.9, 0.5), 50) and other.stalled
    by_auc = Best("auc")
    by_auc.load_state_dict(best.state_dict())
    assert by_auc.value is None and by_auc.update(scores(0.4, 9.0), 1)
    assert not by_auc.update(scores(0.3, 0.1), 2) and not by_auc.stalled
    for wrong in ({"metric": "accuracy"}, {"patience": 0}):
        with pytest.raises(errors.InvalidArgument):
            Best(**wrong)
