"""Models for tests of exports, with batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import persia
from persia import models

KEYS = ["a", "b", "c", "d"]
DENSE = 3


def store(**options: Any) -> persia.Store:
    return persia.Store(persia.optim.Adagrad(lr=0.1), **options)


def bags(where: persia.Store | None = None) -> persia.EmbeddingBagCollection:
    pooling = ["sum", "mean", "sum", "sqrtn"]
    return persia.EmbeddingBagCollection(
        store=where or store(),
        tables=[
            persia.EmbeddingBagConfig(key, 8, [key], pooling=how)
            for key, how in zip(KEYS, pooling, strict=True)
        ],
    )


def batch(samples: int, several: bool = True, ids: int = 50) -> Any:
    """(dense, ids)."""
    dense = torch.randn(samples, DENSE)
    n = len(KEYS) * samples
    if not several:
        values = torch.randint(0, ids, (n,))
        return dense, persia.JaggedBatch(KEYS, values)
    lengths = torch.randint(0, 4, (n,))
    values = torch.randint(-ids, ids, (int(lengths.sum()),))
    return dense, persia.JaggedBatch(KEYS, values, lengths=lengths)


def train(model: nn.Module, make: Callable[[], Any], steps: int = 5) -> None:
    """Some steps of any loss; ``make`` gives the arguments of a call."""
    dense = [p for p in model.parameters() if p.numel()]
    optimizer = torch.optim.SGD(dense, lr=0.01) if dense else None
    model.train()
    for _ in range(steps):
        out = model(*make())
        parts = out.values() if isinstance(out, dict) else [out]
        sum(part.float().sigmoid().mean() for part in parts).backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()


CLICKS: dict[str, Callable[[Any], nn.Module]] = {
    "dlrm": lambda b: models.DLRM(b, DENSE),
    "deepfm": lambda b: models.DeepFM(b, DENSE),
    "dcn": lambda b: models.DCNv2(b, DENSE),
    "widedeep": lambda b: models.WideDeep(b, DENSE),
    "mmoe": lambda b: models.MMoE(b, DENSE, tasks=2),
    "sharedbottom": lambda b: models.SharedBottom(b, DENSE, tasks=2),
}


class Tied(nn.Module):
    """An embedding that the output layer shares."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 4, padding_idx=0)
        self.out = nn.Linear(4, 20, bias=False)
        self.out.weight = self.words.weight

    def forward(self, words: Tensor) -> Tensor:
        out: Tensor = self.out(self.words(words).mean(1))
        return out


class Named(nn.Module):
    """Several outputs, by name, of an embedding bag."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.EmbeddingBag(20, 4, mode="mean", padding_idx=0)
        self.last = nn.Linear(4, 1)

    def forward(self, items: Tensor, scale: Tensor) -> dict[str, Tensor]:
        found = self.items(items)
        return {"score": self.last(found).squeeze(1) * scale, "vector": found}


def words(samples: int) -> Any:
    return (torch.randint(0, 20, (samples, 5)),)


def items(samples: int) -> Any:
    return torch.randint(0, 20, (samples, 5)), torch.rand(samples)


CONVERTED: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "tied": (Tied, words),
    "named": (Named, items),
}


class Rows(nn.Module):
    """Vectors of sequences, not pooled, of two tables for one feature."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = persia.EmbeddingCollection(
            store=store(),
            tables=[
                persia.EmbeddingConfig("t", 4, ["x", "y"]),
                persia.EmbeddingConfig("u", 4, ["x"]),
            ],
        )

    def forward(self, ids: Any) -> Tensor:
        found = self.rows(ids)
        one: Tensor = found["x@t"].to_padded_dense(3).sum(1)
        other: Tensor = found["x@u"].to_padded_dense(3).sum(1)
        return one * other + found["y"].to_padded_dense(3).amax(1)


def rows(samples: int) -> Any:
    lengths = torch.randint(1, 4, (2 * samples,))
    values = torch.randint(0, 30, (int(lengths.sum()),))
    return (persia.JaggedBatch(["x", "y"], values, lengths=lengths),)


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bags = persia.EmbeddingBagCollection(
            store=store(),
            tables=[persia.EmbeddingBagConfig("w", 4, ["w"], pooling="mean")],
            is_weighted=True,
        )

    def forward(self, ids: Any) -> Tensor:
        out: Tensor = self.bags(ids).values()
        return out


def weighted(samples: int) -> Any:
    lengths = torch.randint(0, 4, (samples,))
    n = int(lengths.sum())
    values = torch.randint(0, 30, (n,))
    return (
        persia.JaggedBatch(
            ["w"], values, lengths=lengths, weights=torch.rand(n)
        ),
    )


def din() -> nn.Module:
    items = persia.EmbeddingCollection(
        store=store(),
        tables=[persia.EmbeddingConfig("item", 8, ["item", "history"])],
    )
    return models.DIN(items, None, DENSE)


def history(samples: int) -> Any:
    lengths = torch.randint(0, 4, (samples,))
    ids = {
        "item": torch.randint(0, 30, (samples,)),
        "history": (torch.randint(0, 30, (int(lengths.sum()),)), lengths),
    }
    return torch.randn(samples, DENSE), persia.JaggedBatch.from_dict(ids)


OWN: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "din": (din, history),
    "rows": (Rows, rows),
    "weighted": (Weighted, weighted),
}


class Ranks(nn.Module):
    """Candidates share what a request has to give."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(50, 4)
        self.last = nn.Linear(4, 1)
        nn.init.zeros_(self.last.weight)

    def forward(self, items: Tensor) -> Tensor:
        found: Tensor = self.last(self.items(items)).squeeze(1).softmax(0)
        return found


class Centred(nn.Module):
    """Vectors around the mean of their batch."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(50, 4)

    def forward(self, items: Tensor) -> Tensor:
        found = self.items(items)
        return found - found.mean(0)
