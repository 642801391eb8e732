"""A pass over data whose ranks change: what of it is trained, and what is
left for the ranks that there are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Self

from persia.data.base import Dataset
from persia.data.batches.batch import Batch


class Sharing(NamedTuple):
    """How a pass, or what was left of one, was shared among ranks.

    Attributes:
        done: how many of its first batches each rank has trained.
        more: the numbers of others that it has trained, from 0.
    """

    done: tuple[int, ...]
    more: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, done: Sequence[int], more: Sequence[Sequence[int]]) -> Self:
        """From numbers of any kind of sequence, such as a file has."""
        return cls(tuple(done), tuple(map(tuple, more)))

    @classmethod
    def even(cls, ranks: int, batches: int) -> Self:
        """Each of these ranks has trained its first ``batches`` ones."""
        return cls((batches,) * ranks, ((),) * ranks)

    @property
    def is_new(self) -> bool:
        """Whether nothing of it is trained."""
        return not any(self.done) and not any(self.more)

    def has(self, rank: int, number: int) -> bool:
        """Whether a rank has trained the batch of this number of its own."""
        return number < self.done[rank] or number in self.more[rank]


class Shared:
    """The batches of one rank: its share of a pass, or its part of what was
    left of a pass when the number of ranks changed.

    Args:
        data: the share of this rank.
        begins: is called before each pass.

    Attributes:
        sharings: of the present pass, if other ranks began it. The first is
            of the shares of those ranks. Each other one is of what the one
            before it left: of n ranks each took every n-th batch.
    """

    def __init__(
        self, data: Dataset, begins: Callable[[], None] | None = None
    ) -> None:
        self.data = data
        self.sharings: list[Sharing] = []
        self._begins = begins

    def continues(self, epoch: int, sharings: Sequence[Sharing]) -> None:
        """The next pass is what is left of this epoch."""
        self.data.epoch = epoch
        self.sharings = list(sharings)

    def set_epoch(self, epoch: int) -> None:
        """A pass begins."""
        if epoch != self.data.epoch:
            self.sharings = []
        self.data.epoch = epoch
        if self._begins is not None:
            self._begins()

    @property
    def begins(self) -> int:
        """Batches before the place where the next iteration begins."""
        return 0 if self.sharings else self.data.begins

    def __iter__(self) -> Iterator[Batch]:
        if self.sharings:
            return self.data.left(self.sharings)
        return iter(self.data)
