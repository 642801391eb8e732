"""How fresh a served model is while it trains, and what that costs the
training: ``python -m benchmarks.fresh``.

The DLRM of the Criteo benchmark (26 features of one id, 13 numbers, dim 16)
trains in this process, and publishes packets into a folder. Another process
follows them as ``persia serve model`` does.

- ``cost``: steps with a publisher against steps without one, in turn; the
  median of the rounds' ratios.
- ``lag``: from an update of a row to the first moment when the other process
  answers with it: p50 and p99 over all steps. The processes share the
  processors.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

import persia
from benchmarks.common import FEATURES, arguments, print_machine, report
from persia import models
from persia.serving import Publisher

BENCH = "fresh"
DENSE, DIM, BATCH = 13, 16, 1024
KEYS = [f"f{i:02d}" for i in range(FEATURES)]
PROBE = 1 << 40  # an id that no batch has


class Sizes:
    """Everything that ``--quick`` makes smaller."""

    def __init__(self, quick: bool) -> None:
        self.vocabulary = 5_000 if quick else 100_000
        self.seconds = 2.0 if quick else 8.0
        self.rounds = 2 if quick else 8
        self.lag_seconds = 5.0 if quick else 60.0
        self.every = 0.5


class Training:
    """A model that trains on random ids."""

    def __init__(self, sizes: Sizes, seed: int) -> None:
        torch.manual_seed(seed)
        self.store = persia.Store(persia.optim.Adagrad(lr=0.05))
        self.model = models.DLRM(
            persia.EmbeddingBagCollection(
                store=self.store,
                tables=[
                    persia.EmbeddingBagConfig(key, DIM, [key]) for key in KEYS
                ],
            ),
            DENSE,
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        # Few ids are in most samples, as in logs.
        rng = np.random.default_rng(seed)
        share = rng.random((64, FEATURES * BATCH)) ** 3
        self.batches = torch.from_numpy(
            (share * sizes.vocabulary).astype(np.int64)
        )
        self.steps = 0
        ids = torch.arange(sizes.vocabulary)
        for key in KEYS:
            self.store.set_rows(key, ids, torch.randn(len(ids), DIM) * 0.01)

    @property
    def example(self) -> tuple[torch.Tensor, persia.JaggedBatch]:
        """Of two samples."""
        ids = torch.zeros(2 * FEATURES, dtype=torch.int64)
        return torch.zeros(2, DENSE), persia.JaggedBatch(KEYS, ids)

    def step(self) -> None:
        """One of the training."""
        ids = self.batches[self.steps % len(self.batches)]
        out = self.model(
            torch.rand(BATCH, DENSE), persia.JaggedBatch(KEYS, ids)
        )
        out.sigmoid().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1

    def publisher(self, folder: Path, sizes: Sizes) -> Publisher:
        """Into a folder; its first version is written."""
        return Publisher(
            self.model,
            folder,
            example=self.example,
            every=sizes.every,
            rebase=1e6,
        )


def rate(training: Training, seconds: float, *calls: Publisher) -> float:
    """Samples a second."""
    begin, steps = time.perf_counter(), training.steps
    while time.perf_counter() - begin < seconds:
        training.step()
        for publisher in calls:
            publisher.step()
    spent = time.perf_counter() - begin
    return (training.steps - steps) * BATCH / spent


def cost(sizes: Sizes, training: Training) -> None:
    """Samples a second with and without a publisher."""
    ratios, rates = [], []
    rate(training, sizes.seconds / 2)
    for i in range(sizes.rounds):
        with tempfile.TemporaryDirectory() as folder:
            found = {}
            for on in (i % 2 == 0, i % 2 == 1):
                if not on:
                    found[on] = rate(training, sizes.seconds)
                    continue
                place = Path(folder) / "out"
                with training.publisher(place, sizes) as publisher:
                    found[on] = rate(training, sizes.seconds, publisher)
        ratios.append(found[True] / found[False])
        rates.append(found[False])
    report(
        BENCH,
        "cost",
        round(statistics.median(ratios), 4),
        "samples/s with / without",
        target=0.97,
        lowest=round(min(ratios), 4),
        highest=round(max(ratios), 4),
        samples_per_second=round(statistics.median(rates)),
    )


def lag(sizes: Sizes, training: Training) -> None:
    """Seconds until another process answers with a row."""
    with tempfile.TemporaryDirectory() as folder:
        out, seen = Path(folder) / "out", Path(folder) / "seen"
        begin = time.time()
        probe = torch.tensor([PROBE])
        training.store.set_rows(KEYS[0], probe, torch.zeros(1, DIM))
        rows = 0
        with training.publisher(out, sizes) as publisher:
            command = [sys.executable, "-m", "benchmarks.fresh"]
            with subprocess.Popen(
                [*command, "--follow", str(out), "--seen", str(seen)]
            ) as follower:
                while not seen.exists():
                    time.sleep(0.05)
                times = []
                end = time.time() + sizes.lag_seconds
                while time.time() < end:
                    training.step()
                    now = time.time() - begin
                    value = torch.full((1, DIM), now)
                    training.store.set_rows(KEYS[0], probe, value)
                    times.append(float(value[0, 0]))
                    publisher.step()
                publisher.flush()
                publisher.publish()
                publisher.flush()
                rows = publisher.rows_published
                time.sleep(2)
                follower.terminate()
        lines = [line.split() for line in seen.read_text().splitlines()]
        values = np.array([float(v) for _, v in lines])
        at = np.array([float(t) - begin for t, _ in lines])
        first = np.searchsorted(values, np.array(times))
        assert (first < len(values)).all(), "not all updates were seen"
        late = at[first] - np.array(times)
        report(
            BENCH,
            "lag",
            round(float(np.quantile(late, 0.99)), 3),
            "s until the 99th of 100 updates is seen",
            target=2.0,
            at_most=True,
            every=sizes.every,
            rows_per_second=round(rows / sizes.lag_seconds),
            p50=round(float(np.quantile(late, 0.5)), 3),
            most=round(float(late.max()), 3),
        )


def follow(root: str, seen: str) -> None:
    """Applies packets as they appear; writes when it sees which value."""
    torch.set_num_threads(1)
    loaded = persia.load_model(root)
    probe, last = torch.tensor([PROBE]), -1.0
    with open(seen, "w", encoding="ascii") as file:
        while os.getppid() != 1:
            loaded.catch_up()
            value = float(loaded.vectors(KEYS[0], probe)[0, 0])
            if value != last:
                file.write(f"{time.time()} {value}\n")
                file.flush()
                last = value
            time.sleep(0.02)


def main() -> None:
    """Runs the parts."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--follow", default="")
    parser.add_argument("--seen", default="")
    options = parser.parse_args()
    if options.follow:
        follow(options.follow, options.seen)
        return
    print_machine(BENCH)
    sizes = Sizes(options.quick)
    training = Training(sizes, options.seed)
    for name, part in {"cost": cost, "lag": lag}.items():
        if name.startswith(options.only):
            part(sizes, training)


if __name__ == "__main__":
    main()
