"""The :class:`Store`: tables, optimizer and updates of one process."""

from __future__ import annotations

import contextlib
import copy
import secrets
import threading
import warnings
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from persia import _core, errors, optim
from persia._library import HELD, SHAPES, versions
from persia.configs import TableConfig, _word, as_config, float_rows

if TYPE_CHECKING:
    import os
    from pathlib import Path

    import pyarrow

    from persia.checkpoint import Checkpoint

__all__ = ["Store"]

_NONFINITE = {"raise": _core.NONFINITE_RAISE, "skip": _core.NONFINITE_SKIP}


@dataclass(frozen=True)
class _Table:
    """A declared table: its number in the C store, and what declared it."""

    number: int
    config: TableConfig


def _after_backward(store: weakref.ref[Store]) -> Any:
    """The anchor's hook: runs once a backward, after all its pushes."""

    def hook(anchor: Tensor) -> None:
        anchor.grad = None
        owner = store()
        if owner is not None:
            owner._backward_done()

    return hook


class Store:
    """Embedding tables without bounds, in this process.

    Modules that are given the same store and table name share rows. All
    methods may be called from any thread. In a forked child every use of a
    table raises :class:`persia.errors.UsedAfterFork`.

    Args:
        optimizer: a ``persia.optim`` object; it becomes :attr:`optimizer`.
            Default: ``persia.optim.Adagrad()``.
        seed: of initial values, admission and rounding, 0 to 2**64 - 1.
        update: "backward": the gradients that one ``backward()`` reaches are
            summed per id and applied at its end. "step": those of any number
            of backwards are applied by ``store.optimizer.step()``
            (accumulation, GradScaler, clipping of the common norm).
        memory_limit: bytes of all tables; beyond it updates raise
            LimitReached. None: no limit.
        nonfinite: a gradient that is NaN or infinite: "raise" changes no row
            of the update and raises NonFiniteGradient, "skip" leaves out the
            rows concerned and counts them.
        threads: that lookups and updates use; default:
            ``torch.get_num_threads()``.
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
        if not 0 <= seed < 2**64:
            raise errors.InvalidArgument(
                f"seed is {seed}, need 0 to 2**64 - 1"
            )
        if memory_limit is not None and memory_limit < 1:
            raise errors.InvalidArgument(
                f"memory_limit is {memory_limit}, need bytes or None"
            )
        self._configure(
            optimizer, seed, update, memory_limit, nonfinite, threads
        )

    def _configure(
        self,
        optimizer: optim.SparseOptimizer,
        seed: int,
        update: str,
        memory_limit: int | None,
        nonfinite: str,
        threads: int | None,
    ) -> None:
        self.update = update
        self.seed = seed
        self.nonfinite = nonfinite
        self.memory_limit = memory_limit
        self._threads = threads
        self._core = _core.Store(
            torch.get_num_threads() if threads is None else threads,
            memory_limit or 0,
        )
        self._handle: int = self._core.handle
        SHAPES[self._handle] = {}
        weakref.finalize(self, SHAPES.pop, self._handle)
        if update == "step":
            HELD[self._handle] = []
            weakref.finalize(self, HELD.pop, self._handle)
        self._lock = (
            threading.Lock()
        )  # guards _tables and the groups of the optimizer
        self._tables: dict[str, _Table] = {}
        self._counts = {
            "gradients_discarded": 0,
            "cuda_ids_copied": 0,
        }
        self._lineage = secrets.token_hex(8)
        self._checkpoint_id = ""
        optimizer._bind(self)
        self._optimizer = optimizer
        # The anchor requires grad, so that autograd visits every lookup; its
        # gradient arrives after all pushes of a backward. Neither Parameter
        # nor buffer: DDP, .to() and state_dict() do not know it.
        self._anchor = torch.zeros(1, requires_grad=True)
        hook = _after_backward(weakref.ref(self))
        register: Any = self._anchor.register_post_accumulate_grad_hook
        register(hook)
        self._still = torch.zeros(
            1
        )  # in its place where no gradient is wanted
        self._no_batch = torch.zeros(2, dtype=torch.int64)

    # ---- optimizer and updates

    @property
    def optimizer(self) -> optim.SparseOptimizer:
        """The optimizer of all tables, with one group a table."""
        return self._optimizer

    @property
    def updates(self) -> int:
        """Updates applied so far; Adam's step t of the last one."""
        self._core.settle()
        return self._core.updates()

    def _backward_done(self) -> None:
        if self.update == "backward":
            self._apply(None, all_threads=False)
        else:
            self._optimizer._set_probes(self._core.finite())

    def _apply(
        self, factors: list[float] | None, *, all_threads: bool
    ) -> None:
        """Applies the gradients that are held as one update."""
        held = HELD.get(self._handle, [])
        changed = any(versions(*t) != version for t, version in held)
        held.clear()
        if changed:
            self._discard()
            raise errors.TicketError(
                "a gradient, ids or weights were changed in place between "
                "backward() and optimizer.step(); the gradients that waited "
                "are dropped. Change a copy, or step first"
            )
        # A scheduler asks whether the optimizer made a step before its own.
        self._optimizer._opt_called = True  # type: ignore[attr-defined]
        self._core.apply(self._optimizer.param_groups, factors, all_threads)

    def _discard(self) -> None:
        """Drops all gradients that are held."""
        HELD.get(self._handle, []).clear()
        self._counts["gradients_discarded"] += self._core.discard(True)

    def _grad_norm_squared(self) -> float:
        """Of the gradients that wait, summed per id and unscaled."""
        if self.update != "step":
            raise errors.InvalidArgument(
                "clip_grad_norm_ needs the gradients before they are "
                "applied; make the store "
                'with update="step"'
            )
        return self._core.norm(self._optimizer._factors())

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
        """
        self._drop_unfinished()
        self._core.flush(timeout)

    def _drop_unfinished(self) -> None:
        """Drops what a backward left that an exception ended.

        Its gradients are not whole, and the next backward of this thread
        must not apply them.
        """
        if (
            self.update == "backward"
            and self._core.held(False)
            and torch._C._current_graph_task_id() == -1
        ):
            self._counts["gradients_discarded"] += self._core.discard(False)

    # ---- tables

    def _declare(self, config: TableConfig) -> _Table:
        """The table of a config, made if new; contradictions raise."""
        template = config.optimizer or self._optimizer
        with self._lock:
            number, created = self._core.declare(
                **config._native(self.seed),
                optimizer=_core.OPTIMIZERS.index(template.algorithm),
                momentum=int(template.defaults.get("momentum", 0.0) > 0),
                state_init=template.defaults.get(
                    "initial_accumulator_value", 0.0
                ),
                nonfinite=_NONFINITE[self.nonfinite],
            )
            if created:
                self._tables[config.name] = _Table(number, config)
                self._optimizer._add_table(config.name, template, config.lr)
            table = self._tables[config.name]
            if config.lr is not None and table.config.lr != config.lr:
                raise errors.SchemaMismatch(
                    f"table {config.name!r}: lr is {config.lr}, but was first "
                    f"declared as {table.config.lr}; give both the same"
                )
        return table

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

    def _find(self, table: str) -> _Table:
        try:
            return self._tables[table]
        except KeyError:
            raise errors.InvalidArgument(
                f"no table {table!r} in this store; it has "
                f"{sorted(self._tables)}"
            ) from None

    @property
    def tables(self) -> dict[str, TableConfig]:
        """The configuration of each table, by name."""
        return {name: copy.copy(t.config) for name, t in self._tables.items()}

    def add_table(self, config: TableConfig) -> None:
        """Makes a table early: a scheduler wants all groups at its start."""
        self._declare(as_config(config, TableConfig))

    @staticmethod
    def _ids(ids: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
        t = torch.as_tensor(ids)
        if t.numel() == 0:
            t = t.to(torch.int64)
        if t.dtype not in (
            torch.int64,
            torch.int32,
            torch.int16,
            torch.uint8,
            torch.int8,
        ):
            raise errors.DtypeError(
                f"ids have dtype {t.dtype}, need torch.int64"
            )
        if t.dim() != 1:
            raise errors.ShapeError(
                f"ids have shape {tuple(t.shape)}, need one dimension"
            )
        return t.to(device="cpu", dtype=torch.int64).contiguous().numpy()

    def _get(self, table: str, ids: Any) -> tuple[Tensor, Tensor, Tensor]:
        """(vectors, state, found) of ids."""
        t = self._find(table)
        wanted = self._ids(ids)
        n = len(wanted)
        vectors = torch.empty(n, t.config.embedding_dim)
        state = torch.empty(n, self._core.state_floats(t.number))
        found = torch.empty(n, dtype=torch.uint8)
        self._core.get(
            t.number, wanted, vectors.numpy(), state.numpy(), found.numpy()
        )
        return vectors, state, found.bool()

    def rows(self, table: str, ids: Any) -> Tensor:
        """The vectors of ``ids``; the table is not changed.

        Args:
            table: its name.
            ids: integers [n].

        Returns:
            float32 [n, embedding_dim]; an id without a row has its initial
            value.
        """
        return self._get(table, ids)[0]

    def contains(self, table: str, ids: Any) -> Tensor:
        """Which of ``ids`` (integers [n]) have a row: bool [n]."""
        return self._get(table, ids)[2]

    def set_rows(
        self, table: str, ids: Any, values: Any, state: Any = None
    ) -> None:
        """Creates or replaces rows.

        Args:
            table: its name.
            ids: integers [n].
            values: floating [n, embedding_dim], finite.
            state: floating [n, state_floats] of the optimizer; None: as in a
                new row.
        """
        t = self._find(table)
        wanted = self._ids(ids)
        n = len(wanted)
        vectors = float_rows(
            "values", values, (n, t.config.embedding_dim)
        ).numpy()
        if state is not None:
            floats = self._core.state_floats(t.number)
            state = float_rows("state", state, (n, floats)).numpy()
        self._core.set(t.number, wanted, vectors, state)

    def ids(self, table: str) -> Tensor:
        """The ids of all rows: int64 [rows], in no particular order."""
        data = self._core.ids(self._find(table).number)
        return torch.from_numpy(np.frombuffer(bytearray(data), dtype=np.int64))

    def explain(self, table: str, id: int) -> dict[str, Any]:
        """What the store knows of one id, for a person to read."""
        vectors, state, found = self._get(table, torch.tensor([id]))
        t = self._find(table)
        stats = self._core.stats(t.number)
        out: dict[str, Any] = {
            "table": table,
            "id": int(id),
            "shard": 0,
            "present": bool(found[0]),
            "norm": float(vectors[0].norm()),
            "trainable": t.config.trainable,
        }
        if out["present"]:
            out["state_norm"] = float(state[0].norm())
            return out
        reasons = ["it occurred in no update yet"]
        if stats["refused"]:
            reasons.append(
                f"it was not admitted (admission={t.config.admission!r})"
            )
        if stats["evicted"]:
            reasons.append(f"it was evicted (capacity={t.config.capacity})")
        out["why"] = ", or ".join(reasons)
        return out

    def stats(self) -> dict[str, Any]:
        """Counters of the store and, under "tables", of each table.

        The store's: updates (applied), pending (updates that threads of the
        store have yet to apply), updates_failed, held (gradients that wait
        for an update), memory and memory_limit (bytes), gradients_discarded,
        cuda_ids_copied.

        A table's: rows, bytes, row_bytes, pushes (updates that touched it),
        pulled and missed (ids looked up; those without a row), created,
        evicted, refused, nonfinite (row gradients left out).

        "loader", of all passes of :class:`persia.DataLoader`: batches given
        out; forwards prefetched and (while a pass was open) not_prefetched;
        how often the loop waited for a permit; batches by their end if they
        were not trained: abandoned, skipped, read (no forward with gradient),
        dropped (the update failed); staleness: {k: batches looked up while k
        earlier ones were open}.
        """
        used, _ = self._core.memory()
        _, failed, pending = self._core.counts()
        return {
            "updates": self._core.updates(),
            "pending": pending,
            "updates_failed": failed,
            "held": self._core.held(True),
            "memory": used,
            "memory_limit": self.memory_limit,
            **self._counts,
            "loader": _core.ahead_stats(self._handle),
            "tables": {
                n: self._core.stats(t.number) for n, t in self._tables.items()
            },
        }

    def clear(self, table: str | None = None) -> None:
        """Removes all rows of a table (None: of all); it stays declared."""
        chosen = (
            list(self._tables.values())
            if table is None
            else [self._find(table)]
        )
        for t in chosen:
            self._core.clear(t.number)

    def to_torch(self, table: str) -> tuple[Tensor, torch.nn.EmbeddingBag]:
        """A table as a torch module.

        Returns:
            ids, int64 [rows], sorted, and an ``EmbeddingBag`` whose row i is
            that of ids[i].
        """
        config = self._find(table).config
        ids = self.ids(table).sort().values
        weight = self.rows(table, ids) if len(ids) else None
        bag = torch.nn.EmbeddingBag(
            max(len(ids), 1),
            config.embedding_dim,
            mode="mean"
            if _word(getattr(config, "pooling", "")) == "mean"
            else "sum",
            _weight=weight,
        )
        return ids, bag

    def to_arrow(self, table: str, *, state: bool = False) -> pyarrow.Table:
        """All rows of a table as a ``pyarrow.Table``, sorted by id.

        Columns: ``id`` int64, ``vector`` lists of ``embedding_dim`` float32
        and, with ``state=True``, ``state`` lists of float32 (not there if the
        optimizer keeps none).
        """
        from persia import arrow

        return arrow.to_arrow(self, table, state)

    def set_arrow(self, table: str, rows: Any) -> None:
        """Creates or replaces rows, as :meth:`set_rows`.

        Args:
            table: its name.
            rows: a ``pyarrow.Table`` or ``RecordBatch`` with the columns of
                :meth:`to_arrow`; without ``state``, that of new rows. Other
                columns are ignored.

        Raises:
            InvalidArgument: a column is missing or has nulls.
            DtypeError, ShapeError: a column of another type or width.
        """
        from persia import arrow

        arrow.from_arrow(self, table, rows)

    # ---- life

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
            StorageError: writing failed, or another save into ``path`` is
                under way.
        """
        from persia import checkpoint

        return checkpoint.save(
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
    ) -> Checkpoint:
        """Reads a checkpoint: rows, counters, and the states of what is given.

        Every byte is verified first. If anything does not fit or fails, the
        store and all objects are as before. After a load at staleness 0,
        training gives the same bits as if it had not been interrupted
        (eviction excepted). No other thread may train meanwhile.

        Args:
            path: a root, then its LATEST is read, or the folder of a step;
                or the URI of either.
            model, optimizer, scheduler, loader: as they were saved.
            step: of the checkpoint in the root; default: LATEST.
            strict: False: tables that the checkpoint or the store does not
                have are left as they are, else an error.
            random_states: whether the global random generators of torch,
                Python and numpy are set, too.

        Returns:
            Folder, step, rows per table, and what was saved as ``extra``.

        Raises:
            SchemaMismatch: tables, dims, dtypes, optimizers or states differ.
            CorruptFile: a file is truncated or altered.
            StorageError: there is no checkpoint, or it cannot be read.
        """
        from persia import checkpoint

        return checkpoint.load(
            self,
            path,
            model=model,
            optimizer=optimizer,
            scheduler=scheduler,
            loader=loader,
            step=step,
            strict=strict,
            random_states=random_states,
        )

    def close(self) -> None:
        """Frees the tables, after the last update is applied.

        Later use raises :class:`persia.errors.Closed`. An error of an update
        that was applied in the background is raised, see :meth:`flush`.
        """
        try:
            with contextlib.suppress(errors.Closed, errors.UsedAfterFork):
                self._core.flush(None)
        finally:
            self._core.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, *exception: object
    ) -> None:
        if kind is None:
            self.close()
            return
        with contextlib.suppress(errors.PersiaError):
            self.close()

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
        """The configuration alone: rows go into checkpoints."""
        o = self._optimizer
        return {
            "optimizer": (type(o), dict(o.defaults)),
            "arguments": (
                self.seed,
                self.update,
                self.memory_limit,
                self.nonfinite,
                self._threads,
            ),
            "tables": [t.config for t in self._tables.values()],
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._configure(_optimizer(state["optimizer"]), *state["arguments"])
        for config in state["tables"]:
            self._declare(config)

    def __repr__(self) -> str:
        return (
            f"Store(tables={sorted(self._tables)}, "
            f"optimizer={self._optimizer!r}, update={self.update!r})"
        )


def _optimizer(
    spec: tuple[type[optim.SparseOptimizer], dict[str, Any]],
) -> optim.SparseOptimizer:
    cls, defaults = spec
    return cls(**defaults)
