"""Shards of tables in the process of a store that speaks with them as with
servers: on the ranks of a job, or with a log."""

from __future__ import annotations

import contextlib
import os
import socket
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from persia import _core, errors
from persia.distributed.addresses import (
    addresses_of,
    bracketed,
)
from persia.distributed.job_security import secure_job
from persia.distributed.ranks import Keys
from persia.distributed.security import Security

if TYPE_CHECKING:
    from persia.distributed.cluster import Job

# Threads, at least, that take requests of the other ranks, and requests at
# once.
_SERVER_THREADS = 2
_SERVER_CALLS = 1024
_SERVER_CONNECTIONS = 4096
_POLL = 0.05  # seconds
_PATIENCE = 600.0  # seconds for other ranks to close
_GRACE = 1.0  # seconds for calls in flight

_hosted: list[Hosting] = []  # of this process, until its end
_hostings: dict[str, int] = {}  # by namespace: how many there were


class Hosting(Protocol):
    """A shard in this process.

    Attributes:
        server: the shard.
        addresses: of all shards.
        keeps: the rows outlive this process.
    """

    server: _core.Server
    addresses: list[str]
    keeps: bool

    def checkpoints(self, above: Path, restores: bool) -> None:
        """The roots of checkpoints lie in this folder from now on; restores:
        one is to be read."""

    def close(self, failed: bool = False) -> None:
        """The store was closed; failed: by an exception."""


def close_hosted() -> None:
    """At the end of the process."""
    for hosting in list(_hosted):
        hosting.close()


# ---- with a log ------------------------------------------------------------


class LoggedHosting:
    """The shard of a store that keeps a log: what `persia serve ps` has,
    without a port. Implements :class:`Hosting`.

    Args:
        namespace: of the tables; a log is of one.
        threads: that work on the tables.
        memory_limit: bytes of all tables; 0: none.
        durable: "process" or "disk".
        log: the folder of the log.
        log_limit: bytes, or None.

    Raises:
        Unavailable: another store or server has the log open.
        StorageError: its folder cannot be written.
        CorruptFile: it is damaged.
        SchemaMismatch: it is not the log of one process.
    """

    keeps = True

    def __init__(
        self,
        namespace: str,
        threads: int,
        memory_limit: int,
        durable: str,
        log: str,
        log_limit: int | None,
    ) -> None:
        from persia.distributed.server import ServeConfig, Server

        config = ServeConfig.model_validate(
            {
                "namespace": namespace,
                "threads": threads,
                "memory_limit": memory_limit or None,
                "durable": durable,
                "log": os.path.abspath(log),
                "log_limit": log_limit,
            }
        )
        try:
            self._shard = Server(config)
        except errors.Unavailable as error:
            raise errors.Unavailable(
                f"{error}. A store has it open until store.close(), or until "
                "its process ends"
            ) from None
        self.server = self._shard.core
        assert self._shard.log is not None
        self._log = self._shard.log
        self._cuts = contextlib.ExitStack()
        try:
            if above := self._log.noted():
                with contextlib.suppress(errors.StorageError):
                    self.server.checkpoints(above)
            self._shard.recover()
            self._shard.ready()
        except BaseException:
            self._shard.close()
            raise
        self._cuts.enter_context(self._shard.cutting())
        self.addresses = [f"log {self._log.path}"]
        self._pid = os.getpid()
        _hosted.append(self)

    def why_held(self) -> str:
        """Why updates wait: nothing else holds those of one process."""
        return f"the {self.addresses[0]} takes no records"

    def checkpoints(self, above: Path, restores: bool) -> None:
        """See :class:`Hosting`. All restores of the log are below the folder
        that is noted beside it."""
        noted = self._log.noted()
        if restores and noted != str(above):
            if noted:
                self._shard.cut()
            self._log.note(str(above))
        self.server.checkpoints(str(above))

    def close(self, failed: bool = False) -> None:
        """Ends it: what was applied is in the log."""
        del failed
        if self not in _hosted:
            return
        _hosted.remove(self)
        if os.getpid() != self._pid:
            return
        self._shard.stop(_GRACE)
        self._cuts.close()
        self._shard.close()


# ---- on the ranks of a job -------------------------------------------------


