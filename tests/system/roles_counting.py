"""A loader and a trainer whose rows count: each id of a batch adds 1 to each
element of its row, so that rows tell how often a batch was applied.

usage: python roles_counting.py loader WORKERS [NAME]
       python roles_counting.py trainer SERVERS WORKERS [GATE]

GATE: a file; without it the trainer stops before the last batches, so that a
test which kills processes does so before the epoch ends, on any machine.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

import persia

BATCHES, IDS, SAMPLES = 120, 50, 20
BEFORE_GATE = 90


def batches() -> Iterator[persia.Batch]:
    """Always the same."""
    g = torch.Generator().manual_seed(4)
    for _ in range(BATCHES):
        ids = torch.randint(IDS, (2 * SAMPLES,), generator=g)
        yield persia.Batch(None, persia.JaggedBatch(["a", "b"], ids))


def expected() -> torch.Tensor:
    """How often each id occurs, [IDS]."""
    ids = torch.cat([batch.ids.values() for batch in batches()])
    return torch.bincount(ids, minlength=IDS).to(torch.float32)


def config() -> persia.EmbeddingBagConfig:
    """The one table."""
    return persia.EmbeddingBagConfig(
        "count", 2, feature_names=["a", "b"], init=("constant", 0.0)
    )


def loader(workers: str, name: str | None = None) -> None:
    """Sends them, and stays until they are trained."""
    with persia.data.Sender(
        workers, name=name, timeout=60, move_after=1
    ) as sender:
        for batch in batches():
            sender.send(batch)
        sender.end()
        sender.flush()
    print("sent")


def trainer(servers: str, workers: str, gate: str | None = None) -> None:
    """One epoch."""
    torch.set_num_threads(1)
    store = persia.Store(
        persia.optim.SGD(lr=1.0), servers=servers, lost="continue", timeout=60
    )
    bags = persia.EmbeddingBagCollection(store=store, tables=[config()])
    stream = persia.Stream(workers, timeout=60)
    for batch in persia.DataLoader(stream, bags, staleness=3):
        (-bags(batch.ids).values()).sum().backward()
        time.sleep(0.01)
        while gate and store.updates >= BEFORE_GATE:
            if Path(gate).exists():
                break
            time.sleep(0.05)
    store.flush()
    stats = stream.stats()
    print("late", stats["late"], "lost", stats["lost"])
    store.close()


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
