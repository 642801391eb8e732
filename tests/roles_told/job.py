"""A job of four roles in the process of a test, whose rows count.

Each batch has a row of its own on each server. The rows begin at 0, and an
update of a batch adds 1 to them: a row is how often its batch was applied
there.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

import persia
from persia.data import Sender
from persia.loop.stream import Taking
from persia.torture.verdict import shard_of
from tests.remote import Servers
from tests.roles import Workers
from tests.test_roles import in_thread

TABLE = persia.EmbeddingBagConfig("t", 4, ["user"], init=0.0)
ROWS = persia.EmbeddingConfig("t", 4, feature_names=["user"], init=0.0)


@functools.cache
def ids_of(n: int, shards: int = 2) -> tuple[int, ...]:
    """Of batch n: its own one of each shard."""
    found: list[list[int]] = [[] for _ in range(shards)]
    i = 0
    while any(len(ids) <= n for ids in found):
        found[shard_of(i, shards)].append(i)
        i += 1
    return tuple(ids[n] for ids in found)


def batch(n: int, shards: int = 2) -> persia.Batch:
    """One that has its number as label."""
    ids = torch.tensor(ids_of(n, shards))
    label = torch.full((shards,), float(n))
    return persia.Batch(None, persia.JaggedBatch(["user"], ids), label)


def number_of(one: persia.Batch) -> int:
    """Of a batch."""
    assert one.label is not None
    return int(one.label[0])


def send(sender: Sender, first: int, last: int) -> None:
    """Batches of these numbers, without the last."""
    for n in range(first, last):
        sender.send(batch(n))


class Trainer:
    """One rank.

    Attributes:
        seen: the numbers of the batches that it trained, in order.
        told: the UpdatesLost that it caught.
    """

    def __init__(
        self,
        servers: Servers,
        workers: Workers | None,
        *,
        rows: bool = False,
        timeout: float = 8.0,
        namespace: str = "default",
        of: str | None = None,
        **more: Any,
    ) -> None:
        self.store = persia.Store(
            persia.optim.SGD(lr=1.0),
            servers=servers.text,
            namespace=namespace,
            grad_division=False,
            timeout=timeout,
            **more,
        )
        self.model: Any = (
            persia.EmbeddingCollection(store=self.store, tables=[ROWS])
            if rows
            else persia.EmbeddingBagCollection(
                store=self.store, tables=[TABLE]
            )
        )
        self.stream: Any = workers and persia.Stream(
            workers.addresses, timeout=timeout, move_after=1, job=of
        )
        self._rows = rows
        self._pass: Any = None
        self._staleness: int | None = None
        self.seen: list[int] = []
        self.told: list[persia.errors.UpdatesLost] = []

    def open(self, staleness: int | None = 2) -> Iterator[persia.Batch]:
        """A pass: the rest of one that was not at its end."""
        self._staleness = staleness
        loader = persia.DataLoader(self.stream, self.model, staleness)
        self._pass = iter(loader)
        return self._pass

    def close(self) -> None:
        """What break does to a loop."""
        self._pass.close()

    def forward(self, one: persia.Batch) -> torch.Tensor:
        """A loss whose backward adds 1 to the rows of a batch."""
        out = self.model(one.ids)
        return -(out.rows() if self._rows else out.values()).sum()

    def step(self, one: persia.Batch) -> None:
        """Trains a batch; what the forward tells is no reason to leave it
        out."""
        try:
            loss = self.forward(one)
        except persia.errors.UpdatesLost as error:
            self.told.append(error)
            loss = self.forward(one)
        self.seen.append(number_of(one))
        with self.telling():
            loss.backward()

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """Catches and keeps UpdatesLost."""
        try:
            yield
        except persia.errors.UpdatesLost as error:
            self.told.append(error)

    def next(self) -> persia.Batch | None:
        """A batch; None: the pass has ended.  A loop that is told of a loss
        begins again."""
        try:
            return next(self._pass, None)
        except persia.errors.UpdatesLost as error:
            self.told.append(error)
            self.open(self._staleness)
            return self.next()

    def train(self, most: int = 1 << 62) -> int:
        """So many batches of the pass; how many there were."""
        n = 0
        while n < most and (one := self.next()) is not None:
            self.step(one)
            del one
            n += 1
        return n

    def epoch(self, staleness: int | None = 2) -> int:
        """A whole pass, through to the servers; how many batches it had."""
        self.open(staleness)
        n = self.train()
        self.flush()
        return n

    def flush(self) -> None:
        """Until there is nothing more to tell."""
        with self.telling():
            self.store.flush()

    @property
    def lost(self) -> int:
        """As the store has counted."""
        return int(self.store.stats()["client"]["lost"])


def counts(
    servers: Servers, n: int, namespace: str = "default"
) -> list[tuple[int, ...]]:
    """How often each batch is in the rows of each server."""
    with persia.Store(
        persia.optim.SGD(lr=1.0),
        servers=servers.text,
        namespace=namespace,
        read_only=True,
        lost="continue",
    ) as store:
        store.add_table(TABLE)
        ids = [ids_of(i, servers.n) for i in range(n)]
        rows = store.rows("t", torch.tensor(ids).reshape(-1))[:, 0]
    found = rows.reshape(n, servers.n).tolist()
    return [tuple(int(x) for x in each) for each in found]


def missing(found: Sequence[tuple[int, ...]], times: int = 1) -> int:
    """Updates that are not there, server by server; none is there too
    often."""
    assert all(one <= times for each in found for one in each), found
    return sum(times - one for each in found for one in each)


@contextlib.contextmanager
def cluster(
    workers: int = 1, servers: int = 2, **more: Any
) -> Iterator[tuple[Servers, Workers]]:
    """Servers, and workers over them."""
    with (
        contextlib.closing(Servers(servers)) as some,
        contextlib.closing(Workers(some.addresses, workers, **more)) as over,
    ):
        yield some, over


@contextlib.contextmanager
def waiting_trainer() -> Iterator[threading.Event]:
    """Set when a trainer of this process has asked for a batch."""
    asked = threading.Event()
    receive = Taking.receive

    def replaced(taking: Taking, *args: Any) -> Any:
        asked.set()
        return receive(taking, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Taking, "receive", replaced)
        yield asked


@contextlib.contextmanager
def fed(
    workers: Workers, n: int, *, epochs: int = 1, **more: Any
) -> Iterator[Sender]:
    """A loader that sends batches 0 to n - 1, each epoch; its error is raised
    at the end."""
    with Sender(workers.addresses, timeout=8, **more) as sender:

        def run() -> None:
            for _ in range(epochs):
                send(sender, 0, n)
                sender.end()

        join = in_thread(run)
        yield sender
        join()
