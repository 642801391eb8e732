"""The same models on torch's own embeddings, with the same weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import persia
from persia import JaggedBatch
from persia.nn.outputs import JaggedTensor, KeyedTensor

RATES = {"lr": 0.05, "eps": 1e-8}  # of Adagrad, for both


class Torch(nn.Module):
    """Tables of nn.Embedding for the ids of some batches.

    Args:
        module: a collection of ours whose rows are not trained yet.
        batches: all that will be looked up.
    """

    def __init__(self, module: Any, batches: Iterable[JaggedBatch]) -> None:
        super().__init__()
        self.configs = module._configs
        self.tables = nn.ModuleDict()
        batches = list(batches)
        for i, config in enumerate(self.configs):
            ids = torch.cat(
                [b[f][0] for b in batches for f in config.feature_names]
            )
            ids = torch.unique(ids)
            rows = torch.as_tensor(module.store.rows(config.name, ids))
            self.register_buffer(f"ids{i}", ids)
            self.tables[config.name] = nn.Embedding.from_pretrained(
                rows.clone(), freeze=False
            )

    def find(self, ids: JaggedBatch) -> Iterable[tuple[Any, str, Any, Tensor]]:
        """(config, feature, lengths, rows) of each feature."""
        for i, config in enumerate(self.configs):
            known = getattr(self, f"ids{i}")
            for feature in config.feature_names:
                values, lengths = ids[feature]
                at = torch.searchsorted(known, values)
                assert torch.equal(known[at], values)
                yield config, feature, lengths, self.tables[config.name](at)


class TorchBags(Torch):
    def embedding_bag_configs(self) -> Sequence[Any]:
        return self.configs

    def forward(self, ids: JaggedBatch) -> KeyedTensor:
        names, parts = [], []
        for config, feature, lengths, rows in self.find(ids):
            bag = torch.arange(len(lengths)).repeat_interleave(lengths)
            out = rows.new_zeros(len(lengths), config.embedding_dim)
            out = out.index_add(0, bag, rows)
            if config.pooling == "mean":
                out = out / lengths.clamp(min=1)[:, None]
            names.append(feature)
            parts.append(out)
        dims = [part.shape[1] for part in parts]
        return KeyedTensor(names, dims, torch.cat(parts, 1))


class TorchItems(Torch):
    def embedding_dim(self) -> int:
        return self.configs[0].embedding_dim

    def forward(self, ids: JaggedBatch) -> dict[str, JaggedTensor]:
        out = {}
        for _, feature, lengths, rows in self.find(ids):
            ends = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
            out[feature] = JaggedTensor(rows, ends)
        return out


def store() -> persia.Store:
    return persia.Store(optimizer=persia.optim.Adagrad(**RATES), seed=7)


def train(
    model: nn.Module,
    batches: Sequence[Any],
    loss_of: Callable[[nn.Module, Any], Tensor],
    epochs: int = 1,
) -> np.ndarray:
    """Trains any of the two kinds; the losses of all steps."""
    tables = [
        p
        for module in model.modules()
        if isinstance(module, Torch)
        for p in module.parameters()
    ]
    sparse = torch.optim.Adagrad(tables, **RATES) if tables else None
    mine = {id(p) for p in tables}
    dense = torch.optim.Adam(
        [p for p in model.parameters() if id(p) not in mine], lr=2e-3
    )
    torch.manual_seed(3)  # of the dropout
    losses = []
    model.train()
    for _ in range(epochs):
        loader = batches if tables else persia.DataLoader(batches, model, 0)
        for batch in loader:
            dense.zero_grad()
            if sparse is not None:
                sparse.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            dense.step()
            if sparse is not None:
                sparse.step()
            losses.append(loss.item())
    model.eval()
    return np.array(losses)
