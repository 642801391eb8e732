"""What people do with a Trainer in a notebook: right, or refused, or a
warning."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import persia
from persia import Batch, JaggedBatch, errors
from persia.train import Trainer


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bags = persia.EmbeddingBagCollection(
            store=persia.Store(persia.optim.SGD(lr=0.5)),
            tables=[persia.EmbeddingBagConfig("a", 4, ["a"])],
        )
        self.linear = nn.Linear(4, 1)

    def forward(self, dense: Tensor | None, ids: JaggedBatch) -> Tensor:
        out: Tensor = self.linear(self.bags(ids).values())
        return out


def data(n: int = 8, dtype: torch.dtype = torch.float32) -> list[Batch]:
    ids = torch.arange(4)
    label = torch.tensor([0, 1, 0, 1], dtype=dtype)
    return [
        Batch(None, JaggedBatch.from_dict({"a": ids + i}), label)
        for i in range(n)
    ]


def trainer_of(model: nn.Module) -> Trainer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Trainer(model, optimizer, staleness=0)


def warned(trainer: Trainer, batches: list[Batch]) -> bool:
    """Whether it says something about a fit."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        assert trainer.fit(batches)
    return any(one.category is UserWarning for one in found)


@pytest.mark.parametrize("which", ["former model", "store"])
def test_an_optimizer_of_other_parameters_is_refused(which: str) -> None:
    model = Model()
    optimizer: Any = model.bags.store.optimizer
    if which == "former model":
        optimizer = torch.optim.SGD(Model().parameters(), lr=0.1)
    trainer = Trainer(model, optimizer, staleness=0)
    with pytest.raises(errors.InvalidArgument):
        trainer.fit(data())
    assert not model.bags.store.stats()["tables"]["a"]["rows"]


def test_rows_alone_are_trained_where_the_dense_part_is_frozen() -> None:
    model = Model()
    model.linear.requires_grad_(False)
    assert trainer_of(model).fit(data())
    assert model.bags.store.stats()["tables"]["a"]["rows"]


def test_a_generator_has_one_epoch() -> None:
    trainer = trainer_of(Model())
    with pytest.raises(errors.InvalidArgument):
        trainer.fit((batch for batch in data()), epochs=2)
    assert trainer.fit((batch for batch in data()), epochs=1)
    assert trainer.step == 8


def test_a_fit_that_trains_nothing_warns() -> None:
    trainer = trainer_of(Model())
    assert not warned(trainer, data())
    assert warned(trainer, data())
    assert trainer.step == 8


def test_labels_are_of_any_dtype() -> None:
    trainers = []
    for dtype in (torch.float32, torch.int64, torch.bool):
        torch.manual_seed(0)
        trainers.append(trainer_of(Model()))
        assert trainers[-1].fit(data(dtype=dtype))
    first, *others = (t.model.linear.weight for t in trainers)
    assert all(torch.equal(first, other) for other in others)
