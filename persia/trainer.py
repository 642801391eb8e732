"""The training loop of ``persia train``, for scripts and notebooks too.

A :class:`Trainer` knows its position (epoch, batch), so that a run can stop
after any batch and go on from there, in this process or in another one.

Under ``torchrun`` each rank has a Trainer, its model in
``DistributedDataParallel``. All ranks stop after the same batch: an epoch ends
with the rank that has fewest batches.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel

from persia import errors
from persia.jagged import Batch, JaggedBatch
from persia.loader import DataLoader
from persia.metrics import BinaryMetrics, Scores, StreamingAUC
from persia.modules import EmbeddingBagCollection

__all__ = ["Clock", "Progress", "Trainer"]


@dataclass
class Clock:
    """Seconds of wall time of training, by what they were spent on.

    ``data`` waits for the source of batches, ``lookup`` is the wait for
    look-ups ahead and the forward of the embeddings, ``update`` their
    backward with the update of the rows.  Compiled code cannot be told
    apart: there forward and backward count as ``dense``.
    """

    total: float = 0.0
    data: float = 0.0
    lookup: float = 0.0
    update: float = 0.0

    @property
    def dense(self) -> float:
        """What none of the others took."""
        return self.total - self.data - self.lookup - self.update


@dataclass(frozen=True)
class Progress:
    """Where a run is.  ``loss`` is the mean since the last report, ``auc``
    that of the epoch so far, each batch scored before it was trained on; both
    are of this rank, ``rows_per_second`` of all."""

    epoch: int
    batch: int
    rows: int
    rows_per_second: float
    loss: float
    auc: float


class Trainer:
    """Trains a click model: cross entropy of one logit a sample, times
    ``batch.weight`` where there is one.

    Args:
        model: called as ``model(batch.dense, batch.ids)``, gives logits [B];
            in DistributedDataParallel where there are several ranks.
        optimizer: of the model's dense parameters.
        staleness: see :class:`persia.DataLoader`.
        compile: run the model through ``torch.compile``.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        staleness: int | None = 1,
        compile: bool = False,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.staleness = staleness
        self.epoch = 0
        self.batch = 0
        """Batches of the current epoch that are trained."""
        self.offset = 0
        """Samples of the batch after them that are trained, too: by a run
        whose batches had another size."""
        self.rows = 0
        """Samples trained by this object."""
        self.clock = Clock()
        self._ranks = (
            torch.distributed.get_world_size()
            if isinstance(model, DistributedDataParallel)
            else 1
        )
        self._stop = False
        self._lookup_began = 0.0
        self._update_began = math.inf
        self._forward: Callable[..., torch.Tensor] = model
        if compile:
            self._forward = torch.compile(model)
        else:
            for module in model.modules():
                if isinstance(module, EmbeddingBagCollection):
                    module.register_forward_pre_hook(self._before_lookup)
                    module.register_forward_hook(self._after_lookup)

    def fit(
        self,
        dataset: Iterable[Batch],
        epochs: int = 1,
        on_progress: Callable[[Progress], object] | None = None,
        every: float = 0.25,
    ) -> bool:
        """Trains until ``epochs`` epochs are done, counted from the first.

        ``dataset`` gives the same batches each time it is iterated over (its
        ``set_epoch`` method, if it has one, is called before).
        ``on_progress`` is called about every ``every`` seconds and at the
        end of an epoch.

        Returns:
            False if :meth:`stop` ended it before.

        Raises:
            NonFiniteGradient: the loss became NaN or infinite.
        """
        self._stop = False
        self.model.train()
        while self.epoch < epochs:
            if hasattr(dataset, "epoch"):
                dataset.epoch = self.epoch
            if not self._fit_epoch(dataset, on_progress, every):
                return False
            self.epoch, self.batch, self.offset = self.epoch + 1, 0, 0
        return True

    def stop(self) -> None:
        """Makes :meth:`fit` return after the batch it is at, in all ranks
        (for a signal handler)."""
        self._stop = True

    @torch.no_grad()
    def evaluate(self, dataset: Iterable[Batch]) -> Scores:
        """Scores the model on all batches of ``dataset``, of all ranks
        together: each brings its share; in eval mode, for as long."""
        model: Any = self.model
        if self._ranks > 1:
            model = self.model.module
            # DDP sends those of rank 0 before a forward: since the last one
            # each rank has added a batch of its own to its statistics.
            for buffer in model.buffers():
                torch.distributed.broadcast(buffer, 0)
        metrics = BinaryMetrics()
        training = model.training
        model.eval()
        try:
            for batch in dataset:
                metrics.update(model(batch.dense, batch.ids), _label(batch))
        finally:
            model.train(training)
        if self._ranks > 1:
            metrics.gather()
        return metrics.compute()

    def _fit_epoch(
        self,
        dataset: Iterable[Batch],
        on_progress: Callable[[Progress], object] | None,
        every: float,
    ) -> bool:
        """One epoch from the current batch on; False if stopped within it."""
        clock, auc = self.clock, StreamingAUC()
        scored: list[tuple[torch.Tensor, torch.Tensor]] = []

        def report() -> None:
            if not scored:
                return
            logits, labels = map(torch.cat, zip(*scored, strict=True))
            scored.clear()
            loss = float(binary_cross_entropy_with_logits(logits, labels))
            if not math.isfinite(loss):
                raise errors.NonFiniteGradient(
                    f"the loss became {loss} before batch {self.batch} of "
                    f"epoch {self.epoch}; are all dense features finite?  "
                    "Else lower the learning rates"
                )
            auc.update(logits, labels)
            if on_progress is not None:
                speed = self._ranks * self.rows / clock.total
                position = (self.epoch, self.batch, self.rows)
                on_progress(Progress(*position, speed, loss, auc.compute()))

        rest = itertools.islice(dataset, self.batch, None)
        source = self._timed(_without(rest, self.offset))
        reported = before = time.perf_counter()
        data = clock.data
        loader = DataLoader(source, self.model, staleness=self.staleness)
        with contextlib.closing(iter(loader)) as batches:
            while True:
                batch = next(batches, None)
                waited = time.perf_counter() - before
                clock.lookup += waited - (clock.data - data)
                ended, stopped = self._agree(batch is None, self._stop)
                if ended or batch is None:
                    break
                if stopped:
                    return False
                label = _label(batch)
                scored.append((self._train(batch, label), label))
                self.batch, self.offset = self.batch + 1, 0
                self.rows += len(label)
                now = time.perf_counter()
                clock.total += now - before
                if now - reported >= every:
                    report()
                    reported = now
                before, data = now, clock.data
        report()
        return True

    def _agree(self, ended: bool, stopped: bool) -> tuple[bool, bool]:
        """Whether any rank is at its end, or is to stop."""
        if self._ranks == 1:
            return ended, stopped
        both = torch.tensor([int(ended), int(stopped)])
        torch.distributed.all_reduce(both, torch.distributed.ReduceOp.MAX)
        return bool(both[0]), bool(both[1])

    def _timed(self, source: Iterator[Batch]) -> Iterator[Batch]:
        """``source``, its time counted as ``data``."""
        while True:
            before = time.perf_counter()
            batch = next(source, None)
            self.clock.data += time.perf_counter() - before
            if batch is None:
                return
            yield batch

    def _train(self, batch: Batch, label: torch.Tensor) -> torch.Tensor:
        """One step; the logits of the batch before it."""
        self.optimizer.zero_grad(set_to_none=True)
        logits = self._forward(batch.dense, batch.ids)
        loss = binary_cross_entropy_with_logits(
            logits, label, weight=batch.weight
        )
        self._update_began = math.inf
        loss.backward()  # type: ignore[no-untyped-call]
        self.clock.update += max(0.0, time.perf_counter() - self._update_began)
        self.optimizer.step()
        return logits.detach()

    # Autograd runs backwards what ran first in the forward last: a model
    # that begins with its look-up ends its backward with the update.

    def _before_lookup(self, module: nn.Module, args: Any) -> None:
        self._lookup_began = time.perf_counter()

    def _after_lookup(self, module: nn.Module, args: Any, out: Any) -> None:
        self.clock.lookup += time.perf_counter() - self._lookup_began
        values = out.values()
        if values.requires_grad:
            values.register_hook(self._before_update)

    def _before_update(self, grad: torch.Tensor) -> None:
        self._update_began = min(self._update_began, time.perf_counter())


def _label(batch: Batch) -> torch.Tensor:
    if batch.label is None:
        raise errors.InvalidArgument(
            "the data have no label: a model is neither trained nor scored "
            "without"
        )
    return batch.label


def _without(batches: Iterator[Batch], samples: int) -> Iterator[Batch]:
    """``batches`` without the first samples, which are all of one batch."""
    if samples:
        first = next(batches, None)
        if first is not None and len(first) > samples:
            yield _tail(first, samples)
    yield from batches


def _tail(batch: Batch, first: int) -> Batch:
    """The samples of a batch from one on."""
    ids, lengths = batch.ids, batch.ids.lengths()
    bags = (torch.arange(len(batch)) >= first).repeat(len(ids.keys()))
    kept = bags.repeat_interleave(lengths)
    weights = ids.weights_or_none()
    return Batch(
        None if batch.dense is None else batch.dense[first:],
        JaggedBatch(
            ids.keys(),
            ids.values()[kept],
            None if ids.lengths_or_none() is None else lengths[bags],
            weights=None if weights is None else weights[kept],
        ),
        None if batch.label is None else batch.label[first:],
        None if batch.weight is None else batch.weight[first:],
        None if batch.timestamp is None else batch.timestamp[first:],
    )
