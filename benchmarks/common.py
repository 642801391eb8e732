"""What the benchmarks share: result lines, fair timing, streams of ids.

Imports only numpy, so that a baseline's own interpreter can use it too.

Machines are shared and noisy.  So every claim is a ratio of two things that
were timed in turn in the same run: many short rounds, the order reversed
every second round, and the *median of the rounds' ratios* is the figure.
Both medians are quoted beside it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

FEATURES = 26
BATCH = 4096
ZIPF = 1.05


# --- result lines ---------------------------------------------------------


def arguments(description: str) -> argparse.ArgumentParser:
    """A parser with the options that every benchmark has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--quick", action="store_true", help="small sizes, a minute at most"
    )
    parser.add_argument(
        "--only", default="", help="run only the parts whose name begins so"
    )
    parser.add_argument("--seed", type=int, default=1)
    return parser


def machine() -> dict[str, Any]:
    """What the figures depend on: processor, cores, memory, versions."""
    model = platform.processor()
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as info:
            model = next(
                (
                    x.split(":", 1)[1].strip()
                    for x in info
                    if x.startswith("model name")
                ),
                model,
            )
    except OSError:
        pass
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(pages / 2**30, 1),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
    }


def print_machine(bench: str, **more: Any) -> None:
    """Prints the line of the machine; once, before the first case."""
    print(
        json.dumps({"bench": bench, "case": "machine"} | machine() | more),
        flush=True,
    )


def report(
    bench: str,
    case: str,
    value: float,
    unit: str,
    *,
    baseline: str | None = None,
    baseline_value: float | None = None,
    baseline_source: str | None = None,
    ratio: float | None = None,
    target: float | None = None,
    at_most: bool = False,
    **more: Any,
) -> bool | None:
    """Prints one case as a JSON line and returns its ``ok``.

    ``target`` speaks of ``ratio`` when there is a baseline, else of
    ``value``; reached means at least, or at most with ``at_most``.
    ``baseline_source`` says where the baseline's value comes from ("same
    run", a page, ...).  Without a target, ``ok`` is None: information.
    """
    if ratio is None and baseline_value:
        ratio = value / baseline_value
    measured = value if ratio is None else ratio
    ok = None
    if target is not None:
        ok = bool(measured <= target if at_most else measured >= target)
    line = {
        "bench": bench,
        "case": case,
        "value": _short(value),
        "unit": unit,
        "baseline": baseline,
        "baseline_value": _short(baseline_value),
        "baseline_source": baseline_source,
        "ratio": _short(ratio),
        "target": target,
        "target_on": None
        if target is None
        else ("value" if ratio is None else "ratio"),
        "target_sense": None
        if target is None
        else ("at most" if at_most else "at least"),
        "ok": ok,
    }
    print(json.dumps(line | more), flush=True)
    return ok


def _short(x: float | None) -> float | None:
    return None if x is None else float(f"{x:.4g}")


# --- timing ---------------------------------------------------------------


def timed(fn: Callable[[int], object]) -> Callable[[int], float]:
    """Makes of ``fn(round)`` a contestant that returns its seconds."""

    def run(k: int) -> float:
        start = time.perf_counter()
        fn(k)
        return time.perf_counter() - start

    return run


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds of each contestant, round by round."""

    seconds: Mapping[str, Sequence[float]]

    def median(self, name: str) -> float:
        return statistics.median(self.seconds[name])

    def rate(self, name: str, work: float) -> float:
        """Median work a second, in millions."""
        return work / self.median(name) / 1e6

    def total_rate(self, name: str, work: float) -> float:
        """Work a second over all rounds, in millions."""
        seconds = self.seconds[name]
        return work * len(seconds) / sum(seconds) / 1e6

    def ratio(self, ours: str, *theirs: str) -> float:
        """How many times faster ``ours`` is, the median over the rounds; than
        several others, one after the other."""
        sums = map(sum, zip(*(self.seconds[x] for x in theirs), strict=True))
        pairs = zip(self.seconds[ours], sums, strict=True)
        return statistics.median(b / a for a, b in pairs)


def alternate(
    contestants: Mapping[str, Callable[[int], float]],
    rounds: int,
    warmup: int = 1,
) -> Times:
    """Runs the contestants in turn, ``rounds`` times each.

    A contestant is called with the number of its round (use it to choose
    batches) and returns the seconds that it took by its own clock, so that
    it may live in another process.
    """
    names = list(contestants)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for k in range(-warmup, rounds):
        for name in names if k % 2 == 0 else reversed(names):
            spent = contestants[name](k + warmup)
            if k >= 0:
                seconds[name].append(spent)
    return Times(seconds)


# --- streams of ids -------------------------------------------------------


class Ranks:
    """Draws ranks 0 .. rows - 1, rank 0 the most frequent one.

    ``kind`` is "uniform" or "zipf" (P(rank) ~ (rank + 1) ** -1.05, exact,
    cut at ``rows``).
    """

    def __init__(self, kind: str, rows: int) -> None:
        self.rows = rows
        self._cdf: np.ndarray | None = None
        if kind == "zipf":
            weights = np.arange(1, rows + 1, dtype=np.float64) ** -ZIPF
            self._cdf = np.cumsum(weights)
            self._cdf /= self._cdf[-1]
        elif kind != "uniform":
            raise ValueError(f"kind is {kind!r}, not 'uniform' or 'zipf'")

    def draw(self, shape: tuple[int, ...], seed: int) -> np.ndarray:
        """int64 ranks of ``shape``; the same for the same seed."""
        rng = np.random.default_rng(seed)
        if self._cdf is None:
            return rng.integers(0, self.rows, size=shape, dtype=np.int64)
        # Sorted probes walk the table once instead of missing the cache.
        draws = rng.random(int(np.prod(shape)))
        order = np.argsort(draws)
        found = np.empty(draws.size, np.int64)
        found[order] = np.searchsorted(self._cdf, draws[order], side="right")
        return np.minimum(found, self.rows - 1).reshape(shape)


def scatter(ranks: np.ndarray, salt: int = 0) -> np.ndarray:
    """Ranks to 64-bit ids by a bijection (MurmurHash3's finaliser), int64.

    ``salt`` (below 2**20) keeps vocabularies apart; ranks are below 2**40.
    """
    x = ranks.astype(np.uint64) + (np.uint64(salt) << np.uint64(40))
    x ^= x >> np.uint64(33)
    x *= np.uint64(0xFF51AFD7ED558CCD)
    x ^= x >> np.uint64(33)
    x *= np.uint64(0xC4CEB9FE1A85EC53)
    x ^= x >> np.uint64(33)
    return x.view(np.int64)


def feature_batches(
    kind: str,
    rows: int,
    batches: int,
    seed: int,
    batch: int = BATCH,
    features: int = FEATURES,
) -> np.ndarray:
    """Ranks [batches, features, batch]; each feature has rows of its own."""
    return Ranks(kind, rows).draw((batches, features, batch), seed)


def feature_ids(ranks: np.ndarray) -> np.ndarray:
    """The ids of :func:`feature_batches`, another vocabulary a feature."""
    return np.stack(
        [scatter(ranks[:, f], salt=f + 1) for f in range(ranks.shape[1])],
        axis=1,
    )
