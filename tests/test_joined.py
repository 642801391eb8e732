"""Converted models in a persia.DataLoader: lookups of all modules as one.

The oracle is the same model in a plain loop, where each module looks up its
own ids, and torch's own embeddings.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

import persia
from tests.remote import Servers
from tests.test_conversion import (
    BATCH,
    DIM,
    MODELS,
    ROWS,
    STEPS,
    Attention,
    Bags,
    MatrixFactors,
    batches,
)


def store_of(model: nn.Module) -> persia.Store:
    return next(m.rows.store for m in model.modules() if hasattr(m, "rows"))


def fit(model: nn.Module, data: Iterable[Any]) -> list[float]:
    """Losses of a pass; batches are (ids, target)."""
    dense = list(model.parameters()) or [nn.Parameter(torch.zeros(1))]
    optimizer = torch.optim.SGD(dense, lr=0.1)
    losses = []
    for ids, target in data:
        loss = nn.functional.mse_loss(model(ids), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def twins(make: Any, **more: Any) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = make()
    twin = copy.deepcopy(model)
    for one in (model, twin):
        persia.convert(one, optimizer=persia.optim.Adam(lr=0.05), **more)
    return model, twin


@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("make", MODELS)
def test_the_bits_are_those_of_the_plain_loop(
    make: Any, prefetch: bool
) -> None:
    model, twin = twins(make)
    expected = fit(model, batches())
    loader = persia.DataLoader(batches(), twin, staleness=0, prefetch=prefetch)
    assert fit(twin, loader) == expected
    assert store_of(twin).stats()["lookahead"]["prefetched"] == STEPS - 1


@pytest.mark.parametrize("make", [MatrixFactors, Bags])
def test_one_pull_a_step(make: Any) -> None:
    servers = Servers(1)
    try:
        store = persia.Store(persia.optim.SGD(lr=0.1), servers=servers.text)
        model = persia.convert(make(), store=store)
        before = store.stats()["client"]["pulls"]
        data = batches()
        fit(model, persia.DataLoader(data[:5], model, staleness=0))
        middle = store.stats()["client"]["pulls"]
        tables = sum(hasattr(m, "rows") for m in model.modules())
        assert middle - before <= 4 + 2 * tables  # the first forward's alone
        loader = persia.DataLoader(data, model, staleness=0)
        loop = iter(loader)
        fit(model, [next(loop)])
        first = store.stats()["client"]["pulls"]
        fit(model, loop)
        assert store.stats()["client"]["pulls"] - first == STEPS - 1
        store.close()
    finally:
        servers.close()


class Fields(nn.Module):
    """Ids in columns of floats, in a dict; one module is used at times."""

    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Embedding(ROWS, DIM)
        self.tags = nn.EmbeddingBag(ROWS, DIM, mode="mean", padding_idx=0)
        self.extra = nn.Embedding(ROWS, DIM)
        self.out = nn.Linear(DIM, 1)
        self.uses_extra = True

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        x, seen = batch["x"], batch["seen"]
        rows = self.user(x[:, 1].long()) + self.tags(x[:, 2:5].long())
        if self.uses_extra:
            rows = rows + self.extra(seen)
        out: Tensor = self.out(rows)
        return out[:, 0]


def dicts() -> list[tuple[dict[str, Tensor], Tensor]]:
    g = torch.Generator().manual_seed(3)
    return [
        (
            {
                "x": torch.randint(ROWS, (BATCH, 5), generator=g).float(),
                "seen": torch.randint(ROWS, (BATCH,), generator=g),
            },
            torch.randn(BATCH, generator=g),
        )
        for _ in range(STEPS)
    ]


class Far(Tensor):
    """A tensor that says it is on a GPU, with its elements on the host."""

    @staticmethod
    def __new__(cls, here: Tensor) -> Far:
        make: Any = Tensor._make_wrapper_subclass
        far: Far = make(cls, here.shape, dtype=here.dtype, device="cuda:0")
        return far

    def __init__(self, here: Tensor) -> None:
        self.here = here

    @classmethod
    def __torch_dispatch__(
        cls, op: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        device = kwargs.pop("device", None)
        out = op(*tree_map_only(Far, lambda x: x.here, args), **kwargs)
        if device is not None and device.type == "cpu":
            return out
        return tree_map_only(Tensor, Far, out)


class Pair(nn.Module):
    """Takes its ids from a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Embedding(ROWS, DIM, sparse=True)
        self.item = nn.Embedding(ROWS, DIM, sparse=True)

    def forward(self, ids: dict[str, Tensor]) -> Tensor:
        return (self.user(ids["user"]) * self.item(ids["item"])).sum(-1)


