"""Gradients of a module's output, however they lie in memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import persia
from persia import errors
from tests.modules import KEYS, make_bags
from tests.oracle import single_batch


def test_gradients_of_any_layout() -> None:
    bags = make_bags("sum", persia.optim.SGD(lr=1.0))
    batch = persia.JaggedBatch(["a", "b", "c"], torch.arange(6))
    before = bags.store.rows("one", [4, 5])
    bags(batch).values().sum().backward()  # strides (0, 0)
    torch.testing.assert_close(bags.store.rows("one", [4, 5]), before - 1)
    out = bags(batch).values()
    out.t().contiguous().backward(torch.ones(40, 2))  # strides (1, 2)
    torch.testing.assert_close(bags.store.rows("one", [4, 5]), before - 2)
    out = bags(batch)["c"]  # the other columns have no gradient
    two = bags.store.rows("two", [0, 1])
    out.sum().backward()
    torch.testing.assert_close(bags.store.rows("one", [4, 5]), before - 3)
    assert torch.equal(bags.store.rows("two", [0, 1]), two)


class Wide(torch.autograd.Function):
    """Its gradient is the last columns of a wider one, as torch.cat's is."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        wide = grad.new_full((len(grad), grad.shape[1] + 3), torch.nan)
        part = wide[:, 3:]
        part.copy_(grad)
        return part


@pytest.mark.parametrize("update", ["backward", "step"])
@pytest.mark.parametrize("samples", [0, 1, 700])
def test_columns_of_a_wider_gradient(update: str, samples: int) -> None:
    """They are taken where they are; what lies between is nobody's."""
    batch = single_batch(np.random.default_rng(5), KEYS, samples)
    shape = (samples, make_bags()(batch).values().shape[1])
    weight = torch.randn(shape, generator=torch.manual_seed(3))

    def train(wide: bool) -> list[torch.Tensor]:
        bags = make_bags("sum", persia.optim.Adagrad(lr=0.1), update=update)
        store = bags.store
        for _ in range(2):
            out = bags(batch).values()
            ((Wide.apply(out) if wide else out) * weight).sum().backward()
            if update == "step":
                store.optimizer.step()
        return [store.rows(name, range(60)) for name in ("one", "two")]

    for mine, want in zip(train(True), train(False), strict=True):
        assert torch.equal(mine, want)


def test_nan_in_columns_of_a_wider_gradient() -> None:
    bags = make_bags("sum", persia.optim.SGD(lr=1.0))
    batch = persia.JaggedBatch(["a", "b", "c"], torch.arange(6))
    out = bags(batch).values()
    wide = torch.zeros(2, out.shape[1] + 3)
    wide[1, 3] = torch.nan
    before = bags.store.rows("one", range(6))
    with pytest.raises(errors.NonFiniteGradient, match="of id"):
        out.backward(wide[:, 3:])
    assert torch.equal(bags.store.rows("one", range(6)), before)


def test_errors_print_ids_as_they_were_given() -> None:
    store = persia.Store(persia.optim.SGD(lr=1.0))
    module = persia.nn.Embedding(4, 2, name="t", store=store)
    loss = (module(torch.tensor([-7])) * float("nan")).sum()
    with pytest.raises(errors.NonFiniteGradient, match="id -7 "):
        loss.backward()
