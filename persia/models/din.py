"""DIN (Zhou et al., arXiv 1706.06978): a target attends to a history."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from persia import errors
from persia.base.tensors import in_graph
from persia.data.batches.jagged import JaggedBatch
from persia.models.dense import Standardize, feature_dims, mlp
from persia.nn.collections import EmbeddingBagCollection, EmbeddingCollection


class DIN(nn.Module):
    """How much an id of the history counts depends on the target: a small MLP
    on both gives its weight. As in the paper the weights are not normalised,
    so that a longer history may speak louder.

    Args:
        items: sequence embeddings of the target and of the history, mostly of
            one table: ``EmbeddingConfig("item", 16, ["item", "history"])``.
        bags: pooled embeddings of all other features, or None.
        dense_features: dense columns of a batch, 0 for none.
        target: the feature of ``items`` with one id a sample.
        history: the feature of ``items`` with any number of ids a sample.
        attention: hidden widths of the MLP that weighs; 1 is added.
        deep: hidden widths of the last MLP; 1 is added as its last.
        standardize: bring dense features to mean 0 and variance 1 first.
    """

    def __init__(
        self,
        items: EmbeddingCollection,
        bags: EmbeddingBagCollection | None = None,
        dense_features: int = 0,
        target: str = "item",
        history: str = "history",
        attention: Sequence[int] = (32,),
        deep: Sequence[int] = (128, 64),
        standardize: bool = True,
    ) -> None:
        super().__init__()
        self.items, self.bags = items, bags
        self.target, self.history = target, history
        self.scale = Standardize(dense_features) if standardize else None
        dim = items.embedding_dim()
        self.weigh = mlp(4 * dim, [*attention, 1], last_relu=False)
        width = dense_features + 2 * dim
        width += sum(feature_dims(bags)) if bags is not None else 0
        self.deep = mlp(width, [*deep, 1], last_relu=False)

    def forward(
        self, dense: torch.Tensor | None, ids: JaggedBatch
    ) -> torch.Tensor:
        """Logits [B] of dense [B, dense_features] and of B samples' ids.

        Raises:
            ShapeError: a target of another number of ids than one a sample.
        """
        found = self.items(ids)
        target, history = found[self.target].values(), found[self.history]
        lengths = history.lengths().to(target.device)
        if not in_graph() and not bool(
            (found[self.target].lengths() == 1).all()
        ):
            raise errors.ShapeError(
                f"DIN: {len(target)} ids of {self.target!r} for "
                f"{len(lengths)} samples; need one each"
            )
        parts = [target, self._interest(target, history.values(), lengths)]
        if self.bags is not None:
            parts.append(self.bags(ids).values())
        if dense is not None:
            parts.append(self.scale(dense) if self.scale else dense)
        logits: torch.Tensor = self.deep(torch.cat(parts, 1)).squeeze(1)
        return logits

    def _interest(
        self, target: torch.Tensor, keys: torch.Tensor, lengths: torch.Tensor
    ) -> torch.Tensor:
        """[B, dim] of target [B, dim] and the histories' ids [n, dim]."""
        sample = torch.arange(target.shape[0], device=target.device)
        sample = sample.repeat_interleave(lengths, output_size=keys.shape[0])
        query = target[sample]
        both = torch.cat([query, keys, query - keys, query * keys], 1)
        weighed = self.weigh(both) * keys
        return torch.zeros_like(target).index_add(0, sample, weighed)
