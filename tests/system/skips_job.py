"""A job that leaves out some batches, and is killed.

    skips_job.py SERVERS ROOT CONFIG

CONFIG: the arguments of :func:`work` in JSON. SGD with lr 1 and gradients of
-1, and a row for each batch alone: it is the number of times that the batch
was applied.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

import persia
from persia import Batch, JaggedBatch

BATCHES = 24
SAVED = 5  # batches before the checkpoint
IDS = 8  # of a batch, some of each shard


class Job:
    """Counts how often each batch is applied."""

    def __init__(
        self,
        servers: str,
        staleness: int | None = 2,
        update: str = "backward",
        passes: int = 1,
    ) -> None:
        self.store = persia.Store(
            persia.optim.SGD(lr=1.0),
            servers=servers,
            timeout=30.0,
            threads=1,
            grad_division=False,
            update=update,
        )
        self.model = persia.EmbeddingBagCollection(
            store=self.store,
            tables=[persia.EmbeddingBagConfig("t", 2, ["f"], init=0.0)],
        )
        self.loaders = [
            persia.DataLoader(
                [self.batch(i) for i in range(first, BATCHES, passes)],
                self.model,
                staleness,
            )
            for first in range(passes)
        ]

    @staticmethod
    def batch(i: int) -> Batch:
        ids = torch.arange(i * IDS, (i + 1) * IDS)
        return Batch(
            None,
            JaggedBatch(["f"], ids, lengths=torch.tensor([IDS])),
            torch.tensor([i]),
        )

    def state(self) -> dict[str, Any]:
        return {"loader": self.loaders}

    def loss(self, *batches: Batch) -> torch.Tensor:
        every = [self.model(one.ids).values().sum().neg() for one in batches]
        return torch.stack(every).sum()

    def train(self, *batches: Batch) -> None:
        """An update of these batches."""
        self.loss(*batches).backward()
        if self.store.update == "step":
            self.store.optimizer.step()

    def counts(self) -> list[float]:
        """How often each batch was applied."""
        self.store.flush()
        rows = self.store.rows("t", torch.arange(BATCHES * IDS))
        return [
            float(rows[i * IDS : (i + 1) * IDS].unique().item())
            for i in range(BATCHES)
        ]


def work(
    servers: str,
    root: str,
    skips: list[int],
    killed: int,
    **more: Any,
) -> None:
    """A life: goes on from the checkpoint, if there is one, and is killed
    when so many batches are through.
    """
    job = Job(servers, **more)
    done = 0
    if Path(root, "LATEST").exists():
        found = job.store.load(root, **job.state(), resume="continue")
        done = found.extra
    for batch in job.loaders[0]:
        i = int(batch.label)
        assert i == done
        if i in skips:
            job.loss(batch)
            if i % 2:
                batch.skip()
        else:
            job.train(batch)
        done += 1
        if done == SAVED:
            job.store.save(root, **job.state(), extra=done)
        if done == killed:
            break
    job.store.flush()
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    work(*sys.argv[1:3], **json.loads(sys.argv[3]))
