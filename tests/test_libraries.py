"""Models of other libraries, converted by one line.

The oracle is the library's own model on torch's embeddings: trained from the
same weights on the same batches, the losses are the same.  In a data loader
each batch is one lookup, ahead of its forward.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import persia
from tests.libraries import STEPS, deepctr, installed, rechub

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


@pytest.fixture(scope="module", autouse=True)
def _libraries() -> Iterator[None]:
    with installed():
        yield


def train(model: nn.Module, batches: Iterable[Any]) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for x, y in batches:
        out = model(x).reshape(-1)
        loss = nn.functional.binary_cross_entropy(out, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("make", "name"),
    [
        *((deepctr, n) for n in ("DeepFM", "DCN", "AutoInt", "WDL")),
        *((deepctr, n) for n in ("FiBiNET", "NFM", "MLR")),
        *((rechub, n) for n in ("DeepFM", "WideDeep", "DCN")),
    ],
)
def test_losses_are_those_of_the_library(
    make: Callable[[str], tuple[nn.Module, list[Any]]], name: str
) -> None:
    torch.manual_seed(0)
    model, batches = make(name)
    twin = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # lists that keep an old weight
        persia.convert(twin, optimizer=persia.optim.SGD(lr=0.05))
    expected = train(model, batches)
    loader = persia.DataLoader(batches, twin, staleness=0)
    assert train(twin, loader) == pytest.approx(expected, rel=1e-5)
    tables = [m for m in twin.modules() if hasattr(m, "rows")]
    stats = tables[0].rows.store.stats()["lookahead"]
    assert stats["prefetched"] == STEPS - 1
    # Those of the first batch, where a forward may ask a module twice.
    assert stats["not_prefetched"] <= 2 * len(tables)
