"""Pooling on the device, from the distinct rows of a batch.

Where ids repeat, fewer bytes travel as one row for each distinct id than as
pooled values.  A module that computes on a device compares the two for each
batch, see :meth:`~persia.store.grouped.Grouped.travels`.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from persia.base.tensors import to_device
from persia.data.batches.ids import Ids
from persia.data.batches.jagged import JaggedBatch
from persia.store.configs import EmbeddingConfig, TableConfig, pooling_of
from persia.store.device import Link, Way
from persia.store.engine import engine_of
from persia.store.grouped import Columns, Grouped, pooled

if TYPE_CHECKING:
    from persia.nn.lookups import Collection, TableRows

# Batches that are known by their number, as many as are ahead of a loop.
_KEPT = 16
# After a batch that travels as pooled values so many are not grouped.
_PATIENCE = 16


def as_rows(config: TableConfig) -> EmbeddingConfig:
    """The same table, with one feature of its name and no pooling."""
    fields = {
        f.name: getattr(config, f.name)
        for f in dataclasses.fields(TableConfig)
    }
    return EmbeddingConfig(**fields | {"feature_names": [config.name]})


@dataclasses.dataclass
class _Sent:
    """A batch whose distinct rows travel."""

    group: Grouped
    ids: JaggedBatch  # the distinct ones, a feature a table


class OnDevice:
    """The rows of a pooled module, for its device.

    Args:
        module: whose output is pooled here.
        rows: a lookup of all its tables without pooling, made of
            :func:`as_rows`.
        link: to the device.
    """

    def __init__(
        self, module: Collection, rows: TableRows, link: Link
    ) -> None:
        self.link = link
        self._rows = rows
        self._tables = [config.name for config in module.tables]
        first, features = 0, []
        for _, _, config in module.outputs:
            features.append([pooling_of(config), config.embedding_dim, first])
            first += config.embedding_dim
        self._columns = Columns(
            torch.tensor(features, dtype=torch.int32, device="cpu"),
            first,
            max(config.embedding_dim for config in module.tables),
        )
        self._there: Tensor | None = None  # the features, on the device
        self._ahead: OrderedDict[int, _Sent] = OrderedDict()
        self._waits = 0  # batches that are not grouped

    def look_ahead(
        self,
        ids: Ids,
        weights: Tensor | None,
        way: Way,
        number: int,
        plan: int,
    ) -> bool:
        """Starts the lookup of a data loader's batch, if its rows travel."""
        sent = self._group(ids, weights, way, plan)
        if sent is None:
            return False
        looked = self._rows.look_ahead(sent.ids, number)
        if looked is None:
            return False
        sent.ids.ticket = looked.ticket()
        self._ahead[number] = sent
        while len(self._ahead) > _KEPT:
            self._ahead.popitem(last=False)
        return True

    def look_up(
        self,
        ids: Ids,
        weights: Tensor | None,
        way: Way,
        ticket: Tensor | None,
        plan: int,
    ) -> Tensor | None:
        """Pooled values on the device, [B, columns]; None if they travel.

        A batch that was looked up ahead travels as then.
        """
        number = 0 if ticket is None else int(ticket[0])
        unchanged = ticket is not None and int(ticket[1]) >= 0
        sent = self._ahead.get(number) if unchanged else None
        if sent is None:
            if number and unchanged:
                return None
            sent = self._group(ids, weights, way, plan)
        if sent is None:
            return None
        rows = self._rows.look_up(sent.ids)
        if self._there is None:
            self._there = to_device(self._columns.features, way.link.device)
        return pooled(
            rows, sent.group, self._there, self._columns.columns, way.link
        )

    def _group(
        self, ids: Ids, weights: Tensor | None, way: Way, plan: int
    ) -> _Sent | None:
        if self._waits:
            self._waits -= 1
            return None
        keys, values, offsets = ids[:3]
        handle = engine_of(self._rows.store).handle
        group = Grouped.of(values, offsets, weights, len(keys), handle, plan)
        if not group.travels(self._columns, way.dtype.itemsize):
            self._waits = _PATIENCE
            return None
        group.send(way.link)
        batch = JaggedBatch(self._tables, group.ids, offsets=group.starts)
        return _Sent(group, batch)
