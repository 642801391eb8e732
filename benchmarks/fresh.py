"""How fresh a served model is while it trains, and what that costs the
training: ``python -m benchmarks.fresh``.

The DLRM of the Criteo benchmark (26 features of one id, 13 numbers, dim 16)
trains in this process, and publishes packets into a folder. Another process
follows them as ``persia serve model`` does.

- ``cost``: steps with a publisher against steps without one, in turn; the
  median of the rounds' ratios. Most ids are of few hot ones, so that about
  100,000 rows a second change.
- ``most``: the same with ids of which most are different: a million rows a
  second change.
- ``lag``: from an update of a row to the first moment when the other process
  answers with it: p50 and p99 over all steps. The processes share the
  processors.
- ``s3``: the same through an S3 server on this machine, which takes its share
  of the processors, too (needs ``moto``).
- ``relay``: as ``lag``, through ``persia serve export`` over TLS.
- ``reads``: rows are read in threads while packets change them; how many of
  them were torn.
"""

from __future__ import annotations

import contextlib
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from pyarrow import fs

import persia
from benchmarks.common import FEATURES, arguments, print_machine, report
from persia import models
from persia.distributed.certs import write_certificates
from persia.serving import Publisher
from persia.serving.repository import Model

BENCH = "fresh"
DENSE, DIM, BATCH = 13, 16, 1024
KEYS = [f"f{i:02d}" for i in range(FEATURES)]
PROBE = 1 << 40  # an id that no batch has
HOT = 100  # ids of a feature
THREADS = 2


class Sizes:
    """Everything that ``--quick`` makes smaller."""

    def __init__(self, quick: bool) -> None:
        self.vocabulary = 5_000 if quick else 100_000
        self.seconds = 2.0 if quick else 8.0
        self.rounds = 2 if quick else 8
        self.lag_seconds = 5.0 if quick else 60.0
        self.reads = 10**6 if quick else 10**8
        self.every = 0.5
        self.lag_every = 0.05
        self.hot = 0.965  # share of the ids that are hot


