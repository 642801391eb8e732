"""The Open Inference Protocol v2 over HTTP, as an ASGI application."""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from persia import errors
from persia.base.version import __version__
from persia.serving.batcher import Batcher
from persia.serving.form import TensorForm
from persia.serving.inputs import inputs_of, tensors_of
from persia.serving.measures import Measures
from persia.serving.model import ExportedModel
from persia.serving.protocol import Request, decode, encode
from persia.serving.repository import Model, Repository

_HEADER = "Inference-Header-Content-Length"
_EXTENSIONS = ["binary_tensor_data", "model_repository"]
_PLATFORM = "persia_export"
#: The status of an error; others are of the request, 400.
_STATUS: list[tuple[type[errors.PersiaError], int]] = [
    (errors.AccessDenied, 401),
    (errors.LimitReached, 429),
    (errors.DeadlineExceeded, 504),
    (errors.Unavailable, 503),
    (errors.Closed, 503),
    (errors.StorageError, 404),
    (errors.CorruptFile, 500),
    (errors.InternalError, 500),
    (errors.OutOfMemory, 500),
]
_ELEMENTS = 1 << 26  # of a tensor


class Server:
    """What the application answers with.

    Attributes:
        repository: the models.
        batcher: computes.
        measures: of the requests.
        limit: samples that a request may have.
        body: bytes that a request may have.
        timeout: seconds that a request may take, if it does not say.
        token: that requests must show; None: none.
        ready: whether new requests are welcome.
    """

    def __init__(
        self,
        repository: Repository,
        batcher: Batcher,
        measures: Measures,
        *,
        limit: int,
        body: int,
        timeout: float,
        token: str | None,
    ) -> None:
        self.repository = repository
        self.batcher = batcher
        self.measures = measures
        self.limit = limit
        self.body = body
        self.timeout = timeout
        self.token = token
        self.ready = True

    # ---- what is asked of all

    def check_token(self, request: HttpRequest) -> None:
        """Raises AccessDenied unless the request shows the token."""
        if self.token is None:
            return
        given = request.headers.get("authorization", "")
        wanted = f"Bearer {self.token}"
        if not hmac.compare_digest(given.encode(), wanted.encode()):
            raise errors.AccessDenied(
                "the request has no valid token: send the header "
                "'authorization: Bearer TOKEN'"
            )

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
            async with asyncio.timeout(self.timeout):
                async for part in request.stream():
                    size += len(part)
                    if size > self.body:
                        raise errors.LimitReached(
                            f"the body has more than {self.body:,} bytes"
                        )
                    parts.append(part)
        except TimeoutError:
            raise errors.DeadlineExceeded(
                f"{size:,} bytes of the body arrived in {self.timeout:g} s"
            ) from None
        return b"".join(parts)

    # ---- health and metadata

    async def live(self, request: HttpRequest) -> Response:
        """The process answers."""
        return _json({"live": True})

    async def is_ready(self, request: HttpRequest) -> Response:
        """All models answer, and the server does not end."""
        ready = self.ready and self.repository.is_ready
        return _json({"live": True, "ready": ready}, 200 if ready else 503)

    async def about(self, request: HttpRequest) -> Response:
        """The server."""
        return _json(
            {
                "name": "persia",
                "version": __version__,
                "extensions": _EXTENSIONS,
            }
        )

    def _model(self, request: HttpRequest) -> Model:
        return self.repository.model(request.path_params["model"])

    async def _version(self, request: HttpRequest) -> ExportedModel:
        model = self._model(request)
        name = request.path_params.get("version")
        if name is None:
            return model.current
        found = await run_in_threadpool(model.version, name)
        assert isinstance(found, ExportedModel)
        return found

    async def model_ready(self, request: HttpRequest) -> Response:
        """The model, or its version, answers."""
        model = self._model(request)
        version = request.path_params.get("version")
        ready = self.ready and model.is_ready
        if version is not None:
            ready = ready and version in await run_in_threadpool(model.names)
        return _json(
            {"name": model.name, "ready": ready}, 200 if ready else 503
        )

    async def model_about(self, request: HttpRequest) -> Response:
        """Inputs and outputs."""
        version = await self._version(request)
        model = self._model(request)
        return _json(
            {
                "name": model.name,
                "versions": await run_in_threadpool(model.names),
                "platform": _PLATFORM,
                "inputs": [_about(one) for one in inputs_of(version)],
                "outputs": [_about(one) for one in _outputs(version)],
                "parameters": {"version": version.version},
            }
        )

    async def config(self, request: HttpRequest) -> Response:
        """The same, as Triton's clients that measure ask for it."""
        version = await self._version(request)
        return _json(
            {
                "name": self._model(request).name,
                "platform": _PLATFORM,
                "max_batch_size": 0,
                "input": [_configured(one) for one in inputs_of(version)],
                "output": [_configured(one) for one in _outputs(version)],
            }
        )

    async def stats(self, request: HttpRequest) -> Response:
        """Ids that were looked up, and those of them without a row."""
        version = await self._version(request)
        ids, unknown = version.unknown()
        return _json(
            {
                "model_stats": [
                    {
                        "name": self._model(request).name,
                        "version": version.version,
                        "ids": ids,
                        "unknown_ids": unknown,
                        "lag": version.lag,
                        "packets": version.packets,
                    }
                ]
            }
        )

    # ---- the repository

    async def index(self, request: HttpRequest) -> Response:
        """All models, with all versions."""

        def listed() -> list[dict[str, str]]:
            out = []
            for model in self.repository.models.values():
                now = model.current.version if model.is_ready else ""
                for name in model.names():
                    state = "READY" if name == now else "AVAILABLE"
                    out.append(
                        {"name": model.name, "version": name, "state": state}
                    )
            return out

        return _json(await run_in_threadpool(listed))

    async def load(self, request: HttpRequest) -> Response:
        """Makes a version the one that answers."""
        body = await self.read(request)
        try:
            document = json.loads(body) if body else {}
            parameters = document.get("parameters") or {}
            version = parameters.get("version")
        except (ValueError, AttributeError, RecursionError):
            raise errors.ProtocolError("the request is no JSON") from None
        if version is not None and not isinstance(version, str):
            raise errors.ProtocolError("the version is no string")
        model = self._model(request)
        await run_in_threadpool(model.load, version, version is not None)
        return _json({})

    async def unload(self, request: HttpRequest) -> Response:
        """A model answers no more."""
        await run_in_threadpool(self._model(request).unload)
        return _json({})

    # ---- inference

    async def infer(self, request: HttpRequest) -> Response:
        """The outputs of inputs."""
        begun = time.monotonic()
        phases = self.measures.phases
        model = self._model(request)
        try:
            version = await self._version(request)
            body = await self.read(request)
            at = time.monotonic()
            asked = decode(body, _header_of(request), _ELEMENTS)
            tensors = tensors_of(version, asked.inputs, self.limit)
            phases["decode"].observe(time.monotonic() - at)
            left = self.timeout if asked.timeout is None else asked.timeout
            answer = self.batcher.submit(version, tensors, left)
            found = await asyncio.wrap_future(answer)
            at = time.monotonic()
            response = _answer(asked, model.name, version, found)
            phases["encode"].observe(time.monotonic() - at)
        except errors.PersiaError as error:
            self.measures.answered.labels(model.name, error.code).inc()
            raise
        self.measures.answered.labels(model.name, "ok").inc()
        phases["request"].observe(time.monotonic() - begun)
        return response


