"""Several processes that serve the same models at the same ports.

The kernel gives each connection to one of them. Rows are mapped from the same
files, so their memory is there once. This process computes nothing. If one of
the others ends by itself, all end: who started this one starts it again.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from persia.base.counts import counted
from persia.base.environment import variable
from persia.base.logs import say
from persia.base.signals import Signals
from persia.errors import StorageError, Unavailable
from persia.serving.config import INSECURE, ModelConfig

#: The part of a process that this one starts with its own command line.
_PART = "PERSIA_SERVING_PROCESS"


class _Part(NamedTuple):
    """The part of a process: its number; the pipe on which it says that it
    serves; the one that ends when its parent does; the ports, -1: none."""

    number: int
    ready: int
    life: int
    port: int
    grpc_port: int

    def serve(self, config: ModelConfig, models: tuple[str, ...]) -> None:
        """Serves as that process."""
        from persia.serving.process import serve_model

        ports: dict[str, int | None] = {"port": self.port}
        if config.grpc_port is not None:
            ports["grpc_port"] = self.grpc_port
        if config.metrics_port:  # each has one of its own
            ports["metrics_port"] = config.metrics_port + self.number
        serve_model(config.model_copy(update=ports), models, self._tell)

    def _tell(self, signals: Signals) -> None:
        threading.Thread(
            target=self._follow, args=(signals,), daemon=True
        ).start()
        os.write(self.ready, b"1")

    def _follow(self, signals: Signals) -> None:
        """It ends as at SIGTERM when its parent does, in whatever way, if it
        does not end already."""
        os.read(self.life, 1)
        if signals.number is None:
            os.kill(os.getpid(), signal.SIGTERM)


class _Child(NamedTuple):
    """A process that was started, and the pipe on which it says that it
    serves."""

    process: subprocess.Popen[bytes]
    pipe: int

    def wait_ready(self) -> None:
        """Raises Unavailable if it ends before."""
        if not os.read(self.pipe, 1):
            raise Unavailable(self.ended())

    def ended(self) -> str:
        """How it ended, once it did."""
        status = self.process.wait()
        return f"process {self.process.pid} ended with status {status}"


def serve_models(config: ModelConfig, models: tuple[str, ...]) -> None:
    """Serves until SIGTERM or SIGINT; a second one ends it at once.

    Args:
        config: of each process.
        models: ``PATH`` or ``NAME=PATH`` of exports, folders or URLs.

    Raises:
        Unavailable: a process ended by itself.
        PersiaError: as of :class:`persia.serving.process.Serving`.
    """
    part = variable(_PART)
    if part is not None:
        _Part(*json.loads(part)).serve(config, models)
        return
    if config.processes == 1:
        from persia.serving.process import serve_model

        serve_model(config, models)
        return
    with contextlib.ExitStack() as stack:
        ports = [
            -1
            if port is None
            else stack.enter_context(held(config.host, port))
            for port in (config.port, config.grpc_port)
        ]
        life, kept = os.pipe()
        children: list[_Child] = []
        stack.callback(_end, kept, children)
        for number in range(config.processes):
            children.append(_started(number, life, ports))
            if number == 0:  # what is wrong for all is said once
                children[0].wait_ready()
        for child in children[1:]:
            child.wait_ready()
        _watch(config, ports, children, len(models))


def _started(number: int, life: int, ports: Sequence[int]) -> _Child:
    read, write = os.pipe()
    part = json.dumps(_Part(number, write, life, *ports))
    process = subprocess.Popen(
        [sys.executable, "-m", "persia", *sys.argv[1:]],
        env={**os.environ, _PART: part},
        pass_fds=(write, life),
    )
    os.close(write)
    return _Child(process, read)


@contextlib.contextmanager
def held(host: str, port: int) -> Iterator[int]:
    """A port, 0: any, that processes which this one starts may listen on
    together, and no others."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe, socket.socket(family) as one:
        try:
            # Others that share it, too, would let us in.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            probe.close()
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            one.bind((host, port))
        except OSError as error:
            raise StorageError(
                f"cannot listen on {host}:{port}: {error.strerror}"
            ) from None
        yield int(one.getsockname()[1])


def _watch(
    config: ModelConfig,
    ports: Sequence[int],
    children: Sequence[_Child],
    models: int,
) -> None:
    """Until a signal, or until a process ends by itself."""
    early: list[int] = []

    def wait(signals: Signals) -> None:
        found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        if signals.number is None and found is not None:
            early.append(found.si_pid)
            os.kill(os.getpid(), signal.SIGTERM)

    host = f"[{config.host}]" if ":" in config.host else config.host

    def renew(*_: object) -> None:
        for child in children:
            child.process.send_signal(signal.SIGHUP)

    with Signals(config.grace) as signals:
        signals.keep()
        signal.signal(signal.SIGHUP, renew)
        threading.Thread(target=wait, args=(signals,), daemon=True).start()
        if config.insecure:
            say(INSECURE, "warning")
        if config.grpc_port is not None:
            say(f"gRPC on {host}:{ports[1]}")
        signals.serve(
            f"serving {counted(models, 'model')} in {len(children)} processes "
            f"on {host}:{ports[0]}",
            "requests in flight were not answered",
        )
        for child in children:
            if child.process.pid in early:
                raise Unavailable(child.ended())


def _end(life: int, children: list[_Child]) -> None:
    """Ends all processes; each answers the requests that it has."""
    os.close(life)
    for child in children:
        child.process.wait()
