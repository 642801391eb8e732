"""persia.convert: models of torch alone are the oracle.

Each model is trained twice from the same weights on the same batches: as it
is, with torch's sparse optimizers, and converted.  Losses must be the same.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import persia
from persia import errors

ROWS, DIM, BATCH, STEPS = 50, 8, 16, 25


class MatrixFactors(nn.Module):
    """Two embeddings and two biases of one dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Embedding(ROWS, DIM, sparse=True)
        self.item = nn.Embedding(ROWS, DIM, sparse=True)
        self.user_bias = nn.Embedding(ROWS, 1, sparse=True)
        self.item_bias = nn.Embedding(ROWS, 1, sparse=True)

    def forward(self, ids: Tensor) -> Tensor:
        u, i = ids[:, 0], ids[:, 1]
        both = (self.user(u) * self.item(i)).sum(-1)
        return both + self.user_bias(u)[:, 0] + self.item_bias(i)[:, 0]


class Bags(nn.Module):
    """Offsets, weights of samples, mean and max, padding."""

    def __init__(self) -> None:
        super().__init__()
        self.sum = nn.EmbeddingBag(ROWS, DIM, mode="sum")
        self.mean = nn.EmbeddingBag(ROWS, DIM, mode="mean", padding_idx=3)
        self.max = nn.EmbeddingBag(ROWS, DIM, mode="max")
        self.last = nn.EmbeddingBag(ROWS, DIM, include_last_offset=True)
        self.scale = nn.Parameter(torch.ones(4))
        self.out = nn.Linear(4 * DIM, 1)

    def forward(self, ids: Tensor) -> Tensor:
        flat, starts = ids.reshape(-1), torch.arange(0, ids.numel(), 4)
        ends = torch.cat([starts, torch.tensor([ids.numel()])])
        weights = self.scale.repeat(len(ids))
        parts = [
            self.sum(flat, starts, per_sample_weights=weights),
            self.mean(ids),
            self.max(flat, starts),
            self.last(flat, ends),
        ]
        return self.out(torch.cat(parts, 1))[:, 0]


class Tied(nn.Module):
    """One weight for words in and words out, and for a second embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(ROWS, DIM)
        self.again = nn.Embedding(ROWS, DIM)
        self.again.weight = self.words.weight
        self.mix = nn.Linear(DIM, DIM)
        self.head = nn.Linear(DIM, ROWS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids[:, :2]).mean(1) + self.again(ids[:, 2])
        return self.head(torch.tanh(self.mix(x))).logsumexp(1)


class Attention(nn.Module):
    """Ids of two dimensions, positions, and padding without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(ROWS, DIM, padding_idx=0)
        self.places = nn.Embedding(4, DIM)
        self.layer = nn.TransformerEncoderLayer(
            DIM, 2, 16, dropout=0.0, batch_first=True
        )
        self.out = nn.Linear(DIM, 1)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.items(ids) + self.places(torch.arange(ids.shape[1]))
        return self.out(self.layer(x).mean(1))[:, 0]


class Named(nn.Embedding):
    """A subclass without a forward of its own."""


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict(
            {"a": Named(ROWS, DIM), "b": nn.EmbeddingBag(ROWS, DIM)}
        )
        self.out = nn.Linear(DIM, 1)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.parts["a"](ids[:, 0].int()) * self.parts["b"](ids)
        return self.out(x)[:, 0]


MODELS = [MatrixFactors, Bags, Tied, Attention, Parts]


def batches(seed: int = 1) -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randint(ROWS, (BATCH, 4), generator=g),
            torch.randn(BATCH, generator=g),
        )
        for _ in range(STEPS)
    ]


def train(
    model: nn.Module, optimizers: list[torch.optim.Optimizer]
) -> list[float]:
    losses = []
    for ids, target in batches():
        loss = nn.functional.mse_loss(model(ids), target)
        for one in optimizers:
            one.zero_grad()
        loss.backward()
        for one in optimizers:
            one.step()
        losses.append(loss.item())
    return losses


