"""The Trainer with every kind of module that looks up rows, and with labels
and weights of every kind."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import log_loss, roc_auc_score
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

import persia
from persia import errors
from persia.data.batches.batch import Batch
from persia.data.batches.jagged import JaggedBatch
from persia.train import Progress, Trainer

DIM = 4


def store_of(update: str) -> persia.Store:
    return persia.Store(persia.optim.SGD(lr=0.5), update=update)


def embedding(update: str, name: str) -> nn.Module:
    return persia.nn.Embedding(20, DIM, name=name, store=store_of(update))


class Vectors(nn.Module):
    """One vector a sample, of ids [B], by any kind of module."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, ids: JaggedBatch) -> Tensor:
        return self.vectors(ids)

    def vectors(self, ids: JaggedBatch) -> Tensor:
        raise NotImplementedError


class Pooled(Vectors):
    def vectors(self, ids: JaggedBatch) -> Tensor:
        out: Tensor = self.inner(ids).values()
        return out


class Sequence(Vectors):
    def vectors(self, ids: JaggedBatch) -> Tensor:
        out: Tensor = self.inner(ids)["a"].values()
        return out


class Plain(Vectors):
    def vectors(self, ids: JaggedBatch) -> Tensor:
        out: Tensor = self.inner(ids.values())
        return out


class OneEach(Vectors):
    def vectors(self, ids: JaggedBatch) -> Tensor:
        out: Tensor = self.inner(ids.values()[:, None])
        return out


def bags(update: str, name: str = "t") -> nn.Module:
    config = persia.EmbeddingBagConfig(name, DIM, ["a"])
    return Pooled(
        persia.EmbeddingBagCollection([config], store=store_of(update))
    )


def sequences(update: str, name: str = "t") -> nn.Module:
    config = persia.EmbeddingConfig(name, DIM, ["a"])
    return Sequence(
        persia.EmbeddingCollection([config], store=store_of(update))
    )


def plain(update: str, name: str = "t") -> nn.Module:
    return Plain(embedding(update, name))


def bag(update: str, name: str = "t") -> nn.Module:
    store = store_of(update)
    return OneEach(persia.nn.EmbeddingBag(20, DIM, name=name, store=store))


def converted(update: str, name: str = "t") -> nn.Module:
    inner = nn.ModuleDict({name: nn.Embedding(20, DIM)})
    persia.convert(inner, store=store_of(update))
    return Plain(inner[name])


KINDS = [bags, sequences, plain, bag, converted]


