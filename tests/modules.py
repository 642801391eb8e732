"""Modules for tests."""

from __future__ import annotations

from typing import Any

import persia

KEYS = ["a", "b", "c", "spare"]


def make_bags(
    pooling: str = "sum",
    optimizer: Any = None,
    dim: int = 8,
    is_weighted: bool = False,
    **store: Any,
) -> persia.EmbeddingBagCollection:
    s = persia.Store(optimizer=optimizer, **store)
    return persia.EmbeddingBagCollection(
        store=s,
        is_weighted=is_weighted,
        tables=[
            persia.EmbeddingBagConfig(
                "one",
                embedding_dim=dim,
                feature_names=["c"],
                pooling=pooling,
                init=0.5,
            ),
            persia.EmbeddingBagConfig(
                "two",
                embedding_dim=2 * dim,
                feature_names=["a", "b"],
                pooling=pooling,
                init=0.5,
            ),
        ],
    )