def embedded(model: nn.Module) -> set[int]:
    kinds = nn.Embedding | nn.EmbeddingBag
    return {id(m.weight) for m in model.modules() if isinstance(m, kinds)}


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize(
    ("theirs", "mine"),
    [
        (
            lambda p: torch.optim.SGD(p, lr=0.1),
            lambda: persia.optim.SGD(lr=0.1),
        ),
        (
            lambda p: torch.optim.Adagrad(p, lr=0.1),
            lambda: persia.optim.Adagrad(lr=0.1, eps=1e-10),
        ),
    ],
    ids=["sgd", "adagrad"],
)
def test_losses_are_those_of_torch(
    make: Callable[[], nn.Module],
    theirs: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    mine: Callable[[], persia.optim.SparseOptimizer],
) -> None:
    torch.manual_seed(0)
    model = make()
    twin = copy.deepcopy(model)
    tables = embedded(model)
    expected = train(
        model,
        [
            theirs([p for p in model.parameters() if id(p) in tables]),
            torch.optim.SGD(
                [p for p in model.parameters() if id(p) not in tables]
                or [nn.Parameter(torch.zeros(1))],
                lr=0.1,
            ),
        ],
    )
    assert persia.convert(twin, optimizer=mine()) is twin
    dense = list(twin.parameters()) or [nn.Parameter(torch.zeros(1))]
    assert not {tuple(p.shape) for p in dense} & {(ROWS, DIM), (ROWS, 1)}
    found = train(twin, [torch.optim.SGD(dense, lr=0.1)])
    assert found == pytest.approx(expected, rel=2e-5, abs=1e-6)

    # And back: the weights are those that torch has trained.
    persia.export_torch(twin)
    for (name, a), (other, b) in zip(
        sorted(model.state_dict().items()),
        sorted(twin.state_dict().items()),
        strict=True,
    ):
        assert name == other
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5)
    assert [type(m) for m in twin.modules()] == [
        type(m) for m in model.modules()
    ]


def test_a_converted_module_is_still_the_same_module() -> None:
    module = nn.Embedding(ROWS, DIM, padding_idx=2)
    weight = module.weight.detach().clone()
    seen: list[Any] = []
    module.register_forward_hook(lambda *args: seen.append(args))
    assert persia.convert(module, optimizer=persia.optim.SGD(lr=1.0)) is module
    assert isinstance(module, nn.Embedding)
    assert sum(p.numel() for p in module.parameters()) == 0
    for ids in (
        torch.tensor([[1, 2], [2, 49]]),
        torch.tensor(7),
        torch.zeros(0, 3, dtype=torch.long),
    ):
        torch.testing.assert_close(
            module(ids), nn.functional.embedding(ids, weight)
        )
    assert len(seen) == 3
    torch.testing.assert_close(module.weight, weight)
    assert "table='Embedding'" in repr(module)


def test_direct_use_has_any_64_bit_id() -> None:
    store = persia.Store(persia.optim.SGD(lr=1.0))
    module = persia.nn.Embedding(10, 4, store=store, name="ids")
    ids = torch.tensor([[1 << 62, -5]])
    before = module(ids)
    before.sum().backward()
    torch.testing.assert_close(module(ids), before - 1)
    bag = persia.nn.EmbeddingBag(
        10, 4, mode="sum", store=store, name="ids", share=True
    )
    torch.testing.assert_close(bag(ids), module(ids).sum(1))


def test_padding_of_a_direct_module_is_zero_as_torchs() -> None:
    theirs = nn.Embedding(10, 4, padding_idx=-1)
    mine = persia.nn.Embedding(
        10, 4, padding_idx=-1, name="t", optimizer=persia.optim.SGD(lr=1.0)
    )
    ids = torch.tensor([9, 3, 9])
    for one in (theirs, mine):
        for _ in range(2):
            out = one(ids)
            assert not out[[0, 2]].any()
            assert not one.weight[9].any()
            out.sum().backward()


def test_what_tables_cannot_do_stays_torchs() -> None:
    class Own(nn.Embedding):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) * 2

    frozen = nn.Embedding(4, 2)
    frozen.weight.requires_grad_(False)
    model = nn.ModuleList(
        [nn.Embedding(4, 2, max_norm=1.0), Own(4, 2), frozen]
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        persia.convert(model)
    assert len(caught) == 3
    assert len(list(model.parameters())) == 3
    with pytest.raises(errors.InvalidArgument):
        persia.export_torch(model)


def test_who_holds_an_old_weight_is_named() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb = nn.Embedding(4, 2)
            self.penalised = [self.emb.weight]

    with pytest.warns(UserWarning, match="emb.*list of Model"):
        persia.convert(Model())
    model = Parts()
    optimizer = torch.optim.Adam(model.parameters())
    with pytest.warns(UserWarning, match="weight"):
        persia.convert(model)
    del optimizer
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        persia.convert(Parts())


def test_rows_that_a_table_has_are_kept() -> None:
    store = persia.Store(persia.optim.SGD(lr=1.0))
    first = persia.convert(nn.Embedding(4, 2), store=store)
    with pytest.warns(UserWarning, match="4 of table 'Embedding'"):
        second = persia.convert(nn.Embedding(4, 2), store=store, share=True)
    ids = torch.arange(4)
    torch.testing.assert_close(second(ids), first(ids))


def test_from_torch_does_not_pool_an_embedding() -> None:
    module = nn.Embedding(4, 2)
    made = persia.from_torch(module, name="table")
    assert isinstance(made, persia.EmbeddingCollection)
    ids = persia.JaggedBatch(
        ["table"], torch.tensor([0, 1, 3]), lengths=torch.tensor([2, 1])
    )
    torch.testing.assert_close(
        made(ids)["table"].values(), module.weight[[0, 1, 3]]
    )
