"""What the ranks of a job do in tests/system/test_roles_ranks.py.

    python roles_ranks.py FOLDER SCENARIO ...
    python roles_ranks.py feed KIND WORKERS

A scenario is NAME=KIND|SERVERS|WORKERS, with commas between addresses:
without workers the ranks have the batches themselves, and SERVERS may be
"ranks".  Each makes FOLDER/NAME.RANK.pt.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import persia
from tests.roles import KEYS, Model, batches, step
from tests.test_roles_rows import Mixed, weighted

BATCHES = 12  # of an epoch; the ranks divide it
ODD = 11  # of an epoch; they do not
MANY = 60  # of an epoch, so that a worker is replaced within it
MODELS: dict[str, Any] = {
    "pooled": Model,
    "rows": Mixed,
    "odd": Model,
    "many": Model,
}


def epochs(kind: str) -> list[list[persia.Batch]]:
    """All batches of a job, by epoch."""
    source: Callable[..., Iterator[persia.Batch]]
    source = weighted if kind == "rows" else batches
    n = {"odd": ODD, "many": MANY}.get(kind, BATCHES)
    return [list(source(n, seed)) for seed in range(2)]


def feed(kind: str, workers: str) -> None:
    """All epochs of a data loader."""
    with persia.data.Sender(workers, timeout=60) as sender:
        for epoch in epochs(kind):
            for batch in epoch:
                sender.send(batch)
            sender.end()
        sender.flush(120)


def everything(store: persia.Store, model: nn.Module) -> dict[str, Any]:
    """All that was learned."""
    ids = torch.arange(-20, 20)
    learned = {name: store.rows_and_state(name, ids) for name in store.tables}
    return learned | {
        k: v.detach().clone() for k, v in model.named_parameters()
    }


def train(kind: str, servers: str, workers: str) -> dict[str, Any]:
    """Two epochs without staleness, an evaluation between them."""
    rank, world = dist.get_rank(), dist.get_world_size()
    store = persia.Store(
        persia.optim.Adam(lr=0.05), servers=servers, timeout=30.0
    )
    model = MODELS[kind](store)
    net: Any = model
    if kind != "odd":
        net = nn.parallel.DistributedDataParallel(model)
    dense = torch.optim.SGD(model.parameters(), 0.1)
    stream: Any = persia.Stream(workers) if workers else None
    losses = []
    for epoch in epochs(kind):
        source = stream if workers else epoch[rank::world]
        for batch in persia.DataLoader(source, net, staleness=0):
            losses.append(step(net, batch, dense))
        store.flush()
        dist.barrier()
    out = everything(store, model) | {"losses": losses}
    dist.barrier()
    with contextlib.suppress(persia.errors.PersiaError):
        store.close()
    return out


def clip(kind: str, servers: str, workers: str) -> dict[str, Any]:
    """GradScaler and one norm over dense part, rows and ranks; a step that
    overflows on rank 1 is left out on all."""
    rank, world = dist.get_rank(), dist.get_world_size()
    store = persia.Store(
        persia.optim.Adam(lr=0.05),
        servers=servers,
        update="step",
        timeout=30.0,
    )
    model = Model(store)
    net = nn.parallel.DistributedDataParallel(model)
    dense = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    stream: Any = persia.Stream(workers) if workers else None
    norms = []
    for epoch in epochs(kind):
        source = stream if workers else epoch[rank::world]
        for i, batch in enumerate(persia.DataLoader(source, net, 0)):
            logits = net(batch.dense, batch.ids)
            loss = nn.functional.binary_cross_entropy_with_logits(
                logits, batch.label
            )
            if rank == 1 and i == 2:
                loss = loss * float("inf")
            dense.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(dense)
            scaler.unscale_(store.optimizer)
            norms.append(float(persia.clip_grad_norm_(net, 0.1)))
            scaler.step(dense)
            scaler.step(store.optimizer)
            scaler.update()
        store.flush()
        dist.barrier()
    out = everything(store, model) | {"losses": norms}
    dist.barrier()
    store.close()
    return out | {"updates": scaler.get_scale()}


class Counts(nn.Module):
    """Each id of a batch adds 1 to its row; beside a dense part, by which
    DistributedDataParallel keeps the ranks together."""

    def __init__(self, store: persia.Store) -> None:
        super().__init__()
        config = persia.EmbeddingBagConfig(
            "c", 2, feature_names=KEYS, init=("constant", 0.0)
        )
        self.bags = persia.EmbeddingBagCollection(store=store, tables=[config])
        self.layer = nn.Linear(4, 1)

    def forward(
        self, dense: torch.Tensor, ids: persia.JaggedBatch
    ) -> torch.Tensor:
        """A loss."""
        return self.layer(dense).mean() - self.bags(ids).values().sum()


def count(kind: str, servers: str, workers: str) -> dict[str, Any]:
    """Hybrid, under DDP, whose ranks need not have as many batches."""
    rank, world = dist.get_rank(), dist.get_world_size()
    store = persia.Store(
        persia.optim.SGD(lr=1.0),
        servers=servers,
        update="step",
        timeout=30.0,
        grad_division=False,
    )
    net = nn.parallel.DistributedDataParallel(Counts(store))
    stream: Any = persia.Stream(workers) if workers else None
    seen = 0
    for epoch in epochs(kind):
        source = stream if workers else epoch[rank::world]
        waiting = 0
        with net.join():
            for batch in persia.DataLoader(source, net, staleness=4):
                net(batch.dense, batch.ids).backward()
                seen += 1
                waiting = (waiting + 1) % 2
                if not waiting:  # an update is of two batches
                    store.optimizer.step()
        if waiting:
            store.optimizer.step()
        store.flush()
        dist.barrier()
    rows = store.rows("c", torch.arange(-20, 20))
    histogram = store.stats()["lookahead"]["staleness"]
    dist.barrier()
    store.close()
    return {"rows": rows, "seen": seen, "stalest": max(histogram)}


SCENARIOS = {"clipped": clip, "counted": count}


def main(folder: str, *scenarios: str) -> None:
    """All of them, one after the other."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for scenario in scenarios:
        name, _, rest = scenario.partition("=")
        kind, servers, workers = rest.split("|")
        out = SCENARIOS.get(kind, train)(kind, servers, workers)
        torch.save(out, Path(folder) / f"{name}.{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1] == "feed":
        feed(*sys.argv[2:])
    else:
        main(*sys.argv[1:])
