"""Embedding modules, the whole Python call: ``python -m benchmarks.module``.

A train step is forward, backward and update of 26 features x 4,096 ids.
The others index plain arrays of fixed size with ranks; ours hashes unbounded
64-bit ids of the same ranks.  Every ratio is measured in the same run, in
turn.  fbgemm needs ``make bench PEERS=1``; without it its lines are left
out, and torch remains.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any

import numpy as np
import torch

import persia
from benchmarks.common import (
    BATCH,
    FEATURES,
    Times,
    alternate,
    arguments,
    feature_batches,
    feature_ids,
    print_machine,
    report,
    scatter,
)
from benchmarks.peers import client, layers

BENCH = "module"
KINDS = ("zipf", "uniform")
IDS = FEATURES * BATCH
STEPS = 6  # a round
SAME_RUN = "same run"
KEYS = [f"f{k}" for k in range(FEATURES)]
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "rowwise_adagrad": lambda: persia.optim.RowWiseAdagrad(lr=0.01),
    "adagrad": lambda: persia.optim.Adagrad(lr=0.01),
    "adam": lambda: persia.optim.Adam(lr=0.01),
}
# TensorFlow Recommenders-Addons 0.8.1, the same work on both cores.
TFRA = 2.27
TFRA_SOURCE = (
    "page: TFRA 0.8.1 (cuckoo table, Adagrad) measured on such a machine,"
    " not in this run"
)


class Sizes:
    """Everything that ``--quick`` makes smaller."""

    def __init__(self, quick: bool) -> None:
        self.rows = (
            {16: 5_000, 64: 2_000} if quick else {16: 1_000_000, 64: 250_000}
        )
        self.batches = 4 if quick else 16
        self.rounds = 2 if quick else 15
        self.unseen_steps = 4 if quick else 60
        self.memory_rows = 1_000_000 if quick else 26_000_000


class Ours:
    """Persia's module, with as many rows as the others' arrays have."""

    def __init__(
        self, dim: int, optimizer: str, threads: int, dtype: str = "fp32"
    ) -> None:
        torch.set_num_threads(threads)
        self.dim, self.threads = dim, threads
        self.store = persia.Store(optimizer=OPTIMIZERS[optimizer]())
        self.bags = persia.EmbeddingBagCollection(
            store=self.store,
            tables=[
                persia.EmbeddingBagConfig(
                    f"t_{key}",
                    embedding_dim=dim,
                    feature_names=[key],
                    data_type=dtype,
                )
                for key in KEYS
            ],
        )
        self.batches: list[torch.Tensor] = []
        self.offsets: torch.Tensor | None = None

    def fill(self, rows: int) -> None:
        """Trains once on every rank, so that all rows are there."""
        chunk = min(rows, 1 << 16)
        grad = torch.full((chunk, FEATURES * self.dim), 1e-4)
        for start in range(0, rows, chunk):
            ranks = np.arange(start, min(start + chunk, rows))
            ids = np.stack(
                [scatter(ranks, salt=f + 1) for f in range(FEATURES)]
            )
            self.one(torch.from_numpy(ids.reshape(-1)), grad[: len(ranks)])

    def stream(self, kind: str, rows: int, batches: int, seed: int) -> None:
        ids = feature_ids(feature_batches(kind, rows, batches, seed))
        self.batches = [torch.from_numpy(x.reshape(-1)) for x in ids]
        self.grad = torch.randn(BATCH, FEATURES * self.dim) * 1e-3

    def one(self, ids: torch.Tensor, grad: torch.Tensor) -> None:
        batch = persia.JaggedBatch(KEYS, ids, offsets=self.offsets)
        self.bags(batch).values().backward(grad)

    def train(self, start: int, count: int) -> float:
        """Seconds of ``count`` steps."""
        torch.set_num_threads(self.threads)
        begin = time.perf_counter()
        for k in range(start, start + count):
            self.one(self.batches[k % len(self.batches)], self.grad)
        return time.perf_counter() - begin

    def forward(self, start: int, count: int) -> float:
        """Seconds of ``count`` forwards without gradient."""
        torch.set_num_threads(self.threads)
        begin = time.perf_counter()
        with torch.no_grad():
            for k in range(start, start + count):
                ids = self.batches[k % len(self.batches)]
                self.bags(
                    persia.JaggedBatch(KEYS, ids, offsets=self.offsets)
                ).values()
        return time.perf_counter() - begin

    def close(self) -> None:
        self.store.close()
        self.__dict__.clear()
        gc.collect()


Contestants = dict[str, Callable[[int], float]]


def in_turn(contestants: Contestants, sizes: Sizes) -> Times:
    return alternate(contestants, sizes.rounds)


def rounds_of(run: Callable[[int, int], float]) -> Callable[[int], float]:
    """A contestant of ``STEPS`` steps a round."""
    return lambda k: run(k * STEPS, STEPS)


class Others:
    """The other systems of one phase, opened and closed together."""

    def __init__(self, stack: ExitStack, peers: client.Peers | None) -> None:
        self._stack, self._peers = stack, peers
        self.train: dict[str, Callable[[int, int], float]] = {}
        self.forward: dict[str, Callable[[int, int], float]] = {}
        self._streams: list[Callable[..., Any]] = []

    def add_torch(
        self, rows: int, dim: int, optimizer: str, threads: int
    ) -> None:
        layer = layers.TorchBags(rows, dim, optimizer, threads)
        self._stack.callback(layer.close)
        self.train["torch"] = layer.train
        self.forward["torch"] = layer.forward
        self._streams.append(layer.stream)

    def add_fbgemm(
        self,
        name: str,
        kind: str,
        rows: int,
        dim: int,
        optimizer: str,
        threads: int,
    ) -> None:
        if self._peers is None:
            return
        there = self._peers.open(
            name,
            kind,
            rows=rows,
            dim=dim,
            optimizer=optimizer,
            threads=threads,
        )
        self._stack.callback(there.call, "close")
        self.train[name] = lambda k, n: there.call("train", start=k, count=n)
        self.forward[name] = lambda k, n: there.call(
            "forward", start=k, count=n
        )
        self._streams.append(lambda **args: there.call("stream", **args))

    def stream(self, kind: str, batches: int, seed: int) -> None:
        for make in self._streams:
            make(kind=kind, batches=batches, seed=seed, batch=BATCH)

    def best(self, times: Times, prefix: str) -> str | None:
        """The fastest of those whose name begins so."""
        names = [n for n in self.train if n.startswith(prefix)]
        return min(names, key=times.median) if names else None


def line(
    case: str,
    times: Times,
    other: str | None,
    what: str,
    target: float,
    **more: Any,
) -> None:
    """One ratio of ours to another system, if that one is there."""
    work = STEPS * IDS
    if other is None:
        return
    report(
        BENCH,
        case,
        times.rate("ours", work),
        "M rows/s",
        baseline=what,
        baseline_value=times.rate(other, work),
        baseline_source=SAME_RUN,
        ratio=times.ratio("ours", other),
        target=target,
        **more,
    )


def phase(
    sizes: Sizes,
    peers: client.Peers | None,
    dim: int,
    optimizer: str,
    threads: int,
    seed: int,
) -> None:
    """One optimizer, dim and number of threads against the others."""
    rows = sizes.rows[dim]
    rowwise = optimizer == "rowwise_adagrad"
    cores = "one thread each" if threads == 1 else "both cores"
    with ExitStack() as stack:
        ours = Ours(dim, optimizer, threads)
        stack.callback(ours.close)
        ours.fill(rows)
        others = Others(stack, peers)
        fused = "rowwise_adagrad" if rowwise else "adagrad"
        others.add_fbgemm("fbgemm", "fbgemm", rows, dim, fused, threads)
        if threads > 1:
            # In one process both cores help fbgemm in either of two ways.
            others.add_fbgemm(
                "fbgemm_threads", "fbgemm_threads", rows, dim, fused, threads
            )
        if not rowwise:
            others.add_torch(rows, dim, optimizer, threads)
        for kind in KINDS:
            ours.stream(kind, rows, sizes.batches, seed)
            others.stream(kind, sizes.batches, seed)
            tail = f"dim {dim} {kind}, {cores}"
            runs = {"ours": ours.train, **others.train}
            times = alternate(
                {n: rounds_of(f) for n, f in runs.items()}, sizes.rounds
            )
            fbgemm = others.best(times, "fbgemm")
            named = f"fbgemm {fused}" + (
                ", its best with both cores" if threads > 1 else ""
            )
            if rowwise:
                line(
                    f"row-wise Adagrad step {tail}",
                    times,
                    fbgemm,
                    named,
                    1.0 if threads == 1 else 1.5,
                    way=fbgemm,
                )
                runs = {"ours": ours.forward, **others.forward}
                times = alternate(
                    {n: rounds_of(f) for n, f in runs.items()}, sizes.rounds
                )
                line(
                    f"forward {tail}",
                    times,
                    others.best(times, "fbgemm"),
                    named,
                    0.7,
                )
                continue
            step = f"{'Adagrad' if optimizer == 'adagrad' else 'Adam'} step"
            line(
                f"{step} {tail}, against fbgemm",
                times,
                fbgemm,
                named,
                2.0,
                way=fbgemm,
            )
            mine = "Adagrad" if optimizer == "adagrad" else "SparseAdam"
            joined = (
                f"torch.nn.EmbeddingBag(sparse=True) + {mine}, joined table"
            )
            line(f"{step} {tail}, against torch", times, "torch", joined, 4.0)
            if optimizer == "adagrad" and (dim, threads, kind) == (
                16,
                2,
                "zipf",
            ):
                report(
                    BENCH,
                    f"{step} {tail}, against TFRA",
                    times.rate("ours", STEPS * IDS),
                    "M rows/s",
                    baseline="TensorFlow Recommenders-Addons, Adagrad",
                    baseline_value=TFRA,
                    baseline_source=TFRA_SOURCE,
                    target=10.0,
                )


def offsets_given(sizes: Sizes, seed: int) -> None:
    """What general bags cost: the same batches with explicit offsets."""
    ours = Ours(16, "rowwise_adagrad", 1)
    ours.fill(sizes.rows[16])
    ours.stream("zipf", sizes.rows[16], sizes.batches, seed)
    offsets = torch.arange(IDS + 1)

    def run(
        given: torch.Tensor | None, steps: Callable[[int, int], float]
    ) -> Callable[[int], float]:
        def one(k: int) -> float:
            ours.offsets = given
            return steps(k * STEPS, STEPS)

        return one

    for name, steps in (("step", ours.train), ("forward", ours.forward)):
        times = alternate(
            {"ours": run(offsets, steps), "plain": run(None, steps)},
            sizes.rounds,
        )
        report(
            BENCH,
            f"{name} dim 16 zipf, one thread, bags with offsets",
            times.rate("ours", STEPS * IDS),
            "M rows/s",
            baseline="the same without offsets: one id a bag",
            baseline_value=times.rate("plain", STEPS * IDS),
            baseline_source=SAME_RUN,
            ratio=times.ratio("ours", "plain"),
        )
    ours.close()


def unseen(sizes: Sizes, threads: int) -> None:
    """Train steps whose ids have no row yet, from an empty table."""
    ours = Ours(16, "adagrad", threads)
    ours.stream("uniform", 10, 1, 0)
    ranks = np.arange(sizes.unseen_steps * BATCH).reshape(-1, 1, BATCH)
    ids = feature_ids(np.broadcast_to(ranks, (len(ranks), FEATURES, BATCH)))
    ours.batches = [torch.from_numpy(x.reshape(-1)) for x in ids]
    seconds = [ours.train(k, 1) for k in range(len(ids))]
    report(
        BENCH,
        f"Adagrad step of unseen ids dim 16, threads: {threads}",
        len(ids) * IDS / sum(seconds) / 1e6,
        "M rows/s",
        target=3.0,
        rows=len(ids) * IDS,
        slowest_step_ms=round(1e3 * max(seconds), 2),
        median_step_ms=round(1e3 * float(np.median(seconds)), 2),
    )
    ours.close()


def resident_bytes(optimizer: str, dtype: str, rows: int) -> None:
    """In a process of its own: prints rows and the memory that they take."""
    ours = Ours(16, optimizer, 2, dtype)
    ours.stream("uniform", 10, 1, 0)
    per_feature = rows // FEATURES // BATCH * BATCH

    def resident() -> int:
        with open("/proc/self/statm", encoding="ascii") as f:
            return int(f.read().split()[1]) * 4096

    def step(start: int) -> None:
        ranks = np.broadcast_to(
            np.arange(start, start + BATCH), (FEATURES, BATCH)
        )
        ours.batches = [
            torch.from_numpy(feature_ids(ranks[None])[0].reshape(-1))
        ]
        ours.train(0, 1)

    for k in range(4):
        step(k * BATCH)
    first, before = 4 * BATCH, resident()
    for start in range(first, per_feature, BATCH):
        step(start)
    made = (per_feature - first) * FEATURES
    print(json.dumps({"rows": made, "bytes": resident() - before}))


def memory(sizes: Sizes) -> None:
    """Resident bytes a row, seen from outside: what the process grew by."""
    for optimizer, dtype, target in (
        ("rowwise_adagrad", "fp32", 96),
        ("rowwise_adagrad", "bf16", 64),
        ("rowwise_adagrad", "int8", 52),
        ("adagrad", "fp32", None),
    ):
        call = (
            "from benchmarks.module import resident_bytes as r;"
            f"r({optimizer!r}, {dtype!r}, {sizes.memory_rows})"
        )
        out = subprocess.run(
            [sys.executable, "-c", call],
            check=True,
            capture_output=True,
            text=True,
        )
        found = json.loads(out.stdout.splitlines()[-1])
        report(
            BENCH,
            f"resident bytes a row {optimizer} dim 16 {dtype}",
            found["bytes"] / found["rows"],
            "B",
            target=target,
            at_most=True,
            rows=found["rows"],
        )


def main(argv: list[str] | None = None) -> None:
    options = arguments(__doc__ or "").parse_args(argv)
    sizes = Sizes(options.quick)
    parts: dict[str, Callable[[client.Peers | None], None]] = {}
    for dim in sizes.rows:
        for optimizer in OPTIMIZERS:
            for threads in (1, 2):
                parts[f"{optimizer}-{dim}-{threads}"] = (
                    lambda peers, d=dim, o=optimizer, t=threads: phase(
                        sizes, peers, d, o, t, options.seed
                    )
                )
    parts["offsets"] = lambda _: offsets_given(sizes, options.seed)
    parts["unseen"] = lambda _: [unseen(sizes, t) for t in (1, 2)]
    parts["memory"] = lambda _: memory(sizes)
    with client.Peers() if client.available() else nullcontext() as peers:
        versions = {"torch": torch.__version__}
        if peers:
            versions |= peers.versions()
        else:
            versions["fbgemm"] = "not installed: make bench PEERS=1"
        print_machine(BENCH, **versions)
        for name, part in parts.items():
            if name.startswith(options.only):
                part(peers)


if __name__ == "__main__":
    main()
