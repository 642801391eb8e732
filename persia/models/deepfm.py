"""DeepFM (Guo et al., arXiv 1703.04247): factorisation machine and MLP."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from persia.data.batches.jagged import JaggedBatch
from persia.models.dense import Standardize, mlp, one_dim
from persia.nn.collections import EmbeddingBagCollection


class DeepFM(nn.Module):
    """The logit is the sum of a linear model, of all pairwise products of the
    features' factors, and of an MLP over the dense features and the factors.

    The first column of an embedding is the feature's weight in the linear
    model, the other dim - 1 are its factors: one lookup serves both.

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
        features, self.dim = one_dim("DeepFM", bags, least=2)
        self.bags = bags
        self.scale = (
            Standardize(dense_features) if standardize else nn.Identity()
        )
        self.linear = nn.Linear(dense_features, 1) if dense_features else None
        width = dense_features + features * (self.dim - 1)
        self.deep = mlp(width, [*deep, 1], last_relu=False)

    def forward(
        self, dense: torch.Tensor | None, ids: JaggedBatch
    ) -> torch.Tensor:
        """Logits [B] of dense [B, dense_features] and of B samples' ids."""
        x = self.bags(ids).values()
        x = x.view(x.shape[0], -1, self.dim)
        weights, factors = x[:, :, 0], x[:, :, 1:]
        # sum over pairs i < j of <f_i, f_j>, without the pairs
        total = factors.sum(1)
        machine = 0.5 * (total.square().sum(1) - factors.square().sum((1, 2)))
        deep = factors.flatten(1)
        logits: torch.Tensor = weights.sum(1) + machine
        if self.linear is not None and dense is not None:
            dense = self.scale(dense)
            deep = torch.cat([dense, deep], 1)
            logits = logits + self.linear(dense).squeeze(1)
        logits = logits + self.deep(deep).squeeze(1)
        return logits
