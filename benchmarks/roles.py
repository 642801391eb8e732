"""Four roles as processes beside two: ``python -m benchmarks.roles``.

The work of benchmarks.cluster: 26 features of one id a sample, dim 16,
Adagrad, batch 4,096, ids by Zipf(1.05) among 1 M a feature, one linear layer,
fp16 on the wire.  In the same run, in turn: a trainer and a server (*direct*),
and a data loader, an embedding worker, a server and a trainer.  All share the
machine.

The original PERSIA's four roles reached 56 k samples/s at staleness 8, and
36 k at 1, on 2 cores of another machine: context, not a baseline.
"""

from __future__ import annotations

import re
import statistics
import sys
from collections.abc import Sequence

from benchmarks.common import BATCH, arguments, print_machine, report
from benchmarks.system.processes import Process, Processes

BENCH = "roles"
THREADS = {"threads": 1, "store_threads": 2}
STALENESS = (8, 1)
TARGETS = {8: 0.45, 1: 0.35}


class Sizes:
    """Everything that ``--quick`` makes smaller."""

    def __init__(self, quick: bool) -> None:
        self.vocabulary = 10_000 if quick else 1_000_000
        self.batches = 4 if quick else 64
        self.steps = 4 if quick else 64
        self.rounds = 1 if quick else 3


def start_worker(processes: Processes, servers: str) -> tuple[Process, str]:
    """An embedding worker, and its address."""
    command = [sys.executable, "-m", "persia", "serve", "worker"]
    command += ["--servers", servers, "--port", "0", "--wire-dtype", "fp16"]
    worker = processes.start("worker", command)
    while not (found := re.match(r"serving .* on (\S+)$", worker.line())):
        pass
    return worker, found[1]


def throughput(sizes: Sizes, seed: int) -> None:
    """Samples a second, and the processor time of a batch by role."""
    with Processes() as processes:
        direct, server = processes.servers(1)[0], processes.servers(1)[0]
        worker, address = start_worker(processes, server.address)
        command = [sys.executable, "-m", "benchmarks.system.loader", address]
        numbers = (sizes.vocabulary, sizes.batches, seed)
        loader = processes.start("loader", [*command, *map(str, numbers)])
        alone, trainer = processes.trainer(), processes.trainer()
        alone.call("open", servers=direct.address, seed=seed, **THREADS)
        trainer.call("open", servers=server.address, seed=seed, **THREADS)
        alone.call(
            "draw",
            kind="zipf",
            rows=sizes.vocabulary,
            batches=sizes.batches,
            seed=seed,
        )
        assert loader.line() == "ready"
        roles = {
            "loader": loader,
            "worker": worker,
            "server": server,
            "trainer": trainer,
        }
        made: list[float] = []

        def of_four(staleness: int) -> float:
            assert loader.popen.stdin
            loader.popen.stdin.write(f"{sizes.steps}\n")
            loader.popen.stdin.flush()
            spent = trainer.call("take", workers=address, staleness=staleness)
            made.append(float(loader.line()))
            return float(spent["seconds"])

        alone.call("steps", count=sizes.steps, staleness=8)
        of_four(8)
        for staleness in STALENESS:
            times: list[float] = []
            others: list[float] = []
            cpu = dict.fromkeys(roles, 0.0)
            for _ in range(sizes.rounds):
                spent = alone.call(
                    "steps", count=sizes.steps, staleness=staleness
                )
                others.append(spent["seconds"])
                before = {name: role.cpu() for name, role in roles.items()}
                times.append(of_four(staleness))
                for name, role in roles.items():
                    cpu[name] += role.cpu() - before[name]
            samples = sizes.steps * BATCH
            done = sizes.steps * sizes.rounds
            report(
                BENCH,
                f"four roles, staleness {staleness}",
                samples / statistics.median(times),
                "samples/s",
                baseline="direct mode",
                baseline_value=samples / statistics.median(others),
                baseline_source="same run",
                target=TARGETS[staleness],
                batch_made_ms=round(statistics.median(made), 2),
                **{
                    f"{name}_cpu_ms": round(1e3 * x / done, 2)
                    for name, x in cpu.items()
                },
            )


def main(argv: Sequence[str] | None = None) -> None:
    options = arguments(__doc__.split("\n")[0]).parse_args(argv)
    print_machine(BENCH)
    if "throughput".startswith(options.only):
        throughput(Sizes(options.quick), options.seed)


if __name__ == "__main__":
    main()
