"""The process of ``persia serve ps``: its shards behind one address."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from persia.base.health import Health
from persia.base.logs import say
from persia.distributed.server import (
    SAVE_SECONDS,
    ServeConfig,
    Server,
    find_shards,
)
from persia.distributed.serving import Signals, Stopped, page_of, warn_of

if TYPE_CHECKING:
    from persia.prometheus import ServerCollector


def these(numbers: range, shards: int) -> str:
    """As text: shard 0 of 2, or shards 0 to 3 of 8."""
    first, last = numbers[0], numbers[-1]
    which = f"shard {first}" if first == last else f"shards {first} to {last}"
    return f"{which} of {shards}"


class Shards:
    """The shards of one process, which share its threads, its memory limit
    and its address.

    Each has rows, a log and what it saves on exit of its own, under its own
    number: a job may be started again with another number of servers.

    Attributes:
        servers: one :class:`Server` a shard.
    """

    def __init__(self, config: ServeConfig) -> None:
        self.config = config
        self._numbers, self._shards = find_shards(config)
        self.servers: list[Server] = []
        try:
            for number in self._numbers:
                first = self.servers[0] if self.servers else None
                place = (number, self._shards)
                others = len(self._numbers) - 1
                self.servers.append(Server(config, place, first, others))
        except BaseException:
            self.close()
            raise

    def __str__(self) -> str:
        return these(self._numbers, self._shards)

    @property
    def _durable(self) -> bool:
        return self.config.durable != "off"

    def start(self) -> str:
        """Listens; the address. Without logs clients are answered."""
        return self.servers[0].start(self.servers[1:])

    def ready(self) -> None:
        """From now on clients are answered."""
        for server in reversed(self.servers):  # the first one is asked first
            server.ready()

    def bring_back(self) -> None:
        """Brings back the rows of their logs, or of the checkpoint that the
        configuration names."""
        for server in self.servers:
            recovered = server.recover()
            if self.config.restore is None or recovered:
                continue
            rows = server.restore()
            what = "none" if rows is None else f"{rows:,}"
            say(f"restored {self.config.restore}: {what} rows")

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
            [server.stats for server in self.servers],
            self.config.namespace,
            list(self._numbers),
            self._shards,
        )

    def cutting(self) -> contextlib.AbstractContextManager[Any]:
        """Keeps the logs short meanwhile."""
        with contextlib.ExitStack() as stack:
            for server in self.servers:
                stack.enter_context(server.cutting())
            return stack.pop_all()

    def stop(self, grace: float) -> None:
        """No more requests; those in flight have so many seconds."""
        for server in self.servers[1:]:
            if server.log is not None:
                server.log.end_cuts()
        self.servers[0].stop(grace)

    def save(self, name: str) -> int:
        """Writes the rows of each shard; how many."""
        return sum(server.save(name) for server in self.servers)

    def close(self) -> None:
        """Frees the rows."""
        for server in reversed(self.servers):
            server.close()


def serve(config: ServeConfig) -> None:
    """Serves until SIGTERM or SIGINT; a second one ends it at once.

    One that arrives earlier, while rows are being restored, ends it without
    ``save_on_exit``: the rows that it would write are not all there.
    """
    least = SAVE_SECONDS if config.save_on_exit is not None else 0.0
    health = Health()
    with Signals(max(config.grace, least)) as signals:
        try:
            with contextlib.closing(Shards(config)) as shards:
                if page := page_of(config, health):
                    page.add(shards.collector())
                address = shards.prepare()
                signals.keep()
                with shards.cutting():
                    _run(shards, address, signals, health)
        except Stopped:
            say("stopping: nothing was served, nothing is saved")


def _run(
    shards: Shards, address: str, signals: Signals, health: Health
) -> None:
    config = shards.config
    shards.ready()
    health.serves()
    warn_of(config)
    say(f"serving {shards} on {address}")
    signals.wait()
    health.ends()
    name = config.save_on_exit
    if name is not None:
        signals.status = 1
        signals.what = (
            f"the rows were not saved into {config.checkpoints}/{name}; give "
            "a longer `grace`, if its disk is only slow"
        )
    say("stopping")
    # The save is to have half of the time at least.
    most = config.grace * (0.9 if name is None else 0.5)
    shards.stop(min(most, signals.left))
    if name is not None:
        rows = shards.save(name)
        signals.status = 0
        say(f"saved {name}: {rows:,} rows")
