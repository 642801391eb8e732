"""Persia: recommender embeddings for PyTorch that outgrow any fixed
vocabulary.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from persia import (
        admission,
        data,
        datasets,
        errors,
        eviction,
        metrics,
        models,
        nn,
        optim,
    )
    from persia.configs import EmbeddingBagConfig, EmbeddingConfig
    from persia.conversion import convert, export_torch, from_torch
    from persia.data.hashing import hash_ids
    from persia.jagged import Batch, JaggedBatch
    from persia.loader import DataLoader
    from persia.modules import EmbeddingBagCollection, EmbeddingCollection
    from persia.optim import clip_grad_norm_
    from persia.store import Store
    from persia.stream import Stream

__all__ = [
    "Batch",
    "DataLoader",
    "EmbeddingBagCollection",
    "EmbeddingBagConfig",
    "EmbeddingCollection",
    "EmbeddingConfig",
    "JaggedBatch",
    "Store",
    "Stream",
    "admission",
    "clip_grad_norm_",
    "convert",
    "data",
    "datasets",
    "errors",
    "eviction",
    "export_torch",
    "from_torch",
    "hash_ids",
    "metrics",
    "models",
    "nn",
    "optim",
]

# Imported when first asked for: a parameter server is a Python process that
# needs no torch, whose import takes seconds.
_WHERE = {
    "Batch": "jagged",
    "DataLoader": "loader",
    "EmbeddingBagCollection": "modules",
    "EmbeddingBagConfig": "configs",
    "EmbeddingCollection": "modules",
    "EmbeddingConfig": "configs",
    "JaggedBatch": "jagged",
    "Store": "store",
    "Stream": "stream",
    "clip_grad_norm_": "optim",
    "convert": "conversion",
    "export_torch": "conversion",
    "from_torch": "conversion",
    "hash_ids": "data.hashing",
}
_MODULES = set(__all__) - _WHERE.keys()


def __getattr__(name: str) -> Any:
    if name == "_core":
        return _import_core()
    if name in _MODULES:
        return importlib.import_module(f"persia.{name}")
    if name not in _WHERE:
        raise AttributeError(f"module 'persia' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"persia.{_WHERE[name]}"), name)
    globals()[name] = value
    return value


def _import_core() -> Any:
    try:
        return importlib.import_module("persia._core")
    except ModuleNotFoundError:
        raise ImportError(
            f"{__path__[0]} is a source tree of Persia whose C core is not "
            "built: run 'make build' there, or start Python in another folder "
            "to import the Persia that is installed"
        ) from None


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
