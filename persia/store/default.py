"""The store of modules that were given none."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Sequence
from typing import TypeVar

from persia.distributed.cluster import Settings
from persia.optim import SparseOptimizer
from persia.store.configs import TableConfig
from persia.store.store import Store

# By where its tables are.
_shared: weakref.WeakValueDictionary[object, Store] = (
    weakref.WeakValueDictionary()
)

# Names of tables there that modules of this process were given, ever.
_given: dict[object, set[str]] = {}


Config = TypeVar("Config", bound=TableConfig)


def default_store(
    optimizer: SparseOptimizer | None, configs: Sequence[Config]
) -> tuple[Store, list[Config]]:
    """A store whose tables are those of one module alone.

    In one process it is a private one. Where tables are on servers or ranks
    (see :class:`persia.Store`), modules have one store, whose optimizer is
    that of the first. Then the module's own becomes that of its tables, and
    a table whose name an earlier module has is ``name-2``. So ranks make
    their modules in the same order.

    Returns:
        The store, and the tables with their optimizers and names there.
    """
    where = Settings().where()
    if where == "embedded":
        return Store(optimizer), list(configs)
    store = _shared.get(where)
    first = store is None or store.closed
    if store is None or store.closed:
        store = _shared[where] = Store(optimizer)
    given = _given.setdefault(where, set())
    found = []
    for config in configs:
        changes: dict[str, object] = {"name": _free(config.name, given)}
        if not first and optimizer is not None and config.optimizer is None:
            changes["optimizer"] = optimizer
        found.append(dataclasses.replace(config, **changes))  # type: ignore[arg-type]
    given.update(config.name for config in found)
    return store, found


def _free(name: str, given: set[str]) -> str:
    """The name, or with the first number that makes it another."""
    number, free = 1, name
    while free in given:
        number += 1
        free = f"{name}-{number}"
    return free
