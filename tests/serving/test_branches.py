"""Forwards that choose by a size which is 0 or 1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import persia
from persia import errors
from tests.serving import models


class Branches(nn.Module):
    """Chooses by the number of samples, or of columns."""

    def __init__(self, dim: int, size: int, zeros: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 4)
        self.last = nn.Linear(4, 1)
        self.dim, self.size = dim, size
        if zeros:  # as a model that was not trained
            nn.init.zeros_(self.last.weight)

    def forward(self, words: Any) -> Any:
        out = self.last(self.words(words).sum(1)).squeeze(1)
        return out + 1 if words.shape[self.dim] == self.size else out


class History(nn.Module):
    """Chooses by the number of ids in a history."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.rows = persia.EmbeddingBagCollection(
            store=models.store(),
            tables=[persia.EmbeddingBagConfig("x", 4, ["x"])],
        )
        self.size = size

    def forward(self, ids: Any) -> Any:
        out = self.rows(ids).values().sum(1)
        return out - 1 if ids.values().shape[0] == self.size else out


def history(samples: int) -> Any:
    lengths = torch.arange(samples) % 3
    values = torch.randint(0, 20, (int(lengths.sum()),))
    return (persia.JaggedBatch(["x"], values, lengths=lengths),)


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(("dim", "size"), [(0, 1), (1, 1), (1, 0)])
def test_a_branch_of_0_or_1_is_refused(
    dim: int, size: int, zeros: bool, tmp_path: Path
) -> None:
    model = persia.convert(Branches(dim, size, zeros), store=models.store())
    with pytest.raises(errors.InvalidArgument):
        persia.export(model, tmp_path / "out", example=models.words(3))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("size", [0, 1])
def test_a_branch_of_no_or_one_id_is_refused(
    size: int, tmp_path: Path
) -> None:
    with pytest.raises(errors.InvalidArgument):
        persia.export(History(size), tmp_path, example=history(5))


class Long(History):
    """Chooses by whether there are more ids."""

    def forward(self, ids: Any) -> Any:
        out = self.rows(ids).values().sum(1)
        return out - 1 if ids.values().shape[0] > self.size else out


def test_a_history_of_another_branch_is_refused(tmp_path: Path) -> None:
    model = Long(9)
    persia.export(model, tmp_path, example=history(5))
    loaded = persia.load_model(tmp_path)
    for samples in 1, 2, 9:
        call = history(samples)
        torch.testing.assert_close(loaded(*call), model(*call).detach())
    with pytest.raises(errors.ShapeError):
        loaded(*history(12))


class Forgetful(nn.Module):
    """Counts its calls, and gives no axis of samples where there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 4)
        self.last = nn.Linear(4, 1)
        self.register_buffer("calls", torch.zeros(()), persistent=False)
        self.register_buffer("total", torch.zeros(()))

    def forward(self, words: Any) -> Any:
        self.calls += 1
        self.total += 1
        return self.last(self.words(words).sum(1)).squeeze()


def test_a_model_of_any_size_is_exported_as_it_was(tmp_path: Path) -> None:
    model = persia.convert(Forgetful(), store=models.store())
    persia.export(model, tmp_path, example=models.words(3))
    assert model.training and model.calls == 0 and model.total == 0
    call = models.words(4)
    loaded = persia.load_model(tmp_path)
    torch.testing.assert_close(loaded(*call), model.eval()(*call).detach())
