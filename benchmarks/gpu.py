"""Step time of embeddings and a dense part on a GPU, beside the dense part
alone and the transfer of the distinct rows: one line of JSON a batch size.
Without a GPU it says so and ends.

usage: python -m benchmarks.gpu [--batch 4096 16384 65536] [--steps 50]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable

import torch
from torch import nn

import persia

FEATURES, DIM, IDS = 26, 16, 1_000_000


def batches(size: int, steps: int) -> list[persia.Batch]:
    """Batches of skewed ids, one a feature and sample."""
    keys = [f"f{i}" for i in range(FEATURES)]
    made = []
    for _ in range(steps):
        ids = (torch.rand(FEATURES * size) ** 4 * IDS).long()
        made.append(persia.Batch(None, persia.JaggedBatch(keys, ids)))
    return made


def timed(run: Callable[[], object]) -> float:
    """Seconds, the device's work included."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def transfer(batch: persia.Batch) -> Callable[[], None]:
    """Moves as many rows as the batch has distinct ids, and back."""
    every = batch.ids.values().view(FEATURES, -1)
    n = sum(ids.unique().numel() for ids in every)
    host = torch.zeros(n, DIM).pin_memory()
    device = torch.empty(n, DIM, device="cuda")

    def run() -> None:
        device.copy_(host, non_blocking=True)
        host.copy_(device, non_blocking=True)

    return run


def measure(size: int, steps: int) -> dict[str, object]:
    """The step with embeddings, and that of the dense part alone."""
    store = persia.Store(optimizer=persia.optim.Adagrad(lr=0.01))
    bags = persia.EmbeddingBagCollection(
        store=store,
        tables=[
            persia.EmbeddingBagConfig(f"t{i}", DIM, feature_names=[f"f{i}"])
            for i in range(FEATURES)
        ],
    ).to("cuda")
    dense = nn.Sequential(
        nn.Linear(FEATURES * DIM, 512), nn.ReLU(), nn.Linear(512, 1)
    ).to("cuda")
    values = torch.zeros(size, FEATURES * DIM, device="cuda")

    def alone() -> None:
        for _ in range(steps):
            dense(values).mean().backward()

    def whole() -> None:
        loader = persia.DataLoader(batches_made, bags, staleness=4)
        for batch in loader:
            dense(bags(batch.ids).values()).mean().backward()

    batches_made = batches(size, steps)
    moves = transfer(batches_made[0])
    timed(alone), timed(whole), timed(moves)  # to warm up
    seconds, dense_seconds = timed(whole), timed(alone)
    moved = timed(lambda: [moves() for _ in range(steps)])
    bound = max(dense_seconds, moved)
    return {
        "device": torch.cuda.get_device_name(),
        "batch": size,
        "step_ms": 1000 * seconds / steps,
        "dense_ms": 1000 * dense_seconds / steps,
        "transfer_ms": 1000 * moved / steps,  # of distinct rows, and back
        "of_bound": seconds / bound,  # (1.1)
        "of_dense": dense_seconds / seconds,  # (0.9)
        "samples_per_s": size * steps / seconds,
        "ids_copied": store.stats()["cuda_ids_copied"],
    }


def main() -> int:
    """Print one line a batch size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--batch", type=int, nargs="+", default=[4096, 16384, 65536]
    )
    parser.add_argument("--steps", type=int, default=50)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks.gpu: skipped, no CUDA device here", file=sys.stderr)
        return 0
    for size in args.batch:
        print(json.dumps(measure(size, args.steps)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
