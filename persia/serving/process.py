"""A process that serves models: ``persia serve model``."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator

import torch

from persia import _core
from persia.base.counts import counted
from persia.base.cpus import processors
from persia.base.logs import describe, lines_of_core, say
from persia.base.signals import Signals
from persia.base.traces import begin_traces
from persia.distributed.renewal import renewal
from persia.distributed.security import Security
from persia.distributed.serving import page_of
from persia.errors import InvalidArgument
from persia.serving.batcher import Batcher
from persia.serving.calls import Calls
from persia.serving.config import INSECURE, ModelConfig, named_paths
from persia.serving.measures import Measures
from persia.serving.repository import Repository
from persia.serving.service import Service
from persia.serving.web import WebServer, find_uvicorn

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
        find_uvicorn()
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
        self._grace = max(1.0, config.grace * 0.8)
        self._web = WebServer(
            config,
            make_app(server),
            connections=config.connections,
            grace=self._grace,
            timeout=config.timeout,
            shared=config.processes > 1,
        )
        self.address = self._web.address
        self._calls: Calls | None = None
        self.grpc_address: str | None = None
        if config.grpc_port is not None:
            self._calls = Calls(self._service, self._batcher.queue)
            port = self._batcher.queue.listen(
                address=f"{self._web.host}:{config.grpc_port}",
                threads=max(1, int(processors()) // 4),
                calls=_CALLS,
                connections=config.connections,
                message_limit=config.body_limit,
                shared=config.processes > 1,
                security=arguments,
                **lines_of_core(),
            )
            self.grpc_address = f"{self._web.host}:{port}"

    def start(self) -> None:
        """Answers requests from now on."""
        self._web.start()
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
        self._web.renew(security)

    def close(self) -> None:
        """No more requests; those in flight are answered first."""
        self._service.ready = False
        self._web.stop()
        self.repository.end()
        self._batcher.queue.stop(self._grace)
        self._web.close()
        self._gate.close()
        self._batcher.close()
        if self._calls is not None:
            self._calls.close()
        self.repository.close()


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
            count = counted(len(one.repository.models), "model")
            line = f"serving {count} on {one.address}"
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
