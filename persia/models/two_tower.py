"""Two towers for retrieval (Yi et al., doi 10.1145/3298689.3346996)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from persia import errors
from persia.data.batches.jagged import JaggedBatch
from persia.models.dense import feature_dims, mlp
from persia.nn.collections import EmbeddingBagCollection


class TwoTower(nn.Module):
    """An MLP over the features of a user and one over those of an item, both
    to unit vectors whose dot product says how well they fit.

    Train it with :func:`persia.models.in_batch_softmax`, at a temperature
    such as 0.05; find items with :class:`NearestItems`.

    Args:
        users: pooled embeddings of the user and the context.
        items: pooled embeddings of the item.
        layers: widths of each tower; the last is that of the vectors.
    """

    def __init__(
        self,
        users: EmbeddingBagCollection,
        items: EmbeddingBagCollection,
        layers: Sequence[int] = (64, 32),
    ) -> None:
        super().__init__()
        self.users, self.items = users, items
        self.user_tower = mlp(sum(feature_dims(users)), layers, False)
        self.item_tower = mlp(sum(feature_dims(items)), layers, False)

    def forward(self, ids: JaggedBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """(users, items): unit vectors [B, dim] each."""
        return self.user(ids), self.item(ids)

    def user(self, ids: JaggedBatch) -> torch.Tensor:
        """Unit vectors [B, dim]; the batch needs the users' features alone."""
        x = self.user_tower(self.users(ids).values())
        return nn.functional.normalize(x, dim=1)

    def item(self, ids: JaggedBatch) -> torch.Tensor:
        """Unit vectors [B, dim]; the batch needs the items' features alone."""
        x = self.item_tower(self.items(ids).values())
        return nn.functional.normalize(x, dim=1)


class NearestItems:
    """The items with the largest dot products, exactly.

    Args:
        ids: int64 [n], of the items.
        vectors: [n, dim], such as those of ``TwoTower.item``.
        block: queries that are compared at once: block x n floats of memory.

    Raises:
        ShapeError: not one vector an id.
    """

    def __init__(
        self, ids: torch.Tensor, vectors: torch.Tensor, block: int = 256
    ) -> None:
        if ids.dim() != 1 or vectors.dim() != 2 or len(ids) != len(vectors):
            raise errors.ShapeError(
                f"NearestItems: ids {tuple(ids.shape)} and vectors "
                f"{tuple(vectors.shape)}; need [n] and [n, dim]"
            )
        self.ids, self.vectors = ids.to(vectors.device), vectors.detach()
        self.block = block

    @torch.no_grad()
    def search(
        self, queries: torch.Tensor, k: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(ids [B, k], dot products [B, k]) of queries [B, dim], the best
        first; k at most n."""
        if not 0 < k <= len(self.ids):
            raise errors.InvalidArgument(
                f"NearestItems: k is {k}, need 1 to {len(self.ids)} items"
            )
        found = [
            torch.topk(part.to(self.vectors) @ self.vectors.T, k)
            for part in torch.split(queries, self.block)
        ]
        scores = torch.cat([one.values for one in found])
        return self.ids[torch.cat([one.indices for one in found])], scores
