"""Exports that ``persia serve export`` hands out from another machine."""

from __future__ import annotations

import contextlib
import http.client
import json
import ssl
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import quote, urlsplit

from persia.base.urls import Url
from persia.checkpoint.manifest import File
from persia.distributed.security import Security
from persia.distributed.serving import is_loopback
from persia.errors import (
    AccessDenied,
    Closed,
    InvalidArgument,
    PersiaError,
    StorageError,
)
from persia.serving.cache import CachedVersions
from persia.serving.folder import CURRENT, NAME

_TIMEOUT_S = 20.0  # without a byte
_PIECE = 1 << 20
_WAIT_S = 1.0  # of one question for a file that is not there yet
_DENIED = http.client.UNAUTHORIZED, http.client.FORBIDDEN


class _Tls(http.client.HTTPSConnection):
    """One whose server's certificate may have another name than its host."""

    def __init__(
        self, host: str, port: int, context: ssl.SSLContext, name: str
    ) -> None:
        super().__init__(host, port, timeout=_TIMEOUT_S, context=context)
        self._tls, self._name = context, name

    def connect(self) -> None:
        """Over TCP, then TLS."""
        http.client.HTTPConnection.connect(self)
        self.sock = self._tls.wrap_socket(
            self.sock, server_hostname=self._name
        )


class _Connection:
    """To a relay, with TLS and the token of the environment; they are read
    again for each.

    Raises:
        InvalidArgument: a token would travel in the clear.
    """

    def __init__(self, url: Url) -> None:
        security = Security.from_environment()
        place = urlsplit(f"//{url.host}")
        host = place.hostname or ""
        self.headers = {}
        if security.token is not None:
            self.headers["Authorization"] = f"Bearer {security.token}"
        self.http: http.client.HTTPConnection
        if url.scheme == "https":
            self.http = _Tls(
                host,
                place.port or 443,
                _context(security),
                security.server_name or host,
            )
            return
        if self.headers and not is_loopback(host):
            raise InvalidArgument(
                f"{url.named}: the token would travel in the clear: give "
                "https://"
            )
        self.http = http.client.HTTPConnection(
            host, place.port or 80, timeout=_TIMEOUT_S
        )


def _context(security: Security) -> ssl.SSLContext:
    found = ssl.create_default_context(cadata=security.ca)
    given = dict(security.origin.given) if security.origin else {}
    if "cert" in given:
        found.load_cert_chain(given["cert"], given["key"])
    return found


