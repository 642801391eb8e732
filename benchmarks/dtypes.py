"""What narrow rows cost in accuracy: ``python -m benchmarks.dtypes``.

SyntheticCTR, DLRM of dim 16, row-wise Adagrad for the rows and Adam for the
dense part, one thread.  For each seed (data, planted model, initial values)
the same job runs with fp32, bf16 and int8 rows, and the model with fp32 rows
is exported with narrow rows; the loss of AUC on samples held out is paired by
seed.  Printed are the mean and the upper end of its 95 % interval (Student's).
It takes three minutes of one core.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterable, Sequence
from typing import Any, get_args

import torch

import persia
from benchmarks.accuracy import interval
from benchmarks.common import arguments, print_machine, report
from persia import models
from persia.datasets import SyntheticCTR
from persia.metrics import auc
from persia.serving.rows import RowType
from persia.train import Trainer

BENCH = "dtypes"
SEEDS, TRAIN, TEST, BATCH = 6, 300_000, 100_000, 1024


def scored(model: Callable[..., Any], held: Iterable[persia.Batch]) -> float:
    """The exact AUC of a model."""
    logits, labels = [], []
    with torch.no_grad():
        for batch in held:
            logits.append(model(batch.dense, batch.ids).view(-1))
            labels.append(batch.label.view(-1))
    return auc(torch.cat(logits), torch.cat(labels))


def scores_of(
    dtype: str, seed: int, train: int, test: int
) -> dict[str, float]:
    """AUC of a job from its first batch to its evaluation; of fp32 rows also
    those of its exports, by the type of their rows."""
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
        model.eval()
        found = {dtype: scored(model, held)}
        if dtype != "fp32":
            return found
        batch = next(iter(held))
        for row in get_args(RowType):
            with tempfile.TemporaryDirectory() as folder:
                example = (batch.dense, batch.ids)
                persia.export(model, folder, example=example, row_dtype=row)
                exported = persia.load_model(folder)
                found[f"exported {row}"] = scored(exported, held)
        return found


def main(argv: Sequence[str] | None = None) -> None:
    options = arguments(__doc__ or "").parse_args(argv)
    part = 10 if options.quick else 1
    torch.set_num_threads(1)
    print_machine(BENCH)
    scores: dict[str, list[float]] = {}
    for seed in range(1, SEEDS // min(part, 3) + 1):
        for dtype in ("fp32", "bf16", "int8"):
            found = scores_of(dtype, seed, TRAIN // part, TEST // part)
            for name, score in found.items():
                scores.setdefault(name, []).append(score)
    for name in scores:
        if name == "fp32":
            continue
        losses = [
            a - b for a, b in zip(scores["fp32"], scores[name], strict=True)
        ]
        low, high = interval(losses)
        report(
            BENCH,
            f"AUC lost with {name} rows",
            high,
            "",
            target=0.0005 if name == "exported int8" else None,
            at_most=True,
            mean=round(statistics.mean(losses), 6),
            low=round(low, 6),
            seeds=len(losses),
            fp32=round(statistics.mean(scores["fp32"]), 5),
        )


if __name__ == "__main__":
    main()
