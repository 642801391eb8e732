"""Requests that wait become batches as soon as an executor is free.

There is no timer: a request that arrives alone is computed alone. What has
arrived meanwhile is computed together, up to a number of samples."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from persia.errors import (
    Closed,
    DeadlineExceeded,
    InternalError,
    LimitReached,
    PersiaError,
)
from persia.serving.measures import Measures
from persia.serving.model import ExportedModel

Outputs = tuple[Tensor, ...]


@dataclass
class _Waiting:
    """A request in the queue."""

    model: ExportedModel
    tensors: Sequence[Tensor]
    samples: int
    until: float
    since: float
    answer: Future[Outputs]

    def goes_with(self, other: _Waiting) -> bool:
        """Whether the two may be one batch."""
        return self.model is other.model and all(
            a.shape[1:] == b.shape[1:]
            for a, b in zip(self.tensors, other.tensors, strict=True)
        )


class Batcher:
    """A bounded queue of requests, and threads that compute them.

    Args:
        executors: threads.
        batch: samples of a batch; a request of more is one alone.
        queue: samples that may wait; beyond, requests are refused.
        measures: of the phases.
    """

    def __init__(
        self, executors: int, batch: int, queue: int, measures: Measures
    ) -> None:
        self._batch = batch
        self._room = queue
        self._measures = measures
        self._queue: deque[_Waiting] = deque()
        self._waiting = 0
        self._changed = threading.Condition()
        self._ends = False
        self._threads = [
            threading.Thread(target=self._work, name=f"persia-executor-{i}")
            for i in range(executors)
        ]
        for thread in self._threads:
            thread.daemon = True
            thread.start()

    @property
    def waiting(self) -> int:
        """Samples in the queue."""
        return self._waiting

    def submit(
        self, model: ExportedModel, tensors: Sequence[Tensor], timeout: float
    ) -> Future[Outputs]:
        """The outputs, once they are there.

        Args:
            model: that computes them.
            tensors: its inputs, which were checked.
            timeout: seconds; then the request is an error, and is not
                computed any more.

        Raises:
            LimitReached: the queue is full.
            Closed: the server ends.
        """
        now = time.monotonic()
        one = _Waiting(
            model,
            tensors,
            model.form.samples(tensors),
            now + timeout,
            now,
            Future(),
        )
        with self._changed:
            if self._ends:
                raise Closed("the server ends")
            # One that is larger than the queue may wait alone.
            if self._queue and self._waiting + one.samples > self._room:
                raise LimitReached(
                    f"{self._waiting:,} samples wait, and the queue has room "
                    f"for {self._room:,}: send less, or add servers"
                )
            self._queue.append(one)
            self._waiting += one.samples
            self._changed.notify()
        return one.answer

    def _take(self) -> list[_Waiting]:
        """What is one batch now; waits for the first."""
        with self._changed:
            while not self._queue:
                if self._ends:
                    return []
                self._changed.wait()
            found = [self._queue.popleft()]
            samples = found[0].samples
            while self._queue:
                one = self._queue[0]
                more = samples + one.samples
                if more > self._batch or not one.goes_with(found[0]):
                    break
                found.append(self._queue.popleft())
                samples = more
            self._waiting -= samples
            return found

    def _work(self) -> None:
        while batch := self._take():
            now = time.monotonic()
            alive = []
            for one in batch:
                self._measures.phases["queue"].observe(now - one.since)
                if one.until < now:
                    one.answer.set_exception(
                        DeadlineExceeded(
                            "the request waited until its deadline: "
                            f"{self._waiting:,} samples wait behind it"
                        )
                    )
                elif one.answer.set_running_or_notify_cancel():
                    alive.append(one)
            if alive:
                self._compute(alive)

    def _compute(self, batch: list[_Waiting]) -> None:
        begun = time.monotonic()
        try:
            outputs = _run(batch)
        except Exception as error:  # one must not end the executor
            if len(batch) > 1:  # of whom is it?
                for one in batch:
                    self._compute([one])
                return
            wrapped = error
            if not isinstance(error, PersiaError):
                wrapped = _as_ours(error)
            batch[0].answer.set_exception(wrapped)
            return
        self._measures.phases["compute"].observe(time.monotonic() - begun)
        self._measures.batches.observe(sum(one.samples for one in batch))
        for one, answer in zip(batch, outputs, strict=True):
            one.answer.set_result(answer)

    def close(self) -> None:
        """No more requests; those that wait are computed first."""
        with self._changed:
            self._ends = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()


def _as_ours(error: Exception) -> PersiaError:
    return InternalError(f"the model failed: {type(error).__name__}: {error}")


def _run(batch: list[_Waiting]) -> list[Outputs]:
    """The outputs of each request."""
    model = batch[0].model
    if len(batch) == 1:
        return [model.run(batch[0].tensors)]
    joined = [
        torch.cat(parts)
        for parts in zip(*(one.tensors for one in batch), strict=True)
    ]
    sizes = [one.samples for one in batch]
    split: Any = torch.split
    found = [split(out, sizes) for out in model.run(joined)]
    return list(zip(*found, strict=True))
