"""A rank of tests/system/test_soak.py: it trains, evaluates, saves, and gives
loops up, again and again.

    soak_job.py JOURNAL SERVERS ROOT GROUP RANK WORLD
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import persia
from persia import Batch, JaggedBatch
from persia.distributed.ranks import all_max
from tests.system.counting import FINISHED, RUNNING, Journal

BATCHES = 60  # of a pass
SAMPLES = 256
KEPT = 3  # checkpoints


class Model(nn.Module):
    def __init__(self, store: persia.Store) -> None:
        super().__init__()
        config = persia.EmbeddingBagConfig
        self.bags = persia.EmbeddingBagCollection(
            store=store,
            tables=[
                config("few", 16, ["few", "several"]),
                config("new", 8, capacity=20_000, eviction="lru"),
                config("rare", 8, data_type="bf16", admission=0.5),
            ],
        )
        self.top = nn.Linear(48, 1)

    def forward(self, ids: JaggedBatch) -> Tensor:
        out: Tensor = self.top(self.bags(ids).values())
        return out[:, 0]


def batches(g: np.random.Generator, n: int) -> Iterator[Batch]:
    """Some ids occur always anew; of others all have been seen soon."""
    for _ in range(n):
        lengths = np.ones((4, SAMPLES), np.int64)
        lengths[1] = g.integers(0, 5, SAMPLES)
        most = [3000, 3000, 2**62, 5000]
        ids = [g.integers(m, size=k) for m, k in zip(most, lengths.sum(1))]
        names = ["few", "several", "new", "rare"]
        batch = JaggedBatch(
            names,
            torch.from_numpy(np.concatenate(ids)),
            lengths=torch.from_numpy(lengths.reshape(-1)),
        )
        label = torch.from_numpy(g.integers(2, size=SAMPLES)).float()
        yield Batch(None, batch, label)


def work(journal: Journal, servers: str, root: str, rank: int) -> None:
    store = persia.Store(
        persia.optim.Adagrad(lr=0.02),
        servers=servers,
        namespace="space",
        timeout=30,
        threads=2,
    )
    model = Model(store)
    net = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.001)
    g = np.random.default_rng(rank)
    journal.set(state=RUNNING)
    for turn in itertools.count():
        loader = persia.DataLoader(
            list(batches(g, BATCHES)), model, staleness=(2, 0, None)[turn % 3]
        )
        for number, batch in enumerate(loader):
            loss = nn.functional.binary_cross_entropy_with_logits(
                net(batch.ids), batch.label
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            journal.set(started=journal.started + 1)
            if turn % 4 == 3 and number == BATCHES // 2:
                break
        with torch.no_grad():
            for batch in batches(g, 5):
                model(batch.ids)
        store.stats()
        store.save(root, model=model, optimizer=optimizer, keep=KEPT)
        if all_max([journal.wanted])[0]:
            break
    store.close()


def main() -> None:
    path, servers, root, group, rank, world = sys.argv[1:]
    torch.manual_seed(0)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{group}",
        rank=int(rank),
        world_size=int(world),
    )
    journal = Journal(Path(path))
    work(journal, servers, root, int(rank))
    journal.set(state=FINISHED)


if __name__ == "__main__":
    main()
