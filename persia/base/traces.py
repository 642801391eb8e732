"""Traces of sampled batches and requests, sent to a collector by OTLP.

The core keeps what became of batches (``csrc/trace``), and this module what
became of requests to a served model; a thread of the process takes both from
there. Where the collector is, and what else is sent with it, is the affair of
OpenTelemetry's own variables.
"""

from __future__ import annotations

import atexit
import os
import random
import re
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from persia import _core
from persia.base.environment import variable
from persia.base.logs import say
from persia.base.requirements import library
from persia.base.version import __version__
from persia.errors import InvalidArgument

#: The share of batches, and of requests whose caller does not say, that is
#: traced. It must be the same in all processes.
RATE = "PERSIA_TRACE_RATE"

_ROOM = 1 << 14  # spans that are kept until they are sent
_EVERY = 1.0  # seconds
_LAST = 2.0  # seconds that the collector has at the end of the process
_SERVED = ("pull", "push")  # spans of what others asked for
_NUMBERS = ("number", "attempt", "rows", "bytes")
#: The header ``traceparent`` of https://www.w3.org/TR/trace-context/.
_PARENT = re.compile(
    r"(?!ff)([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?"
)


class Span(NamedTuple):
    """A part of a request, which has ended.

    Attributes:
        name: of the part.
        trace: the id of its trace.
        id: its own.
        parent: the id of the span above it; 0: there is none.
        began, ended: of ``time.monotonic_ns()``.
        about: its attributes.
        error: the class of its error; None: it succeeded.
        asked: it is what another process asked for.
    """

    name: str
    trace: int
    id: int
    parent: int
    began: int
    ended: int
    about: Mapping[str, str | int] = {}
    error: str | None = None
    asked: bool = False


def begin_traces(role: str) -> None:
    """This process sends its part of the traces from now on, where
    ``PERSIA_TRACE_RATE`` is set. Of several roles in it the first names it.

    Args:
        role: "server", "embedding-worker", "loader", "trainer" or "serving".

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
            _running.append(_Exporter(role, rate))
            _core.trace_start(rate, _ROOM)


def tracing() -> bool:
    """Whether anything is traced."""
    return bool(_running)


def new_id() -> int:
    """Of a span."""
    return random.getrandbits(64) | 1


def request_trace(traceparent: str | None) -> tuple[int, int] | None:
    """The trace of a request, if it is sampled, and the span of its caller;
    0: the caller has none.

    Args:
        traceparent: the header of that name, which decides. Without it, or if
            it is malformed, chance does.
    """
    if not _running:
        return None
    found = _PARENT.fullmatch((traceparent or "").strip())
    if found and not (found[1] == "00" and found[5]):
        trace, span = int(found[2], 16), int(found[3], 16)
        if trace and span:
            return (trace, span) if int(found[4], 16) & 1 else None
    if random.random() >= _running[0].rate:
        return None
    return random.getrandbits(128) | 1, 0


def keep_spans(spans: Iterable[Span]) -> None:
    """They are sent with the others, if there is room."""
    for one in _running:
        one.keep(spans)


_lock = threading.Lock()
_running: list[_Exporter] = []  # one at most


class _Exporter:
    def __init__(self, role: str, rate: float) -> None:
        self.rate = rate
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
        self._said = 0  # of those that were dropped
        self._kept: deque[Span] = deque()
        self._no_room = 0  # of several threads: it may be a little less
        self._end = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name="persia-traces", daemon=True
        )
        self._thread.start()
        atexit.register(self._close)

    def keep(self, spans: Iterable[Span]) -> None:
        for span in spans:
            if len(self._kept) < _ROOM:
                self._kept.append(span)
            else:
                self._no_room += 1

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
            kept = [self._kept.popleft() for _ in range(len(self._kept))]
            made = [self._made(_of_batch(one), ahead) for one in spans]
            made += [self._made(one, ahead) for one in kept]
            self._say_dropped(dropped + self._no_room)
            if not made:
                break
            self._send.export(made)

    def _say_dropped(self, n: int) -> None:
        if n > self._said:
            say(
                f"{n - self._said:,} spans of traces were dropped: "
                f"their collector is too slow, or {RATE} too high",
                "warning",
            )
        self._said = n

    def _made(self, one: Span, ahead: int) -> Any:
        """Of OpenTelemetry."""
        api = self._api

        def context(number: int) -> Any:
            flags = api.TraceFlags(api.TraceFlags.SAMPLED)
            return api.SpanContext(one.trace, number, False, flags)

        kinds, codes = api.SpanKind, api.StatusCode
        code = codes.ERROR if one.error else codes.UNSET
        return self._sdk.ReadableSpan(
            name=f"persia.{one.name}",
            context=context(one.id),
            parent=context(one.parent) if one.parent else None,
            resource=self._resource,
            attributes={f"persia.{k}": v for k, v in one.about.items()},
            kind=kinds.SERVER if one.asked else kinds.INTERNAL,
            status=api.Status(code, one.error),
            start_time=one.began + ahead,
            end_time=one.ended + ahead,
        )


def _of_batch(one: _core.Span) -> Span:
    """A span of the core."""
    kind, high, low, own, above, error, began, ended, *more = one
    stream, number, attempt, shard, rows, size = more
    counted = zip(_NUMBERS, (number, attempt, rows, size), strict=True)
    about: dict[str, str | int] = {k: n for k, n in counted if n}
    if stream:
        about["stream"] = f"{stream:016x}"
    if kind in _SERVED:
        about["shard"] = shard
    return Span(
        name=kind,
        trace=high << 64 | low,
        id=own,
        parent=above,
        began=began,
        ended=ended,
        about=about,
        error=error,
        asked=kind in _SERVED,
    )
