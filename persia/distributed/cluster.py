"""Where a store's tables are, and who else works on them.

A store is *embedded* (its tables are in this process), or it has *servers*:
parameter servers that run by themselves, or the ranks of the job, each of
which serves a part of every table to all others.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import hashlib
import os
import secrets
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence, Set
from functools import partial
from typing import Any, NamedTuple, TypeVar

from persia import _core, errors
from persia.base.check import kind, number
from persia.base.environment import variable
from persia.base.patience import saying_so, watching
from persia.base.traces import begin_traces
from persia.base.warning import warn
from persia.distributed.addresses import (
    WIRE_DTYPES,
    namespace_of,
    resolve,
    why_away,
)
from persia.distributed.hosting import (
    Hosting,
    LoggedHosting,
    RankHosting,
    close_hosted,
)
from persia.distributed.peers import peers
from persia.distributed.ranks import (
    Keys,
    Passes,
    all_max,
    group_here,
    need_group,
    notice_lost_machines,
)
from persia.distributed.security import Security

RUN_ID = "PERSIA_RUN_ID"  # environment: what the launcher calls its run

T = TypeVar("T")

_LOST = ("raise", "continue")
_DURABLE = ("off", "process", "disk")
_LAST_SECONDS = 5.0  # for updates of a process that ends with an exception


# ---- the job ---------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Job:
    """This process among those that train together.

    Attributes:
        rank: its number.
        world: how many there are.
        restarts: how often the job was started again, where its ranks may
            find what those before have left in their key-value store; else 0.
    """

    rank: int
    world: int
    restarts: int

    @classmethod
    def here(cls, rank: int | None = None, world: int | None = None) -> Job:
        """As given, else as torch.distributed or torchrun says."""
        if (rank is None) != (world is None):
            raise errors.InvalidArgument(
                "rank and world_size go together; give both or none"
            )
        if rank is None or world is None:
            group = group_here()
            if group is not None:
                rank, world = group.get_rank(), group.get_world_size()
            else:
                rank = _number("RANK", 0)
                world = _number("WORLD_SIZE", 1)
        if not 0 <= rank < world:
            raise errors.InvalidArgument(
                f"rank is {rank} of {world}, need 0 to {world - 1}"
            )
        # Each agent counts for itself: one that joined later has fewer. With
        # a key-value store of their own the ranks need no count.
        shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        restarts = _number("TORCHELASTIC_RESTART_COUNT", 0) if shared else 0
        return cls(rank, world, restarts)


def _number(variable: str, default: int) -> int:
    text = os.environ.get(variable)
    if not text:
        return default
    try:
        return int(text)
    except ValueError:
        raise errors.InvalidArgument(
            f"environment: {variable} is {text!r}, need a number"
        ) from None


def stream_id(namespace: str, job: str, role: str, rank: int) -> int:
    """The number of a rank's stream of updates: the first 64 bits
    (little-endian) of BLAKE2b over namespace, job, role and rank with zero
    bytes between; the same after a restart. Without a job: as checkpoints
    have it that know of none."""
    parts = (namespace, *([job] if job else []), role, str(rank))
    digest = hashlib.blake2b("\0".join(parts).encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "little") or 1


class StreamKey(NamedTuple):
    """Whose a stream of updates is; number: of the store among those of its
    process."""

    namespace: str
    job: str
    rank: int
    number: int

    def stream(self) -> int:
        role = f"nn_worker/{self.number}" if self.number else "nn_worker"
        return stream_id(self.namespace, self.job, role, self.rank)


_STORES_MAX = 64  # of a process, among which a checkpoint's store is sought

# Streams of this process that are in use: several stores of one namespace
# must not number their updates in one.
_streams: set[StreamKey] = set()
_streams_lock = threading.RLock()  # taken by finalizers, too


def _take_stream(namespace: str, job: str, rank: int) -> StreamKey:
    with _streams_lock:
        number = 0
        while (key := StreamKey(namespace, job, rank, number)) in _streams:
            number += 1
        _streams.add(key)
    return key


def _drop_stream(key: StreamKey) -> None:
    with _streams_lock:
        _streams.discard(key)


times_opened: dict[StreamKey, int] = {}  # how often each store has been opened

_own_job = secrets.token_hex(16)  # of a process that has no other


def _run_here() -> str:
    """What torchrun or the launcher calls this run; "": it has no name."""
    run = os.environ.get("TORCHELASTIC_RUN_ID", "")
    if run in ("", "none"):  # torchrun's word for: it was given none
        run = variable(RUN_ID) or ""
    return run


def has_name(settings: Settings) -> bool:
    """Whether a store's job has a name that it keeps when it is started
    again."""
    return bool(settings.job or _run_here())


def _job_here(restarts: int) -> str:
    """The run that this process belongs to: what torchrun or the launcher
    calls it, else a random name, the same for all ranks."""
    run = _run_here()
    if run:
        return run
    if group_here() is None:
        return _own_job
    return Keys(f"persia/job/{restarts}").first("name", _own_job)


def agree_on_t(core: _core.Store, key: StreamKey, restarts: int) -> None:
    """Updates of all ranks continue after one t, though ranks open at
    different times: that which the first rank has found at the servers."""
    if group_here() is None:
        return
    with _streams_lock:
        times_opened[key] = times_opened.get(key, 0) + 1
        opened = times_opened[key]
    name = f"{key.namespace}/{key.job}/{key.number}/{opened}"
    keys = Keys(f"persia/t/{restarts}")
    core.set_t(int(keys.first(name, str(core.t()))))


# ---- settings --------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a store reaches its tables; the arguments of
    :class:`persia.Store`."""

    servers: str | tuple[str, ...] | None = None
    namespace: str = dataclasses.field(default_factory=namespace_of)
    security: Security | None = None
    timeout: float = 60.0
    wire_dtype: str = "fp32"
    lost: str = "raise"
    rank: int | None = None
    world: int | None = None
    job: str | None = None
    read_only: bool = False
    durable: str = "off"
    log: str | None = None
    log_limit: int | None = None

    def __post_init__(self) -> None:
        kind("read_only", self.read_only, bool, "True or False")
        if self.job is not None:
            kind("job", self.job, str, "a string")
            if not self.job or len(self.job.encode()) > 255:
                raise errors.InvalidArgument(
                    f"job is {self.job!r}, need 1 to 255 bytes"
                )
        if self.wire_dtype not in WIRE_DTYPES:
            raise errors.InvalidArgument(
                f"wire_dtype is {self.wire_dtype!r}, need one of {WIRE_DTYPES}"
            )
        if self.lost not in _LOST:
            raise errors.InvalidArgument(
                f"lost is {self.lost!r}, need 'raise' or 'continue'"
            )
        number("timeout", self.timeout, 1e-9, 1e9)
        if not self.namespace or len(self.namespace.encode()) > 255:
            raise errors.InvalidArgument(
                f"namespace is {self.namespace!r}, need 1 to 255 bytes"
            )
        self._check_log()

    def _check_log(self) -> None:
        if self.durable not in _DURABLE:
            raise errors.InvalidArgument(
                f"durable is {self.durable!r}, need one of {_DURABLE}"
            )
        if self.log == "":
            raise errors.InvalidArgument("log is empty, need a folder")
        if self.durable != "off" and self.log is None:
            raise errors.InvalidArgument(
                f"durable={self.durable!r} needs a folder for its log: "
                'log="folder"'
            )
        if self.durable == "off" and (self.log, self.log_limit) != (None,) * 2:
            raise errors.InvalidArgument(
                'log and log_limit without durable: give durable="process" '
                'or durable="disk"'
            )

    def where(self) -> str | tuple[str, ...]:
        """ "embedded", "ranks", or the addresses of servers.

        What was given, else ``PERSIA_SERVERS``, else the ranks of the job if
        there are several.
        """
        servers = self.servers
        if servers is None:
            servers = variable("PERSIA_SERVERS")
        if servers is None:
            job = Job.here(self.rank, self.world)
            servers = "ranks" if job.world > 1 else "embedded"
        if servers == "ranks" and Job.here(self.rank, self.world).world == 1:
            return "embedded"
        return servers

    def open(self, threads: int, memory_limit: int) -> Connection:
        """Connects."""
        if group_here() is not None:
            notice_lost_machines()
        where = self.where()
        if self.log is not None:
            return self._open_logged(where, threads, memory_limit)
        if where == "embedded":
            return Connection(_core.Store(threads, memory_limit))
        if where == "ranks":
            return self._open_ranks(threads, memory_limit)
        if memory_limit:
            raise errors.InvalidArgument(
                "memory_limit is of tables in this process; these are on "
                "servers, which have their own (persia serve ps --help)"
            )
        security = self.security or Security.from_environment()
        addresses, security = resolve(where, security)
        return self._connect_servers(threads, addresses, security)

    def _open_logged(
        self, where: str | tuple[str, ...], threads: int, memory_limit: int
    ) -> Connection:
        if where != "embedded":
            raise errors.InvalidArgument(
                f"durable={self.durable!r} is of tables in this process, and "
                f"these are on {where}: ranks keep no log, and servers are "
                "given their own (persia serve ps --durable --log)"
            )
        assert self.log is not None
        hosting = LoggedHosting(
            *(self.namespace, threads, memory_limit),
            *(self.durable, self.log, self.log_limit),
        )
        try:
            return self._connect(
                threads,
                hosting.addresses,
                Security(),
                hosting.why_held,
                Job(0, 1, 0),
                self.job or _own_job,
                hosting,
            )
        except BaseException:
            hosting.close(failed=True)
            raise

    def _open_ranks(self, threads: int, memory_limit: int) -> Connection:
        job = Job.here(self.rank, self.world)
        group = need_group(
            f"a Store over the {job.world} ranks of this job (give "
            'servers="embedded" for tables that each rank keeps for itself)'
        )
        if (group.get_rank(), group.get_world_size()) != (job.rank, job.world):
            raise errors.InvalidArgument(
                f"rank {job.rank} of {job.world} is rank {group.get_rank()} "
                f"of {group.get_world_size()} in torch.distributed"
            )
        hosting = RankHosting(
            self.namespace, job, threads, memory_limit, self.security
        )
        return self._connect_servers(
            threads, hosting.addresses, hosting.security, hosting
        )

    def _connect_servers(
        self,
        threads: int,
        addresses: list[str],
        security: Security,
        hosting: Hosting | None = None,
    ) -> Connection:
        job = Job.here(self.rank, self.world)
        if not self.read_only:
            begin_traces("trainer")
        return self._connect(
            threads,
            addresses,
            security,
            partial(why_away, addresses, self.namespace, security),
            job,
            self.job or _job_here(job.restarts),
            hosting,
        )

    def _connect(
        self,
        threads: int,
        addresses: list[str],
        security: Security,
        cause: Callable[[], str],
        job: Job,
        name: str,
        hosting: Hosting | None = None,
    ) -> Connection:
        key = _take_stream(self.namespace, name, job.rank)
        try:
            arguments = {
                "addresses": addresses,
                "own": hosting.server if hosting else None,
                "own_at": job.rank if hosting else 0,
                "namespace": self.namespace,
                "rank": job.rank,
                "world": job.world,
                "stream": 0 if self.read_only else key.stream(),
                "timeout": float(self.timeout),
                "dtype": WIRE_DTYPES.index(self.wire_dtype),
                "lost": _LOST.index(self.lost),
                "security": security.arguments(),
            }
            with saying_so(addresses, self.timeout, cause):
                core = _core.Store(threads, 0, arguments)
            if job.world > 1 and not self.read_only:
                agree_on_t(core, key, job.restarts)
        except BaseException:
            _drop_stream(key)
            raise
        watching(partial(_core.cluster_held, core.handle), cause)
        peers.watch()
        return Connection(
            core, job, addresses, key, hosting, self.timeout, self.read_only
        )


