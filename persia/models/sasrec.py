"""SASRec (Kang and McAuley, arXiv 1808.09781): causal self-attention."""

from __future__ import annotations

import torch
from torch import nn

from persia import errors
from persia.data.batches.jagged import JaggedBatch
from persia.models.sequences import pad
from persia.nn.collections import EmbeddingCollection


class SASRec(nn.Module):
    """Each place of a history attends to itself and the places before it; its
    state is compared with the embeddings of items by dot products.

    Train it with :func:`persia.models.next_item_loss`, a softmax over the
    items of the batch: it does better than the paper's binary cross entropy
    with one negative (Klenitskiy and Vasilev, arXiv 2309.07602).

    Args:
        items: sequence embeddings with the feature ``history``.
        max_length: the longest history.
        blocks: layers of attention and MLP.
        heads: of the attention; a divisor of the embeddings' dim.
        dropout: of embeddings and layers.
        history: the feature that is read.
    """

    def __init__(
        self,
        items: EmbeddingCollection,
        max_length: int,
        blocks: int = 2,
        heads: int = 1,
        dropout: float = 0.2,
        history: str = "history",
    ) -> None:
        super().__init__()
        self.items, self.history = items, history
        dim = items.embedding_dim()
        self.places = nn.Embedding(max_length, dim)
        nn.init.normal_(self.places.weight, std=0.02)
        self.dropout = nn.Dropout(dropout)
        layer = nn.TransformerEncoderLayer(
            dim, heads, dim, dropout, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(
            layer, blocks, nn.LayerNorm(dim), enable_nested_tensor=False
        )

    def forward(self, ids: JaggedBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """(states, items): [n, dim] each, one row an id of the histories.

        Raises:
            ShapeError: a history of more than ``max_length`` ids.
        """
        history = self.items(ids)[self.history]
        items = history.values()
        x, present = pad(items, history.lengths())
        length = x.shape[1]
        if length > self.places.num_embeddings:
            raise errors.ShapeError(
                f"SASRec: a history of {length} ids, max_length is "
                f"{self.places.num_embeddings}; keep the last ones"
            )
        if length == 0:
            return items, items
        x = x * x.shape[2] ** 0.5 + self.places.weight[:length]
        later = nn.Transformer.generate_square_subsequent_mask(
            length, device=x.device
        )
        # The padding is behind a history, so that no id attends to it.
        x = self.blocks(self.dropout(x), mask=later, is_causal=True)
        return x[present], items
