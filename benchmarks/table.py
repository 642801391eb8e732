"""The table alone, from C, on one core: ``python -m benchmarks.table``.

Batches are 26 x 4,096 ids, uniform or Zipf(1.05), into one table of N rows,
at N = 8 M * 2**(k/8), k = 0..7, so that an index is met at every load; the
worst N is the figure.  The baseline, in the same run, is the same work on
rows whose numbers are known: nothing is hashed, nothing can be missing.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from benchmarks.common import (
    BATCH,
    FEATURES,
    Ranks,
    Times,
    alternate,
    arguments,
    print_machine,
    report,
    scatter,
    timed,
)
from benchmarks.native import (
    ADAGRAD,
    BF16,
    LRU,
    ROWWISE_ADAGRAD,
    KnownRows,
    Sched,
    Table,
)

BENCH = "table"
BATCH_IDS = FEATURES * BATCH
CALLS = 4  # batches a round
HEADER = 12  # bytes of a row before its vector: id and clock
KINDS = ("uniform", "zipf")
SAME_RUN = "same run"


class Sizes:
    """Everything that ``--quick`` makes smaller."""

    def __init__(self, quick: bool) -> None:
        base, steps = (100_000, (0, 4)) if quick else (8_000_000, range(8))
        self.rows = [round(base * 2 ** (k / 8)) for k in steps]
        self.batches = 8 if quick else 32
        self.rounds = 3 if quick else 15
        self.inserts = 400_000 if quick else 16_000_000
        self.near = 50_000 if quick else 1_000_000
        self.capacity = 100_000 if quick else 1_000_000
        self.far = 500_000 if quick else 64_000_000


def resident() -> int:
    """Bytes of memory that this process has touched and holds."""
    with open("/proc/self/statm", encoding="ascii") as f:
        return int(f.read().split()[1]) * 4096


def fill(s: Sched, table: Table, start: int, stop: int) -> None:
    """Pushes the ids of ranks start .. stop - 1, in random order."""
    chunk = 1 << 16
    grad = np.full((chunk, table.dim), 1e-3, np.float32)
    span = 1 << 22  # shuffled span by span, to stay small
    for first in range(start, stop, span):
        last = min(first + span, stop)
        ranks = np.random.default_rng(first).permutation(
            np.arange(first, last)
        )
        for at in range(0, last - first, chunk):
            table.push(s, grad, scatter(ranks[at : at + chunk]))


def contestant(
    one: Callable[[np.ndarray], object], batches: Sequence[np.ndarray]
) -> Callable[[int], float]:
    """Does ``one`` with ``CALLS`` batches a round, other ones each time."""

    def run(k: int) -> None:
        for j in range(k * CALLS, (k + 1) * CALLS):
            one(batches[j % len(batches)])

    return timed(run)


class Worst:
    """Ratios of one case at several N; the worst one is reported."""

    def __init__(self) -> None:
        self.points: list[tuple[float, float, float, int]] = []

    def add(self, n: int, times: Times, work: float, baseline: str) -> None:
        rates = times.rate("ours", work), times.rate(baseline, work)
        self.points.append((times.ratio("ours", baseline), *rates, n))

    def report(self, case: str, baseline: str, target: float | None) -> None:
        ratio, value, other, n = min(self.points)
        report(
            BENCH,
            case,
            value,
            "M rows/s",
            baseline=baseline,
            baseline_value=other,
            baseline_source=SAME_RUN,
            ratio=ratio,
            target=target,
            rows=n,
            ratio_by_rows={p[3]: round(p[0], 3) for p in self.points},
        )


def known_rows(
    sizes: Sizes, dim: int, optimizer: int, pushes: bool, seed: int
) -> None:
    """Pull, push and bytes a row while one table grows through every N."""
    one, two = Sched(1), Sched(2)
    table = Table(dim, optimizer=optimizer)
    fill(two, table, 0, 1)
    stride = table.stats()[2]
    same = KnownRows(sizes.rows[-1], stride, HEADER, dim, table.state_floats)
    packed = KnownRows(sizes.rows[-1], 4 * dim, 0, dim, 0)
    out = np.zeros((BATCH_IDS, dim), np.float32)
    grad = np.full((BATCH_IDS, dim), 1e-3, np.float32)
    # Functions of one batch.
    pull = partial(table.pull, one, out)
    push = partial(table.push, one, grad)
    gather = partial(same.gather, out)
    gather_packed = partial(packed.gather, out)
    known_push = partial(same.adagrad, grad)

    cases: dict[tuple[str, str], Worst] = defaultdict(Worst)
    payload = 4 * (dim + table.state_floats)
    beyond: list[tuple[float, int]] = []
    held, done = 0, 1
    for n in sizes.rows:
        before = resident()
        fill(two, table, done, n)
        held += resident() - before
        done = n
        rows, counted, _ = table.stats()
        if rows != n:
            raise RuntimeError(f"{rows} rows in place of {n}")
        beyond.append((max(held, counted) / n - payload, n))
        same.fill(n)
        packed.fill(n)
        place = np.random.default_rng(n).permutation(n).astype(np.uint32)
        for kind in KINDS:
            ranks = Ranks(kind, n).draw((sizes.batches, BATCH_IDS), seed)
            ids, at = scatter(ranks), place[ranks]
            times = alternate(
                {
                    "ours": contestant(pull, ids),
                    "same": contestant(gather, at),
                    "packed": contestant(gather_packed, at),
                },
                sizes.rounds,
            )
            work = CALLS * BATCH_IDS
            cases["pull", kind].add(n, times, work, "same")
            cases["packed", kind].add(n, times, work, "packed")
            if pushes:
                distinct = [np.unique(r) for r in ranks]
                times = alternate(
                    {
                        "ours": contestant(
                            push, [scatter(d) for d in distinct]
                        ),
                        "same": contestant(
                            known_push, [place[d] for d in distinct]
                        ),
                    },
                    sizes.rounds,
                )
                work = CALLS * mean_size(distinct)
                cases["push", kind].add(n, times, work, "same")

    for kind in KINDS:
        tail = f"dim {dim} {kind}"
        cases["pull", kind].report(
            f"pull {tail}",
            "prefetched gather of the same rows at known numbers",
            0.40,
        )
        cases["packed", kind].report(
            f"pull {tail}, packed baseline",
            "the gather from an array of vectors alone",
            None,
        )
        if pushes:
            cases["push", kind].report(
                f"Adagrad push of distinct ids {tail}",
                "the same arithmetic on the same rows at known numbers",
                0.5,
            )
    worst, n = max(beyond)
    report(
        BENCH,
        f"bytes a row beyond vector and state dim {dim}",
        worst,
        "B",
        target=26,
        at_most=True,
        rows=n,
        bytes_by_rows={n: round(b, 1) for b, n in beyond},
    )
    if pushes:
        two_threads(sizes, table, done, one, two, seed)
    for x in (table, same, packed, one, two):
        x.close()


def mean_size(batches: Sequence[np.ndarray]) -> float:
    return float(np.mean([len(b) for b in batches]))


def two_threads(
    sizes: Sizes, table: Table, n: int, one: Sched, two: Sched, seed: int
) -> None:
    """Both threads of a pool against one."""
    out = np.zeros((BATCH_IDS, table.dim), np.float32)
    grad = np.full((BATCH_IDS, table.dim), 1e-4, np.float32)
    for kind in KINDS:
        ranks = Ranks(kind, n).draw((sizes.batches, BATCH_IDS), seed)
        distinct = [scatter(np.unique(r)) for r in ranks]
        for case, call, buffer, batches in (
            ("pull", table.pull, out, list(scatter(ranks))),
            ("Adagrad push", table.push, grad, distinct),
        ):
            times = alternate(
                {
                    "two": contestant(partial(call, two, buffer), batches),
                    "one": contestant(partial(call, one, buffer), batches),
                },
                sizes.rounds,
            )
            work = CALLS * mean_size(batches)
            report(
                BENCH,
                f"{case} dim {table.dim} {kind}, two threads",
                times.rate("two", work),
                "M rows/s",
                baseline="one thread",
                baseline_value=times.rate("one", work),
                baseline_source=SAME_RUN,
                ratio=times.ratio("two", "one"),
                target=1.8,
                rows=n,
            )


def inserts(sizes: Sizes, dim: int) -> None:
    """Unseen ids into an empty table: big calls for the rate, calls of 1,000
    for the slowest one (a growing table must not stop to rehash)."""
    s = Sched(1)
    grad = np.full((BATCH_IDS, dim), 1e-3, np.float32)
    ids = scatter(np.arange(sizes.inserts))
    rates = []
    for _ in range(3):
        table = Table(dim)
        start = time.perf_counter()
        for at in range(0, len(ids), BATCH_IDS):
            table.push(s, grad, ids[at : at + BATCH_IDS])
        rates.append(len(ids) / (time.perf_counter() - start) / 1e6)
        table.close()
    report(
        BENCH,
        f"insert of unseen ids dim {dim}",
        float(np.median(rates)),
        "M rows/s",
        target=5.0,
        rows=len(ids),
    )

    # A call may be slow because the machine gave the core to somebody else:
    # the processor time beside the clock tells.
    table = Table(dim)
    spent, used = [], []
    for at in range(0, len(ids), 1000):
        cpu, start = time.thread_time(), time.perf_counter()
        table.push(s, grad, ids[at : at + 1000])
        spent.append(time.perf_counter() - start)
        used.append(time.thread_time() - cpu)
    table.close()
    s.close()
    report(
        BENCH,
        f"slowest call of 1,000 inserts dim {dim}",
        1e3 * max(spent),
        "ms",
        target=5.0,
        at_most=True,
        rows=len(ids),
        calls=len(spent),
        slowest_ms=[round(1e3 * x, 3) for x in sorted(spent)[-5:]],
        processor_ms=round(1e3 * max(used), 3),
        median_ms=round(1e3 * float(np.median(spent)), 4),
        rate=round(len(ids) / sum(spent) / 1e6, 2),
    )


def far_and_near(sizes: Sizes, seed: int) -> None:
    """Pull from a table of 64 M bf16 rows against one of 1 M."""
    one, two = Sched(1), Sched(2)
    tables = {
        n: Table(16, BF16, ROWWISE_ADAGRAD) for n in (sizes.far, sizes.near)
    }
    for n, table in tables.items():
        fill(two, table, 0, n)
    out = np.zeros((BATCH_IDS, 16), np.float32)
    for kind in KINDS:
        times = alternate(
            {
                str(n): contestant(
                    partial(table.pull, one, out),
                    scatter(
                        Ranks(kind, n).draw((sizes.batches, BATCH_IDS), seed)
                    ),
                )
                for n, table in tables.items()
            },
            sizes.rounds,
        )
        far, near = str(sizes.far), str(sizes.near)
        report(
            BENCH,
            f"pull from {far} rows dim 16 bf16 {kind}",
            times.rate(far, CALLS * BATCH_IDS),
            "M rows/s",
            baseline=f"pull from {near} rows",
            baseline_value=times.rate(near, CALLS * BATCH_IDS),
            baseline_source=SAME_RUN,
            ratio=times.ratio(far, near),
            target=0.7,
        )
    for x in (*tables.values(), one, two):
        x.close()


def full(sizes: Sizes) -> None:
    """Ids that never repeat, 10 times as many as the capacity, into a table
    that is full and into one that grows, in turn."""
    s = Sched(1)
    grad = np.full((BATCH_IDS, 16), 1e-3, np.float32)
    bounded = Table(16, capacity=sizes.capacity, full=LRU)
    fill(s, bounded, 0, sizes.capacity)
    growing = Table(16)

    calls = 10 * sizes.capacity // BATCH_IDS
    ids = scatter(np.arange(sizes.capacity, 11 * sizes.capacity))
    batches = ids[: calls * BATCH_IDS].reshape(calls, BATCH_IDS)
    times = alternate(
        {
            "full": contestant(partial(bounded.push, s, grad), batches),
            "growing": contestant(partial(growing.push, s, grad), batches),
        },
        calls // CALLS,
        warmup=0,
    )
    report(
        BENCH,
        "new ids into a full table dim 16",
        times.total_rate("full", CALLS * BATCH_IDS),
        "M rows/s",
        baseline="the same ids into a table that grows",
        baseline_value=times.total_rate("growing", CALLS * BATCH_IDS),
        baseline_source=SAME_RUN,
        target=0.75,
        capacity=sizes.capacity,
    )
    evicted, candidates = bounded.evicted()
    report(
        BENCH,
        "slots looked at for a row evicted",
        candidates / evicted,
        "slots",
        target=64,
        at_most=True,
    )
    for x in (bounded, growing, s):
        x.close()


def oldest(sizes: Sizes, seed: int) -> None:
    """How old the rows are that a full table lets go, among all that an
    update did not touch."""
    s = Sched(1)
    capacity = sizes.capacity // 10
    for kind in KINDS:
        table = Table(4, capacity=capacity, full=LRU)
        ranks = Ranks(kind, 10 * capacity)
        batches = ranks.draw((500, capacity // 50), seed)
        clock = np.zeros(10 * capacity, np.int64)  # 0: no row
        among: list[np.ndarray] = []
        for step, batch in enumerate(map(np.unique, batches), 1):
            table.push(
                s,
                np.full((len(batch), 4), 1e-3, np.float32),
                batch.astype(np.uint64),
            )
            rows = np.zeros(len(clock), bool)
            rows[table.ids()] = True
            old = clock.copy()
            old[batch] = 0
            ages = np.sort(old[old > 0])
            gone = old[(old > 0) & ~rows]
            # The share of rows that are older still.
            among.append(np.searchsorted(ages, gone) / max(len(ages), 1))
            clock[batch] = step
            clock[~rows] = 0
        places = np.concatenate(among)
        report(
            BENCH,
            f"rows evicted that are of the oldest quarter, {kind}",
            float(np.mean(places < 0.25)),
            "of 1",
            target=0.9,
            evicted=len(places),
            capacity=capacity,
        )
        table.close()
    s.close()


def main(argv: list[str] | None = None) -> None:
    options = arguments(__doc__ or "").parse_args(argv)
    sizes = Sizes(options.quick)
    print_machine(BENCH)
    parts: dict[str, Callable[[], None]] = {
        "known16": lambda: known_rows(sizes, 16, ADAGRAD, True, options.seed),
        # One scalar of state, so that rows and baseline fit into memory.
        "known64": lambda: known_rows(
            sizes, 64, ROWWISE_ADAGRAD, False, options.seed
        ),
        "inserts": lambda: inserts(sizes, 16),
        "full": lambda: full(sizes),
        "full oldest": lambda: oldest(sizes, options.seed),
        "far": lambda: far_and_near(sizes, options.seed),
    }
    for name, part in parts.items():
        if name.startswith(options.only):
            part()


if __name__ == "__main__":
    main()
