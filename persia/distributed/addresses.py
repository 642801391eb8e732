"""Where servers and workers are, and what all their clients have in common."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import socket
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from persia import _core, errors
from persia.base.check import kind
from persia.base.environment import variable
from persia.distributed.security import Security

#: In the order of Dtype in persia.proto.
WIRE_DTYPES = ("fp32", "fp16", "bf16")

_ANSWER = 2.0  # seconds

#: How lists begin that may change: of a file, and of a name's addresses.
FILE, DNS = "file:", "dns:"


def namespace_of(given: str | None = None) -> str:
    """What was given, else that of the environment, else "default"."""
    if given is not None:
        return kind("namespace", given, str, "a string")
    return variable("PERSIA_NAMESPACE") or "default"


def job_of(given: str | None = None) -> int:
    """The number by which embedding workers know a job: of the name that was
    given, else of the run of ``persia launch`` (PERSIA_RUN_ID); 0: it has
    none."""
    name = variable("PERSIA_RUN_ID") if given is None else given
    if not name:
        return 0
    text = kind("job", name, str, "a string").encode()
    digest = hashlib.blake2b(text, digest_size=8, person=b"persia-job")
    return max(2, int.from_bytes(digest.digest(), "little"))


def resolve_workers(
    workers: str | Sequence[str] | None, security: Security | None
) -> tuple[list[str], Security]:
    """The addresses of embedding workers, and how to speak with them.

    Args:
        workers: as those of :func:`resolve`; None: PERSIA_WORKERS.
        security: None: as the environment says.
    """
    if workers is None:
        workers = variable("PERSIA_WORKERS")
    if not workers:
        raise errors.InvalidArgument(
            "workers: no address of an embedding worker; give some, or "
            "PERSIA_WORKERS"
        )
    kind("workers", workers, (str, Sequence), '"host:port", or a list')
    security = security or Security.from_environment()
    return resolve(workers, security, "workers")


def resolve(
    servers: str | Sequence[str], security: Security, what: str = "servers"
) -> tuple[list[str], Security]:
    """The addresses of all servers, and how to speak with them.

    A name with several addresses stands for so many servers. Their
    certificates are then checked for that name. ``dns:name:port`` stands for
    the addresses of a name also where it has one, ``file:/path`` for the lines
    of a file.

    Args:
        servers: "host:port", several with commas between, or a list.
        security: how to speak with them.
        what: they are, for errors.
    """
    addresses: list[str] = []
    names: set[str] = set()
    expanded = False
    for text in texts_of(servers, what):
        least = 1 if text.startswith(DNS) else 2
        text = text.removeprefix(DNS)
        host, port = _split(text, what)
        several = addresses_of(host)
        names.add(host)
        if len(several) < least:
            addresses.append(text)
            continue
        expanded = True
        addresses += [f"{bracketed(a)}:{port}" for a in several]
    if not addresses:
        raise errors.InvalidArgument(f"{what}: no address in {servers!r}")
    twice = sorted({a for a in addresses if addresses.count(a) > 1})
    if twice:
        raise errors.InvalidArgument(f"{what}: {', '.join(twice)} twice")
    if expanded and security.ca and security.server_name is None:
        if len(names) > 1:
            raise errors.InvalidArgument(
                f"{what}: of {', '.join(sorted(names))} some have several "
                "addresses; give the name in the servers' certificates "
                "(server_name)"
            )
        security = dataclasses.replace(security, server_name=names.pop())
    return addresses, security


def texts_of(servers: str | Sequence[str], what: str = "servers") -> list[str]:
    """The addresses that were given, those in files among them.

    Args:
        servers: as of :func:`resolve`.
        what: they are, for errors.

    Raises:
        InvalidArgument: a file cannot be read.
    """
    texts = servers.split(",") if isinstance(servers, str) else list(servers)
    found: list[str] = []
    for text in (t.strip() for t in texts):
        if not text.startswith(FILE):
            found.append(text)
            continue
        try:
            lines = Path(text.removeprefix(FILE)).read_text().splitlines()
        except (OSError, ValueError) as error:
            raise errors.InvalidArgument(
                f"{what}: the file {text.removeprefix(FILE)} cannot be read: "
                f"{getattr(error, 'strerror', error)}"
            ) from None
        lines = [line.partition("#")[0].strip() for line in lines]
        found += [line for line in lines if line]
    return found


def no_user(address: str) -> str:
    """The address, which has no user or token before an "@".

    Raises:
        InvalidArgument: it has.
    """
    if "@" in address:
        raise errors.InvalidArgument(
            f"...@{address.rpartition('@')[2]} has a user or token in it: "
            "give host:port, and tokens in PERSIA_TOKEN_FILE"
        )
    return address


def why_away(
    addresses: Sequence[str], namespace: str, security: Security
) -> str:
    """What is wrong with the first server that does not answer within two
    seconds; "": all answer."""
    for address in addresses:
        try:
            channel = _core.Channel(address, security.arguments(), _ANSWER)
            with contextlib.closing(channel):
                channel.hello(namespace, 0)
        except errors.PersiaError as error:
            return str(error)
    return ""


def why_workers_away(
    addresses: Sequence[str], namespace: str, security: Security
) -> str:
    """The same of embedding workers."""
    for address in addresses:
        try:
            _ask_worker(address, namespace, security)
        except errors.PersiaError as error:
            return str(error)
    return ""


def why_no_batch(
    addresses: Sequence[str], namespace: str, security: Security
) -> str:
    """What embedding workers have, where a trainer gets nothing of it."""
    found: Counter[str] = Counter()
    wrong = ""
    for address in addresses:
        try:
            found += Counter(_ask_worker(address, namespace, security))
        except errors.PersiaError as error:
            wrong = str(error)
    loaders = found["streams"] - found["loaders_gone"]
    if wrong and not found:
        return wrong
    if loaders <= 0:
        return "embedding workers know of no data loader: start persia feed"
    return (
        f"embedding workers have {found['queued']:,} batches, "
        f"{found['leased']:,} are at trainers, and "
        f"{found['looking'] + found['returning']:,} wait for parameter "
        "servers; data loaders send as many "
        "epochs as they were given, and nothing that servers have under the "
        "name of their job; a trainer takes the batches of one job: see "
        "`epochs` and `job`"
    )


def _ask_worker(
    address: str, namespace: str, security: Security
) -> dict[str, int]:
    config = {
        "addresses": [address],
        "namespace": namespace,
        "rank": 0,
        "world": 0,
        "timeout": _ANSWER,
        "dtype": 0,
        "security": security.arguments(),
        "move_after": _ANSWER,
        "stream": 0,
        "job": 0,
    }
    return _core.worker_stats(config)


def _split(address: str, what: str) -> tuple[str, int]:
    host, separator, port = no_user(address).rpartition(":")
    bare = host.strip("[]")
    if (
        not separator
        or not bare
        or not port.isdecimal()
        or not 0 < int(port) < 65536
        or (":" in bare) != host.startswith("[")
    ):
        raise errors.InvalidArgument(
            f"{what}: {address!r} is no address; need host:port, with "
            "commas between several"
        )
    return bare, int(port)


def bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def addresses_of(host: str) -> list[str]:
    """IPv4 addresses of a name, or else its IPv6 addresses; empty if it has
    none now: it may be resolved when the connection is made."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    for family in (socket.AF_INET, socket.AF_INET6):
        some = sorted({str(f[4][0]) for f in found if f[0] == family})
        if some:
            return some
    return []
