"""Models of several tasks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from persia.data.batches.jagged import JaggedBatch
from persia.models.dense import Standardize, feature_dims, mlp
from persia.nn.collections import EmbeddingBagCollection


class MMoE(nn.Module):
    """Each task mixes the outputs of the same experts by a gate of its own,
    and has a tower on top (Ma et al., KDD 2018, doi 10.1145/3219819.3220007).

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

        Train them with labels [B, tasks]; :class:`persia.train.Trainer` does
        so by the sum of the tasks' cross entropies.
        """
        x = _inputs(self.bags, self.scale, dense, ids)
        experts = torch.stack([expert(x) for expert in self.experts], 1)
        logits = []
        for gate, tower in zip(self.gates, self.towers, strict=True):
            share = torch.softmax(gate(x), 1)
            logits.append(tower((share[:, :, None] * experts).sum(1)))
        return torch.cat(logits, 1)


class SharedBottom(nn.Module):
    """All tasks have one MLP, and each a tower on top of it (Caruana, 1997,
    doi 10.1023/A:1007379606734).

    Args:
        bags: the embeddings, of any dims.
        dense_features: dense columns of a batch, 0 for none.
        tasks: how many logits a sample has.
        bottom: widths of the MLP that the tasks share.
        tower: hidden widths of the MLP of a task; 1 is added as its last.
        standardize: bring dense features to mean 0 and variance 1 first.
    """

    def __init__(
        self,
        bags: EmbeddingBagCollection,
        dense_features: int,
        tasks: int = 2,
        bottom: Sequence[int] = (256, 128),
        tower: Sequence[int] = (32,),
        standardize: bool = True,
    ) -> None:
        super().__init__()
        self.bags = bags
        self.scale = Standardize(dense_features) if standardize else None
        self.bottom = mlp(dense_features + sum(feature_dims(bags)), bottom)
        self.towers = nn.ModuleList(
            mlp(bottom[-1], [*tower, 1], last_relu=False) for _ in range(tasks)
        )

    def forward(
        self, dense: torch.Tensor | None, ids: JaggedBatch
    ) -> torch.Tensor:
        """Logits [B, tasks] of dense [B, dense_features] and B samples' ids;
        see :meth:`MMoE.forward`."""
        x = self.bottom(_inputs(self.bags, self.scale, dense, ids))
        return torch.cat([tower(x) for tower in self.towers], 1)


def _inputs(
    bags: EmbeddingBagCollection,
    scale: Standardize | None,
    dense: torch.Tensor | None,
    ids: JaggedBatch,
) -> torch.Tensor:
    """Dense features, if there are any, and embeddings of a sample."""
    x: torch.Tensor = bags(ids).values()
    if dense is None:
        return x
    return torch.cat([scale(dense) if scale else dense, x], 1)
