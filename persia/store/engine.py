"""The :class:`Engine`: what a store is within.

:class:`persia.Store` is what users see. Other modules of the package ask for
the engine of a store.
"""

from __future__ import annotations

import gc
import secrets
import threading
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor

from persia import _core, errors
from persia.admission import Admission
from persia.base.check import real
from persia.base.cpus import processors
from persia.base.torch_private import (
    graph_task,
    in_backward,
    made_a_step,
    when_backward_ends,
)
from persia.base.warning import warn
from persia.optim import add_table, factors_of, gradients_came
from persia.store import norm
from persia.store.ahead import Ahead
from persia.store.configs import TableConfig, check_same, native_options
from persia.store.operators import HELD, SHAPES, versions
from persia.store.waiting import Accumulation, Waiting

if TYPE_CHECKING:
    from persia.distributed.cluster import Settings
    from persia.optim import SparseOptimizer


class Keeper(Protocol):
    """Keeps rows beside the states of modules."""

    def save(self) -> None:
        """Saves the rows as they are now."""

    def bring_back(self, checkpoint: str) -> bool:
        """Loads those of a checkpoint; False: it has it not."""


class _Copies(Protocol):
    def copy(self: Copied) -> Copied: ...


Copied = TypeVar("Copied", bound=_Copies)

NONFINITE = {"raise": _core.NONFINITE_RAISE, "skip": _core.NONFINITE_SKIP}


@dataclass(frozen=True)
class Arguments:
    """Those of :class:`persia.Store`, checked; the optimizer is apart."""

    seed: int
    update: str
    memory_limit: int | None
    nonfinite: str
    threads: int | None
    settings: Settings
    grad_division: bool


@dataclass(frozen=True)
class Table:
    """A declared table: its number in the C store, and what declared it."""

    number: int
    config: TableConfig


class _AfterPushes(torch.autograd.Function):
    """Makes the anchor; autograd comes back here once a backward, after all
    its pushes.

    It returns no gradient: one that accumulates in a leaf would be shared by
    the backwards of all threads.
    """

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, engine: weakref.ref[Engine]) -> Tensor:
        ctx.engine = engine
        ctx.set_materialize_grads(False)
        return leaf.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[None, None]:
        engine = ctx.engine()
        if grad is not None and engine is not None:
            engine.backward_done()
        return None, None


#: Backwards that functions of torch are watched for: a penalty may be
#: computed after the first of them.
WATCHED = 2


def _zeros(n: int) -> Tensor:
    """float32 on the CPU, whatever torch's defaults are."""
    return torch.zeros(n, dtype=torch.float32, device="cpu")


