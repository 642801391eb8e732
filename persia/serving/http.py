"""The Open Inference Protocol v2 over HTTP, as an ASGI application."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from persia import _core, errors
from persia.base.traces import tracing
from persia.serving.batcher import Answer, Batcher
from persia.serving.measures import Measures
from persia.serving.protocol import decode, encode
from persia.serving.service import Service
from persia.serving.traces import RequestTrace, trace_of
from persia.serving.web import denied

_HEADER = "Inference-Header-Content-Length"
#: The status of an error; others are of the request, 400.
_STATUS: list[tuple[type[errors.PersiaError], int]] = [
    (errors.LimitReached, 429),
    (errors.DeadlineExceeded, 504),
    (errors.Unavailable, 503),
    (errors.Closed, 503),
    (errors.NotFound, 404),
    (errors.StorageError, 503),
    (errors.CorruptFile, 500),
    (errors.InternalError, 500),
    (errors.OutOfMemory, 500),
]


class Server:
    """What the application answers with.

    Args:
        service: answers all but inference.
        batcher: computes.
        measures: of the requests.
        body: bytes that a request may have.
        timeout: seconds that a request may take, if it does not say.
        gate: lets requests in, by the tokens that they show.
    """

    def __init__(
        self,
        service: Service,
        batcher: Batcher,
        measures: Measures,
        *,
        body: int,
        timeout: float,
        gate: _core.Gate,
    ) -> None:
        self._service = service
        self._batcher = batcher
        self._measures = measures
        self._body = body
        self._timeout = timeout
        self._gate = gate

    # ---- what is asked of all

    def enter(self, method: str, request: HttpRequest) -> _core.Pass:
        """Lets a request in, which leaves with the object.

        Args:
            method: that does the same over gRPC.
            request: shows a token, as ``authorization: Bearer TOKEN``.

        Raises:
            AccessDenied: the token is not for it.
            LimitReached: its name has too many requests.
        """
        client = request.client
        peer = "" if client is None else f"{client.host}:{client.port}"
        shown = request.headers.get("authorization")
        return self._gate.enter(method, shown, peer)

    async def read(self, request: HttpRequest) -> bytes:
        """The body.

        Raises:
            LimitReached: it is too large.
            DeadlineExceeded: it does not arrive in time.
            ProtocolError: it is compressed.
        """
        if request.headers.get("content-encoding", "identity") != "identity":
            raise errors.ProtocolError(
                "the body is compressed: send it as it is"
            )
        parts, size = [], 0
        try:
            async with asyncio.timeout(self._timeout):
                async for part in request.stream():
                    size += len(part)
                    if size > self._body:
                        raise errors.LimitReached(
                            f"the body has more than {self._body:,} bytes"
                        )
                    parts.append(part)
        except TimeoutError:
            request.state.slow = True
            raise errors.DeadlineExceeded(
                f"{size:,} bytes of the body arrived in {self._timeout:g} s"
            ) from None
        return b"".join(parts)

    # ---- health and metadata

    async def live(self, request: HttpRequest) -> Response:
        """The process answers."""
        return _json({"live": True})

    async def is_ready(self, request: HttpRequest) -> Response:
        """All models answer, and the server does not end."""
        ready = self._service.is_ready
        return _json({"live": True, "ready": ready}, 200 if ready else 503)

    async def about(self, request: HttpRequest) -> Response:
        """The server."""
        return _json(self._service.about())

    async def model_ready(self, request: HttpRequest) -> Response:
        """The model, or its version, answers."""
        name, version = _names(request)
        ready = await run_in_threadpool(
            self._service.model_is_ready, name, version
        )
        return _json({"name": name, "ready": ready}, 200 if ready else 503)

    async def model_about(self, request: HttpRequest) -> Response:
        """Inputs and outputs."""
        return _json(
            await run_in_threadpool(
                self._service.model_about, *_names(request)
            )
        )

    async def config(self, request: HttpRequest) -> Response:
        """The same, as Triton's clients that measure ask for it."""
        return _json(
            await run_in_threadpool(self._service.config, *_names(request))
        )

    async def stats(self, request: HttpRequest) -> Response:
        """What a version has answered."""
        one = await run_in_threadpool(
            self._service.statistics, *_names(request)
        )
        return _json({"model_stats": [one]})

    # ---- the repository

    async def index(self, request: HttpRequest) -> Response:
        """All models, with all versions."""
        ready = (await self._document(request)).get("ready") is True
        return _json(await run_in_threadpool(self._service.index, ready))

    async def load(self, request: HttpRequest) -> Response:
        """Makes a version the one that answers."""
        document = await self._document(request)
        parameters = document.get("parameters") or {}
        if not isinstance(parameters, dict):
            raise errors.ProtocolError("the parameters are no object")
        name, _ = _names(request)
        await run_in_threadpool(self._service.load, name, parameters)
        return _json({})

    async def _document(self, request: HttpRequest) -> dict[str, Any]:
        """The body; without one, nothing is asked."""
        body = await self.read(request)
        try:
            document = json.loads(body or b"{}")
        except (ValueError, RecursionError):
            document = None
        if not isinstance(document, dict):
            raise errors.ProtocolError("the request is no JSON object")
        return document

    async def unload(self, request: HttpRequest) -> Response:
        """A model answers no more."""
        name, _ = _names(request)
        await run_in_threadpool(self._service.unload, name)
        return _json({})

    # ---- inference

    async def infer(self, request: HttpRequest) -> Response:
        """The outputs of inputs."""
        trace = None
        if tracing():
            trace = trace_of(request.headers.get("traceparent"), 0)
        try:
            response = await self._infer(request, trace)
        except BaseException as error:
            if trace is not None:
                trace.end(getattr(error, "code", type(error).__name__))
            raise
        if trace is not None:
            trace.end()
        return response

    async def _infer(
        self, request: HttpRequest, trace: RequestTrace | None
    ) -> Response:
        name, version = _names(request)
        try:
            if version:  # it may have to be mapped
                await run_in_threadpool(
                    self._service.repository.find, name, version
                )
            at = time.monotonic_ns()
            body = await self.read(request)
            if trace is not None:
                trace.part("read", (at, time.monotonic_ns()))
            asked = decode(body, _header_of(request))
            loop = asyncio.get_running_loop()
            answer: asyncio.Future[Answer] = loop.create_future()
            waits = _Waits(loop, answer, trace, asked.outputs)
            waiting = _core.InferRequest(name, version, asked.inputs, waits)
            left = self._timeout if asked.timeout is None else asked.timeout
            self._batcher.queue.put(waiting, left)
        except errors.PersiaError as error:
            self._measures.count(name, error.code)
            raise
        found = await answer
        if isinstance(found, errors.PersiaError):
            raise found
        at = time.monotonic_ns()
        body, header = encode(asked, name, *found)
        if trace is not None:
            trace.part("reply", (at, time.monotonic_ns()))
        if header is None:
            return Response(body, media_type="application/json")
        return Response(
            body,
            media_type="application/octet-stream",
            headers={_HEADER: str(header)},
        )


