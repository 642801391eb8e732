"""DLRM on Criteo's click logs, to copy and change.

    python examples/criteo_dlrm.py 'day_*.tsv.gz' --save out
    torchrun --nproc-per-node 2 examples/criteo_dlrm.py 'day_*.tsv.gz'

The last tenth of the lines is held out to score the model on. Under torchrun
each rank trains on its share of the batches; the embeddings are spread over
the ranks, or lie on the servers that PERSIA_SERVERS names. The dense part is
on a GPU per rank where there are GPUs (--device auto), the embeddings are in
host memory.
"""

import argparse
import contextlib
import os
import time

import torch
import torch.distributed as dist
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel

import persia

RANKS = int(os.environ.get("WORLD_SIZE", "1"))


def device_of(name):
    """Where this rank has the dense part of the model."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device(name)


def moved(batch, device):
    """The batch on the device; ids stay on the host."""
    if device.type == "cuda":
        batch = batch.pin_memory()
    return batch.to(device, non_blocking=True)


def build(keys, dim, lr, seed, device):
    """A store, and the model whose embeddings it holds."""
    torch.manual_seed(seed)
    store = persia.Store(optimizer=persia.optim.Adagrad(lr=lr), seed=seed)
    tables = [persia.EmbeddingBagConfig(key, dim, [key]) for key in keys]
    bags = persia.EmbeddingBagCollection(store=store, tables=tables)
    model = persia.models.DLRM(bags, dense_features=13).to(device)
    return store, DistributedDataParallel(model) if RANKS > 1 else model


def train(model, optimizer, batches, staleness, device):
    """One epoch; returns the samples a second."""
    model.train()
    samples, start = 0, time.perf_counter()
    # A rank may have a batch more than others: join() lets them wait for it.
    with model.join() if RANKS > 1 else contextlib.nullcontext():
        for batch in persia.DataLoader(batches, model, staleness=staleness):
            batch = moved(batch, device)
            logits = model(batch.dense, batch.ids)
            loss = binary_cross_entropy_with_logits(logits, batch.label)
            optimizer.zero_grad()
            loss.backward()  # updates the embeddings as well
            optimizer.step()
            samples += len(batch)
    return RANKS * samples / (time.perf_counter() - start)


@torch.no_grad()
def evaluate(model, batches, device):
    if RANKS > 1:
        model = model.module
    model.eval()
    metrics = persia.metrics.BinaryMetrics()
    for batch in batches:
        batch = moved(batch, device)
        metrics.update(model(batch.dense, batch.ids), batch.label)
    if RANKS > 1:
        metrics.gather()  # what the other ranks have scored
    return metrics.compute()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("data", help="a Criteo TSV file, or a glob of them")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--dense-lr", type=float, default=2e-3)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--staleness", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--device", choices=["auto", "cpu", "cuda"], default="auto"
    )
    parser.add_argument("--save", help="folder for a checkpoint")
    args = parser.parse_args()

    device = device_of(args.device)
    rank, world_size = 0, 1
    if RANKS > 1:
        # The embeddings of ranks that share them travel by gloo.
        cuda = device.type == "cuda"
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
        rank, world_size = dist.get_rank(), RANKS
    data = persia.datasets.Criteo(
        args.data, args.batch_size, rank=rank, world_size=world_size
    )
    training, test = data.split(0.1)
    store, model = build(data.keys, args.dim, args.lr, args.seed, device)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.dense_lr)
    for epoch in range(args.epochs):
        training.epoch = epoch
        speed = train(model, optimizer, training, args.staleness, device)
        scores = evaluate(model, test, device)
        if rank == 0:
            print(
                f"epoch {epoch + 1}: {speed:,.0f} samples/s, "
                f"AUC {scores.auc:.4f}, log loss {scores.logloss:.4f}"
            )
        if args.save:
            store.save(args.save, model=model, optimizer=optimizer)
    store.close()
    if RANKS > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
