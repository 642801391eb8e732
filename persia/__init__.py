"""Persia: recommender embeddings for PyTorch that outgrow any fixed
vocabulary.
"""

from persia import datasets, errors, metrics, models, optim
from persia.configs import EmbeddingBagConfig, EmbeddingConfig
from persia.convert import from_torch
from persia.jagged import Batch, JaggedBatch
from persia.loader import DataLoader
from persia.modules import EmbeddingBagCollection, EmbeddingCollection
from persia.optim import clip_grad_norm_
from persia.store import Store

__all__ = [
    "Batch",
    "DataLoader",
    "EmbeddingBagCollection",
    "EmbeddingBagConfig",
    "EmbeddingCollection",
    "EmbeddingConfig",
    "JaggedBatch",
    "Store",
    "clip_grad_norm_",
    "datasets",
    "errors",
    "from_torch",
    "metrics",
    "models",
    "optim",
]
