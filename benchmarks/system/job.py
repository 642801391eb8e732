"""One training job for torchrun: benchmarks.accuracy starts it.

    torchrun --nproc-per-node 2 -m benchmarks.system.job --samples 4096000

Every rank trains its share of SyntheticCTR with a DLRM under
DistributedDataParallel, the rows being in the servers that PERSIA_SERVERS
names; then rank 0 scores samples held out and prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import time

import torch
import torch.distributed as dist
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel

import persia
from persia.datasets import SyntheticCTR
from persia.metrics import auc
from persia.models import DLRM

# Of benchmarks.train, where they are compared with torch: an eps far above
# the gradients of one sample keeps rows that were seen a few times near 0.
SPARSE = {"lr": 0.05, "eps": 1e-2}
DENSE_LR = 2e-3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=4_096_000)
    parser.add_argument("--batch", type=int, default=256, help="of a rank")
    parser.add_argument("--test", type=int, default=400_000)
    parser.add_argument("--staleness", type=int, default=None)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(options.seed)
    data = SyntheticCTR(
        options.samples,
        options.batch,
        seed=options.seed,
        rank=rank,
        world_size=world,
        drop_last=True,
    )
    store = persia.Store(persia.optim.Adagrad(**SPARSE), seed=options.seed)
    bags = persia.EmbeddingBagCollection(
        store=store,
        tables=[
            persia.EmbeddingBagConfig(key, 16, [key]) for key in data.keys
        ],
    )
    model = DLRM(bags, data.dense_features, standardize=False)
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=DENSE_LR, fused=True)
    steps = 0
    dist.barrier()
    start = time.perf_counter()
    for batch in persia.DataLoader(
        data, parallel, staleness=options.staleness
    ):
        logits = parallel(batch.dense, batch.ids)
        loss = binary_cross_entropy_with_logits(logits, batch.label)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        steps += 1
    store.flush()
    dist.barrier()
    seconds = time.perf_counter() - start
    counts = store.stats()["lookahead"]["staleness"]
    if rank == 0:
        model.eval()
        test = SyntheticCTR(options.samples, 4096, seed=options.seed).test(
            options.test
        )
        with torch.no_grad():
            scored = [(model(b.dense, b.ids), b.label) for b in test]
        found, labels = (torch.cat(x) for x in zip(*scored, strict=True))
        n = sum(counts.values())
        result = {
            "auc": auc(found, labels),
            "steps": steps,
            "seconds": round(seconds, 1),
            "ranks": world,
            "mean_staleness": sum(k * x for k, x in counts.items()) / n,
            "largest_staleness": max(counts),
        }
        print(json.dumps(result), flush=True)
    dist.barrier()
    store.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
