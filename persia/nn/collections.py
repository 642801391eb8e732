"""Embedding modules: ids in, vectors out, with torchrec's names and shapes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from persia import _core, errors
from persia.base.check import kind, whole
from persia.base.torch_private import constant_while_tracing
from persia.data.ids import Ids, device_of, unpack
from persia.nn.outputs import KeyedTensor, Sequences
from persia.nn.tracing import leaf, modules
from persia.nn.views import TableView, views_of
from persia.optim import SparseOptimizer
from persia.store import Store
from persia.store.ahead import LookedUp
from persia.store.configs import (
    EmbeddingBagConfig,
    EmbeddingConfig,
    TableConfig,
    as_configs,
    pooling_of,
)
from persia.store.default import default_store
from persia.store.device import Link, Way, link_of
from persia.store.engine import engine_of
from persia.store.operators import (
    TAKEN,
    in_graphs,
    prefetch,
    pull,
    typed,
    versions,
)
from persia.store.state import check_state, state_of

__all__ = [
    "EmbeddingBagCollection",
    "EmbeddingCollection",
]


class Collection(nn.Module):
    """What pooled and sequence modules share: tables, plans, the lookup."""

    _config_class: type[TableConfig]
    _kind: int
    _frozen = False  # by requires_grad_(False)
    # TorchScript: the forward is Python's, so are these.
    __jit_ignored_attributes__ = (
        "_configs",
        "_plans",
        "_row_plans",
        "outputs",
    )
    __jit_unused_properties__ = (
        "device",
        "embedding_bags",
        "embeddings",
        "trains",
    )
    _link: Link | None = None  # instead of its device's (tests)

    def __init__(
        self,
        tables: Sequence[Any],
        *,
        store: Store | None,
        optimizer: SparseOptimizer | None,
        device: torch.device | str | None,
        output_dtype: torch.dtype,
        padding_value: int | None,
    ) -> None:
        super().__init__()
        if store is not None and optimizer is not None:
            raise errors.InvalidArgument(
                "optimizer= is for a module with a store of its own; a Store "
                "has its optimizer"
            )
        configs = as_configs(tables, self._config_class)
        if not configs:
            raise errors.InvalidArgument(
                "tables is empty; a module looks up at least one table"
            )
        if padding_value is not None:
            padding_value = whole(
                "padding_value", padding_value, -(2**63), 2**63 - 1
            )
        if (
            not isinstance(output_dtype, torch.dtype)
            or not output_dtype.is_floating_point
        ):
            raise errors.InvalidArgument(
                f"output_dtype is {output_dtype!r}, need a floating dtype "
                "such as torch.float32"
            )
        if store is None:
            store, configs = default_store(optimizer, configs)
        self.store = kind("store", store, Store, "a persia.Store")
        self._configs = configs
        here = torch.get_default_device() if device is None else device
        of_ids = device is None and here == torch.device("cpu")
        self._device = None if of_ids else torch.device(here)
        self._output_dtype = output_dtype
        self._padding_value = padding_value
        names = [c.name for c in self._configs]
        if len(set(names)) != len(names):
            twice = sorted({n for n in names if names.count(n) > 1})
            raise errors.InvalidArgument(
                f"tables {twice} occur more than once in one module"
            )
        # (output name, feature, config) in the order of the output.
        features = [f for c in self._configs for f in c.feature_names]
        self.outputs = [
            (f if features.count(f) == 1 else f"{f}@{c.name}", f, c)
            for c in self._configs
            for f in c.feature_names
        ]
        self._names = [name for name, _, _ in self.outputs]
        self._dims = [c.embedding_dim for _, _, c in self.outputs]
        self.features = tuple(dict.fromkeys(f for _, f, _ in self.outputs))
        self._connect()

    def _connect(self) -> None:
        """Declares the tables; plans for keys in the order of the configs."""
        self._trainable = any(c.trainable for c in self._configs)
        self._plans: dict[tuple[str, ...], int] = {}
        self._row_plans: dict[tuple[str, ...], int] = {}
        engine = engine_of(self.store)
        self._numbers = [engine.declare(c).number for c in self._configs]
        self._handle = engine.handle
        self._first_plan = self._make_plan(self._kind, self.features)
        self._plans[self.features] = self._first_plan
        self.traced_as = self._handle, self._first_plan
        modules[self.traced_as] = self

    def _make_plan(
        self,
        kind: int,
        keys: tuple[str, ...],
        outputs: Sequence[tuple[str, str, TableConfig]] | None = None,
    ) -> int:
        """The plan of these outputs, or of all."""
        at = {key: i for i, key in enumerate(keys)}
        numbers = dict(
            zip((c.name for c in self._configs), self._numbers, strict=True)
        )
        features = []
        for _, feature, config in outputs or self._looked_up():
            if feature not in at:
                raise errors.MissingFeature(
                    f"the batch has no feature {feature!r} (table "
                    f"{config.name!r}); it has {list(keys)}"
                )
            features.append(
                (
                    feature,
                    at[feature],
                    numbers[config.name],
                    pooling_of(config),
                    int(config.trainable),
                )
            )
        return engine_of(self.store).plan(kind, len(keys), features)

    def _looked_up(self) -> list[tuple[str, str, TableConfig]]:
        """The outputs of a lookup."""
        return self.outputs

    def _plan_of(self, keys: tuple[str, ...]) -> int:
        """The plan for batches with these keys."""
        plan = self._plans.get(keys)
        if plan is None:
            if torch.compiler.is_compiling():
                plan = _plan_for_graph(self._handle, self._first_plan, keys)
                return int(plan)
            plan = self._plans[keys] = self._make_plan(self._kind, keys)
        return plan

    def _weights_of(self, ids: Ids) -> Tensor | None:
        """The weights that take part in the lookup, float32."""
        return None

    def look_ahead(self, features: Any, number: int) -> LookedUp | None:
        """Adds the lookup of a data loader's batch; None if this batch is
        not for looking ahead. Raises what the forward would raise.
        """
        ids = unpack(features, self._padding_value, self.features)
        weights = self._weights_of(ids)
        if ids[1].is_meta or (weights is not None and weights.requires_grad):
            return None
        version = versions(*ids[5])
        if ids[1].device.type != "cpu":
            ids = self._on_cpu(ids)
            weights = self._weights_of(ids)
        plan = self._plan_of(ids[0])
        way = self._way(device_of(features, ids))
        start = prefetch if way is None else way.prefetch
        try:
            start(ids[1], ids[2], weights, self._handle, plan, number)
        except RuntimeError as error:
            raise typed(error) from None
        return LookedUp(number, ids, weights, version)

    def _may_train(self) -> bool:
        """Whether a lookup is part of a training step; raises if that cannot
        work, and ends what a failed backward left.
        """
        store = self.store
        grad = self.trains and torch.is_grad_enabled()
        if grad and not torch.compiler.is_compiling():
            engine_of(store).drop_unfinished()
        if grad and store.update == "backward" and _fp16_autocast():
            raise errors.InvalidArgument(
                "fp16 autocast needs a GradScaler, but "
                'Store(update="backward") applies gradients '
                'before they are unscaled; make the store with update="step" '
                "(or use bfloat16)"
            )
        return grad

    def _way(self, ids_device: torch.device) -> Way | None:
        """How its values travel; None: the output is on the CPU, or torch
        copies it (compiled code, other devices than CUDA's)."""
        if torch.compiler.is_compiling():
            return None
        link = self._link or link_of(self._device or ids_device)
        return None if link is None else Way.of(link, self._output_dtype)

    def _lookup(
        self, ids: Ids, weights: Tensor | None, way: Way | None = None
    ) -> Tensor:
        """The output of the plan for these keys, float32 on the CPU, or as
        ``way`` says where."""
        plan = self._plan_of(ids[0])
        engine = engine_of(self.store)
        grad = self._may_train()
        batch = ids[4]
        if not torch.compiler.is_compiling():
            batch = self._ticket_of(ids, weights, grad)
        return pull(
            ids[1],
            ids[2],
            weights,
            engine.anchor if grad else engine.still,
            engine.no_batch if batch is None else batch,
            self._handle,
            plan,
            grad,
            way,
        )

    def _ticket_of(
        self, ids: Ids, weights: Tensor | None, grad: bool
    ) -> Tensor | None:
        """The ticket of a batch: its own, or that of equal ids which were
        looked up ahead."""
        ahead, batch = engine_of(self.store).ahead, ids[4]
        if batch is None:
            batch = ahead.find(ids, weights)
            if batch is None and grad:
                ahead.miss()
        elif int(batch[0]) < TAKEN and versions(*ids[5]) != int(batch[1]):
            batch = _looked_up_anew(batch)  # for they changed in between
            if grad:
                ahead.miss()
        return batch

    def _rows_of(self, ids: Ids, place: tuple[int, ...]) -> Tensor:
        """Unpooled rows of some of the outputs, [n, widest dim]."""
        keys = ids[0]
        memo = (*map(str, place), "|", *keys)
        plan = self._row_plans.get(memo)
        if plan is None:
            plan = self._row_plans[memo] = self._make_plan(
                _core.PLAN_ROWS, keys, [self.outputs[i] for i in place]
            )
        engine = engine_of(self.store)
        grad = self._may_train()
        anchor = engine.anchor if grad else engine.still
        batch = engine.no_batch if ids[4] is None else _looked_up_anew(ids[4])
        return pull(
            ids[1],
            ids[2],
            None,
            anchor,
            batch,
            self._handle,
            plan,
            grad,
        )

    def _shape_alone(self, ids: Ids) -> bool:
        """Whether the output has a shape and no values."""
        return bool(ids[1].is_meta) or self.device.type == "meta"

    def _no_values(self, shape: tuple[int, int]) -> Tensor:
        return torch.empty(shape, dtype=self._output_dtype, device="meta")

    def _on_cpu(self, ids: Ids) -> Ids:
        """The batch with its tensors on the CPU."""
        keys, values, offsets, weights, ticket, given = ids
        engine_of(self.store).counts["cuda_ids_copied"] += values.numel()
        return (
            keys,
            values.cpu(),
            None if offsets is None else offsets.cpu(),
            None if weights is None else weights.cpu(),
            ticket,
            given,
        )

    def _placed(self, out: Tensor, ids_device: torch.device) -> Tensor:
        """The output on the module's device, in its dtype."""
        device = self._device or ids_device
        if device.type != "cpu" or self._output_dtype != torch.float32:
            return out.to(device=device, dtype=self._output_dtype)
        return out

    def _apply(self, fn: Any, recurse: bool = True) -> Collection:
        """``.to(device)`` moves the output; the tables stay."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        here = self.device
        meta = here.type == "meta"  # from where torch moves nothing
        there = fn(torch.zeros(0, device="cpu" if meta else here)).device
        if there != here:
            self._device = there
        return self

    @property
    def trains(self) -> bool:
        """Whether a lookup with gradient updates rows."""
        return self._trainable and not self._frozen

    @property
    def device(self) -> torch.device:
        """Where the output goes."""
        return self._device or torch.device("cpu")

    # ---- state: the schema alone, rows are in the store

    def get_extra_state(self) -> Tensor:
        """Which rows belong to the state, uint8 [n]: ``store.save`` saves
        them.
        """
        return state_of(self.store, self._configs)

    def set_extra_state(self, state: Any) -> None:
        """Checks that the rows of a ``state_dict()`` are in the store."""
        check_state(self.store, self._configs, type(self).__name__, state)

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        for name in (
            "_plans",
            "_first_plan",
            "_row_plans",
            "_numbers",
            "_handle",
        ):
            state.pop(name, None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._connect()

    def extra_repr(self) -> str:
        return ", ".join(
            f"{c.name}: {c.embedding_dim} <- {list(c.feature_names)}"
            for c in self._configs
        )


def _freezing(
    plain: Callable[[nn.Module, bool], nn.Module],
) -> Callable[[nn.Module, bool], nn.Module]:
    """torch's ``Module.requires_grad_`` that reaches the tables, too: they
    are no parameters, and torch asks parameters alone."""

    @functools.wraps(plain)
    def requires_grad_(
        self: nn.Module, requires_grad: bool = True
    ) -> nn.Module:
        for module in self.modules():
            if isinstance(module, Collection):
                module._frozen = not requires_grad
        return plain(self, requires_grad)

    return requires_grad_


nn.Module.requires_grad_ = _freezing(  # type: ignore[method-assign,assignment]
    nn.Module.requires_grad_
)


@constant_while_tracing
def _plan_for_graph(handle: int, first: int, keys: tuple[str, ...]) -> int:
    """A plan made while a compiler traces: a constant of its arguments."""
    module = modules[handle, first]
    assert isinstance(module, Collection)
    return module._make_plan(module._kind, keys)


def _fp16_autocast() -> bool:
    for device in ("cuda", "cpu"):
        if (
            torch.is_autocast_enabled(device)
            and torch.get_autocast_dtype(device) == torch.float16
        ):
            return True
    return False


class EmbeddingBagCollection(Collection):
    """Pooled embeddings: one vector a sample and feature.

    Args:
        tables: the tables, :class:`persia.EmbeddingBagConfig` (or torchrec's).
        store: where the rows are; None: a private store, made with
            ``optimizer``; or, where PERSIA_SERVERS or a job of several ranks
            says so, one that such modules share.
        optimizer: of the private store, or of these tables in a shared one.
        device: of the output; default: where the ids are. ``.to()`` changes
            it.
        is_weighted: ids have weights; True makes a batch without weights an
            error. Weights that require grad get a gradient.
        output_dtype: of the output.
        padding_value: in dicts of 2-D tensors, ids of this value are left out.

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
    ) -> None:
        super().__init__(
            tables,
            store=store,
            optimizer=optimizer,
            device=device,
            output_dtype=output_dtype,
            padding_value=padding_value,
        )
        self._is_weighted = is_weighted

    @property
    def embedding_bags(self) -> dict[str, TableView]:
        """The tables by name, each with its ``weight``."""
        return views_of(self, self._configs)

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
        ids = unpack(features, self._padding_value, self.features)
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
            out = self._lookup(ids, weights, self._way(device))
        out = self._placed(out, device)
        inverse = getattr(features, "inverse_indices_or_none", None)
        if inverse is not None and inverse() is not None:
            out = self._expanded(out, *inverse())
        return KeyedTensor(self._names, self._dims, out)

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
            offsets = torch.arange(len(values) + 1, device="cpu")
        lengths = torch.diff(offsets)
        at = {key: i for i, key in enumerate(keys)}
        bags = len(lengths) // len(keys)
        bag = _bags_of(keys, offsets, len(values))
        if weights.device.type != "cpu":
            there = weights.device
            bag, lengths = bag.to(there), lengths.to(there)
            lookups = [rows.to(there) for rows in lookups]
        parts = []
        for place, rows in zip(places, lookups, strict=True):
            chosen = [self.outputs[i] for i in place]
            pooled = rows.new_zeros(len(lengths), rows.shape[1]).index_add(
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


def _looked_up_anew(batch: Tensor) -> Tensor:
    """The ticket of a batch whose lookup does not fit."""
    return torch.stack((batch[0], torch.tensor(-1, device="cpu")))


def _bags_of(keys: tuple[str, ...], offsets: Tensor, n: int) -> Tensor:
    """The bag of each of n ids.

    No offsets lead out of the bags: lookups check those of their features
    alone, and compiled code may come here before them.
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
    return bag.clamp(max=max(len(offsets) - 2, 0))


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
    ) -> None:
        configs = as_configs(tables, EmbeddingConfig)
        if len({c.embedding_dim for c in configs}) > 1:
            raise errors.InvalidArgument(
                "the tables of an EmbeddingCollection have one "
                "embedding_dim, these have "
                f"{[c.embedding_dim for c in configs]}; make one collection "
                "for each"
            )
        super().__init__(
            configs,
            store=store,
            optimizer=optimizer,
            device=device,
            output_dtype=output_dtype,
            padding_value=padding_value,
        )
        self._need_indices = need_indices

    def _connect(self) -> None:
        # A lookup has one vector an id: features of several tables take
        # several.
        self._rounds = _places(self.outputs)
        super()._connect()

    def _looked_up(self) -> list[tuple[str, str, TableConfig]]:
        return [self.outputs[i] for i in self._rounds[0]]

    @property
    def embeddings(self) -> dict[str, TableView]:
        """The tables by name, each with its ``weight``."""
        return views_of(self, self._configs)

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
        ids = unpack(features, self._padding_value, self.features)
        keys, values, offsets = ids[0], ids[1], ids[2]
        if self._shape_alone(ids):
            shape = values.numel(), self.embedding_dim()
            rows = [self._no_values(shape)] * len(self._rounds)
        else:
            rows = self._all_rows(ids, device_of(features, ids))
        at = {key: i for i, key in enumerate(keys)}
        names = {
            self.outputs[i][0]: (at[self.outputs[i][1]], which)
            for which, place in enumerate(self._rounds)
            for i in place
        }
        indices = values if self._need_indices else None
        return Sequences(names, rows, offsets, _samples(ids), indices)

    def _all_rows(self, ids: Ids, device: torch.device) -> list[Tensor]:
        """The vectors of each round of lookups, [n, dim]."""
        if ids[1].device.type != "cpu":
            ids = self._on_cpu(ids)
        first = self._lookup(ids, None, self._way(device))
        others = [self._rows_of(ids, place) for place in self._rounds[1:]]
        return [self._placed(rows, device) for rows in (first, *others)]
