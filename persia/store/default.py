"""The store of modules that were given none."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Sequence

from persia.distributed.cluster import Settings
from persia.optim import SparseOptimizer
from persia.store import Store
from persia.store.configs import TableConfig

__all__ = ["default_store"]

# By where its tables are.
_shared: weakref.WeakValueDictionary[object, Store] = (
    weakref.WeakValueDictionary()
)


def default_store(
    optimizer: SparseOptimizer | None, configs: Sequence[TableConfig]
) -> tuple[Store, list[TableConfig]]:
    """A private store for a module; or, where tables are on servers or ranks
    (see :class:`persia.Store`), one for all modules of this process, whose
    optimizer is that of the first. Then the module's own becomes that of its
    tables.

    Returns:
        The store, and the tables with their optimizers.
    """
    where = Settings().where()
    if where == "embedded":
        return Store(optimizer), list(configs)
    store = _shared.get(where)
    if store is None or store.closed:
        store = _shared[where] = Store(optimizer)
        return store, list(configs)
    if optimizer is None:
        return store, list(configs)
    return store, [
        c if c.optimizer else dataclasses.replace(c, optimizer=optimizer)
        for c in configs
    ]
