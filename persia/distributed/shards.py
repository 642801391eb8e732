"""The process of ``persia serve ps``: its shards behind one address."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from persia import _core
from persia.base.counts import counted
from persia.base.logs import describe, say
from persia.base.patience import patiently
from persia.base.signals import Signals
from persia.base.traces import begin_traces
from persia.distributed import moves
from persia.distributed.peers import peers
from persia.distributed.places import Gone, Places, Prepared, joined
from persia.distributed.renewal import renewal
from persia.distributed.server import (
    SAVE_SECONDS,
    ServeConfig,
    Server,
    find_join,
    find_shards,
    listen,
)
from persia.distributed.serving import page_of, warn_of
from persia.errors import Closed, InvalidArgument, PersiaError

if TYPE_CHECKING:
    from persia.prometheus import ServerCollector

_ANSWER = 10.0  # seconds that the server has which another one joins
_ROOM = 64  # shards whose requests a server takes at once


def these(numbers: Sequence[int], shards: int) -> str:
    """As text: shard 0 of 2, shards 0 to 3 of 8, or shards 0, 5 of 8."""
    if not numbers:
        return f"no shard of {shards} yet"
    first, last = numbers[0], numbers[-1]
    which = f"shard {first}" if first == last else f"shards {first} to {last}"
    if last - first >= len(numbers):
        which = "shards " + ", ".join(map(str, numbers))
    return f"{which} of {shards}"


def find_job(config: ServeConfig, join: str) -> tuple[int, list[int]]:
    """How many shards the job has that a server joins, and those of which
    the server at this address knows."""
    asked = moves.channel(join, moves.towards(config), _ANSWER)
    with contextlib.closing(asked):
        answer = patiently(lambda: asked.hello(config.namespace, 0), _ANSWER)
    return answer["shards"], answer["here"]


class Shards:
    """The shards of one process, which share its threads, its memory limit
    and its address.

    Each has rows, a log and what it saves on exit of its own, under its own
    number: a job may be started again with another number of servers. While
    it runs shards may go to another server, and arrive from one.

    Attributes:
        servers: one :class:`Server` a shard, by their numbers.
        count: shards of the job.
        core: what listens; it has no shard.
    """

    def __init__(self, config: ServeConfig) -> None:
        self.config = config
        self._join = find_join(config)
        self._elsewhere: list[int] = []
        numbers, self.count = (
            find_shards(config)
            if self._join is None
            else (range(0), self._joined() or 0)
        )
        if self._join is not None and not self.count:
            self.count, self._elsewhere = find_job(config, self._join)
        if self._join and config.shards not in (None, self.count):
            raise InvalidArgument(
                f"`shards={config.shards}`: the job of {self._join} has "
                f"{self.count} shards"
            )
        self._lock = threading.Lock()
        self.servers: list[Server] = []
        self.is_ready = False
        self._cuts: dict[int, contextlib.ExitStack] | None = None
        self.places = (
            None
            if config.log is None
            else Places(
                Path(config.log), config.namespace, numbers, self.count
            )
        )
        if self._join is not None and self.places is not None:
            self._elsewhere = self._elsewhere or self._ask_again()
        self._threads = config.threads or len(os.sched_getaffinity(0))
        others = len(numbers) - 1 if numbers else self.count // 2
        self.core = _core.Server(
            namespace=config.namespace,
            shard=0,
            shards=self.count,
            threads=self._threads,
            memory_limit=config.memory_limit or 0,
            lineage=0,
            message_limit=config.message_limit,
            checkpoints=None,
            others=others,
        )
        self._moves: moves.Moves | None = None
        here: dict[int, Path | None] = dict.fromkeys(numbers)
        if self.places is not None:
            here = {**self.places.here()}
        self._name = these(list(here), self.count)
        try:
            for number, log in here.items():
                self.servers.append(
                    Server(config, (number, self.count), self.core, log=log)
                )
        except BaseException:
            self.close()
            raise

    def __str__(self) -> str:
        return self._name

    def _joined(self) -> int | None:
        """The shards of the job, where its own disk says it."""
        log = self.config.log
        return (
            None if log is None else joined(Path(log), self.config.namespace)
        )

    def _ask_again(self) -> list[int]:
        """The shards that clients find at the server that it joins, where it
        is started again and has none: what its disk knows is older."""
        assert self._join is not None and self.places is not None
        if self.places.here():
            return []
        with contextlib.suppress(PersiaError):  # that one may start, too
            return find_job(self.config, self._join)[1]
        return []

    def folder(self, of: Gone | Prepared) -> Path:
        """Of the log of a shard that may come back, or arrive."""
        assert self.places is not None
        return self.places.folder(of)

    def here(self) -> list[int]:
        """The numbers of its shards."""
        return [server.shard for server in list(self.servers)]

    def server(self, shard: int) -> Server:
        """The one of a shard."""
        return next(s for s in list(self.servers) if s.shard == shard)

    def take(self, server: Server) -> None:
        """One more shard."""
        with self._lock:
            self.servers = sorted(
                [*self.servers, server], key=lambda s: s.shard
            )
            self._doors()
            self._cut(server)

    def forget(self, server: Server) -> None:
        """One that is another server's now."""
        with self._lock:
            self.servers = [s for s in self.servers if s is not server]
            server.door = None
            self._doors()
            cut = (self._cuts or {}).pop(server.shard, None)
        if cut is not None:
            cut.close()

    def _doors(self) -> None:
        """The first one counts connections."""
        for i, server in enumerate(self.servers):
            server.door = self.core if i == 0 else None

    @property
    def _durable(self) -> bool:
        return self.config.durable != "off"

    def start(self) -> str:
        """Listens; the address. Without logs clients are answered."""
        self._doors()
        address = listen(
            self.config,
            self.core,
            self.config.security(self.config.admin_token_file),
            # One may wait for the disk of the log, and hang there.
            self._threads + self._durable,
            self.servers,
            min(max(self.count, 1), _ROOM),
        )
        for shard in self._elsewhere:  # clients may begin to ask here
            assert self._join is not None
            self.core.place(shard, self._join, 0)
        self._moves = moves.Moves(self)
        return address

    def ready(self) -> None:
        """From now on clients are answered."""
        for server in reversed(self.servers):  # the first one is asked first
            server.ready()
        self.core.health(True)
        self.is_ready = True

    def bring_back(self) -> None:
        """Brings back the rows of their logs, or of the checkpoint that the
        configuration names."""
        for server in self.servers:
            recovered = server.recover()
            if self.config.restore is None or self._join or recovered:
                continue
            rows = server.restore()
            what = "no checkpoint" if rows is None else counted(rows, "row")
            say(f"restored {self.config.restore}: {what}")

    def stats(self) -> dict[int, dict[str, Any]]:
        """Those of each shard that is here."""
        found = {}
        for server in list(self.servers):
            with contextlib.suppress(Closed):  # it has gone just now
                found[server.shard] = server.stats()
        return found

    def prepare(self) -> str:
        """Brings the rows back and listens; the address. Clients of a server
        that replays its log see how far it is."""
        address = self.start() if self._durable else ""
        if self.config.save_on_exit is not None:
            for server in self.servers:
                server.check_save(self.config.save_on_exit)
        self.bring_back()
        return address or self.start()

    def collector(self) -> ServerCollector:
        """Its counters, for Prometheus."""
        from persia.prometheus import ServerCollector

        return ServerCollector(
            *(self.stats, self.core, self._threads),
            *(self.config.namespace, self.count),
        )

    @contextlib.contextmanager
    def cutting(self) -> Iterator[None]:
        """Keeps the logs short meanwhile."""
        with self._lock:
            self._cuts = {}
            for server in self.servers:
                self._cut(server)
        try:
            yield
        finally:
            cuts, self._cuts = self._cuts, None
            for cut in cuts.values():
                cut.close()

    def _cut(self, server: Server) -> None:
        if self._cuts is not None:
            self._cuts[server.shard] = contextlib.ExitStack()
            self._cuts[server.shard].enter_context(server.cutting())

    def stop(self, grace: float) -> None:
        """No more requests; those in flight have so many seconds."""
        self._end_moves()
        for server in self.servers:
            if server.log is not None:
                server.log.end_cuts()
        self.core.stop(grace)

    def _end_moves(self) -> None:
        if self._moves is not None:
            self._moves.close()
        self._moves = None

    def save(self, name: str) -> int:
        """Writes the rows of each shard; how many."""
        return sum(server.save(name) for server in self.servers)

    def close(self) -> None:
        """Frees the rows."""
        self._end_moves()
        for server in reversed(self.servers):
            server.close()
        self.core.close()
        if self.places is not None:
            self.places.close()


