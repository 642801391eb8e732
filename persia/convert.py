"""Tables from torch's own embeddings: :func:`from_torch`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from persia import errors
from persia.configs import EmbeddingBagConfig, as_config
from persia.modules import EmbeddingBagCollection
from persia.optim import SparseOptimizer
from persia.store import Store

__all__ = ["from_torch"]


def from_torch(
    module: nn.Module,
    ids: Tensor | None = None,
    *,
    name: str = "table",
    feature_names: list[str] | None = None,
    store: Store | None = None,
    optimizer: SparseOptimizer | None = None,
) -> EmbeddingBagCollection:
    """A collection whose rows are the weights of a torch module.

    Args:
        module: an ``nn.EmbeddingBag``, an ``nn.Embedding``, or torchrec's
            ``EmbeddingBagCollection``.
        ids: the id of each row, int64 [num_embeddings]; default: the row's
            number. For one table only.
        name: of the table, where the module has no names.
        feature_names: of that table; default: its name.
        store: where the rows go; None: a private store with ``optimizer``.
        optimizer: of the private store.

    Raises:
        InvalidArgument: another kind of module, or one with max_norm,
            padding_idx or scale_grad_by_freq.
        ShapeError: ids of another number than the rows.
    """
    weights: list[Tensor]
    if isinstance(module, nn.EmbeddingBag | nn.Embedding):
        _check_settings(module)
        pooling = getattr(module, "mode", "sum")
        configs = [
            EmbeddingBagConfig(
                name,
                module.embedding_dim,
                feature_names or [name],
                module.num_embeddings,
                pooling=pooling,
            )
        ]
        weights = [module.weight]
    elif hasattr(module, "embedding_bag_configs"):
        theirs: Any = module
        made = [
            as_config(c, EmbeddingBagConfig)
            for c in theirs.embedding_bag_configs()
        ]
        configs = [c for c in made if isinstance(c, EmbeddingBagConfig)]
        weights = [theirs.embedding_bags[c.name].weight for c in configs]
        if ids is not None and len(configs) > 1:
            raise errors.InvalidArgument(
                "ids= is for one table; convert the tables one by one"
            )
    else:
        raise errors.InvalidArgument(
            f"cannot convert a {type(module).__name__}; need an "
            "nn.EmbeddingBag, an nn.Embedding or torchrec's "
            "EmbeddingBagCollection"
        )
    out = EmbeddingBagCollection(
        tables=configs, store=store, optimizer=optimizer
    )
    for config, weight in zip(configs, weights, strict=True):
        wanted = torch.arange(len(weight)) if ids is None else ids
        if len(wanted) != len(weight):
            raise errors.ShapeError(
                f"{len(wanted)} ids for {len(weight)} rows of {config.name!r}"
            )
        out.store.set_rows(config.name, wanted, weight)
    return out


def _check_settings(module: nn.EmbeddingBag | nn.Embedding) -> None:
    """Refuses a module whose settings would be lost."""
    remedies = {
        "max_norm": "pass persia.optim.*(max_norm=...) as optimizer",
        "padding_idx": "leave these ids out of the batches (padding_value=)",
        "scale_grad_by_freq": "a row has one gradient, the sum of its ids'",
    }
    for name, remedy in remedies.items():
        value = getattr(module, name)
        if value is not None and value is not False:
            raise errors.InvalidArgument(
                f"the module has {name}={value}, which "
                f"tables cannot have; {remedy}, and make the module without it"
            )
