"""DCN-v2 (Wang et al., arXiv 2008.13535): crosses of any order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from persia.data.batches.jagged import JaggedBatch
from persia.models.dense import Standardize, feature_dims, mlp
from persia.nn.collections import EmbeddingBagCollection


class CrossNet(nn.Module):
    """x_(l+1) = x_0 * (W_l x_l + b_l) + x_l, by elements: layer l holds all
    products of up to l + 1 inputs.

    Args:
        width: of the input and the output.
        layers: how many.
        rank: of the matrices W_l = U_l V_l; None: they are full.
    """

    def __init__(self, width: int, layers: int, rank: int | None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(width, width)
            if rank is None
            else nn.Sequential(
                nn.Linear(width, rank, bias=False), nn.Linear(rank, width)
            )
            for _ in range(layers)
        )

    def forward(self, first: torch.Tensor) -> torch.Tensor:
        """[B, width] in, [B, width] out."""
        x = first
        for layer in self.layers:
            x = first * layer(x) + x
        return x


class DCNv2(nn.Module):
    """A cross network and an MLP over the dense features and the embeddings.

    Args:
        bags: the embeddings, of any dims.
        dense_features: dense columns of a batch, 0 for none.
        crosses: layers of the cross network.
        rank: of its matrices; None: they are full.
        deep: widths of the MLP.
        stacked: the MLP reads the output of the cross network; False: both
            read the input, side by side.
        standardize: bring dense features to mean 0 and variance 1 first.
    """

    def __init__(
        self,
        bags: EmbeddingBagCollection,
        dense_features: int,
        crosses: int = 2,
        rank: int | None = None,
        deep: Sequence[int] = (256, 64),
        stacked: bool = False,
        standardize: bool = True,
    ) -> None:
        super().__init__()
        self.bags = bags
        self.scale = Standardize(dense_features) if standardize else None
        width = dense_features + sum(feature_dims(bags))
        self.cross = CrossNet(width, crosses, rank)
        self.deep = mlp(width, deep)
        self.stacked = stacked
        last = deep[-1] if deep else width
        self.top = nn.Linear(last if stacked else width + last, 1)

    def forward(
        self, dense: torch.Tensor | None, ids: JaggedBatch
    ) -> torch.Tensor:
        """Logits [B] of dense [B, dense_features] and of B samples' ids."""
        x = self.bags(ids).values()
        if dense is not None:
            x = torch.cat([self.scale(dense) if self.scale else dense, x], 1)
        crossed = self.cross(x)
        if self.stacked:
            x = self.deep(crossed)
        else:
            x = torch.cat([crossed, self.deep(x)], 1)
        logits: torch.Tensor = self.top(x).squeeze(1)
        return logits
