"""Two builds against each other: ``python -m benchmarks.pairs OTHER``.

OTHER is another checkout with its own ``make build``, such as a worktree of an
older commit. Both train the same batches in processes of their own, which take
turns. Where the rows lie decides as much as the build, so both are started
several times: a case's figure is the median over the starts, each the median
of its pairs. A ratio is the time of OTHER by the time of this build.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.common import arguments, print_machine, report

BENCH = "pairs"
ROOT = Path(__file__).resolve().parents[1]
# What runs in each checkout, with its packages: one JSON line a call.
CHILD = """
import json, sys
from benchmarks.system.processes import Processes
with Processes() as processes:
    trainer = None
    for line in sys.stdin:
        call = json.loads(line)
        if trainer is None:
            remote, draw = call.pop("remote"), call.pop("draw")
            server = processes.servers(1)[0].address if remote else None
            trainer = processes.trainer()
            trainer.call("open", servers=server, **call)
            trainer.call("draw", **draw)
            print(0, flush=True)
        else:
            print(trainer.call("steps", **call)["seconds"], flush=True)
"""
ONE = {"threads": 1, "store_threads": 1}
TWO = {"threads": 2, "store_threads": 2}
SERVER = {"threads": 1, "store_threads": 2}
ROWWISE, ADAGRAD = "rowwise_adagrad", "adagrad"
# Name, whether with a server, staleness, ids, rows a table, and the trainer.
CASES: tuple[tuple[str, bool, int | None, str, int, dict[str, Any]], ...] = (
    ("embedded, 1 thread", False, None, "zipf", 500_000,
     {**ONE, "optimizer": ROWWISE}),
    ("embedded, 2 threads", False, None, "zipf", 500_000,
     {**TWO, "optimizer": ROWWISE}),
    ("embedded, Adagrad, 1 thread", False, None, "uniform", 500_000,
     {**ONE, "optimizer": ADAGRAD}),
    ("one server, staleness 8", True, 8, "zipf", 300_000, SERVER),
    ("one server, staleness 0", True, 0, "zipf", 300_000, SERVER),
)  # fmt: skip


class Sizes:
    """Everything that ``--quick`` makes smaller."""

    def __init__(self, quick: bool) -> None:
        self.starts = 2 if quick else 11
        self.pairs = 2 if quick else 5
        self.steps = 8 if quick else 60
        self.batches = 8 if quick else 32


class Build:
    """A checkout's trainer, and its server where there is one."""

    def __init__(self, tree: Path, **opening: Any) -> None:
        self._popen = subprocess.Popen(
            [tree / ".venv" / "bin" / "python", "-u", "-c", CHILD],
            cwd=tree,
            env={**os.environ, "PYTHONPATH": str(tree)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.call(**opening)

    def call(self, **arguments: Any) -> float:
        """Seconds of what it did."""
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        self._popen.stdin.write(json.dumps(arguments) + "\n")
        self._popen.stdin.flush()
        return float(self._popen.stdout.readline())

    def __enter__(self) -> Build:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._popen.communicate()


def start(
    trees: Sequence[Path], sizes: Sizes, opening: dict[str, Any], **steps: Any
) -> float:
    """The median of the pairs of one start of both builds."""
    ratios = []
    with Build(trees[0], **opening) as other, Build(trees[1], **opening) as us:
        for one in (other, us):  # rows are made, memory is touched
            one.call(**{**steps, "count": 2 * sizes.batches})
        for k in range(sizes.pairs):
            seconds = {
                one: one.call(**steps)
                for one in ((other, us) if k % 2 else (us, other))
            }
            ratios.append(seconds[other] / seconds[us])
    return statistics.median(ratios)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """That of the median, 95 %, by order; of less than six values: all."""
    n = len(values)
    k = max(0, int((n - 1.96 * n**0.5) / 2))
    return sorted(values)[k], sorted(values)[n - 1 - k]


def main(argv: Sequence[str] | None = None) -> None:
    """Prints a line a case."""
    parser = arguments("Two builds against each other.")
    parser.add_argument("other", type=Path, help="the other checkout")
    options = parser.parse_args(argv)
    sizes, other = Sizes(options.quick), options.other.resolve()
    print_machine(BENCH)
    for name, remote, staleness, kind, rows, trainer in CASES:
        if not name.startswith(options.only):
            continue
        draw = {"kind": kind, "rows": rows, "batches": sizes.batches}
        opening = {**trainer, "remote": remote, "seed": options.seed}
        opening["draw"] = {**draw, "seed": options.seed}
        found = [
            start(
                (other, ROOT),
                sizes,
                opening,
                count=sizes.steps,
                staleness=staleness,
            )
            for _ in range(sizes.starts)
        ]
        low, high = interval(found)
        report(
            BENCH,
            name,
            round(statistics.median(found), 3),
            "time of the other build / of this one",
            lowest=round(low, 3),
            highest=round(high, 3),
            starts=[round(x, 2) for x in found],
        )


if __name__ == "__main__":
    main()
