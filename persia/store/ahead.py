"""Ids that were looked up ahead, to know them again at their forward."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from persia.base.warning import warn
from persia.data.batches.ids import Ids
from persia.store.operators import versions

# Batches given out last that are known by their contents: more than loops
# take before a backward.
_KEPT = 16


@dataclass(frozen=True)
class LookedUp:
    """Ids of a batch as a module has looked them up.

    Attributes:
        number: of the batch.
        ids: on the CPU.
        weights: that took part, float32 [n], or None.
        version: of the batch's own tensors at that time.
    """

    number: int
    ids: Ids
    weights: Tensor | None
    version: int

    def ticket(self) -> Tensor:
        """What a forward with these ids shows, int64 [2]."""
        return torch.tensor([self.number, self.version], device="cpu")

    def unchanged(self) -> bool:
        """Whether the batch's own tensors are as they were."""
        return versions(*self.ids[5]) == self.version

    def same(self, ids: Ids, weights: Tensor | None) -> bool:
        """Whether these are the same ids, wherever they were copied to."""
        return (
            self.ids[0] == ids[0]
            and _equal(self.ids[1], ids[1])
            and _equal(self.ids[2], ids[2])
            and _equal(self.weights, weights)
            and self.unchanged()
        )


class Joins(Protocol):
    """Lookups of many modules as one; see :mod:`persia.nn.joined`."""

    @property
    def latest(self) -> int: ...

    def take(
        self, rows: Any, padding: int | None, ids: Tensor | None
    ) -> Tensor | None: ...

    def learn(self, rows: Any, padding: int | None, ids: Tensor) -> None: ...


class Ahead:
    """The batches of a store that its loaders gave out last.

    Attributes:
        joins: those of the open passes.
    """

    def __init__(self) -> None:
        self._given: deque[LookedUp] = deque(maxlen=_KEPT)
        self._warned = False
        self.joins: list[Joins] = []

    def add(self, one: LookedUp) -> None:
        """A loop gets its batch."""
        self._given.appendleft(one)

    def remove(self, numbers: set[int]) -> None:
        """Batches of a pass that has ended."""
        kept = [one for one in self._given if one.number not in numbers]
        self._given = deque(kept, maxlen=_KEPT)

    def find(self, ids: Ids, weights: Tensor | None) -> Tensor | None:
        """The ticket of the newest batch with these ids."""
        for one in list(self._given):
            if one.same(ids, weights):
                return one.ticket()
        return None

    def take(
        self, rows: Any, padding: int | None, ids: Tensor | None
    ) -> Tensor | None:
        """The part of a module in a joined lookup, if it has these ids;
        where it has not, the latest batch shows what to join."""
        for one in self.joins:
            if (part := one.take(rows, padding, ids)) is not None:
                return part
        if self.joins and ids is not None:
            latest = max(self.joins, key=lambda one: one.latest)
            latest.learn(rows, padding, ids)
        return None

    def warn(self, why: str) -> None:
        """Says once that a lookup is not ahead."""
        if not self._warned:
            self._warned = True
            warn(
                f"persia.DataLoader: {why}; the forward looks its ids up "
                "itself. store.stats()['lookahead']['not_prefetched'] counts "
                "such forwards"
            )

    def miss(self) -> None:
        """A forward with gradient has other ids than those looked up."""
        if self._given:
            self.warn(
                "a forward has ids that no batch of the loader has, or that "
                "have changed since"
            )


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a is b or torch.equal(a, b)
