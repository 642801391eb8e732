"""A trainer and a server as processes: ``python -m benchmarks.cluster``.

The work on which the original PERSIA and PaddlePaddle's parameter server were
measured: 26 features of one id a sample, dim 16, Adagrad, batch 4,096, ids by
Zipf(1.05) among 1 M a feature, one linear layer, fp16 on the wire.  One
trainer and one parameter server (``persia serve ps``) share the machine.
Then: the time from the server's start to the first trained batch, and what
the server holds in memory for a row, and for a row of capacity.

Those systems need other Pythons than this one, so their figures are not from
this run. We measured them before, on 2 cores of an AMD EPYC. The set-ups
differ: the original PERSIA ran its four roles as processes on these cores,
here a trainer and a server share them (``benchmarks.roles`` runs four).
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

from benchmarks.common import (
    BATCH,
    FEATURES,
    arguments,
    print_machine,
    report,
)
from benchmarks.system.processes import Processes, Trainer
from persia.distributed.launch import reserve

BENCH = "cluster"
EARLIER = (
    "measured by us in an earlier run on 2 cores of an AMD EPYC; the original "
    "PERSIA with four roles, here a trainer and a server"
)
PERSIA = "original PERSIA 0.1, all roles as processes, staleness"
PADDLE = "PaddlePaddle 2.6.2, CPU parameter server, asynchronous"


# torch's own threads spin between its loops, on the cores that the server
# needs, too: torchrun gives each rank one, and so does this.
THREADS = {"threads": 1, "store_threads": 2}


class Sizes:
    """Everything that ``--quick`` makes smaller."""

    def __init__(self, quick: bool) -> None:
        self.vocabulary = 10_000 if quick else 1_000_000
        self.batches = 8 if quick else 128
        self.steps = 8 if quick else 128
        self.rounds = 2 if quick else 7
        self.starts = 1 if quick else 5
        self.memory_rows = 20_000 if quick else 1_000_000  # of each feature
        self.capacity = 100_000_000  # rows of each feature


def throughput(sizes: Sizes, seed: int) -> None:
    """Samples a second at staleness 8 and 0, in turn."""
    with Processes() as processes:
        (server,) = processes.servers(1)
        trainer = processes.trainer()
        trainer.call("open", servers=server.address, seed=seed, **THREADS)
        trainer.call(
            "draw",
            kind="zipf",
            rows=sizes.vocabulary,
            batches=sizes.batches,
            seed=seed,
        )
        trainer.call("steps", count=sizes.batches, staleness=8)
        modes = (8, 0)
        seconds: dict[int, list[float]] = {s: [] for s in modes}
        cpu: dict[int, list[float]] = {s: [0.0, 0.0] for s in modes}
        histogram: dict[int, dict[str, int]] = {s: {} for s in modes}
        for k in range(sizes.rounds):
            for staleness in modes if k % 2 == 0 else reversed(modes):
                before = server.cpu(), trainer.cpu()
                spent = trainer.call(
                    "steps", count=sizes.steps, staleness=staleness
                )
                seconds[staleness].append(spent["seconds"])
                cpu[staleness][0] += server.cpu() - before[0]
                cpu[staleness][1] += trainer.cpu() - before[1]
                for key, n in spent["staleness"].items():
                    known = histogram[staleness]
                    known[key] = known.get(key, 0) + n
        rates = {
            s: sizes.steps * BATCH / statistics.median(seconds[s])
            for s in modes
        }
        done = sizes.steps * sizes.rounds
        for staleness, baseline, measured, target in (
            (8, f"{PERSIA} 8", 56_000, 5.0),
            (8, PADDLE, 95_000, 2.5),
            (0, f"{PERSIA} 1", 36_000, 5.0),
        ):
            server_ms, trainer_ms = (1e3 * x / done for x in cpu[staleness])
            report(
                BENCH,
                f"staleness {staleness} against {baseline.split()[0]}"
                f"{' PERSIA' if 'PERSIA' in baseline else ''}",
                rates[staleness],
                "samples/s",
                baseline=baseline,
                baseline_value=measured,
                baseline_source=EARLIER,
                target=target,
                step_ms=round(1e3 * BATCH / rates[staleness], 2),
                server_cpu_ms=round(server_ms, 2),
                trainer_cpu_ms=round(trainer_ms, 2),
                mean_staleness=mean(histogram[staleness]),
                largest_staleness=max(map(int, histogram[staleness])),
            )


def mean(histogram: dict[str, int]) -> float:
    """Of a histogram whose keys came as texts."""
    n = sum(histogram.values())
    return round(sum(int(k) * x for k, x in histogram.items()) / n, 2)


# A process that has torch and an optimizer, and nothing of ours.
BARE = "import torch; torch.optim.SGD(torch.nn.Linear(1, 1).parameters())"


def first_batch(sizes: Sizes) -> None:
    """From the start of the server's process to the end of the first batch;
    the trainer starts beside it, as with persia launch."""
    spent, serving, bare = [], [], []
    for _ in range(sizes.starts):
        start = time.time()
        subprocess.run([sys.executable, "-c", BARE], check=True)
        bare.append(time.time() - start)
        with reserve() as held, Processes() as processes:
            start = time.time()
            (server,) = processes.servers(1, port=held.getsockname()[1])
            trainer = processes.trainer()
            address = server.address
            serving.append(time.time() - start)
            trainer.call("open", servers=address, **THREADS)
            spent.append(trainer.call("first_batch") - start)
    report(
        BENCH,
        "first batch after the server's start",
        statistics.median(spent),
        "s",
        target=3.0,
        at_most=True,
        serving_after_s=round(statistics.median(serving), 3),
        torch_alone_s=round(statistics.median(bare), 3),
        each=[round(x, 2) for x in spent],
    )


def _trainer(
    processes: Processes, address: str, capacity: int | None = None
) -> Trainer:
    """A trainer whose tables are declared."""
    trainer = processes.trainer()
    trainer.call(
        "open",
        servers=address,
        optimizer="rowwise_adagrad",
        capacity=capacity,
        **THREADS,
    )
    return trainer


def memory(sizes: Sizes) -> None:
    """What the server's process holds, as the system counts it."""
    with Processes() as processes:
        (server,) = processes.servers(1)
        trainer = _trainer(processes, server.address)
        # Buffers of requests and replies are there before rows are counted.
        warm = 8 * BATCH
        trainer.call("make_rows", first=0, stop=warm)
        rows, before = trainer.call("rows"), server.resident()
        trainer.call("make_rows", first=warm, stop=warm + sizes.memory_rows)
        made = trainer.call("rows") - rows
        if made != FEATURES * sizes.memory_rows:
            raise RuntimeError(f"{made} rows were made")
        report(
            BENCH,
            "resident bytes a row dim 16, row-wise Adagrad",
            (server.resident() - before) / made,
            "B",
            target=110,
            at_most=True,
            rows=made,
        )
    with Processes() as processes:
        (server,) = processes.servers(1)
        address = server.address
        before = server.resident()
        _trainer(processes, address, sizes.capacity)
        rows = FEATURES * sizes.capacity
        report(
            BENCH,
            "resident bytes per row of capacity, before the first row",
            (server.resident() - before) / rows,
            "B",
            target=0.1,
            at_most=True,
            capacity=rows,
        )


def main(argv: Sequence[str] | None = None) -> None:
    options = arguments(__doc__.split("\n")[0]).parse_args(argv)
    sizes = Sizes(options.quick)
    print_machine(BENCH)
    parts = {
        "throughput": lambda: throughput(sizes, options.seed),
        "first": lambda: first_batch(sizes),
        "memory": lambda: memory(sizes),
    }
    for name, part in parts.items():
        if name.startswith(options.only):
            part()


if __name__ == "__main__":
    main()
