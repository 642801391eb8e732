"""The models that ``persia train`` knows."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import nn

import persia
from persia import models, optim
from persia.train.config import TrainConfig

__all__ = ["MODELS", "make_model", "make_optimizer"]

MODELS: dict[str, Callable[..., nn.Module]] = {
    "dlrm": models.DLRM,
    "deepfm": models.DeepFM,
    "dcn": models.DCNv2,
    "widedeep": models.WideDeep,
}


def make_optimizer(config: TrainConfig) -> optim.SparseOptimizer:
    """That of the embeddings."""
    eps = {} if config.eps is None else {"eps": config.eps}
    kind: Callable[..., optim.SparseOptimizer]
    kind = optim.ALGORITHMS[config.optimizer]
    return kind(lr=config.learning_rate, **eps)


def make_model(
    config: TrainConfig,
    store: persia.Store,
    keys: Iterable[str],
    dense_features: int,
) -> nn.Module:
    """A model with a table for each key, all in ``store``."""
    bags = persia.EmbeddingBagCollection(
        store=store,
        tables=[
            persia.EmbeddingBagConfig(
                key, config.dim, [key], **config.table_options()
            )
            for key in keys
        ],
    )
    return MODELS[config.model](bags, dense_features)
