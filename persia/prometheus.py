"""Metrics for Prometheus: of servers, and of stores in trainers.

A trainer exports its own with :func:`export`; ``persia train`` does so where
``PERSIA_METRICS_PORT`` is set.
"""

from __future__ import annotations

import itertools
import os
import socket
import socketserver
import threading
import time
import wsgiref.simple_server
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from prometheus_client import (
    CollectorRegistry,
    ProcessCollector,
    make_wsgi_app,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)

from persia import _core
from persia.base.environment import variable
from persia.base.health import PATHS, Health
from persia.base.version import __version__
from persia.distributed.load import LoadWindow, ServerWindow
from persia.distributed.renewal import renewal
from persia.errors import Closed, InvalidArgument

if TYPE_CHECKING:
    from persia.store.store import Store

__all__ = ["export"]

#: Names the port of the metrics of a job's first rank on a host; those of the
#: others follow.
PORT = "PERSIA_METRICS_PORT"
#: Names the address that they listen on.
HOST = "PERSIA_METRICS_HOST"


class _Collector(Protocol):
    def collect(self) -> Iterator[Metric]: ...


class _Build:
    """Which Persia a process is."""

    def collect(self) -> Iterator[Metric]:
        about = {"version": __version__, "grpc": _core.GRPC}
        yield InfoMetricFamily("persia_build", "Of the process.", about)


CONNECTIONS = 16  # open at once; each has a thread
PATIENCE = 10.0  # seconds for a client to say more


class _Handler(wsgiref.simple_server.WSGIRequestHandler):
    timeout = PATIENCE

    def log_message(self, *args: Any) -> None:
        pass


