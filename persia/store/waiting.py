"""Gradients that wait, and updates that do not: what a loop forgot."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from persia import errors
from persia.base.warning import warn
from persia.store.operators import Held

# Backwards without a step before a warning, and before bytes count.
BACKWARDS = 64
_BYTES_MAX = 1 << 30
_BYTES_EACH = 4 << 10  # of a backward, beside its tensors

# Optimizer steps in a row, each after several backwards, before a warning.
_STEPS = 3


class Waiting:
    """The backwards of a store with ``update="step"`` since its step."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """A step has applied them, or they were dropped."""
        self._backwards = self._bytes = self._seen = 0

    def left(self, held: Sequence[Held]) -> None:
        """Some were dropped; held: what waits."""
        self._seen = len(held)

    def add(self, held: Sequence[Held]) -> None:
        """One more backward; held: what waits of all.

        Raises:
            LimitReached: they hold more than 1 GiB in more than 64 backwards.
        """
        for one in held[self._seen :]:
            self._bytes += sum(t.nbytes for t in one.tensors if t is not None)
        self._seen = len(held)
        self._bytes += _BYTES_EACH
        self._backwards += 1
        if self._backwards == BACKWARDS:
            warn(
                f"{BACKWARDS} backwards without store.optimizer.step(): with "
                'Store(update="step") no row changes before it, and the '
                f"gradients wait in memory ({self._bytes >> 20} MiB). Call it "
                'in the loop, or make the store with update="backward"'
            )
        if self._backwards > BACKWARDS and self._bytes > _BYTES_MAX:
            raise errors.LimitReached(
                f"{self._backwards} backwards without store.optimizer.step() "
                f"hold {self._bytes >> 20} MiB of gradients; they are "
                "dropped. Call it more often"
            )


class Accumulation:
    """Notices several backwards a step of the dense optimizer, each of which
    was an update of rows (``update="backward"``).

    The signal is a hook that torch calls after the step of any optimizer;
    loops without a dense optimizer are not noticed.
    """

    _all: ClassVar[weakref.WeakSet[Accumulation]] = weakref.WeakSet()
    _hook: ClassVar[Any] = None

    def __init__(self) -> None:
        self._backwards: dict[int, int] = {}  # by thread
        self._steps = 0
        Accumulation._all.add(self)
        if Accumulation._hook is None:
            Accumulation._hook = register_optimizer_step_post_hook(_stepped)

    def add(self) -> None:
        """One more backward, of this thread."""
        thread = threading.get_ident()
        self._backwards[thread] = self._backwards.get(thread, 0) + 1

    def step(self) -> None:
        """A dense optimizer has made a step, in this thread."""
        backwards = self._backwards.pop(threading.get_ident(), 0)
        if backwards == 0:
            return
        self._steps = self._steps + 1 if backwards > 1 else 0
        if self._steps == _STEPS:
            warn(
                f"{backwards} backwards for one step of the dense optimizer: "
                'Store(update="backward") has updated the rows at each of '
                'them. To accumulate, make the store with update="step" and '
                "call store.optimizer.step() beside the other"
            )


def _stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling() or hasattr(optimizer, "algorithm"):
        return  # a persia.optim optimizer
    for one in list(Accumulation._all):
        one.step()
