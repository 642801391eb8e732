"""What narrow rows cost in accuracy: ``python -m benchmarks.dtypes``.

SyntheticCTR, DLRM of dim 16, row-wise Adagrad for the rows and Adam for the
dense part, one thread.  For each seed (data, planted model, initial values)
the same job runs with fp32, bf16 and int8 rows; the loss of AUC on samples
held out is paired by seed.  Printed are the mean and the upper end of its
95 % interval (Student's).  It takes two minutes of one core.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch

import persia
from benchmarks.accuracy import interval
from benchmarks.common import arguments, print_machine, report
from persia import models
from persia.datasets import SyntheticCTR
from persia.train import Trainer

BENCH = "dtypes"
SEEDS, TRAIN, TEST, BATCH = 6, 300_000, 100_000, 1024


def auc(dtype: str, seed: int, train: int, test: int) -> float:
    """Of a job from its first batch to its evaluation."""
    torch.manual_seed(seed)
    data = SyntheticCTR(train, BATCH, seed)
    held = SyntheticCTR(test, BATCH, seed, start=train)
    with persia.Store(persia.optim.RowWiseAdagrad(lr=0.05), seed=seed) as s:
        bags = persia.EmbeddingBagCollection(
            [
                persia.EmbeddingBagConfig(key, 16, [key], data_type=dtype)
                for key in data.keys
            ],
            store=s,
        )
        model = models.DLRM(bags, data.dense_features)
        dense = torch.optim.Adam(model.parameters(), lr=0.002)
        trainer = Trainer(model, dense, staleness=0)
        trainer.fit(data)
        with torch.no_grad():
            return trainer.evaluate(held).auc


def main(argv: Sequence[str] | None = None) -> None:
    options = arguments(__doc__ or "").parse_args(argv)
    part = 10 if options.quick else 1
    torch.set_num_threads(1)
    print_machine(BENCH)
    scores = {
        dtype: [
            auc(dtype, seed, TRAIN // part, TEST // part)
            for seed in range(1, SEEDS // min(part, 3) + 1)
        ]
        for dtype in ("fp32", "bf16", "int8")
    }
    for dtype in ("bf16", "int8"):
        losses = [
            a - b for a, b in zip(scores["fp32"], scores[dtype], strict=True)
        ]
        low, high = interval(losses)
        report(
            BENCH,
            f"AUC lost with {dtype} rows",
            high,
            "",
            at_most=True,
            mean=round(statistics.mean(losses), 6),
            low=round(low, 6),
            seeds=len(losses),
            fp32=round(statistics.mean(scores["fp32"]), 5),
        )


if __name__ == "__main__":
    main()
