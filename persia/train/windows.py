"""Training in time: batches by the window that their samples are in."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from datetime import UTC, datetime

import torch

from persia import errors
from persia.data import Dataset
from persia.data.batches.batch import Batch, part_of


class Windows:
    """The batches of a source in time order, a window at a time.

    A batch that reaches over the end of a window is cut there. A sample that
    is late belongs to the window that is being read. Windows without samples
    are left out.

    Args:
        data: batches with ``timestamp``, in time order. It is copied: its
            own position does not change.
        seconds: of a window; windows begin at multiples of it since 1970.
        share: (rank, ranks): give the rank-th of so many parts of each
            batch, in order, not the whole batch.
        even: leave out a batch with fewer samples than ranks, so that all
            ranks have as many batches.
    """

    def __init__(
        self,
        data: Dataset,
        seconds: float,
        *,
        share: tuple[int, int] = (0, 1),
        even: bool = False,
    ) -> None:
        self._data = copy.copy(data)
        self._data.forget_position()
        self._seconds = seconds
        self._share = share
        self._even = even
        self._batches: Iterator[Batch] | None = None
        self._left: Batch | None = None  # of the next window
        self.now: int | None = None
        """The number of the window that is being read, since 1970."""

    @property
    def name(self) -> str:
        """When the window begins, in UTC."""
        begin = (self.now or 0) * self._seconds
        return f"{datetime.fromtimestamp(begin, UTC):%Y-%m-%d %H:%M}"

    def next(self) -> bool:
        """Goes to the next window with samples; False at the end. What was
        left of the present one is passed."""
        for _ in self._rest():
            pass
        if self._left is None:
            self._left = self._read()
        if self._left is None:
            return False
        self.now = int(self._numbers(self._left)[0])
        return True

    def __iter__(self) -> Iterator[Batch]:
        """The batches of the window that are left."""
        rank, ranks = self._share
        for batch in self._rest():
            n = len(batch)
            first, end = n * rank // ranks, n * (rank + 1) // ranks
            if n < ranks and (self._even or first == end):
                continue
            yield batch if ranks == 1 else part_of(batch, first, end)

    def _rest(self) -> Iterator[Batch]:
        """What is left of the window, for all ranks."""
        if self.now is None:
            return
        while (batch := self._left or self._read()) is not None:
            self._left = None
            later = torch.nonzero(self._numbers(batch) > self.now)
            n = int(later[0]) if len(later) else len(batch)
            if n < len(batch):
                self._left = part_of(batch, n, len(batch))
                if n:
                    yield part_of(batch, 0, n)
                return
            yield batch

    def close(self) -> None:
        """Ends the reading."""
        if hasattr(self._batches, "close"):
            self._batches.close()  # type: ignore[union-attr]

    def _read(self) -> Batch | None:
        if self._batches is None:
            self._batches = iter(self._data)
        return next(self._batches, None)

    def _numbers(self, batch: Batch) -> torch.Tensor:
        if batch.timestamp is None:
            raise errors.InvalidArgument(
                "the data have no times to cut windows by: name the column in "
                "the schema (timestamp: COLUMN)"
            )
        return torch.floor(batch.timestamp / self._seconds)
