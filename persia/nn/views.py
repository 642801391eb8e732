"""The tables of a collection, as torchrec shows them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from persia.nn.weights import Weight

if TYPE_CHECKING:
    from persia.nn.lookups import Collection
    from persia.store.configs import TableConfig


class TableView:
    """A table of a collection: ``collection.embedding_bags["name"]``.

    Attributes:
        num_embeddings: rows of ``weight``.
        embedding_dim: elements of a row.
    """

    def __init__(self, collection: Collection, config: TableConfig) -> None:
        self._collection = collection
        self._config = config
        self.num_embeddings = config.num_embeddings
        self.embedding_dim = config.embedding_dim

    @property
    def weight(self) -> Tensor:
        """Rows 0 to ``num_embeddings - 1`` as they are now, float32
        [num_embeddings, embedding_dim]; a copy, without gradient. What writes
        into it raises InvalidArgument."""
        device = self._collection.device
        if device.type == "meta":
            shape = self.num_embeddings, self.embedding_dim
            return torch.empty(shape, device=device)
        ids = torch.arange(self.num_embeddings, device="cpu")
        name = self._config.name
        rows = self._collection.store.rows(name, ids).to(device)
        return Weight.of(rows, self._collection, name)


def views_of(
    collection: Collection, names: Sequence[str]
) -> dict[str, TableView]:
    """One a table, by the name that the module was given."""
    return {
        name: TableView(collection, config)
        for name, config in zip(names, collection.tables, strict=True)
    }
