"""Servers that follow the memory of the rows: ``python -m
benchmarks.autoscale``.

A trainer makes rows until they need three times the memory limit of a server:
each batch has old ids of Zipf(1.05) and new ones, so the rows grow evenly.
``persia launch --autoscale --ps 1:4`` begins with one server. The baseline
has four of the same limit from the start; three would be full at the end. All
processes share this machine, so what a move computes is taken from training.
"""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

import numpy as np

from benchmarks.common import Ranks, arguments, print_machine, report, scatter

BENCH = "autoscale"
DIM, FEATURES, SAMPLES = 16, 8, 1024
MOST = 4  # servers


class Sizes:
    """Everything that ``--quick`` makes smaller."""

    def __init__(self, quick: bool) -> None:
        self.rows = 1_000_000 if quick else 3_000_000
        self.steps = 20_000 if quick else 40_000
        self.runs = 1 if quick else 10


def job(rows: int, steps: int, seed: int) -> None:
    """Trains; prints samples a second, and the bytes of all rows.

    Args:
        rows: that it makes, as many in each step.
        steps: that it takes for them.
        seed: of the ids.
    """
    import torch

    import persia

    torch.set_num_threads(1)
    store = persia.Store(persia.optim.Adagrad(lr=0.01))
    bags = persia.EmbeddingBagCollection(
        store=store,
        tables=[persia.EmbeddingBagConfig("t", DIM, feature_names=["f"])],
    )
    fresh = rows // steps
    ranks = Ranks("zipf", rows)
    lengths = torch.full((SAMPLES,), FEATURES)
    began = time.monotonic()
    for step in range(steps):
        made = step * fresh
        old = ranks.draw((FEATURES * SAMPLES - fresh,), seed + step)
        new = np.arange(made, made + fresh)
        ids = scatter(np.concatenate([old % max(made, 1), new]))
        batch = persia.JaggedBatch(
            ["f"], torch.from_numpy(ids), lengths=lengths
        )
        bags(batch).values().sum().backward()
    store.flush()
    rate = steps * SAMPLES / (time.monotonic() - began)
    used = store.stats()["memory"]
    print(json.dumps({"rate": rate, "bytes": used}), flush=True)
    store.close()


def launched(
    sizes: Sizes, seed: int, limit: int | None, *options: str
) -> tuple[float, int, str]:
    """One run: samples a second and bytes of rows, 0 where it failed; and
    what was said of scaling, or the error."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["launch", "--checkpoints", folder, *options]
        if limit is not None:
            command += ["--memory-limit", str(limit)]
        work = [str(n) for n in (sizes.rows, sizes.steps, seed)]
        command += ["--", sys.executable, "-m", "benchmarks.autoscale", "job"]
        done = subprocess.run(
            [sys.executable, "-m", "persia", *command, *work],
            capture_output=True,
            text=True,
            check=False,
        )
    result = re.search(r"job +\| (\{.*\})", done.stdout)
    if done.returncode or result is None:
        return 0.0, 0, done.stderr.strip().splitlines()[-1]
    found = json.loads(result[1])
    said = re.findall(r"scale: (servers \d+ -> \d+):", done.stderr)
    return found["rate"], found["bytes"], ", ".join(said)


AUTO = ["--ps", f"1:{MOST}", "--autoscale", "--scale-out-after", "5"]


def run(sizes: Sizes, seed: int) -> None:
    """A number of servers that follows the memory, and the least that have
    room, in turn."""
    shards = ["--shards", str(2 * MOST)]
    _, used, why = launched(sizes, seed, None, "--ps", str(MOST), *shards)
    if not used:
        raise SystemExit(why)
    limit = used // 3
    pairs: list[tuple[float, float]] = []
    failed = 0
    for i in range(sizes.runs):
        fixed, _, _ = launched(
            sizes, seed + i, limit, "--ps", str(MOST), *shards
        )
        rate, _, said = launched(sizes, seed + i, limit, *AUTO, *shards)
        failed += not rate
        pairs.append((rate, fixed))
        report(
            BENCH,
            f"1 to {MOST} servers, run {i}",
            rate,
            "samples/s",
            baseline=f"{MOST} servers",
            baseline_value=fixed,
            baseline_source="same run",
            limit=limit,
            said=said,
        )
    report(
        BENCH,
        f"1 to {MOST} servers",
        statistics.median(rate for rate, _ in pairs),
        "samples/s",
        baseline=f"{MOST} servers",
        baseline_value=statistics.median(fixed for _, fixed in pairs),
        baseline_source="same run",
        ratio=statistics.median(rate / fixed for rate, fixed in pairs),
        target=0.9,
        failed=failed,
        runs=len(pairs),
    )


def main(argv: Sequence[str] | None = None) -> None:
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["job"]:
        job(*map(int, words[1:]))
        return
    parser = arguments(__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int)
    args = parser.parse_args(words)
    sizes = Sizes(args.quick)
    sizes.runs = args.runs or sizes.runs
    print_machine(BENCH)
    run(sizes, args.seed)


if __name__ == "__main__":
    main()
