"""A trainer for tests of roles: trains one epoch of synthetic clicks without
staleness and prints, as JSON, its losses and a digest of all rows.

usage: python roles_job.py SERVERS [WORKERS]
"""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

import torch

import persia
from persia.datasets import SyntheticCTR
from persia.models import DLRM

ROWS, BATCH, SEED = 5000, 256, 5


def main(servers: str, workers: str | None = None) -> None:
    """Train, and print."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    data = SyntheticCTR(ROWS, BATCH, seed=SEED)
    store = persia.Store(persia.optim.Adam(lr=0.01), servers=servers)
    bags = persia.EmbeddingBagCollection(
        store=store,
        tables=[persia.EmbeddingBagConfig(k, 8, [k]) for k in data.keys],
    )
    model = DLRM(bags, data.dense_features)
    dense = torch.optim.SGD(model.parameters(), 0.1)
    source: Any = persia.Stream(workers) if workers else data
    losses = []
    for batch in persia.DataLoader(source, model, staleness=0):
        loss = torch.nn.functional.binary_cross_entropy_with_logits(
            model(batch.dense, batch.ids), batch.label
        )
        dense.zero_grad()
        loss.backward()
        dense.step()
        losses.append(loss.item().hex())
    store.flush()
    digest = hashlib.sha256()
    for batch in data:
        for key in data.keys:
            rows = store.rows(key, batch.ids[key][0])
            digest.update(rows.contiguous().numpy().tobytes())
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    print(json.dumps({"losses": losses, "digest": digest.hexdigest()}))
    store.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