@pytest.mark.parametrize("far_batches", [False, True])
def test_ids_on_a_gpu_are_those_of_the_loader(far_batches: bool) -> None:
    model, twin = twins(Pair)
    for module in (twin.user, twin.item):
        module.rows._device = torch.device("cpu")  # there is no other
    data: list[Any] = [
        ({"user": ids[:, 0].clone(), "item": ids[:, 1].clone()}, target)
        for ids, target in batches()
    ]

    def far(ids: dict[str, Tensor]) -> dict[str, Tensor]:
        return {
            key: one if isinstance(one, Far) else Far(one)
            for key, one in ids.items()
        }

    given = [(far(ids), y) for ids, y in data] if far_batches else data
    loader = persia.DataLoader(given, twin, staleness=0)
    moved = ((far(ids), target) for ids, target in loader)
    assert fit(twin, moved) == fit(model, data)
    stats = store_of(twin).stats()
    assert stats["lookahead"]["prefetched"] == STEPS - 1
    copied = stats["cuda_ids_copied"]
    # Each forward's; the first one's twice, for it was not ahead; and those
    # of the loader's other batches, where they are on the device.
    more = STEPS - 1 if far_batches else 0
    assert copied == 2 * BATCH * (STEPS + 1 + more)


def test_ids_are_found_in_columns_of_floats_and_in_dicts() -> None:
    model, twin = twins(Fields)
    expected = fit(model, dicts())
    loader = persia.DataLoader(dicts(), twin, staleness=0)
    assert fit(twin, loader) == expected
    assert store_of(twin).stats()["lookahead"]["prefetched"] == STEPS - 1


def test_a_module_that_is_left_out_gets_no_more_updates(
    idle_core: bool,
) -> None:
    _, model = twins(Fields)
    loop = iter(persia.DataLoader(dicts(), model, staleness=0))
    fit(model, [next(loop)])
    fit(model, [next(loop)])
    model.uses_extra = False  # type: ignore[assignment]
    # The lookups of two batches had begun, or were to begin.
    fit(model, [next(loop)])
    fit(model, [next(loop)])
    before = model.extra.weight.detach().clone()
    fit(model, loop)
    torch.testing.assert_close(model.extra.weight.detach(), before)


def test_ids_that_the_forward_changes_are_looked_up_by_it() -> None:
    class Shifted(MatrixFactors):
        shift = 0

        def forward(self, ids: Tensor) -> Tensor:
            return super().forward((ids + self.shift) % ROWS)

    model, twin = twins(Shifted)
    data = batches()
    loop = iter(persia.DataLoader(data, twin, staleness=0))
    for i in range(STEPS):
        model.shift = twin.shift = i % 3  # type: ignore[assignment]
        assert fit(twin, [next(loop)]) == pytest.approx(
            fit(model, [data[i]]), rel=1e-4, abs=1e-5
        )


class Checkpointed(nn.Module):
    """The lookups are in a part of the forward that is repeated."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Attention()

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.inner, ids, use_reentrant=False)
        return out


def test_a_forward_that_is_repeated_in_the_backward() -> None:
    model, twin = twins(Checkpointed)
    expected = fit(model, batches())
    loader = persia.DataLoader(batches(), twin, staleness=0)
    assert fit(twin, loader) == expected


def test_two_forwards_of_a_batch(idle_core: bool) -> None:
    model, twin = twins(MatrixFactors)

    def both(one: nn.Module, data: Iterable[Any]) -> list[float]:
        losses = []
        for ids, target in data:
            for _ in range(2):  # each with its backward
                loss = nn.functional.mse_loss(one(ids), target)
                loss.backward()
                losses.append(loss.item())
            loss = nn.functional.mse_loss(one(ids) * one(ids), target)
            loss.backward()
            losses.append(loss.item())
        return losses

    expected = both(model, batches())
    loader = persia.DataLoader(batches(), twin, staleness=0)
    assert both(twin, loader) == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_an_evaluation_between_two_passes() -> None:
    model, twin = twins(Attention)
    train, held = batches(), batches(seed=2)
    loader = persia.DataLoader(train, twin, staleness=0)
    held_out = persia.DataLoader(held, twin, staleness=0)
    for _ in range(2):
        assert fit(twin, loader) == fit(model, train)
        with torch.no_grad():
            expected = [model(ids) for ids, _ in held]
            found = [twin(ids) for ids, _ in held_out]
        for a, b in zip(expected, found, strict=True):
            torch.testing.assert_close(b, a, rtol=0, atol=0)


def test_a_frozen_module_gets_no_gradient() -> None:
    model, twin = twins(MatrixFactors)
    for one in (model, twin):
        one.user.requires_grad_(False)
        one.user.rows.requires_grad_(False)
    before = twin.user.weight.detach().clone()
    expected = fit(model, batches())
    loader = persia.DataLoader(batches(), twin, staleness=0)
    assert fit(twin, loader) == expected
    torch.testing.assert_close(twin.user.weight.detach(), before)
