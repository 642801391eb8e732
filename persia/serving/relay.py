"""``persia serve export``: hands exports out to other machines, while they
are written here. It changes nothing.

    GET /NAME/versions                          the whole versions, JSON
    GET /NAME/CURRENT
    GET /NAME/v-000012/manifest.json
    GET /NAME/deltas/CHAIN/000000000042.safetensors?wait=1

A file that is not there is waited for, ``wait`` seconds, before the answer is
404. Nothing of torch.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from persia import _core, errors
from persia.base.counts import counted
from persia.base.logs import describe, lines_of_core, say
from persia.base.signals import Signals
from persia.base.urls import Url
from persia.distributed.renewal import renewal
from persia.distributed.serving import page_of
from persia.serving.config import INSECURE, RelayConfig, named_paths
from persia.serving.web import WebServer, denied

_VERSION = r"v-[0-9]{6,12}"
_FILE = re.compile(
    rf"CURRENT|erased\.json|{_VERSION}/[A-Za-z0-9_][A-Za-z0-9_.-]*"
    r"|deltas/[0-9a-f]{32}/[0-9]{12}\.safetensors"
)
_PIECE = 1 << 20
_LOOK_S = 0.005  # between looks for files that are waited for
_WAIT_S = 5.0  # that one waits, at most
#: Whose readers may read an export: it has all rows.
_SERVICE, _METHOD = "persia.v1.ParameterServer", "GetRows"


class _Waits:
    """Who waits for which file; one task looks for all."""

    def __init__(self) -> None:
        # With the moment at which none waits any more.
        self._waiting: dict[Path, tuple[asyncio.Future[None], float]] = {}
        self._task: asyncio.Task[None] | None = None

    async def until(self, place: Path, seconds: float) -> None:
        """Until a file is there, for so many seconds at most."""
        if place.exists():
            return
        if place not in self._waiting:
            loop = asyncio.get_running_loop()
            end = loop.time() + _WAIT_S
            self._waiting[place] = loop.create_future(), end
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._look())
        await asyncio.wait([self._waiting[place][0]], timeout=seconds)

    async def _look(self) -> None:
        now = asyncio.get_running_loop().time
        while self._waiting:
            for place, (there, end) in list(self._waiting.items()):
                if now() > end or place.exists():
                    there.set_result(None)
                    del self._waiting[place]
            await asyncio.sleep(_LOOK_S)


class _Relay:
    """What answers.

    Args:
        roots: folders by name.
        gate: lets requests in, by the tokens that they show.
    """

    def __init__(self, roots: Mapping[str, Path], gate: _core.Gate) -> None:
        self._roots = roots
        self._gate = gate
        self._waits = _Waits()

    async def answer(self, request: Request) -> Response:
        """A file, or the list of versions."""
        try:
            client = request.client
            peer = "" if client is None else f"{client.host}:{client.port}"
            shown = request.headers.get("authorization")
            entered = self._gate.enter(_METHOD, shown, peer)  # until it leaves
            response = await self._found(request)
            del entered
        except errors.AccessDenied as error:
            status, headers = denied(error)
            return Response(str(error), status, headers)
        except errors.LimitReached as error:
            return Response(str(error), 429)
        except OSError as error:
            return Response(f"cannot be read: {error.strerror}", 503)
        return response

    async def _found(self, request: Request) -> Response:
        root = self._roots.get(request.path_params["name"])
        path = request.path_params["path"]
        if root is None:
            return Response("no such export", 404)
        if path == "versions":
            return JSONResponse(await run_in_threadpool(versions_in, root))
        if not _FILE.fullmatch(path):
            return Response("no such file", 404)
        wait = _seconds(request.query_params.get("wait", "0"))
        if wait:
            await self._waits.until(root / path, wait)
        file = await run_in_threadpool(_opened, root / path)
        if file is None:
            return Response("no such file", 404)
        size = {"content-length": str(os.fstat(file.fileno()).st_size)}
        if request.method == "HEAD":
            file.close()
            return Response(headers=size)
        return StreamingResponse(_pieces(file), headers=size)


def _seconds(text: str) -> float:
    try:
        return min(max(float(text), 0.0), _WAIT_S)
    except ValueError:
        return 0.0


def versions_in(root: Path) -> list[str]:
    """The whole versions of a folder."""
    try:
        names = os.listdir(root)
    except FileNotFoundError:  # a training will make it
        return []
    return [
        name
        for name in names
        if re.fullmatch(_VERSION, name)
        and (root / name / "manifest.json").is_file()
    ]


def _opened(place: Path) -> BinaryIO | None:
    try:
        return place.open("rb")
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None


def _pieces(file: BinaryIO) -> Iterator[bytes]:
    with file:
        while piece := file.read(_PIECE):
            yield piece


def roots_of(texts: tuple[str, ...]) -> dict[str, Path]:
    """Folders by name, of ``NAME=PATH`` or ``PATH``, whose last part is its
    name.

    Raises:
        InvalidArgument: one is a URL, or a name is there twice, or odd.
    """
    found = {}
    for name, path in named_paths(texts).items():
        local = Url(path).local
        if local is None:
            raise errors.InvalidArgument(
                f"{Url(path)}: need a folder of this machine; a bucket is "
                "read without a relay"
            )
        found[name] = Path(local)
    return found


class Relay:
    """A process's server of exports, from the making to :meth:`close`.

    Args:
        config: of the process.
        exports: ``PATH`` or ``NAME=PATH`` of folders, which may appear later.

    Raises:
        Unavailable: uvicorn is not installed.
        StorageError: the address is taken.
    """

    def __init__(self, config: RelayConfig, exports: tuple[str, ...]) -> None:
        arguments = config.security().arguments(
            lambda security: self._web.renew(security)
        )
        roots = roots_of(exports)
        self._gate = _core.Gate(arguments, _SERVICE, **lines_of_core())
        relay = _Relay(roots, self._gate)
        app = Starlette(routes=[Route("/{name}/{path:path}", relay.answer)])
        app.router.redirect_slashes = False
        self._web = WebServer(
            config,
            app,
            connections=config.connections,
            grace=max(1.0, config.grace * 0.8),
        )
        self.address = self._web.address

    def start(self) -> None:
        """Answers requests from now on."""
        self._web.start()

    def close(self) -> None:
        """No more requests; those in flight are answered first."""
        self._web.close()
        self._gate.close()


def serve_exports(config: RelayConfig, exports: tuple[str, ...]) -> None:
    """Serves until SIGTERM or SIGINT; a second one ends it at once.

    Args: as of :class:`Relay`.
    """
    describe(role="serving")
    with Signals(config.grace) as signals:
        page_of(config, signals.health)
        if config.insecure:
            say(INSECURE, "warning")
        one = Relay(config, exports)
        signals.keep()
        renewal.at_hangup()
        one.start()
        signals.serve(
            f"serving {counted(len(exports), 'export')} on {one.address}",
            "files were not sent to their ends",
            None,
        )
        one.close()
        say("all files were sent")
