"""A server of HTTP in a thread, for applications of ASGI."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

from persia import _core
from persia.base.requirements import install
from persia.distributed.security import Security
from persia.distributed.serving import Guarded
from persia.errors import AccessDenied, StorageError, Unavailable


class WebServer:
    """Listens from the making on, and answers from :meth:`start` to
    :meth:`close`.

    Args:
        config: where, and to whom.
        app: that answers.
        connections: at once; more are refused.
        grace: seconds that requests in flight have at the end.
        timeout: seconds in which the head of a request has to arrive.
        shared: others that say so, too, have the same port.

    Attributes:
        host: as it stands in addresses.
        address: HOST:PORT.

    Raises:
        Unavailable: uvicorn or starlette is not installed.
        StorageError: the address is taken.
    """

    def __init__(
        self,
        config: Guarded,
        app: Any,
        *,
        connections: int,
        grace: float,
        timeout: float = 30.0,
        shared: bool = False,
    ) -> None:
        uvicorn = find_uvicorn()
        self._socket = listen(config.host, config.port, shared)
        self.host = f"[{config.host}]" if ":" in config.host else config.host
        self.address = f"{self.host}:{self._socket.getsockname()[1]}"
        self._uvicorn = uvicorn.Server(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                lifespan="off",
                ws="none",
                server_header=False,
                limit_concurrency=connections,
                timeout_graceful_shutdown=int(grace),
                callback_notify=self._close_late,
                timeout_notify=1,
                **_tls(config),
            )
        )
        self._timeout = timeout
        # Connections that wait for a request: the one that they had last,
        # and since when.
        self._waiting: dict[Any, tuple[Any, float]] = {}
        self._thread = threading.Thread(
            target=self._run, name="persia-http", daemon=True
        )

    def start(self) -> None:
        """Answers requests from now on."""
        self._thread.start()
        while not self._uvicorn.started:
            if not self._thread.is_alive():
                raise Unavailable(f"uvicorn does not serve {self.address}")
            time.sleep(0.01)

    def renew(self, security: Security) -> None:
        """Other certificates for the next connections."""
        context = self._uvicorn.config.ssl
        given = dict(security.origin.given) if security.origin else {}
        if context is None or "cert" not in given:
            return
        context.load_cert_chain(given["cert"], given["key"])
        if "ca" in given:
            context.load_verify_locations(given["ca"])

    async def _close_late(self) -> None:
        """Closes connections whose next request does not arrive: uvicorn has
        no limit for its head, and such connections would be all that there
        may be. For its body the applications have one."""
        now = time.monotonic()
        waiting = {}
        for one in self._uvicorn.server_state.connections:
            last = one.cycle
            if last is None or last.response_complete:
                was, since = self._waiting.get(one, (None, now))
                waiting[one] = last, since if was is last else now
        self._waiting = waiting
        for one, (_, since) in waiting.items():
            if now - since > self._timeout:
                one.transport.close()

    def _run(self) -> None:
        _core.thread_prompt()
        self._uvicorn.run(sockets=[self._socket])

    def stop(self) -> None:
        """Takes no more requests."""
        self._uvicorn.should_exit = True

    def close(self) -> None:
        """The same; those in flight are answered first."""
        self.stop()
        if self._thread.is_alive():
            self._thread.join()
        self._socket.close()


def denied(error: AccessDenied) -> tuple[int, dict[str, str]]:
    """The status and the headers of a request that is not let in: 401 asks
    for a token, 403 says that the one that was shown is not for it."""
    if error.is_known:
        return 403, {}
    return 401, {"www-authenticate": "Bearer"}


def find_uvicorn() -> Any:
    """The module; raises Unavailable where the extra is not installed."""
    try:
        import starlette  # noqa: F401
        import uvicorn
    except ImportError as error:
        raise Unavailable(
            f"a server of HTTP needs {error.name}: {install(extra='serve')}"
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


def _tls(config: Guarded) -> dict[str, Any]:
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
