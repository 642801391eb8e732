"""What staleness costs in accuracy: ``python -m benchmarks.accuracy``.

SyntheticCTR, 4,096,000 samples, 2 ranks under torchrun x 2 parameter servers,
8,000 steps of 2 x 256 samples, DLRM, Adagrad for the rows and Adam for the
dense part.  For each seed (data, planted model, initial values) the same job
runs in sync, at staleness 4 and 16, and in async; the loss of AUC on 400,000
samples held out is paired by seed.  The figure is the upper end of the 95 %
interval (Student's) of the mean loss over the seeds.

So that a staleness of 16 really occurs (and not only may), the servers of
those jobs are a relay of 40 ms each way off; mean and largest staleness are
printed.  It takes about an hour.  Finished jobs are kept in a file, one JSON
line each, and not run again: the benchmark can be stopped and goes on.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import arguments, machine, print_machine, report
from benchmarks.system.processes import FOLDER, ROOT, Processes
from persia.datasets import SyntheticCTR

BENCH = "accuracy"
RANKS, SHARDS = 2, 2
# Name -> (--staleness, ms each way to the servers, target of the loss).
MODES: dict[str, tuple[int | None, float, float | None]] = {
    "sync": (0, 0, None),
    "staleness 4": (4, 0, 0.0005),
    "staleness 16": (16, 40, 0.001),
    "async": (None, 40, None),
}
# Of Student's distribution, 95 % two-sided, by freedom.
T_95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262),
    *(2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101),
)


def job(
    staleness: int | None,
    delay: float,
    options: dict[str, int],
    timeout: float,
) -> dict[str, Any]:
    """One job from its servers to its AUC."""
    with Processes() as processes:
        servers = processes.servers(SHARDS, "--threads", "1")
        addresses = [server.address for server in servers]
        if delay:
            relays = [processes.relay(address) for address in addresses]
            for relay in relays:
                relay.delay(delay)
            addresses = [relay.address for relay in relays]
        command = [sys.executable, "-m", "torch.distributed.run"]
        command += ["--nproc-per-node", str(RANKS), "--standalone"]
        command += ["-m", "benchmarks.system.job"]
        for name, value in options.items():
            command += [f"--{name}", str(value)]
        if staleness is not None:
            command += ["--staleness", str(staleness)]
        started = processes.start(
            "job", command, {"PERSIA_SERVERS": ",".join(addresses)}
        )
        result: dict[str, Any] = json.loads(started.line(timeout))
        if started.wait(120):
            raise RuntimeError(f"the job failed; see {started.log}")
    return result


def commit() -> str:
    """Of the working tree, with a + if it has changes."""
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty=+"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return found.stdout.strip()


def known(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines if line.strip()]


def interval(losses: Sequence[float]) -> tuple[float, float]:
    """95 % interval of the mean; needs two values."""
    n = len(losses)
    t = T_95[min(n - 1, len(T_95)) - 1]
    half = t * statistics.stdev(losses) / n**0.5
    mean = statistics.mean(losses)
    return mean - half, mean + half


def overlap(seed: int, batch: int) -> None:
    """Share of the ids of a batch, each counted once, whose last update may
    be missing: they occur among the batches that may still be open."""
    for mode, (staleness, _, _) in MODES.items():
        if not staleness:
            continue
        before = (staleness + 1) * RANKS - 1
        data = SyntheticCTR((before + 20) * batch, batch, seed=seed)
        ids = [b.ids.values().unique() for b in data]
        shares = [
            torch.isin(ids[k], torch.cat(ids[k - before : k])).float().mean()
            for k in range(before, len(ids))
        ]
        report(
            BENCH,
            f"overlap of ids, {mode}",
            statistics.mean(map(float, shares)),
            "share of the ids of a batch",
            batches_before=before,
            batch=batch,
        )


def jobs(
    first: int, seeds: int, samples: int, test: int, batch: int, path: Path
) -> None:
    """Runs what the file does not have yet, then compares."""
    done = known(path)
    found: dict[str, list[dict[str, Any]]] = {mode: [] for mode in MODES}
    for seed in range(first, first + seeds):
        for mode, (staleness, delay, _) in MODES.items():
            asked = {
                "samples": samples,
                "batch": batch,
                "test": test,
                "seed": seed,
            }
            key = {"mode": mode, "delay_ms": delay, "shards": SHARDS, **asked}
            result = next((x for x in done if key.items() <= x.items()), None)
            if result is None:
                result = job(staleness, delay, asked, 60 + samples / 300)
                result |= key | {"commit": commit(), "cpu": machine()["cpu"]}
                with path.open("a", encoding="utf-8") as f:
                    f.write(json.dumps(result) + "\n")
            found[mode].append(result)
    for mode, (_, _, target) in MODES.items():
        scores = [x["auc"] for x in found[mode]]
        more: dict[str, Any] = {
            "auc": [round(x, 5) for x in scores],
            "seeds": seeds,
            "samples": samples,
            "steps": found[mode][0]["steps"],
            "mean_staleness": round(
                statistics.mean(x["mean_staleness"] for x in found[mode]), 2
            ),
            "largest_staleness": max(
                x["largest_staleness"] for x in found[mode]
            ),
            "seconds": round(
                statistics.median(x["seconds"] for x in found[mode]), 1
            ),
            "commits": sorted({x["commit"] for x in found[mode]}),
        }
        if mode == "sync":
            report(BENCH, "sync", statistics.mean(scores), "test AUC", **more)
            continue
        losses = [
            a["auc"] - b["auc"]
            for a, b in zip(found["sync"], found[mode], strict=True)
        ]
        low, high = interval(losses)
        report(
            BENCH,
            f"{mode}: largest plausible mean loss against sync",
            high,
            "AUC",
            target=target,
            at_most=True,
            mean_loss=round(statistics.mean(losses), 6),
            interval_95=[round(low, 6), round(high, 6)],
            **more,
        )


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, help="pairs; default 8")
    parser.add_argument("--samples", type=int, help="default 4096000")
    parser.add_argument("--test", type=int, help="samples, default 400000")
    parser.add_argument("--batch", type=int, default=256, help="of a rank")
    parser.add_argument(
        "--results",
        type=Path,
        help="file of finished jobs (default build/benchmarks/accuracy.jsonl)",
    )
    options = parser.parse_args(argv)
    quick = options.quick
    seeds = options.seeds or (2 if quick else 8)
    samples = options.samples or (20_480 if quick else 4_096_000)
    test = options.test or (20_000 if quick else 400_000)
    path = options.results or FOLDER / "accuracy.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    print_machine(BENCH, commit=commit(), results=str(path))
    if "overlap".startswith(options.only):
        overlap(options.seed, options.batch)
    if "jobs".startswith(options.only):
        jobs(options.seed, seeds, samples, test, options.batch, path)


if __name__ == "__main__":
    main()