def _header_of(request: HttpRequest) -> int | None:
    text = request.headers.get(_HEADER)
    if text is None:
        return None
    if not text.isascii() or not text.isdigit() or len(text) > 12:
        raise errors.ProtocolError(f"{_HEADER} is {text[:40]!r}")
    return int(text)


def _answer(
    asked: Request, model: str, version: ExportedModel, found: Any
) -> Response:
    outputs = {
        name: tensor.float().numpy()
        if tensor.is_floating_point() and tensor.element_size() == 2
        else tensor.numpy()
        for name, tensor in version.scores(found).items()
    }
    body, header = encode(asked, model, version.version, outputs)
    if header is None:
        return Response(body, media_type="application/json")
    return Response(
        body,
        media_type="application/octet-stream",
        headers={_HEADER: str(header)},
    )


def _outputs(model: ExportedModel) -> list[TensorForm]:
    if not model.manifest.clicks:
        return model.form.outputs
    names = [f"score.{task}" for task in model.tasks] or ["score"]
    return [
        TensorForm(name=name, datatype="FP32", shape=[-1]) for name in names
    ]


def _about(one: TensorForm) -> dict[str, Any]:
    return {"name": one.name, "datatype": one.datatype, "shape": one.shape}


def _configured(one: TensorForm) -> dict[str, Any]:
    kind = "STRING" if one.datatype == "BYTES" else one.datatype
    return {
        "name": one.name,
        "data_type": f"TYPE_{kind}",
        "dims": one.shape,
    }


def _json(value: Any, status: int = 200) -> Response:
    return Response(json.dumps(value), status, media_type="application/json")


def error_response(error: errors.PersiaError) -> Response:
    """An error in the protocol's form, with its class as a header."""
    status = next((s for kind, s in _STATUS if isinstance(error, kind)), 400)
    response = _json({"error": f"{error.code}: {error}"}, status)
    response.headers["persia-error"] = error.code
    return response


Answer = Callable[[HttpRequest], Awaitable[Response]]


def make_app(server: Server) -> Starlette:
    """The application."""

    def guarded(answer: Answer) -> Answer:
        async def call(request: HttpRequest) -> Response:
            try:
                server.check_token(request)
                return await answer(request)
            except errors.PersiaError as error:
                return error_response(error)
            except ClientDisconnect:
                return Response(status_code=400)
            except Exception as error:  # a bug, or no memory
                text = f"{type(error).__name__}: {error}"
                return error_response(errors.InternalError(text))

        return call

    routes = []

    def route(method: str, path: str, answer: Answer) -> None:
        routes.append(Route(path, guarded(answer), methods=[method]))

    async def no(request: HttpRequest, error: Exception) -> Response:
        status = getattr(error, "status_code", 404)
        path = request.url.path
        return _json({"error": f"no {request.method} {path}"}, status)

    # Health is for those who know no token.
    routes.append(Route("/v2/health/live", server.live))
    routes.append(Route("/v2/health/ready", server.is_ready))
    route("GET", "/v2", server.about)
    route("POST", "/v2/repository/index", server.index)
    repository = "/v2/repository/models/{model}"
    route("POST", f"{repository}/load", server.load)
    route("POST", f"{repository}/unload", server.unload)
    model = "/v2/models/{model}"
    for base in model, f"{model}/versions/{{version}}":
        route("GET", base, server.model_about)
        route("GET", f"{base}/ready", server.model_ready)
        route("GET", f"{base}/config", server.config)
        route("GET", f"{base}/stats", server.stats)
        route("POST", f"{base}/infer", server.infer)
    return Starlette(routes=routes, exception_handlers={404: no, 405: no})
