"""Publishes a model while it trains: versions, and packets of what changed
since, for :func:`persia.load_model` and ``persia serve model``."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import numpy as np
from torch import Tensor, nn

from persia import _core, errors
from persia.base.check import kind, number
from persia.base.warning import warn
from persia.checkpoint.dense import unwrap
from persia.data.schema.schema import Schema
from persia.serving.deltas.changes import Reader, TableChanges
from persia.serving.deltas.erased import add_erased
from persia.serving.deltas.packet import (
    ChainPlace,
    Changes,
    PacketTable,
    encode_packet,
    packet_name,
)
from persia.serving.exporting import (
    Trial,
    check_options,
    check_tables,
    export_store,
    store_of,
    trace_model,
)
from persia.serving.folder import Versions, versions_of
from persia.serving.rows import TYPES, RowType
from persia.store.state import updates_of
from persia.store.store import Store

_RETRY_S = 1.0


class Publisher:
    """Keeps a served model fresh while it trains.

    At first it exports the model as :func:`persia.export` does. Then
    :meth:`step`, called between two steps of the training, writes packets:
    the rows that changed, the ids that have no row any more, and the dense
    part, all of that moment. ``persia serve model`` applies them while it
    answers. The training waits for the copy of what changed, not for the
    storage; while that does not answer, changes gather for a larger packet.

    Args:
        model: any module with tables of Persia, as of :func:`persia.export`.
        path: the root of the versions, a folder or the URL of one in a bucket.
        example: what the model is called with, as of :func:`persia.export`.
        store: of the tables; None: that of the model.
        every: seconds between two packets.
        row_dtype: how vectors are kept: "fp32", "fp16", "int8" or "int4".
        keep: versions that stay, with the packets behind them.
        rebase: after packets with so many times the rows of the last version
            a new version is exported, from which servers start sooner.
        schema: of the data; None: requests have ids.
        tasks: names of the labels, where the output is [B, tasks].
        clicks: the output is a logit; its sigmoid is what requests get.

    Attributes:
        version: the name of the last version.
        rows_published: in all packets.

    Raises:
        InvalidArgument: the model cannot be exported; or the store is of
            several ranks.
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
        self._start(trial, model, found, path, every, row_dtype, keep, rebase)

    @classmethod
    def of_trial(
        cls,
        trial: Trial,
        model: nn.Module,
        store: Store,
        path: str | os.PathLike[str],
        every: float,
        row_dtype: RowType,
    ) -> Publisher:
        """One of a model that was traced already."""
        self = cls.__new__(cls)
        self._start(
            trial, unwrap(model), store, path, every, row_dtype, 2, 4.0
        )
        return self

    def _start(
        self,
        trial: Trial,
        model: nn.Module,
        store: Store,
        path: str | os.PathLike[str],
        every: float,
        row_dtype: RowType,
        keep: int,
        rebase: float,
    ) -> None:
        check_options(row_dtype, keep)
        check_tables(trial.graph, list(store.tables))
        if store.world_size > 1:
            raise errors.InvalidArgument(
                f"this store is of {store.world_size} ranks: packets are "
                "published by a training of one rank"
            )
        self._every = number("every", every, 1e-3)
        self._rebase = number("rebase", rebase, 1e-3)
        self._trial, self._model, self._store = trial, model, store
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
        self._reader: Reader | None = None
        self._changed = threading.Condition()
        self._waiting: _Packet | None = None  # to be written
        self._ends = False
        self._failed: Exception | None = None  # the thread has ended
        self._bases: list[int] = []  # numbers of packets that bases have
        self._oldest = 1  # number of the oldest packet that is there
        self._begins = False  # the chain has no version yet
        self._said = False  # that the storage does not take it
        # Of earlier chains: versions do not have their erased ids yet.
        self._unnoted: list[Sequence[TableChanges]] = []
        self._rows = 0  # in packets since the last version
        self._base_rows = 1  # of that version
        self.version = ""
        self.rows_published = 0
        self._begin_chain()
        self._thread = threading.Thread(
            target=self._write, name="persia-publisher", daemon=True
        )
        self._thread.start()

    # ---- the training's thread

    @property
    def place(self) -> ChainPlace:
        """The newest packet."""
        return self._place

    def step(self) -> bool:
        """Publishes if it is time; to be called between two steps of the
        training. Whether it did.

        Raises: as :meth:`publish`.
        """
        if time.monotonic() < self._next:
            return False
        return self.publish()

    def publish(self) -> bool:
        """Publishes now; False while the last packet is being written: what
        changes stays for the next one.

        Raises:
            Unavailable, DeadlineExceeded: a server does not answer.
        """
        with self._changed:
            if self._waiting is not None:
                return False
            if self._failed is not None:
                raise self._failed
        self._next = time.monotonic() + self._every
        assert self._reader is not None
        found, whole = self._reader.read()
        if not whole or self._begins:
            return self._begin_again(found)
        self._hand_over(found)
        rows = sum(len(one.ids) for one in found)
        self._rows += rows
        self.rows_published += rows
        if self._rows > self._rebase * self._base_rows:
            try:
                self._export()
            except (errors.StorageError, errors.DeadlineExceeded) as error:
                warn(f"a new version was not published: {error}")
                self._rows = 0  # after as many rows again
        return True

    def _begin_again(self, found: Sequence[TableChanges]) -> bool:
        """A new chain, whose first version may wait for the storage."""
        try:
            self._begin_chain(found)
        except errors.StorageError as error:
            if not self._said:
                warn(f"a new chain waits for the storage: {error}")
            self._said = True
            return False
        self._said = False
        return True

    def _begin_chain(self, found: Sequence[TableChanges] = ()) -> None:
        """A chain, and its first version; what the last one had is known as
        far as ``found`` says."""
        self._begins = True
        self._unnoted.append(found)
        old = self._reader
        # From before the rows are read: what changes meanwhile is in both.
        self._reader = Reader(self._store, [t.name for t in self._tables])
        if old is not None:
            self._unnoted.append(old.read()[0])
            old.close()
        while self._unnoted:
            self._note_erased(self._unnoted[0])
            del self._unnoted[0]
        self._place = ChainPlace(chain=secrets.token_hex(16), number=0)
        self._bases, self._oldest = [], 1
        self._since = time.time()
        self._export()
        self._root.keep_chains([self._place.chain])
        self._begins = False

    def _export(self) -> None:
        """A new version, of this moment."""
        self.flush()
        program = self._trial.graph.program
        for name, x in self._dense().items():
            copy = x.detach().to("cpu", copy=True)
            if name not in program.state_dict:  # a buffer that is not saved
                program.constants[name] = copy
            elif isinstance(program.state_dict[name], nn.Parameter):
                program.state_dict[name] = nn.Parameter(
                    copy, requires_grad=False
                )
            else:
                program.state_dict[name] = copy
        done = export_store(
            self._trial,
            self._root,
            self._store,
            self._type,
            keep=self._keep,
            chain=self._place,
        )
        assert done is not None
        self.version = done.version
        self._rows, self._base_rows = 0, max(1, sum(done.rows.values()))
        self._bases = [*self._bases, self._place.number][-self._keep :]
        self._remove_packets()
        self._next = time.monotonic() + self._every

    def _remove_packets(self) -> None:
        until = self._bases[0]
        names = [
            packet_name(self._place.chain, n)
            for n in range(self._oldest, until + 1)
        ]
        self._root.remove_files(names)
        self._oldest = max(self._oldest, until + 1)

    def _dense(self) -> dict[str, Tensor]:
        """The parameters and buffers of the graph, as they are now."""
        here: dict[str, Tensor] = {}
        here |= self._model.named_parameters(remove_duplicate=False)
        here |= self._model.named_buffers(remove_duplicate=False)
        program = self._trial.graph.program
        found, missing = {}, []
        for name, x in {**program.constants, **program.state_dict}.items():
            now = here.get(name.removeprefix("model."))
            if now is None and name not in program.state_dict:
                continue  # a constant of the graph
            if now is None or now.shape != x.shape:
                missing.append(name)
            elif now.numel():
                found[name] = now
        if missing:
            raise errors.SchemaMismatch(
                f"the model has no parameters {missing} as it had: make "
                "another Publisher"
            )
        return found

    def _hand_over(self, found: Sequence[TableChanges]) -> None:
        # The dense part is copied after the rows: it is as new, or newer.
        dense = {
            name: x.detach().to("cpu", copy=True)
            for name, x in self._dense().items()
        }
        now = time.time()
        head = {
            "chain": self._place.chain,
            "number": self._place.number + 1,
            "parent": self._place.crc32c,
            "tables": self._tables,
            "since": self._since,
            "until": now,
            "updates": max(updates_of(self._store).values(), default=0),
        }
        self._since = now
        with self._changed:
            self._waiting = _Packet(head, list(found), dense)
            self._changed.notify_all()

    def flush(self, timeout: float = 60.0) -> None:
        """Waits until the last packet is written, for so many seconds.

        Raises:
            DeadlineExceeded: it is not.
        """
        end = time.monotonic() + timeout
        with self._changed:
            while self._waiting is not None:
                left = end - time.monotonic()
                if left <= 0:
                    raise errors.DeadlineExceeded(
                        f"{self._root}: the storage has not taken the last "
                        f"packet for {timeout:g} s"
                    )
                self._changed.wait(min(left, 0.1))
            if self._failed is not None:
                raise self._failed

    def _note_erased(self, changes: Sequence[TableChanges]) -> None:
        erased = {
            about.name: one.erased.tolist()
            for about, one in zip(self._tables, changes)
            if len(one.erased)
        }
        if erased:
            add_erased(self._root, erased)

    def close(self) -> None:
        """Writes what waits; nothing is published any more.

        Raises:
            DeadlineExceeded: the storage does not answer; what waited is lost.
        """
        try:
            self.flush()
        finally:
            self._end()

    def _end(self) -> None:
        with self._changed:
            self._ends, self._waiting = True, None
            self._changed.notify_all()
        self._thread.join(_RETRY_S * 5)
        self._close_reader()

    def _close_reader(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None and not self._store.closed:
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

    # ---- the thread that writes

    def _write(self) -> None:
        told = False
        while True:
            with self._changed:
                while self._waiting is None and not self._ends:
                    self._changed.wait()
                packet = self._waiting
            if packet is None:
                return
            try:
                place = self._write_one(packet)
            except errors.StorageError as error:
                if not told:
                    warn(f"publishing waits for the storage: {error}")
                told = True
                with self._changed:
                    if not self._ends:
                        self._changed.wait(_RETRY_S)
                continue
            except Exception as error:
                with self._changed:
                    self._failed, self._waiting = error, None
                    self._changed.notify_all()
                return
            told = False
            with self._changed:
                self._place, self._waiting = place, None
                self._changed.notify_all()

    def _write_one(self, packet: _Packet) -> ChainPlace:
        if packet.data is None:
            tables = [
                _encoded(about, one)
                for about, one in zip(
                    self._tables, packet.changes, strict=True
                )
            ]
            packet.data, packet.crc = encode_packet(
                packet.head, tables, packet.dense
            )
        head = packet.head
        # Older versions first: then no version has what was erased.
        self._note_erased(packet.changes)
        name = packet_name(head["chain"], head["number"])
        self._root.write_file(name, packet.data)
        return ChainPlace(
            chain=head["chain"], number=head["number"], crc32c=packet.crc
        )


class _Packet:
    """One to be written; encoded once."""

    def __init__(
        self,
        head: Mapping[str, Any],
        changes: list[TableChanges],
        dense: Mapping[str, Tensor],
    ) -> None:
        self.head, self.changes, self.dense = head, changes, dense
        self.data: bytes | None = None
        self.crc = ""


def _encoded(about: PacketTable, one: TableChanges) -> Changes:
    type_ = TYPES[about.type]
    stride = _core.rows_stride(type_, about.dim)
    rows = _core.rows_narrow(
        type_, about.dim, one.ids, np.ascontiguousarray(one.vectors)
    )
    return Changes(
        rows=np.frombuffer(rows, np.uint8).reshape(len(one.ids), stride),
        gone=one.gone,
        erased=one.erased,
    )
