"""Tables whose vectors are kept as bf16 or int8."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import persia
from persia import optim

IDS = torch.arange(500) * 7919 - 1_000_000
OPTIMIZERS = [
    optim.SGD,
    optim.Adagrad,
    optim.RowWiseAdagrad,
    optim.Adam,
    optim.AdamW,
    optim.RowWiseAdam,
    optim.FTRL,
]


def make(dtype: Any, optimizer: Any, dim: int = 16, **table: Any) -> Any:
    return persia.EmbeddingBagCollection(
        [persia.EmbeddingBagConfig("t", dim, ["f"], data_type=dtype, **table)],
        store=persia.Store(optimizer),
    )


def train(bags: Any, steps: int, seed: int = 0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        out = bags(persia.JaggedBatch(["f"], IDS)).values()
        out.backward(torch.randn(out.shape, generator=g))
    rows: torch.Tensor = bags.store.rows("t", IDS)
    return rows


@pytest.mark.parametrize("dtype", ["int8", torch.int8])
def test_bytes_of_an_int8_row(dtype: Any) -> None:
    bags = make(dtype, optim.RowWiseAdagrad())
    train(bags, 1)
    assert bags.store.stats()["tables"]["t"]["row_bytes"] <= 40


@pytest.mark.parametrize("dim", [1, 3, 16, 33, 64])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_int8_rows_train_as_fp32_within_a_step(kind: Any, dim: int) -> None:
    """After one update a row is that of fp32, rounded to its scale, as its
    initial values were."""
    init = ("uniform", -0.5, 0.5)
    exact = train(make("fp32", kind(lr=0.01), dim, init=init), 1)
    got = train(make("int8", kind(lr=0.01), dim, init=init), 1)
    scale = exact.abs().amax(1, keepdim=True) / 127
    assert ((got - exact).abs() <= 1.1 * scale + 0.55 * 0.5 / 127).all()


@pytest.mark.parametrize("dtype", ["bf16", "int8"])
def test_runs_are_repeatable(dtype: str) -> None:
    one, two = (train(make(dtype, optim.Adagrad()), 3) for _ in range(2))
    assert torch.equal(one, two)


@pytest.mark.parametrize("dtype", ["bf16", "int8"])
def test_rows_without_change_stay(dtype: str) -> None:
    """A made row is what its lookup gave, and an update of lr 0, or a copy of
    it, is the same bits."""
    bags = make(dtype, optim.SGD(lr=0.0))
    before = bags.store.rows("t", IDS)
    assert torch.equal(train(bags, 2), before)
    assert bags.store.contains("t", IDS).all()
    bags.store.set_rows("t", IDS, before)
    assert torch.equal(bags.store.rows("t", IDS), before)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_checkpoints_of_int8_rows(kind: Any, tmp_path: Path) -> None:
    bags = make("int8", kind(lr=0.1))
    rows = train(bags, 2)
    bags.store.save(tmp_path / "c")
    again = make("int8", kind(lr=0.1))
    again.store.load(tmp_path / "c")
    assert torch.equal(again.store.rows("t", IDS), rows)
    assert torch.equal(train(again, 2, 1), train(bags, 2, 1))
    other = make("bf16", kind(lr=0.1))
    with pytest.raises(persia.errors.SchemaMismatch):
        other.store.load(tmp_path / "c")


def test_rounding_is_unbiased() -> None:
    """Steps far below a row's scale add up."""
    bags = make("int8", optim.SGD(lr=1.0), init=("constant", 1.0))
    step = torch.zeros(len(IDS), 16)
    step[:, 1:] = 1e-4
    for _ in range(300):
        out = bags(persia.JaggedBatch(["f"], IDS)).values()
        out.backward(step)
    rows = bags.store.rows("t", IDS)
    assert torch.equal(rows[:, 0], rows[0, 0].expand(len(IDS)))
    # a step's variance is 1e-4 / 127, the mean is of 7,500 columns
    assert (
        abs(rows[:, 1:].mean().item() - 0.97)
        < 5 * (300 * 1e-4 / 127 / 7500) ** 0.5 + 1e-4
    )
