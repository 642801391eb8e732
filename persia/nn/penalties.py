"""Penalties of the rows that a batch has used."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor, nn

from persia import errors
from persia.base.check import kind, number
from persia.data.batches.ids import Ids
from persia.data.batches.jagged import JaggedBatch
from persia.nn.lookups import Collection, TableRows, collections_of
from persia.nn.on_device import as_rows
from persia.store.operators import TAKEN
from persia.store.store import Store


def penalty(module: nn.Module, *, l2: float = 0.0, l1: float = 0.0) -> Tensor:
    """The penalty of a model's rows that the last forward has used.

    It is ``l2`` times the sum of squares plus ``l1`` times the sum of
    absolute values of all rows that forwards with gradient have looked up
    since the last backward, each row once. Add it to the loss: its gradients
    are part of the same update. Rows of other ids do not take part, unlike
    in a penalty over a whole torch weight; the dense parameters neither.

    Args:
        module: a model with tables, after its forward.
        l2: factor of the squares, 0 or more.
        l1: factor of the absolute values, 0 or more.

    Returns:
        float32 [], with gradient; on the device of the first table's output.

    Raises:
        InvalidArgument: the model has no tables, or no forward of it (a
            compiled one neither) has used rows with gradient since the last
            backward.
    """
    kind("module", module, nn.Module, "a module with tables")
    number("l2", l2, 0.0)
    number("l1", l1, 0.0)
    stores: dict[Store, list[Collection]] = {}
    for one in collections_of(module):
        if one.used():
            stores.setdefault(one.store, []).append(one)
    if not stores:
        raise errors.InvalidArgument(
            "persia.penalty() is of the rows that a forward of the model has "
            "looked up with gradient since the last backward, and there is "
            "none. Call it between forward and backward; a compiled forward "
            "notes no ids, for it use weight_decay= of persia.optim"
        )
    parts = []
    for collections in stores.values():
        rows = _rows_used(collections)
        parts.append(l2 * rows.square().sum() + l1 * rows.abs().sum())
    return torch.stack([p.to(parts[0].device) for p in parts]).sum()


class _Used(TableRows):
    """The tables of several modules of a store."""

    def __init__(self, modules: list[Collection]) -> None:
        self._owners = [weakref.ref(m) for m in modules]
        configs = {c.name: as_rows(c) for m in modules for c in m.tables}
        super().__init__(list(configs.values()), modules[0])

    def _leaves(self) -> tuple[Tensor, ...]:
        found = (m() for m in self._owners)
        return tuple(m.anchor for m in found if m is not None and m.trains)


# By the first of the modules, for plans are kept as long as their store.
_made: weakref.WeakKeyDictionary[Collection, dict[tuple[int, ...], _Used]] = (
    weakref.WeakKeyDictionary()
)


def _rows_used(modules: list[Collection]) -> Tensor:
    """The rows of all tables, [n, the widest dim], each once."""
    by_table: dict[str, list[Tensor]] = {}
    batch = 0
    for module in modules:
        for ids, of_batch in module.used():
            batch = max(batch, of_batch)
            for _, feature, config in module.outputs:
                some = by_table.setdefault(config.name, [])
                some.append(_of_feature(ids, feature))
    if batch >= TAKEN:
        raise errors.InvalidArgument(
            "persia.penalty() needs the ids of the batch, and these are with "
            "an embedding worker: use weight_decay= of persia.optim"
        )
    made = _made.setdefault(modules[0], {})
    key = tuple(map(id, modules))
    if key not in made:
        made[key] = _Used(modules)
    found = [
        torch.unique(torch.cat(by_table[c.name])) for c in made[key].tables
    ]
    lengths = torch.tensor([len(ids) for ids in found], device="cpu")
    joined = JaggedBatch(list(by_table), torch.cat(found), lengths)
    if batch:  # they are of its update, and were not looked up ahead
        joined.ticket = torch.tensor([batch, -1], device="cpu")
    return made[key].look_up(joined)


def _of_feature(ids: Ids, feature: str) -> Tensor:
    """The ids of one feature of a batch, int64 [n]."""
    keys, values, offsets = ids[0], ids[1], ids[2]
    at = keys.index(feature)
    if offsets is None:
        return values.reshape(len(keys), -1)[at].long().cpu()
    bags = (len(offsets) - 1) // len(keys)
    first, last = offsets[at * bags], offsets[(at + 1) * bags]
    return values[int(first) : int(last)].long().cpu()
