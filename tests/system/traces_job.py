"""A trainer for tests of traces.

usage: python traces_job.py SERVERS WORKERS [hold]

hold: it takes a batch, prints a line, and keeps it until it is killed.
"""

from __future__ import annotations

import sys
import time

import persia


def main(servers: str, workers: str, hold: str = "") -> None:
    """Train one epoch."""
    store = persia.Store(persia.optim.SGD(lr=1.0), servers=servers)
    bags = persia.EmbeddingBagCollection(
        store=store, tables=[persia.EmbeddingBagConfig("t", 4, ["id"])]
    )
    stream = persia.Stream(workers)
    for batch in persia.DataLoader(stream, bags, staleness=1):
        if hold:
            print("holds", flush=True)
            time.sleep(600)
        bags(batch.ids).values().sum().backward()
    store.flush()
    store.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
