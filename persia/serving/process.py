"""A process that serves models: ``persia serve model``."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from persia import _core
from persia.base.cpus import processors
from persia.base.logs import describe, lines_of_core, say
from persia.base.requirements import install
from persia.base.signals import Signals
from persia.base.traces import begin_traces
from persia.distributed.renewal import renewal
from persia.distributed.security import Security
from persia.distributed.serving import page_of
from persia.errors import InvalidArgument, StorageError, Unavailable
from persia.serving.batcher import Batcher
from persia.serving.calls import Calls
from persia.serving.config import INSECURE, ModelConfig
from persia.serving.measures import Measures
from persia.serving.repository import Repository, named_paths
from persia.serving.service import Service

_CALLS = 1024  # of gRPC, which are read at once; more wait


class Serving:
    """A server of models over HTTP, and over gRPC where it has a port, from
    the making to :meth:`close`.

    Args:
        config: of the process.
        models: ``PATH`` or ``NAME=PATH`` of exports, folders or URLs.

    Raises:
        Unavailable: uvicorn or starlette is not installed, or this build has
            no gRPC.
        StorageError, CorruptFile, SchemaMismatch: a model cannot be loaded;
            or the address is taken.
    """

    def __init__(self, config: ModelConfig, models: tuple[str, ...]) -> None:
        uvicorn = _uvicorn()
        from persia.serving.http import Server, make_app

        torch.set_num_threads(1)  # an executor a core
        self._is_begun = False
        paths = named_paths(models)
        self.measures = Measures(paths)
        self.repository = Repository(
            paths,
            config.versions,
            config.poll,
            config.cache,
            config.packet_rows_limit,
        )
        for name, model in self.repository.models.items():
            self.measures.watch_model(name, model)
            model.changed = self._tell_health
        self._service = Service(self.repository, config.processes > 1)
        self._batcher = Batcher(
            self.repository.find,
            self.measures,
            threads=config.threads or executors(config.processes),
            batch=config.batch_samples,
            queue=config.queue_samples,
            limit=config.request_samples,
            timeout=config.timeout,
        )
        self.measures.watch(
            "queue_samples",
            "Samples that wait.",
            lambda: float(self._batcher.queue.waiting),
        )
        self.measures.watch_refused(lambda: self._batcher.queue.refused)
        security = config.security()
        arguments = security.arguments(self._renewed)
        self._gate = _core.Gate(arguments, **lines_of_core())
        self.measures.watch_denied(self._denied)
        server = Server(
            self._service,
            self._batcher,
            self.measures,
            body=config.body_limit,
            timeout=config.timeout,
            gate=self._gate,
        )
        self._socket = listen(
            config.host, config.port, shared=config.processes > 1
        )
        host = f"[{config.host}]" if ":" in config.host else config.host
        self.address = f"{host}:{self._socket.getsockname()[1]}"
        self._grace = max(1.0, config.grace * 0.8)
        self._uvicorn = uvicorn.Server(
            uvicorn.Config(
                make_app(server),
                log_config=None,
                access_log=False,
                lifespan="off",
                server_header=False,
                limit_concurrency=config.connections,
                timeout_graceful_shutdown=int(self._grace),
                **_tls(config),
            )
        )
        self._thread = threading.Thread(
            target=self._run_http,
            name="persia-http",
            daemon=True,
        )
        self._calls: Calls | None = None
        self.grpc_address: str | None = None
        if config.grpc_port is not None:
            self._calls = Calls(self._service, self._batcher.queue)
            port = self._batcher.queue.listen(
                address=f"{host}:{config.grpc_port}",
                threads=max(1, int(processors()) // 4),
                calls=_CALLS,
                connections=config.connections,
                message_limit=config.body_limit,
                shared=config.processes > 1,
                security=arguments,
                **lines_of_core(),
            )
            self.grpc_address = f"{host}:{port}"

    def start(self) -> None:
        """Answers requests from now on."""
        self._thread.start()
        while not self._uvicorn.started:
            if not self._thread.is_alive():
                raise Unavailable(f"uvicorn does not serve {self.address}")
            time.sleep(0.01)
        self._is_begun = True
        self._tell_health()

    def not_ready(self) -> str:
        """Why it is not ready; "": it is."""
        return "" if self._service.is_ready else "a model does not answer"

    def _tell_health(self) -> None:
        if self._is_begun:
            self._batcher.queue.health(self._service.is_ready)

    def _denied(self) -> dict[tuple[str, str], int]:
        """Calls that were denied, over HTTP and gRPC."""
        found = self._gate.denied()
        for key, n in self._batcher.queue.denied().items():
            found[key] = found.get(key, 0) + n
        return found

    def _renewed(self, security: Security) -> None:
        """Other certificates for the next connections of HTTP."""
        context = self._uvicorn.config.ssl
        given = dict(security.origin.given) if security.origin else {}
        if context is None or "cert" not in given:
            return
        context.load_cert_chain(given["cert"], given["key"])
        if "ca" in given:
            context.load_verify_locations(given["ca"])

    def _run_http(self) -> None:
        _core.thread_prompt()
        self._uvicorn.run(sockets=[self._socket])

    def close(self) -> None:
        """No more requests; those in flight are answered first."""
        self._service.ready = False
        self._uvicorn.should_exit = True
        self.repository.end()
        self._batcher.queue.stop(self._grace)
        if self._thread.is_alive():
            self._thread.join()
        self._gate.close()
        self._batcher.close()
        if self._calls is not None:
            self._calls.close()
        self.repository.close()
        self._socket.close()


def _uvicorn() -> Any:
    try:
        import starlette  # noqa: F401
        import uvicorn
    except ImportError as error:
        raise Unavailable(
            f"persia serve model needs {error.name}: {install(extra='serve')}"
        ) from None
    return uvicorn


def listen(host: str, port: int, shared: bool = False) -> socket.socket:
    """A socket that listens; shared: others that say so, too, have the same
    port.

    Raises:
        StorageError: it cannot.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Without the protocol asyncio sets no TCP_NODELAY.
    found = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, shared)
        found.bind((host, port))
        found.listen(2048)
    except OSError as error:
        found.close()
        raise StorageError(
            f"cannot listen on {host}:{port}: {error.strerror}"
        ) from None
    return found


