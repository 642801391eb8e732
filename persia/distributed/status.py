"""What servers do, and how stale the lookups of trainers are: one look."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from persia import _core
from persia.base.patience import patiently
from persia.base.urls import Url
from persia.distributed.addresses import no_user
from persia.distributed.security import Security
from persia.errors import InvalidArgument, PersiaError
from persia.redaction import shown

_SLOW = ("call", "seconds", "at", "bytes", "client", "peer")
_RATES = ("updates", "pulls", "pushes")
_TABLE_RATES = ("pulled", "created")
#: Metrics of every process, whatever it does.
_EVERY = {
    "persia_build_info",
    "persia_certificate_not_after_seconds",
    "persia_security_renewals",
}
_PAGE = 64 << 20  # bytes of a page of metrics, at most
_START = 2.0  # seconds that a server may take to start
_EXAMPLE = "http://127.0.0.1:9100/metrics"


@dataclasses.dataclass
class ServerStatus:
    """A shard of a server. ``stats`` are its counters at the second look,
    ``rates`` those that grow, a second; ``slow`` its last calls that took
    long, if they were asked for; ``error`` where its server could not be
    asked."""

    address: str
    shard: int = -1
    shards: int = 0
    stats: dict[str, Any] = dataclasses.field(default_factory=dict)
    rates: dict[str, float] = dataclasses.field(default_factory=dict)
    table_rates: dict[str, dict[str, float]] = dataclasses.field(
        default_factory=dict
    )
    slow: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    error: str = ""


@dataclasses.dataclass
class TrainerStatus:
    """One trainer, by the URL of its metrics. ``staleness``: how many lookups
    had which; ``lost``: its updates that servers had, and lost; ``error``
    where it could not be asked."""

    url: str
    lost: int = 0
    staleness: dict[int, int] = dataclasses.field(default_factory=dict)
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
    slow: bool = False,
) -> list[ServerStatus]:
    """The servers at these addresses, asked twice, sorted by their shard.

    Args:
        addresses: host:port of each.
        namespace: of the job.
        security: default: that of the environment.
        timeout: seconds that a server has to answer; to be there, as one that
            starts, it has two of them.
        interval: seconds between the two looks.
        slow: with the calls that took long.
    """
    if not addresses:
        raise InvalidArgument(
            "no server's address: give host:port (beside the URLs of "
            "metrics), or set PERSIA_SERVERS"
        )
    if security is None:
        security = Security.from_environment()
    secret = security.arguments()

    def look(address: str, here: list[int]) -> list[ServerStatus]:
        """Its shards, where it has several by their numbers."""
        all_of = [ServerStatus(address, shard) for shard in here]
        with contextlib.ExitStack() as stack:
            channels = [
                stack.enter_context(
                    contextlib.closing(
                        _core.Channel(
                            address,
                            secret,
                            timeout,
                            shard if len(here) > 1 else -1,
                        )
                    )
                )
                for shard in here
            ]
            before = [channel.stats() for channel in channels]
            time.sleep(interval)
            for status, channel, earlier in zip(all_of, channels, before):
                status.stats = channel.stats()
                status.address = channel.address
                _add_rates(status, earlier)
                if slow:
                    status.slow = [
                        dict(zip(_SLOW, one, strict=True))
                        for one in channel.slow()
                    ]
        return all_of

    def one(address: str) -> list[ServerStatus]:
        status = ServerStatus(no_user(address))
        try:
            channel = _core.Channel(address, secret, timeout)
            with contextlib.closing(channel):
                hello = patiently(
                    lambda: channel.hello(namespace, 0),
                    min(timeout, _START),
                )
            status.shard, status.shards = hello["shard"], hello["shards"]
            found = look(address, hello["here"])
        except PersiaError as error:
            status.error = f"{type(error).__name__}: {error}"
            return [status]
        for shard in found:
            shard.shards = hello["shards"]
        return found

    with ThreadPoolExecutor(min(len(addresses), 64)) as pool:
        found = [s for some in pool.map(one, addresses) for s in some]
    # One that has moved is found by the server that had it, too.
    every = {(s.shard, s.address, s.error): s for s in found}
    return sorted(every.values(), key=lambda s: (s.shard, s.address))


@dataclasses.dataclass
class EmbeddingStatus:
    """One embedding worker. ``stats`` are its counters at the second look,
    ``rates`` those that grow, a second; ``error`` where it could not be
    asked."""

    address: str
    stats: dict[str, int] = dataclasses.field(default_factory=dict)
    rates: dict[str, float] = dataclasses.field(default_factory=dict)
    error: str = ""


def ask_embedding(
    addresses: Sequence[str],
    *,
    namespace: str = "default",
    security: Security | None = None,
    timeout: float = 10.0,
    interval: float = 1.0,
) -> list[EmbeddingStatus]:
    """The embedding workers at these addresses, asked twice: see
    :func:`ask`."""
    if security is None:
        security = Security.from_environment()
    secret = security.arguments()

    def one(address: str) -> EmbeddingStatus:
        status = EmbeddingStatus(no_user(address))
        config = {
            "addresses": [address],
            "namespace": namespace,
            "rank": 0,
            "world": 0,
            "timeout": timeout,
            "dtype": 0,
            "security": secret,
            "move_after": timeout,
            "stream": 0,
            "job": 0,
        }
        try:
            before = _core.worker_stats(config)
            time.sleep(interval)
            now = status.stats = _core.worker_stats(config)
        except PersiaError as error:
            status.error = f"{type(error).__name__}: {error}"
        else:
            seconds = (now["uptime_ns"] - before["uptime_ns"]) / 1e9 or 1.0
            status.rates = {
                n: (now[n] - before[n]) / seconds
                for n in ("submitted", "taken", "trained")
            }
        return status

    if not addresses:
        return []
    with ThreadPoolExecutor(min(len(addresses), 64)) as pool:
        return list(pool.map(one, addresses))


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
    """The tables of all servers that answered, added up; a server with
    several addresses counts once."""
    found: dict[str, TableStatus] = {}
    most: dict[str, list[int]] = {}
    boots = {s.stats["boot"]: s for s in servers if s.stats}
    for server in boots.values():
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


def ask_trainers(
    urls: Sequence[str], timeout: float = 10.0
) -> list[TrainerStatus]:
    """The trainers with these URLs of metrics, all at once.

    Args:
        urls: see :mod:`persia.prometheus`.
        timeout: seconds that each has for its whole answer.
    """
    until = time.monotonic() + timeout
    found = [TrainerStatus(str(Url(url))) for url in urls]
    threads = []
    for one, url in zip(found, urls, strict=True):
        # Not of a pool, which would wait for one that is late.
        one.error = f"no whole answer within {timeout:g} s"
        threads.append(
            threading.Thread(
                target=_look, args=(one, url, timeout), daemon=True
            )
        )
        threads[-1].start()
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    return [dataclasses.replace(one) for one in found]


def _look(status: TrainerStatus, url: str, timeout: float) -> None:
    """At the page of one trainer."""
    from prometheus_client.parser import text_string_to_metric_families

    try:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"need a URL such as {_EXAMPLE}")
        parts = urllib.parse.urlsplit(url)
        _ = parts.port  # raises for what is none
        if "@" in parts.netloc:
            raise ValueError("need a URL without a user or password")
        with urllib.request.urlopen(url, timeout=timeout) as page:
            text = page.read(_PAGE).decode()
            if page.length:
                raise ValueError(f"{page.length} bytes of the page lack")
        families = list(text_string_to_metric_families(text))
        names = {f.name for f in families if f.name.startswith("persia_")}
        if names <= _EVERY:
            raise ValueError(
                "the page has none of Persia: it is another program's, or "
                f"the store was closed; need a URL such as {_EXAMPLE}"
            )
        found: dict[int, int] = {}
        lost = 0
        for family in families:
            if family.name == "persia_staleness":
                _add_buckets(family.samples, found)
            if family.name == "persia_updates_lost":
                values = {s.name: s.value for s in family.samples}
                lost = int(values.get("persia_updates_lost_total", 0))
    except TimeoutError:
        return
    except http.client.BadStatusLine:
        status.error = "no metrics: what listens there does not speak HTTP"
    except Exception as error:  # the page may be anything
        status.error = f"no metrics: {ascii(shown(str(error)))[1:-1]}"
    else:
        status.staleness, status.lost, status.error = found, lost, ""


def staleness(trainers: Sequence[TrainerStatus]) -> dict[int, int]:
    """How many lookups had which staleness, of all trainers together."""
    found: dict[int, int] = {}
    for trainer in trainers:
        for k, n in trainer.staleness.items():
            found[k] = found.get(k, 0) + n
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
