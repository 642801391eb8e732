"""DLRM (Naumov et al., arXiv 1906.00091): products of all pairs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from persia.data.batches.jagged import JaggedBatch
from persia.models.dense import Standardize, mlp, one_dim
from persia.nn.collections import EmbeddingBagCollection


class DLRM(nn.Module):
    """A bottom MLP turns the dense features into one more embedding, the dot
    products of all pairs of embeddings follow, and a top MLP gives the logit.

    Args:
        bags: the embeddings; all of one dim.
        dense_features: dense columns of a batch, 0 for none.
        bottom: hidden widths of the bottom MLP; dim is added as its last.
        top: hidden widths of the top MLP; 1 is added as its last.
        standardize: bring dense features to mean 0 and variance 1 first.
    """

    pairs: torch.Tensor

    def __init__(
        self,
        bags: EmbeddingBagCollection,
        dense_features: int,
        bottom: Sequence[int] = (64,),
        top: Sequence[int] = (256, 64),
        standardize: bool = True,
    ) -> None:
        super().__init__()
        vectors, self.dim = one_dim("DLRM", bags)
        self.bags = bags
        self.bottom: nn.Sequential | None = None
        if dense_features:
            self.bottom = mlp(dense_features, [*bottom, self.dim])
            if standardize:
                self.bottom.insert(0, Standardize(dense_features))
            vectors += 1
        one, other = torch.tril_indices(vectors, vectors, -1)
        self.register_buffer("pairs", one * vectors + other, persistent=False)
        width = self.dim + len(one)
        self.top = mlp(width, [*top, 1], last_relu=False)

    def forward(
        self, dense: torch.Tensor | None, ids: JaggedBatch
    ) -> torch.Tensor:
        """Logits [B] of dense [B, dense_features] and of B samples' ids."""
        x = self.bags(ids).values()
        if self.bottom is not None:
            x = torch.cat([self.bottom(dense), x], 1)
        vectors = x.view(x.shape[0], -1, self.dim)
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
        # gather: its backward is faster than that of indexing.
        pairs = products.gather(1, self.pairs.expand(x.shape[0], -1))
        # Without dense features the first embedding stands in for theirs.
        logits: torch.Tensor = self.top(torch.cat([vectors[:, 0], pairs], 1))
        return logits.squeeze(1)
