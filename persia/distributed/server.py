"""A shard of the tables of a job, in a server's process.

:class:`Server` configures objects of the C core, which then serve without
Python; what is left here is to begin with the rows of a checkpoint, and to
save them. ``persia serve ps`` is the way in: :mod:`persia.distributed.shards`
serves the shards of one process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import socket
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import pydantic
from pydantic import Field

from persia import _core
from persia.base.environment import variable
from persia.base.logs import lines_of_core, say
from persia.base.urls import Url
from persia.checkpoint import files
from persia.checkpoint import manifest as manifests
from persia.checkpoint.files import ROWS, LocalRoot, root_in
from persia.checkpoint.ledgers import Numbers
from persia.checkpoint.snapshot import SNAPSHOT, Snapshot, save_rows
from persia.distributed.durable import Log
from persia.distributed.security import Security
from persia.distributed.serving import Listening, MetricsHost, MetricsPort
from persia.errors import (
    InvalidArgument,
    PersiaError,
    SchemaMismatch,
    StorageError,
    Unavailable,
)

if TYPE_CHECKING:
    from persia.checkpoint.far import Far
    from persia.checkpoint.remote import RemoteRoot

_WAIT = 3600.0  # seconds that a call within the process may take
_POLL = 0.02  # seconds between questions whether something is done
SAVE_SECONDS = 3.0  # that a save on exit has, whatever `grace` says
_NAME = "^[A-Za-z0-9_-][A-Za-z0-9._-]*$"


# ---- configuration ---------------------------------------------------------


class ServeConfig(Listening):
    """The options of ``persia serve ps``; their names are those of the
    flags."""

    shard: str = Field(
        "0/1",
        description="Which shard of how many, such as 0/2, or which shards, "
        "such as 0-3/8; auto: the index of the pod (PERSIA_SHARD, "
        "JOB_COMPLETION_INDEX, POD_NAME or the host's name).",
    )
    join: str | None = Field(
        None,
        description="Begin without a shard, as one more server of the job "
        "that has a server at this address, host:port; persia scale ps gives "
        "it shards. With `server_count` only a server whose number, of "
        "`shard`, is not below it joins.",
    )
    shards: int | None = Field(
        None,
        ge=1,
        le=4096,
        description="Shards in all, where `shard` does not say it "
        "(default: PERSIA_SHARDS).",
    )
    server_count: int | None = Field(
        None,
        ge=1,
        le=4096,
        description="Servers among which the shards are divided; `shard` "
        "says which of them this is (default: one for each shard).",
    )
    memory_limit: pydantic.ByteSize | None = Field(
        None,
        description="Memory of all tables, such as 64GiB; beyond it new ids "
        "are errors (default: no limit).",
    )
    checkpoints: Annotated[str, pydantic.AfterValidator(Url)] | None = Field(
        None,
        description="Folder of checkpoint roots, which all ranks and servers "
        "see; or its URL, such as s3://bucket/checkpoints: then servers send "
        "their files there.",
    )
    restore: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]*(/step-[0-9]+)?$",
        description="Begin with the rows of this checkpoint root in the "
        "folder of `checkpoints`: NAME, or NAME/step-N.",
    )
    or_empty: bool = Field(
        False,
        description="Begin without rows where the checkpoint of `restore` is "
        "not there.",
    )
    save_on_exit: str | None = Field(
        None,
        pattern=_NAME,
        max_length=200,
        description="At SIGTERM write this shard's rows into this checkpoint "
        "root, for `restore` of the same name.",
    )
    metrics_port: MetricsPort = None
    metrics_host: MetricsHost = "127.0.0.1"
    admin_token_file: Path | None = Field(
        None,
        description="File with the token of administration: snapshots, "
        "restores, whole rows.",
    )

    slow_calls: float = Field(
        0.1,
        ge=0,
        le=86400,
        description="Seconds from which on a call is among those of persia "
        "status --slow; 0: none is.",
    )

    durable: Literal["off", "process", "disk"] = Field(
        "off",
        description="What an acknowledged update survives: off (nothing: "
        "what followed the last checkpoint is lost, and reported), process "
        "(a crash of the server), disk (a power cut, too).",
    )
    log: str | None = Field(
        None,
        description="Folder of the log of `durable`, on a disk of this "
        "server's; each server has its own folder in it.",
    )
    log_limit: pydantic.ByteSize | None = Field(
        None,
        ge=1 << 16,
        description="Bytes of the log from which on the server writes its "
        "rows beside it, such as 4GiB (default: 1GiB).",
    )
    log_from: Literal["cut"] | None = Field(
        None,
        description="Where the log is damaged, begin with the rows that were "
        "written last, and leave out the records behind them.",
    )

    @pydantic.field_validator("checkpoints", mode="before")
    @classmethod
    def _text(cls, value: Any) -> Any:
        return os.fspath(value) if isinstance(value, os.PathLike) else value

    @pydantic.model_validator(mode="after")
    def _check(self) -> ServeConfig:
        if self.durable != "off" and self.log is None:
            raise ValueError(
                f"`durable={self.durable}` needs a folder for its log: "
                "`log=/var/lib/persia`"
            )
        if self.join and self.server_count is None and self.restore:
            raise ValueError(
                "a server that joins has no rows of its own: leave `restore` "
                "out"
            )
        if self.durable == "off" and self.log is not None:
            raise ValueError(
                "`log` without `durable`: give `durable=process` or "
                "`durable=disk`"
            )
        for name in ("restore", "save_on_exit"):
            if getattr(self, name) is not None and self.checkpoints is None:
                raise ValueError(
                    f"`{name}` names a checkpoint in the folder of "
                    "`checkpoints`; give that, too"
                )
        if re.match("[a-z][a-z0-9+.-]+:/(?!/)", self.checkpoints or ""):
            raise ValueError(
                f"`checkpoints={self.checkpoints}` is neither a folder nor a "
                "URL, which has // behind its scheme"
            )
        return self

    @property
    def far(self) -> Url | None:
        """The URL of `checkpoints`; None: it is a folder, or not given."""
        url = Url(self.checkpoints or "")
        return None if url.local is not None else Url.to_open(url)

    @property
    def folder(self) -> Path | None:
        """The folder of `checkpoints`; None: it is a URL, or not given."""
        local = Url(self.checkpoints or "").local
        return Path(local) if local else None

    def root(self, name: str) -> LocalRoot | RemoteRoot:
        """One of the roots in `checkpoints`."""
        if self.folder is not None:
            return LocalRoot(self.folder / name)
        from persia.checkpoint.remote import RemoteRoot

        assert self.far is not None
        return RemoteRoot(root_in(self.far, name))

    def has(self, name: str) -> bool:
        """Whether a folder of rows, ROOT/FOLDER, is in `checkpoints`."""
        if self.checkpoints is None:
            return False
        root, _, folder = name.partition("/")
        return any(
            self.root(root).read(f"{folder}/{whole}") is not None
            for whole in (manifests.MANIFEST, SNAPSHOT)
        )


def find_shard(
    shard: str,
    shards: int | None,
    environment: Mapping[str, str] | None = None,
    host: str | None = None,
) -> tuple[int, int]:
    """(shard, shards) of the options ``--shard`` and ``--shards``.

    Args:
        shard: "0/2", "0" or "auto".
        shards: how many, where ``shard`` does not say it.
        environment: default: that of the process.
        host: the host's name; default: that of the system.
    """
    if environment is None:
        environment = os.environ
    index, _, count = shard.partition("/")
    if index == "auto":
        index = _auto_index(environment, host or socket.gethostname())
    if not count and shards is None:
        count = variable("PERSIA_SHARDS", environment) or ""
    elif not count:
        count = str(shards)
    elif shards is not None and count != str(shards):
        raise InvalidArgument(f"`shard={shard}` and `shards={shards}` differ")
    if not count:
        raise InvalidArgument(
            f"`shard={shard}`: of how many? Give `shards`, or PERSIA_SHARDS"
        )
    if (
        not (index.isdecimal() and count.isdecimal())
        or not int(index) < int(count) <= manifests.SHARDS_MAX
    ):
        raise InvalidArgument(
            f"there is no shard {index} of {count}: shards are 0 to N - 1 of "
            f"N, at most {manifests.SHARDS_MAX} (`shard=0/2`)"
        )
    return int(index), int(count)


def find_join(
    config: ServeConfig,
    environment: Mapping[str, str] | None = None,
    host: str | None = None,
) -> str | None:
    """The address of the server that a process joins; None: it has shards
    from its start.

    Args:
        config: its ``join``, ``shard`` and ``server_count``.
        environment, host: see :func:`find_shard`.
    """
    if config.join is None or config.server_count is None:
        return config.join
    index = config.shard.partition("/")[0]
    if index == "auto":
        index = _auto_index(
            os.environ if environment is None else environment,
            host or socket.gethostname(),
        )
    later = index.isdecimal() and int(index) >= config.server_count
    return config.join if later else None


def find_shards(
    config: ServeConfig,
    environment: Mapping[str, str] | None = None,
    host: str | None = None,
) -> tuple[range, int]:
    """The shards that a process has, and how many there are in all.

    Args:
        config: its ``shard``, ``shards`` and ``server_count``.
        environment, host: see :func:`find_shard`.

    Raises:
        InvalidArgument: they do not say it, or there are no such shards.
    """
    several = re.fullmatch(r"(\d+)-(\d+)(/\d+)?", config.shard)
    if several and config.server_count is not None:
        raise InvalidArgument(
            f"`shard={config.shard}` names several shards, and `server_count` "
            "divides them; give one of both"
        )
    if several:
        first, last, count = several[1], several[2], several[3] or ""
        shards = config.shards
        begin, n = find_shard(first + count, shards, environment, host)
        end, n = find_shard(last + count, shards, environment, host)
        if begin > end:
            raise InvalidArgument(
                f"`shard={config.shard}`: {begin} follows {end}"
            )
        return range(begin, end + 1), n
    if config.server_count is None:
        index, n = find_shard(config.shard, config.shards, environment, host)
        return range(index, index + 1), n
    index, servers = find_shard(
        config.shard, config.server_count, environment, host
    )
    text = config.shards or variable(
        "PERSIA_SHARDS", os.environ if environment is None else environment
    )
    n = int(text) if text and str(text).isdecimal() else servers
    if not servers <= n <= manifests.SHARDS_MAX:
        raise InvalidArgument(
            f"`server_count={servers}`: there are {n} shards (`shards`); each "
            f"server needs one, and there are at most {manifests.SHARDS_MAX}"
        )
    return range(index * n // servers, (index + 1) * n // servers), n


def _auto_index(environment: Mapping[str, str], host: str) -> str:
    for name in ("PERSIA_SHARD", "JOB_COMPLETION_INDEX"):
        if value := variable(name, environment):
            return value
    pod = environment.get("POD_NAME") or host
    found = re.search(r"-([0-9]+)$", pod.partition(".")[0])
    if not found:
        raise InvalidArgument(
            "`shard=auto`: neither PERSIA_SHARD nor JOB_COMPLETION_INDEX is "
            f"set, and {pod!r} does not end in -<number> as the name of a "
            "pod does; give `shard=0/2`"
        )
    return found[1]


# ---- the server ------------------------------------------------------------


def listen(
    config: ServeConfig,
    core: _core.Server,
    security: Security,
    threads: int,
    beside: Sequence[Server] = (),
    room: int = 0,
) -> str:
    """A core listens; the address.

    Args:
        config: its address and limits.
        core: of a shard, or of no shard.
        security: of the server.
        threads: that take requests.
        beside: further shards that are reached there.
        room: so many shards may be there, and the core itself is none; 0: it
            is one.
    """
    host = f"[{config.host}]" if ":" in config.host else config.host
    port = core.start(
        address=f"{host}:{config.port}",
        threads=threads,
        calls=config.calls,
        connections=config.connections,
        message_limit=config.message_limit,
        security=security.arguments(),
        beside=[server.core for server in beside],
        room=room,
    )
    return f"{host}:{port}"


@dataclasses.dataclass(frozen=True)
class Arrival:
    """A shard that another server had: what clients know it by; without
    ``boot`` they greet it as one that was started again."""

    boot: int = 0
    lineage: int = 0


class Server:
    """A shard that is served, from the making to :meth:`close`.

    No client can reach it before :meth:`start`, and one of a server that has
    a log waits until :meth:`ready`.

    Args:
        config: of its process.
        place: which shard, and of how many; None: as ``config`` says.
        beside: a core of the process whose threads and memory limit it
            shares; None: it has its own.
        others: how many shards will be beside it.
        arrives: what it was at another server; None: it was at none.
        log: the folder of its log, of a shard that has moved here.

    Attributes:
        core: the shard.
        log: its log, or None.
        door: the core that listens for it, where it is another one.
    """

    def __init__(
        self,
        config: ServeConfig,
        place: tuple[int, int] | None = None,
        beside: _core.Server | None = None,
        others: int = 0,
        arrives: Arrival | None = None,
        log: Path | None = None,
    ) -> None:
        self.config = config
        self.door: _core.Server | None = None
        self.shard, self.shards = place or find_shard(
            config.shard, config.shards
        )
        threads = config.threads or len(os.sched_getaffinity(0))
        self._threads = threads
        folder = config.folder
        if folder is not None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise StorageError(
                    f"`checkpoints={config.checkpoints}`: {error.strerror}"
                ) from None
        self._security = config.security(
            admin_token_file=config.admin_token_file
        )
        self.log = (
            Log(config, self.shard, self.shards, log)
            if config.durable != "off"
            else None
        )
        self._far = _far_of(config)
        self.core: _core.Server = _core.Server(
            namespace=config.namespace,
            shard=self.shard,
            shards=self.shards,
            threads=threads,
            memory_limit=config.memory_limit or 0,
            lineage=arrives.lineage if arrives is not None else 0,
            message_limit=config.message_limit,
            checkpoints=str(folder) if folder is not None else None,
            **lines_of_core(),
            slow=config.slow_calls,
            log=self.log.arguments() if self.log is not None else None,
            beside=beside,
            others=others,
            boot=arrives.boot if arrives is not None else 0,
            far=self._far,
        )
        self._channel = self.core.channel(_WAIT)

    def start(self) -> str:
        """Listens; the address. Without a log clients are answered."""
        address = listen(
            self.config,
            self.core,
            self._security,
            self._threads + (self.log is not None),
        )
        if self.log is None:
            self.ready()
        return address

    def ready(self) -> None:
        """From now on clients are answered."""
        if self.log is not None:
            self.core.ready()
        self.core.health(True)

    def stats(self) -> dict[str, Any]:
        """Its counters and, under "tables", those of each table."""
        door = self.door or self.core
        open_now, refused = door.connections()
        counts = {
            "connections": open_now,
            "connections_refused": refused,
            "denied": sum(door.denied().values()),
        }
        log = (
            self.core.log_counts()
            if self.log is not None
            else dict.fromkeys(("end", "cut", "records", "refused"), 0)
        )
        counts |= {
            "log_records": log["records"],
            "log_refused": log["refused"],
            "log_bytes": log["end"] - log["cut"],
            "log_failed": int(log.get("failed", 0)),
        }
        counts["snapshot_seconds"], counts["snapshot_ns"], _ = (
            self.core.snapshot()
        )
        return self._channel.stats() | counts

    def stop(self, grace: float | None = None) -> None:
        """No more requests; those in flight have so many seconds (default: the
        grace)."""
        if self.log is not None:
            self.log.end_cuts()
        self.core.stop(self.config.grace if grace is None else grace)

    def close(self) -> None:
        """Frees the rows."""
        self._channel.close()
        self.core.close()
        if self._far is not None:
            self._far.close()

    # ---- the log

    def cut(self) -> None:
        """Writes the rows beside the log, which it has."""
        assert self.log is not None
        try:
            self.log.cut(self.core, self._write_rows)
        except OSError as error:
            raise StorageError(
                f"writing rows into {self.log.path} failed: {error}"
            ) from error

    def recover(self) -> bool:
        """Brings back what the log has; see :meth:`Log.recover`. Whether
        there were rows or updates: tables alone may be those of a restore
        that was interrupted."""
        if self.log is None:
            return False

        def read(root: str, folder: str, cut: Snapshot) -> int:
            return self._read_rows(
                root, folder, cut.tables, cut.lineage, cut.part()
            )

        found = self.log.recover(self.core, read)
        stats = self._channel.stats()
        recovered = bool(
            found["first"]  # the position of a cut
            or stats["updates"]
            or any(table["rows"] for table in stats["tables"])
        )
        if recovered:
            say(
                f"recovered from {self.log.path}: {stats['updates']:,} "
                f"updates, the last {found['records']:,} records from the log"
            )
        return recovered

    def cutting(self) -> contextlib.AbstractContextManager[None]:
        """Keeps the log short meanwhile."""
        if self.log is None:
            return contextlib.nullcontext()
        return self.log.cutting(self.core, self._write_rows)

    # ---- moves

    def hello(self) -> dict[str, Any]:
        """Its Hello."""
        return self._channel.hello(self.config.namespace, 0)

    def is_saved(self) -> bool:
        """Whether a client has a checkpoint of it written now."""
        return self.core.snapshot()[2]

    def rows(self) -> int:
        """How many it has."""
        return sum(t["rows"] for t in self._channel.stats()["tables"])

    # ---- checkpoints

    def restore(self) -> int | None:
        """Takes the rows of the checkpoint that the configuration names; how
        many. None if there is none and that is allowed.

        Of a job's checkpoint NAME and what this shard has saved on exit under
        that name the newer one is taken; NAME/step-N is the job's.
        """
        config = self.config
        assert config.restore is not None and config.checkpoints is not None
        name, _, step = config.restore.partition("/step-")
        job = self._job_checkpoint(name, int(step) if step else None)
        own = None if step else self._own_snapshot(name)
        if job is not None and (
            own is None or not self._is_newer(name, own, job)
        ):
            return self._restore_job(name, job)
        if own is not None:
            return self._restore_own(name, own)
        if config.or_empty:
            config.root(name).check_place()  # else its name is wrong
            return None
        raise StorageError(
            f"{config.checkpoints} has no checkpoint {config.restore}, and "
            f"shard {self.shard} of {self.shards} has saved none of that name "
            "on exit; `or_empty` begins without rows"
        )

    def _is_newer(self, name: str, own: Snapshot, job: files.Found) -> bool:
        """Whether what was saved on exit is later than a checkpoint: of a
        later restore, or with all updates of this shard that it has. Clocks
        of two machines may say anything.
        """
        part = manifests.part_of(job.manifest, self.shard, self.shards)
        if own.restore != part.restore:
            return own.restore > part.restore
        mine = {ledger.stream: ledger for ledger in own.part().ledgers}
        if own.updates < part.updates or any(
            mine.get(theirs.stream, Numbers(0, 0, b"")).lacks(theirs)
            for theirs in part.ledgers
        ):
            return False
        # The same updates: rows may have been assigned, too.
        if own.updates > part.updates:
            return True
        mine_root = self._root_of(name, self.shard)
        return mine_root.written(f"{ROWS}/{SNAPSHOT}") >= self.config.root(
            name
        ).written(f"{job.name}/{manifests.MANIFEST}")

    def _job_checkpoint(
        self, name: str, step: int | None
    ) -> files.Found | None:
        """The checkpoint of that name, its latest or one step."""
        root = self.config.root(name)
        if not root.steps() and root.read(files.LATEST) is None:
            return None
        return files.find(root, step)

    def _restore_job(self, name: str, found: files.Found) -> int:
        manifest = found.manifest
        if self.shard == 0:
            manifests.warn_in_part(manifest, found.folder, self.shards)
        part = manifests.part_of(manifest, self.shard, self.shards)
        tables = [table.native() for table in manifest.tables]
        lineage = int(manifest.lineage, 16)
        return self._read_rows(name, found.name, tables, lineage, part)

    def _own_name(self, name: str) -> str:
        return f"{name}-{self.shard}-of-{self.shards}"

    def _own_snapshot(self, name: str) -> Snapshot | None:
        return self._snapshot_of(name, self.shard)

    def _root_of(self, name: str, shard: int) -> LocalRoot | RemoteRoot:
        return self.config.root(f"{name}-{shard}-of-{self.shards}")

    def _snapshot_of(self, name: str, shard: int) -> Snapshot | None:
        """What a shard has saved on exit under that name."""
        saved = Snapshot.of_root(self._root_of(name, shard))
        return None if saved is None else saved[1]

    def _restore_own(self, name: str, own: Snapshot) -> int:
        if (own.shard, own.shards) != (self.shard, self.shards):
            raise SchemaMismatch(
                f"{self._own_name(name)} holds shard {own.shard} of "
                f"{own.shards}, this is shard {self.shard} of {self.shards}"
            )
        shards = manifests.sources_of(
            self.shard, self.shards, self.shards, own.slots
        )
        if shards != {self.shard}:
            return self._restore_placed(name, own, shards - {self.shard})
        folder = self._root_of(name, self.shard).at(ROWS)
        place = folder.name if isinstance(folder, Path) else ROWS
        return self._read_rows(
            self._own_name(name), place, own.tables, own.lineage, own.part()
        )

    def _restore_placed(self, name: str, own: Snapshot, more: set[int]) -> int:
        """Of an earlier release, which placed ids in another way: other shards
        have saved some of this one's rows."""
        all_of = {self.shard: own}
        for shard in sorted(more):
            saved = self._snapshot_of(name, shard)
            if saved is None or saved.lineage != own.lineage:
                raise StorageError(
                    f"{self._own_name(name)} is of an earlier release; some "
                    f"rows of shard {self.shard} are in what shard {shard} of "
                    f"{self.shards} has saved on exit, but {name}-{shard}-of-"
                    f"{self.shards} is not there, or of another training"
                )
            all_of[shard] = saved
        tables = {
            str(table["name"]): table
            for one in all_of.values()
            for table in one.tables
        }
        number = {table: no for no, table in enumerate(tables)}
        pushes, rows = [0] * len(tables), []
        root = self._root_of(name, self.shard)
        assert isinstance(root, LocalRoot)  # URLs are newer
        with root.writing() as folder:
            for shard, one in all_of.items():
                part = one.part()
                here = [number[str(table["name"])] for table in one.tables]
                for no, clock in zip(here, part.pushes):
                    pushes[no] = max(pushes[no], clock)
                for file in part.files:
                    there = Path(self._root_of(name, shard).at(ROWS))
                    os.link(there / file.name, folder / file.name)
                    rows.append(file._replace(table=here[file.table]))
            part = dataclasses.replace(own.part(), pushes=pushes, files=rows)
            return self._read_rows(
                self._own_name(name),
                folder.name,
                list(tables.values()),
                own.lineage,
                part,
            )

    def _read_rows(
        self,
        root: str,
        folder: str,
        tables: list[dict[str, Any]],
        lineage: int,
        part: manifests.Part,
    ) -> int:
        """Declares the tables and reads this shard's rows; how many."""
        for table in tables:
            self._channel.declare(**table)

        def ask(verb: int) -> dict[str, int]:
            return self._channel.restore(
                verb,
                *(root, folder, ""),
                *(lineage, part.restore),
                *(part.updates, part.sync_step, part.t),
                part.pushes,
                part.ledgers,
                part.files,
            )

        while not (answer := ask(_core.RESTORE_PREPARE))["done"]:
            time.sleep(_POLL)
        while not (answer := ask(_core.RESTORE_COMMIT))["done"]:
            time.sleep(_POLL)
        return answer["rows"]

    def save(self, name: str) -> int:
        """Writes this shard's rows beside the checkpoints of the job, for
        :meth:`restore`; how many."""
        own = self._own_name(name)
        root = self.config.root(own)
        try:
            saved = save_rows(root, partial(self._write_rows, own))
        except PersiaError:
            raise
        except OSError as error:
            raise StorageError(
                f"saving {name} into {root} failed: {error}"
            ) from error
        return sum(file.rows for file in saved.files)

    def check_save(self, name: str) -> None:
        """Finds out whether :meth:`save` could begin.

        Raises:
            StorageError: it could not.
        """
        files.check(self._root_of(name, self.shard))

    def _write_rows(self, root: str, folder: str, proof: str) -> Snapshot:
        lineage = self._channel.hello(self.config.namespace, 0)["lineage"]
        place = (root, folder, proof)
        answer = self._channel.snapshot(_core.SNAPSHOT_BEGIN, *place)
        while not answer["done"]:
            time.sleep(_POLL)
            answer = self._channel.snapshot(_core.SNAPSHOT_STATUS, *place)
        self._channel.snapshot(_core.SNAPSHOT_END, *place)
        hello = self._channel.hello(self.config.namespace, 0)
        if hello["lineage"] != lineage:
            raise Unavailable(
                "other rows were restored while these were written"
            )
        return Snapshot.of(hello, answer)


def _far_of(config: ServeConfig) -> Far | None:
    if config.far is None:
        return None
    from persia.checkpoint.far import Far

    return Far(config.far)
