"""What servers do, and how stale the look-ups of workers are: one look."""

from __future__ import annotations

import contextlib
import dataclasses
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from persia import _core
from persia._patience import patiently
from persia.errors import InvalidArgument, PersiaError, Unavailable
from persia.security import Security

__all__ = ["ServerStatus", "TableStatus", "ask", "staleness", "tables"]

_RATES = ("updates", "pulls", "pushes")
_TABLE_RATES = ("pulled", "created")
_MESSAGE_LIMIT = 64 << 20
_START = 2.0  # seconds that a server may take to start


@dataclasses.dataclass
class ServerStatus:
    """One server. ``stats`` are its counters at the second look, ``rates``
    those that grow, a second; ``error`` where it could not be asked."""

    address: str
    shard: int = -1
    shards: int = 0
    stats: dict[str, Any] = dataclasses.field(default_factory=dict)
    rates: dict[str, float] = dataclasses.field(default_factory=dict)
    table_rates: dict[str, dict[str, float]] = dataclasses.field(
        default_factory=dict
    )
    error: str = ""


@dataclasses.dataclass
class TableStatus:
    """A table over all servers. ``uneven``: rows of the fullest shard by the
    mean."""

    name: str
    dim: int
    rows: int = 0
    bytes: int = 0
    pulled: int = 0
    missed: int = 0
    created: int = 0
    evicted: int = 0
    refused: int = 0
    nonfinite: int = 0
    rates: dict[str, float] = dataclasses.field(default_factory=dict)
    uneven: float = 1.0


def ask(
    addresses: Sequence[str],
    *,
    namespace: str = "default",
    security: Security | None = None,
    timeout: float = 10.0,
    interval: float = 1.0,
) -> list[ServerStatus]:
    """The servers at these addresses, asked twice, sorted by their shard.

    Args:
        addresses: host:port of each.
        namespace: of the job.
        security: default: that of the environment.
        timeout: seconds that a server has to answer; to be there, as one that
            starts, it has two of them.
        interval: seconds between the two looks.
    """
    if not addresses:
        raise InvalidArgument(
            "no server's address: give host:port (beside the URLs of "
            "metrics), or set PERSIA_SERVERS"
        )
    if security is None:
        security = Security.from_environment()
    secret = security.arguments()

    def one(address: str) -> ServerStatus:
        status = ServerStatus(address)
        try:
            channel = _core.Channel(address, secret, _MESSAGE_LIMIT, timeout)
            with contextlib.closing(channel):
                hello = patiently(
                    lambda: channel.hello(namespace, "admin", 0),
                    min(timeout, _START),
                )
                status.shard, status.shards = hello["shard"], hello["shards"]
                before = channel.stats()
                time.sleep(interval)
                status.stats = channel.stats()
        except PersiaError as error:
            status.error = f"{type(error).__name__}: {error}"
        else:
            _add_rates(status, before)
        return status

    with ThreadPoolExecutor(min(len(addresses), 64)) as pool:
        found = list(pool.map(one, addresses))
    return sorted(found, key=lambda s: (s.shard, s.address))


def _add_rates(status: ServerStatus, before: dict[str, Any]) -> None:
    now = status.stats
    seconds = (now["uptime_ns"] - before["uptime_ns"]) / 1e9 or 1.0

    def rates(
        old: dict[str, Any], new: dict[str, Any], names: Sequence[str]
    ) -> dict[str, float]:
        return {n: (new[n] - old.get(n, 0)) / seconds for n in names}

    status.rates = rates(before, now, _RATES)
    old = {table["name"]: table for table in before["tables"]}
    status.table_rates = {
        table["name"]: rates(old.get(table["name"], {}), table, _TABLE_RATES)
        for table in now["tables"]
    }


def tables(servers: Sequence[ServerStatus]) -> list[TableStatus]:
    """The tables of all servers that answered, added up."""
    found: dict[str, TableStatus] = {}
    most: dict[str, list[int]] = {}
    for server in servers:
        for table in server.stats.get("tables", ()):
            name = table["name"]
            total = found.setdefault(name, TableStatus(name, table["dim"]))
            most.setdefault(name, []).append(table["rows"])
            for field in dataclasses.fields(total):
                if field.type == "int" and field.name != "dim":
                    value = getattr(total, field.name) + table[field.name]
                    setattr(total, field.name, value)
            for rate, value in server.table_rates[name].items():
                total.rates[rate] = total.rates.get(rate, 0.0) + value
    for name, rows in most.items():
        if sum(rows):
            found[name].uneven = max(rows) * len(rows) / sum(rows)
    return list(found.values())


def staleness(urls: Sequence[str], timeout: float = 10.0) -> dict[int, int]:
    """How many look-ups had which staleness, of all workers together.

    Args:
        urls: of the metrics of workers, see :mod:`persia.prometheus`.
        timeout: seconds that a worker has to answer.

    Raises:
        Unavailable: a worker does not answer, or not with its metrics.
    """
    from prometheus_client.parser import text_string_to_metric_families

    found: dict[int, int] = {}
    for url in urls:
        if not url.startswith(("http://", "https://")):
            raise InvalidArgument(
                f"{url!r} is no URL of a worker's metrics, such as "
                "http://127.0.0.1:9100/metrics"
            )
        try:
            with urllib.request.urlopen(url, timeout=timeout) as page:
                text = page.read().decode()
            families = list(text_string_to_metric_families(text))
        except (OSError, ValueError) as error:
            raise Unavailable(f"{url}: no metrics: {error}") from None
        for family in families:
            if family.name == "persia_staleness":
                _add_buckets(family.samples, found)
    return found


def _add_buckets(samples: Sequence[Any], found: dict[int, int]) -> None:
    before: dict[str, float] = {}
    for sample in samples:
        edge = sample.labels.get("le", "+Inf")
        if sample.name.endswith("_bucket") and edge != "+Inf":
            rank = sample.labels.get("rank", "")
            more = int(sample.value - before.get(rank, 0.0))
            before[rank] = sample.value
            if more:
                k = int(float(edge))
                found[k] = found.get(k, 0) + more
