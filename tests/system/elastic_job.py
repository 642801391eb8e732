"""A training that counts, whose ranks join and leave: each id of a batch adds
1 to its row, whatever the loss is.

    torchrun ... elastic_job.py SERVERS FOLDER [WORKERS [STALENESS]]

FOLDER/log has a line for each start and for each line of the training;
FOLDER/step the last step and the number of ranks; FOLDER/state.STEP.WORLD
what the dense part was. With WORKERS data loaders send the batches.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import persia
from persia.datasets import ClickStream
from persia.train import Elastic, Every, Trainer

SAMPLES, BATCH, IDS = 8000, 20, 40
EVERY = 5  # steps between two files


def clicks(rank: int = 0, world: int = 1) -> ClickStream:
    """The share of a rank."""
    return ClickStream(
        SAMPLES,
        BATCH,
        features=2,
        dense=2,
        vocabulary=IDS,
        rank=rank,
        world_size=world,
    )


class Ones(torch.autograd.Function):
    """Zeros [B] of vectors [B, n], whose gradients are -1."""

    @staticmethod
    def forward(ctx: Any, vectors: torch.Tensor) -> torch.Tensor:
        ctx.shape = vectors.shape
        return vectors.new_zeros(len(vectors))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.new_full(ctx.shape, -1.0)


class Counts(nn.Module):
    """Rows that count, and a dense part that learns."""

    def __init__(self, store: persia.Store) -> None:
        super().__init__()
        self.bags = persia.EmbeddingBagCollection(
            store=store,
            tables=[
                persia.EmbeddingBagConfig(
                    "c", 2, ["C1", "C2"], init=("constant", 0.0)
                )
            ],
        )
        self.layer = nn.Linear(2, 1)

    def forward(
        self, dense: torch.Tensor, ids: persia.JaggedBatch
    ) -> torch.Tensor:
        zeros = Ones.apply(self.bags(ids).values())
        out: torch.Tensor = self.layer(dense)[:, 0] + zeros
        return out


def expected() -> dict[int, float]:
    """How often each id occurs."""
    ids = torch.cat([batch.ids.values() for batch in clicks()])
    values, counts = torch.unique(ids, return_counts=True)
    return dict(zip(values.tolist(), counts.tolist(), strict=True))


def main(
    servers: str, folder: str, workers: str = "", staleness: str = "2"
) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    world = int(os.environ["WORLD_SIZE"])
    rank = int(os.environ["RANK"])
    if world > 1:
        dist.init_process_group("gloo")

    def log(text: str) -> None:
        if rank == 0:
            with Path(folder, "log").open("a") as file:
                print(text, file=file)

    log(f"start {world}")
    store = persia.Store(
        persia.optim.SGD(lr=1.0),
        servers=servers,
        grad_division=False,
        lost="continue",
        threads=1,
        timeout=20,
    )
    model: nn.Module = Counts(store)
    if world > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    trainer = Trainer(model, optimizer, staleness=int(staleness))
    data: Any = persia.Stream(workers) if workers else clicks(rank, world)
    own = os.environ["TMPDIR"]  # of this machine
    elastic = Elastic(trainer, store, data, every=EVERY, folder=own)
    found = elastic.begin()
    for line in found.lines() if found else ["begins"]:
        log(line)

    def step() -> None:
        if rank == 0:
            new = Path(folder, "new")
            new.write_text(f"{trainer.step} {world}")
            new.replace(Path(folder, "step"))
        time.sleep(0.02)

    done = elastic.fit(1, hooks=[Every(step, steps=1)])
    log(f"{'done' if done else 'stopped'} at {trainer.step} of {world}")
    if done and workers:
        log(f"late {data.stats()['late']}")
    store.close()
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
