"""What runs in a data loader's process: ``python -m benchmarks.system.loader
WORKERS VOCABULARY BATCHES SEED`` reads lines ``COUNT``, sends so many batches
as an epoch, and answers with the milliseconds that a batch took to make.  With
``BROKERS TOPICS`` behind it the batches are those of topics, from their
start."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from itertools import cycle

import torch

import persia
from benchmarks.common import BATCH, FEATURES, Ranks, feature_ids

MESSAGE_ROWS = 1024  # of a message of a topic


def generated(
    vocabulary: int, batches: int, seed: int
) -> Iterator[persia.Batch]:
    """The same batches again and again."""
    shape = (batches, FEATURES, BATCH)
    drawn = feature_ids(Ranks("zipf", vocabulary).draw(shape, seed))
    keys = [f"slot{k}" for k in range(FEATURES)]
    for one in cycle(drawn):
        jagged = persia.JaggedBatch(
            keys, torch.from_numpy(one.reshape(-1).copy())
        )
        label = (torch.rand(BATCH) < 0.25).float()
        yield persia.Batch(None, jagged, label)


def consumed(brokers: str, topics: str) -> Iterator[persia.Batch]:
    """Those of topics, again and again."""
    schema = persia.data.Schema.model_validate(
        {
            "label": "label",
            "categorical": [
                {"column": f"slot{k}", "hash": False} for k in range(FEATURES)
            ],
        }
    )
    data = persia.data.Kafka(
        brokers,
        topics,
        "bench",
        schema,
        BATCH // MESSAGE_ROWS,
        value="arrow",
        until="latest",
    )
    while True:
        data.forget_position()
        yield from data


def main(workers: str, *arguments: str) -> None:
    """Answers until the pipe is closed."""
    torch.set_num_threads(1)
    vocabulary, batches, seed, *topics = arguments
    if topics:
        source = consumed(*topics)
    else:
        source = generated(int(vocabulary), int(batches), int(seed))
    with persia.data.Sender(workers) as sender:
        print("ready", flush=True)
        for line in sys.stdin:
            spent = 0.0
            for _ in range(int(line)):
                before = time.perf_counter()
                batch = next(source)
                spent += time.perf_counter() - before
                sender.send(batch)
            sender.end()
            print(1e3 * spent / int(line), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
