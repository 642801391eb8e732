"""Lookups and updates over the wire: ``python -m benchmarks.rpc``.

One parameter server (``persia serve ps``) over loopback; this process is the
client, through the object that every trainer uses (``ps/client.h``).  A pull
and a push of 26 x 4,096 ids, dim 16, fp32 on the wire, Adagrad, are compared
with an echo: requests and replies of just the same sizes through bare gRPC
C core between two processes, where nobody looks at a byte.  Ours also finds
equal ids, encodes, looks up, copies out, sums and updates, with the same two
cores for both processes.

The same calls are made on tables of this process, too.  Their time and the
echo's, one after the other, are what a way over the wire costs whose own work
(equal ids, copies, messages) hides behind them and nothing else does.

gRPC takes a buffer from malloc for each message, which glibc gives back to the
system each time.  Our processes tell glibc to keep them.  The echo is measured
as it is, and once more with that advice, for information.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import numpy as np

from benchmarks.common import (
    BATCH,
    FEATURES,
    alternate,
    arguments,
    feature_batches,
    feature_ids,
    print_machine,
    report,
    timed,
)
from benchmarks.native.remote import Remote
from benchmarks.system.processes import Echo, Process, Processes

BENCH = "rpc"
DIM = 16
SAME_RUN = "same run"
KEEPING = "its malloc keeps memory"
HERE = "tables of this process"


class Sizes:
    """Everything that ``--quick`` makes smaller."""

    def __init__(self, quick: bool) -> None:
        self.rows = 10_000 if quick else 100_000  # of each table
        self.batches = 4 if quick else 16
        self.rounds = 3 if quick else 15
        self.calls = 4 if quick else 16  # pulls and pushes of a round
        self.small = 200 if quick else 5_000


class Work:
    """Batches for one server, and room for what they bring."""

    def __init__(
        self, remote: Remote, ids: np.ndarray, lanes: int, first: int = 1
    ) -> None:
        self.remote = remote
        self.ids = [np.ascontiguousarray(x) for x in ids]
        shape = (*ids.shape[1:], DIM)
        self.out = [np.zeros(shape, np.float32) for _ in range(lanes)]
        self.rows = [np.zeros(ids.shape[1:], np.uint32) for _ in range(lanes)]
        self.grad = np.full(shape, 1e-3, np.float32)
        self.numbers = count(first)

    def one(self, k: int, lane: int = 0) -> None:
        """Pull and push of batch k."""
        ids = self.ids[k % len(self.ids)]
        self.remote.pull(ids, self.out[lane], self.rows[lane])
        self.remote.push(next(self.numbers), ids, self.grad, self.rows[lane])

    def bytes(self) -> list[tuple[int, int]]:
        """Request and reply of a pull, request and reply of a push."""
        sizes = []
        ids, rows = self.ids[0], self.rows[0]
        calls: Sequence[Callable[[], None]] = (
            lambda: self.remote.pull(ids, self.out[0], rows),
            lambda: self.remote.push(next(self.numbers), ids, self.grad, rows),
        )
        for call in calls:
            sent, received = self.remote.bytes()
            call()
            after = self.remote.bytes()
            sizes.append((after[0] - sent, after[1] - received))
        return sizes


def fill(remote: Remote, rows: int) -> None:
    """Makes every row of every table."""
    numbers = count(1)
    chunk = 1 << 14
    grad = np.full((FEATURES, chunk, DIM), 1e-3, np.float32)
    for first in range(0, rows, chunk):
        ranks = np.arange(first, min(first + chunk, rows), dtype=np.int64)
        shape = (1, FEATURES, len(ranks))
        ids = feature_ids(np.broadcast_to(ranks, shape))[0]
        remote.push(
            next(numbers),
            np.ascontiguousarray(ids),
            np.ascontiguousarray(grad[:, : len(ranks)]),
        )
    if remote.rows() != rows * FEATURES:
        raise RuntimeError(f"{remote.rows()} rows in place of {rows}")


def filled(sizes: Sizes, address: str | None, ids: np.ndarray) -> Work:
    """Tables with all rows, on a server or here, and what is done to them."""
    remote = Remote(address, "bench", FEATURES, DIM)
    fill(remote, sizes.rows)
    return Work(remote, ids, 2, -(-sizes.rows // (1 << 14)) + 1)


class Lanes:
    """Rounds of calls, ``flight`` at once; and this process's time for it."""

    def __init__(self, work: Work, calls: int, flight: int) -> None:
        self.work, self.flight = work, flight
        self.each = calls // flight
        self.pool = ThreadPoolExecutor(flight)
        self.cpu = 0.0

    def __call__(self, k: int) -> None:
        def lane(j: int) -> None:
            for i in range(self.each):
                self.work.one((k * self.flight + j) * self.each + i, j)

        start = time.process_time()
        list(self.pool.map(lane, range(self.flight)))
        self.cpu += time.process_time() - start