def _tls(config: ModelConfig) -> dict[str, Any]:
    if config.tls_cert is None:
        return {}
    import ssl

    found: dict[str, Any] = {
        "ssl_certfile": str(config.tls_cert),
        "ssl_keyfile": str(config.tls_key),
    }
    if config.mutual_tls:
        found["ssl_ca_certs"] = str(config.tls_ca)
        found["ssl_cert_reqs"] = ssl.CERT_REQUIRED
    return found


@contextlib.contextmanager
def serving(config: ModelConfig, models: tuple[str, ...]) -> Iterator[Serving]:
    """Serves within the block."""
    one = Serving(config, models)
    one.start()
    try:
        yield one
    finally:
        one.close()


def serve_model(
    config: ModelConfig,
    models: tuple[str, ...],
    tell: Callable[[Signals], None] | None = None,
) -> None:
    """Serves until SIGTERM or SIGINT; a second one ends it at once.

    Args:
        config: of the process.
        models: ``PATH`` or ``NAME=PATH`` of exports, folders or URLs.
        tell: of one of several processes: is called once it serves.
    """
    if not models:
        raise InvalidArgument("no model is given")
    begin_traces("serving")
    describe(role="serving")
    with Signals(config.grace) as signals:
        page = page_of(config, signals.health)
        one = Serving(config, models)
        if page is not None:
            page.add(one.measures)
        signals.health.needs(one.not_ready)
        signals.keep()
        renewal.at_hangup()
        one.start()
        line = f"process {os.getpid()} serves"
        if tell is None:
            _say_all(one, config)
            count = len(one.repository.models)
            line = f"serving {count} models on {one.address}"
        signals.serve(line, "requests in flight were not answered", tell)
        one.close()
        say("all requests were answered")


def executors(processes: int) -> int:
    """Threads that compute in each of so many processes: one a core in all."""
    return max(1, int(processors()) // processes)


def _say_all(one: Serving, config: ModelConfig) -> None:
    if config.insecure:
        say(INSECURE, "warning")
    for name, model in one.repository.models.items():
        if model.is_ready:
            say(f"model {name}: version {model.current.version} answers")
    if one.grpc_address is not None:
        say(f"gRPC on {one.grpc_address}")
