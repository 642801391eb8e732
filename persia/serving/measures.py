"""What a serving process measures of its requests."""

from __future__ import annotations

import bisect
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from prometheus_client import Counter, Gauge
from prometheus_client.core import (
    CounterMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.registry import CollectorRegistry

from persia import _core
from persia.prometheus import denied_family

#: Phases of a request, in their order.
PHASES = {
    "decode": "From requests to the tensors of a batch.",
    "queue": "In the queue.",
    "compute": "Lookups and the dense part, of a batch.",
    "encode": "From tensors to the answers of a batch.",
    "request": "From its arrival to its answer.",
}
_SECONDS = [1e-4 * 2**i for i in range(17)]
_SAMPLES = [2.0**i for i in range(14)]


class Follows(Protocol):
    """A model that may be of a chain."""

    @property
    def lag(self) -> float | None:
        """Seconds since the moment of the training that it is of; None: its
        version has no chain."""

    @property
    def packets(self) -> int:
        """That were applied to its version."""


class Histogram:
    """Counts values by their size. That of prometheus_client takes several
    times as long, and each request counts five.

    Args:
        bounds: the largest value of each bucket, ascending.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        self._lock = threading.Lock()

    def observe(self, value: float) -> None:
        """Counts a value."""
        at = bisect.bisect_left(self._bounds, value)
        with self._lock:
            self._counts[at] += 1
            self._sum += value

    def add_to(self, family: HistogramMetricFamily, *labels: str) -> None:
        """Adds what was counted to what Prometheus reads."""
        with self._lock:
            counts, total = list(self._counts), self._sum
        buckets, so_far = [], 0
        for bound, n in zip([*self._bounds, "+Inf"], counts, strict=True):
            so_far += n
            buckets.append((str(bound), so_far))
        family.add_metric(labels, buckets, total)


class Measures:
    """Counters and histograms, for Prometheus.

    Args:
        models: names of models. Requests for others are counted together,
            under no name: names that clients invent have no end.

    Attributes:
        phases: histograms of seconds, by the names of :data:`PHASES`.
        batches: histogram of the samples of a batch.
    """

    def __init__(self, models: Iterable[str] = ()) -> None:
        self._models = frozenset(models)
        self.registry = CollectorRegistry()
        self.phases = {name: Histogram(_SECONDS) for name in PHASES}
        self.batches = Histogram(_SAMPLES)
        self._lag = Gauge(
            "persia_serving_lag_seconds",
            "Seconds since the moment of the training that the model is of.",
            ["model"],
            registry=self.registry,
        )
        self._packets = Gauge(
            "persia_serving_packets",
            "Packets that were applied to the version that answers.",
            ["model"],
            registry=self.registry,
        )
        self._answered = Counter(
            "persia_serving_requests",
            "Requests, by model and outcome.",
            ["model", "outcome"],
            registry=self.registry,
        )
        self._refused: Callable[[], Mapping[str, int]] = dict
        self._denied: Callable[[], _core.Denied] = dict
        self._counters: dict[tuple[str, str], Any] = {}

    def count(self, model: str, outcome: str) -> None:
        """A request was answered: "ok", or with an error of that class."""
        if model not in self._models:
            model = ""
        found = self._counters.get((model, outcome))
        if found is None:
            found = self._answered.labels(model, outcome)
            self._counters[model, outcome] = found
        found.inc()

    def watch_refused(self, read: Callable[[], Mapping[str, int]]) -> None:
        """Calls of gRPC that were refused on arrival, by error."""
        self._refused = read

    def watch_denied(self, read: Callable[[], _core.Denied]) -> None:
        """Requests that were denied, by reason and role."""
        self._denied = read

    def watch(self, name: str, text: str, read: Callable[[], float]) -> None:
        """A gauge that is read when Prometheus asks."""
        gauge = Gauge(f"persia_serving_{name}", text, registry=self.registry)
        gauge.set_function(read)

    def watch_model(self, name: str, model: Follows) -> None:
        """The gauges of a model."""
        self._lag.labels(name).set_function(
            lambda: math.nan if model.lag is None else model.lag
        )
        self._packets.labels(name).set_function(lambda: model.packets)

    def collect(self) -> Iterator[Any]:
        """All metrics."""
        seconds = HistogramMetricFamily(
            "persia_serving_seconds",
            "Seconds of a request, by phase.",
            labels=["phase"],
        )
        for name, one in self.phases.items():
            one.add_to(seconds, name)
        samples = HistogramMetricFamily(
            "persia_serving_batch_samples",
            "Samples that were computed together.",
        )
        self.batches.add_to(samples)
        refused = CounterMetricFamily(
            "persia_serving_refused",
            "Requests over gRPC that were refused on arrival: malformed, or "
            "the queue was full.",
            labels=["outcome"],
        )
        for name, n in self._refused().items():
            refused.add_metric([name], n)
        yield refused
        yield denied_family(self._denied())
        yield seconds
        yield samples
        yield from self.registry.collect()
