"""The :class:`Store`: tables, optimizer and updates of one process."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import secrets
import threading
import warnings
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from persia import _core, errors, optim
from persia.base.check import kind, number, real, whole
from persia.base.torch_private import in_backward, made_a_step
from persia.base.warning import warn
from persia.distributed.cluster import Settings
from persia.store import norm
from persia.store.ahead import Ahead
from persia.store.configs import (
    TableConfig,
    as_config,
    check_same,
    native_options,
)
from persia.store.operators import HELD, SHAPES, versions
from persia.store.rows import Rows, Table
from persia.store.stats import Stats
from persia.store.waiting import Accumulation, Waiting

if TYPE_CHECKING:
    import os
    from pathlib import Path

    from persia.checkpoint import Checkpoint
    from persia.distributed.security import Security

__all__ = ["Store"]

_NONFINITE = {"raise": _core.NONFINITE_RAISE, "skip": _core.NONFINITE_SKIP}


class _AfterPushes(torch.autograd.Function):
    """Makes the anchor; autograd comes back here once a backward, after all
    its pushes.

    It returns no gradient: one that accumulates in a leaf would be shared by
    the backwards of all threads.
    """

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, store: weakref.ref[Store]) -> Tensor:
        ctx.store = store
        ctx.set_materialize_grads(False)
        return leaf.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[None, None]:
        store = ctx.store()
        if grad is not None and store is not None:
            store._backward_done()
        return None, None


def _zeros(n: int) -> Tensor:
    """float32 on the CPU, whatever torch's defaults are."""
    return torch.zeros(n, dtype=torch.float32, device="cpu")


