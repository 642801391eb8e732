"""MMoE (Ma et al., KDD 2018, doi 10.1145/3219819.3220007): several tasks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from persia.data.jagged import JaggedBatch
from persia.models.dense import Standardize, feature_dims, mlp
from persia.nn.collections import EmbeddingBagCollection

__all__ = ["MMoE"]


class MMoE(nn.Module):
    """Each task mixes the outputs of the same experts by a gate of its own,
    and has a tower on top.

    Args:
        bags: the embeddings, of any dims.
        dense_features: dense columns of a batch, 0 for none.
        tasks: how many logits a sample has.
        experts: how many MLPs the tasks share.
        expert: widths of an expert.
        tower: hidden widths of the MLP of a task; 1 is added as its last.
        standardize: bring dense features to mean 0 and variance 1 first.
    """

    def __init__(
        self,
        bags: EmbeddingBagCollection,
        dense_features: int,
        tasks: int = 2,
        experts: int = 4,
        expert: Sequence[int] = (128, 64),
        tower: Sequence[int] = (32,),
        standardize: bool = True,
    ) -> None:
        super().__init__()
        self.bags = bags
        self.scale = Standardize(dense_features) if standardize else None
        width = dense_features + sum(feature_dims(bags))
        self.experts = nn.ModuleList(
            mlp(width, expert) for _ in range(experts)
        )
        self.gates = nn.ModuleList(
            nn.Linear(width, experts) for _ in range(tasks)
        )
        self.towers = nn.ModuleList(
            mlp(expert[-1], [*tower, 1], last_relu=False) for _ in range(tasks)
        )

    def forward(
        self, dense: torch.Tensor | None, ids: JaggedBatch
    ) -> torch.Tensor:
        """Logits [B, tasks] of dense [B, dense_features] and B samples' ids.

        Train them with labels [B, tasks], for example by the sum of the
        tasks' cross entropies.
        """
        x = self.bags(ids).values()
        if dense is not None:
            x = torch.cat([self.scale(dense) if self.scale else dense, x], 1)
        experts = torch.stack([expert(x) for expert in self.experts], 1)
        logits = []
        for gate, tower in zip(self.gates, self.towers, strict=True):
            share = torch.softmax(gate(x), 1)
            logits.append(tower((share[:, :, None] * experts).sum(1)))
        return torch.cat(logits, 1)
