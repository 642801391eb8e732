"""The :class:`Store`: tables, optimizer and updates of one process."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from persia import errors, optim
from persia.base.check import kind, number, whole
from persia.base.warning import warn
from persia.distributed.addresses import namespace_of
from persia.distributed.cluster import Settings
from persia.store.configs import (
    TableConfig,
    as_config,
)
from persia.store.engine import NONFINITE, Arguments, Engine
from persia.store.rows import Rows
from persia.store.state import stores
from persia.store.stats import Stats

if TYPE_CHECKING:
    from pathlib import Path

    from persia.checkpoint import Checkpoint
    from persia.distributed.security import Security


class Store(Rows, Stats):
    """Embedding tables without bounds.

    A table is that of one module; modules that are given the same store and
    table name, and ``share=True``, share its rows. All
    methods may be called from any thread; backwards of several threads are
    updates of their own (``update="step"``: no other thread may be within a
    backward at the step). In a forked child every use of a table raises
    :class:`persia.errors.UsedAfterFork`.

    The tables are in this process (*embedded*), on parameter servers, or on
    the ranks of the job, each of which serves its part of every table to the
    others. Then updates are applied while training continues, within the
    staleness of the :class:`persia.DataLoader` (without one: at most 64
    wait), and reads of rows wait only for updates of this process.

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
            ``torch.get_num_threads()``, and no more than the processors that
            this process may use.
        servers: where the tables are: "embedded"; "ranks", for which
            torch.distributed needs its process group first; or addresses
            "host:port", several with commas between or as a list. A name with
            several addresses stands for so many servers. Default: the
            environment variable PERSIA_SERVERS, else "ranks" in a job of
            several ranks, else "embedded".
        namespace: servers: of the tables; all users of them give the same.
            Default: the environment variable PERSIA_NAMESPACE, else
            "default".
        security: servers: TLS and tokens; default: as the environment says,
            see :meth:`persia.distributed.Security.from_environment`.
        timeout: seconds after which a server that does not answer is an
            error.
        wire_dtype: of vectors and gradients in messages: "fp32", "fp16" (with
            a scale for each vector) or "bf16".
        lost: what to do about updates that a server had acknowledged and
            then lost, because it was started again: "raise" UpdatesLost
            once, or "continue" and count them.
        rank, world_size: of this process in the job; default: as
            torch.distributed or torchrun says.
        job: what this process is part of; default: the run id of torchrun or
            of ``persia launch``, else a random name that the ranks share. A
            rank's updates are numbered in a stream of its job: of two
            processes that open a store as one rank of one job the later one
            continues, and updates of the earlier one raise Closed. Stores of
            other jobs train the same tables beside it.
        read_only: the store looks at rows and changes none: updates,
            assignments and ``load`` raise InvalidArgument.
        durable: embedded tables: what an applied update survives. "off":
            nothing, without a checkpoint; "process": the end of this process
            by whatever signal; "disk": a power cut, too. A store that is made
            with the same ``log`` has all updates that were applied, see
            :doc:`/howto/durable`.
        log: durable: the folder of the log, which one store has open at a
            time.
        log_limit: durable: bytes of the log, at least 65,536, from which on
            the rows are written beside it. Default: 1 GiB.
        grad_division: whether gradients are divided by ``world_size``, so
            that an update is the mean over the ranks, as that of the dense
            parameters under DistributedDataParallel.

    Raises:
        Unavailable, DeadlineExceeded: a server cannot be reached, or the log
            is open in another store or server.
        SchemaMismatch: the servers are not all shards of one namespace, or
            the log is of other tables.
        CorruptFile: the log is damaged.
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
        namespace: str | None = None,
        security: Security | None = None,
        timeout: float = 60.0,
        wire_dtype: str = "fp32",
        lost: str = "raise",
        rank: int | None = None,
        world_size: int | None = None,
        job: str | None = None,
        read_only: bool = False,
        durable: str = "off",
        log: str | os.PathLike[str] | None = None,
        log_limit: int | None = None,
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
        if nonfinite not in NONFINITE:
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
        if log is not None:
            kind("log", log, (str, os.PathLike), "a folder")
            log = os.fspath(log)
        if log_limit is not None:
            log_limit = whole("log_limit", log_limit, 1 << 16, 2**63 - 1)
        kind("grad_division", grad_division, bool, "True or False")
        settings = Settings(
            servers,
            namespace_of(namespace),
            security,
            timeout,
            wire_dtype,
            lost,
            rank,
            world_size,
            job,
            read_only,
            durable,
            log,
            log_limit,
        )
        self._open(
            optimizer,
            Arguments(
                seed,
                update,
                memory_limit,
                nonfinite,
                threads,
                settings,
                grad_division,
            ),
        )

    def _open(
        self, optimizer: optim.SparseOptimizer, arguments: Arguments
    ) -> None:
        self._engine = Engine(optimizer, arguments)
        optim.bind(optimizer, self, self._engine)
        stores.add(self)

    # ---- arguments

    @property
    def update(self) -> str:
        """ "backward" or "step", when gradients are applied."""
        return self._engine.arguments.update

    @property
    def seed(self) -> int:
        """Of initial values, admission and rounding."""
        return self._engine.arguments.seed

    @property
    def nonfinite(self) -> str:
        """ "raise" or "skip", for a gradient that is NaN or infinite."""
        return self._engine.arguments.nonfinite

    @property
    def memory_limit(self) -> int | None:
        """The most bytes of all tables, or None without a limit."""
        return self._engine.arguments.memory_limit

    @property
    def grad_division(self) -> bool:
        """Whether gradients are divided by :attr:`world_size`."""
        return self._engine.arguments.grad_division

    # ---- optimizer and updates

    @property
    def optimizer(self) -> optim.SparseOptimizer:
        """The optimizer of all tables, with one group a table."""
        return self._engine.optimizer

    @property
    def rank(self) -> int:
        """Of this process among those that train the tables."""
        return self._engine.connection.job.rank

    @property
    def world_size(self) -> int:
        """How many processes train the tables; 1 if they are embedded."""
        return self._engine.connection.job.world

    @property
    def updates(self) -> int:
        """Updates applied so far; Adam's step t of the last one."""
        self._engine.core.settle()
        if self.remote:  # other ranks make some, too
            return int(self._ask_stats(0)["updates"])
        return self._engine.core.updates()

    def flush(self, timeout: float | None = None) -> None:
        """Returns when every gradient of a finished backward is in the tables.

        With ``update="step"`` gradients that wait for ``optimizer.step()``
        still wait.

        Args:
            timeout: seconds; None: as long as it takes.

        Raises:
            DeadlineExceeded: after ``timeout``; the updates continue.
            PersiaError: an update that was applied in the background failed;
                its error, once.
            UpdatesLost: at the first flush of rank 0 on servers: ranks that
                this job has no longer had sent updates to some servers only.
        """
        if timeout is not None:
            timeout = number("timeout", timeout, 1e-9, 1e9)
        engine = self._engine
        engine.drop_unfinished()
        engine.core.flush(timeout)
        engine.core.check_lost()
        engine.connection.inherit(timeout)

    # ---- tables

    @property
    def tables(self) -> dict[str, TableConfig]:
        """The configuration of each table, by name."""
        return {
            name: copy.copy(t.config)
            for name, t in self._engine.tables.items()
        }

    def add_table(self, config: TableConfig) -> None:
        """Makes a table early: a scheduler wants all groups at its start."""
        self._engine.declare(as_config(config, TableConfig))

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
        self._engine.check_writable("drop")
        self._engine.drop(table)

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

        All rows form a consistent snapshot, with the state of their optimizer;
        other threads may train meanwhile. The folder is there whole or not at
        all: an interrupted save leaves the checkpoint before it, and the next
        save removes what was left. Gradients that wait for
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
            keep: remove all but so many checkpoints, the oldest first, of
                those of this training: what it saved, and what the training
                saved whose checkpoint it has loaded. Those of other trainings
                stay.
            step: the number N; default: :attr:`updates`. A checkpoint of the
                same number is replaced.

        Returns:
            The folder of the step; its URI if ``path`` is one.

        Raises:
            InvalidArgument: a state that ``torch.load(weights_only=True)``
                would refuse.
            StorageError: writing failed, another save into ``path`` has
                not ended, or a server does not see that folder.
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
                have, or that differ, are left as they are, as are parameters
                and their state in the optimizer that do not fit by name and
                shape; one warning names them. True: an error.
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

        self._engine.check_writable("load")
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
        waits for servers it gives up the updates that have begun.
        """
        self._close(failed=False)

    def _close(self, failed: bool) -> None:
        try:
            with contextlib.suppress(errors.Closed, errors.UsedAfterFork):
                self._engine.finish()
        finally:
            self._engine.connection.close(failed)

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._engine.connection.closed

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

    def copy(self) -> Store:
        """Another store with the same tables, rows and optimizer state.

        ``copy.deepcopy(model)`` takes it for the tables of the copied model:
        to train one changes nothing of the other. Updates of finished
        backwards are in the copy; gradients that wait for
        ``store.optimizer.step()`` are not. The rows pass through a temporary
        folder (environment variable TMPDIR).

        Returns:
            A store in this process, with the arguments of this one.

        Raises:
            InvalidArgument: the rows are on servers or ranks, where a copy
                would need tables of other names.
            StorageError: the temporary folder has no room.
        """
        from persia.checkpoint import copying

        if not self._engine.connection.inside:
            raise errors.InvalidArgument(
                f"a copy of {self!r}, or of a model that has it: the rows are "
                "not in this process alone, and a copy would need tables of "
                "other names there. Make the other model by its class, with "
                'Store(servers="embedded") or another namespace=, and load a '
                "checkpoint into it with store.load(path)"
            )
        other = Store.__new__(Store)
        other.__setstate__(self._configuration(servers="embedded"))
        copying.copy_rows(self, other)
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> Store:
        return self.copy()

    def __copy__(self) -> Store:
        return self

    def __getstate__(self) -> dict[str, Any]:
        """The configuration alone: rows go into checkpoints, keys and tokens
        come from the environment."""
        engine = self._engine
        if engine.connection.inside and any(
            table["rows"] for table in self.stats()["tables"].values()
        ):
            warn(
                "a pickle of a persia.Store (torch.save(model), spawn) has no "
                "rows: its copy begins with initial ones. Save them with "
                "store.save(path), and load them into the copy with "
                "store.load(path)"
            )
        return self._configuration()

    def _configuration(self, **settings: Any) -> dict[str, Any]:
        engine = self._engine
        o = engine.optimizer
        return {
            "optimizer": (type(o), dict(o.defaults)),
            "arguments": dataclasses.replace(
                engine.arguments,
                settings=dataclasses.replace(
                    engine.arguments.settings,
                    security=None,
                    # A log is of one store.
                    durable="off",
                    log=None,
                    log_limit=None,
                    **settings,
                ),
            ),
            "tables": [t.config for t in engine.tables.values()],
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._open(_optimizer(state["optimizer"]), state["arguments"])
        for config in state["tables"]:
            self._engine.declare(config)

    def __repr__(self) -> str:
        where = (
            f", servers={self._engine.connection.addresses}"
            if self.remote
            else ""
        )
        return (
            f"Store(tables={list(self._engine.tables)}, "
            f"optimizer={self.optimizer!r}, update={self.update!r}{where})"
        )


def _optimizer(
    spec: tuple[type[optim.SparseOptimizer], dict[str, Any]],
) -> optim.SparseOptimizer:
    cls, defaults = spec
    return cls(**defaults)
