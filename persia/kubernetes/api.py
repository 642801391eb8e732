"""Questions to the API server of Kubernetes.

Objects are read and replaced as a whole, with the version that they were read
with: what another process has changed meanwhile is not replaced. Nothing is
watched, so there is no state that could be old.
"""

from __future__ import annotations

import http.client
import json
import ssl
import urllib.parse
from pathlib import Path
from typing import Any

from persia.base.environment import variable
from persia.errors import (
    AccessDenied,
    InvalidArgument,
    NotFound,
    PersiaError,
    StorageError,
    Unavailable,
)

Object = dict[str, Any]

#: Where a pod finds what its service account is known by.
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")

_MOST = 16 << 20  # bytes of an answer
_TEXT = 500  # of an error


class Api:
    """The way to an API server.

    Args:
        url: http or https.
        timeout: seconds that it may say nothing.
        account: folder with the token and the authority of its certificate;
            None: it needs none, as ``kubectl proxy``.
    """

    def __init__(
        self, url: str, timeout: float = 5.0, account: Path | None = None
    ) -> None:
        parts = urllib.parse.urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            raise InvalidArgument(f"`api`: no port in {url}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidArgument(f"`api`: {url} is no URL of http or https")
        self._tls = parts.scheme == "https"
        self._host, self._port = parts.hostname, port
        self._base = parts.path.rstrip("/")
        self._timeout, self._account = timeout, account

    @classmethod
    def of_pod(cls, timeout: float = 5.0) -> Api:
        """That of the cluster in which this process is a pod.

        Raises:
            InvalidArgument: it is none.
        """
        host = variable("KUBERNETES_SERVICE_HOST")
        port = variable("KUBERNETES_SERVICE_PORT")
        if host is None:
            raise InvalidArgument(
                "this process is no pod of a cluster: give `api`, such as "
                "http://127.0.0.1:8001 of kubectl proxy"
            )
        host = f"[{host}]" if ":" in host else host
        return cls(f"https://{host}:{port or 443}", timeout, ACCOUNT)

    def get(self, path: str) -> Object:
        """An object."""
        return self._call("GET", path)

    def put(self, path: str, body: Object) -> Object:
        """Replaces an object of the version that ``body`` has.

        Raises:
            Unavailable: it has changed meanwhile, or the server has no time.
        """
        return self._call("PUT", path, body)

    def _connect(self) -> tuple[http.client.HTTPConnection, dict[str, str]]:
        headers = {"Accept": "application/json"}
        if self._account is not None:  # the token is renewed every hour
            token = _read(self._account / "token")
            headers["Authorization"] = f"Bearer {token.strip()}"
        if not self._tls:
            return http.client.HTTPConnection(
                self._host, self._port, timeout=self._timeout
            ), headers
        ca = _read(self._account / "ca.crt") if self._account else None
        return http.client.HTTPSConnection(
            self._host,
            self._port,
            timeout=self._timeout,
            context=ssl.create_default_context(cadata=ca),
        ), headers

    def _call(
        self, method: str, path: str, body: Object | None = None
    ) -> Object:
        connection, headers = self._connect()
        text = None
        if body is not None:
            headers["Content-Type"] = "application/json"
            text = json.dumps(body)
        try:
            connection.request(method, self._base + path, text, headers)
            answer = connection.getresponse()
            status, data = answer.status, answer.read(_MOST)
        except (OSError, http.client.HTTPException) as error:
            raise Unavailable(
                f"the API server of Kubernetes does not answer: {error!r}"
            ) from None
        finally:
            connection.close()
        try:
            found = json.loads(data)
        except ValueError:
            found = {"message": data[:_TEXT].decode(errors="replace")}
        if not isinstance(found, dict):
            found = {"message": "an answer that is no object"}
            status = 500
        if status == 200:
            return found
        raise _error(status, f"{method} {path}: {found.get('message')}")


def _error(status: int, text: str) -> PersiaError:
    kinds: dict[int, type[PersiaError]] = {
        401: AccessDenied,
        403: AccessDenied,
        404: NotFound,
        400: InvalidArgument,
        422: InvalidArgument,
    }
    return kinds.get(status, Unavailable)(f"{status}: {text}"[:_TEXT])


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, ValueError) as error:
        raise StorageError(f"{path}: {error}") from None
