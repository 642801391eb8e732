"""Ranks of a job that are threads of a test: each has a store of its own, and
trains in steps of all (staleness=0).

A rank that is killed never speaks again: what it had sent is left where it
is, and its connections are cut. As many others with the same job take their
places.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest

from persia import errors
from persia.distributed import cluster
from tests.remote import Servers
from tests.roles import Workers
from tests.roles_told.gate import Gate
from tests.roles_told.job import Trainer
from tests.test_roles_failures import wait_for

_here = threading.local()


class Group:
    """Stands for torch.distributed."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._meet = threading.Barrier(world)
        self._values: list[Sequence[int]] = [()] * world

    def get_rank(self) -> int:
        rank: int = _here.rank
        return rank

    def get_world_size(self) -> int:
        return self.world

    def all_max(self, values: Sequence[int]) -> list[int]:
        self._values[_here.rank] = list(values)
        self._meet.wait(30)
        out = [max(place) for place in zip(*self._values, strict=True)]
        self._meet.wait(30)
        return out


class Killed(BaseException):
    """The rank is to do nothing more."""


class Rank:
    """One of them.

    Attributes:
        trainer: its store and model.
        error: what its thread ended with.
    """

    def __init__(
        self, group: Group, rank: int, make: Callable[[], Trainer]
    ) -> None:
        self.trainer: Trainer
        self.error: BaseException | None = None
        self.rank = rank
        self._group, self._make = group, make
        self._most = 0
        self._asked = threading.Condition()
        self._killed = False
        self.steps = 0  # whose backward has begun
        self.taken = 0  # batches that the loop has
        self.ended = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        _here.rank, _here.group = self.rank, self._group
        try:
            self.trainer = self._make()
            self._train()
        except Killed:
            threading.Event().wait()  # with all that it has
        except BaseException as error:
            self.error = error

    def _train(self) -> None:
        trainer = self.trainer
        trainer.open(staleness=0)
        while (one := trainer.next()) is not None:
            self.taken += 1
            with self._asked:
                while self.steps >= self._most and not self._killed:
                    self._asked.wait()
                if self._killed:
                    raise Killed
            self.steps += 1
            trainer.step(one)
            del one
        trainer.flush()
        self.ended = True

    def allow(self, steps: int) -> None:
        """Trains until it has so many."""
        with self._asked:
            self._most = steps
            self._asked.notify()

    def kill(self) -> None:
        """After what it is doing."""
        with self._asked:
            self._killed = True
            self._asked.notify()


class Ways:
    """Addresses, as servers and workers have them."""

    def __init__(self, addresses: list[str]) -> None:
        self.addresses = addresses

    @property
    def text(self) -> str:
        return ",".join(self.addresses)


class Ranks:
    """Those of a job.

    Attributes:
        now: the processes of today.
    """

    def __init__(
        self, servers: Servers, workers: Workers, world: int = 2, **more: Any
    ) -> None:
        self._servers, self._workers = servers, workers
        self._more = more
        self._gates: list[Gate] = []
        self.world = world
        self.now: list[Rank] = []
        self.start()

    def start(self) -> None:
        """New processes."""
        group = Group(self.world)
        self._gates = []
        servers = Ways(self._through(self._servers.addresses))
        workers = Ways(self._through(self._workers.addresses))
        self.now = [
            Rank(group, i, partial(self._make, servers, workers, i))
            for i in range(self.world)
        ]

    def _through(self, addresses: Sequence[str]) -> list[str]:
        gates = [Gate(address) for address in addresses]
        self._gates += gates
        return [gate.address for gate in gates]

    def _make(self, servers: Any, workers: Any, rank: int) -> Trainer:
        return Trainer(
            servers,
            workers,
            job="told",
            rank=rank,
            world_size=self.world,
            **self._more,
        )

    def step(self, *steps: int) -> None:
        """Each rank has taken a batch for the step behind so many of its
        own, and has begun the backward of these."""
        for one, most in zip(self.now, steps, strict=True):
            one.allow(most)
        for one, most in zip(self.now, steps, strict=True):
            wait_for(lambda one=one, most=most: one.error or one.steps == most)
            assert one.error is None, one.error

    def kill(self) -> None:
        """All of them at once."""
        for one in self.now:
            one.kill()
        for gate in self._gates:
            gate.cut()

    def end(self) -> None:
        """They train all that there is."""
        for one in self.now:
            one.allow(1 << 62)
        for one in self.now:
            wait_for(lambda one=one: one.error or one.ended)
        # A rank without the others finds no batch: that is not the cause.
        found = [one.error for one in self.now if one.error is not None]
        found.sort(key=lambda error: isinstance(error, errors.Unavailable))
        if found:
            raise found[0]


@pytest.fixture
def threads_are_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of processes with a process group."""

    def need_group(why: str) -> Group:
        group: Group = _here.group
        return group

    def all_max(values: Sequence[int]) -> list[int]:
        return need_group("").all_max(values)

    monkeypatch.setattr(cluster, "need_group", need_group)
    monkeypatch.setattr(cluster, "all_max", all_max)
    monkeypatch.setattr(
        cluster.Connection, "check_alone", lambda connection: None
    )
