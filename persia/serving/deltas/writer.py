"""A thread that writes the packets of a training."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from persia import errors
from persia.base.warning import warn
from persia.serving.deltas.basing import PACKETS, yield_processor
from persia.serving.deltas.changes import TableChanges
from persia.serving.deltas.erased import add_erased
from persia.serving.deltas.packet import (
    ChainPlace,
    Encoded,
    PacketTable,
    encode_packet,
    packet_name,
)
from persia.serving.folder import Versions

RETRY_S = 1.0
LOOK_S = 0.1


class WaitingPacket:
    """One that is to be written.

    Args:
        head: as of :func:`encode_packet`.
        changes: of each table.
        dense: tensors by name.

    Attributes:
        place: where it is, once it is written.
    """

    def __init__(
        self,
        head: Mapping[str, Any],
        changes: Sequence[TableChanges],
        dense: Mapping[str, Tensor],
    ) -> None:
        self.head, self.changes, self.dense = head, changes, dense
        self.place: ChainPlace | None = None
        self._encoded: Encoded | None = None

    def encoded(self) -> Encoded:
        """It as a file; encoded once."""
        if self._encoded is None:
            merged = [one.merged() for one in self.changes]
            self._encoded = encode_packet(self.head, merged, self.dense)
        return self._encoded


def note_erased(
    root: Versions,
    tables: Sequence[PacketTable],
    changes: Sequence[TableChanges],
    chain: str = "",
    packet: int = 0,
) -> None:
    """Older versions have no row any more of ids that were erased.

    Args:
        root: of the versions.
        tables: of the changes.
        changes: of each table.
        chain, packet: that has the changes; "": none has.
    """
    every = {
        about.name: one.erased.tolist() for about, one in zip(tables, changes)
    }
    erased = {name: ids for name, ids in every.items() if ids}
    if erased:
        add_erased(root, erased, chain, packet)


class PacketWriter:
    """Writes one packet after another, each as soon as the storage takes it.

    Args:
        root: of the versions.
        tables: of the packets.

    Attributes:
        place: of the newest packet; set by the one who begins a chain.
        failed: why nothing is written any more.
    """

    def __init__(
        self, root: Versions, tables: Sequence[PacketTable], place: ChainPlace
    ) -> None:
        self._root, self._tables = root, tables
        self._changed = threading.Condition()
        self._waiting: WaitingPacket | None = None
        self._ends = False
        self.place = place
        self.failed: Exception | None = None
        self._thread = threading.Thread(
            target=self._run, name="persia-publisher", daemon=True
        )
        self._thread.start()

    @property
    def is_busy(self) -> bool:
        """Whether a packet waits."""
        return self._waiting is not None

    def put(self, packet: WaitingPacket) -> None:
        """The next packet; none may wait."""
        with self._changed:
            self._waiting = packet
            self._changed.notify_all()

    def flush(self, timeout: float) -> None:
        """Waits until none waits, for so many seconds.

        Raises:
            DeadlineExceeded: one does.
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
                self._changed.wait(min(left, LOOK_S))
            if self.failed is not None:
                raise self.failed

    def place_of(
        self, packet: WaitingPacket, stop: threading.Event
    ) -> ChainPlace:
        """Where a packet is, once it is written.

        Raises:
            Interrupted: it will not be, or `stop` is set.
        """
        with self._changed:
            while packet.place is None:
                if stop.is_set() or self._waiting is not packet:
                    raise errors.Interrupted("the packet is not written")
                self._changed.wait(LOOK_S)
            return packet.place

    def end(self) -> None:
        """Nothing is written any more, and what waits is lost."""
        with self._changed:
            self._ends, self._waiting = True, None
            self._changed.notify_all()
        self._thread.join(RETRY_S * 5)

    def _run(self) -> None:
        yield_processor(PACKETS)
        told = False
        while True:
            with self._changed:
                while self._waiting is None and not self._ends:
                    self._changed.wait()
                packet = self._waiting
            if packet is None:
                return
            try:
                place = self._write(packet)
            except errors.StorageError as error:
                if not told:
                    warn(f"publishing waits for the storage: {error}")
                told = True
                with self._changed:
                    if not self._ends:
                        self._changed.wait(RETRY_S)
                continue
            except Exception as error:
                with self._changed:
                    self.failed, self._waiting = error, None
                    self._changed.notify_all()
                return
            told = False
            with self._changed:
                packet.place = self.place = place
                self._waiting = None
                self._changed.notify_all()

    def _write(self, packet: WaitingPacket) -> ChainPlace:
        encoded, head = packet.encoded(), packet.head
        # Older versions first: then no version has what was erased.
        place = head["chain"], head["number"]
        note_erased(self._root, self._tables, packet.changes, *place)
        name = packet_name(*place)
        self._root.write_file(name, encoded.parts)
        return ChainPlace(
            chain=head["chain"], number=head["number"], crc32c=encoded.crc32c
        )
