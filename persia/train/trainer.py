"""The training loop of ``persia train``, for scripts and notebooks too.

A :class:`Trainer` knows its position (epoch, batch), so that a run can stop
after any batch and continue from there, in this process or in another one.

Under ``torchrun`` each rank has a Trainer, its model in
``DistributedDataParallel``. All ranks stop after the same batch: an epoch ends
with the rank that has fewest batches.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from persia import errors
from persia.base.check import number
from persia.base.warning import warn
from persia.data import Dataset, Kafka
from persia.data.batches.batch import Batch, part_of
from persia.data.sharing import Shared
from persia.distributed.ranks import side_group
from persia.loop.loader import DataLoader
from persia.loop.stream import Stream
from persia.metrics import Scores, TaskMetrics
from persia.nn.embedding import lookups_of
from persia.nn.lookups import stores_of
from persia.store.engine import engine_of
from persia.train.tasks import (
    RunningAUC,
    check_clicks,
    label_of,
    matched,
    task_loss,
)


@dataclass
class Clock:
    """Seconds of wall time of training, by what they were spent on.

    ``data`` waits for the source of batches, ``lookup`` is the wait for
    lookups ahead and the forward of the embeddings, ``update`` the update of
    the rows, without what other threads do meanwhile.  Compiled code cannot be
    separated: there forward and backward count as ``dense``."""

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
    """Where a run is.  ``loss`` is the mean of what was minimised since the
    last report, ``auc`` that of the epoch so far, each batch scored before it
    was trained on; in both a sample counts by its weight. Of several tasks
    ``auc`` is the mean, and ``tasks`` has that of each. They are of this rank,
    ``rows_per_second`` of all."""

    epoch: int
    batch: int
    samples: int
    rows_per_second: float
    loss: float
    auc: float
    tasks: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Every:
    """Something that a training does now and then: save, evaluate, log.

    Attributes:
        call: what is called, between two optimizer steps; on all ranks.
        steps: after each ``steps`` optimizer steps, counted over all epochs.
        minutes: or when so many minutes have passed since the last time.
        when: or when this says so, on one of the ranks.

    Raises:
        InvalidArgument: none or several of them, or one that is not positive.
    """

    call: Callable[[], object]
    steps: int | None = None
    minutes: float | None = None
    when: Callable[[], bool] | None = None

    def __post_init__(self) -> None:
        if [self.steps, self.minutes, self.when].count(None) != 2:
            raise errors.InvalidArgument(
                "Every: give one of steps, minutes and when"
            )
        if self.steps is not None:
            number("steps", self.steps, 1, 2**62)
        if self.minutes is not None:
            number("minutes", self.minutes, 1e-9, 1e9)


class _Due:
    """Which of several :class:`Every` are due."""

    def __init__(self, hooks: Sequence[Every], step: int) -> None:
        self._hooks = hooks
        self._steps = [step] * len(hooks)  # of the last call
        self._times = [time.monotonic()] * len(hooks)

    def find(self, trainer: Trainer) -> list[bool]:
        now, step = time.monotonic(), trainer.step
        return [
            not trainer.in_step
            and step > self._steps[i]
            and (
                hook.when()
                if hook.when is not None
                else step % hook.steps == 0
                if hook.steps is not None
                else now - self._times[i] >= 60 * (hook.minutes or 0.0)
            )
            for i, hook in enumerate(self._hooks)
        ]

    def call(self, due: Sequence[bool], step: int) -> None:
        for i, hook in enumerate(self._hooks):
            if due[i]:
                hook.call()
                self._steps[i], self._times[i] = step, time.monotonic()


class Trainer:
    """Trains a click model: cross entropy of the logits of a sample, times
    ``batch.weight`` where there is one. All scores count samples by it, too.

    With several labels, ``batch.label`` [B, tasks], the loss is the sum over
    the tasks of the mean over the samples that have the label: NaN is one that
    is missing.

    Args:
        model: called as ``model(batch.dense, batch.ids)``, gives logits in
            the shape of ``batch.label``, [B] or [B, tasks];
            in DistributedDataParallel where there are several ranks. Rows
            of all its persia modules are trained, whatever their stores.
        optimizer: of the model's dense parameters.
        staleness: see :class:`persia.DataLoader`.
        compile: run the model through ``torch.compile``.
        prefetch: see :class:`persia.DataLoader`.
        device: of the dense part, where ``model`` is already; batches are
            moved there, their ids stay on the host.
        autocast: the dtype of mixed precision, ``torch.bfloat16``; None:
            none.
        accumulate: batches an optimizer step. Their gradients are averaged;
            a step at the end of an epoch may have fewer batches, each with
            the same weight. More than one needs ``Store(update="step")`` for
            all tables.
        scheduler: of a dense learning rate; a step of it follows each
            optimizer step.
        tasks: the names of the columns of ``batch.label``, where it has
            several: of their scores.

    Raises:
        InvalidArgument: ``accumulate`` with a store that updates rows in each
            backward, or a value out of range.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        staleness: int | None = 1,
        compile: bool = False,
        prefetch: bool | str = "auto",
        device: torch.device | str = "cpu",
        autocast: torch.dtype | None = None,
        accumulate: int = 1,
        scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
        tasks: Sequence[str] = (),
    ) -> None:
        number("accumulate", accumulate, 1, 1 << 20)
        self.model = model
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.staleness = staleness
        self.prefetch = prefetch
        self.device = torch.device(device)
        self.autocast = autocast
        self.accumulate = accumulate
        self.tasks = list(tasks)
        self.step = 0
        """Optimizer steps, over all epochs."""
        self.epoch = 0
        self.batch = 0
        """Batches of the current epoch that are trained; of Kafka, all."""
        self.offset = 0
        """Samples of the next batch that a run with another batch size has
        trained."""
        self.samples = 0
        """Samples trained by this object."""
        self.stopped_by_others = False
        """Whether another rank alone was stopped when the last training
        ended."""
        self.clock = Clock()
        self._ranks = (
            torch.distributed.get_world_size()
            if isinstance(model, DistributedDataParallel)
            else 1
        )
        self._stores = stores_of(model)
        eager = [s for s in self._stores if s.update != "step"]
        if accumulate > 1 and eager:
            tables = sorted({name for s in eager for name in s.tables})
            raise errors.InvalidArgument(
                f"accumulate is {accumulate}, but the store of tables "
                f"{tables} applies the gradients of each backward; make it "
                'with update="step"'
            )
        self._gathered = 0  # batches since the last optimizer step
        self._scored: list[tuple[torch.Tensor, ...]] = []
        self._auc = RunningAUC(self.tasks)
        self._progress: Progress | None = None
        self._stop = False
        self._lookups: list[float] = []  # when those that run now began
        self._training = False  # a batch is, so its lookups count
        self._compiles = compile
        self._waits = False  # for a batch
        self._forward: Callable[..., torch.Tensor] = model
        if compile:
            self._forward = torch.compile(model)

    def fit(
        self,
        dataset: Iterable[Batch] | Stream,
        epochs: int = 1,
        on_progress: Callable[[Progress], object] | None = None,
        every: float = 0.25,
        hooks: Sequence[Every] = (),
    ) -> bool:
        """Trains until ``epochs`` epochs are done, counted from the first.

        ``dataset`` gives the same batches each time it is iterated over, or
        it is a Stream, whose data loaders count and end the epochs. Before
        each epoch its ``set_epoch`` is called with the number of the epoch,
        or its ``epoch`` is set, if it has one of them.
        ``on_progress`` is called about every ``every`` seconds and at the
        end of an epoch, ``hooks`` when they are due.

        Returns:
            False if :meth:`stop` ended it before.

        Raises:
            InvalidArgument: a batch has no label, or one that is not 0 or 1
                (or NaN, of several); the optimizer has no parameter of the
                model; or several epochs of a generator.
            ShapeError: the model gives other numbers of logits.
            NonFiniteGradient: the loss became NaN or infinite.
        """
        self._check_optimizer()
        if epochs <= self.epoch:
            warn(
                f"fit(epochs={epochs}) trains nothing: {self.epoch} epochs "
                "are done, and epochs count from the first one"
            )
        if epochs > self.epoch + 1 and isinstance(dataset, Iterator):
            raise errors.InvalidArgument(
                f"fit() got a {type(dataset).__name__}, which can be read "
                f"once, for {epochs - self.epoch} epochs; pass a list, or a "
                "data set of persia.data"
            )
        try:
            return self._fit(dataset, epochs, on_progress, every, hooks)
        finally:
            self._stop = False

    def _check_optimizer(self) -> None:
        """Raises InvalidArgument if no dense parameter would be trained."""
        groups = self.optimizer.param_groups
        known = {id(p) for group in groups for p in group["params"]}
        dense = [
            id(p)
            for p in self.model.parameters()
            if p.requires_grad and p.numel()
        ]
        if dense and known.isdisjoint(dense):
            raise errors.InvalidArgument(
                "the optimizer has no dense parameter of the model, such as "
                "one of a model before: make it of model.parameters(), or "
                "freeze the model's"
            )

    def _fit(
        self,
        dataset: Iterable[Batch] | Stream,
        epochs: int,
        on_progress: Callable[[Progress], object] | None,
        every: float,
        hooks: Sequence[Every],
    ) -> bool:
        self.model.train()
        due = _Due(hooks, self.step)
        with self._lookups_timed():
            while self.epoch < epochs:
                if hasattr(dataset, "set_epoch"):
                    dataset.set_epoch(self.epoch)
                elif hasattr(dataset, "epoch"):
                    dataset.epoch = self.epoch
                if not self._fit_epoch(dataset, on_progress, every, due):
                    return False
                self.epoch, self.offset = self._next_epoch(dataset), 0
                if not isinstance(dataset, Kafka):  # that continues
                    self.batch = 0
        return True

    def progress(self) -> Progress | None:
        """Where the epoch is, and its scores; None before its first batch.

        Raises:
            InvalidArgument: a label on a device is not 0 or 1.
            NonFiniteGradient: the loss became NaN or infinite.
        """
        if not self._scored:
            return self._progress
        logits, labels, weights = map(
            torch.cat, zip(*self._scored, strict=True)
        )
        self._scored.clear()
        check_clicks(labels)
        loss = float(task_loss(logits, labels, weights))
        if not math.isfinite(loss):
            raise errors.NonFiniteGradient(
                f"the loss became {loss} before batch {self.batch} of "
                f"epoch {self.epoch}; are all dense features finite?  "
                "Else lower the learning rates"
            )
        self._auc.update(logits.cpu(), labels.cpu(), weights.cpu())
        speed = self._ranks * self.samples / self.clock.total
        position = (self.epoch, self.batch, self.samples)
        auc, by_task = self._auc.compute(), self._auc.by_task()
        self._progress = Progress(*position, speed, loss, auc, by_task)
        return self._progress

    @property
    def in_step(self) -> bool:
        """Whether batches wait for an optimizer step."""
        return self._gathered > 0

    def stop(self) -> None:
        """Makes :meth:`fit` return after the batch it is at, or the next one
        at once, in all ranks."""
        self._stop = True

    def interrupt(self) -> None:
        """The same for the handler of a signal: it does not wait for another
        batch either."""
        self._stop = True
        if self._waits:
            raise _Stopped

    def _unless_stopped(self, what: Callable[[], Any]) -> Any:
        """What a call that may wait for data returns; None: it was stopped."""
        if self._stop:
            return None
        try:
            return self._waiting(what)
        except _Stopped:
            return None

    def _waiting(self, what: Callable[[], Any]) -> Any:
        self._waits = True
        try:
            return what()
        finally:
            self._waits = False

    @torch.no_grad()
    def evaluate(self, dataset: Iterable[Batch]) -> Scores:
        """Scores the model on all batches of ``dataset``, of all ranks
        together: each brings its share; in eval mode, for as long. A sample
        counts by its weight, where the batches have weights.

        Raises:
            InvalidArgument: a batch has no label, or one that is not 0 or 1
                (or NaN, of several).
        """
        model: Any = self.model
        if self._ranks > 1:
            model = self.model.module
            # DDP sends those of rank 0 before a forward: since the last one
            # each rank has added a batch of its own to its statistics.
            for buffer in model.buffers():
                torch.distributed.broadcast(buffer, 0)
        metrics = TaskMetrics(self.tasks)
        training = model.training
        model.eval()
        try:
            for batch in dataset:
                batch = self._moved(batch)
                with self._mixed():
                    logits = model(batch.dense, batch.ids)
                label = label_of(batch)
                logits = matched(logits.float(), label)
                metrics.update(logits, label, batch.weight, batch.group)
        finally:
            model.train(training)
        if self._ranks > 1:
            metrics.gather()
        return metrics.compute()

    def _fit_epoch(
        self,
        dataset: Iterable[Batch] | Stream,
        on_progress: Callable[[Progress], object] | None,
        every: float,
        due: _Due,
    ) -> bool:
        """One epoch from the current batch on; False if stopped within it."""
        clock = self.clock
        self._auc, self._progress = RunningAUC(self.tasks), None

        def report() -> None:
            at = self.progress()
            if on_progress is not None and at is not None:
                on_progress(at)

        source: Any = dataset
        if not isinstance(dataset, Stream):
            begin = self.batch
            if isinstance(dataset, Kafka):
                self.batch, begin = dataset.rewind(begin), 0
            elif isinstance(dataset, Dataset | Shared):
                begin = max(0, begin - dataset.begins)
            rest = itertools.islice(dataset, begin, None)
            source = self._timed(_without(rest, self.offset))
        reported = before = time.perf_counter()
        data = clock.data
        loader: DataLoader[Batch] = DataLoader(
            source,
            self.model,
            staleness=self.staleness,
            prefetch=self.prefetch,
        )
        opened = self._unless_stopped(lambda: iter(loader))
        if opened is None:
            return False
        with opened as batches:
            while True:
                batch = self._unless_stopped(lambda: next(batches, None))
                waited = time.perf_counter() - before
                clock.lookup += waited - (clock.data - data)
                ended, stopped, *now_due = self._agree(
                    batch is None and not self._stop,
                    self._stop,
                    *due.find(self),
                )
                self.stopped_by_others = stopped and not self._stop
                before += self._call(due, now_due)
                if ended and isinstance(dataset, Stream):
                    _skip_rest(batch, batches)
                if ended or stopped or batch is None:
                    break
                label = self._train(batch)
                self.batch, self.offset = self.batch + 1, 0
                self.samples += len(label)
                now = time.perf_counter()
                clock.total += now - before
                if now - reported >= every:
                    report()
                    reported = now
                before, data = now, clock.data
            if self._gathered:
                self._update()
        report()
        return ended or not stopped

    def _call(self, due: _Due, now_due: Sequence[bool]) -> float:
        """The seconds that hooks took."""
        began = time.perf_counter()
        if any(now_due):
            due.call(now_due, self.step)
        return time.perf_counter() - began

    def _next_epoch(self, dataset: Iterable[Batch] | Stream) -> int:
        """What follows this epoch. Data loaders count those of a stream, so
        that a trainer that was started again is in theirs."""
        if not isinstance(dataset, Stream):
            return self.epoch + 1
        over = torch.tensor(dataset.stats()["epochs"], device="cpu")
        if self._ranks > 1:
            group = torch.distributed
            group.all_reduce(over, group.ReduceOp.MAX, group=side_group(group))
        return max(self.epoch, int(over))

    def _agree(self, *flags: bool) -> list[bool]:
        """Of each flag whether it is set on any rank."""
        if self._ranks == 1:
            return list(flags)
        # On the host: a value on the device would wait for the last step.
        every = torch.tensor([int(flag) for flag in flags], device="cpu")
        group = torch.distributed
        group.all_reduce(every, group.ReduceOp.MAX, group=side_group(group))
        return [bool(flag) for flag in every.tolist()]

    def _timed(self, source: Iterator[Batch]) -> Iterator[Batch]:
        """``source``, its time counted as ``data``."""
        while True:
            before = time.perf_counter()
            batch = next(source, None)
            self.clock.data += time.perf_counter() - before
            if batch is None:
                return
            yield batch

    def _train(self, batch: Batch) -> torch.Tensor:
        """Forward and backward, and the optimizers' step where it is due;
        the labels."""
        label = label_of(batch)
        if label.device.type == "cpu":  # others are on their way meanwhile
            check_clicks(label)
        batch = self._moved(batch)
        label = label_of(batch)
        spent = self._spent()
        if not self._gathered:
            self.optimizer.zero_grad(set_to_none=True)
        last = self._gathered + 1 == self.accumulate
        with self._kept_apart(last):
            self._training = True
            try:
                with self._mixed():
                    logits = self._forward(batch.dense, batch.ids)
            finally:
                self._training = False
                self._lookups.clear()
            logits, label = matched(logits.float(), label), label.float()
            loss = task_loss(logits, label, batch.weight)
            (loss / self.accumulate).backward()  # type: ignore[no-untyped-call]
        self._gathered += 1
        if last:
            self._update()
        if not self._compiles:
            self.clock.update += self._spent() - spent
        weight = batch.weight
        if weight is None:
            weight = torch.ones(len(label), device=label.device)
        self._scored.append((logits.detach(), label, weight))
        return label

    def _spent(self) -> float:
        """Seconds that this process has spent on updates of the rows."""
        return sum(engine_of(store).seconds for store in self._stores)

    def _moved(self, batch: Batch) -> Batch:
        if self.device.type == "cpu":
            return batch
        if self.device.type != "cuda":
            return batch.to(self.device)
        # A copy of pageable memory would wait for the device.
        return batch.pin_memory().to(self.device, non_blocking=True)

    def _kept_apart(
        self, last: bool
    ) -> contextlib.AbstractContextManager[Any]:
        """DistributedDataParallel sums gradients at the last batch of a
        step."""
        if last or not isinstance(self.model, DistributedDataParallel):
            return contextlib.nullcontext()
        return self.model.no_sync()

    def _mixed(self) -> contextlib.AbstractContextManager[Any]:
        if self.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.autocast)

    def _update(self) -> None:
        """An optimizer step."""
        self.optimizer.step()
        for store in self._stores:
            store.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        self._gathered = 0
        self.step += 1

    @contextlib.contextmanager
    def _lookups_timed(self) -> Iterator[None]:
        """Meanwhile lookups are timed; compiled ones cannot be."""
        with contextlib.ExitStack() as hooks:
            for module in [] if self._compiles else lookups_of(self.model):
                before = module.register_forward_pre_hook(self._before_lookup)
                after = module.register_forward_hook(self._after_lookup)
                hooks.callback(before.remove)
                hooks.callback(after.remove)
            yield

    # A module of torch's kind looks up by another within it: of both the
    # outer one counts.

    def _before_lookup(self, module: nn.Module, args: Any) -> None:
        if self._training:
            self._lookups.append(time.perf_counter())

    def _after_lookup(self, module: nn.Module, args: Any, out: Any) -> None:
        if not self._lookups:
            return
        began = self._lookups.pop()
        if not self._lookups:
            self.clock.lookup += time.perf_counter() - began


def _skip_rest(batch: Batch | None, batches: Iterator[Batch]) -> None:
    """Other ranks have no more: the stream's epoch ends on this one, too."""
    while batch is not None:
        batch.skip()
        batch = next(batches, None)


class _Stopped(BaseException):
    """A signal arrived while the loop waited for a batch."""


def _without(batches: Iterator[Batch], samples: int) -> Iterator[Batch]:
    """``batches`` without the first samples, which are all of one batch."""
    if samples:
        first = next(batches, None)
        if first is not None and len(first) > samples:
            yield part_of(first, samples, len(first))
    yield from batches
