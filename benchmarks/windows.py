"""Ids that change with time: ``python -m benchmarks.windows``.

A made click log in which a share of the ids is new in each window. Two models
train on a window and are scored on the next one, window after window: one has
a row for each id that it has met, the other hashes ids into tables of a fixed
number of rows: as many as the first has in the end, so a table that is
allocated whole takes the same bytes. Ids that share a row are all that
differs. Persia's tables hold the rows that were used only, which are fewer
where ids share them; both are printed. Each is given the same batches; both
AUCs are printed, with that of the effects that made the clicks: the best that
any model can reach.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

import persia
from benchmarks.common import arguments, print_machine, report
from persia.data.batches.batch import Batch
from persia.data.batches.jagged import JaggedBatch
from persia.datasets import ClickStream
from persia.train.config import TrainConfig
from persia.train.model import make_model, make_optimizer
from persia.train.trainer import Trainer

BENCH = "windows"


@dataclass(frozen=True)
class Scored:
    """The AUC of each window but the first, and the tables in the end."""

    aucs: list[float]
    bytes: int
    rows: int

    @property
    def mean(self) -> float:
        return sum(self.aucs) / len(self.aucs)


class Hashed:
    """Batches whose ids are remainders: rows of tables of a fixed size."""

    def __init__(self, batches: ClickStream, rows: int) -> None:
        self._batches = batches
        self._rows = rows

    def __iter__(self) -> Iterator[Batch]:
        for b in self._batches:
            ids = b.ids.values().remainder(self._rows)
            lengths = b.ids.lengths_or_none()
            jagged = JaggedBatch(b.ids.keys(), ids, lengths)
            yield Batch(b.dense, jagged, b.label)


def run(data: ClickStream, windows: int, rows: int | None) -> Scored:
    """Trains window after window; ``rows`` of a table, or one for each id."""
    config = TrainConfig(
        model="deepfm", dim=8, optimizer="adagrad", eps=5e-4, seed=1
    )
    torch.manual_seed(1)
    store = persia.Store(make_optimizer(config), seed=1, servers="embedded")
    model = make_model(config, store, data.keys, data.dense_features)
    trainer = Trainer(
        model, torch.optim.Adam(model.parameters(), lr=config.dense_lr)
    )

    def window(number: int) -> ClickStream | Hashed:
        part = data.in_window(number)
        return part if rows is None else Hashed(part, rows)

    aucs = []
    for number in range(windows - 1):
        trainer.fit(window(number), number + 1)
        aucs.append(trainer.evaluate(window(number + 1)).auc)
    tables = store.stats()["tables"].values()
    scored = Scored(
        aucs,
        sum(table["bytes"] for table in tables),
        sum(table["rows"] for table in tables),
    )
    store.close()
    return scored


def main(argv: list[str] | None = None) -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--windows", type=int, default=10)
    parser.add_argument("--rows", type=int, default=100_000, help="a window")
    parser.add_argument("--churn", type=float, default=0.2)
    parser.add_argument("--vocabulary", type=int, default=10_000)
    options = parser.parse_args(argv)
    rows, windows = options.rows, options.windows
    if options.quick:
        rows, windows = 4000, 3
    data = ClickStream(
        rows * windows,
        1024,
        options.seed,
        churn=options.churn,
        vocabulary=options.vocabulary,
        window_samples=rows,
    )
    print_machine(BENCH, torch=torch.__version__)
    unbounded = run(data, windows, None)
    each = math.ceil(unbounded.rows / len(data.keys))
    hashed = run(data, windows, each)
    planted = [
        data.in_window(number).planted_auc() for number in range(1, windows)
    ]
    report(
        BENCH,
        "unbounded",
        unbounded.mean,
        "AUC, mean of the windows",
        baseline="ids hashed into as many rows",
        baseline_value=hashed.mean,
        baseline_source="same run",
        ratio=unbounded.mean / hashed.mean,
        target=1.0,
        best=round(sum(planted) / len(planted), 4),
        by_window=[round(auc, 4) for auc in unbounded.aucs],
        hashed_by_window=[round(auc, 4) for auc in hashed.aucs],
        megabytes=round(unbounded.bytes / 1e6, 1),
        hashed_megabytes=round(hashed.bytes / 1e6, 1),
        table_rows=unbounded.rows,
        hashed_rows=each * len(data.keys),
        hashed_rows_used=hashed.rows,
        churn=options.churn,
        rows=rows * windows,
    )


if __name__ == "__main__":
    main()
