"""Collections whose weights are torch's own: what
:func:`persia.export_torch` makes of ours."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from persia import _core, errors
from persia.data.batches.ids import unpack
from persia.nn.collections import EmbeddingBagCollection, EmbeddingCollection
from persia.nn.lookups import Collection
from persia.nn.outputs import KeyedTensor, Sequences
from persia.store.configs import pooling_of


class _Exported(nn.Module):
    """Tables by name, in the attribute where torchrec's module has them; a
    dot of a name is a slash there.

    Args:
        collection: whose outputs these are.
        weights: float [num_embeddings, dim] by table.
    """

    _attribute: str

    def __init__(
        self, collection: Collection, weights: Mapping[str, Tensor]
    ) -> None:
        super().__init__()
        tables = nn.ModuleDict()
        parts = {}  # by table, its name there
        for name, c in zip(
            collection.names_given, collection.tables, strict=True
        ):
            parts[c.name] = name.replace(".", "/")
            weight = weights[c.name]
            rows, dim = weight.shape
            tables[parts[c.name]] = nn.Embedding(rows, dim, _weight=weight)
        self.add_module(self._attribute, tables)
        #: (output, feature, table, pooling) in the order of the output.
        self.outputs = [
            (output, feature, parts[c.name], pooling_of(c))
            for output, feature, c in collection.outputs
        ]
        self._dims = [c.embedding_dim for _, _, c in collection.outputs]
        self._features = collection.features
        self._padding = collection.padding_value

    def _places(self, keys: tuple[str, ...]) -> dict[str, int]:
        at = {key: i for i, key in enumerate(keys)}
        for feature in self._features:
            if feature not in at:
                raise errors.MissingFeature(
                    f"the batch has no feature {feature!r}; it has "
                    f"{list(keys)}"
                )
        return at

    @staticmethod
    def _bounds(
        keys: tuple[str, ...], n: int, offsets: Tensor | None
    ) -> list[tuple[int, int]]:
        """From where to where the ids of each key are, of all n."""
        count = len(keys)
        if offsets is None or count == 1:
            return [
                (f * (n // count), (f + 1) * (n // count))
                for f in range(count)
            ]
        bags = (offsets.shape[0] - 1) // count
        ends: list[Any] = [
            0,
            *(offsets[f * bags].item() for f in range(1, count)),
            n,
        ]
        return list(itertools.pairwise(ends))

    def _vectors(self, table: str, ids: Tensor) -> Tensor:
        weight: Tensor = getattr(self, self._attribute)[table].weight
        return nn.functional.embedding(ids.to(weight.device), weight)


class ExportedBags(_Exported):
    """An :class:`EmbeddingBagCollection` of torch's own parameters,
    ``embedding_bags.<table>.weight``. Its forward is that of the collection.
    """

    _attribute = "embedding_bags"

    def __init__(
        self,
        collection: EmbeddingBagCollection,
        weights: Mapping[str, Tensor],
    ) -> None:
        super().__init__(collection, weights)
        self._is_weighted = collection.is_weighted()

    def forward(self, features: Any) -> KeyedTensor:
        """Looks up and pools a batch."""
        keys, values, offsets, weights, *_ = unpack(
            features, self._padding, self._features
        )
        if not self._is_weighted:
            weights = None
        elif weights is None:
            raise errors.InvalidArgument(
                "the module is weighted (is_weighted=True) but the batch has "
                "no weights"
            )
        at = self._places(keys)
        bounds = self._bounds(keys, values.shape[0], offsets)
        if offsets is None:
            offsets = torch.arange(values.shape[0] + 1, device=values.device)
        bags = (offsets.shape[0] - 1) // len(keys)
        pooled = []
        for _, feature, table, pooling in self.outputs:
            first = at[feature] * bags
            start, stop = bounds[at[feature]]
            rows = self._vectors(table, values[start:stop])
            lengths = offsets[first : first + bags + 1].diff().to(rows.device)
            if weights is not None:
                rows = rows * weights[start:stop].to(rows)[:, None]
            bag = torch.repeat_interleave(lengths, output_size=rows.shape[0])
            out = rows.new_zeros(bags, rows.shape[1]).index_add(0, bag, rows)
            count = lengths.clamp(min=1).to(out.dtype)[:, None]
            if pooling == _core.POOL_MEAN:
                out = out / count
            elif pooling == _core.POOL_SQRTN:
                out = out / count.sqrt()
            pooled.append(out)
        names = [output for output, *_ in self.outputs]
        return KeyedTensor(names, self._dims, torch.cat(pooled, 1))


class ExportedRows(_Exported):
    """An :class:`EmbeddingCollection` of torch's own parameters,
    ``embeddings.<table>.weight``. Its forward is that of the collection.
    """

    _attribute = "embeddings"

    def __init__(
        self, collection: EmbeddingCollection, weights: Mapping[str, Tensor]
    ) -> None:
        super().__init__(collection, weights)
        self.need_indices = collection.need_indices
        self._rounds = [
            {self.outputs[i][1]: self.outputs[i] for i in places}
            for places in collection.rounds
        ]

    def forward(self, features: Any) -> Sequences:
        """Looks up a batch."""
        keys, values, offsets, *_ = unpack(
            features, self._padding, self._features
        )
        at = self._places(keys)
        bounds = self._bounds(keys, values.shape[0], offsets)
        names, lookups = {}, []
        for which, chosen in enumerate(self._rounds):
            parts = []
            for key, (start, stop) in zip(keys, bounds, strict=True):
                # Of a feature without a table, some vectors in their place.
                output, _, table, _ = chosen.get(key, self.outputs[0])
                ids = values[start:stop]
                if key in chosen:
                    names[output] = at[key], which
                    parts.append(self._vectors(table, ids))
                else:
                    parts.append(self._vectors(table, ids * 0) * 0)
            lookups.append(torch.cat(parts))
        indices = values if self.need_indices else None
        return Sequences(names, lookups, offsets, len(keys), indices)


def as_parameters(
    collection: Collection, weights: Mapping[str, Tensor]
) -> nn.Module:
    """A collection of these weights.

    Args:
        collection: an EmbeddingBagCollection or an EmbeddingCollection.
        weights: float [num_embeddings, dim] by the names of its tables.
    """
    if isinstance(collection, EmbeddingBagCollection):
        return ExportedBags(collection, weights)
    assert isinstance(collection, EmbeddingCollection)
    return ExportedRows(collection, weights)
