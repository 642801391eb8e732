"""What training feels of moves: ``python -m benchmarks.elastic``.

The work of ``benchmarks.cluster`` (26 features of one id a sample, dim 16,
Adagrad, batch 4,096, Zipf(1.05)) with servers of 8 shards that become 3, and
2 again, while a trainer runs. Times of steps during moves are compared with
those before them, of the same run; a round has both. A move's pause is the
time in which its shard takes no updates. ``idle`` has the rows per second of
moves beside no training, the processor time of a row at both servers, and
loads of a checkpoint of the same rows. A source sends a quarter of the time.

All processes share this machine, so what a move computes is taken from
training: a figure is an upper bound of that of servers on machines of their
own.
"""

from __future__ import annotations

import itertools
import re
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.cluster import THREADS
from benchmarks.common import BATCH, arguments, print_machine, report
from benchmarks.system.processes import Process, Processes, Trainer
from persia.distributed.scaling import Progress, Scaling, plan

BENCH = "elastic"


class Sizes:
    """Everything that ``--quick`` makes smaller."""

    def __init__(self, quick: bool) -> None:
        self.vocabularies = [10_000] if quick else [30_000, 300_000]
        self.batches = 8 if quick else 64
        self.rounds = 1 if quick else 3
        self.quiet = 2.0 if quick else 5.0  # seconds before moves


