"""Which servers a job has whose number changes, and where they are, as long
as their logs.

The logs of servers that gave each other shards name the addresses of these. So
each start of ``persia launch`` gives a server the port that it had, and starts
those that have joined again. ``launch.json`` in the folder of the logs has the
ports. It is replaced as a whole: before a server starts, and after one has
ended that has no shard any more. A server that joins has its log in ``ps<N>``
beside it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

import pydantic

from persia.checkpoint.files import replace_file
from persia.distributed.places import joined
from persia.errors import CorruptFile, SchemaMismatch, StorageError

_NAME = "launch.json"


class Job(pydantic.BaseModel):
    """What stays as long as the logs.

    Attributes:
        namespace: of the tables.
        host: where the servers listen.
        servers: that have shards when the job first starts.
        shards: of the tables.
    """

    namespace: str
    host: str
    servers: int
    shards: int

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self)


class _File(pydantic.BaseModel):
    job: Job
    ports: dict[int, int] = {}


class Kept:
    """The servers of a job whose number changes, and their ports.

    Args:
        log: folder of their logs.
        job: what is started.

    Raises:
        SchemaMismatch: the logs are of another job.
        CorruptFile: the file cannot be read, or is missing.
    """

    def __init__(self, log: Path, job: Job) -> None:
        self._log, self._path = log, log / _NAME
        self._job = job
        self._now = self._read() or _File(job=job)
        if self._now.job != job:
            raise SchemaMismatch(
                f"{log} has the logs of another job ({self._now.job}), and "
                f"this one is of {job}: start it with the numbers of those "
                "logs (`ps`, `shards`), or with another folder of logs"
            )

    def _read(self) -> _File | None:
        try:
            return _File.model_validate_json(self._path.read_bytes())
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            raise CorruptFile(
                f"{self._path} cannot be read: {error}"
            ) from None
        moves = [*self._log.glob("*.moves"), *self._log.glob("ps*/*.moves")]
        if moves:
            raise CorruptFile(
                f"{self._path} is missing, which has the ports of the servers "
                f"that {moves[0]} names. Bring it back from a copy, or start "
                "with a checkpoint and another folder of logs"
            )
        return None

    def folder(self, server: int) -> Path:
        """The log of one that joins."""
        return self._log / f"ps{server}"

    def ports(self) -> dict[int, int]:
        """Those of the servers to start, by their numbers; 0: any. Of those
        that joined the ones that were ever to get a shard."""
        known = self._now.ports
        more = (
            server
            for server in sorted(known)
            if server >= self._job.servers
            and joined(self.folder(server), self._job.namespace)
        )
        return {
            server: known.get(server, 0)
            for server in (*range(self._job.servers), *more)
        }

    def keep(self, ports: Mapping[int, int]) -> None:
        """Servers have these from now on.

        Raises:
            StorageError: they cannot be written.
        """
        self._write({**self._now.ports, **ports})

    def forget(self, server: int) -> None:
        """One has no shard, and has ended. If this cannot be written, it
        is started again, and gets some."""
        ports = {n: p for n, p in self._now.ports.items() if n != server}
        with contextlib.suppress(StorageError):
            self._write(ports)

    def _write(self, ports: dict[int, int]) -> None:
        if ports == self._now.ports:
            return
        new = _File(job=self._job, ports=ports)
        try:
            self._log.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(
                f"{self._log} cannot be made: {error.strerror}"
            ) from None
        replace_file(self._path, new.model_dump_json().encode())
        self._now = new


def is_kept(log: Path) -> bool:
    """Whether these are the logs of a number of servers that changes."""
    return (log / _NAME).exists()