class RelayedVersions(CachedVersions):
    """The versions of a root on another machine, which is read alone.

    Args:
        url: ``http://HOST:PORT/NAME``, or ``https://``.

    Raises:
        InvalidArgument: it has no host, or no name.
    """

    def __init__(self, url: Url) -> None:
        self._url = url.at(url.path.rstrip("/"))
        try:
            place = urlsplit(f"//{url.host}")
            is_whole = bool(place.hostname) and place.port != 0
        except ValueError:  # the port is no number
            is_whole = False
        if not is_whole or not self._url.path or url.user:
            raise InvalidArgument(
                f"{url.named}: need http://HOST:PORT/NAME, of what `persia "
                "serve export` serves"
            )
        self._idle: list[_Connection] = []

    def __str__(self) -> str:
        return str(self._url.named)

    # ---- questions

    @contextlib.contextmanager
    def _asked(
        self, verb: str, name: str, wait: float = 0.0
    ) -> Iterator[http.client.HTTPResponse | None]:
        """An answer, whose bytes are read within; None: it is not there.

        Raises:
            AccessDenied: the token is not for it.
            StorageError: there is no answer, or another one.
        """
        path = quote(f"{self._url.path}/{name}")
        path += f"?wait={wait:g}" if wait else ""
        try:
            connection, answer = self._answer(verb, path)
            try:
                if answer.status == http.client.NOT_FOUND:
                    answer.read()
                    yield None
                elif answer.status in _DENIED:
                    raise AccessDenied(f"{self}: {_text(answer)}")
                elif answer.status != http.client.OK:
                    raise StorageError(
                        f"{self} cannot be read: {answer.status} "
                        f"{_text(answer)}"
                    )
                elif answer.length is None:  # its end is unknown
                    raise StorageError(f"{self}: an answer without a length")
                else:
                    if verb == "HEAD":
                        answer.read()
                    yield answer
                if answer.isclosed():  # all was read
                    self._idle.append(connection)
            finally:
                if not answer.isclosed():
                    connection.http.close()
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, PersiaError):
                raise
            raise StorageError(
                f"{self} gives no answer: {str(error) or repr(error)}"
            ) from None

    def _answer(
        self, verb: str, path: str
    ) -> tuple[_Connection, http.client.HTTPResponse]:
        """Of a connection that was used before, if that is still one: else
        of a new one."""
        while self._idle:
            try:
                connection = self._idle.pop()
            except IndexError:  # another thread has it
                break
            with contextlib.suppress(OSError, http.client.HTTPException):
                answer = self._of(connection, verb, path)
                if answer.status not in _DENIED:  # its token may be old
                    return connection, answer
            connection.http.close()
        connection = _Connection(self._url)
        return connection, self._of(connection, verb, path)

    @staticmethod
    def _of(
        connection: _Connection, verb: str, path: str
    ) -> http.client.HTTPResponse:
        connection.http.request(verb, path, headers=connection.headers)
        return connection.http.getresponse()

    # ---- what a root has

    def names(self) -> list[str]:
        with self._asked("GET", "versions") as answer:
            if answer is None:
                raise StorageError(f"{self} is not served there")
            try:
                found = [str(name) for name in json.load(answer)]
            except (ValueError, TypeError) as error:
                raise StorageError(f"{self}: no list: {error}") from None
        found = [name for name in found if NAME.fullmatch(name)]
        return sorted(found, key=lambda name: int(name[2:]))

    def entries(self) -> list[str] | None:
        found = self.names()
        return found if self.read(CURRENT) is None else [*found, CURRENT]

    def at(self, name: str) -> Url:
        return self._url.at(self._url.path + (f"/{name}" if name else ""))

    def read(self, name: str) -> bytes | None:
        with self._asked("GET", name) as answer:
            return None if answer is None else answer.read()

    def wait(self, name: str, seconds: float, ends: threading.Event) -> None:
        try:
            with self._asked("HEAD", name, _WAIT_S):
                pass
        except StorageError:
            ends.wait(seconds)

    def sizes(self, name: str, entries: Sequence[File]) -> list[int | None]:
        found: list[int | None] = []
        for one in entries:
            path = f"{name}/{one.name}" if name else one.name
            with self._asked("HEAD", path) as answer:
                found.append(None if answer is None else _length(answer))
        return found

    def _download(
        self,
        name: str,
        files: Iterable[str],
        target: Path,
        stop: threading.Event | None = None,
    ) -> None:
        for file in files:
            path = f"{name}/{file}" if name else file
            with (
                self._asked("GET", path) as answer,
                (target / file).open("xb") as local,
            ):
                if answer is None:
                    raise StorageError(f"{self}/{path} is not there")
                left = _length(answer)
                while piece := answer.read(_PIECE):
                    if stop is not None and stop.is_set():
                        raise Closed("the process ends: nothing is fetched")
                    left -= local.write(piece)
                if left:
                    raise StorageError(f"{self}/{path} was broken off")

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise InvalidArgument(
            f"{self} is read alone: write to the folder that is served there"
        )

    check = writing = staging = add = use = _refuse
    write_file = remove_files = keep_chains = rows_root = _refuse


def _length(answer: http.client.HTTPResponse) -> int:
    text = answer.headers.get("content-length", "")
    return int(text) if text.isdecimal() else -1


def _text(answer: http.client.HTTPResponse) -> str:
    return answer.read(200).decode(errors="replace")
