"""What takes the place of lookups while a model is exported: its graph must
not hold a store, which is of this process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from persia.data.batches.ids import Ids
from persia.store.configs import TableConfig

#: Takes the kind of a plan, its outputs (name, feature, table), ids and
#: weights; gives what the lookup would give.
StandIn = Callable[
    [int, Sequence[tuple[str, str, TableConfig]], Ids, Tensor | None], Tensor
]

_now: list[Any] = []


def stand_in() -> StandIn | None:
    """What is called in place of a lookup; None: the store is."""
    return _now[-1] if _now else None


@contextlib.contextmanager
def standing_in(function: StandIn) -> Iterator[None]:
    """Within, lookups of all modules call it. For one thread: models are not
    trained meanwhile."""
    _now.append(function)
    try:
        yield
    finally:
        _now.pop()
