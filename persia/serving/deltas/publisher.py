"""Publishes a model while it trains: versions, and packets of what changed
since, for :func:`persia.load_model` and ``persia serve model``.

The training's thread copies what changed, and the dense part. Another thread
writes packets, and a third one versions.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

from torch import Tensor, nn

from persia import errors
from persia.base.check import kind, number, whole
from persia.base.warning import warn
from persia.checkpoint import saving
from persia.checkpoint.dense import unwrap
from persia.data.schema.schema import Schema
from persia.distributed.ranks import all_max
from persia.serving.deltas.basing import Basing
from persia.serving.deltas.changes import Reader, TableChanges
from persia.serving.deltas.dense import DenseSource
from persia.serving.deltas.packet import (
    ChainPlace,
    PacketTable,
    packet_name,
)
from persia.serving.deltas.writer import (
    PacketWriter,
    WaitingPacket,
    note_erased,
)
from persia.serving.exporting import (
    Exported,
    Moment,
    Trial,
    check_options,
    check_tables,
    export_moment,
    export_store,
    store_of,
    trace_model,
)
from persia.serving.folder import Versions, versions_of
from persia.serving.rows import RowType
from persia.store.state import updates_of
from persia.store.store import Store

T = TypeVar("T")

_MOMENT_S = 10.0  # for a version to begin
_COUNT_S = 0.005  # between counts of rows, at least
_SLOW_S = 1.0  # the storage is, if it takes longer than that
_PATIENCE_S = 5.0  # for threads to end
_STEPS = 1000  # between questions to all ranks, at most
#: What ends by itself, or is another save's doing: it is tried again.
_AWAY = (
    errors.StorageError,
    errors.DeadlineExceeded,
    errors.Unavailable,
    errors.Interrupted,
)


class _Due:
    """When a packet is due.

    Args:
        every: seconds.
        rows: that have changed; None: any number.

    Raises:
        InvalidArgument: one of them is not positive.
    """

    def __init__(self, every: float, rows: int | None) -> None:
        self._every = number("every", every, 1e-3)
        self._rows = (
            None if rows is None else whole("every_rows", rows, 1, 2**62)
        )
        self.begin()

    def begin(self) -> None:
        """From now on it counts."""
        self._begun = self._counted = time.monotonic()
        #: Seconds until the next look at it.
        self.pause = self._every / 2 if self._rows is None else _COUNT_S

    def is_now(self, reader: Reader) -> bool:
        """Whether it is time: rows are counted after half of the time that
        the rest takes."""
        now = time.monotonic()
        left = self._begun + self._every - now
        if left <= 0:
            return True
        if self._rows is None:
            self.pause = left / 2
            return False
        if now < self._counted + self.pause:
            return False
        changed = 0
        with contextlib.suppress(*_AWAY):  # publish() says so to all ranks
            changed = reader.count()
        rest = (now - self._begun) * (self._rows / max(changed, 1) - 1)
        self._counted = now
        self.pause = max(min(left, rest) / 2, _COUNT_S)
        return changed >= self._rows


class Publisher:
    """Keeps a served model fresh while it trains.

    At first it exports the model as :func:`persia.export` does. Then
    :meth:`step`, called between two steps of the training, writes packets:
    the rows that changed, the ids that have no row any more, and the dense
    part, all of that moment. ``persia serve model`` applies them while it
    answers. The training waits for the copy of what changed, not for the
    storage; while that does not answer, changes gather for a larger packet.

    Packets and versions are written by threads of a low priority: where the
    training uses all processors, packets become fewer and larger.

    Where the store is of several ranks, all of them make one and call it
    between the same steps; the first rank publishes.

    Args:
        model: any module with tables of Persia, as of :func:`persia.export`.
        path: the root of the versions, a folder or the URL of one in a bucket.
        example: what the model is called with, as of :func:`persia.export`.
        store: of the tables; None: that of the model.
        every: seconds between two packets.
        every_rows: a packet is also due when so many rows have changed; None:
            it is not.
        row_dtype: how vectors are kept: "fp32", "fp16", "int8" or "int4".
        keep: versions that stay, with the packets behind them.
        rebase: after packets with so many times the rows of the last version
            a new version is exported, from which servers start sooner.
        schema: of the data; None: requests have ids.
        tasks: names of the labels, where the output is [B, tasks].
        clicks: the output is a logit; its sigmoid is what requests get.

    Attributes:
        version: the name of the last version.
        rows_published: in all packets; of the first rank.

    Raises:
        InvalidArgument: the model cannot be exported.
        StorageError: the first version cannot be written.
    """

    def __init__(
        self,
        model: nn.Module,
        path: str | os.PathLike[str],
        *,
        example: Any,
        store: Store | None = None,
        every: float = 10.0,
        every_rows: int | None = None,
        row_dtype: RowType = "fp32",
        keep: int = 2,
        rebase: float = 4.0,
        schema: Schema | str | os.PathLike[str] | None = None,
        tasks: Sequence[str] = (),
        clicks: bool = False,
    ) -> None:
        if schema is not None and not isinstance(schema, Schema):
            schema = Schema.load(schema)
        model = unwrap(kind("model", model, nn.Module, "a module"))
        found = store_of(model, store)
        graph = trace_model(model, example, schema)
        trial = Trial(graph, schema, tuple(tasks), clicks)
        due = _Due(every, every_rows)
        self._start(trial, model, found, path, due, row_dtype, keep, rebase)

    @classmethod
    def of_trial(
        cls,
        trial: Trial,
        model: nn.Module,
        store: Store,
        path: str | os.PathLike[str],
        every: float,
        every_rows: int | None,
        row_dtype: RowType,
    ) -> Publisher:
        """One of a model that was traced already."""
        self = cls.__new__(cls)
        due = _Due(every, every_rows)
        self._start(trial, unwrap(model), store, path, due, row_dtype, 2, 4.0)
        return self

    def _start(
        self,
        trial: Trial,
        model: nn.Module,
        store: Store,
        path: str | os.PathLike[str],
        due: _Due,
        row_dtype: RowType,
        keep: int,
        rebase: float,
    ) -> None:
        check_options(row_dtype, keep)
        check_tables(trial.graph, list(store.tables))
        self._due = due
        self._rebase = number("rebase", rebase, 1e-3)
        self._trial, self._store = trial, store
        self._dense = DenseSource(model, trial.graph)
        self._root: Versions = versions_of(path)
        self._keep, self._type = keep, row_dtype
        self._tables = [
            PacketTable(
                name=name,
                type=row_dtype,
                dim=store.tables[name].embedding_dim,
            )
            for name in trial.graph.tables
        ]
        self._basing: Basing | None = None  # a version that is written
        self._bases: list[int] = []  # numbers of packets that versions have
        self._oldest = 1  # number of the oldest packet that is there
        self._begins = False  # the chain has no version yet
        self._blocked = 0.0  # seconds, by the last one that began
        self._again = 0.0  # no version is begun before
        self._said = False  # that a version waits
        # Of earlier chains: versions do not have their erased ids yet.
        self._unnoted: list[Sequence[TableChanges]] = []
        self._rows = 0  # in packets since the last version
        self._base_rows = 1  # of that version
        self._asked = time.monotonic()  # all ranks, whether it is time
        self._pause = self._left = 1  # steps between, and until the next time
        self.version = ""
        self.rows_published = 0
        self._begin()

    def _begin(self) -> None:
        """The first version, of the first chain."""
        self._reader: Reader | None = None
        self._leading(self._open_reader)
        place = ChainPlace(chain=secrets.token_hex(16), number=0)
        self._since = time.time()
        self._dense.write(self._dense.copy())
        done = export_store(
            self._trial,
            self._root,
            self._store,
            self._type,
            keep=self._keep,
            chain=place,
        )
        self._due.begin()
        self._writer: PacketWriter | None = None
        if done is not None:
            self._count_version(done, place)
            self._root.keep_chains([place.chain])
            self._writer = PacketWriter(self._root, self._tables, place)
        self.version = self._leading(lambda: self.version)

    def _open_reader(self) -> None:
        self._reader = Reader(self._store, self._tables)

    def _leading(self, work: Callable[[], T]) -> T:
        """What the first rank does between two steps of all ranks."""
        if self._store.world_size == 1:
            return work()
        with saving.ranks_of(self._store) as ranks:
            with ranks.agreed():
                saving.settle(self._store, self._root.rows_root())
            return ranks.lead(work)

    # ---- the training's thread

    @property
    def place(self) -> ChainPlace:
        """The newest packet; of the first rank."""
        assert self._writer is not None
        return self._writer.place

    @property
    def is_due(self) -> bool:
        """Whether it is time, and the storage has taken what was published;
        False on all ranks but the first."""
        if self._waits or self._reader is None:
            return False
        return self._due.is_now(self._reader)

    @property
    def _waits(self) -> bool:
        """Whether what changes has to wait for what is being written."""
        if self._writer is None or self._writer.is_busy:
            return True
        slow = time.monotonic() < self._again
        writes = self._basing is not None and self._basing.runs
        return self._begins and (slow or writes)

    def step(self) -> bool:
        """Publishes if it is time; to be called between two steps of the
        training, by all ranks. Whether it did.

        Raises: as :meth:`publish`.
        """
        alone = self._store.world_size == 1
        if not (self.is_due if alone else self._agreed_due()):
            return False
        return self.publish()

    def _agreed_due(self) -> bool:
        """:attr:`is_due` of the first rank. The ranks ask each other in few
        steps: after half of those that are left."""
        self._left -= 1
        if self._left:
            return False
        mine = [0, 1]
        if self._writer is not None:
            now = time.monotonic()
            a_step = max((now - self._asked) / self._pause, 1e-6)
            half = int(min(self._due.pause / a_step, _STEPS))
            mine = [int(self.is_due), max(half, 1)]
            self._asked = now
        due, self._pause = all_max(mine)
        self._left = self._pause
        return bool(due)

    def publish(self) -> bool:
        """Publishes now; False while the last packet, or a new chain, is being
        written: what changes stays for the next one. All ranks call it.

        Raises:
            Unavailable, DeadlineExceeded: a server does not answer; another
                call loses nothing.
        """
        done, self.version = self._leading(self._publish)
        return done

    def _publish(self) -> tuple[bool, str]:
        writer = self._writer
        assert writer is not None and self._reader is not None
        self._note_version()
        if writer.failed is not None:
            raise writer.failed
        if self._waits:
            return False, self.version
        self._due.begin()
        updates = max(updates_of(self._store).values(), default=0)
        found, whole = self._reader.read()
        if not whole or self._begins:
            return self._begin_chain(writer, found), self.version
        packet = self._packet_of(writer.place, updates, found)
        writer.put(packet)
        rows = sum(one.rows for one in found)
        self._rows += rows
        self.rows_published += rows
        if self._rows > self._rebase * self._base_rows:
            self._begin_version(packet.dense, writer, packet)
        return True, self.version

    def _packet_of(
        self,
        place: ChainPlace,
        updates: int,
        found: Sequence[TableChanges],
    ) -> WaitingPacket:
        now = time.time()
        head = {
            "chain": place.chain,
            "number": place.number + 1,
            "parent": place.crc32c,
            "tables": self._tables,
            "since": self._since,
            "until": now,
            "updates": updates,
        }
        self._since = now
        # The dense part is copied after the rows: it is as new, or newer.
        return WaitingPacket(head, found, self._dense.copy())

    def _begin_chain(
        self, writer: PacketWriter, found: Sequence[TableChanges]
    ) -> bool:
        """A chain, and its first version; what the last one had is known as
        far as ``found`` says."""
        self._begins = True
        self._unnoted.append(found)
        if self._basing is not None:  # a version of the last chain
            self._basing.stop(0)
            return False
        old = self._reader
        assert old is not None
        # From before the rows are read: what changes meanwhile is in both.
        new = Reader(self._store, self._tables)
        self._unnoted.append(old.read()[0])
        old.close()
        self._reader = new
        writer.place = ChainPlace(chain=secrets.token_hex(16), number=0)
        self._bases, self._oldest = [], 1
        self._since = time.time()
        self._begin_version(self._dense.copy(), writer, None)
        return True

    def _begin_version(
        self,
        dense: Mapping[str, Tensor],
        writer: PacketWriter,
        packet: WaitingPacket | None,
    ) -> None:
        """A new version, of this moment, at the place of a packet; None: at
        the beginning of a chain."""
        if self._basing is not None or time.monotonic() < self._again:
            return  # the one before is written, or the storage is slow
        if self._store.world_size == 1:
            saving.settle(self._store, self._root.rows_root())
        states, first = saving.states_of_rows(self._store), writer.place

        def write(
            begun: Callable[[], None], stop: threading.Event
        ) -> Exported:
            def place() -> ChainPlace:
                if packet is not None:
                    return writer.place_of(packet, stop)
                self._note_erased()
                return first

            moment = Moment(states, begun, stop, place)
            return self._write_version(dense, moment, packet is None)

        self._rows = 0
        self._basing = Basing(write)
        now = time.monotonic()
        self._basing.begin(_MOMENT_S)
        self._blocked = time.monotonic() - now

    def _note_version(self) -> None:
        """Looks at what became of the one that was written."""
        basing = self._basing
        if basing is None or basing.runs:
            return
        self._basing, error = None, basing.error
        if error is None:
            self._said = False
            return
        if self._blocked > _SLOW_S:
            self._again = time.monotonic() + 10 * self._blocked
        if not isinstance(error, _AWAY):
            assert self._writer is not None
            self._writer.failed = error
        elif not self._said:
            warn(f"a new version waits: {error}")
            self._said = True

    def flush(self, timeout: float = 60.0) -> None:
        """Waits until what was published is written, for so many seconds. All
        ranks call it.

        Raises:
            DeadlineExceeded: it is not.
            StorageError: a new chain could not be written; the next
                :meth:`publish` begins it again.
        """
        self.version = self._leading(lambda: self._flush(timeout))

    def _flush(self, timeout: float) -> str:
        end = time.monotonic() + timeout
        assert self._writer is not None
        self._writer.flush(timeout)
        basing = self._basing
        if basing is not None and not basing.wait(end):
            raise errors.DeadlineExceeded(
                f"{self._root}: the storage has not taken the last version "
                f"for {timeout:g} s"
            )
        self._note_version()
        if self._writer.failed is not None:
            raise self._writer.failed
        if self._begins and basing is not None and basing.error is not None:
            raise basing.error
        return self.version

    def close(self) -> None:
        """Writes what waits; nothing is published any more. All ranks call
        it.

        Raises:
            DeadlineExceeded: the storage does not answer; what waited is lost.
        """
        try:
            self.flush()
        finally:
            self._end()

    def _end(self) -> None:
        if self._writer is not None:
            self._writer.end()
        if self._basing is not None:
            self._basing.stop(_PATIENCE_S)
        reader, self._reader = self._reader, None
        if self._writer is not None and reader and not self._store.closed:
            reader.close()

    def __enter__(self) -> Publisher:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            self._end()  # the error is not kept waiting

    # ---- the thread that writes a version

    def _write_version(
        self, dense: Mapping[str, Tensor], moment: Moment, begins: bool
    ) -> Exported:
        self._dense.write(dense)
        done = export_moment(
            self._trial,
            self._root,
            self._store,
            self._type,
            self._keep,
            moment,
        )
        place = moment.chain()
        self._count_version(done, place)
        if begins:
            self._root.keep_chains([place.chain])
            self._begins = False
        return done

    def _note_erased(self) -> None:
        while self._unnoted:
            note_erased(self._root, self._tables, self._unnoted[0])
            del self._unnoted[0]

    def _count_version(self, done: Exported, place: ChainPlace) -> None:
        """Removes the packets that no version needs any more."""
        self.version = done.version
        self._base_rows = max(1, sum(done.rows.values()))
        self._bases = [*self._bases, place.number][-self._keep :]
        until = self._bases[0]
        names = [
            packet_name(place.chain, n) for n in range(self._oldest, until + 1)
        ]
        self._root.remove_files(names)
        self._oldest = max(self._oldest, until + 1)
