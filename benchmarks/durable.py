"""What the log of a server costs: ``python -m benchmarks.durable``.

The work of ``benchmarks.cluster`` (26 features of one id a sample, dim 16,
Adagrad, batch 4,096, Zipf(1.05), staleness 8) against servers without a log,
with ``--durable process`` and ``disk`` on the disk of ``--folder``, and with
``process`` on a tmpfs. Each has a trainer and a server of its own, which take
turns, so that all see the same machine. Then the server with ``process`` on
the disk is killed and started again: the time until it answers, against the
rows of its cut and the log at the rate of training.

The baseline is the server without a log, of the same run. The rates at which
the disk and the tmpfs take bytes are measured before: where the disk is
slower than the log, it is the bound.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.cluster import THREADS
from benchmarks.common import BATCH, arguments, print_machine, report
from benchmarks.system.processes import Processes, Server, Trainer
from persia import _core
from persia.distributed.security import Security
from persia.errors import Unavailable

BENCH = "durable"
TMPFS = Path("/dev/shm")


class Sizes:
    """Everything that ``--quick`` makes smaller."""

    def __init__(self, quick: bool) -> None:
        self.vocabulary = 10_000 if quick else 1_000_000
        self.batches = 8 if quick else 64
        self.steps = 8 if quick else 64
        self.rounds = 2 if quick else 80
        self.raw = 64 << 20 if quick else 1 << 30  # bytes


def raw_rate(folder: Path, size: int) -> float:
    """Bytes a second of one file that is written in pieces of 2 MiB and
    synced at the end."""
    piece = os.urandom(2 << 20)
    path = folder / "raw"
    begin = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for _ in range(size // len(piece)):
            file.write(piece)
        os.fdatasync(file.fileno())
    spent = time.perf_counter() - begin
    path.unlink()
    return size / spent


def pages(folder: Path) -> tuple[float, float]:
    """Processor milliseconds to write a record of this work: into a file that
    grows, and over what it had."""
    piece = os.urandom(2_600_000)
    path = folder / "pages"
    spent = []
    with path.open("wb", buffering=0) as file:
        for _ in range(2):
            begin = time.process_time()
            for k in range(50):
                os.pwrite(file.fileno(), piece, k * len(piece))
            spent.append(1e3 * (time.process_time() - begin) / 50)
    path.unlink()
    return spent[0], spent[1]


def logged(folder: Path) -> dict[str, int]:
    """Positions of a server's log."""
    command = [sys.executable, "-m", "persia", "log", "inspect", "--json"]
    text = subprocess.run(
        [*command, str(folder)], check=True, capture_output=True, text=True
    ).stdout
    found: dict[str, int] = json.loads(text)[0]
    return found


class Case:
    """A trainer and a server.

    Args:
        flags: of the server's log.
        log: where it is.
    """

    def __init__(
        self, processes: Processes, name: str, flags: Sequence[str], log: Path
    ) -> None:
        self.name, self.log = name, log
        self.flags = [*flags, "--log", str(log)] if flags else []
        self.server: Server = processes.servers(1, *self.flags)[0]
        self.trainer: Trainer = processes.trainer()
        self.seconds: list[float] = []
        self.cpu, self.steps = 0.0, 0

    def open(self, sizes: Sizes, seed: int) -> None:
        """Tables, batches, and a first turn, which makes the rows."""
        self.trainer.call(
            "open", servers=self.server.address, seed=seed, **THREADS
        )
        self.trainer.call(
            "draw",
            kind="zipf",
            rows=sizes.vocabulary,
            batches=sizes.batches,
            seed=seed,
        )
        self.trainer.call("steps", count=sizes.batches, staleness=8)

    def turn(self, sizes: Sizes) -> None:
        """One measurement."""
        before = self.server.cpu()
        spent = self.trainer.call("steps", count=sizes.steps, staleness=8)
        self.seconds.append(spent["seconds"])
        self.cpu += self.server.cpu() - before
        self.steps += sizes.steps


