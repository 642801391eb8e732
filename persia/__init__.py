"""Persia: recommender embeddings for PyTorch that outgrow any fixed
vocabulary.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from persia.base.platforms import unsupported

if _why := unsupported():
    raise ImportError(_why)

from persia.base.lazy import lazily

if TYPE_CHECKING:
    from persia import (
        admission,
        checkpoint,
        data,
        datasets,
        distributed,
        errors,
        eviction,
        metrics,
        models,
        nn,
        optim,
        prometheus,
        serving,
        store,
        train,
    )
    from persia.base.version import __version__
    from persia.checkpoint.kept import KeptRows, keep_rows
    from persia.data.batches.batch import Batch
    from persia.data.batches.jagged import JaggedBatch
    from persia.data.schema.hashing import hash_ids
    from persia.loop.loader import DataLoader
    from persia.loop.stream import Stream
    from persia.nn.collections import (
        EmbeddingBagCollection,
        EmbeddingCollection,
    )
    from persia.nn.conversion import convert, export_torch, from_torch
    from persia.nn.penalties import penalty
    from persia.optim import clip_grad_norm_
    from persia.serving.exporting import export
    from persia.serving.model import load_model
    from persia.store.configs import EmbeddingBagConfig, EmbeddingConfig
    from persia.store.store import Store
    from persia.train.page import report

__all__ = [
    "Batch",
    "DataLoader",
    "EmbeddingBagCollection",
    "EmbeddingBagConfig",
    "EmbeddingCollection",
    "EmbeddingConfig",
    "JaggedBatch",
    "KeptRows",
    "Store",
    "Stream",
    "__version__",
    "admission",
    "checkpoint",
    "clip_grad_norm_",
    "convert",
    "data",
    "datasets",
    "distributed",
    "errors",
    "eviction",
    "export",
    "export_torch",
    "from_torch",
    "hash_ids",
    "keep_rows",
    "load_model",
    "metrics",
    "models",
    "nn",
    "optim",
    "penalty",
    "prometheus",
    "report",
    "serving",
    "store",
    "train",
]

_NAMES = {
    "Batch": "data.batches.batch",
    "DataLoader": "loop.loader",
    "EmbeddingBagCollection": "nn.collections",
    "EmbeddingBagConfig": "store.configs",
    "EmbeddingCollection": "nn.collections",
    "EmbeddingConfig": "store.configs",
    "JaggedBatch": "data.batches.jagged",
    "Store": "store.store",
    "Stream": "loop.stream",
    "__version__": "base.version",
    "clip_grad_norm_": "optim",
    "convert": "nn.conversion",
    "export": "serving.exporting",
    "export_torch": "nn.conversion",
    "from_torch": "nn.conversion",
    "hash_ids": "data.schema.hashing",
    "KeptRows": "checkpoint.kept",
    "keep_rows": "checkpoint.kept",
    "load_model": "serving.model",
    "penalty": "nn.penalties",
    "report": "train.page",
}
_get, __dir__ = lazily(__name__, _NAMES, {*__all__} - {*_NAMES})


def __getattr__(name: str) -> Any:
    if name == "_core":
        return _import_core()
    return _get(name)


def _import_core() -> Any:
    try:
        return importlib.import_module("persia._core")
    except ModuleNotFoundError:
        raise ImportError(
            f"{__path__[0]} is a source tree of Persia whose C core is not "
            "built: run 'make build' there, or start Python in another folder "
            "to import the Persia that is installed"
        ) from None
    except ImportError as error:
        from persia.doctor import remedy_of

        raise ImportError(
            f"the C core of Persia cannot be loaded: {error}: "
            f"{remedy_of(error)}"
        ) from error
