"""A store that counts what lookups have seen."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import persia
from persia import Batch, JaggedBatch


class Counter:
    """A store whose row 7 counts its updates."""

    def __init__(self, update: str = "backward") -> None:
        self.store = persia.Store(persia.optim.SGD(lr=1.0), update=update)
        self.model = persia.EmbeddingBagCollection(
            store=self.store,
            tables=[
                persia.EmbeddingBagConfig(
                    "t", embedding_dim=4, feature_names=["f"], init=0.0
                )
            ],
        )

    @staticmethod
    def source(n: int) -> Iterator[Batch]:
        for _ in range(n):
            yield Batch(None, JaggedBatch(["f"], torch.tensor([7])))

    def loader(self, n: int, staleness: int | None) -> Any:
        return persia.DataLoader(self.source(n), self.model, staleness)

    def forward(self, batch: Batch) -> tuple[int, Tensor]:
        """(updates seen, a loss whose backward adds one update)."""
        out = self.model(batch.ids).values()
        return int(out[0, 0]), -out.sum()

    @property
    def stats(self) -> dict[str, Any]:
        stats: dict[str, Any] = self.store.stats()["lookahead"]
        return stats

    @property
    def value(self) -> int:
        return int(self.store.rows("t", [7])[0, 0])
