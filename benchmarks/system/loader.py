"""What runs in a data loader's process: ``python -m benchmarks.system.loader
WORKERS`` reads lines ``COUNT``, sends so many batches as an epoch, and answers
with the milliseconds that a batch took to make."""

from __future__ import annotations

import sys
import time
from itertools import cycle, islice

import torch

import persia
from benchmarks.common import BATCH, FEATURES, Ranks, feature_ids


def main(workers: str, vocabulary: int, batches: int, seed: int) -> None:
    """Answers until the pipe is closed."""
    torch.set_num_threads(1)
    shape = (batches, FEATURES, BATCH)
    drawn = feature_ids(Ranks("zipf", vocabulary).draw(shape, seed))
    keys = [f"slot{k}" for k in range(FEATURES)]
    ids = cycle(drawn)
    with persia.data.Sender(workers) as sender:
        print("ready", flush=True)
        for line in sys.stdin:
            spent = 0.0
            for one in islice(ids, int(line)):
                before = time.perf_counter()
                jagged = persia.JaggedBatch(
                    keys, torch.from_numpy(one.reshape(-1).copy())
                )
                label = (torch.rand(BATCH) < 0.25).float()
                spent += time.perf_counter() - before
                sender.send(persia.Batch(None, jagged, label))
            sender.end()
            print(1e3 * spent / int(line), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
