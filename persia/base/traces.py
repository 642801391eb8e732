"""Traces of sampled batches, sent to a collector by OTLP.

The core keeps what became of them (``csrc/trace``); a thread of the process
takes it from there. Where the collector is, and what else is sent with it, is
the affair of OpenTelemetry's own variables.
"""

from __future__ import annotations

import atexit
import os
import socket
import threading
import time
from typing import Any

from persia import _core
from persia.base.environment import variable
from persia.base.logs import say
from persia.base.requirements import library
from persia.base.version import __version__
from persia.errors import InvalidArgument

#: The share of batches that is traced. It must be the same in all processes.
RATE = "PERSIA_TRACE_RATE"

_ROOM = 1 << 14  # spans that are kept until they are sent
_EVERY = 1.0  # seconds
_LAST = 2.0  # seconds that the collector has at the end of the process
_SERVED = ("pull", "push")  # spans of what others asked for
_NUMBERS = ("number", "attempt", "rows", "bytes")


def begin_traces(role: str) -> None:
    """This process sends its part of the traces from now on, where
    ``PERSIA_TRACE_RATE`` is set. Of several roles in it the first names it.

    Args:
        role: "server", "embedding-worker", "loader" or "trainer".

    Raises:
        InvalidArgument: the rate is none, or a package is missing.
    """
    text = variable(RATE)
    if not text:
        return
    try:
        rate = float(text)
    except ValueError:
        rate = -1.0
    if not 0 <= rate <= 1:
        raise InvalidArgument(f"{RATE} is {text!r}, need a share from 0 to 1")
    with _lock:
        if rate and not _running:
            _running.append(_Exporter(role))
            _core.trace_start(rate, _ROOM)


_lock = threading.Lock()
_running: list[_Exporter] = []  # one at most


class _Exporter:
    def __init__(self, role: str) -> None:
        where = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
        exporter = library(where, "traces", "traces")
        self._sdk = library("opentelemetry.sdk.trace", "traces", "traces")
        self._api = library("opentelemetry.trace", "traces", "traces")
        about = {
            "service.instance.id": f"{socket.gethostname()}:{os.getpid()}",
            "service.version": __version__,
        }
        if not variable("OTEL_SERVICE_NAME"):
            about["service.name"] = f"persia-{role}"
        resources = library("opentelemetry.sdk.resources", "traces", "traces")
        self._resource = resources.Resource.create(about)
        self._send = exporter.OTLPSpanExporter()
        self._dropped = 0
        self._end = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name="persia-traces", daemon=True
        )
        self._thread.start()
        atexit.register(self._close)

    def _run(self) -> None:
        over = False
        while not over:
            over = self._end.wait(_EVERY)
            self._send_all()

    def _close(self) -> None:
        self._end.set()
        self._thread.join(_LAST)
        self._send.shutdown()

    def _send_all(self) -> None:
        # Of two clocks that may be set apart while the process runs.
        ahead = time.time_ns() - time.monotonic_ns()
        while True:
            spans, dropped = _core.trace_take()
            if spans:
                self._send.export([self._span(one, ahead) for one in spans])
            if not spans:
                break
        if dropped > self._dropped:
            say(
                f"{dropped - self._dropped:,} spans of traces were dropped: "
                f"their collector is too slow, or {RATE} too high",
                "warning",
            )
        self._dropped = dropped

    def _span(self, one: _core.Span, ahead: int) -> Any:
        kind, high, low, own, above, error, began, ended, *more = one
        stream, number, attempt, shard, rows, size = more
        api = self._api

        def context(number: int) -> Any:
            flags = api.TraceFlags(api.TraceFlags.SAMPLED)
            return api.SpanContext(high << 64 | low, number, False, flags)

        counted = zip(_NUMBERS, (number, attempt, rows, size), strict=True)
        attributes: dict[str, Any] = {
            f"persia.{name}": value for name, value in counted if value
        }
        if stream:
            attributes["persia.stream"] = f"{stream:016x}"
        if kind in _SERVED:
            attributes["persia.shard"] = shard
        status = api.Status(
            api.StatusCode.ERROR if error else api.StatusCode.UNSET, error
        )
        return self._sdk.ReadableSpan(
            name=f"persia.{kind}",
            context=context(own),
            parent=context(above) if above else None,
            resource=self._resource,
            attributes=attributes,
            kind=api.SpanKind.SERVER
            if kind in _SERVED
            else api.SpanKind.INTERNAL,
            status=status,
            start_time=began + ahead,
            end_time=ended + ahead,
        )
