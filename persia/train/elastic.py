"""Training on servers with ranks that join and leave: those that torchrun
starts again, as more or fewer, continue with the rows that the servers have.

The servers know which updates they have had, so each batch is trained once.
The dense part is the one that a rank which is still there had, or that of a
file which the ranks write every few steps.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from persia import _core, errors
from persia.base.check import whole
from persia.base.warning import warn
from persia.checkpoint.dense import (
    TableSettings,
    load_state,
    parts_of,
    states_of,
)
from persia.checkpoint.ledgers import Numbers, merge
from persia.checkpoint.ranks import Ranks
from persia.checkpoint.recent import DenseFiles, Moment, decoded
from persia.checkpoint.saving import together
from persia.checkpoint.shards import rows_of
from persia.data import Dataset, Kafka
from persia.data.sharing import Shared, Sharing
from persia.distributed.cluster import has_name
from persia.loop.stream import Stream
from persia.store.engine import engine_of
from persia.store.store import Store
from persia.train.trainer import Every, Progress, Trainer

_GAP = 8  # lives in a row that end before their first update
_AFTER_ALL = 2**64 - 1  # number: behind those that servers have
_SKEW = 5.0  # seconds between the signals of ranks that end together
_STATE = "_extra_state"  # of modules with tables: names their rows


class Continued(NamedTuple):
    """Where ranks continue that were started again.

    Attributes:
        step: of the dense part.
        epoch: from 0.
        ranks: how many there are, and how many there were before.
        behind: steps of which the rows have updates and the dense part has
            none; None: data loaders send the batches, it is at most the
            number of steps between two files.
        lost: a line for updates that are lost.
    """

    step: int
    epoch: int
    ranks: tuple[int, int]
    behind: int | None
    lost: Sequence[str]

    def lines(self) -> list[str]:
        """The same for people."""
        now, before = self.ranks
        text = (
            f"{now} rank{'s' if now > 1 else ''}, {before} before: the rows "
            f"stay, and the dense part is that of step {self.step:,}"
        )
        if self.behind:
            text += f", which lacks {self.behind:,} steps that the rows have"
        return [text, *self.lost]


class Elastic:
    """A training whose ranks join and leave, with its rows on servers.

    ``torchrun --nnodes 1:4`` ends all ranks when a machine joins or is lost,
    and starts as many as there are then. With this object they continue: the
    rows stay as they are, each batch is trained once, and the dense part is
    at most ``every`` steps older than the rows. It is that of a rank that is
    still there; else that of the last file. Files lie in the folder for
    temporary files of each machine. All ranks call the same methods.

    Args:
        trainer: with the model and the optimizer, before its first step.
        store: of the model's tables, on servers that outlive the ranks.
        data: the share of this rank; or a Stream, whose data loaders know
            what is trained.
        every: steps between two files.
        folder: that holds the files, of this machine.

    Raises:
        InvalidArgument: the rows are not on servers, the job has no name
            that a restart keeps, or the batches have no place in the data.
    """

    def __init__(
        self,
        trainer: Trainer,
        store: Store,
        data: Dataset | Stream,
        *,
        every: int = 100,
        folder: str | None = None,
    ) -> None:
        self._trainer = trainer
        self._store = store
        self._engine = engine_of(store)
        self._every = whole("every", every, 1, 2**62)
        self._check(data)
        connection = self._engine.connection
        self._run = connection.run
        self._files = DenseFiles(connection.namespace, self._run, folder)
        self._life = 0
        self._lineages: list[int] = []
        self._places: list[int] = []  # of the ranks, where a pass began
        self._base = 0  # batches of the pass that an earlier run had trained
        self._signalled = False
        self.data: Shared | Stream = (
            data
            if isinstance(data, Stream)
            else Shared(data, self._pass_begins)
        )
        """What :meth:`persia.train.Trainer.fit` is given."""
        self.extra: Callable[[], Any] = _nothing
        """Gives what else a file keeps."""
        self.found: Any = None
        """What that was, of the file that was found."""

    def _check(self, data: Dataset | Stream) -> None:
        connection, trainer = self._engine.connection, self._trainer
        if not connection.remote or connection.hosting is not None:
            raise errors.InvalidArgument(
                "the tables of this store end with its ranks: ranks that "
                "join and leave need them on servers (`servers`), or a "
                "checkpoint to return to (`save`, `resume=auto`)"
            )
        shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
        if shared and restarts != "0":
            raise errors.InvalidArgument(
                "torchrun would give ranks that it starts again the addresses "
                "of those before: set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, "
                "and use its rendezvous c10d"
            )
        if not has_name(self._engine.arguments.settings):
            raise errors.InvalidArgument(
                "ranks that are started again need the name that their job "
                "had before: give torchrun one (rdzv-id), or set "
                "PERSIA_RUN_ID"
            )
        if isinstance(data, Stream):
            return
        if isinstance(data, Kafka):
            raise errors.InvalidArgument(
                "ranks that join and leave cannot share the partitions of "
                "topics: let data loaders read them (persia feed), and give "
                "a Stream"
            )
        if trainer.accumulate > 1 or self._store.update == "step":
            raise errors.InvalidArgument(
                "an update of several batches does not tell which of them "
                "is trained: leave accumulate out, make the store with "
                'update="backward", or let data loaders send the batches'
            )

    # ---- the beginning

    def begin(self, otherwise: bool = False) -> Continued | None:
        """Continues where the ranks before were; None: there were none.

        Args:
            otherwise: if there were some, and nothing of the dense part is
                left, the caller continues from a checkpoint: None, too.

        Raises:
            StorageError: there were some, and nothing of the dense part is
                left on these machines.
            UpdatesLost: servers have lost updates since, and the store is
                not made with ``lost="continue"``.
        """
        with self._ranks() as ranks:
            with ranks.agreed():
                mine = self._files.newest()
            there = ranks.gathered(mine)
            last = ranks.lead(self._last_life)
            at = max((one for one in there if one is not None), default=None)
            self._life = last + 1
            found = None
            if at is not None:
                self._life = max(last, at.life) + 1
                state = self._read(ranks, there.index(at), at)
                found = ranks.lead(lambda: self._judge(state, at, last))
            if found is None:
                if last >= 0 and not otherwise:
                    raise errors.StorageError(
                        f"the servers have updates of the job {self._run!r}, "
                        "and these machines have nothing of its dense part: "
                        "continue from a checkpoint, or give another training "
                        "a name of its own"
                    )
                return None
            assert at is not None
            sharing, behind, lost = found
            with ranks.agreed():
                self._load(state, at)
            self._start(ranks)
        trainer = self._trainer
        trainer.step, trainer.epoch = at.step, state["epoch"]
        trainer.batch = trainer.offset = 0
        self.found = state["extra"]
        if isinstance(self.data, Shared):
            sharings = [Sharing.of(*one) for one in state["sharings"]]
            sharings = [*sharings, Sharing.of(*sharing)]
            if len(sharings) > 1 or not sharings[0].is_new:
                self.data.continues(trainer.epoch, sharings)
        now = self._store.world_size
        world = now, state["world"]
        return Continued(at.step, trainer.epoch, world, behind, lost)

    def _read(self, ranks: Ranks, owner: int, at: Moment) -> dict[str, Any]:
        """The newest file, of the rank that has it."""
        with ranks.agreed():
            mine = self._files.read(at) if ranks.rank == owner else b""
        sent = ranks.gathered(mine)[owner]
        with ranks.agreed():
            return decoded(sent, self._files.folder)

    def restart(self) -> None:
        """The rows are those of a checkpoint that was loaded: the ranks begin
        there, whatever those before them had trained since."""
        with self._ranks() as ranks:
            self._start(ranks)

    def _ranks(self) -> Ranks:
        silence = self._engine.connection.timeout + 5
        return Ranks(alone=self._store.world_size == 1, silence=silence)

    def _stream(self, life: int, rank: int) -> int:
        return self._engine.connection.stream(self._name(life), rank)

    def _name(self, life: int) -> str:
        """The updates of each life have streams of their own, so that those
        of an earlier one tell what it has trained."""
        return f"{self._run}~{life}" if life else self._run

    def _ledgers(self, stream: int) -> list[Numbers]:
        return rows_of(self._engine.connection).ledgers(stream)

    def _last_life(self) -> int:
        """The last one of which servers have updates; -1: there is none."""
        last = life = -1
        while life < last + _GAP:
            life += 1
            if _has_any(self._ledgers(self._stream(life, 0))):
                last = life
        return last

    def _judge(
        self, state: Mapping[str, Any], at: Moment, last: int
    ) -> tuple[Sharing, int | None, list[str]] | None:
        """What servers have of the ranks before, whose updates end now."""
        lineages = rows_of(self._engine.connection).lineages()
        pairs = list(zip(lineages, state["lineages"], strict=False))
        same = sum(here == there for here, there in pairs)
        if not same or len(lineages) != len(state["lineages"]):
            return None
        if last > at.life:
            raise errors.StorageError(
                "the servers have updates of ranks whose machines are gone, "
                f"and with them the dense part; that of step {at.step:,} is "
                "older: continue from a checkpoint, on servers with its rows"
            )
        lost = []
        if same < len(lineages):
            lost.append(
                f"lost: {len(lineages) - same} of {len(lineages)} servers "
                "were started again without rows of this training"
            )
        sharing, behind, ended = Sharing((), ()), None, list[str]()
        if isinstance(self.data, Shared):
            ended = self._complete(at.life, state["world"])
            sharing, behind, missing = self._trained(state, at.life)
            if missing:
                lost.append(
                    f"lost: {missing:,} updates of the ranks before, counted "
                    "for each server that was started again without them"
                )
        if lost and self._engine.arguments.settings.lost == "raise":
            raise errors.UpdatesLost(
                f"{'; '.join(lost)}: continue from a checkpoint, or without "
                "them (`lost=continue`)"
            )
        return sharing, behind, [*lost, *ended]

    def _complete(self, life: int, ranks: int) -> list[str]:
        """Ends the streams of a life: updates that some servers have are
        completed at the others; a line for those."""
        handle = self._engine.handle
        for rank in range(ranks):
            _core.cluster_inherit(handle, self._stream(life, rank), rank, 0.0)
        try:
            _core.cluster_tell_lost(handle)
        except errors.UpdatesLost as error:
            return [f"lost: {error}"]
        return []

    def _trained(
        self, state: Mapping[str, Any], life: int
    ) -> tuple[Sharing, int, int]:
        """What the ranks before had trained of their pass, the steps of it
        that the dense part lacks, and updates that servers have lost."""
        places, base = state["places"], state["base"]
        batches = state["batch"] - base
        done, more, missing = [], [], 0
        for rank, place in enumerate(places):
            ledgers = self._ledgers(self._stream(life, rank))
            had = merge(ledgers).behind(place)
            for one in ledgers:
                ones = one.behind(place) & (1 << batches) - 1
                missing += batches - ones.bit_count()
            had |= (1 << batches) - 1
            first = (had ^ had + 1).bit_length() - 1  # that it lacks
            done.append(base + first)
            more.append(
                tuple(
                    base + i
                    for i in range(first, had.bit_length())
                    if had >> i & 1
                )
            )
        most = max(
            n + len(others) for n, others in zip(done, more, strict=True)
        )
        sharing = Sharing.of(done, more)
        return sharing, most - base - batches, missing

    def _load(self, state: Mapping[str, Any], at: Moment) -> None:
        for name, part in self._parts().items():
            there = state["states"].get(name)
            if there is None:
                raise errors.SchemaMismatch(
                    f"the dense part of step {at.step:,} has no state of the "
                    f"{name}"
                )
            load_state(part, there, name, self._files.folder)
        self._engine.training = state["training"]

    def _start(self, ranks: Ranks) -> None:
        """The updates of these ranks have streams of their own."""
        if not isinstance(self.data, Shared):
            return
        connection, core = self._engine.connection, self._engine.core
        if self._life:
            with ranks.agreed():
                connection.adopt(self._name(self._life))
                stream = connection.stream(connection.run, self._store.rank)
                _core.ckpt_go_on(self._engine.handle, stream, _AFTER_ALL, 0)
            core.set_t(max(ranks.gathered(core.t())))

    # ---- the files

    def _parts(self) -> dict[str, Any]:
        trainer = self._trainer
        return {
            "store": TableSettings(self._store.optimizer),
            "model": _WithoutRows(parts_of(model=trainer.model)["model"]),
            "optimizer": trainer.optimizer,
        } | parts_of(scheduler=trainer.scheduler)

    def _pass_begins(self) -> None:
        """Before the first batch of a pass, on all ranks."""
        assert isinstance(self.data, Shared)
        with self._ranks() as ranks:
            place = _core.ckpt_place(self._engine.handle)
            places = [p for p in ranks.gathered(place) if p is not None]
            if len(places) < ranks.world:
                raise errors.InvalidArgument(
                    "some update before was not made by the loop of a "
                    "persia.DataLoader, or as another one of its batch: "
                    "which batches are trained is not known"
                )
            self._places = places
            self._look(ranks)
        self._base = 0 if self.data.sharings else self._trainer.batch
        self.write()

    def _look(self, ranks: Ranks) -> None:
        rows = rows_of(self._engine.connection)
        self._lineages = ranks.lead(rows.lineages)

    def write(self) -> None:
        """Writes a file on each machine, after the updates of all ranks.

        Raises:
            StorageError: it cannot be written.
        """
        self._store.flush()
        if os.environ.get("LOCAL_RANK", "0") == "0":
            self._write()

    def keep(self) -> None:
        """Another rank has failed: writes the dense part of this one, as it
        is, without the others."""
        try:
            self._write()
        except Exception as error:  # the one before stays
            warn(f"the dense part of this moment was not kept: {error}")

    def _write(self) -> None:
        trainer = self._trainer
        with together(self._store):
            states = states_of(self._parts())
        sharings = self.data.sharings if isinstance(self.data, Shared) else []
        state = {
            "format": 1,
            "world": self._store.world_size,
            "lineages": self._lineages,
            "training": self._engine.training,
            "epoch": trainer.epoch,
            "batch": trainer.batch,
            "base": self._base,
            "places": self._places,
            "sharings": [list(map(list, one)) for one in sharings],
            "states": states,
            "extra": self.extra(),
        }
        self._files.write(Moment(self._life, trainer.step), state)

    def end(self) -> None:
        """The training is over: nothing continues it."""
        self._files.remove()

    # ---- the training

    @property
    def hook(self) -> Every:
        """Writes the files, of :meth:`persia.train.Trainer.fit`."""
        return Every(self.write, steps=self._every)

    def fit(
        self,
        epochs: int = 1,
        on_progress: Callable[[Progress], object] | None = None,
        hooks: Sequence[Every] = (),
    ) -> bool:
        """:meth:`persia.train.Trainer.fit`, which SIGTERM ends after the same
        step on all ranks.

        Returns:
            False if it was stopped before the end.
        """
        with self.kept(), self._signals():
            done = self._trainer.fit(
                self.data, epochs, on_progress, hooks=[*hooks, self.hook]
            )
            if not done:
                self.write()
                if self._trainer.stopped_by_others:
                    self._wait_for_signal()
        if done:
            self.end()
        return done

    @contextmanager
    def kept(self) -> Iterator[None]:
        """What fails within leaves the dense part in a file."""
        if isinstance(self.data, Stream):
            with self._ranks() as ranks:
                self._look(ranks)
            self.write()
        try:
            yield
        except errors.NonFiniteGradient:
            raise  # the dense part may be spoilt
        except Exception:
            self.keep()
            raise

    @contextmanager
    def _signals(self) -> Iterator[None]:
        main = threading.current_thread() is threading.main_thread()
        if not main or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
            yield
            return

        def stop(number: int, frame: object) -> None:
            self._signalled = True
            self._trainer.interrupt()

        signal.signal(signal.SIGTERM, stop)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _wait_for_signal(self) -> None:
        """Where another rank's ended this one, too: to torchrun a process
        that ends by itself has failed."""
        until = time.monotonic() + _SKEW
        while not self._signalled and time.monotonic() < until:
            time.sleep(0.05)


def trained_before(store: Store) -> bool:
    """Whether torchrun may have started this job before, which has trained
    since; without data loaders, which have updates of their own."""
    # It counts no restart where a machine joins.
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") not in ("", "0"):
        return True
    engine = engine_of(store)
    named = has_name(engine.arguments.settings)
    if not named or "TORCHELASTIC_RUN_ID" not in os.environ:
        return False
    there = engine.connection
    return _has_any(rows_of(there).ledgers(there.stream(there.run, 0)))


def check_begin(rows: int, trained: bool, rank: int) -> None:
    """A life that torchrun starts again does not begin again on rows that
    the one before has trained.

    Args:
        rows: that servers have.
        trained: see :func:`trained_before`.

    Raises:
        StorageError: it would.
    """
    if trained:
        raise errors.StorageError(
            f"servers hold {rows:,} rows, which this job may have trained "
            "before torchrun started it again, and there is no checkpoint to "
            "return to: start on servers without rows, and give `save` and "
            "`resume=auto`, which saves before the first step, or "
            "`dense_every`. Another training needs a name of its own (rdzv-id)"
        )
    if os.environ.get("TORCHELASTIC_RUN_ID") == "none" and rank == 0:
        warn(
            f"servers hold {rows:,} rows, and the dense part is a new one. If "
            "machines join or leave, this job may have trained them: give "
            "torchrun a name for it (rdzv-id)"
        )


def _has_any(ledgers: Sequence[Numbers]) -> bool:
    return any(one.watermark or any(one.window) for one in ledgers)


class _WithoutRows:
    """The state of a model without what names its rows."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model

    def state_dict(self) -> dict[str, Any]:
        state = self._model.state_dict()
        return {k: v for k, v in state.items() if not k.endswith(_STATE)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        left = self._model.load_state_dict(state, strict=False)
        missing = [k for k in left.missing_keys if not k.endswith(_STATE)]
        if missing or left.unexpected_keys:
            raise errors.SchemaMismatch(
                f"it lacks {missing} and has {left.unexpected_keys}"
            )


def _nothing() -> None:
    """No more is kept."""