def throughput(sizes: Sizes, seed: int, disk: Path, memory: Path) -> None:
    """Samples a second at each level."""
    rates = {path: raw_rate(path, sizes.raw) for path in (disk, memory)}
    for name, path in (("tmpfs", memory), ("disk", disk)):
        new, old = pages(path)
        report(
            BENCH,
            f"2.6 MB over what a file had, {name}",
            old,
            "ms of processor",
            baseline="into a file that grows",
            baseline_value=new,
            baseline_source="same run",
        )
    with Processes() as processes:
        cases = [
            Case(processes, "off", [], disk),
            Case(
                processes,
                "process on tmpfs",
                ["--durable", "process"],
                memory / "process",
            ),
            Case(
                processes,
                "process",
                ["--durable", "process"],
                disk / "process",
            ),
            Case(processes, "disk", ["--durable", "disk"], disk / "disk"),
        ]
        for case in cases:
            case.open(sizes, seed)
        for k in range(sizes.rounds):
            for case in cases if k % 2 == 0 else reversed(cases):
                case.turn(sizes)
        done = sizes.steps * sizes.rounds
        off = cases[0]
        for case in cases[1:]:
            ratios = [
                a / b for a, b in zip(off.seconds, case.seconds, strict=True)
            ]
            found = logged(case.log)
            root = memory if memory in case.log.parents else disk
            report(
                BENCH,
                case.name,
                sizes.steps * BATCH / statistics.median(case.seconds),
                "samples/s",
                baseline="the same without a log",
                baseline_value=sizes.steps
                * BATCH
                / statistics.median(off.seconds),
                baseline_source="same run",
                ratio=statistics.median(ratios),
                target=None if case.name == "disk" else 0.85,
                lowest=round(min(ratios), 3),
                highest=round(max(ratios), 3),
                server_cpu_ms=round(1e3 * case.cpu / done, 2),
                server_cpu_ms_off=round(1e3 * off.cpu / done, 2),
                bytes_a_sample=round(
                    found["end"] / (BATCH * (done + sizes.batches)), 1
                ),
                raw_mb_s=round(rates[root] * 1e-6),
                log_mb_s=round(
                    1e-6
                    * found["end"]
                    * sizes.steps
                    / (done + sizes.batches)
                    / statistics.median(case.seconds)
                ),
            )
        recovery(cases[2], done + sizes.batches)


class Phases:
    """Of a server that recovers: seconds, and seconds of processor, until it
    "listens", then to read the "rows" of its cut, and to apply its "log"."""

    def __init__(self, server: Server, address: str) -> None:
        at = {"begin": (server.began, 0.0)}
        channel = _core.Channel(address, Security().arguments(), 60.0)
        with contextlib.closing(channel):
            while "log" not in at:
                try:
                    stats = channel.stats()
                except Unavailable:
                    continue
                now = time.perf_counter(), server.cpu()
                at.setdefault("listens", now)
                if stats["total"] or not stats["recovers"]:
                    at.setdefault("rows", now)
                if not stats["recovers"]:
                    at["log"] = now
                time.sleep(1e-3)
        steps = list(at.items())
        self.seconds, self.cpu = (
            {
                name: after[k] - before[k]
                for (_, before), (name, after) in itertools.pairwise(steps)
            }
            for k in (0, 1)
        )


def recovery(case: Case, steps: int) -> None:
    """Kills the server, and starts it again. Processor time, as other jobs may
    share the machine: the bound is what the rows take, and what the records of
    the log took the server in training."""
    case.server.popen.kill()
    case.server.popen.wait()
    port = int(case.server.address.rpartition(":")[2])
    with Processes() as processes:
        (again,) = processes.servers(1, *case.flags, port=port)
        spent = Phases(again, case.server.address)
        found = logged(case.log)
        behind = found["end"] - (found["cut"] or 0)
        rate = found["end"] * case.steps / steps / case.cpu
        report(
            BENCH,
            "recovery of a server that listens",
            spent.cpu["rows"] + spent.cpu["log"],
            "s of processor",
            baseline="the rows of its cut, the log at the rate of training",
            baseline_value=spent.cpu["rows"] + behind / rate,
            baseline_source="same run",
            target=1.2,
            at_most=True,
            seconds={k: round(v, 2) for k, v in spent.seconds.items()},
            processor={k: round(v, 2) for k, v in spent.cpu.items()},
            log_mb=round(behind * 1e-6),
            training_mb_s=round(rate * 1e-6),
            cut=found["cut"] is not None,
        )


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__.split("\n")[0])
    parser.add_argument(
        "--folder", default=None, help="on the disk (default: a new one)"
    )
    options = parser.parse_args(argv)
    sizes = Sizes(options.quick)
    print_machine(BENCH)
    disk = Path(tempfile.mkdtemp(prefix="durable-", dir=options.folder))
    memory = Path(tempfile.mkdtemp(prefix="durable-", dir=TMPFS))
    try:
        throughput(sizes, options.seed, disk, memory)
    finally:
        shutil.rmtree(disk)
        shutil.rmtree(memory)


if __name__ == "__main__":
    main()
