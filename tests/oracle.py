"""What torch makes of the same batches: EmbeddingBag and torch.optim."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

import persia

VOCABULARY = 40


def random_batch(
    rng: np.random.Generator,
    keys: list[str],
    samples: int,
    *,
    longest: int = 4,
    weighted: bool = False,
    vocabulary: int = VOCABULARY,
) -> persia.JaggedBatch:
    """Bags of 0 to `longest` ids, duplicates and empty bags included."""
    lengths = torch.from_numpy(
        rng.integers(0, longest + 1, len(keys) * samples)
    )
    n = int(lengths.sum())
    values = torch.from_numpy(rng.integers(0, vocabulary, n))
    weights = None
    if weighted:
        weights = torch.from_numpy(rng.normal(size=n)).float()
    return persia.JaggedBatch(keys, values, lengths=lengths, weights=weights)


def single_batch(
    rng: np.random.Generator,
    keys: list[str],
    samples: int,
    vocabulary: int = VOCABULARY,
) -> persia.JaggedBatch:
    """One id a bag, without offsets."""
    n = len(keys) * samples
    return persia.JaggedBatch(
        keys, torch.from_numpy(rng.integers(0, vocabulary, n))
    )


class TorchTables(torch.nn.Module):
    """The tables of a collection as dense torch weights with the same rows."""

    def __init__(
        self, bags: persia.EmbeddingBagCollection, vocabulary: int
    ) -> None:
        super().__init__()
        self.bags = [bags]  # in a list: not a submodule
        self.weights = torch.nn.ParameterDict(
            {
                c.name: torch.nn.Parameter(
                    bags.store.rows(c.name, torch.arange(vocabulary)).clone()
                )
                for c in bags.embedding_bag_configs()
            }
        )

    def forward(self, ids: Any) -> Tensor:
        parts = []
        for config in self.bags[0].embedding_bag_configs():
            for feature in config.feature_names:
                values, lengths = ids[feature][:2]
                w = None
                if ids.weights_or_none() is not None:
                    w = ids.to_dict()[feature][2]
                parts.append(
                    pooled(
                        self.weights[config.name],
                        values,
                        lengths,
                        str(config.pooling),
                        w,
                    )
                )
        return torch.cat(parts, 1)


def pooled(
    weight: Tensor,
    values: Tensor,
    lengths: Tensor,
    pooling: str,
    weights: Tensor | None,
) -> Tensor:
    """Bags by torch's own EmbeddingBag (a sum of weighted rows)."""
    offsets = torch.cumsum(lengths, 0) - lengths
    out = torch.nn.functional.embedding_bag(
        values,
        weight,
        offsets,
        mode="sum",
        per_sample_weights=torch.ones(len(values))
        if weights is None
        else weights,
    )
    count = lengths.clamp(min=1).float()[:, None]
    if pooling == "mean":
        out = out / count
    elif pooling == "sqrtn":
        out = out / count.sqrt()
    return out