def serve(config: ServeConfig) -> None:
    """Serves until SIGTERM or SIGINT; a second one ends it at once.

    One that arrives earlier, while rows are being restored, ends it without
    ``save_on_exit``: the rows that it would write are not all there.
    """
    least = SAVE_SECONDS if config.save_on_exit is not None else 0.0
    unserved = "nothing was served, nothing is saved"
    begin_traces("server")
    describe(role="server", namespace=config.namespace)
    with (
        Signals(max(config.grace, least), unserved) as signals,
        contextlib.closing(Shards(config)) as shards,
    ):
        if page := page_of(config, signals.health):
            page.add(shards.collector())
        address = shards.prepare()
        signals.keep()
        with shards.cutting():
            _run(shards, address, signals)


def _run(shards: Shards, address: str, signals: Signals) -> None:
    config, name = shards.config, shards.config.save_on_exit
    shards.ready()
    peers.watch()
    warn_of(config)
    undone = "not all was done"
    if name is not None:
        signals.status = 1
        undone = (
            f"the rows were not saved into {config.checkpoints}/{name}; give "
            "a longer `grace`, if its disk is only slow"
        )
    renewal.at_hangup()
    signals.serve(f"serving {shards} on {address}", undone)
    # The save is to have half of the time at least.
    shards.stop(signals.share(config.grace * (0.9 if name is None else 0.5)))
    if name is not None:
        rows = shards.save(name)
        signals.status = 0
        say(f"saved {name}: {counted(rows, 'row')}")
