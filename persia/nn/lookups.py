"""What modules that look up tables share: plans, tickets, devices."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from persia import _core, errors
from persia.base.check import kind, whole
from persia.base.torch_private import constant_while_tracing, jit_traces
from persia.data.batches.ids import Ids, device_of, unpack
from persia.data.batches.jagged import JaggedBatch
from persia.nn.anchor import Anchor
from persia.nn.arithmetic import carry_out, check_in_place, named
from persia.nn.standins import stand_in
from persia.nn.tracing import modules, numbers
from persia.nn.warnings import warn_of_unsaved, warn_once_of_kept
from persia.optim import SparseOptimizer
from persia.store.ahead import LookedUp
from persia.store.configs import (
    EmbeddingConfig,
    TableConfig,
    as_configs,
    list_of,
    pooling_of,
)
from persia.store.default import default_store
from persia.store.device import Link, Way, link_of
from persia.store.engine import engine_of
from persia.store.operators import (
    TAKEN,
    prefetch,
    pull,
    typed,
    versions,
)
from persia.store.setting import set_absent
from persia.store.state import check_state, state_of
from persia.store.store import Store

_MANY_USES = 16  # then those of graphs that are gone are forgotten


class _Use:
    """The ids of a forward."""

    __slots__ = ("__weakref__", "backwards", "batch", "ids")

    def __init__(self, ids: Ids, batch: int, backwards: int) -> None:
        self.ids, self.batch, self.backwards = ids, batch, backwards


class Collection(nn.Module):
    """What pooled and sequence modules share: tables, plans, the lookup."""

    _config_class: type[TableConfig]
    _kind: int
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
        "tables",
        "trains",
    )
    _link: Link | None = None  # instead of its device's (tests)
    _compiled = False  # a compiler has traced a forward

    def __init__(
        self,
        tables: Sequence[Any],
        *,
        store: Store | None,
        optimizer: SparseOptimizer | None,
        device: torch.device | str | None,
        output_dtype: torch.dtype,
        padding_value: int | None,
        share: bool | None,
    ) -> None:
        super().__init__()
        if store is not None and optimizer is not None:
            raise errors.InvalidArgument(
                "optimizer= is for a module with a store of its own; a Store "
                "has its optimizer"
            )
        tables = list_of(tables, self._config_class)
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
        names = [c.name for c in configs]
        if len(set(names)) != len(names):
            twice = sorted({n for n in names if names.count(n) > 1})
            raise errors.InvalidArgument(
                f"tables {twice} occur more than once in one module"
            )
        self.names_given = names
        if share is not None:
            kind("share", share, bool, "True or False")
        if store is None:
            if share:
                raise errors.InvalidArgument(
                    "share=True needs store=: a module without one has a "
                    "store of its own"
                )
            store, configs = default_store(optimizer, configs)
        self.store = kind("store", store, Store, "a persia.Store")
        self._configs = configs
        given = dict(zip((c.name for c in configs), tables, strict=True))
        if share is False:
            engine_of(self.store).check_free(given)
        here = torch.get_default_device() if device is None else device
        of_ids = device is None and here == torch.device("cpu")
        self._device = None if of_ids else torch.device(here)
        if share is not None:  # None: a part of another module
            # As a weight without rows: who asks for its dims finds two.
            dim = configs[0].embedding_dim
            here = "cpu" if self.device.type == "meta" else self.device
            self.anchor = Anchor(torch.empty(0, dim, device=here))
            self.anchor.bind(self)
        self.output_dtype = output_dtype
        self.padding_value = padding_value
        # (output name, feature, config) in the order of the output.
        features = [f for c in self._configs for f in c.feature_names]
        self.outputs = [
            (f if features.count(f) == 1 else f"{f}@{name}", f, c)
            for name, c in zip(names, self._configs, strict=True)
            for f in c.feature_names
        ]
        self._names = [name for name, _, _ in self.outputs]
        self._dims = [c.embedding_dim for _, _, c in self.outputs]
        self.features = tuple(dict.fromkeys(f for _, f, _ in self.outputs))
        self._connect()
        if share is not None:
            engine_of(self.store).add_user(self, given)

    def _connect(self) -> None:
        """Declares the tables; plans for keys in the order of the configs."""
        self._trainable = any(c.trainable for c in self._configs)
        self._plans: dict[tuple[str, ...], int] = {}
        self._row_plans: dict[tuple[str, ...], int] = {}
        engine = engine_of(self.store)
        self._numbers = [engine.declare(c).number for c in self._configs]
        self._handle = engine.handle
        self._uses: list[weakref.ref[_Use]] = []
        if self._device is not None:
            engine.device = self._device
        self._first_plan = self._make_plan(self._kind, self.features)
        self._plans[self.features] = self._first_plan
        self.traced_as = next(numbers)
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
                return int(_plan_for_graph(self.traced_as, keys, None))
            plan = self._plans[keys] = self._make_plan(self._kind, keys)
        return plan

    def _weights_of(self, ids: Ids) -> Tensor | None:
        """The weights that take part in the lookup, float32."""
        return None

    def look_ahead(self, features: Any, number: int) -> LookedUp | None:
        """Adds the lookup of a data loader's batch; None if this batch is
        not for looking ahead. Raises what the forward would raise.
        """
        ids = unpack(features, self.padding_value, self.features)
        weights = self._weights_of(ids)
        if ids[1].is_meta or (weights is not None and weights.requires_grad):
            return None
        version = versions(*ids[5])
        if ids[1].device.type != "cpu":
            ids = self._on_cpu(ids)
            weights = self._weights_of(ids)
        way = self._way(device_of(features, ids))
        try:
            self._start(ids, weights, way, number)
        except RuntimeError as error:
            raise typed(error) from None
        return LookedUp(number, ids, weights, version)

    def _start(
        self, ids: Ids, weights: Tensor | None, way: Way | None, number: int
    ) -> None:
        """Starts the lookup of a batch."""
        start = prefetch if way is None else way.prefetch
        plan = self._plan_of(ids[0])
        start(ids[1], ids[2], weights, self._handle, plan, number)

    def _may_train(self) -> bool:
        """Whether a lookup is part of a training step; raises if that cannot
        work, and ends what a failed backward left.
        """
        store = self.store
        grad = self.trains and torch.is_grad_enabled()
        if grad and jit_traces():
            raise errors.InvalidArgument(
                "torch.jit.trace records lookups and no training of rows: "
                "trace under torch.no_grad()"
            )
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
        copies it (compiled modules, other devices than CUDA's)."""
        if stand_in() is not None:
            return None
        if torch.compiler.is_compiling():
            _mark_compiled(self.traced_as)
            return None
        if self._compiled:  # what is looked up ahead is for the graph
            return None
        link = self._link or link_of(self._device or ids_device)
        return None if link is None else Way.of(link, self.output_dtype)

    def _lookup(
        self, ids: Ids, weights: Tensor | None, way: Way | None = None
    ) -> Tensor:
        """The output of the plan for these keys, float32 on the CPU, or as
        ``way`` says where."""
        if (other := stand_in()) is not None:
            outputs = self._looked_up()
            return other(self._kind, outputs, ids, weights)
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
            self._leaves(),
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
        if (other := stand_in()) is not None:
            outputs = [self.outputs[i] for i in place]
            return other(_core.PLAN_ROWS, outputs, ids, None)
        keys = ids[0]
        memo = (*map(str, place), "|", *keys)
        plan = self._row_plans.get(memo)
        if plan is None and torch.compiler.is_compiling():
            plan = int(_plan_for_graph(self.traced_as, keys, place))
        elif plan is None:
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
            None,
            self._leaves(),
        )

    def note(self, ids: Ids, out: Tensor, batch: int | None = None) -> None:
        """Notes the ids of a forward, for as long as its graph lives;
        ``batch`` is the number of a loader's batch."""
        if torch.compiler.is_compiling() or out.grad_fn is None:
            return
        if batch is None:
            batch = 0 if ids[4] is None else int(ids[4][0])
        one = _Use(ids, batch, engine_of(self.store).backwards)
        graph: Any = out.grad_fn
        graph.metadata.setdefault("persia", []).append(one)
        if len(self._uses) > _MANY_USES:
            self._uses[:] = [u for u in self._uses if u() is not None]
        self._uses.append(weakref.ref(one))

    def used(self) -> list[tuple[Ids, int]]:
        """The ids of forwards with gradient since the last backward, each
        with the number of its loader's batch, or 0."""
        now = engine_of(self.store).backwards
        alive = (u() for u in self._uses)
        return [(u.ids, u.batch) for u in alive if u and u.backwards == now]

    def _shape_alone(self, ids: Ids) -> bool:
        """Whether the output has a shape and no values."""
        here = self._device
        return ids[1].is_meta or (here is not None and here.type == "meta")

    def _no_values(self, shape: tuple[int, int]) -> Tensor:
        return torch.empty(shape, dtype=self.output_dtype, device="meta")

    def ids_on_cpu(self, ids: Tensor) -> Tensor:
        """Ids on the CPU; those copied from a device are counted."""
        if ids.device.type in ("cpu", "meta"):
            return ids
        engine_of(self.store).counts["cuda_ids_copied"] += ids.numel()
        return ids.cpu()

    def taken_ahead(self, ids: Tensor, padding: int | None) -> Tensor | None:
        """The vectors of ids [n], if a data loader looked them up with those
        of other modules; it has them on the CPU."""
        if torch.compiler.is_compiling():
            return None
        ahead = engine_of(self.store).ahead
        if not ahead.joins:
            return None
        found = ahead.take(self, padding, self.ids_on_cpu(ids))
        return None if found is None else self._placed(found, ids.device)

    def _on_cpu(self, ids: Ids) -> Ids:
        """The batch with its tensors on the CPU."""
        keys, values, offsets, weights, ticket, given = ids
        return (
            keys,
            self.ids_on_cpu(values),
            None if offsets is None else offsets.cpu(),
            None if weights is None else weights.cpu(),
            ticket,
            given,
        )

    def _placed(self, out: Tensor, ids_device: torch.device) -> Tensor:
        """The output on the module's device, in its dtype."""
        device = self._device or ids_device
        if device.type != "cpu" or self.output_dtype != torch.float32:
            out = out.to(device=device, dtype=self.output_dtype)
        if out.requires_grad and not torch.compiler.is_compiling():
            engine_of(self.store).device = out.device
        return out

    def _apply(self, fn: Any, recurse: bool = True) -> Collection:
        """``.to()`` another device or dtype: the output is there, and of that
        dtype; the tables stay as they are."""
        anchor: Any = self._parameters.pop("anchor", None)
        try:
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
            if isinstance(anchor, Anchor):
                anchor.move(fn)
        finally:
            if anchor is not None:
                self._parameters["anchor"] = anchor
        here = self.device
        meta = here.type == "meta"  # from where torch moves nothing
        where = "cpu" if meta else here
        there = fn(torch.zeros(0, device=where, dtype=self.output_dtype))
        if there.device != here:
            self._device = engine_of(self.store).device = there.device
        self.output_dtype = there.dtype
        return self

    @property
    def trains(self) -> bool:
        """Whether a lookup with gradient updates rows."""
        if not torch.compiler.is_compiling() and not jit_traces():
            check_in_place(self, self.anchor)
        return self._trainable and self.anchor.requires_grad

    def _leaves(self) -> tuple[Tensor, ...]:
        """The anchors of the modules whose rows these are."""
        return (self.anchor,)

    @property
    def device(self) -> torch.device:
        """Where the output goes."""
        return self._device or torch.device("cpu")

    @property
    def tables(self) -> list[TableConfig]:
        """The tables."""
        return self._configs

    def clear_rows(self) -> None:
        """Removes all rows of the tables."""
        for config in self._configs:
            self.store.clear(config.name)

    # ---- state: the schema alone, rows are in the store

    def _save_to_state_dict(
        self, destination: Any, prefix: str, keep_vars: bool
    ) -> None:
        warn_of_unsaved(self, prefix)
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.pop(f"{prefix}anchor", None)  # it holds nothing

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        name, extra = f"{prefix}anchor", f"{prefix}_extra_state"
        self._load_weights(state_dict, prefix)
        given = state_dict.get(extra)
        if carry_out(self.anchor, given):
            state_dict[extra] = self.get_extra_state()
        state_dict[name] = self.anchor  # itself: nothing changes
        try:
            super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        finally:
            del state_dict[name]
            if given is not None:
                state_dict[extra] = given

    def _load_weights(self, state_dict: Any, prefix: str) -> None:
        """A state of torchrec's module has weights."""
        weights = {}
        for name, config in zip(self.names_given, self._configs, strict=True):
            for part in ("embedding_bags", "embeddings"):
                key = f"{prefix}{part}.{name}.weight"
                if isinstance(state_dict.get(key), Tensor):
                    weights[config.name] = state_dict.pop(key)
        self.set_weights("load_state_dict", weights)
        if len(weights) == len(self._configs):  # it has all rows
            extra = f"{prefix}_extra_state"
            state_dict.setdefault(extra, self.get_extra_state())

    def set_weights(self, what: str, weights: Mapping[str, Tensor]) -> None:
        """Weights, by tables, become rows 0 to n - 1 where there are none
        yet; warns of others. ``what`` does so."""
        kept = {}
        for table, weight in weights.items():
            ids = torch.arange(len(weight), device="cpu")
            kept[table] = set_absent(self.store, table, ids, weight)
        if any(kept.values()):
            warn_once_of_kept(self, what, kept)

    def get_extra_state(self) -> Tensor:
        """Which rows belong to the state, float32 [n]: ``store.save`` saves
        them. Averages of it are averages of the rows.
        """
        state = state_of(self.store, self._configs, self._outputs())
        return named(self, state)

    def _outputs(self) -> list[tuple[str, int]]:
        return list(zip(self._names, self._dims, strict=True))

    def set_extra_state(self, state: Any) -> None:
        """Checks that the rows of a ``state_dict()`` are in the store."""
        check_state(
            self.store,
            self._configs,
            type(self).__name__,
            state,
            self._outputs(),
            self._kind == _core.PLAN_BAGS,
        )

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        for name in (
            "_plans",
            "_first_plan",
            "_row_plans",
            "_numbers",
            "_handle",
            "_uses",
            "_compiled",
        ):
            state.pop(name, None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._connect()
        given = {c.name: c for c in self._configs}
        engine_of(self.store).add_user(self, given)
        self.anchor.bind(self)

    def extra_repr(self) -> str:
        return ", ".join(
            f"{c.name}: {c.embedding_dim} <- {list(c.feature_names)}"
            for c in self._configs
        )


def collections_of(model: nn.Module) -> list[Collection]:
    """All modules of a model that have tables, each once, in its order: of
    wrapped and compiled models, and within converted modules, too."""
    return [m for m in model.modules() if isinstance(m, Collection)]


def stores_of(model: nn.Module) -> list[Store]:
    """The stores of a model's tables, each once, in its order, which is the
    same on all ranks."""
    return list(dict.fromkeys(m.store for m in collections_of(model)))


@constant_while_tracing
def _plan_for_graph(
    number: int, keys: tuple[str, ...], place: tuple[int, ...] | None
) -> int:
    """A plan made while a compiler traces: a constant of its arguments."""
    module = modules[number]
    assert isinstance(module, Collection)
    if place is None:
        return module._make_plan(module._kind, keys)
    outputs = [module.outputs[i] for i in place]
    return module._make_plan(_core.PLAN_ROWS, keys, outputs)


@constant_while_tracing
def _mark_compiled(number: int) -> None:
    """Marks a module whose forward is in a compiled graph."""
    module = modules[number]
    assert isinstance(module, Collection)
    module._compiled = True


def _fp16_autocast() -> bool:
    for device in ("cuda", "cpu"):
        if (
            torch.is_autocast_enabled(device)
            and torch.get_autocast_dtype(device) == torch.float16
        ):
            return True
    return False


class TableRows(Collection):
    """Vectors of several tables, of any dims: one an id, not pooled. A part
    of other modules.

    Args:
        tables: :class:`EmbeddingConfig`, no feature in two of them.
        owner: the module whose lookups these are.
        link: how values reach its device; None: as that device has it.
    """

    _config_class = EmbeddingConfig
    _kind = _core.PLAN_ROWS

    def __init__(
        self,
        tables: Sequence[TableConfig],
        owner: Collection,
        link: Link | None = None,
    ) -> None:
        self._owner = weakref.ref(owner)
        self._link = link
        super().__init__(
            tables,
            store=owner.store,
            optimizer=None,
            device=owner._device,
            output_dtype=torch.float32,
            padding_value=None,
            share=None,
        )

    @property
    def trains(self) -> bool:
        owner = self._owner()
        return self._trainable and owner is not None and owner.trains

    def _leaves(self) -> tuple[Tensor, ...]:
        owner = self._owner()
        return () if owner is None else owner._leaves()

    def look_up(self, features: JaggedBatch) -> Tensor:
        """float32 [n, the widest dim], in the order of the ids."""
        ids = unpack(features, None)
        device = device_of(features, ids)
        if ids[1].device.type != "cpu":
            ids = self._on_cpu(ids)
        rows = self._lookup(ids, None, self._way(device))
        return self._placed(rows, device)


def _looked_up_anew(batch: Tensor) -> Tensor:
    """The ticket of a batch whose lookup does not fit."""
    return torch.stack((batch[0], torch.tensor(-1, device="cpu")))