class Engine:
    """Tables, optimizer and updates of one process.

    Attributes:
        arguments: those of the store.
        optimizer: of all tables, with one group a table.
        connection: to the process, servers or ranks that have the tables.
        core: the store of the C core; handle: its number there.
        tables: by name.
        ahead: the batches that loaders gave out last; prefetch: whether the
            latest pass looks ahead, None before the first.
        counts: some of the numbers of ``stats()``.
        lineage: the name of the rows in this process since they were made,
            loaded or assigned.
        loaded: the lineage of the checkpoint loaded last, or "".
        loaded_updates: of each table then; None: the rows were changed
            otherwise since.
        checkpoint_id: of the checkpoint saved or loaded last, or "".
        training: the name of what this store trains; that of the checkpoint
            that it loaded.
        saved: updates of each table then.
        keeper: saves rows beside states, see :func:`persia.keep_rows`.
        loading: states are saved or loaded with their rows; strict: all of
            them.
        writes: how often rows of a table were set or erased by hand; cleared:
            how often those of all tables were replaced.
        scales: what rows are multiplied with that are not there yet, by
            table, see persia.nn.arithmetic.
        backwards: through rows, so far; watched: the modules' anchors, until
            the first.
        told: warnings that were given, once a store.
        given: by table, how often a parameter's ``data`` was assigned.
        anchor: float32 [1] that requires grad, so that autograd visits every
            lookup; its gradient arrives after all pushes of a backward.
            Neither Parameter nor buffer: DDP, .to() and state_dict() do not
            know it. still: in its place where no gradient is wanted.
        device: of the values that a module gave out last.
        seconds: that threads of the user have spent on updates.
        no_batch: the ticket of ids that no loader gave out, int64 [2].
    """

    def __init__(
        self, optimizer: SparseOptimizer, arguments: Arguments
    ) -> None:
        self.arguments = arguments
        self.optimizer = optimizer
        threads = arguments.threads
        self.connection = arguments.settings.open(
            min(torch.get_num_threads(), max(1, int(processors())))
            if threads is None
            else threads,
            arguments.memory_limit or 0,
        )
        self.core = self.connection.core
        self.handle: int = self.core.handle
        SHAPES[self.handle] = {}
        weakref.finalize(self, SHAPES.pop, self.handle)
        self.tables: dict[str, Table] = {}
        # Modules by their tables, each with the config that it was given.
        self._users: dict[str, list[tuple[weakref.ref[Any], object]]] = {}
        self.ahead = Ahead()
        self.prefetch: bool | None = None
        self.counts = {"gradients_discarded": 0, "cuda_ids_copied": 0}
        self.loaded = ""
        self.writes: dict[str, int] = {}
        self.cleared = 0
        self.scales: dict[str, tuple[tuple[Any, ...], float]] = {}
        self.backwards = 0
        self.watched: list[weakref.ref[Any]] = []
        self.told: set[str] = set()
        self.given: dict[str, int] = {}
        self._snapshot: tuple[Any, weakref.ref[Any]] | None = None
        self.rename_rows()
        self.checkpoint_id = ""
        self.training = secrets.token_hex(8)
        self.saved: dict[str, int] = {}
        self.loading, self.strict = False, True
        self.keeper: Keeper | None = None
        self._waiting = Waiting()
        self._came: dict[int, weakref.ref[object]] = {}
        self._zeroed = False  # all that waited was dropped so
        self._ends: dict[int, int] = {}  # by thread, the backward to end
        # Whether a GradScaler has unscaled dense gradients alone; whether the
        # latest step was its.
        self._scaled, self._by_scaler = False, False
        self._accumulation: Accumulation | None = None
        if arguments.update == "backward":
            self._accumulation = Accumulation()
        else:
            HELD[self.handle] = []
            weakref.finalize(self, HELD.pop, self.handle)
        # The groups of the optimizer are those of the tables of the core: no
        # update while a table is made. A signal's handler may interrupt.
        self._lock = threading.RLock()
        with torch.inference_mode(False), torch.enable_grad():
            self.anchor: Tensor = _AfterPushes.apply(  # type: ignore[no-untyped-call]
                _zeros(1).requires_grad_(), weakref.ref(self)
            )
        self.still = _zeros(1)
        self.device = torch.device("cpu")
        self.seconds = 0.0
        self.no_batch = torch.zeros(2, dtype=torch.int64, device="cpu")

    # ---- updates

    def backward_done(self) -> None:
        """A backward has pushed all its gradients."""
        self.backwards += 1
        if self.watched and self.backwards >= WATCHED:
            for anchor in (watched() for watched in self.watched):
                if anchor is not None:
                    anchor.unwatch()
            self.watched.clear()
        if self._accumulation is not None:
            self.apply(None, all_threads=False)
            self._accumulation.add()
            return
        gradients_came(self.optimizer, self.device)
        try:
            self._waiting.add(HELD[self.handle])
        except errors.LimitReached:
            self.discard()
            raise

    def ends_with_backward(self) -> None:
        """A backward that does not visit the anchor, as ``backward(inputs=)``,
        is done when it ends."""
        task = graph_task()
        if self._ends.get(threading.get_ident()) != task:
            self._ends[threading.get_ident()] = task
            when_backward_ends(self.backward_done)

    def apply(self, factors: list[float] | None, *, all_threads: bool) -> None:
        """Applies the gradients that are held as one update."""
        began = time.perf_counter()
        if not self.arguments.settings.read_only:
            self.connection.begin_steps()
        with self._lock:
            self._apply_locked(factors, all_threads)
        self.seconds += time.perf_counter() - began

    def _apply_locked(
        self, factors: list[float] | None, all_threads: bool
    ) -> None:
        if self.arguments.settings.read_only:
            self.discard()
            self.check_writable("an update")
        groups = self.optimizer.param_groups
        for group in groups:
            if "lr" not in group:  # the C core would take it for 0
                raise errors.InvalidArgument(
                    f"table {group['table']!r}: its group in "
                    "store.optimizer.param_groups has no 'lr'; set one"
                )
        held = HELD.get(self.handle, [])
        changed = any(versions(*h.tensors) != h.version for h in held)
        if self._zeroed and not self.core.held(True):
            warn(
                "store.optimizer.step() has nothing to apply: the gradients "
                "of the rows were dropped with those of the model, by "
                "zero_grad() or grad = None. Call store.optimizer.step() "
                "before"
            )
        self._forget_held()
        if changed:
            self.discard()
            raise errors.TicketError(
                "a gradient, ids or weights were changed in place between "
                "backward() and optimizer.step(); the gradients that waited "
                "are dropped. Change a copy, or step first"
            )
        made_a_step(self.optimizer)
        division = self._division()
        if division != 1.0:
            factors = [f * division for f in factors or [1.0] * len(groups)]
        try:
            self.core.apply(groups, factors, all_threads)
        except TypeError:
            raise errors.InvalidArgument(_not_numbers(groups)) from None

    def _division(self) -> float:
        """What gradients of this rank are multiplied with."""
        if not self.arguments.grad_division:
            return 1.0
        return 1.0 / self.connection.job.world

    def discard(self) -> None:
        """Drops all gradients that are held."""
        self._forget_held()
        self.counts["gradients_discarded"] += self.core.discard(True)

    def _forget_held(self) -> None:
        HELD.get(self.handle, []).clear()
        self._waiting.clear()
        self._came.clear()
        self._zeroed = False

    def came(self, anchor: object) -> None:
        """A backward has brought gradients of a module, by its anchor."""
        self._came[id(anchor)] = weakref.ref(anchor)

    def zeroed(self, anchor: object) -> None:
        """The gradients of a module were zeroed: those that wait are dropped,
        except what other modules have a part in."""
        if self._came.pop(id(anchor), None) is None:
            return
        alive = {key for key, of in self._came.items() if of() is not None}
        if not alive:
            self.discard()
            self._zeroed = True
            return
        held = HELD[self.handle]
        gone = [one.ticket for one in held if not one.leaves & alive]
        held[:] = [one for one in held if one.leaves & alive]
        self._waiting.left(held)
        tickets = torch.tensor(gone, dtype=torch.int64, device="cpu")
        dropped = self.core.discard(tickets.numpy())
        self.counts["gradients_discarded"] += dropped

    def unscaled(self) -> None:
        """A GradScaler has unscaled the gradients of an optimizer that has a
        module's anchor."""
        if self.arguments.update == "backward":
            raise errors.InvalidArgument(
                "a GradScaler scales the gradients, but "
                'Store(update="backward") applies those of rows before they '
                'are unscaled; make the store with update="step", and call '
                "scaler.step(store.optimizer), too"
            )
        self._scaled = bool(self._came) or not self._by_scaler

    def begin_step(self, by_scaler: bool) -> None:
        """The optimizer steps; by_scaler: a GradScaler calls it."""
        self._by_scaler = by_scaler
        scaled, self._scaled = self._scaled, False
        if scaled and not by_scaler:
            raise errors.InvalidArgument(
                "a GradScaler has unscaled the gradients of the dense "
                "optimizer, and those of the rows are still multiplied by "
                "its scale; call scaler.step(store.optimizer) in place of "
                "store.optimizer.step()"
            )

    def drop_unfinished(self) -> None:
        """Drops what a backward left that an exception ended.

        Its gradients are not whole, and the next backward of this thread
        must not apply them.
        """
        if (
            self.arguments.update == "backward"
            and self.core.held(False)
            and not in_backward()
        ):
            self.counts["gradients_discarded"] += self.core.discard(False)

    def grad_norm_squared(self) -> float:
        """Of the gradients that wait, summed per id over all ranks, unscaled,
        and divided by the ranks' number as they will be applied."""
        if self.arguments.update != "step":
            raise errors.InvalidArgument(
                "clip_grad_norm_ needs the gradients before they are "
                'applied; make the store with update="step"'
            )
        division = self._division()
        factors = [f * division for f in factors_of(self.optimizer)]
        several = self.connection.job.world > 1
        passes = self.connection.passes if several else None
        return norm.squares(*self.core.sums(), factors, passes)

    def check_writable(self, what: str) -> None:
        """Raises if the store only reads."""
        if self.arguments.settings.read_only:
            raise errors.InvalidArgument(
                f"{what} changes rows, and this store was made with "
                "read_only=True; make another without"
            )

    def rename_rows(
        self,
        loaded_updates: dict[str, int] | None = None,
        table: str | None = None,
    ) -> None:
        """The rows are not those that updates have made of the last ones:
        they are new, loaded or assigned; of one table, or of all."""
        self.lineage = secrets.token_hex(8)
        self.loaded_updates = loaded_updates
        if table is None:
            self.cleared += 1
        else:
            self.writes[table] = self.writes.get(table, 0) + 1

    def snapshot(self, store: Copied) -> Copied:
        """A copy of the store, whose engine this is: the same one as long as
        it is in use and the rows have not changed."""
        self.core.settle()
        now = self.lineage, self.core.updates()
        if self._snapshot is not None and self._snapshot[0] == now:
            found: Copied | None = self._snapshot[1]()
            if found is not None:
                return found
        copy = store.copy()
        self._snapshot = now, weakref.ref(copy)
        return copy

    def has_snapshot(self, copy: object) -> bool:
        """Whether a store is the latest copy, and the rows are as then."""
        self.core.settle()
        found = self._snapshot
        return (
            found is not None
            and found[1]() is copy
            and found[0] == (self.lineage, self.core.updates())
        )

    # ---- tables

    def find(self, table: str) -> Table:
        """A table by its name."""
        try:
            return self.tables[table]
        except (KeyError, TypeError):
            raise errors.InvalidArgument(
                f"no table {table!r} in this store; it has "
                f"{sorted(self.tables)}{self._on_servers()}"
            ) from None

    def _on_servers(self) -> str:
        """For an error: the tables that servers have beside."""
        if not self.connection.remote:
            return ""
        try:
            stats = self.connection.ask(_core.cluster_stats, 0)
        except errors.PersiaError:  # of two errors the first one is raised
            return ""
        names = {table["name"] for table in stats["tables"]}
        if not names - set(self.tables):
            return ""
        return (
            f", its servers have {sorted(names)}: describe one here first, by "
            "a module or store.add_table()"
        )

    def add_user(self, module: object, configs: Mapping[str, object]) -> None:
        """A module trains these tables: name, and config as it was given."""
        with self._lock:
            for name, config in configs.items():
                user = weakref.ref(module), config
                self._users.setdefault(name, []).append(user)

    def leads(self, module: object, table: str) -> bool:
        """Whether a module is the first of those that train a table."""
        for user, _ in self._users.get(table, []):
            if (first := user()) is not None:
                return first is module
        return True

    def check_free(self, configs: Mapping[str, object]) -> None:
        """Raises if another module trains one of these tables, unless it was
        given the same config object."""
        for name, config in configs.items():
            if self._users_beside(name, config):
                gc.collect()  # they may be garbage already
            others = self._users_beside(name, config)
            if others:
                raise errors.InvalidArgument(
                    f"table {name!r} of this store is that of another "
                    f"{type(others[0]).__name__} already. To train the same "
                    "rows with both, pass share=True; for rows of its own, "
                    "another name, or another store. A module that replaces "
                    "one, as in a notebook: delete the old one before, or "
                    f"remove its rows with store.drop({name!r})"
                )

    def _users_beside(self, table: str, config: object) -> list[object]:
        """The modules that train a table, except those of this config."""
        alive = [
            (user, module, mine)
            for user, mine in self._users.get(table, [])
            if (module := user()) is not None
        ]
        self._users[table] = [(user, mine) for user, _, mine in alive]
        return [module for _, module, mine in alive if mine is not config]

    def declare(self, config: TableConfig) -> Table:
        """The table of a config, made if new; contradictions raise."""
        template = config.optimizer or self.optimizer
        with self._lock:
            first = self.tables.get(config.name)
            if first is not None:
                check_same(config, first.config)
            else:
                # Updates on their way know nothing of another table.
                self.core.settle()
            number, _ = self.core.declare(**self.native(config))
            if config.name not in self.tables:
                add_table(self.optimizer, config.name, template, config.lr)
                self.tables[config.name] = Table(number, config)
            table = self.tables[config.name]
            if config.lr is not None and table.config.lr != config.lr:
                raise errors.SchemaMismatch(
                    f"table {config.name!r}: lr is {config.lr}, but was first "
                    f"declared as {table.config.lr}; give both the same"
                )
            if config.optimizer is not None:
                self._check_optimizer(config, table.config)
        return table

    def native(self, config: TableConfig) -> dict[str, Any]:
        """Arguments of ``_core.Store.declare``."""
        template = config.optimizer or self.optimizer
        return {
            **native_options(config, self.arguments.seed),
            "optimizer": _core.TABLE_OPTIONS["optimizer"].index(
                template.algorithm
            ),
            "momentum": int(template.defaults.get("momentum", 0.0) > 0),
            "state_init": template.defaults.get(
                "initial_accumulator_value", 0.0
            ),
            "nonfinite": NONFINITE[self.arguments.nonfinite],
        }

    def _check_optimizer(
        self, config: TableConfig, first: TableConfig
    ) -> None:
        """Raises if an optimizer has other settings than the first of its
        table; the C core has compared what changes the rows' layout."""
        mine, theirs = (
            {
                **(c.optimizer or self.optimizer).defaults,
                **({} if c.lr is None else {"lr": float(c.lr)}),
            }
            for c in (config, first)
        )
        other = sorted(k for k in mine if mine[k] != theirs.get(k, mine[k]))
        if other:
            differences = ", ".join(
                f"{k} is {mine[k]}, but was first declared as {theirs[k]}"
                for k in other
            )
            raise errors.SchemaMismatch(
                f"table {config.name!r}: the optimizer differs: "
                f"{differences}; give both the same"
            )

    def adopt(self, native: dict[str, Any]) -> Table:
        """A table by the options that the core has of it, for a look at its
        rows: the optimizer's settings are not among them."""
        number, _ = self.core.declare(**native)
        config = TableConfig(
            native["name"],
            native["dim"],
            capacity=native["capacity"] or None,
            admission=Admission.from_options(native),
        )
        add_table(self.optimizer, config.name, self.optimizer, None)
        self.tables[config.name] = Table(number, config)
        return self.tables[config.name]

    def plan(
        self,
        kind: int,
        keys: int,
        features: list[tuple[str, int, int, int, int]],
    ) -> int:
        """A plan; each feature is (name, key, table, pooling, trainable)."""
        plan = self.core.plan(kind, keys, features)
        SHAPES[self.handle][plan] = self.core.plan_shape(plan)
        return plan

    def drop(self, table: str) -> None:
        """Implements :meth:`persia.Store.drop`."""
        with self._lock:
            number = self.find(table).number
            self.core.drop(number)
            self.rename_rows()
            del self.tables[table]
            self._users.pop(table, None)
            group = self.optimizer.param_groups[number]
            group["table"] = f"{table} (dropped)"

    # ---- end

    def finish(self) -> None:
        """Waits for the last update; raises what failed in the background."""
        try:
            self.core.finish()
        except errors.PersiaError as error:
            try:
                self.core.finish()  # there may be lost updates, too
            except errors.PersiaError as another:
                error.add_note(f"{type(another).__name__}: {another}")
            raise


class HasEngine:
    """What has an engine: a :class:`persia.Store`."""

    _engine: Engine


def engine_of(store: HasEngine) -> Engine:
    """What a store is within."""
    return store._engine


def _not_numbers(groups: list[dict[str, Any]]) -> str:
    """What the core could not read of the optimizer's groups."""
    wrong = [
        f"table {group['table']!r}: {name} is {value!r}"
        for group in groups
        for name, value in group.items()
        if name not in ("params", "table", "algorithm", "betas")
        and real(value) != real(value)
    ]
    return (
        f"store.optimizer.param_groups: {'; '.join(wrong) or 'betas'}; need "
        "numbers"
    )