class RankHosting:
    """A shard of a job's tables in each rank, which serves it to the others.
    Implements :class:`Hosting`.

    The ranks find each other through the key-value store of
    torch.distributed. On one machine they speak over loopback with a token;
    on several with TLS, certificates and tokens that rank 0 makes for this
    job, unless the user gives others (``secure_job``).

    The rows end with the ranks.
    """

    keeps = False

    def __init__(
        self,
        namespace: str,
        job: Job,
        threads: int,
        memory_limit: int,
        security: Security | None,
    ) -> None:
        self._job = job
        count = _hostings[namespace] = _hostings.get(namespace, 0) + 1
        prefix = f"persia/{namespace}/{job.restarts}/{count}"
        self._keys = Keys(prefix)
        host = self._keys.gather("host", this_machine(), job)
        alone = len({h["machine"] for h in host}) == 1
        self.security = secure_job(self._keys, job, alone, security)
        address = "127.0.0.1" if alone else host[job.rank]["address"]
        self.server = _core.Server(
            namespace=namespace,
            shard=job.rank,
            shards=job.world,
            threads=threads,
            memory_limit=memory_limit,
            lineage=0,
            message_limit=_core.MESSAGE_LIMIT,
            checkpoints=None,
        )
        port = self.server.start(
            address=f"{bracketed(address)}:0",
            threads=max(threads, _SERVER_THREADS),
            calls=_SERVER_CALLS,
            connections=_SERVER_CONNECTIONS,
            message_limit=_core.MESSAGE_LIMIT,
            security=self.security.arguments(),
        )
        mine = f"{bracketed(address)}:{port}"
        self.addresses: list[str] = self._keys.gather("address", mine, job)
        self.server.health(True)
        self._pid = os.getpid()
        _hosted.append(self)

    def checkpoints(self, above: Path, restores: bool) -> None:
        """See :class:`Hosting`."""
        del restores
        self.server.checkpoints(str(above))

    def close(self, failed: bool = False) -> None:
        """Serves until all ranks have closed, or until no rank has sent a
        request for ten minutes; then ends. After a failure the other ranks
        may wait for this one instead: it serves until the process ends."""
        if failed or self not in _hosted:
            return
        _hosted.remove(self)
        if os.getpid() != self._pid:
            return
        try:
            self._wait()
        except RuntimeError:
            pass  # the ranks' key-value store is gone, and so are they
        finally:
            self.server.stop(1.0)
            self.server.close()

    def _wait(self) -> None:
        channel = self.server.channel(10.0)
        served, since = -1, time.monotonic()
        there = self._keys.count("done", 1)
        while there < self._job.world:
            stats = channel.stats()
            now = time.monotonic()
            if stats["pulls"] + stats["pushes"] != served:
                served, since = stats["pulls"] + stats["pushes"], now
            if now - since > _PATIENCE:
                warnings.warn(
                    f"{self._job.world - there} ranks have not ended and ask "
                    f"for nothing since {_PATIENCE:.0f} s: rank "
                    f"{self._job.rank} ends without them",
                    stacklevel=3,
                )
                break
            time.sleep(_POLL)
            there = self._keys.count("done", 0)
        channel.close()


def this_machine() -> dict[str, str]:
    """What tells machines apart, and the address that others reach this one
    by: the one from which it reaches rank 0.  Processes of one machine share
    its loopback interface and its files: two containers of one host do
    not."""
    machine = socket.gethostname()
    boot = Path("/proc/sys/kernel/random/boot_id")
    if boot.exists():
        machine += boot.read_text().strip()
    for kind_of in ("net", "mnt"):
        namespace = Path("/proc/self/ns", kind_of)
        if namespace.exists():
            machine += os.readlink(namespace)
    return {"machine": machine, "address": _own_address()}


def _own_address() -> str:
    master = os.environ.get("MASTER_ADDR", "")
    for host in (master, socket.gethostname()):
        for found in addresses_of(host) if host else []:
            family = socket.AF_INET6 if ":" in found else socket.AF_INET
            try:
                with socket.socket(family, socket.SOCK_DGRAM) as s:
                    s.connect((found, 9))  # sends nothing
                    return str(s.getsockname()[0])
            except OSError:
                continue
    return "127.0.0.1"
