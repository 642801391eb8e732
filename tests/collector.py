"""A collector of traces: what OTLP over HTTP brings, in memory."""

from __future__ import annotations

import http.server
import threading
from collections import defaultdict
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import pytest

service = pytest.importorskip(
    "opentelemetry.proto.collector.trace.v1.trace_service_pb2",
    reason="needs persia[traces]",
)


@dataclass(frozen=True)
class Span:
    """One that has arrived; ids as hex, ``parent`` empty of the first."""

    name: str
    service: str
    trace: str
    id: str
    parent: str
    began: int
    ended: int
    failed: bool
    about: dict[str, Any]


class Collector:
    """Listens on a port of loopback within a ``with`` block."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: list[Span] = []
        collector = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                size = int(self.headers["Content-Length"])
                collector._add(self.path, self.rfile.read(size))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *args: Any) -> None:
                pass

        self._http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    def __enter__(self) -> Self:
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._http.shutdown()
        self._http.server_close()

    def environment(self, rate: float = 1.0) -> dict[str, str]:
        """For the processes whose spans are wanted."""
        return {
            "PERSIA_TRACE_RATE": str(rate),
            "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:"
            f"{self._http.server_port}",
            "NO_PROXY": "127.0.0.1",
        }

    def traces(self) -> dict[str, list[Span]]:
        """The spans that have arrived, by trace."""
        found = defaultdict(list)
        with self._lock:
            for span in self._spans:
                found[span.trace].append(span)
        return dict(found)

    def _add(self, path: str, body: bytes) -> None:
        assert path == "/v1/traces"
        request = service.ExportTraceServiceRequest.FromString(body)
        for of in request.resource_spans:
            name = _values(of.resource.attributes)["service.name"]
            for within in of.scope_spans:
                with self._lock:
                    self._spans += [_span(name, one) for one in within.spans]


def _span(service: str, one: Any) -> Span:
    return Span(
        *(one.name, service, one.trace_id.hex(), one.span_id.hex()),
        *(one.parent_span_id.hex(), one.start_time_unix_nano),
        *(one.end_time_unix_nano, one.status.code == 2),
        _values(one.attributes),
    )


def _values(attributes: Any) -> dict[str, Any]:
    return {
        one.key: getattr(one.value, one.value.WhichOneof("value"))
        for one in attributes
    }