class _Http(socketserver.ThreadingMixIn, wsgiref.simple_server.WSGIServer):
    """Closes connections beyond the limit at once: without one, anyone who
    reaches the port takes all files that the process may open."""

    daemon_threads = True

    def __init__(self, host: str, port: int) -> None:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        self.address_family = found[0][0]
        self._free = threading.BoundedSemaphore(CONNECTIONS)
        super().__init__(found[0][4][:2], _Handler)  # type: ignore[arg-type]

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(
        self, request: Any, client_address: Any
    ) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away or said nothing is no error of ours."""


def _pages(metrics: Any, health: Health) -> Any:
    """Metrics and health. A probe that asks for another page must not take it
    for healthy."""

    def answer(environ: dict[str, Any], start: Any) -> Any:
        path = environ["PATH_INFO"]
        if path == "/metrics":
            return metrics(environ, start)
        if path in PATHS:
            is_so, text = health.answer(path)
            status = "200 OK" if is_so else "503 Service Unavailable"
        else:
            status = "404 Not Found"
            text = f"there are /metrics, {', '.join(PATHS)}\n"
        start(status, [("Content-Type", "text/plain")])
        return [text.encode()]

    return answer


class Page:
    """Answers Prometheus and probes on threads of its own, from the start of
    a process: what it has to count may be added later.

    Args:
        port: 0 takes any.
        host: address to listen on.
        health: of the process.

    Attributes:
        port: that it listens on.

    Raises:
        InvalidArgument: the port cannot be had.
    """

    def __init__(self, port: int, host: str, health: Health) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self.add(_Build())
        self.add(_Certificates())
        try:
            http = _Http(host, port)
        except OSError as error:
            raise InvalidArgument(
                f"metrics cannot be served on port {port} of {host}: "
                f"{error.strerror}"
            ) from None
        http.set_app(_pages(make_wsgi_app(self._registry), health))
        threading.Thread(
            target=http.serve_forever, name="persia-metrics", daemon=True
        ).start()
        self.port = int(http.server_port)

    def add(self, collector: _Collector) -> None:
        """Shows its metrics from now on."""
        self._registry.register(collector)


def export(
    store: Store, port: int | None = None, host: str | None = None
) -> int | None:
    """Exports the counters of a trainer's store, the staleness of its
    lookups among them: the job is over before they are asked for otherwise.

    Args:
        store: once it was closed there are no metrics of it.
        port: 0 takes any. None: PERSIA_METRICS_PORT plus LOCAL_RANK, and
            nothing where that is not set.
        host: address to listen on; the page has neither TLS nor a token.
            None: PERSIA_METRICS_HOST, else 127.0.0.1.

    Returns:
        The port, or None.
    """
    rank = os.environ.get("RANK", "0")
    if port is None:
        given = variable(PORT)
        if not given:
            return None
        if not given.isdecimal():
            raise InvalidArgument(f"{PORT} is {given!r}, need a port")
        port = int(given)
        port += int(os.environ.get("LOCAL_RANK", "0")) if port else 0
    health = Health()
    health.serves()
    page = Page(port, host or variable(HOST) or "127.0.0.1", health)
    page.add(StoreCollector(store, rank))
    return page.port


def _in_seconds(name: str, value: float) -> tuple[str, float]:
    """The name and value of a metric, of a counter that may be in ns."""
    if not name.endswith("_ns"):
        return name, value
    return name.removesuffix("_ns") + "_seconds", value / 1e9


def of_loads(loads: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(
        "persia_load",
        "Wanted of the processes of a role, as a ratio: 1 is the right size.",
        labels=["role"],
    )
    for role, load in loads.items():
        family.add_metric([role], load)
    return family


class _Listens(Protocol):
    """What counts the calls of its process."""

    def calls(self) -> Mapping[str, _core.Calls]: ...
    def denied(self) -> _core.Denied: ...


class _Serves(_Listens, Protocol):
    """The same of a server, which says how long calls wait for a thread."""

    def waits(self) -> tuple[float, float]: ...


# ---- calls -----------------------------------------------------------------


def _of_calls(calls: Mapping[str, _core.Calls], role: str) -> Iterator[Metric]:
    """How long the calls of a process took, and how large they were."""
    seconds = HistogramMetricFamily(
        "persia_call_seconds",
        "Calls, from their arrival to their answer, by method; a wait for "
        "other processes included.",
        labels=["role", "method"],
    )
    sizes = CounterMetricFamily(
        "persia_call_bytes",
        "Bytes of requests (in) and of replies (out).",
        labels=["role", "method", "direction"],
    )
    bounds = [*map(str, _core.CALL_BOUNDS), "+Inf"]
    for method, (counts, total, received, sent) in calls.items():
        buckets = list(zip(bounds, itertools.accumulate(counts), strict=True))
        seconds.add_metric([role, method], buckets, total)
        sizes.add_metric([role, method, "in"], received)
        sizes.add_metric([role, method, "out"], sent)
    yield seconds
    yield sizes


# ---- security --------------------------------------------------------------


def denied_family(denied: _core.Denied) -> Metric:
    """Calls that were denied, by reason and role."""
    family = CounterMetricFamily(
        "persia_denied",
        "Calls that were denied; without a good token the role is empty.",
        labels=["reason", "role"],
    )
    for key, n in denied.items():
        family.add_metric(key, n)
    return family


class _Certificates:
    """Certificates and tokens that are renewed."""

    def collect(self) -> Iterator[Metric]:
        family = GaugeMetricFamily(
            "persia_certificate_not_after_seconds",
            "When a certificate in use ends, since 1970.",
            labels=["file"],
        )
        for path, end in renewal.ends().items():
            family.add_metric([path], end)
        yield family
        counts = CounterMetricFamily(
            "persia_security_renewals",
            "Times that new certificates and tokens were found, by whether "
            "they could be used.",
            labels=["outcome"],
        )
        for outcome, n in renewal.counts.items():
            counts.add_metric([outcome], n)
        yield counts


# ---- servers ---------------------------------------------------------------

_COUNTERS = {
    "updates": "Updates applied.",
    "step": "Synchronous steps applied.",
    "pulls": "Requests for rows.",
    "pushes": "Requests with gradients that were applied.",
    "duplicates": "Updates that arrived again and changed nothing.",
    "failed": "Requests that failed.",
    "connections_refused": "Connections closed for the limit.",
    "log_records": "Records of the log of a durable server.",
    "log_refused": "Records that the log did not take: updates waited.",
}
_GAUGES = {
    "memory_used": "Bytes of all tables.",
    "memory_limit": "Bytes that all tables may have; 0: no limit.",
    "parked": "Requests that wait for others.",
    "log_bytes": "Bytes of the log since the rows were last written.",
    "log_failed": "1: a sync failed, and updates wait for the rows.",
    "recovers": "1: it applies its log, and clients wait.",
    "connections": "Connections open.",
}
_TABLE_GAUGES = {
    "rows": "Rows.",
    "bytes": "Bytes of rows and index.",
}
_TABLE_COUNTERS = {
    "pushes": "Updates that touched the table.",
    "pulled": "Ids looked up.",
    "missed": "Ids looked up that had no row.",
    "created": "Rows made.",
    "evicted": "Rows evicted.",
    "refused": "Ids that were not admitted.",
    "nonfinite": "Row gradients left out as NaN or infinite.",
    "candidates": "Slots that eviction looked at.",
}


# What a process has once, whatever the number of its shards.
_SHARED = {"updates", "step", "memory_used", "memory_limit", "uptime_ns"}
_SHARED |= {"recovers", "log_failed"}


def _merged(shards: list[dict[str, Any]]) -> dict[str, Any]:
    """The counters of a process of those of its shards."""
    merged: dict[str, Any] = {}
    tables: dict[str, dict[str, Any]] = {}
    # Of the shards the one whose rows were written the longest ago.
    last = min(shards, key=lambda stats: int(stats["snapshot_seconds"]))
    for name in ("snapshot_seconds", "snapshot_ns"):
        merged[name] = last[name]
    for stats in shards:
        for name in (*_COUNTERS, *_GAUGES, "uptime_ns"):
            known, value = merged.get(name, 0), stats[name]
            merged[name] = (
                max(known, value) if name in _SHARED else known + value
            )
        for table in stats["tables"]:
            known = tables.setdefault(table["name"], {})
            for name in (*_TABLE_GAUGES, *_TABLE_COUNTERS):
                pair = known.get(name, 0), table[name]
                known[name] = max(pair) if name == "pushes" else sum(pair)
    merged["tables"] = [{"name": name} | one for name, one in tables.items()]
    return merged


class ServerCollector:
    """The counters of a server, read when Prometheus asks.

    Args:
        stats: gives those of each of its shards, by their numbers, as
            ``persia.distributed.server.Server.stats``.
        core: what listens; it counts the calls of the process.
        threads: that take them.
        namespace, shards: of the job.
    """

    def __init__(
        self,
        stats: Callable[[], dict[int, dict[str, Any]]],
        core: _Serves,
        threads: int,
        namespace: str,
        shards: int,
    ) -> None:
        self._stats, self._core = stats, core
        self._namespace, self._shards = namespace, str(shards)
        self._load = ServerWindow(threads)
        self._lock = threading.Lock()  # several may ask

    def _loads(self, stats: dict[str, Any]) -> Iterator[Metric]:
        """What it needs, and how fast that grows."""
        tables = stats["tables"]
        cpu = time.process_time() / len(os.sched_getaffinity(0))
        waited, worked = self._core.waits()
        for name, text, value in (
            ("waited", "until a thread had them", waited),
            ("worked", "from then until they were answered", worked),
        ):
            yield CounterMetricFamily(
                f"persia_calls_{name}_seconds",
                f"Seconds of all calls, {text}.",
                value=value,
            )
        with self._lock:
            load, growth = self._load.add(
                time.monotonic(),
                cpu,
                stats["memory_used"],
                stats["memory_limit"],
                sum(table["rows"] for table in tables),
                sum(table["created"] - table["evicted"] for table in tables),
                *(waited, worked),
            )
        yield of_loads({"server": load})
        yield GaugeMetricFamily(
            "persia_memory_growth_bytes",
            "Bytes a second that the rows of all tables grow by.",
            value=growth,
        )

    def _of_shards(
        self, shards: dict[int, dict[str, Any]]
    ) -> Iterator[Metric]:
        """What is known of each shard."""
        names = ["namespace", "shard", "shards"]
        info = GaugeMetricFamily("persia_shard", "Which.", labels=names)
        families = {
            name: GaugeMetricFamily(
                f"persia_shard_{name}",
                f"{text[:-1]} of a shard.",
                labels=names,
            )
            for name, text in _TABLE_GAUGES.items()
        }
        counts = {
            name: CounterMetricFamily(
                f"persia_shard_{name}",
                f"{_COUNTERS[name][:-1]}, of a shard.",
                labels=names,
            )
            for name in ("pulls", "pushes")
        }
        for number, stats in shards.items():
            labels = [self._namespace, str(number), self._shards]
            info.add_metric(labels, 1)
            for name, counter in counts.items():
                counter.add_metric(labels, stats[name])
            for name, family in families.items():
                value = sum(table[name] for table in stats["tables"])
                family.add_metric(labels, value)
        yield info
        yield from counts.values()
        yield from families.values()

    def collect(self) -> Iterator[Metric]:
        """All metrics."""
        shards = self._stats()
        if not shards:  # they are other servers' now
            return
        stats = _merged(list(shards.values()))
        yield from self._of_shards(shards)
        yield from self._loads(stats)
        yield from _of_calls(self._core.calls(), "server")
        yield denied_family(self._core.denied())
        yield GaugeMetricFamily(
            "persia_snapshot_timestamp_seconds",
            "When its rows were last written for a checkpoint, since 1970; "
            "0: never.",
            value=stats["snapshot_seconds"],
        )
        yield GaugeMetricFamily(
            "persia_snapshot_duration_seconds",
            "How long that took.",
            value=stats["snapshot_ns"] / 1e9,
        )
        uptime = stats["uptime_ns"] / 1e9
        text = "Seconds since the start."
        yield GaugeMetricFamily("persia_uptime_seconds", text, value=uptime)
        for name, text in _COUNTERS.items():
            metric = f"persia_{'sync_steps' if name == 'step' else name}"
            yield CounterMetricFamily(metric, text, value=stats[name])
        for name, text in _GAUGES.items():
            suffix = "_bytes" if name.startswith("memory") else ""
            value = stats[name]
            yield GaugeMetricFamily(f"persia_{name}{suffix}", text, value)
        for names, kind in (
            (_TABLE_GAUGES, GaugeMetricFamily),
            (_TABLE_COUNTERS, CounterMetricFamily),
        ):
            for name, text in names.items():
                family = kind(f"persia_table_{name}", text, labels=["table"])
                for table in stats["tables"]:
                    family.add_metric([table["name"]], table[name])
                yield family


# ---- embedding workers ----------------------------------------------------

_WORKER_GAUGES = {
    "bytes": "Bytes of batches.",
    "bytes_limit": "Bytes of batches that it may have.",
    "oldest_ns": "Since the first of its batches arrived.",
    "ranks": "Ranks that have said Hello.",
    "jobs": "Jobs that have data loaders.",
    "streams": "Data loaders that have sent batches.",
    "loaders_gone": "Data loaders that are taken for dead.",
}
_WORKER_COUNTERS = {
    "submitted": "Batches of loaders.",
    "resent": "Of them, those sent for a second time or more.",
    "taken": "Leases given to ranks.",
    "trained": "Batches whose gradients are at all servers.",
    "skipped": "Batches that ranks ended without gradients.",
    "again": "Leases that ended without gradients: offered again.",
    "had": "Batches that were not offered, for all servers had them.",
    "late": "Gradients whose lease had ended.",
    "given_up": "Of the failed: offered too often without gradients.",
    "failed": "Batches that ended without an update: their loader has why.",
    "lost": "Updates made here that a server had and lost.",
    "restores": "Times that servers had the rows of another checkpoint.",
    "starved_ns": "In which a rank waited, and no batch was queued.",
    "blocked_ns": "In which a data loader could send nothing more.",
}


class EmbeddingWorkerCollector:
    """The counters of an embedding worker, read when Prometheus asks.

    Args:
        stats: gives them, as ``_core.EmbeddingWorker.stats``.
        core: what listens; it counts the calls of the process.
    """

    def __init__(
        self, stats: Callable[[], dict[str, int]], core: _Listens
    ) -> None:
        self._stats, self._core = stats, core
        self._loads = LoadWindow()
        self._lock = threading.Lock()  # several may ask

    def collect(self) -> Iterator[Metric]:
        """All metrics."""
        stats = self._stats()
        yield self._load(stats)
        yield from _of_calls(self._core.calls(), "embedding-worker")
        yield denied_family(self._core.denied())
        batches = GaugeMetricFamily(
            "persia_embedding_worker_batches", "Batches now.", labels=["state"]
        )
        for state, n in embedding_worker_states(stats).items():
            batches.add_metric([state], n)
        yield batches
        for name, text in _WORKER_GAUGES.items():
            name, value = _in_seconds(name, stats[name])
            yield GaugeMetricFamily(
                f"persia_embedding_worker_{name}", text, value
            )
        for name, text in _WORKER_COUNTERS.items():
            name, value = _in_seconds(name, stats[name])
            yield CounterMetricFamily(
                f"persia_embedding_worker_{name}", text, value=value
            )

    def _load(self, stats: dict[str, int]) -> Metric:
        cpu = time.process_time() / len(os.sched_getaffinity(0))
        with self._lock:
            loads = self._loads.add(time.monotonic(), stats, cpu)
        return of_loads(loads)


def embedding_worker_states(stats: dict[str, int]) -> dict[str, int]:
    """How many batches of a worker are in which state; each is in one.

    Args:
        stats: its counters.
    """
    withheld = stats["withheld"]
    looking, returning = stats["looking"], stats["returning"]
    return {
        "queued": stats["queued"] - withheld,
        "withheld": withheld,
        "looking": looking,
        "leased": stats["leased"] - looking - returning,
        "returning": returning,
    }


# ---- data loaders ----------------------------------------------------------

_FEED = {
    "samples": "Samples of the batches that it sent, or passed over.",
    "sent": "Batches that it sent, or passed over.",
    "passed": "Of them, those that all servers had already.",
    "moved": "Batches that were sent to another worker, too.",
    "failed": "Batches that ended without an update.",
    "lost": "Batches that were trained, but are not in the servers' rows.",
    "sending_ns": "In which it sent batches, or waited until a worker had "
    "room.",
    "malformed": "Messages of Kafka that were left out.",
    "dead_letters": "Of them, those sent to the topic for them.",
}


class FeedCollector:
    """The counters of a data loader, read when Prometheus asks.

    Args:
        counts: gives them, as ``persia.data.Sender.stats``, and ``samples``.
        lag: messages of Kafka that are not sent yet, by "topic/partition".
    """

    def __init__(
        self,
        counts: Callable[[], Mapping[str, int]],
        lag: Callable[[], Mapping[str, int]],
    ) -> None:
        self._counts = counts
        self._lag = lag

    def collect(self) -> Iterator[Metric]:
        """All metrics."""
        counts = self._counts()
        for name, text in _FEED.items():
            name, value = _in_seconds(name, counts.get(name, 0))
            yield CounterMetricFamily(f"persia_feed_{name}", text, value)
        lag = GaugeMetricFamily(
            "persia_feed_lag",
            "Messages of Kafka that are not sent yet.",
            labels=["partition"],
        )
        for partition, messages in self._lag().items():
            lag.add_metric([partition], messages)
        yield lag


# ---- trainers --------------------------------------------------------------

_ENDS = ("abandoned", "skipped", "read", "dropped")
_LOOKAHEAD = {
    "batches": "Batches that the loop asked for.",
    "prefetched": "Forwards served from a lookup made ahead.",
    "not_prefetched": "Other forwards while a look-ahead was open.",
    "waited": "Times the loop had to wait for a permit.",
    "waited_ns": "In which the loop waited for permits, lookups and updates.",
}


class StoreCollector:
    """The counters of a store's look-ahead, and of the updates that it knows
    to be lost; asks no server."""

    def __init__(self, store: Store, rank: str = "0") -> None:
        from persia.store.engine import engine_of

        self._handle: int = engine_of(store).handle
        self._remote = store.remote
        self._rank = rank

    def collect(self) -> Iterator[Metric]:
        """All metrics; none once the store was closed."""
        try:
            stats, rank = _core.prefetch_stats(self._handle), [self._rank]
            client: dict[str, int] = (
                _core.cluster_counts(self._handle) if self._remote else {}
            )
        except Closed:
            return
        for name, text in _LOOKAHEAD.items():
            name, value = _in_seconds(name, stats[name])
            metric = f"persia_lookahead_{name}"
            counter = CounterMetricFamily(metric, text, labels=["rank"])
            counter.add_metric(rank, value)
            yield counter
        ends = CounterMetricFamily(
            "persia_lookahead_untrained",
            "Batches that were not trained, by their end.",
            labels=["rank", "end"],
        )
        for name in _ENDS:
            ends.add_metric([*rank, name], stats[name])
        yield ends
        lost = CounterMetricFamily(
            "persia_updates_lost",
            "Updates that servers had, and lost; of each server.",
            labels=["rank"],
        )
        lost.add_metric(rank, client.get("lost", 0))
        yield lost
        yield self._staleness(stats["staleness"])

    def _staleness(self, seen: dict[int, int]) -> Metric:
        buckets, total = [], 0
        for k in range(max(seen, default=0) + 1):
            total += seen.get(k, 0)
            buckets.append((str(k), float(total)))
        buckets.append(("+Inf", float(total)))
        family = HistogramMetricFamily(
            "persia_staleness",
            "Lookups of batches, by how many earlier ones were not applied.",
            labels=["rank"],
        )
        mass = float(sum(k * n for k, n in seen.items()))
        family.add_metric([self._rank], buckets, mass)
        return family
