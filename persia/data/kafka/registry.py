"""Registries of schemas: files in a folder, or a server."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from persia import errors
from persia.base.urls import Url
from persia.data.kafka.brokers import library

#: A folder, a URL, or what confluent-kafka's SchemaRegistryClient takes.
Place = str | os.PathLike[str] | Mapping[str, Any]

_AGAIN = 10.0  # seconds until an unknown id is asked for again
_UNKNOWN = 1000  # ids that are remembered as unknown
_TIMEOUT = 30.0  # seconds of a request


class Registry:
    """Schemas by their ids.

    Args:
        place: where they are.
        ending: of files in a folder.
        parse: reads a schema; ValueError: it cannot.

    Raises:
        InvalidArgument: there is no such folder, or no client for servers.
    """

    def __init__(
        self, place: Place, ending: str, parse: Callable[[bytes], Any]
    ) -> None:
        self._parse = parse
        self._known: dict[int, Any] = {}
        self._unknown: dict[int, tuple[float, str]] = {}
        if isinstance(place, Mapping) or "://" in os.fspath(place):
            config = place if isinstance(place, Mapping) else {"url": place}
            self._where = str(Url(str(config.get("url"))))
            self._client = _client(config)
            self._text = self._served
            return
        self._where, self._ending = os.fspath(place), ending
        self._text = self._file
        if not os.path.isdir(place):
            raise errors.InvalidArgument(
                f"value_registry {self._where!r} is no folder; need one with "
                f"files ID.{ending}, or the URL of a registry"
            )

    def schema(self, number: int) -> Any:
        """The schema of an id.

        Raises:
            ValueError: the registry has none.
            Unavailable: it does not answer.
            AccessDenied: it refuses access.
        """
        if number in self._known:
            return self._known[number]
        end, text = self._unknown.get(number, (0.0, ""))
        if time.monotonic() < end:
            raise ValueError(text)
        found = self._text(number)
        try:
            if found is None:
                raise ValueError("unknown")
            self._known[number] = self._parse(found)
        except ValueError as error:
            if len(self._unknown) >= _UNKNOWN:
                self._unknown.clear()
            text = f"schema {number} of {self._where}: {error}"
            self._unknown[number] = time.monotonic() + _AGAIN, text
            raise ValueError(text) from None
        return self._known[number]

    def _file(self, number: int) -> bytes | None:
        path = Path(self._where, f"{number}.{self._ending}")
        try:
            return path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise errors.Unavailable(f"{path}: {error}") from None

    def _served(self, number: int) -> bytes | None:
        try:
            return str(self._client.get_schema(number).schema_str).encode()
        except Exception as error:  # of the client, and of what it uses
            status = getattr(error, "http_status_code", None)
            text = f"schema registry {self._where}: {error}"
        if status == 404:
            return None
        if status in (401, 403):
            raise errors.AccessDenied(f"{text}; check its user and password")
        raise errors.Unavailable(f"{text}; check value_registry=")


def _client(config: Mapping[str, Any]) -> Any:
    try:
        made = library("confluent_kafka.schema_registry")
        return made.SchemaRegistryClient({"timeout": _TIMEOUT, **config})
    except errors.InvalidArgument:
        raise errors.InvalidArgument(
            "a registry's URL needs the client of confluent-kafka: pip "
            "install 'confluent-kafka[schemaregistry]'; or pass a folder"
        ) from None
    except (TypeError, ValueError, OSError) as error:
        raise errors.InvalidArgument(f"value_registry: {error}") from None
