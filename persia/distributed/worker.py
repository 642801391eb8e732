"""An embedding worker in its own process: ``persia serve worker``.

:class:`Worker` configures objects of the C core, which then serve without
Python.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import pydantic
from pydantic import Field

from persia import _core
from persia.base.counts import counted
from persia.base.environment import variable
from persia.base.logs import describe, lines_of_core, say
from persia.base.patience import saying_so
from persia.base.signals import Signals
from persia.base.traces import begin_traces
from persia.distributed.addresses import WIRE_DTYPES, resolve, why_away
from persia.distributed.peers import peers
from persia.distributed.renewal import renewal
from persia.distributed.security import Security
from persia.distributed.serving import (
    Listening,
    MetricsHost,
    MetricsPort,
    page_of,
    warn_of,
)
from persia.errors import InvalidArgument, PersiaError

if TYPE_CHECKING:
    from persia.prometheus import Page

# Seconds after the grace in which requests in flight get their error.
_CANCELLED = 0.1
_LOOK = 1.0  # seconds
_DRAIN = 0.7  # of the grace, in which trainers may take what is there
_DRAIN_LOOK = 0.05  # seconds


class WorkerConfig(Listening):
    """The options of ``persia serve worker``; their names are those of the
    flags."""

    port: int = Field(
        8889, ge=0, le=65535, description="Port to listen on; 0: any."
    )
    servers: str | None = Field(
        None,
        description="host:port of all parameter servers, with commas "
        "between. The environment says how to speak with them, as it does to "
        "other clients (default: PERSIA_SERVERS).",
    )
    wire_dtype: Literal["fp32", "fp16", "bf16"] = Field(
        "fp32",
        description="Type of vectors and gradients between it and the "
        "servers.",
    )
    loaders: int = Field(
        1,
        ge=1,
        le=256,
        description="Data loaders at once: an epoch ends when so many have "
        "ended it.",
    )
    queue_limit: pydantic.ByteSize = Field(
        pydantic.ByteSize(256 << 20),
        ge=1 << 20,
        validate_default=True,
        description="Bytes of batches that it keeps, those that ranks have "
        "taken included; then loaders wait.",
    )
    lease: float = Field(
        300.0,
        gt=0,
        le=86400,
        description="Seconds that a rank has for a batch; then it is offered "
        "again.",
    )
    metrics_port: MetricsPort = None
    metrics_host: MetricsHost = "127.0.0.1"
    loader_silence: float = Field(
        30.0,
        ge=5,
        le=86400,
        description="Seconds after which a data loader of which nothing is "
        "heard is taken for dead: its epochs end.",
    )
    timeout: float = Field(
        60.0,
        gt=0,
        le=86400,
        description="Seconds after which a parameter server that does not "
        "answer is an error.",
    )


class Worker:
    """An embedding worker that is served, from the making to :meth:`close`.

    Raises:
        Unavailable: a parameter server cannot be reached.
        SchemaMismatch: the servers are not all shards of one namespace.
    """

    def __init__(self, config: WorkerConfig) -> None:
        self.config = config
        servers = config.servers or variable("PERSIA_SERVERS")
        if not servers:
            raise InvalidArgument(
                "an embedding worker needs the addresses of its parameter "
                "servers: give `servers`, or PERSIA_SERVERS"
            )
        addresses, theirs = resolve(servers, Security.from_environment())
        cause = partial(why_away, addresses, config.namespace, theirs)
        self._threads = config.threads or len(os.sched_getaffinity(0))
        self._security = config.security()
        with saying_so(addresses, config.timeout, cause):
            self._core = self._connect(addresses, theirs)
        peers.watch()
        self.servers = len(addresses)

    def _connect(
        self, addresses: list[str], theirs: Security
    ) -> _core.EmbeddingWorker:
        config = self.config
        return _core.EmbeddingWorker(
            servers={
                "addresses": addresses,
                "own": None,
                "own_at": 0,
                "namespace": config.namespace,
                "rank": 0,
                "world": 1,
                "stream": 0,
                "timeout": config.timeout,
                "message_limit": config.message_limit,
                "dtype": WIRE_DTYPES.index(config.wire_dtype),
                "lost": 0,  # see is_replaced(): trainers say what is lost
                "security": theirs.arguments(),
            },
            threads=self._threads,
            message_limit=config.message_limit,
            queue_limit=config.queue_limit,
            lease=config.lease,
            silence=config.loader_silence,
            loaders=config.loaders,
            **lines_of_core(),
        )

    def start(self) -> str:
        """Listens, and says that it is healthy; the address."""
        config = self.config
        host = f"[{config.host}]" if ":" in config.host else config.host
        port = self._core.start(
            address=f"{host}:{config.port}",
            threads=self._threads,
            calls=config.calls,
            connections=config.connections,
            message_limit=config.message_limit,
            security=self._security.arguments(),
        )
        return f"{host}:{port}"

    def stats(self) -> dict[str, Any]:
        """Its counters: see WorkerStats in persia.proto."""
        return self._core.stats()

    def calls(self) -> dict[str, _core.Calls]:
        """Its calls by method: their times, seconds, and bytes."""
        return self._core.calls()

    def denied(self) -> _core.Denied:
        """Calls that were denied, by reason and role."""
        return self._core.denied()

    def leave(self) -> int:
        """No more batches of data loaders, which send them to others; how
        many are here that trainers may still ask for."""
        return self._core.leave()

    def stop(self, grace: float) -> None:
        """No more requests; those in flight have so many seconds. Then nothing
        waits for parameter servers any longer."""
        over = threading.Timer(grace + _CANCELLED, self._core.interrupt)
        over.daemon = True
        over.start()
        self._core.stop(grace)
        over.cancel()
        self._core.interrupt()

    def close(self) -> None:
        """Ends it. Batches that were not trained are gone."""
        self._core.close()


def serve_worker(config: WorkerConfig) -> None:
    """Serves until SIGTERM, after which trainers may take the batches that
    are here, or SIGINT, after which they may not; a second one ends it at
    once."""
    begin_traces("embedding-worker")
    describe(role="embedding-worker", namespace=config.namespace)
    with Signals(config.grace) as signals:
        page = page_of(config, signals.health)
        with contextlib.closing(Worker(config)) as worker:
            if page is not None:
                _show(page, worker)
            signals.keep()
            _run(worker, signals)


def _show(page: Page, worker: Worker) -> None:
    from persia.prometheus import EmbeddingWorkerCollector

    page.add(EmbeddingWorkerCollector(worker.stats, worker))


def _run(worker: Worker, signals: Signals) -> None:
    config = worker.config
    address = worker.start()
    warn_of(config)
    reports = threading.Thread(
        target=_report_lost, args=(worker,), name="persia-lost", daemon=True
    )
    reports.start()
    renewal.at_hangup()
    signals.serve(
        "serving an embedding worker of "
        f"{counted(worker.servers, 'server')} on {address}",
        "batches that were in flight are offered again",
    )
    if signals.number == signal.SIGTERM:
        _drain(worker)
    worker.stop(signals.share(0.8 * config.grace))
    counts = worker.stats()
    left = counts["queued"] + counts["leased"]
    say(
        f"{counts['trained']:,} batches were trained, "
        f"{counts['skipped']:,} skipped, {left:,} are left"
    )


def _drain(worker: Worker) -> None:
    """Waits until trainers have trained what is here: what is left then, its
    loader sends to another worker."""
    until = time.monotonic() + _DRAIN * worker.config.grace
    if left := worker.leave():
        say(f"leaving: trainers may take {counted(left, 'batch')} from here")
    while worker.leave() and time.monotonic() < until:
        time.sleep(_DRAIN_LOOK)


def _report_lost(worker: Worker) -> None:
    """Trainers and loaders report it, too, unless they have ended."""
    said = 0
    with contextlib.suppress(PersiaError):
        while True:
            time.sleep(_LOOK)
            lost = worker.stats()["lost"]
            if lost > said:
                say(
                    "servers that were started again have lost "
                    f"{counted(lost, 'update')} of this embedding worker so "
                    "far",
                    "warning",
                )
            said = lost