def throughput(
    sizes: Sizes,
    work: Work,
    here: Work,
    echoes: dict[str, Echo],
    server: Process,
) -> None:
    """Payload bytes a second, with one pull and push under way, and two."""
    messages = work.bytes()
    payload = sum(a + b for a, b in messages)
    for flight in (1, 2):
        ours = Lanes(work, sizes.calls, flight)
        contestants: dict[str, Callable[[int], float]] = {
            "ours": timed(ours),
            HERE: timed(Lanes(here, sizes.calls, flight)),
        }
        for name, echo in echoes.items():
            contestants[name] = lambda k, echo=echo, flight=flight: echo.run(
                sizes.calls, flight, messages
            )
        spent = server.cpu()
        times = alternate(contestants, sizes.rounds)
        done = sizes.calls * (sizes.rounds + 1)

        def rate(seconds: float) -> float:
            return payload * sizes.calls / seconds / 1e9

        for keep in (False, True):
            # The better of the echoes, whatever its number of threads.
            best = min(
                (e for e in echoes if (KEEPING in e) == keep), key=times.median
            )
            report(
                BENCH,
                f"pull+push of {BATCH * FEATURES} ids dim {DIM},"
                f" {flight} under way{', ' + KEEPING if keep else ''}",
                rate(times.median("ours")),
                "GB/s of payload",
                baseline=f"echo of the same bytes through gRPC C core, {best}",
                baseline_value=rate(times.median(best)),
                baseline_source=SAME_RUN,
                ratio=times.ratio("ours", best),
                target=None if keep else 0.6,
                payload_bytes=payload,
                messages=messages,
                ms=round(1e3 * times.median("ours") / sizes.calls, 2),
                server_cpu_ms=round(1e3 * (server.cpu() - spent) / done, 2),
                client_cpu_ms=round(1e3 * ours.cpu / done, 2),
                here_ms=round(1e3 * times.median(HERE) / sizes.calls, 2),
                of_echo_then_here=round(times.ratio("ours", best, HERE), 3),
            )


def latency(sizes: Sizes, work: Work) -> None:
    """A pull of 100 ids while nothing else happens: one after the other, and
    after a pause in which both sides fall asleep."""
    ids = np.ascontiguousarray(work.ids[0][:1, :100])
    out = np.zeros((1, 100, DIM), np.float32)
    rows = np.zeros((1, 100), np.uint32)
    for name, pause, calls in (
        ("one after the other", 0.0, sizes.small),
        ("after pauses of 2 ms", 0.002, sizes.small // 2),
    ):
        spent = []
        for _ in range(calls):
            if pause:
                time.sleep(pause)
            start = time.perf_counter()
            work.remote.pull(ids, out, rows)
            spent.append(1e3 * (time.perf_counter() - start))
        report(
            BENCH,
            f"p99 of a pull of 100 ids, {name}",
            float(np.quantile(spent, 0.99)),
            "ms",
            target=1.0,
            at_most=True,
            median_ms=round(statistics.median(spent), 4),
            p999_ms=round(float(np.quantile(spent, 0.999)), 4),
            calls=calls,
        )


def main(argv: Sequence[str] | None = None) -> None:
    options = arguments(__doc__.split("\n")[0]).parse_args(argv)
    sizes = Sizes(options.quick)
    print_machine(BENCH)
    with Processes() as processes:
        (server,) = processes.servers(1)
        ids = feature_ids(
            feature_batches("uniform", sizes.rows, sizes.batches, options.seed)
        )
        work = filled(sizes, server.address, ids)
        if "throughput".startswith(options.only):
            echoes = {
                f"{n} server thread{'s' * (n > 1)}"
                f"{', ' + KEEPING if keep else ''}": Echo(processes, n, keep)
                for n in (1, 2)
                for keep in (False, True)
            }
            here = filled(sizes, None, ids)
            throughput(sizes, work, here, echoes, server)
            here.remote.close()
        if "latency".startswith(options.only):
            latency(sizes, work)
        work.remote.close()


if __name__ == "__main__":
    main()
