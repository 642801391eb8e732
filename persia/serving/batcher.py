"""Threads that compute requests, whatever brought them.

There is no timer: a request that arrives alone is computed alone. What has
arrived meanwhile is computed together, up to a number of samples."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from persia import _core
from persia.base.traces import tracing
from persia.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidArgument,
    PersiaError,
)
from persia.serving.inputs import outputs_of, tensors_of
from persia.serving.measures import Measures
from persia.serving.model import ExportedModel
from persia.serving.protocol import Array, arrays_of, output_of
from persia.serving.traces import RequestTrace, noting, trace_of

#: A version's name and its outputs, by name; or what went wrong.
Answer = tuple[str, dict[str, Array]] | PersiaError


class Owner(Protocol):
    """The owner of a request of this process: is called with its answer,
    once.

    Attributes:
        trace: of the request, which its owner ends; None: it is not sampled.
        outputs: names of those that are asked for; None: all.
    """

    trace: RequestTrace | None
    outputs: Sequence[str] | None

    def __call__(self, answer: Answer, /) -> None: ...


#: The version of a model that answers, by the names of both; '': any.
Find = Callable[[str, str], ExportedModel]


class _Bound(NamedTuple):
    """A request that fits its model; its tensors, where there is no plan."""

    request: _core.InferRequest
    samples: int
    tensors: list[Tensor]


class Batcher:
    """A bounded queue of requests, and threads that compute them.

    Args:
        find: the version that a request names.
        measures: of the phases.
        threads: that compute.
        batch: samples of a batch; a request of more is one alone.
        queue: samples that may wait; beyond, requests are refused. Where a
            feature has several ids a sample its ids count.
        limit: samples that a request may have.
        timeout: seconds that a call may wait which does not say.

    Attributes:
        queue: where requests wait. Its calls are answered here, and so are
            requests whose owner is an `Owner`.
    """

    def __init__(
        self,
        find: Find,
        measures: Measures,
        *,
        threads: int,
        batch: int,
        queue: int,
        limit: int,
        timeout: float,
    ) -> None:
        self.queue = _core.InferQueue(queue, timeout)
        self._find = find
        self._measures = measures
        self._batch = batch
        self._limit = limit
        self._traces: dict[_core.InferRequest, RequestTrace] = {}
        self._threads = [
            threading.Thread(
                target=self._work, name=f"persia-executor-{i}", daemon=True
            )
            for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """No more requests; those that wait are computed first."""
        self.queue.close()
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while requests := self.queue.take(self._batch):
            models: dict[ExportedModel, list[_core.InferRequest]] = {}
            for one in requests:
                self._measures.phases["queue"].observe(one.waited)
                if tracing():
                    self._begin_trace(one)
                try:
                    if one.late:
                        raise DeadlineExceeded(
                            "the request waited until its deadline: "
                            f"{self.queue.waiting:,} samples wait behind it"
                        )
                    model = self._find(one.model, one.version)
                except Exception as error:
                    self._fail(one, error)
                else:
                    models.setdefault(model, []).append(one)
            for model, some in models.items():
                for part in [some] if model.joins else [[one] for one in some]:
                    self._compute(model, part)

    # ---- a batch

    def _compute(
        self, model: ExportedModel, requests: list[_core.InferRequest]
    ) -> None:
        phases = self._measures.phases
        waits = [one.waited for one in requests]
        at = [time.monotonic_ns()]
        bound = [self._bound(model, one) for one in requests]
        alive = [one for one in bound if one is not None]
        if not alive:
            return
        sizes = [one.samples for one in alive]
        try:
            tensors = _joined(model, alive)
            at.append(time.monotonic_ns())
            with noting(bool(self._traces)) as lookups:
                outputs = _outputs(model, tensors, sizes)
            at.append(time.monotonic_ns())
        except Exception as error:  # one must not end the executor
            if len(alive) == 1:
                self._fail(alive[0].request, error, model=model)
            else:  # of whom is it?
                for one in alive:
                    self._compute(model, [one.request])
            return
        phases["decode"].observe((at[1] - at[0]) / 1e9)
        phases["compute"].observe((at[2] - at[1]) / 1e9)
        self._measures.batches.observe(sum(sizes))
        n = len(alive)
        queued = sum(x for x, one in zip(waits, bound, strict=True) if one)
        took = at[2] - at[0]
        # Before a client can ask for them.
        model.statistics.computed(
            n,
            success=int(queued * 1e9) + n * took,
            queue=int(queued * 1e9),
            compute_input=n * (at[1] - at[0]),
            compute_infer=n * (at[2] - at[1]),
        )
        for one, found in zip(alive, outputs, strict=True):
            trace = self._traces.get(one.request)
            if trace is not None:
                trace.about(samples=one.samples, batch_samples=sum(sizes))
                trace.about(version=model.version, packets=model.packets)
                trace.part("decode", (at[0], at[1]))
                trace.part("compute", (at[1], at[2]), lookups)
            self._answer(one.request, model, found)
        took = time.monotonic_ns() - at[2]
        phases["encode"].observe(took / 1e9)
        model.statistics.add("compute_output", n * took, n)

    def _bound(
        self, model: ExportedModel, request: _core.InferRequest
    ) -> _Bound | None:
        """None: it is no request of this model, and was answered so."""
        owner: Owner | None = request.owner
        try:
            _check_asked(model, (owner or request).outputs)
            if model.plan is not None:
                size = request.bind(model.plan.inputs, self._limit)
                return _Bound(request, size, [])
            arrays = arrays_of(request.tensors())
            tensors = tensors_of(model, arrays, self._limit)
            return _Bound(request, model.form.samples(tensors), tensors)
        except Exception as error:
            self._fail(request, error, model=model)
            return None

    # ---- answers

    def _begin_trace(self, one: _core.InferRequest) -> None:
        owner: Owner | None = one.owner
        waited = one.waited
        if owner is None:
            trace = trace_of(one.traceparent, waited)
        else:
            trace = owner.trace
        if trace is not None:
            trace.about(model=one.model)
            now = time.monotonic_ns()
            trace.part("queue", (now - int(waited * 1e9), now))
            self._traces[one] = trace

    def _answer(
        self,
        one: _core.InferRequest,
        model: ExportedModel,
        found: dict[str, Array],
    ) -> None:
        owner: Owner | None = one.owner
        trace = self._traces.pop(one, None)
        at = time.monotonic_ns()
        try:
            # Before the client can ask how many there were.
            self._measures.count(one.model, "ok")
            self._measures.phases["request"].observe(one.waited)
            if owner is not None:
                owner((model.version, found))
            else:
                names = one.outputs or found
                outputs = [output_of(name, found[name]) for name in names]
                one.reply(model.version, outputs)
                if trace is not None:
                    trace.part("reply", (at, time.monotonic_ns()))
                    trace.end()
        except Exception as error:
            model.statistics.add("success", 0, -1)
            self._fail(one, error, trace, model)

    def _fail(
        self,
        one: _core.InferRequest,
        error: Exception,
        trace: RequestTrace | None = None,
        model: ExportedModel | None = None,
    ) -> None:
        if model is not None:
            model.statistics.add("fail", int(one.waited * 1e9))
        ours = error if isinstance(error, PersiaError) else _as_ours(error)
        owner: Owner | None = one.owner
        trace = self._traces.pop(one, trace)
        self._measures.count(one.model, ours.code)
        if owner is not None:
            owner(ours)
        else:
            one.fail(ours.code, str(ours))
            if trace is not None:
                trace.end(ours.code)


def _as_ours(error: Exception) -> PersiaError:
    return InternalError(f"the model failed: {type(error).__name__}: {error}")


def _check_asked(model: ExportedModel, names: Sequence[str] | None) -> None:
    if names is None:
        return
    known = [one.name for one in outputs_of(model.manifest)]
    for name in names:
        if name not in known:
            raise InvalidArgument(
                f"the model has no output {name!r}; it has {', '.join(known)}"
            )


def _joined(model: ExportedModel, every: Sequence[_Bound]) -> list[Tensor]:
    """The inputs of the graph."""
    if model.plan is not None:
        samples = sum(one.samples for one in every)
        return model.plan.gather([one.request for one in every], samples)
    if len(every) == 1:
        return every[0].tensors
    parts = zip(*(one.tensors for one in every), strict=True)
    return [torch.cat(some) for some in parts]


def _outputs(
    model: ExportedModel, tensors: Sequence[Tensor], sizes: list[int]
) -> list[dict[str, Array]]:
    """The outputs of each request, by name."""
    every = {
        name: _array(x) for name, x in model.scores(model.run(tensors)).items()
    }
    if len(sizes) == 1:
        return [every]
    if any(len(x) != sum(sizes) for x in every.values()):
        raise InvalidArgument("an output has another number of samples")
    found, at = [], 0
    for size in sizes:
        end = at + size
        found.append({name: x[at:end] for name, x in every.items()})
        at = end
    return found


def _array(x: Tensor) -> Array:
    if x.is_floating_point() and x.element_size() == 2:
        x = x.float()
    found: Array = x.contiguous().numpy()
    return found