class Watch:
    """Rows and pauses of moves."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.pauses: list[float] = []

    def __call__(self, progress: Progress) -> None:
        if found := re.search(r"no updates for (\S+) s", progress.text):
            self.rows.append(progress.rows)
            self.pauses.append(float(found[1]))


def serve(processes: Processes, *flags: str) -> tuple[Process, str]:
    """Starts a server; it and its address."""
    started = processes.start(
        "ps",
        [sys.executable, "-m", "persia", "serve", "ps", "--port", "0", *flags],
    )
    while not (found := re.match(r"serving .* on (\S+)", started.line())):
        pass
    return started, found[1]


def servers(
    processes: Processes, folder: Path, durable: str
) -> tuple[list[Process], list[str]]:
    """Two with four shards each, and one that joins; their addresses."""
    started: list[Process] = []
    found: list[str] = []
    for name in ("0-3/8", "4-7/8", ""):
        flags = ["--checkpoints", str(folder / "ckpt")]
        flags += ["--shard", name] if name else ["--join", found[0]]
        if durable != "off":
            log = folder / ("log" if name else "joined")
            flags += ["--durable", durable, "--log", str(log)]
        process, address = serve(processes, *flags)
        started.append(process)
        found.append(address)
    return started, found


def percentile(times: Sequence[float], of_100: int) -> float:
    return sorted(times)[min(len(times) * of_100 // 100, len(times) - 1)]


def steps_of(times: Sequence[float], begin: float, end: float) -> list[float]:
    """How long steps took that ended within."""
    pairs = itertools.pairwise(times)
    return [b - a for a, b in pairs if begin <= a and b <= end]


def one_round(
    trainer: Trainer,
    scaling: Scaling,
    sizes: Sizes,
    staleness: int,
    over: Path,
    watch: Watch,
) -> tuple[list[float], list[float]]:
    """Durations of steps without moves, and with them."""
    answer: list[list[float]] = []

    def train() -> None:
        answer.append(
            trainer.call("step_times", end=str(over), staleness=staleness)
        )

    thread = threading.Thread(target=train)
    thread.start()
    time.sleep(2.0)  # threads and connections are there
    quiet = time.time()
    time.sleep(sizes.quiet)
    begin = time.time()
    for to in (3, 2):
        scaling.run(plan(scaling.places(), to), watch)
    end = time.time()
    over.touch()
    thread.join()
    over.unlink()
    return steps_of(answer[0], quiet, begin), steps_of(answer[0], begin, end)


def run(
    sizes: Sizes, seed: int, rows: int, staleness: int, durable: str
) -> None:
    """Throughput, steps and pauses of one set-up."""
    with (
        tempfile.TemporaryDirectory() as folder,
        Processes() as processes,
    ):
        _, addresses = servers(processes, Path(folder), durable)
        trainer = processes.trainer()
        given = ",".join(addresses[:2])
        trainer.call("open", servers=given, seed=seed, **THREADS)
        trainer.call(
            "draw", kind="zipf", rows=rows, batches=sizes.batches, seed=seed
        )
        trainer.call("make_rows", first=0, stop=rows)
        watch = Watch()
        rates, ratios, tails = [], [], []
        with Scaling(addresses) as scaling:
            for _ in range(sizes.rounds):
                quiet, moving = one_round(
                    trainer,
                    scaling,
                    sizes,
                    staleness,
                    Path(folder) / "over",
                    watch,
                )
                rates.append(BATCH * len(moving) / sum(moving))
                ratios.append(
                    sum(quiet) / len(quiet) / (sum(moving) / len(moving))
                )
                tails.append(percentile(moving, 99) / percentile(quiet, 99))
    case = f"staleness {staleness}, {rows:,} rows a table, log {durable}"
    report(
        BENCH,
        f"during moves, {case}",
        statistics.median(rates),
        "samples/s",
        baseline="before them",
        baseline_value=statistics.median(rates) / statistics.median(ratios),
        baseline_source="same run",
        ratio=statistics.median(ratios),
        target=0.8,
        lowest=round(min(ratios), 3),
        highest=round(max(ratios), 3),
        p99_ratio=round(statistics.median(tails), 2),
    )
    report(
        BENCH,
        f"pause of a shard, {case}",
        statistics.median(watch.pauses),
        "s",
        rows=statistics.median(watch.rows),
        p99=round(percentile(watch.pauses, 99), 3),
        moves=len(watch.pauses),
    )


def idle(sizes: Sizes, seed: int, rows: int) -> None:
    """Moves beside no training, and loads."""
    with (
        tempfile.TemporaryDirectory() as folder,
        Processes() as processes,
    ):
        started, addresses = servers(processes, Path(folder), "off")
        trainer = processes.trainer()
        given = ",".join(addresses[:2])
        trainer.call("open", servers=given, seed=seed, **THREADS)
        trainer.call("make_rows", first=0, stop=rows)
        saved = str(Path(folder) / "ckpt" / "all")
        trainer.call("save", path=saved)
        whole = trainer.call("rows")
        moves, loads, cpu = [], [], []
        with Scaling(addresses) as scaling:
            for _ in range(sizes.rounds):
                watch, busy = Watch(), sum(p.cpu() for p in started)
                begin = time.perf_counter()
                for to in (3, 2):
                    scaling.run(plan(scaling.places(), to), watch)
                seconds = time.perf_counter() - begin
                busy = sum(p.cpu() for p in started) - busy
                moves.append(sum(watch.rows) / seconds)
                cpu.append(busy / sum(watch.rows))
                loads.append(whole / trainer.call("load", path=saved))
    report(
        BENCH,
        f"idle, {rows:,} rows a table",
        statistics.median(moves),
        "rows/s that move",
        baseline="rows/s of store.load",
        baseline_value=statistics.median(loads),
        baseline_source="same run",
        cpu_us=round(statistics.median(cpu) * 1e6, 3),
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__.split("\n")[0])
    args = parser.parse_args(argv)
    print_machine(BENCH)
    sizes = Sizes(args.quick)
    if "idle".startswith(args.only):
        idle(sizes, args.seed, sizes.vocabularies[-1])
    for durable in ("off", "process"):
        for rows in sizes.vocabularies:
            for staleness in (8, 0):
                name = f"{durable} {rows} {staleness}"
                if name.startswith(args.only):
                    run(sizes, args.seed, rows, staleness, durable)


if __name__ == "__main__":
    main()
