"""What a serving process measures of its requests."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.registry import CollectorRegistry

#: Phases of a request, in their order.
PHASES = {
    "decode": "From the body to tensors.",
    "queue": "In the queue.",
    "compute": "Lookups and the dense part, of a batch.",
    "encode": "From tensors to the body.",
    "request": "All of it.",
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


class Measures:
    """Counters and histograms, for Prometheus.

    Attributes:
        phases: histograms of seconds, by the names of :data:`PHASES`.
        batches: histogram of the samples of a batch.
        answered: requests by model and outcome, "ok" or the error's class.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        family = Histogram(
            "persia_serving_seconds",
            "Seconds of a request, by phase.",
            ["phase"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.phases = {name: family.labels(name) for name in PHASES}
        self.batches = Histogram(
            "persia_serving_batch_samples",
            "Samples that were computed together.",
            buckets=_SAMPLES,
            registry=self.registry,
        )
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
        self.answered = Counter(
            "persia_serving_requests",
            "Requests, by model and outcome.",
            ["model", "outcome"],
            registry=self.registry,
        )

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
        yield from self.registry.collect()
