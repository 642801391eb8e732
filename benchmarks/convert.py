"""Converted models against torch's own: ``python -m benchmarks.convert``.

A step is forward, backward and update of a model of 26 ``nn.Embedding`` and
a small dense part, on 4,096 samples of 26 ids: torch's embeddings with
``sparse=True`` and the sparse form of the optimizer, and the same model after
``persia.convert``: in a plain loop, where each module looks its ids up alone,
and in a ``persia.DataLoader``, which joins these lookups.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import persia
from benchmarks.common import (
    BATCH,
    FEATURES,
    alternate,
    arguments,
    feature_batches,
    print_machine,
    report,
    timed,
)

BENCH = "convert"
DIM = 16
STEPS = 4  # a round
BATCHES = 16
Step = Callable[[int], object]


class Clicks(nn.Module):
    """One embedding a feature, and two layers."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(
            nn.Embedding(rows, DIM, sparse=True) for _ in range(FEATURES)
        )
        self.dense = nn.Sequential(
            nn.Linear(FEATURES * DIM, 64), nn.ReLU(), nn.Linear(64, 1)
        )

    def forward(self, ids: Tensor) -> Tensor:
        rows = [table(ids[:, i]) for i, table in enumerate(self.tables)]
        out: Tensor = self.dense(torch.cat(rows, 1))
        return out[:, 0]


def samples(rows: int, kind: str, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Batches of ids [BATCH, FEATURES] and labels."""
    ranks = feature_batches(kind, rows, BATCHES, seed).transpose(0, 2, 1)
    rng = np.random.default_rng(seed)
    return [
        (
            torch.from_numpy(np.ascontiguousarray(one)),
            torch.from_numpy(rng.random(BATCH, dtype=np.float32)),
        )
        for one in ranks
    ]


def train(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    batches: Iterator[tuple[Tensor, Tensor]],
) -> Step:
    """A round of some steps."""

    def run(_: int) -> None:
        for ids, labels in itertools.islice(batches, STEPS):
            loss = nn.functional.binary_cross_entropy_with_logits(
                model(ids), labels
            )
            for one in optimizers:
                one.zero_grad()
            loss.backward()
            for one in optimizers:
                one.step()

    return run


#: Of the embeddings: torch's and ours.
OPTIMIZERS: dict[str, tuple[Any, Any]] = {
    "SGD": (
        lambda p: torch.optim.SGD(p, lr=0.01),
        lambda: persia.optim.SGD(lr=0.01),
    ),
    "Adagrad": (
        lambda p: torch.optim.Adagrad(p, lr=0.01),
        lambda: persia.optim.Adagrad(lr=0.01, eps=1e-10),
    ),
}


def theirs(
    model: Clicks, data: list[tuple[Tensor, Tensor]], optimizer: str
) -> Step:
    return train(
        model,
        [
            OPTIMIZERS[optimizer][0](model.tables.parameters()),
            torch.optim.Adam(model.dense.parameters()),
        ],
        itertools.cycle(data),
    )


class Again:
    """The batches again and again, as one pass."""

    def __init__(self, data: list[tuple[Tensor, Tensor]]) -> None:
        self.data = data

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return itertools.cycle(self.data)


def ours(
    model: Clicks,
    data: list[tuple[Tensor, Tensor]],
    optimizer: str,
    loader: bool,
) -> Step:
    persia.convert(model, optimizer=OPTIMIZERS[optimizer][1]())
    batches = itertools.cycle(data)
    return train(
        model,
        [torch.optim.Adam(model.dense.parameters())],
        iter(persia.DataLoader(Again(data), model)) if loader else batches,
    )


def speed(
    rows: int,
    kind: str,
    optimizer: str,
    rounds: int,
    seed: int,
    target: float,
) -> None:
    data = samples(rows, kind, seed)
    torch.manual_seed(seed)
    model = Clicks(rows)
    steps = {
        "torch": theirs(copy.deepcopy(model), data, optimizer),
        "alone": ours(copy.deepcopy(model), data, optimizer, loader=False),
        "joined": ours(model, data, optimizer, loader=True),
    }
    times = alternate(
        {name: timed(step) for name, step in steps.items()}, rounds, 2
    )
    for name, goal in (("alone", None), ("joined", target)):
        report(
            BENCH,
            f"{FEATURES} tables of {rows} rows, {kind}, {optimizer}, {name}",
            STEPS / times.median(name),
            "steps/s",
            baseline="nn.Embedding(sparse=True)",
            baseline_value=STEPS / times.median("torch"),
            baseline_source="same run",
            ratio=times.ratio(name, "torch"),
            target=goal,
        )


def main(argv: Sequence[str] | None = None) -> None:
    options = arguments(__doc__ or "").parse_args(argv)
    print_machine(BENCH, torch=torch.__version__)
    rounds = 5 if options.quick else 15
    sizes = {10_000: 0.8} if options.quick else {10_000: 0.8, 1_000_000: 1.0}
    for rows, target in sizes.items():
        for kind in ("zipf", "uniform"):
            for optimizer in OPTIMIZERS:
                speed(rows, kind, optimizer, rounds, options.seed, target)


if __name__ == "__main__":
    main()
