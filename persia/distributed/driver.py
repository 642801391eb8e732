"""What ``persia launch --autoscale`` changes on this machine, one thing at a
time: it starts processes, has shards moved, and ends processes."""

from __future__ import annotations

import dataclasses
import math
import os
import signal
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path

from persia.distributed.autoscale import Autoscaler
from persia.distributed.load import LOADER, SERVER, WORKER, Decision
from persia.distributed.processes import Process
from persia.errors import PersiaError

_NOTICE = 2.0  # seconds until all have read the list of workers again
_TRIES = 3  # of a command that moves shards
_PAUSE = 5.0  # seconds between them
_LATER = 30.0  # seconds until shards are shared that could not be moved
Steps = Generator[None, None, None]


class _Failed(Exception):
    """A change could not be made."""


@dataclasses.dataclass
class Role:
    """The processes of a role.

    Attributes:
        processes: those that are to stay, the oldest first.
        begin: starts one more, with the lowest name that is free.
        ready: names of those that do their work.
        addresses: of those that serve, by name.
    """

    processes: list[Process]
    begin: Callable[[], Process]
    ready: set[str]
    addresses: dict[str, str] = dataclasses.field(default_factory=dict)

    def here(self) -> list[str]:
        """The addresses of those that stay."""
        return [self.addresses[p.name] for p in self.processes]


