"""Follows a chain: applies its packets to a model that answers meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from persia.errors import SchemaMismatch, StaleLineage
from persia.serving.deltas.packet import (
    ChainPlace,
    Packet,
    PacketTable,
    decode_packet,
    packet_name,
)

if TYPE_CHECKING:
    from persia import _core
    from persia.serving.folder import Versions


class DenseParts:
    """The graph twice: one that answers, and one for the next packet.

    A call uses one of them from its beginning to its end. :meth:`load` returns
    when no call uses an older dense part any more: rows that are applied then
    never meet one.

    Args:
        graph: with all of its tensors.
        names: of those that a packet must have.
    """

    def __init__(self, graph: nn.Module, names: Iterable[str]) -> None:
        here = graph.state_dict()
        self._names = [n for n in names if n in here and here[n].numel()]
        self._graphs = [graph]
        self._now = 0
        self._users = [0, 0]
        self._changed = threading.Condition()

    @contextmanager
    def used(self) -> Iterator[nn.Module]:
        """The graph for a call."""
        with self._changed:
            at = self._now
            self._users[at] += 1
        try:
            yield self._graphs[at]
        finally:
            with self._changed:
                self._users[at] -= 1
                if not self._users[at]:
                    self._changed.notify_all()

    @property
    def graph(self) -> nn.Module:
        """The one that answers."""
        return self._graphs[self._now]

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Raises SchemaMismatch if they are not those of the graph."""
        here = self.graph.state_dict()
        missing = [name for name in self._names if name not in tensors]
        if missing:
            raise SchemaMismatch(
                f"the packet's dense part lacks {missing[:4]}, which the "
                "graph has"
            )
        for name, x in tensors.items():
            one = here.get(name)
            if one is None:
                continue  # no output depends on it
            if x.shape != one.shape or x.dtype != one.dtype:
                raise SchemaMismatch(
                    f"{name} is {x.dtype} {list(x.shape)} in the packet, and "
                    f"{one.dtype} {list(one.shape)} in the graph"
                )

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Calls from now on use these."""
        if len(self._graphs) == 1:
            self._graphs.append(_twin_of(self._graphs[0]))
        other = 1 - self._now
        here = self._graphs[other].state_dict()
        for name, x in tensors.items():
            if name not in here:
                continue
            path, _, leaf = name.rpartition(".")
            module = self._graphs[other].get_submodule(path)
            if isinstance(getattr(module, leaf), nn.Parameter):
                setattr(module, leaf, nn.Parameter(x, requires_grad=False))
            else:
                setattr(module, leaf, x)
        with self._changed:
            self._now = other
            while self._users[1 - other]:
                self._changed.wait()


def _twin_of(graph: nn.Module) -> nn.Module:
    """Another graph with the same lookups, and room for other tensors."""
    assert isinstance(graph, torch.fx.GraphModule)
    return torch.fx.GraphModule(graph, graph.graph)


class Follower:
    """A model's place in a chain, and what moves it on.

    Args:
        place: of the version.
        tables: of the version, in the order of its packets.
        files: the rows of each table.
        dense: the dense part.

    Attributes:
        place: the packet that was applied last.
        until: seconds since 1970 of the moment that the model is of; 0: that
            of its version.
        applied: packets so far.
    """

    def __init__(
        self,
        place: ChainPlace,
        tables: Sequence[PacketTable],
        files: Sequence[_core.RowsFile],
        dense: DenseParts,
    ) -> None:
        self.place = place
        self.until = 0.0
        self.applied = 0
        self._tables, self._files = list(tables), list(files)
        self._dense = dense

    def check(self, packet: Packet) -> None:
        """Whether a packet is the next one.

        Raises:
            StaleLineage: it is another one.
            SchemaMismatch: it is of another model.
        """
        head, here = packet.head, self.place
        if head.chain != here.chain or head.number != here.number + 1:
            raise StaleLineage(
                f"a gap: packet {head.number} of chain {head.chain} cannot "
                f"follow packet {here.number} of chain {here.chain}"
            )
        if head.parent != here.crc32c:
            raise StaleLineage(
                f"packet {head.number} follows another packet {here.number} "
                f"than the one that was applied: its parent's checksum is "
                f"{head.parent}, and not {here.crc32c}"
            )
        if head.tables != self._tables:
            raise SchemaMismatch(
                f"packet {head.number} is of the tables {head.tables}, and "
                f"the version of {self._tables}"
            )
        self._dense.check(packet.dense)

    def apply(self, packet: Packet) -> None:
        """Applies the next packet.

        Raises:
            StaleLineage, SchemaMismatch: it is not. Nothing was changed.
            LimitReached: there is no room for its rows; the same packet may
                be applied again.
        """
        self.check(packet)
        self._dense.load(packet.dense)
        for file, one in zip(self._files, packet.tables, strict=True):
            for gone in one.erased, one.gone:
                if len(gone):
                    file.apply(gone, b"")
            file.apply(b"", one.rows)
        self.place = packet.place
        self.until = packet.head.until
        self.applied += 1

    def catch_up(self, root: Versions) -> int:
        """Applies the packets that are there; how many.

        Raises:
            CorruptFile: one is damaged; also as :meth:`apply`. The packets
                before are applied.
            StorageError: the root gives no answer.
        """
        return self._each(root, self.apply)

    def verify(self, root: Versions) -> int:
        """Reads the packets that are there and applies none; how many.

        Raises:
            CorruptFile: one is damaged.
            StaleLineage: one is missing, or not the next one.
            SchemaMismatch: one is of another model.
            StorageError: the root gives no answer.
        """

        def passed(packet: Packet) -> None:
            self.check(packet)
            self.place = packet.place

        before = self.place
        try:
            count = self._each(root, passed)
            self.check_gap(root)
            return count
        finally:
            self.place = before

    def _each(self, root: Versions, use: Callable[[Packet], None]) -> int:
        count = 0
        while True:
            name = self.place.next_name
            data = root.read(name)
            if data is None:
                return count
            use(decode_packet(data, f"{root}/{name}"))
            count += 1

    def check_gap(self, root: Versions) -> None:
        """Raises StaleLineage if the next packet is missing, and the one
        behind it is there."""
        place = self.place
        behind = packet_name(place.chain, place.number + 2)
        if root.read(place.next_name) is not None:
            return
        if root.read(behind) is not None:
            raise StaleLineage(
                f"a gap: {root}/{place.next_name} is missing, and the packet "
                "behind it is there; the next version that is exported closes "
                "it"
            )