class Model(nn.Module):
    """Parts side by side, within other modules."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Sequential(p) for p in parts])
        torch.manual_seed(1)
        self.linear = nn.Linear(DIM, 1)

    def forward(self, dense: Any, ids: JaggedBatch) -> Tensor:
        sum_of_parts = torch.stack([p(ids) for p in self.parts]).sum(0)
        out: Tensor = self.linear(sum_of_parts)
        return out[:, 0]


def data(samples: int, size: int, weights: Any = None) -> list[Batch]:
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
            weight=None if weights is None else weights[at : at + size],
        )
        for at in range(0, samples, size)
    ]


def trainer_of(*parts: nn.Module, **options: Any) -> Trainer:
    model = Model(*parts)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Trainer(model, optimizer, staleness=0, **options)


def rows(part: nn.Module) -> Tensor:
    ids = torch.arange(20)
    batch = JaggedBatch(["a"], ids, lengths=torch.ones(20).long())
    with torch.no_grad():
        out: Tensor = part(batch)
    return out.clone()


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("update", ["backward", "step"])
def test_rows_of_every_kind_are_trained(
    make: Callable[..., nn.Module], update: str
) -> None:
    part = make(update)
    before = rows(part)
    trainer = trainer_of(part)
    assert trainer.fit(data(96, 8))
    assert not torch.equal(rows(part), before)
    clock = trainer.clock
    assert clock.lookup > 0 and clock.update > 0 and clock.dense > 0


@pytest.mark.parametrize("make", KINDS)
def test_accumulated_batches_of_every_kind_are_one_larger_batch(
    make: Callable[..., nn.Module],
) -> None:
    torch.manual_seed(0)
    one = make("step")
    torch.manual_seed(0)
    other = make("step")
    assert trainer_of(one, accumulate=3).fit(data(96, 8))
    assert trainer_of(other).fit(data(96, 24))
    torch.testing.assert_close(rows(one), rows(other), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("make", KINDS)
def test_accumulation_needs_updates_by_step_of_every_store(
    make: Callable[..., nn.Module],
) -> None:
    with pytest.raises(errors.InvalidArgument):
        trainer_of(make("backward"), accumulate=2)
    with pytest.raises(errors.InvalidArgument):
        trainer_of(bags("step"), make("backward", "u"), accumulate=2)


def test_every_store_of_a_model_makes_its_step() -> None:
    parts = [make("step", f"t{i}") for i, make in enumerate(KINDS)]
    parts.append(plain("backward", "last"))
    before = [rows(part) for part in parts]
    trainer = trainer_of(*parts)
    assert trainer.fit(data(48, 8))
    for part, old in zip(parts, before, strict=True):
        assert not torch.equal(rows(part), old)
    assert [s.updates for s in trainer._stores] == [6] * len(parts)


def test_lookups_count_once_and_in_training_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ticks = itertools.count()
    monkeypatch.setattr(
        "persia.train.trainer.time.perf_counter", lambda: float(next(ticks))
    )
    part = plain("step")
    trainer = trainer_of(part)
    (batch,) = data(8, 8)
    with trainer._lookups_timed():
        trainer.evaluate([batch])
        assert trainer.clock.lookup == 0
        trainer._train(batch)
    # From the call of the module to its end.
    assert trainer.clock.lookup == 1
    assert trainer.clock.update > 0


def test_a_model_has_no_hooks_after_a_training() -> None:
    part = plain("backward")
    model = Model(part)
    before = [
        (len(m._forward_hooks), len(m._forward_pre_hooks))
        for m in model.modules()
    ]
    first, second = (
        Trainer(model, torch.optim.SGD(model.parameters(), 0.1), staleness=0)
        for _ in range(2)
    )
    assert first.fit(data(16, 8))
    spent = first.clock.lookup
    assert second.fit(data(16, 8))
    assert first.clock.lookup == spent
    bad = data(16, 8)
    bad[1] = Batch(None, bad[1].ids, bad[1].label + 1)
    with pytest.raises(errors.InvalidArgument):
        first.fit(bad, epochs=2)
    after = [
        (len(m._forward_hooks), len(m._forward_pre_hooks))
        for m in model.modules()
    ]
    assert after == before


# ---- labels


@pytest.mark.parametrize("wrong", [4.5, -1.0, 2.0, 0.5, math.nan, math.inf])
def test_labels_of_numbers_are_refused_before_a_row_changes(
    wrong: float,
) -> None:
    part = bags("backward")
    before = rows(part)
    trainer = trainer_of(part)
    batches = data(16, 8)
    label = batches[0].label
    assert label is not None
    label[3] = wrong
    with pytest.raises(errors.InvalidArgument):
        trainer.fit(batches)
    assert torch.equal(rows(part), before)
    with pytest.raises(errors.InvalidArgument):
        trainer.evaluate(batches)


# ---- weights


def test_scores_count_weights_as_the_loss_does() -> None:
    rng = torch.Generator().manual_seed(3)
    weights = torch.rand(96, generator=rng) * 3
    weights[::7] = 0
    batches = data(96, 8, weights)
    trainer = trainer_of(bags("backward"))
    seen: list[Tensor] = []
    forward = trainer._forward

    def noted(*args: Any) -> Tensor:
        seen.append(forward(*args))
        return seen[-1]

    trainer._forward = noted
    told: list[Progress] = []
    assert trainer.fit(batches, on_progress=told.append, every=1e9)
    logits = torch.cat(seen).detach()
    labels = torch.cat([b.label for b in batches if b.label is not None])
    (at,) = told
    minimised = binary_cross_entropy_with_logits(logits, labels, weights)
    assert at.loss == pytest.approx(float(minimised), rel=1e-5)
    area = roc_auc_score(labels, logits, sample_weight=weights)
    assert abs(at.auc - area) <= trainer._auc.tasks[0].error() + 1e-9

    scores = trainer.evaluate(batches)
    with torch.no_grad():
        logits = torch.cat([trainer.model(b.dense, b.ids) for b in batches])
    x, y, w = (t.numpy().astype(np.float64) for t in (logits, labels, weights))
    assert scores.auc == pytest.approx(
        roc_auc_score(y, x, sample_weight=w), abs=1e-6
    )
    assert scores.logloss == pytest.approx(
        log_loss(y, 1 / (1 + np.exp(-x)), sample_weight=w), rel=1e-5
    )


def test_weights_decide_which_model_is_best() -> None:
    best = persia.train.Best("auc")
    batches = data(96, 8)
    labels = torch.cat([b.label for b in batches if b.label is not None])
    trainer = trainer_of(bags("backward"))
    assert trainer.fit(batches)
    logits = torch.cat([trainer.model(b.dense, b.ids) for b in batches])
    right = ((logits > logits.median()) == (labels > 0.5)).float()
    for step, weights in enumerate((1 - right, right)):
        scores = trainer.evaluate(data(96, 8, weights))
        assert best.update(scores, step)
    assert best.step == 1