class Driver:
    """Carries out what an :class:`Autoscaler` decides.

    Args:
        scaler: decides.
        roles: what is there of each role.
        move: starts the command that moves shards: the addresses of the
            servers, and how many of the first ones are to have shards.
        tell: prints a line.
        retired: gets the pids of processes whose end is no failure.
        start: seconds that a process has until it serves.
        workers: the file with the list of embedding workers, or None.
    """

    def __init__(
        self,
        scaler: Autoscaler,
        roles: Mapping[str, Role],
        move: Callable[[Sequence[str], int], Process],
        tell: Callable[[str], None],
        retired: set[int],
        start: float,
        workers: Path | None,
    ) -> None:
        self.scaler, self.roles = scaler, roles
        self._mover, self._tell, self._retired = move, tell, retired
        self._start, self._workers = start, workers
        self._steps: Steps | None = None
        self._decision: Decision | None = None
        self._unshared = math.inf  # when shards are to be shared again
        self.mover: Process | None = None

    def step(self, ports: Sequence[int]) -> None:
        """Continues what was begun; asks and decides, where that is over.

        Args:
            ports: of the metrics of servers and embedding workers.
        """
        if self._steps is None and time.monotonic() >= self._unshared:
            self.share()
        counts = {
            name: len(role.processes)
            for name, role in self.roles.items()
            # A loader ends when no part is left: then there is no use in more.
            if name != LOADER or all(p.status is None for p in role.processes)
        }
        ready = self._steps is None and all(
            p.name in role.ready
            for role in self.roles.values()
            for p in role.processes
        )
        for said in self.scaler.ask(ports, counts, ready):
            self._tell(str(said))
            if isinstance(said, Decision):
                self._decision = said
                self._steps = self._change(said)
        self._continue()

    def share(self) -> None:
        """Has all servers share the shards: an earlier run may have ended in
        the middle of a change, or it failed there."""
        self._unshared = math.inf
        count = len(self.roles[SERVER].processes)
        self._decision = Decision(SERVER, count, count, 1.0)
        self._steps = self._more_servers(self._decision)

    @property
    def wakes(self) -> float:
        """When it is to be called at the latest, monotonic seconds."""
        soon = time.monotonic() + (0.1 if self._steps else 3600.0)
        return min(self.scaler.due, soon)

    def _continue(self) -> None:
        if self._steps is None:
            return
        assert self._decision is not None
        try:
            next(self._steps)
        except StopIteration:
            self._steps = None
        except _Failed as failed:
            self._steps = None
            self._tell(self.scaler.failed(self._decision, str(failed)))

    # ---- changes

    def _change(self, decision: Decision) -> Steps:
        grows = decision.after > decision.before
        if decision.role == LOADER:
            return self._loaders(decision)
        if decision.role == WORKER:
            return self._more_workers() if grows else self._less_workers()
        assert decision.role == SERVER
        return (
            self._more_servers(decision)
            if grows
            else self._less_servers(decision)
        )

    def _loaders(self, decision: Decision) -> Steps:
        role = self.roles[LOADER]
        for _ in range(decision.before, decision.after):
            role.processes.append(role.begin())
        self._retire(role, decision.after)
        yield

    def _retire(self, role: Role, keep: int) -> list[Process]:
        """Ends all but the first ones; those."""
        some = role.processes[keep:]
        del role.processes[keep:]
        for process in some:
            self._retired.add(process.pid)
            process.signal(signal.SIGTERM)
        return some

    def _joined(self, role: Role, number: int) -> Generator[None, None, None]:
        """Starts so many, and waits until they serve: from then on their end
        is a failure."""
        some: list[Process] = []
        try:
            for _ in range(number):
                some.append(role.begin())
                self._retired.add(some[-1].pid)
        except PersiaError as error:
            for process in some:
                process.signal(signal.SIGTERM)
            raise _Failed(str(error)) from None
        until = time.monotonic() + self._start
        while any(p.name not in role.ready for p in some):
            ended = next((p for p in some if p.status is not None), None)
            if ended is not None or time.monotonic() > until:
                for process in some:
                    process.signal(signal.SIGTERM)
                late = f"does not serve after {self._start:g} s"
                raise _Failed(
                    some[0].story(late)
                    if ended is None
                    else ended.story(ended.end())
                )
            yield
        self._retired.difference_update(p.pid for p in some)
        role.processes += some

    def _list(self) -> None:
        """Writes the list of workers, as a whole."""
        assert self._workers is not None
        new = self._workers.with_suffix(".new")
        new.write_text("\n".join(self.roles[WORKER].here()) + "\n")
        os.replace(new, self._workers)

    def _more_workers(self) -> Steps:
        assert self._decision is not None
        more = self._decision.after - self._decision.before
        yield from self._joined(self.roles[WORKER], more)
        self._list()

    def _less_workers(self) -> Steps:
        assert self._decision is not None
        role, keep = self.roles[WORKER], self._decision.after
        leaving = role.processes[keep:]
        del role.processes[keep:]
        self._retired.update(p.pid for p in leaving)
        self._list()
        until = time.monotonic() + _NOTICE
        while time.monotonic() < until:
            yield
        for process in leaving:
            process.signal(signal.SIGTERM)
        yield from self._ended(leaving)

    @staticmethod
    def _ended(some: Sequence[Process]) -> Steps:
        while any(p.status is None for p in some):
            yield

    def _more_servers(self, decision: Decision) -> Steps:
        role = self.roles[SERVER]
        yield from self._joined(role, decision.after - decision.before)
        yield from self._move(role.here(), decision.after)

    def _less_servers(self, decision: Decision) -> Steps:
        role = self.roles[SERVER]
        yield from self._move(role.here(), decision.after)
        yield from self._ended(self._retire(role, decision.after))

    def _move(self, addresses: Sequence[str], to: int) -> Steps:
        """Has shards moved: the first ``to`` servers have all of them. What
        failed once may succeed later, as when a checkpoint is saved."""
        for tries in range(_TRIES):
            until = time.monotonic() + (_PAUSE if tries else 0.0)
            while time.monotonic() < until:
                yield
            mover = self.mover = self._mover(addresses, to)
            yield from self._ended([mover])
            self.mover = None
            if not mover.status:
                return
        # Servers that have joined have no shard yet.
        assert self._decision is not None
        count = len(self.roles[SERVER].processes)
        self._decision = dataclasses.replace(self._decision, before=count)
        self._unshared = time.monotonic() + _LATER
        raise _Failed(mover.story(mover.end()))