def _names(request: HttpRequest) -> tuple[str, str]:
    """The model, and its version or ""."""
    parameters = request.path_params
    return parameters["model"], parameters.get("version", "")


class _Waits:
    """A request that waits in the loop: gives it the answer from another
    thread; if it waits no more, or the loop has ended, to none."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        answer: asyncio.Future[Answer],
        trace: RequestTrace | None,
        outputs: Sequence[str] | None,
    ) -> None:
        self._loop, self._answer = loop, answer
        self.trace = trace
        self.outputs = outputs

    def __call__(self, found: Answer, /) -> None:
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._settle, found)

    def _settle(self, found: Answer) -> None:
        if not self._answer.done():
            self._answer.set_result(found)


def _header_of(request: HttpRequest) -> int | None:
    text = request.headers.get(_HEADER)
    if text is None:
        return None
    if not text.isascii() or not text.isdigit() or len(text) > 12:
        raise errors.ProtocolError(f"{_HEADER} is {text[:40]!r}")
    return int(text)


def _json(value: Any, status: int = 200) -> Response:
    return Response(json.dumps(value), status, media_type="application/json")


def error_response(error: errors.PersiaError) -> Response:
    """An error in the protocol's form, with its class as a header."""
    status = next((s for kind, s in _STATUS if isinstance(error, kind)), 400)
    headers = {"persia-error": error.code}
    if isinstance(error, errors.AccessDenied):
        status, more = denied(error)
        headers |= more
    response = _json({"error": f"{error.code}: {error}"}, status)
    response.headers.update(headers)
    return response


_Handler = Callable[[HttpRequest], Awaitable[Response]]


def make_app(server: Server) -> Starlette:
    """The application."""

    def guarded(answer: _Handler, method: str) -> _Handler:
        async def call(request: HttpRequest) -> Response:
            try:
                entered = server.enter(method, request)  # until it returns
                response = await answer(request)
                del entered
                return response
            except errors.PersiaError as error:
                response = error_response(error)
                if getattr(request.state, "slow", False):
                    # Else each byte that follows keeps the connection.
                    response.headers["connection"] = "close"
                return response
            except ClientDisconnect:
                return Response(status_code=400)
            except Exception as error:  # a bug, or no memory
                text = f"{type(error).__name__}: {error}"
                return error_response(errors.InternalError(text))

        return call

    routes = []

    def route(verb: str, path: str, answer: _Handler, method: str) -> None:
        routes.append(Route(path, guarded(answer, method), methods=[verb]))

    async def no(request: HttpRequest, error: Exception) -> Response:
        status = getattr(error, "status_code", 404)
        path = request.url.path
        return _json({"error": f"no {request.method} {path}"}, status)

    # Health needs no token.
    routes.append(Route("/v2/health/live", server.live))
    routes.append(Route("/v2/health/ready", server.is_ready))
    route("GET", "/v2", server.about, "ServerMetadata")
    route("POST", "/v2/repository/index", server.index, "RepositoryIndex")
    repository = "/v2/repository/models/{model}"
    load, unload = "RepositoryModelLoad", "RepositoryModelUnload"
    route("POST", f"{repository}/load", server.load, load)
    route("POST", f"{repository}/unload", server.unload, unload)
    model = "/v2/models/{model}"
    for base in model, f"{model}/versions/{{version}}":
        route("GET", base, server.model_about, "ModelMetadata")
        route("GET", f"{base}/ready", server.model_ready, "ModelReady")
        route("GET", f"{base}/config", server.config, "ModelConfig")
        route("GET", f"{base}/stats", server.stats, "ModelStatistics")
        route("POST", f"{base}/infer", server.infer, "ModelInfer")
    return Starlette(routes=routes, exception_handlers={404: no, 405: no})
