"""Wide & Deep (Cheng et al., arXiv 1606.07792): a linear model and an MLP."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from persia.data.batches.jagged import JaggedBatch
from persia.models.dense import Standardize, mlp, one_dim
from persia.nn.collections import EmbeddingBagCollection


class WideDeep(nn.Module):
    """The logit is the sum of a linear model over ids and dense features and
    of an MLP over the dense features and the embeddings.

    The first column of an embedding is the weight of its id in the linear
    model, the other dim - 1 are for the MLP. The crosses of the paper are
    features whose ids you make of two others, such as
    ``persia.hash_ids(a + "|" + b)`` of strings.

    Args:
        bags: the embeddings; all of one dim, at least 2.
        dense_features: dense columns of a batch, 0 for none.
        deep: hidden widths of the MLP; 1 is added as its last.
        standardize: bring dense features to mean 0 and variance 1 first.
    """

    def __init__(
        self,
        bags: EmbeddingBagCollection,
        dense_features: int,
        deep: Sequence[int] = (256, 64),
        standardize: bool = True,
    ) -> None:
        super().__init__()
        features, self.dim = one_dim("WideDeep", bags, least=2)
        self.bags = bags
        self.scale = Standardize(dense_features) if standardize else None
        self.wide = nn.Linear(dense_features, 1) if dense_features else None
        width = dense_features + features * (self.dim - 1)
        self.deep = mlp(width, [*deep, 1], last_relu=False)

    def forward(
        self, dense: torch.Tensor | None, ids: JaggedBatch
    ) -> torch.Tensor:
        """Logits [B] of dense [B, dense_features] and of B samples' ids."""
        x = self.bags(ids).values()
        x = x.view(x.shape[0], -1, self.dim)
        logits: torch.Tensor = x[:, :, 0].sum(1)
        deep = x[:, :, 1:].flatten(1)
        if self.wide is not None and dense is not None:
            dense = self.scale(dense) if self.scale else dense
            logits = logits + self.wide(dense).squeeze(1)
            deep = torch.cat([dense, deep], 1)
        logits = logits + self.deep(deep).squeeze(1)
        return logits
