"""HSTU (Zhai et al., arXiv 2402.17152) over histories of items."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from persia.data.batches.jagged import JaggedBatch
from persia.models.hstu_block import HSTUBlock
from persia.nn.collections import EmbeddingCollection


class HSTU(nn.Module):
    """Blocks over the items of a history; any ids, any length. Train it with
    :func:`persia.models.next_item_loss`; give ranks alike shares by
    :func:`persia.models.balance_by_tokens`.

    Args:
        items: sequence embeddings with the feature ``history``.
        blocks: how many :class:`HSTUBlock`, with the arguments ``options``.
        history: the feature that is read.
    """

    def __init__(
        self,
        items: EmbeddingCollection,
        blocks: int = 2,
        history: str = "history",
        **options: Any,
    ) -> None:
        super().__init__()
        self.items, self.history = items, history
        dim = items.embedding_dim()
        self.blocks = nn.ModuleList(
            HSTUBlock(dim, **options) for _ in range(blocks)
        )

    def forward(
        self, ids: JaggedBatch, times: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(states, items): [n, dim] each, one row an id of the histories;
        times: seconds [n] of the ids, or None."""
        history = self.items(ids)[self.history]
        items = x = history.values()
        for block in self.blocks:
            x = block(x, history.lengths(), times)
        return x, items
