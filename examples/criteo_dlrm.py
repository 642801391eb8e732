"""DLRM on Criteo's click logs, to copy and change.

    python examples/criteo_dlrm.py 'day_*.tsv.gz' --save out

The last tenth of the lines is held out to score the model on.
"""

import argparse
import time

import torch
from torch.nn.functional import binary_cross_entropy_with_logits

import persia


def build(keys, dim, lr, seed):
    """A store, and the model whose embeddings it holds."""
    torch.manual_seed(seed)
    store = persia.Store(optimizer=persia.optim.Adagrad(lr=lr), seed=seed)
    tables = [persia.EmbeddingBagConfig(key, dim, [key]) for key in keys]
    bags = persia.EmbeddingBagCollection(store=store, tables=tables)
    return store, persia.models.DLRM(bags, dense_features=13)


def train(model, optimizer, batches, staleness):
    """One epoch; returns the samples a second."""
    model.train()
    samples, start = 0, time.perf_counter()
    for batch in persia.DataLoader(batches, model, staleness=staleness):
        logits = model(batch.dense, batch.ids)
        loss = binary_cross_entropy_with_logits(logits, batch.label)
        optimizer.zero_grad()
        loss.backward()  # updates the embeddings as well
        optimizer.step()
        samples += len(batch)
    return samples / (time.perf_counter() - start)


@torch.no_grad()
def evaluate(model, batches):
    model.eval()
    metrics = persia.metrics.BinaryMetrics()
    for batch in batches:
        metrics.update(model(batch.dense, batch.ids), batch.label)
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
    parser.add_argument("--save", help="folder for a checkpoint")
    args = parser.parse_args()

    data = persia.datasets.Criteo(args.data, batch_size=args.batch_size)
    training, test = data.split(0.1)
    store, model = build(data.keys, args.dim, args.lr, args.seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.dense_lr)
    for epoch in range(args.epochs):
        training.epoch = epoch
        speed = train(model, optimizer, training, args.staleness)
        scores = evaluate(model, test)
        print(
            f"epoch {epoch + 1}: {speed:,.0f} samples/s, "
            f"AUC {scores.auc:.4f}, log loss {scores.logloss:.4f}"
        )
        if args.save:
            store.save(args.save, model=model, optimizer=optimizer)


if __name__ == "__main__":
    main()