class Training:
    """A model that trains on random ids."""

    def __init__(self, sizes: Sizes, seed: int, hot: float) -> None:
        torch.manual_seed(seed)
        self.store = persia.Store(persia.optim.Adagrad(lr=0.05))
        self.model = models.DLRM(
            persia.EmbeddingBagCollection(
                store=self.store,
                tables=[
                    persia.EmbeddingBagConfig(key, DIM, [key]) for key in KEYS
                ],
            ),
            DENSE,
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        # Few ids are in most samples, as in logs.
        rng = np.random.default_rng(seed)
        share = rng.random((64, FEATURES * BATCH)) ** 3
        drawn = (share * sizes.vocabulary).astype(np.int64)
        is_hot = rng.random(drawn.shape) < hot
        self.batches = torch.from_numpy(np.where(is_hot, drawn % HOT, drawn))
        self.steps = 0
        ids = torch.arange(sizes.vocabulary)
        for key in KEYS:
            self.store.set_rows(key, ids, torch.randn(len(ids), DIM) * 0.01)

    @property
    def example(self) -> tuple[torch.Tensor, persia.JaggedBatch]:
        """Of two samples."""
        ids = torch.zeros(2 * FEATURES, dtype=torch.int64)
        return torch.zeros(2, DENSE), persia.JaggedBatch(KEYS, ids)

    def step(self) -> None:
        """One of the training."""
        ids = self.batches[self.steps % len(self.batches)]
        out = self.model(
            torch.rand(BATCH, DENSE), persia.JaggedBatch(KEYS, ids)
        )
        out.sigmoid().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1

    def publisher(self, place: str, every: float) -> Publisher:
        """Into a folder or bucket; its first version is written."""
        return Publisher(
            self.model,
            place,
            example=self.example,
            every=every,
            rebase=1e6,
        )


def rate(training: Training, seconds: float, *calls: Publisher) -> float:
    """Samples a second."""
    begin, steps = time.perf_counter(), training.steps
    while time.perf_counter() - begin < seconds:
        training.step()
        for publisher in calls:
            publisher.step()
    spent = time.perf_counter() - begin
    return (training.steps - steps) * BATCH / spent


def cost(sizes: Sizes, seed: int, case: str, hot: float) -> None:
    """Samples a second with and without a publisher."""
    training = Training(sizes, seed, hot)
    ratios, rates, rows = [], [], []
    rate(training, sizes.seconds / 2)
    for i in range(sizes.rounds):
        with tempfile.TemporaryDirectory() as folder:
            found: dict[bool, float] = {}
            for on in (i % 2 == 0, i % 2 == 1):
                if not on:
                    found[on] = rate(training, sizes.seconds)
                    continue
                place = str(Path(folder) / "out")
                with training.publisher(place, sizes.every) as publisher:
                    found[on] = rate(training, sizes.seconds, publisher)
                    rows.append(publisher.rows_published / sizes.seconds)
        ratios.append(found[True] / found[False])
        rates.append(found[False])
    report(
        BENCH,
        case,
        round(statistics.median(ratios), 4),
        "samples/s with / without",
        target=0.97,
        lowest=round(min(ratios), 4),
        highest=round(max(ratios), 4),
        samples_per_second=round(statistics.median(rates)),
        rows_per_second=round(statistics.median(rows)),
        every=sizes.every,
    )


@contextlib.contextmanager
def relayed(place: Path) -> Iterator[str]:
    """The URL at which a process hands out the exports of ``out``."""
    write_certificates(place / "certs", ["localhost"])
    os.environ["PERSIA_TLS_CA"] = str(place / "certs/ca.pem")
    with subprocess.Popen(
        [
            *(sys.executable, "-m", "persia", "serve", "export"),
            *(str(place / "out"), "--port", "0"),
            *("--tls-cert", str(place / "certs/server.pem")),
            *("--tls-key", str(place / "certs/server-key.pem")),
        ],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            while not line.startswith("serving "):
                line = process.stdout.readline()
            yield f"https://localhost:{line.rpartition(':')[2].strip()}/out"
        finally:
            process.terminate()


def lag(
    sizes: Sizes,
    seed: int,
    case: str,
    target: float,
    to: str = "",
    relay: bool = False,
) -> None:
    """Seconds until another process answers with a row.

    Args:
        sizes: of the benchmark.
        seed: of the training.
        case: its name.
        target: seconds.
        to: the root of the versions, if not a folder.
        relay: whether the folder is read through a relay.
    """
    training = Training(sizes, seed, sizes.hot)
    with contextlib.ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        out, seen = to or str(place / "out"), place / "seen"
        read = stack.enter_context(relayed(place)) if relay else out
        begin = time.time()
        probe = torch.tensor([PROBE])
        training.store.set_rows(KEYS[0], probe, torch.zeros(1, DIM))
        with training.publisher(out, sizes.lag_every) as publisher:
            command = [sys.executable, "-m", "benchmarks.fresh"]
            with subprocess.Popen(
                [*command, "--follow", read, "--seen", str(seen)]
            ) as follower:
                while not seen.exists():
                    time.sleep(0.05)
                times = []
                end = time.time() + sizes.lag_seconds
                while time.time() < end:
                    training.step()
                    now = time.time() - begin
                    value = torch.full((1, DIM), now)
                    training.store.set_rows(KEYS[0], probe, value)
                    times.append(float(value[0, 0]))
                    publisher.step()
                rows = publisher.rows_published
                publisher.flush()
                publisher.publish()
                publisher.flush()
                time.sleep(2)
                follower.terminate()
        lines = [line.split() for line in seen.read_text().splitlines()]
        values = np.array([float(v) for _, v in lines])
        at = np.array([float(t) - begin for t, _ in lines])
        first = np.searchsorted(values, np.array(times))
        assert (first < len(values)).all(), "not all updates were seen"
        late = at[first] - np.array(times)
        report(
            BENCH,
            case,
            round(float(np.quantile(late, 0.99)), 3),
            "s until the 99th of 100 updates is seen",
            target=target,
            at_most=True,
            every=sizes.lag_every,
            rows_per_second=round(rows / sizes.lag_seconds),
            samples_per_second=round(len(times) * BATCH / sizes.lag_seconds),
            p50=round(float(np.quantile(late, 0.5)), 3),
            most=round(float(late.max()), 3),
        )


def lag_of_bucket(sizes: Sizes, seed: int) -> None:
    """:func:`lag` through S3."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
    port = endpoint.rpartition(":")[2]
    keys = {"AWS_ACCESS_KEY_ID": "me", "AWS_SECRET_ACCESS_KEY": "hidden"}
    os.environ.update(keys)
    with subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-p", port],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as server:
        try:
            for _ in range(600):
                with contextlib.suppress(OSError):
                    socket.create_connection(("127.0.0.1", int(port))).close()
                    break
                time.sleep(0.1)
            fs.S3FileSystem(
                scheme="http",
                endpoint_override=endpoint,
                allow_bucket_creation=True,
            ).create_dir("bucket")
            options = f"scheme=http&endpoint_override={endpoint}"
            lag(sizes, seed, "s3", 2.0, f"s3://bucket/out?{options}")
        finally:
            server.terminate()


def reads(sizes: Sizes, seed: int) -> None:
    """Rows whose elements are of two packets, or older than a row that the
    same thread has read before."""
    store = persia.Store(persia.optim.SGD(lr=0.1))
    bags = persia.EmbeddingBagCollection(
        store=store, tables=[persia.EmbeddingBagConfig("t", DIM, ["t"])]
    )
    ids = torch.arange(10_000)
    example = (persia.JaggedBatch(["t"], ids[:2]),)
    store.set_rows("t", ids, torch.zeros(len(ids), DIM))
    torn = [0] * THREADS
    with tempfile.TemporaryDirectory() as folder:
        out = str(Path(folder) / "out")
        with Publisher(bags, out, example=example, every=0.1) as publisher:
            loaded = persia.load_model(out)

            def ask(i: int) -> None:
                some = torch.from_numpy(
                    np.random.default_rng(seed + i).permutation(8192)
                )
                seen = torch.zeros(len(some))
                for _ in range(sizes.reads // THREADS // len(some)):
                    rows = loaded.vectors("t", some)
                    bad = (rows != rows[:, :1]).any(1) | (rows[:, 0] < seen)
                    torn[i] += int(bad.sum())
                    seen = rows[:, 0]

            threads = [
                threading.Thread(target=ask, args=(i,)) for i in range(THREADS)
            ]
            begin = time.perf_counter()
            for thread in threads:
                thread.start()
            version = 0
            while any(thread.is_alive() for thread in threads):
                version += 1
                values = torch.full((len(ids), DIM), float(version))
                store.set_rows("t", ids, values)
                publisher.publish()
                loaded.catch_up()
                time.sleep(0.05)
            spent = time.perf_counter() - begin
            rows = publisher.rows_published
    report(
        BENCH,
        "reads",
        sum(torn),
        "rows torn or older than before",
        target=0,
        at_most=True,
        reads=sizes.reads,
        rows_per_second=round(rows / spent),
        seconds=round(spent, 1),
    )


def follow(root: str, seen: str) -> None:
    """Applies packets as they appear, as ``persia serve model`` does; writes
    when it sees which value."""
    torch.set_num_threads(1)
    model, ends = Model("followed", root, 2), threading.Event()
    model.load()
    probe, last = torch.tensor([PROBE]), -1.0
    with open(seen, "w", encoding="ascii") as file:
        while os.getppid() != 1:
            model.catch_up()
            value = float(model.current.vectors(KEYS[0], probe)[0, 0])
            if value != last:
                file.write(f"{time.time()} {value}\n")
                file.flush()
                last = value
            model.wait(0.02, ends)


def main() -> None:
    """Runs the parts."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--follow", default="")
    parser.add_argument("--seen", default="")
    options = parser.parse_args()
    if options.follow:
        follow(options.follow, options.seen)
        return
    print_machine(BENCH)
    sizes, seed = Sizes(options.quick), options.seed
    parts: dict[str, Callable[[], None]] = {
        "cost": lambda: cost(sizes, seed, "cost", sizes.hot),
        "most": lambda: cost(sizes, seed, "most", 0.0),
        "lag": lambda: lag(sizes, seed, "lag", 0.2),
        "s3": lambda: lag_of_bucket(sizes, seed),
        "relay": lambda: lag(sizes, seed, "relay", 0.2, relay=True),
        "reads": lambda: reads(sizes, seed),
    }
    for name, part in parts.items():
        if name.startswith(options.only):
            part()


if __name__ == "__main__":
    main()
