"""Embedding workers in the process of a test."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

import persia
from persia import _core, errors
from tests.remote import Servers

LIMIT = 64 << 20
KEYS = ["user", "item", "shop"]


class Workers:
    """Embedding workers over servers, each behind a port of loopback.

    Attributes:
        workers: ``_core.EmbeddingWorker`` objects.
        addresses: of them.
    """

    def __init__(
        self, servers: Sequence[str], n: int = 1, **more: Any
    ) -> None:
        self._servers = list(servers)
        self._security = more.pop("security", {})
        self._more = more
        self.workers: list[_core.EmbeddingWorker] = []
        self.addresses: list[str] = []
        self.trainers: list[CountingTrainer] = []
        for _ in range(n):
            worker, port = self._start(0)
            self.workers.append(worker)
            self.addresses.append(f"127.0.0.1:{port}")

    def _start(self, port: int) -> tuple[_core.EmbeddingWorker, int]:
        arguments = {
            "threads": 1,
            "message_limit": LIMIT,
            "queue_limit": LIMIT,
            "lease": 60.0,
            "silence": 30.0,
            "loaders": 1,
        }
        servers = {
            "addresses": self._servers,
            "own": None,
            "own_at": 0,
            "namespace": "default",
            "rank": 0,
            "world": 1,
            "stream": 0,
            "timeout": 10.0,
            "message_limit": LIMIT,
            "dtype": 0,
            "lost": 0,
            "security": {},
        }
        worker = _core.EmbeddingWorker(servers, **(arguments | self._more))
        found = worker.start(
            address=f"127.0.0.1:{port}",
            threads=2,
            calls=256,
            connections=256,
            message_limit=LIMIT,
            security=self._security,
        )
        return worker, found

    def restart(self, at: int) -> None:
        """A new worker in the place of one that is ended."""
        self.workers[at].close()
        port = int(self.addresses[at].rpartition(":")[2])
        self.workers[at], _ = self._start(port)

    def stats(self, name: str) -> int:
        """The sum of a counter over all workers."""
        return sum(worker.stats()[name] for worker in self.workers)

    def close(self) -> None:
        """Ends all, and the trainers first: one that waits on would take
        batches of a later test whose worker has a port of these."""
        for trainer in self.trainers:
            trainer.close()
        for worker in self.workers:
            worker.close()


@pytest.fixture
def servers() -> Iterator[Servers]:
    """Two shards."""
    with contextlib.closing(Servers(2)) as both:
        yield both


@pytest.fixture
def workers(servers: Servers) -> Iterator[Workers]:
    """One embedding worker."""
    with contextlib.closing(Workers(servers.addresses)) as one:
        yield one


def batches(n: int, seed: int = 0, samples: int = 8) -> Iterator[persia.Batch]:
    """Batches with jagged ids of three features."""
    g = torch.Generator().manual_seed(seed)
    for i in range(n):
        bags = len(KEYS) * samples
        if i % 3 == 2:  # one id a bag
            lengths, count = None, bags
        else:
            lengths = torch.randint(0, 4, (bags,), generator=g)
            count = int(lengths.sum())
        values = torch.randint(-20, 20, (count,), generator=g)
        yield persia.Batch(
            torch.randn(samples, 4, generator=g),
            persia.JaggedBatch(KEYS, values, lengths=lengths),
            torch.randint(0, 2, (samples,), generator=g).float(),
        )


class Model(torch.nn.Module):
    """Two modules that share a table, and a dense layer."""

    def __init__(self, store: persia.Store, compiled: bool = False) -> None:
        super().__init__()
        config = persia.EmbeddingBagConfig
        self.first = persia.EmbeddingBagCollection(
            store=store,
            tables=[
                config("t", 8, feature_names=["user", "item"], pooling="mean"),
                config("u", 4, feature_names=["user"]),
            ],
        )
        self.second = persia.EmbeddingBagCollection(
            store=store,
            tables=[config("t", 8, feature_names=["shop"], pooling="sqrtn")],
            share=True,
        )
        torch.manual_seed(3)
        self.layer = torch.nn.Linear(4 + 28, 1)

    def forward(
        self, dense: torch.Tensor, ids: persia.JaggedBatch
    ) -> torch.Tensor:
        """Logits, [samples]."""
        parts = [dense, self.first(ids).values(), self.second(ids).values()]
        return self.layer(torch.cat(parts, 1)).squeeze(1)


class CountingTrainer:
    """Counts in row ``id`` how often the sample with that id was trained.

    Attributes:
        most: stops after so many batches, until it is raised.
        epochs: that have ended.
    """

    def __init__(
        self, servers: Servers, workers: Workers, staleness: int = 2
    ) -> None:
        self.store = persia.Store(
            persia.optim.SGD(lr=1.0), servers=servers.text
        )
        self.model = persia.EmbeddingBagCollection(
            store=self.store,
            tables=[persia.EmbeddingBagConfig("t", 4, ["user"], init=0.0)],
        )
        self.stream = persia.Stream(
            workers.addresses, timeout=60, move_after=2
        )
        self.batches = 0
        self.epochs = 0
        self.most = 1 << 62
        self._closed = False
        self._loader = persia.DataLoader(self.stream, self.model, staleness)
        self._pass = iter(self._loader)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        workers.trainers.append(self)

    def _run(self) -> None:
        with contextlib.suppress(errors.Unavailable, errors.Closed):
            self._train()

    def _train(self) -> None:
        while not self._closed:
            for batch in self._pass:
                (-self.model(batch.ids).values().sum()).backward()
                self.batches += 1
                while self.batches >= self.most and not self._closed:
                    time.sleep(0.01)
            self.epochs += 1
            self._pass = iter(self._loader)

    def close(self) -> None:
        """Ends its pass."""
        self._closed = True
        self._pass.close()
        self._thread.join(30)
        assert not self._thread.is_alive()

    def counts(self, n: int) -> list[float]:
        self.store.flush()
        rows = self.store.rows("t", list(range(n)))
        return [float(row[0]) for row in rows]


def open_store(servers: str, **more: Any) -> persia.Store:
    """A store with Adam, whose bits depend on the number of updates."""
    return persia.Store(
        persia.optim.Adam(lr=0.05), servers=servers, timeout=10.0, **more
    )


def step(
    model: torch.nn.Module, batch: persia.Batch, dense: torch.optim.Optimizer
) -> float:
    """One training step; the loss."""
    logits = model(batch.dense, batch.ids)
    loss = torch.nn.functional.binary_cross_entropy_with_logits(
        logits, batch.label
    )
    dense.zero_grad()
    loss.backward()
    dense.step()
    return loss.item()


def train(
    store: persia.Store, source: Any, staleness: int = 0
) -> tuple[list[float], dict[str, Any]]:
    """One epoch with a new model: the losses, and all rows at the end."""
    model = Model(store)
    dense = torch.optim.SGD(model.parameters(), 0.1)
    losses = [
        step(model, batch, dense)
        for batch in persia.DataLoader(source, model, staleness=staleness)
    ]
    store.flush()
    ids = torch.arange(-20, 20)
    return losses, {name: store.rows(name, ids) for name in store.tables}
