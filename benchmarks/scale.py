"""Speed against size: ``python -m benchmarks.scale``.

One trainer and, for each size, a parameter server whose rows have all been
made by training: 10 M to 3 B parameters in memory (dim 16, bf16, row-wise
Adagrad).  The work is that of benchmarks.cluster with uniform ids, so that
every row is as likely as any other and nothing but the size differs.  The
servers live side by side and are measured in turn.  Sizes that would not fit
into the memory that is free are left out, and said so.

Memory itself becomes slower with size: beside each figure is a bare gather,
of as many rows of 64 bytes from a plain array in 2 MiB pages, by
uniform numbers, on one thread, after the servers have ended.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.common import (
    BATCH,
    FEATURES,
    arguments,
    print_machine,
    report,
)
from benchmarks.native import KnownRows
from benchmarks.system.processes import Processes

BENCH = "scale"
DIM = 16
ROW_BYTES = 70  # about: id, clock, vector, one scalar, index; with slack
STALENESS = 8
RESERVE = 2 << 30  # bytes left to everybody else


class Sizes:
    """Everything that ``--quick`` makes smaller."""

    def __init__(self, quick: bool) -> None:
        self.parameters = (
            [1_000_000, 3_000_000]
            if quick
            else [10**7, 3 * 10**7, 10**8, 3 * 10**8, 10**9, 3 * 10**9]
        )
        self.batches = 8 if quick else 64
        self.steps = 8 if quick else 64
        self.rounds = 2 if quick else 11


def cache_bytes() -> int:
    """Of the largest cache of a core."""
    largest = 0
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("*/size"):
        text = path.read_text(encoding="ascii").strip()
        unit = {"K": 1 << 10, "M": 1 << 20}.get(text[-1:])
        if unit:
            largest = max(largest, int(text[:-1]) * unit)
    return largest or 32 << 20


def free_bytes() -> int:
    """Of memory that processes could still take."""
    for line in Path("/proc/meminfo").read_text("ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/meminfo says nothing of MemAvailable")


def gather_ns(rows: int, batches: int, rounds: int, seed: int) -> float:
    """Of one row of a bare gather: the median of rounds of 16 batches."""
    array = KnownRows(rows, 4 * DIM, 0, DIM, 0)
    try:
        array.fill(rows)
        out = np.zeros((BATCH * FEATURES, DIM), np.float32)
        random = np.random.default_rng(seed)
        shape = (min(batches, 16), BATCH * FEATURES)
        ranks = random.integers(0, rows, shape, dtype=np.uint32)
        spent = []
        for _ in range(rounds):
            start = time.perf_counter_ns()
            for row in ranks:
                array.gather(out, row)
            spent.append((time.perf_counter_ns() - start) / ranks.size)
        return statistics.median(spent)
    finally:
        array.close()


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__.split("\n")[0])
    parser.add_argument(
        "--most", type=float, default=0, help="parameters of the largest size"
    )
    options = parser.parse_args(argv)
    sizes = Sizes(options.quick)
    cache = cache_bytes()
    print_machine(BENCH, cache_bytes=cache)
    names: dict[int, int] = {}  # parameters -> rows of a feature
    left_out: list[int] = []
    left = free_bytes() - RESERVE
    wanted = [p for p in sizes.parameters if not 0 < options.most < p]
    for parameters in reversed(wanted):
        rows = -(-parameters // (DIM * FEATURES))
        if rows * FEATURES * ROW_BYTES > left:
            left_out.append(parameters)
            continue
        left -= rows * FEATURES * ROW_BYTES
        names[parameters] = rows
    names = dict(sorted(names.items()))
    seconds: dict[int, list[float]] = {p: [] for p in names}
    making: dict[int, float] = {}
    held: dict[int, int] = {}
    with Processes() as processes:
        trainer = processes.trainer()
        for parameters, rows in names.items():
            (server,) = processes.servers(1)
            trainer.call(
                "open",
                loop=str(parameters),
                servers=server.address,
                threads=1,
                store_threads=2,
                dim=DIM,
                optimizer="rowwise_adagrad",
                data_type="bf16",
            )
            made = trainer.call(
                "make_rows", loop=str(parameters), first=0, stop=rows
            )
            making[parameters] = rows * FEATURES / made["seconds"] / 1e6
            have = trainer.call("rows", loop=str(parameters))
            if have != rows * FEATURES:
                raise RuntimeError(f"{have} rows in place of {parameters}")
            held[parameters] = trainer.call(
                "table_bytes", loop=str(parameters)
            )
            trainer.call(
                "draw",
                loop=str(parameters),
                kind="uniform",
                rows=rows,
                batches=sizes.batches,
                seed=options.seed,
            )
        for k in range(-1, sizes.rounds):
            for parameters in names if k % 2 == 0 else reversed(names):
                run = trainer.call(
                    "steps",
                    loop=str(parameters),
                    count=sizes.steps,
                    staleness=STALENESS,
                )
                if k >= 0:
                    seconds[parameters].append(run["seconds"])
    rates = {
        p: sizes.steps * BATCH / statistics.median(s)
        for p, s in seconds.items()
    }
    gathers = {
        p: gather_ns(
            rows * FEATURES, sizes.batches, sizes.rounds, options.seed
        )
        for p, rows in names.items()
    }
    for parameters, rate in rates.items():
        report(
            BENCH,
            f"{parameters:,} parameters",
            rate,
            "samples/s",
            rows=names[parameters] * FEATURES,
            bytes_a_row=round(
                held[parameters] / (names[parameters] * FEATURES), 1
            ),
            made_m_rows_a_second=round(making[parameters], 2),
            ns_an_id=round(1e9 / (rate * FEATURES), 2),
            gather_ns_an_id=round(gathers[parameters], 2),
        )
    beyond = [
        p for p in rates if held[p] >= (0 if options.quick else 4 * cache)
    ]
    if not beyond:
        raise SystemExit("no size is beyond the caches")
    slow = min(beyond, key=rates.__getitem__)
    fast = max(beyond, key=rates.__getitem__)
    pairs = zip(seconds[fast], seconds[slow], strict=True)
    report(
        BENCH,
        "slowest size against fastest, beyond the caches",
        rates[slow],
        "samples/s",
        baseline=f"{fast:,} parameters",
        baseline_value=rates[fast],
        baseline_source="same run",
        ratio=statistics.median(a / b for a, b in pairs),
        target=0.9,
        slowest=f"{slow:,} parameters",
        # What a bare gather loses between the same two sizes, in ns an id.
        lost_ns=round(1e9 / FEATURES * (1 / rates[slow] - 1 / rates[fast]), 2),
        gather_lost_ns=round(gathers[slow] - gathers[fast], 2),
        sizes=beyond,
        left_out=left_out,
    )


if __name__ == "__main__":
    main()