class Connection:
    """The C store of a :class:`persia.Store`, and what is around it."""

    def __init__(
        self,
        core: _core.Store,
        job: Job | None = None,
        addresses: Sequence[str] = (),
        key: StreamKey | None = None,
        hosting: Hosting | None = None,
        timeout: float = 60.0,
        read_only: bool = False,
    ) -> None:
        self.core = core
        self.timeout = timeout
        self.job = job or Job(0, 1, 0)
        self.addresses = list(addresses)
        self.hosting = hosting
        self.closed = False
        self._key = key
        # Ranks that the job has no longer may have left updates; tables in
        # ranks ended with these.
        self._inherits = (
            self.remote
            and self.job.rank == 0
            and hosting is None
            and not read_only
        )
        self._passes = 0  # synchronous passes over all ranks that are open
        self._together = False  # in steps of all ranks without a pass
        self._meetings = 0  # times that it began them
        self._steps_lock = threading.RLock()
        self._warned = False
        name, index = (key.namespace, key.number) if key else ("", 0)
        self._prefix = f"persia/{name}/{index}/{self.job.restarts}/steps"
        self.passes = Passes(
            f"persia/{name}/{index}/{self.job.restarts}/pass", self.job
        )
        if self.remote:
            _open.add(self)
        if hosting is not None and hosting.keeps:
            # A store that is dropped without close() lets go of its log.
            end = weakref.finalize(self, _end_dropped, core, hosting)
            end.atexit = False

    @property
    def remote(self) -> bool:
        """Whether the tables are behind messages."""
        return bool(self.addresses)

    @property
    def inside(self) -> bool:
        """Whether all rows are those of this process alone."""
        hosting = self.hosting
        return not self.remote or (hosting is not None and hosting.keeps)

    @property
    def namespace(self) -> str:
        """Of tables behind messages; "": they are embedded."""
        return self._key.namespace if self._key else ""

    @property
    def run(self) -> str:
        """The job's name, of which the streams of its ranks have theirs."""
        return self._key.job if self._key else ""

    def number_in(self, run: str, ranks: int, had: Set[int]) -> int | None:
        """Which of the stores of a process this one is in a job: the same
        one as here, or the first that no other store of this process is,
        and that had updates if these streams had any. None: none of them."""
        assert self._key is not None
        own = self._key.number
        which: int
        for which in (own, *range(_STORES_MAX)):
            key = self._key._replace(job=run, number=which)
            with _streams_lock:
                taken = key != self._key and key in _streams
            streams = {key._replace(rank=r).stream() for r in range(ranks)}
            if not taken and (not had or had & streams):
                return which
        return None

    def adopt(self, run: str, number: int | None = None) -> None:
        """From now on the updates of this store are in the stream that the
        store of this number (default: its own) has in this job."""
        assert self._key is not None
        before = self._key
        number = before.number if number is None else number
        self._key = before._replace(job=run, number=number)
        with _streams_lock:
            _streams.discard(before)
            _streams.add(self._key)
        self._inherits = self.job.rank == 0 and self.hosting is None

    def inherit(self, timeout: float | None) -> None:
        """Rank 0 of a job completes what ranks beyond its world, of an
        earlier run with more of them, left at some servers only. Once.

        Raises:
            UpdatesLost: there was such an update.
        """
        if not self._inherits:
            return
        handle, rank = self.core.handle, self.job.world
        # The first one that no server has an update of is the end.
        while _core.cluster_inherit(
            handle, self.stream(self.run, rank), rank, timeout or 0.0
        ):
            rank += 1
        self._inherits = False
        if rank > self.job.world:
            _core.cluster_tell_lost(handle)

    def ask(self, what: Callable[..., T], shard: int, *args: Any) -> T:
        """A request of ``_core`` to one shard, of (handle, shard, ...). It is
        made again where the server was started again since we spoke."""
        handle = self.core.handle
        try:
            return what(handle, shard, *args)
        except errors.StaleLineage:
            _core.cluster_repair(handle, shard)
            return what(handle, shard, *args)

    def stream(self, run: str, rank: int, number: int | None = None) -> int:
        """The stream of the updates of a rank's store in a job: of this
        number among those of its process, by default that of this one."""
        assert self._key is not None
        number = self._key.number if number is None else number
        key = self._key._replace(job=run, rank=rank, number=number)
        return key.stream()

    @property
    def in_step(self) -> bool:
        """Whether a synchronous pass over all ranks is open."""
        return self._passes > 0 and not self.closed

    def join(self, stream: int, by_batch: bool) -> bool:
        """A synchronous pass begins: with all ranks, if there are several.

        Returns:
            Whether :meth:`leave` must follow.
        """
        if not self.remote or self.job.world == 1:
            return False
        handle = self.core.handle
        if self._passes == 0:
            self._end_others()
            self._agree_on_step(handle)
        self._passes += 1
        try:
            _core.cluster_sync_stream(handle, stream, by_batch)
        except BaseException:
            self.leave(settle=False)
            raise
        return True

    def begin_steps(self) -> None:
        """An update begins. If it is of a loop without a loader, the ranks
        take their steps together from the first one on, as in a synchronous
        pass: every rank makes as many updates.

        Raises:
            DeadlineExceeded: a rank makes none.
        """
        if not self.remote or self.job.world == 1 or self.passes.is_open:
            return
        with self._steps_lock:
            if not self._together and _core.cluster_take_plain(
                self.core.handle
            ):
                self._begin_steps()

    def _begin_steps(self) -> None:
        group = group_here()
        job = self.job.rank, self.job.world
        if group is None or job != (group.get_rank(), group.get_world_size()):
            self._warn(
                f"rank {job[0]} of {job[1]} trains without a DataLoader and "
                "without a process group of these ranks: lookups may hold "
                "updates of other ranks' present steps. For steps together "
                "call torch.distributed.init_process_group() before the "
                "Store is made; for a bound iterate a persia.DataLoader"
            )
            return
        if any(other.in_step for other in self._others()):
            self._warn(
                "a store trains without a DataLoader, in a synchronous pass "
                "of another store at the same servers: its lookups may hold "
                "updates of other ranks' present steps. Declare the tables "
                "of both in one store (a table may have an optimizer of its "
                "own)"
            )
            return
        self._end_others()
        self._meetings += 1
        keys = Keys(f"{self._prefix}/{self._meetings}")
        why = (
            "has made no update; without a persia.DataLoader all ranks make "
            "as many (a backward, or a store.optimizer.step()). One with "
            "staleness=1 waits for no other rank"
        )
        keys.gather("here", 0, self.job, why)  # none is in an earlier step
        applied, error = 0, None
        try:
            applied = _core.cluster_join(self.core.handle)
        except errors.PersiaError as caught:
            error = caught
        all_of_it = keys.gather("joined", [applied, not error], self.job, why)
        failed = [r for r, (_, joined) in enumerate(all_of_it) if not joined]
        if failed:
            if error is None:
                error = _not_joined(failed[0])
                with contextlib.suppress(errors.PersiaError):
                    _core.cluster_leave(self.core.handle, False)
            raise error
        last = max(step for step, _ in all_of_it)
        _core.cluster_sync(self.core.handle, last, *job)
        self._together = True

    def end_steps(self, settle: bool = True) -> None:
        """What follows is no loop without a loader, or the process ends: the
        other ranks continue without this one."""
        if self.remote and not self.closed:
            _core.cluster_take_plain(self.core.handle)
        if self._together:
            self._together = False
            if not self.closed:
                _core.cluster_leave(self.core.handle, settle)

    def _others(self) -> list[Connection]:
        """The stores of this process at some of the same servers, which count
        the steps of a rank, not of its stores; this one, too."""
        mine = set(self.addresses)
        return [o for o in list(_open) if mine & set(o.addresses)]

    def _end_others(self) -> None:
        for other in self._others():
            if other._together:
                other.end_steps()
                if other._meetings > 1 and other is not self:
                    other._warn(
                        "two stores of this process train in turns at the "
                        "same servers, and each turn waits for all ranks: "
                        "declare the tables of both in one store (a table "
                        "may have an optimizer of its own)"
                    )

    def _warn(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            warn(text)

    def _agree_on_step(self, handle: int) -> None:
        """All ranks join at all servers; then all continue behind the same
        step."""
        rank, world = self.job.rank, self.job.world
        group = need_group("a synchronous pass (staleness=0) over all ranks")
        if (group.get_rank(), group.get_world_size()) != (rank, world):
            raise errors.InvalidArgument(
                f"this store is of rank {rank} of {world}, but "
                f"torch.distributed of rank {group.get_rank()} of "
                f"{group.get_world_size()}"
            )
        all_max([0])  # none is in an earlier pass any more
        applied, error, joins = 0, None, False
        try:
            self.check_alone()
            joins = True
            applied = _core.cluster_join(handle)
        except errors.PersiaError as caught:
            error = caught
        try:
            failed = -1 if error is None else rank
            last, failed = all_max([applied, failed])
            if error is None and failed >= 0:
                error = _not_joined(failed)
            if error is not None:
                raise error
        except BaseException:
            # Not the pass of another store.
            with contextlib.suppress(errors.PersiaError):
                if joins:
                    _core.cluster_leave(handle, False)
            raise
        _core.cluster_sync(handle, last, rank, world)

    def check_alone(self) -> None:
        for other in self._others():
            both = set(self.addresses) & set(other.addresses)
            if other.in_step:
                raise errors.InvalidArgument(
                    "another store of this process is in a synchronous pass "
                    f"over all ranks at {min(both)}: end that pass first, or "
                    "declare the tables of both in one store (a table may "
                    "have an optimizer of its own)"
                )

    def leave(self, settle: bool) -> None:
        """The pass ends; the other ranks continue without this one. Not
        settle: because of an error, which does not wait long for servers."""
        self._passes -= 1
        if self._passes == 0 and not self.closed:
            _core.cluster_leave(self.core.handle, settle)

    def close(self, failed: bool = False) -> None:
        """Ends it; with tables on the ranks, when all ranks have. After a
        failure the other ranks may wait for this one instead: then its shard
        serves until the process ends."""
        if (self._passes or self._together) and not self.closed:
            with contextlib.suppress(errors.PersiaError):
                _core.cluster_leave(self.core.handle, True)
        self.passes.close()
        self.closed = True
        self.core.close()
        if self._key is not None:
            _drop_stream(self._key)
            self._key = None
        if self.hosting is not None:
            self.hosting.close(failed)

    def __del__(self, at_end: Callable[[], bool] = sys.is_finalizing) -> None:
        # At the end of the interpreter other functions may be gone.
        if getattr(self, "_key", None) is not None and not at_end():
            assert self._key is not None
            _drop_stream(self._key)


def _end_dropped(core: _core.Store, hosting: Hosting) -> None:
    core.close()
    hosting.close()


def _not_joined(rank: int) -> errors.PersiaError:
    return errors.Unavailable(
        f"rank {rank} could not join the steps of all ranks; its own error "
        "says why"
    )


# ---- the end of a process ---------------------------------------------------

_open: weakref.WeakSet[Connection] = weakref.WeakSet()  # remote ones
_pid = os.getpid()


def _at_exit() -> None:
    """Updates in flight are applied; and the other ranks may still
    need the shard that is here, unless this process failed."""
    if os.getpid() != _pid:
        return
    failed = getattr(sys, "last_value", None) is not None
    limit = _LAST_SECONDS if failed else None
    alive = [c for c in _open if not c.closed]
    ends: list[Callable[[], object]] = [
        partial(c.core.flush, limit) for c in alive
    ]
    ends += [partial(c.end_steps, settle=not failed) for c in alive]
    if not failed:
        ends.append(close_hosted)
    for end in ends:
        try:
            end()
        except Exception as error:
            warnings.warn(f"the end of a Store: {error}", stacklevel=1)


atexit.register(_at_exit)
