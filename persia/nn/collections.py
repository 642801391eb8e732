"""Embedding modules: ids in, vectors out, with torchrec's names and shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from persia import _core, errors
from persia.data.batches.ids import Ids, device_of, unpack
from persia.data.batches.jagged import JaggedBatch
from persia.nn.lookups import Collection, TableRows
from persia.nn.on_device import OnDevice, as_rows
from persia.nn.outputs import KeyedTensor, Sequences
from persia.nn.tracing import leaf
from persia.nn.views import TableView, views_of
from persia.optim import SparseOptimizer
from persia.store.configs import (
    EmbeddingBagConfig,
    EmbeddingConfig,
    TableConfig,
    as_configs,
    list_of,
    pooling_of,
)
from persia.store.device import Link, Way
from persia.store.operators import (
    in_graphs,
)
from persia.store.store import Store


class EmbeddingBagCollection(Collection):
    """Pooled embeddings: one vector a sample and feature.

    Args:
        tables: the tables, :class:`persia.EmbeddingBagConfig` (or torchrec's).
        store: where the rows are; None: tables that no other module has, in
            a private store made with ``optimizer``; or, where PERSIA_SERVERS
            or a job of several ranks says so, on these. There a table whose
            name an earlier module has is ``name-2``: all ranks make their
            modules in the same order.
        optimizer: of the private store, or of these tables in a shared one.
        device: of the output; default: torch's default device if that is not
            the CPU, else where the ids are. ``.to()`` changes
            it.
        is_weighted: ids have weights; True makes a batch without weights an
            error. Weights that require grad get a gradient.
        output_dtype: of the output.
        padding_value: in dicts of 2-D tensors, ids of this value are left out.
        share: train rows that another module of the store trains, too: a
            table of the same name. False: that is an error, unless both were
            given the same config object.

    ``forward(ids)`` takes a :class:`persia.JaggedBatch`, a KeyedJaggedTensor,
    an object like it, or a dict of tensors; extra keys are ignored. It returns
    a :class:`~persia.nn.KeyedTensor` [B, sum of embedding_dim]; a
    feature of several tables is named ``feature@table``.
    ``inverse_indices`` of a KeyedJaggedTensor expand it to their number of
    samples.

    Raises (in forward): MissingFeature, DtypeError, ShapeError, OffsetsError.
    """

    _config_class = EmbeddingBagConfig
    _kind = _core.PLAN_BAGS

    def __init__(
        self,
        tables: Sequence[Any],
        *,
        store: Store | None = None,
        optimizer: SparseOptimizer | None = None,
        device: torch.device | str | None = None,
        is_weighted: bool = False,
        output_dtype: torch.dtype = torch.float32,
        padding_value: int | None = None,
        share: bool = False,
    ) -> None:
        super().__init__(
            tables,
            store=store,
            optimizer=optimizer,
            device=device,
            output_dtype=output_dtype,
            padding_value=padding_value,
            share=share,
        )
        self._is_weighted = is_weighted
        self._on_device: OnDevice | None = None

    @property
    def embedding_bags(self) -> dict[str, TableView]:
        """The tables by name, each with its ``weight``."""
        return views_of(self, self.names_given)

    def reset_parameters(self) -> None:
        """Removes all rows of the tables: they have their initial values
        again."""
        self.clear_rows()

    def embedding_bag_configs(self) -> list[TableConfig]:
        """The tables."""
        return self._configs

    def is_weighted(self) -> bool:
        """Whether ids have weights."""
        return self._is_weighted

    @leaf
    @in_graphs
    def forward(self, features: Any) -> KeyedTensor:
        """Looks up and pools a batch."""
        ids = unpack(features, self.padding_value, self.features)
        if self._shape_alone(ids):
            shape = _samples(ids), sum(self._dims)
            return KeyedTensor(self._names, self._dims, self._no_values(shape))
        device = device_of(features, ids)
        if ids[1].device.type != "cpu":
            ids = self._on_cpu(ids)
        weights = self._weights_of(ids)
        if weights is not None and (
            weights.device.type != "cpu"
            or (weights.requires_grad and torch.is_grad_enabled())
        ):
            out = self._pool_in_torch(ids, weights)
        else:
            out = self._pooled(ids, weights, self._way(device))
        self.note(ids, out)
        out = self._placed(out, device)
        inverse = getattr(features, "inverse_indices_or_none", None)
        if inverse is not None and inverse() is not None:
            out = self._expanded(out, *inverse())
        return KeyedTensor(self._names, self._dims, out)

    def _pooled(
        self, ids: Ids, weights: Tensor | None, way: Way | None
    ) -> Tensor:
        """Pooled values; where they go to a device, and fewer bytes travel
        so, from distinct rows there."""
        out = None
        if way is not None:
            grad = self._may_train()
            out = self._device_pool(way.link).look_up(
                ids,
                weights,
                way,
                self._ticket_of(ids, weights, grad),
                self._plan_of(ids[0]),
            )
        return self._lookup(ids, weights, way) if out is None else out

    def _start(
        self, ids: Ids, weights: Tensor | None, way: Way | None, number: int
    ) -> None:
        plan = self._plan_of(ids[0])
        if way is None or not self._device_pool(way.link).look_ahead(
            ids, weights, way, number, plan
        ):
            super()._start(ids, weights, way, number)

    def _device_pool(self, link: Link) -> OnDevice:
        if self._on_device is None or self._on_device.link is not link:
            rows = TableRows([as_rows(c) for c in self._configs], self, link)
            self._on_device = OnDevice(self, rows, link)
        return self._on_device

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_on_device": None}

    def _expanded(
        self, out: Tensor, keys: Sequence[str], index: Tensor
    ) -> Tensor:
        """Samples that a KeyedJaggedTensor holds once, as often as its
        ``inverse_indices`` have them, int64 [features, samples]."""
        at = {key: i for i, key in enumerate(keys)}
        index = index.to(out.device)
        parts = []
        for part, (_, feature, _) in zip(
            torch.split(out, self._dims, 1), self.outputs, strict=True
        ):
            if feature not in at:
                raise errors.MissingFeature(
                    f"inverse_indices of the batch have no feature "
                    f"{feature!r}; they have {list(keys)}"
                )
            parts.append(part.index_select(0, index[at[feature]]))
        return torch.cat(parts, 1)

    def _weights_of(self, ids: Ids) -> Tensor | None:
        if not self._is_weighted:
            return None
        if ids[3] is None:
            raise errors.InvalidArgument(
                "the module is weighted (is_weighted=True) but the batch has "
                "no weights"
            )
        return ids[3].to(torch.float32).contiguous()

    def _pool_in_torch(self, ids: Ids, weights: Tensor) -> Tensor:
        """Pools rows with torch, so that the weights get a gradient."""
        keys, values, offsets = ids[0], ids[1], ids[2]
        if weights.shape != values.shape:  # torch would broadcast them
            raise errors.ShapeError(
                f"weights have shape {tuple(weights.shape)}, but there are "
                f"{len(values)} ids; need one weight an id"
            )
        # One plan names a key once; features of several tables take several
        # rounds. The lookups come first: they check the offsets.
        places = _places(self.outputs)
        lookups = [self._rows_of(ids, place) for place in places]
        if offsets is None:
            offsets = torch.arange(values.shape[0] + 1, device="cpu")
        lengths = torch.diff(offsets)
        at = {key: i for i, key in enumerate(keys)}
        bags = lengths.shape[0] // len(keys)
        bag = _bags_of(keys, offsets, values.shape[0])
        if weights.device.type != "cpu":
            there = weights.device
            bag, lengths = bag.to(there), lengths.to(there)
            lookups = [rows.to(there) for rows in lookups]
        parts = []
        for place, rows in zip(places, lookups, strict=True):
            chosen = [self.outputs[i] for i in place]
            pooled = rows.new_zeros(lengths.shape[0], rows.shape[1]).index_add(
                0, bag, rows * weights.to(torch.float32)[:, None]
            )
            for i, (_, feature, config) in zip(place, chosen, strict=True):
                first = at[feature] * bags
                part = pooled[first : first + bags, : config.embedding_dim]
                count = (
                    lengths[first : first + bags]
                    .clamp(min=1)
                    .to(torch.float32)[:, None]
                )
                kind = pooling_of(config)
                if kind == _core.POOL_MEAN:
                    part = part / count
                elif kind == _core.POOL_SQRTN:
                    part = part / count.sqrt()
                parts.append((i, part))
        return torch.cat(
            [part for _, part in sorted(parts, key=lambda p: p[0])], 1
        )


def _bags_of(keys: tuple[str, ...], offsets: Tensor, n: int) -> Tensor:
    """The bag of each of n ids.

    No offsets lead out of the bags: lookups check those of their features
    alone, and compiled code may run before them.
    """
    if not torch.compiler.is_compiling():
        falls = offsets[1:] < offsets[:-1]
        if falls.any():
            first = int(falls.nonzero()[0])
            key = keys[first // (len(falls) // len(keys))]
            raise errors.OffsetsError(
                f"feature {key}: offsets fall from {int(offsets[first])} to "
                f"{int(offsets[first + 1])}; they must never fall"
            )
    bag = torch.searchsorted(
        offsets[1:], torch.arange(n, device="cpu"), right=True
    )
    return bag.clamp(max=max(offsets.shape[0] - 2, 0))


def _places(
    outputs: list[tuple[str, str, TableConfig]],
) -> list[tuple[int, ...]]:
    """The outputs in rounds in which no feature occurs twice."""
    rounds: list[dict[str, int]] = []
    for i, (_, feature, _) in enumerate(outputs):
        for one in rounds:
            if feature not in one:
                one[feature] = i
                break
        else:
            rounds.append({feature: i})
    return [tuple(one.values()) for one in rounds]


def _samples(ids: Ids) -> int:
    """Samples of a batch."""
    keys, values, offsets = ids[:3]
    bags = values.numel() if offsets is None else offsets.numel() - 1
    return bags // len(keys)


class EmbeddingCollection(Collection):
    """Sequence embeddings: one vector an id, not pooled.

    Its arguments are those of :class:`EmbeddingBagCollection`; all tables
    have the same ``embedding_dim``. With ``need_indices`` the outputs have
    the ids as weights.

    ``forward(ids)`` returns :class:`~persia.nn.Sequences`, a mapping from
    feature to :class:`~persia.nn.JaggedTensor`; a feature of several tables
    is named ``feature@table``.
    """

    _config_class = EmbeddingConfig
    _kind = _core.PLAN_ROWS

    def __init__(
        self,
        tables: Sequence[Any],
        *,
        store: Store | None = None,
        optimizer: SparseOptimizer | None = None,
        device: torch.device | str | None = None,
        output_dtype: torch.dtype = torch.float32,
        padding_value: int | None = None,
        need_indices: bool = False,
        share: bool = False,
    ) -> None:
        tables = list_of(tables, EmbeddingConfig)
        configs = as_configs(tables, EmbeddingConfig)
        if len({c.embedding_dim for c in configs}) > 1:
            raise errors.InvalidArgument(
                "the tables of an EmbeddingCollection have one "
                "embedding_dim, these have "
                f"{[c.embedding_dim for c in configs]}; make one collection "
                "for each"
            )
        super().__init__(
            tables,
            store=store,
            optimizer=optimizer,
            device=device,
            output_dtype=output_dtype,
            padding_value=padding_value,
            share=share,
        )
        self.need_indices = need_indices

    def _connect(self) -> None:
        # A lookup has one vector an id: features of several tables take
        # several.
        self.rounds = _places(self.outputs)
        super()._connect()

    def _looked_up(self) -> list[tuple[str, str, TableConfig]]:
        return [self.outputs[i] for i in self.rounds[0]]

    @property
    def embeddings(self) -> dict[str, TableView]:
        """The tables by name, each with its ``weight``."""
        return views_of(self, self.names_given)

    def reset_parameters(self) -> None:
        """Removes all rows of the tables: they have their initial values
        again."""
        self.clear_rows()

    def embedding_configs(self) -> list[TableConfig]:
        """The tables."""
        return self._configs

    def embedding_dim(self) -> int:
        """Elements of a vector."""
        return self._configs[0].embedding_dim

    @leaf
    @in_graphs
    def forward(self, features: Any) -> Sequences:
        """Looks up a batch."""
        ids = unpack(features, self.padding_value, self.features)
        keys, values, offsets = ids[0], ids[1], ids[2]
        if self._shape_alone(ids):
            shape = values.numel(), self.embedding_dim()
            rows = [self._no_values(shape)] * len(self.rounds)
        else:
            rows = self._all_rows(ids, device_of(features, ids))
            self.note(ids, rows[0])
        at = {key: i for i, key in enumerate(keys)}
        names = {
            self.outputs[i][0]: (at[self.outputs[i][1]], which)
            for which, place in enumerate(self.rounds)
            for i in place
        }
        indices = values if self.need_indices else None
        sizes = features.sizes if isinstance(features, JaggedBatch) else None
        return Sequences(names, rows, offsets, len(keys), indices, sizes)

    @in_graphs
    def vectors(self, ids: Tensor) -> Tensor:
        """float32 [n, dim] of ids [n], int64, of the one feature of a module
        with one table: what the forward gives, without a batch around it."""
        batch = self.features, ids.contiguous(), None, None, None, (ids,)
        if self._shape_alone(batch):
            return self._no_values((ids.shape[0], self._dims[0]))
        (rows,) = self._all_rows(batch, ids.device)
        self.note(batch, rows)
        return rows

    def _all_rows(self, ids: Ids, device: torch.device) -> list[Tensor]:
        """The vectors of each round of lookups, [n, dim]."""
        if ids[1].device.type != "cpu":
            ids = self._on_cpu(ids)
        first = self._lookup(ids, None, self._way(device))
        others = [self._rows_of(ids, place) for place in self.rounds[1:]]
        return [self._placed(rows, device) for rows in (first, *others)]
