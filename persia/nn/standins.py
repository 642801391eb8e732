"""What takes the place of lookups while a model is exported: its graph must
not hold a store, which is of this process."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from persia.data.batches.ids import Ids
from persia.store.configs import TableConfig

#: Takes the kind of a plan, its outputs (name, feature, table), ids and
#: weights; gives what the lookup would give.
StandIn = Callable[
    [int, Sequence[tuple[str, str, TableConfig]], Ids, Tensor | None], Tensor
]


class _Now(threading.local):
    """Of a thread: others look up rows meanwhile."""

    def __init__(self) -> None:
        self.functions: list[StandIn] = []


_now = _Now()


def stand_in() -> StandIn | None:
    """What is called in place of a lookup; None: the store is."""
    return _now.functions[-1] if _now.functions else None


@contextlib.contextmanager
def standing_in(function: StandIn) -> Iterator[None]:
    """Within, lookups of this thread call it."""
    _now.functions.append(function)
    try:
        yield
    finally:
        _now.functions.pop()
