"""Jobs that are larger than this machine: ``python -m benchmarks.model``.

Parts: ``measured`` prints the service times of this machine, ``check`` plays
jobs of one to four servers that also run, ``scale`` plays 8 to 1,000 servers
and up to 1,536 ranks, ``growth`` the number of servers of a job whose rows
grow to 100 T parameters. Without ``measured`` the last two have the times of
the machine that the documentation names. ``--only scale,growth --plot FILE``
draws them.
"""

from __future__ import annotations

import itertools
import os
import statistics
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from benchmarks.common import BATCH, arguments, print_machine, report
from benchmarks.model import measured
from benchmarks.model.events import Job, Result, Times, play
from benchmarks.model.growth import Growth, Point, grow
from persia.distributed.costs import SLOWS
from persia.distributed.planning import bytes_a_row

BENCH = "model"
BATCHES = (BATCH, BATCH // 4)  # samples
#: Of 2 cores of an AMD EPYC, 2026-11-27.
TIMES = Times(4.0e-5, 8.9e-8, 6.8e-5, 1.46e-7, 9.4e-4)
IDS = 50_560.0  # distinct, of a batch of 4,096 samples
RATE = 1.0e6  # rows a second of a server, while it sends

SHARDS = 4096
DIM = 64
PARAMETERS = 100e12
GPU = 0.010  # seconds of a dense step, of a rank with a device
PAPER = 1.91e6  # samples a second, of the paper's largest job


class Sizes:
    """Everything that ``--quick`` makes smaller."""

    def __init__(self, quick: bool) -> None:
        self.servers = (1, 2) if quick else (1, 2, 3, 4)
        self.run: dict[str, Any] = (
            {"batches": 4, "steps": 8, "rounds": 1}
            if quick
            else {"batches": 64, "steps": 128, "rounds": 2}
        )
        self.rows = 2_000 if quick else 300_000  # of a table that moves
        self.jobs = (8, 64) if quick else (8, 32, 128, 256, 512, 1000)
        self.ranks = (64,) if quick else (64, 256, 1536)
        self.steps = 10 if quick else 20
        self.most = 16 if quick else 1000
        self.fresh = (0.5,) if quick else (0.5, 0.2, 0.1, 0.05)
        self.until = 0.01 if quick else 1.05  # of the rows


def check(sizes: Sizes, found: measured.Measured, cores: int) -> None:
    """Jobs that run, and as the model has them."""
    errors: list[float] = []
    for servers, batch, staleness in itertools.product(
        sizes.servers, BATCHES, (8, 0)
    ):
        ran = measured.run(servers, batch, staleness, **sizes.run)
        times = found.times._replace(dense=ran.dense + found.step)
        ids = measured.distinct(batch, 8)
        job = Job(servers, 1, ids, staleness, steps=100)
        played = play(job, times, cores=cores)
        errors.append(played.steps / ran.steps - 1)
        used = (ran.server + ran.rank) * ran.steps / cores
        report(
            BENCH,
            f"{servers} servers, batch {batch}, staleness {staleness}",
            played.steps * batch,
            "samples/s",
            baseline="the job itself",
            baseline_value=ran.steps * batch,
            baseline_source="same run",
            used=round(used, 2),
            server_ms=round(1e3 * ran.server, 2),
            rank_ms=round(1e3 * ran.rank, 2),
        )
    report(
        BENCH,
        "error of the model",
        statistics.median(map(abs, errors)),
        "of the samples/s",
        worst=round(max(map(abs, errors)), 3),
        mean=round(statistics.mean(errors), 3),
    )


def scale(sizes: Sizes, times: Times, ids: float) -> dict[int, list[Result]]:
    """Servers and ranks of machines of their own."""
    out: dict[int, list[Result]] = {}
    for ranks in sizes.ranks:
        out[ranks] = []
        for servers in sizes.jobs:
            result = play(
                Job(servers, ranks, ids, 8, SHARDS, steps=sizes.steps),
                times._replace(dense=GPU),
            )
            out[ranks].append(result)
            report(
                BENCH,
                f"{servers} servers, {ranks} ranks",
                result.steps * BATCH,
                "samples/s",
                of_dense=round(result.steps * GPU / ranks, 3),
                busy=round(result.busy, 3),
                wait_ms=round(1e3 * result.wait, 3),
                link=round(result.link, 3),
            )
    return out


def growth(
    sizes: Sizes, times: Times, ids: float, rate: float
) -> dict[tuple[float, bool], list[Point]]:
    """The number of servers of a job whose rows grow, by the rows that a
    sample makes; moves are made side by side, or not."""

    @lru_cache
    def speed(servers: int) -> tuple[float, float]:
        job = Job(servers, min(sizes.ranks), ids, 8, SHARDS, steps=10)
        found = play(job, times._replace(dense=GPU))
        # More samples than the paper's job trains a second there are not.
        share = min(PAPER / (found.steps * BATCH), 1.0)
        return share * found.steps * BATCH, share * found.busy

    out: dict[tuple[float, bool], list[Point]] = {}
    for fresh, together in itertools.product(sizes.fresh, (True, False)):
        job = Growth(
            shards=SHARDS,
            least=8,
            most=sizes.most,
            rows=PARAMETERS / DIM,
            fresh=fresh,
            row_bytes=bytes_a_row(DIM, "bf16", "rowwise_adagrad"),
            limit=320 * 2**30,
            rate=rate,
            changes=ids / BATCH,
            slows=SLOWS,
            period=60.0,
            start=120.0,
            out=60.0,
            side_by_side=together,
        )
        seconds = sizes.until * job.rows / fresh / PAPER
        points = list(grow(job, speed, seconds))
        out[fresh, together] = points
        last = points[-1]
        report(
            BENCH,
            f"{fresh} new rows a sample, moves "
            + ("side by side" if together else "one after the other"),
            last.servers,
            "servers",
            full=last.fullest > 1,
            days=round(last.seconds / 86400, 2),
            parameters=min(fresh * last.samples, job.rows) * DIM,
            fullest=round(max(p.fullest for p in points), 3),
            moving=round(sum(p.moving > 0 for p in points) / len(points), 3),
        )
    return out


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__.split("\n")[0])
    parser.add_argument("--plot", help="file of the drawing, such as a.svg")
    parser.add_argument(
        "--real-time",
        action="store_true",
        help="jobs run before all other work of the machine (as root)",
    )
    args = parser.parse_args(argv)
    sizes = Sizes(args.quick)
    sizes.run["real_time"] = args.real_time
    print_machine(BENCH)
    times, ids, rate = TIMES, IDS, RATE

    def wanted(part: str) -> bool:
        return any(part.startswith(one) for one in args.only.split(","))

    if wanted("measured") or wanted("check"):
        found = measured.service_times(BATCHES, **sizes.run)
        times, ids = found.times, measured.distinct(BATCH, 8)
        for name, seconds in times._asdict().items():
            report(BENCH, f"measured, {name}", 1e6 * seconds, "us", ids=ids)
        moved = measured.moves(sizes.rows)
        rate = moved.rate
        report(BENCH, "measured, moves", rate, "rows/s", rows=moved.rows)
    if wanted("check"):
        check(sizes, found, len(os.sched_getaffinity(0)))
    scaled = scale(sizes, times, ids) if wanted("scale") else {}
    grown = growth(sizes, times, ids, rate) if wanted("growth") else {}
    if args.plot:
        from benchmarks.model.plot import draw

        draw(args.plot, sizes.jobs, scaled, grown)


if __name__ == "__main__":
    main()