class Store(Rows, Stats):
    """Embedding tables without bounds.

    Modules that are given the same store and table name share rows. All
    methods may be called from any thread; backwards of several threads are
    updates of their own (``update="step"``: no other thread may be within a
    backward at the step). In a forked child every use of a table raises
    :class:`persia.errors.UsedAfterFork`.

    The tables are in this process (*embedded*), on parameter servers, or on
    the ranks of the job, each of which serves its part of every table to the
    others. Then updates are applied while training goes on, within the
    staleness of the :class:`persia.DataLoader` (without one: at most 64 are
    under way), and looks at the rows wait for those of this process alone.

    Args:
        optimizer: a ``persia.optim`` object; it becomes :attr:`optimizer`.
            Default: ``persia.optim.Adagrad()``.
        seed: of initial values, admission and rounding, 0 to 2**64 - 1.
        update: "backward": the gradients that one ``backward()`` reaches are
            summed per id and applied at its end. "step": those of any number
            of backwards are applied by ``store.optimizer.step()``
            (accumulation, GradScaler, clipping of the common norm). Without
            one they wait: 64 backwards warn, and more that hold over 1 GiB
            raise LimitReached.
        memory_limit: bytes of all tables; beyond it updates raise
            LimitReached. None: no limit.
        nonfinite: a gradient that is NaN or infinite: "raise" changes no row
            of the update and raises NonFiniteGradient, "skip" leaves out the
            rows concerned and counts them.
        threads: that lookups and updates use; default:
            ``torch.get_num_threads()``.
        servers: where the tables are: "embedded"; "ranks", for which
            torch.distributed needs its process group first; or addresses
            "host:port", several with commas between or as a list. A name with
            several addresses stands for so many servers. Default: the
            environment variable PERSIA_SERVERS, else "ranks" in a job of
            several ranks, else "embedded".
        namespace: servers: of the tables; all users of them give the same.
        security: servers: TLS and tokens; default: as the environment says,
            see :meth:`persia.distributed.Security.from_environment`.
        timeout: seconds after which a server that does not answer is an
            error.
        wire_dtype: of vectors and gradients under way: "fp32", "fp16" (with
            a scale for each vector) or "bf16".
        lost: what to do about updates that a server had acknowledged and
            then lost, because it was started again: "raise" UpdatesLost
            once, or "continue" and count them.
        rank, world: of this process in the job; default: as torch.distributed
            or torchrun says.
        job: what this process is part of; default: the run id of torchrun or
            of ``persia launch``, else a random name that the ranks share. A
            rank's updates are numbered in a stream of its job: of two
            processes that open a store as one rank of one job the later one
            goes on, and updates of the earlier one raise Closed. Stores of
            other jobs train the same tables beside it.
        read_only: the store looks at rows and changes none: updates,
            assignments and ``load`` raise InvalidArgument.
        grad_division: whether gradients are divided by ``world``, so that an
            update is the mean over the ranks, as that of the dense
            parameters under DistributedDataParallel.

    Raises:
        Unavailable, DeadlineExceeded: a server cannot be reached.
        SchemaMismatch: the servers are not all shards of one namespace.
        AccessDenied: a token or certificate is missing.
    """

    def __init__(
        self,
        optimizer: optim.SparseOptimizer | None = None,
        *,
        seed: int = 0,
        update: str = "backward",
        memory_limit: int | None = None,
        nonfinite: str = "raise",
        threads: int | None = None,
        servers: str | Sequence[str] | None = None,
        namespace: str = "default",
        security: Security | None = None,
        timeout: float = 60.0,
        wire_dtype: str = "fp32",
        lost: str = "raise",
        rank: int | None = None,
        world: int | None = None,
        job: str | None = None,
        read_only: bool = False,
        grad_division: bool = True,
    ) -> None:
        if optimizer is None:
            optimizer = optim.Adagrad()
        if not isinstance(optimizer, optim.SparseOptimizer):
            raise errors.InvalidArgument(
                f"optimizer is a {type(optimizer).__name__}, need one of "
                "persia.optim: they update rows that torch knows nothing of"
            )
        if update not in ("backward", "step"):
            raise errors.InvalidArgument(
                f"update is {update!r}, need 'backward' or 'step'"
            )
        if nonfinite not in _NONFINITE:
            raise errors.InvalidArgument(
                f"nonfinite is {nonfinite!r}, need 'raise' or 'skip'"
            )
        seed = whole("seed", seed, 0, 2**64 - 1)
        if memory_limit is not None:
            memory_limit = whole(
                "memory_limit", memory_limit, 1, 2**63 - 1, " bytes, or None"
            )
        if threads is not None:
            threads = whole("threads", threads, 1, 1024)
        if servers is not None and not isinstance(servers, str):
            kind("servers", servers, Sequence, '"host:port", or a list')
            servers = tuple(
                kind("servers", one, str, 'strings "host:port"')
                for one in servers
            )
        kind("grad_division", grad_division, bool, "True or False")
        settings = Settings(
            servers,
            namespace,
            security,
            timeout,
            wire_dtype,
            lost,
            rank,
            world,
            job,
            read_only,
        )
        self._configure(
            optimizer,
            seed,
            update,
            memory_limit,
            nonfinite,
            threads,
            settings,
            grad_division,
        )

    def _configure(
        self,
        optimizer: optim.SparseOptimizer,
        seed: int,
        update: str,
        memory_limit: int | None,
        nonfinite: str,
        threads: int | None,
        settings: Settings,
        grad_division: bool,
    ) -> None:
        self.update = update
        self.seed = seed
        self.nonfinite = nonfinite
        self.memory_limit = memory_limit
        self._threads = threads
        self.grad_division = grad_division
        self._settings = settings
        self._connection = settings.open(
            torch.get_num_threads() if threads is None else threads,
            memory_limit or 0,
        )
        self._core = self._connection.core
        self._handle: int = self._core.handle
        SHAPES[self._handle] = {}
        weakref.finalize(self, SHAPES.pop, self._handle)
        self._ahead = Ahead()
        self._prefetch: bool | None = None  # of the latest pass of a loader
        self._waiting = Waiting()
        self._accumulation = Accumulation() if update == "backward" else None
        if update == "step":
            HELD[self._handle] = []
            weakref.finalize(self, HELD.pop, self._handle)
        # The groups of the optimizer are those of the tables of the core: no
        # update while a table is made. A signal's handler may come in.
        self._lock = threading.RLock()
        self._tables: dict[str, Table] = {}
        self._counts = {
            "gradients_discarded": 0,
            "cuda_ids_copied": 0,
        }
        self._lineage = secrets.token_hex(8)
        self._checkpoint_id = ""
        # Updates of each table when a checkpoint was saved or loaded last.
        self._saved: dict[str, int] = {}
        self._loading = False  # states are saved or loaded with their rows
        optimizer._bind(self)
        self._optimizer = optimizer
        # The anchor requires grad, so that autograd visits every lookup; its
        # gradient arrives after all pushes of a backward. Neither Parameter
        # nor buffer: DDP, .to() and state_dict() do not know it.
        with torch.inference_mode(False), torch.enable_grad():
            self._anchor: Tensor = _AfterPushes.apply(  # type: ignore[no-untyped-call]
                _zeros(1).requires_grad_(), weakref.ref(self)
            )
        # In its place where no gradient is wanted.
        self._still = _zeros(1)
        self._no_batch = torch.zeros(2, dtype=torch.int64, device="cpu")

    # ---- optimizer and updates

    @property
    def optimizer(self) -> optim.SparseOptimizer:
        """The optimizer of all tables, with one group a table."""
        return self._optimizer

    @property
    def rank(self) -> int:
        """Of this process among those that train the tables."""
        return self._connection.job.rank

    @property
    def world(self) -> int:
        """How many processes train the tables; 1 if they are embedded."""
        return self._connection.job.world

    @property
    def updates(self) -> int:
        """Updates applied so far; Adam's step t of the last one."""
        self._core.settle()
        if self.remote:  # other ranks make some, too
            return int(self._ask_stats(0)["updates"])
        return self._core.updates()

    def _backward_done(self) -> None:
        if self._accumulation is not None:
            self._apply(None, all_threads=False)
            self._accumulation.add()
            return
        self._optimizer._set_probes(self._core.finite())
        try:
            self._waiting.add(HELD[self._handle])
        except errors.LimitReached:
            self._discard()
            raise

    def _apply(
        self, factors: list[float] | None, *, all_threads: bool
    ) -> None:
        """Applies the gradients that are held as one update."""
        with self._lock:
            self._apply_locked(factors, all_threads)

    def _apply_locked(
        self, factors: list[float] | None, all_threads: bool
    ) -> None:
        if self._settings.read_only:
            self._discard()
            self._check_writable("an update")
        groups = self._optimizer.param_groups
        for group in groups:
            if "lr" not in group:  # the C core would take it for 0
                raise errors.InvalidArgument(
                    f"table {group['table']!r}: its group in "
                    "store.optimizer.param_groups has no 'lr'; set one"
                )
        held = HELD.get(self._handle, [])
        changed = any(versions(*t) != version for t, version in held)
        held.clear()
        self._waiting.clear()
        if changed:
            self._discard()
            raise errors.TicketError(
                "a gradient, ids or weights were changed in place between "
                "backward() and optimizer.step(); the gradients that waited "
                "are dropped. Change a copy, or step first"
            )
        made_a_step(self._optimizer)
        division = self._division()
        if division != 1.0:
            factors = [f * division for f in factors or [1.0] * len(groups)]
        try:
            self._core.apply(groups, factors, all_threads)
        except TypeError:
            raise errors.InvalidArgument(_not_numbers(groups)) from None

    def _division(self) -> float:
        """What gradients of this rank are multiplied with."""
        return 1.0 / self.world if self.grad_division else 1.0

    def _discard(self) -> None:
        """Drops all gradients that are held."""
        HELD.get(self._handle, []).clear()
        self._waiting.clear()
        self._counts["gradients_discarded"] += self._core.discard(True)

    def _grad_norm_squared(self) -> float:
        """Of the gradients that wait, summed per id over all ranks, unscaled,
        and divided by the ranks' number as they will be applied."""
        if self.update != "step":
            raise errors.InvalidArgument(
                "clip_grad_norm_ needs the gradients before they are "
                'applied; make the store with update="step"'
            )
        division = self._division()
        factors = [f * division for f in self._optimizer._factors()]
        passes = self._connection.passes if self.world > 1 else None
        return norm.squares(*self._core.sums(), factors, passes)

    def flush(self, timeout: float | None = None) -> None:
        """Returns when every gradient of a finished backward is in the tables.

        With ``update="step"`` gradients that wait for ``optimizer.step()`` go
        on waiting.

        Args:
            timeout: seconds; None: as long as it takes.

        Raises:
            DeadlineExceeded: after ``timeout``; the updates go on.
            PersiaError: an update that was applied in the background failed;
                its error, once.
            UpdatesLost: at the first flush of rank 0 on servers: ranks that
                this job has no longer had sent updates to some servers only.
        """
        if timeout is not None:
            timeout = number("timeout", timeout, 1e-9, 1e9)
        self._drop_unfinished()
        self._core.flush(timeout)
        self._connection.inherit(timeout)

    def _drop_unfinished(self) -> None:
        """Drops what a backward left that an exception ended.

        Its gradients are not whole, and the next backward of this thread
        must not apply them.
        """
        if (
            self.update == "backward"
            and self._core.held(False)
            and not in_backward()
        ):
            self._counts["gradients_discarded"] += self._core.discard(False)

    # ---- tables

    def _declare(self, config: TableConfig) -> Table:
        """The table of a config, made if new; contradictions raise."""
        template = config.optimizer or self._optimizer
        with self._lock:
            first = self._tables.get(config.name)
            if first is not None:
                check_same(config, first.config)
            else:
                # Updates on their way know nothing of another table.
                self._core.settle()
            number, _ = self._core.declare(**self._native(config))
            if config.name not in self._tables:
                self._optimizer._add_table(config.name, template, config.lr)
                self._tables[config.name] = Table(number, config)
            table = self._tables[config.name]
            if config.lr is not None and table.config.lr != config.lr:
                raise errors.SchemaMismatch(
                    f"table {config.name!r}: lr is {config.lr}, but was first "
                    f"declared as {table.config.lr}; give both the same"
                )
            if config.optimizer is not None:
                self._check_optimizer(config, table.config)
        return table

    def _native(self, config: TableConfig) -> dict[str, Any]:
        """Arguments of ``_core.Store.declare``."""
        template = config.optimizer or self._optimizer
        return {
            **native_options(config, self.seed),
            "optimizer": _core.TABLE_OPTIONS["optimizer"].index(
                template.algorithm
            ),
            "momentum": int(template.defaults.get("momentum", 0.0) > 0),
            "state_init": template.defaults.get(
                "initial_accumulator_value", 0.0
            ),
            "nonfinite": _NONFINITE[self.nonfinite],
        }

    def _check_optimizer(
        self, config: TableConfig, first: TableConfig
    ) -> None:
        """Raises if an optimizer has other settings than the first of its
        table; the C core has compared what changes the rows' layout."""
        mine, theirs = (
            {
                **(c.optimizer or self._optimizer).defaults,
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

    def _plan(
        self,
        kind: int,
        keys: int,
        features: list[tuple[str, int, int, int, int]],
    ) -> int:
        """A plan; each feature is (name, key, table, pooling, trainable)."""
        plan = self._core.plan(kind, keys, features)
        SHAPES[self._handle][plan] = self._core.plan_shape(plan)
        return plan

    @property
    def tables(self) -> dict[str, TableConfig]:
        """The configuration of each table, by name."""
        return {name: copy.copy(t.config) for name, t in self._tables.items()}

    def add_table(self, config: TableConfig) -> None:
        """Makes a table early: a scheduler wants all groups at its start."""
        self._declare(as_config(config, TableConfig))

    # ---- life

    def drop(self, table: str) -> None:
        """Removes a table, its rows and its declaration, on every shard.

        Updates of this store are applied first. The name is free: a table of
        this name, added again, begins empty, with any options. Modules that
        were made for the old one raise InvalidArgument, also those of other
        processes, which drop it too before they add it again. An update of
        another process that brings gradients for the old one fails.

        The table's entry of ``store.optimizer.param_groups`` stays in its
        place, for schedulers, as ``"<name> (dropped)"``.

        Args:
            table: its name.

        Raises:
            InvalidArgument: there is no such table, or the store only reads.
        """
        self._check_writable("drop")
        with self._lock:
            number = self._find(table).number
            self._core.drop(number)
            del self._tables[table]
            group = self._optimizer.param_groups[number]
            group["table"] = f"{table} (dropped)"

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        model: Any = None,
        optimizer: Any = None,
        scheduler: Any = None,
        loader: Any = None,
        extra: Any = None,
        keep: int | None = None,
        step: int | None = None,
    ) -> Path | str:
        """Writes a checkpoint: ``path/step-N``, and its name to LATEST.

        All rows are of one moment, with the state of their optimizer; other
        threads may go on training meanwhile. The folder is there whole or not
        at all: an interrupted save leaves the checkpoint before it, and the
        next save removes what was left. Gradients that wait for
        ``store.optimizer.step()`` are not saved.

        In a job of several ranks all call it together, between two steps of
        their loops, and all return when the checkpoint is complete, or raise
        the same error. Model, optimizer, scheduler and extra are those of
        rank 0; position in the data and random generators are saved of each
        rank. Servers write their rows themselves: ``path`` must lie in the
        folder that they were started with as ``--checkpoints``.

        Args:
            path: the root; made if it is not there. A folder, or the URI
                (as a string) of one on S3 or any other file system that
                ``pyarrow.fs`` knows.
            model: a module, DistributedDataParallel and compiled ones too;
                its parameters and buffers are saved.
            optimizer: of the dense parameters; like all that follow, an
                object with ``state_dict()`` and ``load_state_dict()``, or a
                list of such.
            scheduler: of any optimizer.
            loader: for its position in the data.
            extra: tensors, numbers, strings, lists and dicts of them.
            keep: remove all but so many checkpoints, the oldest first.
            step: the number N; default: :attr:`updates`. A checkpoint of the
                same number is replaced.

        Returns:
            The folder of the step; its URI if ``path`` is one.

        Raises:
            InvalidArgument: a state that ``torch.load(weights_only=True)``
                would refuse.
            StorageError: writing failed, another save into ``path`` is under
                way, or a server does not see that folder.
            Unavailable, DeadlineExceeded: a server or a rank was lost.
            UpdatesLost: a server lost updates that were not told of yet;
                nothing was saved. Saved again, the rows are as they are.
        """
        from persia.checkpoint import saving

        return saving.save(
            self,
            path,
            model=model,
            optimizer=optimizer,
            scheduler=scheduler,
            loader=loader,
            extra=extra,
            keep=keep,
            step=step,
        )

    def load(
        self,
        path: str | os.PathLike[str],
        *,
        model: Any = None,
        optimizer: Any = None,
        scheduler: Any = None,
        loader: Any = None,
        step: int | None = None,
        strict: bool = True,
        random_states: bool = True,
        resume: str = "rollback",
    ) -> Checkpoint:
        """Reads a checkpoint: rows, counters, and the states of what is given.

        Every byte is verified first. If anything does not fit or fails, the
        store and all objects are as before. After a load at staleness 0,
        training gives the same bits as if it had not been interrupted
        (eviction excepted). No other thread may train meanwhile.

        In a job of several ranks all call it together, outside of any pass
        over a DataLoader, and all succeed or raise the same error. Any number
        of shards and ranks reads what any number wrote; positions in the data
        (``loader``) belong to the number of ranks that saved.

        Args:
            path: a root, then its LATEST is read, or the folder of a step;
                or the URI of either.
            model, optimizer, scheduler, loader: as they were saved.
            step: of the checkpoint in the root; default: LATEST.
            strict: False: tables that the checkpoint or the store does not
                have are left as they are, else an error.
            random_states: whether the global random generators of torch,
                Python and numpy are set, too.
            resume: "rollback": rows and all else are as they were saved.
                "continue", after ranks have failed and servers have not: the
                servers keep the rows that they have; updates that are
                repeated because the position in the data went back are not
                applied again, but counted
                (``stats()["client"]["duplicates"]``).

        Returns:
            Folder, step, rows loaded per table, and what was saved as
            ``extra``.

        Raises:
            SchemaMismatch: tables, dims, dtypes, optimizers or states differ.
            CorruptFile: a file is truncated or altered.
            StorageError: there is no checkpoint, or it cannot be read.
            InvalidArgument: "continue" where the rows were in processes that
                have ended.
            UpdatesLost: "continue" with servers that have lost updates which
                the checkpoint has (``Store(lost="continue")``: only counts).
        """
        from persia.checkpoint import saving

        self._check_writable("load")
        return saving.load(
            self,
            path,
            model=model,
            optimizer=optimizer,
            scheduler=scheduler,
            loader=loader,
            step=step,
            strict=strict,
            random_states=random_states,
            resume=resume,
        )

    def close(self) -> None:
        """Ends the store after its last update is applied; frees embedded
        tables. With tables on the ranks it returns when all ranks have
        called it.

        Later use raises :class:`persia.errors.Closed`. An error of an update
        that was applied in the background is raised, see :meth:`flush`; those
        that have not begun then are dropped. Interrupted (Ctrl-C) while it
        waits for servers it gives up the updates that are under way.
        """
        self._close(failed=False)

    def _close(self, failed: bool) -> None:
        try:
            with contextlib.suppress(errors.Closed, errors.UsedAfterFork):
                self._finish()
        finally:
            self._connection.close(failed)

    def _finish(self) -> None:
        try:
            self._core.finish()
        except errors.PersiaError as error:
            try:
                self._core.finish()  # there may be lost updates, too
            except errors.PersiaError as another:
                error.add_note(f"{type(another).__name__}: {another}")
            raise

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._connection.closed

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, *exception: object
    ) -> None:
        if kind is None:
            self.close()
            return
        with contextlib.suppress(errors.PersiaError):
            self._close(failed=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> Store:
        warnings.warn(
            "a copy of a module shares the tables of its persia.Store: "
            "training one changes both. Give the copy a store of its own if "
            "that is not wanted",
            stacklevel=2,
        )
        return self

    def __copy__(self) -> Store:
        return self

    def __getstate__(self) -> dict[str, Any]:
        """The configuration alone: rows go into checkpoints, keys and tokens
        come from the environment."""
        if not self.remote and any(
            self._core.stats(t.number)["rows"] for t in self._tables.values()
        ):
            warn(
                "a pickle of a persia.Store (torch.save(model), spawn) has no "
                "rows: its copy begins with initial ones. Save them with "
                "store.save(path), and load them into the copy with "
                "store.load(path)"
            )
        o = self._optimizer
        return {
            "optimizer": (type(o), dict(o.defaults)),
            "arguments": (
                self.seed,
                self.update,
                self.memory_limit,
                self.nonfinite,
                self._threads,
                dataclasses.replace(self._settings, security=None),
                self.grad_division,
            ),
            "tables": [t.config for t in self._tables.values()],
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._configure(_optimizer(state["optimizer"]), *state["arguments"])
        for config in state["tables"]:
            self._declare(config)

    def __repr__(self) -> str:
        where = (
            f", servers={self._connection.addresses}" if self.remote else ""
        )
        return (
            f"Store(tables={sorted(self._tables)}, "
            f"optimizer={self._optimizer!r}, update={self.update!r}{where})"
        )


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


def _optimizer(
    spec: tuple[type[optim.SparseOptimizer], dict[str, Any]],
) -> optim.SparseOptimizer:
    cls, defaults = spec
    return cls(**defaults)
