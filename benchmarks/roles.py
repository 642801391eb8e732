"""Four roles as processes beside two: ``python -m benchmarks.roles``.

The work of benchmarks.cluster: 26 features of one id a sample, dim 16,
Adagrad, batch 4,096, ids by Zipf(1.05) among 1 M a feature, one linear layer,
fp16 on the wire.  In the same run, in turn: a trainer and a server (*direct*),
and a data loader, an embedding worker, a server and a trainer.  All share the
machine.

The original PERSIA's four roles reached 56 k samples/s at staleness 8, and
36 k at 1, on 2 cores of another machine: context, not a baseline.

``--only kafka``: four roles whose loader reads topics, beside four whose
loader has the batches in memory.  The brokers are those of benchmarks.kafka,
in this process.

``--only bytes``: what travels between worker and trainer, counted by a relay
between them.  ``--only idle``: the processor time of each role when a trainer
waits for a batch and no loader sends one.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
import time
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from benchmarks.common import (
    BATCH,
    FEATURES,
    Ranks,
    arguments,
    feature_ids,
    print_machine,
    report,
)
from benchmarks.kafka import TOPICS, filled, in_arrow
from benchmarks.system.loader import MESSAGE_ROWS
from benchmarks.system.processes import Process, Processes

BENCH = "roles"
THREADS = {"threads": 1, "store_threads": 2}
STALENESS = (8, 1)
TARGETS = {8: 0.45, 1: 0.35}
DIM = 16
WIRE = {"fp16": 2, "bf16": 2, "fp32": 4}  # bytes of a value


class Sizes:
    """Everything that ``--quick`` makes smaller."""

    def __init__(self, quick: bool) -> None:
        self.vocabulary = 10_000 if quick else 1_000_000
        self.batches = 4 if quick else 64
        self.steps = 4 if quick else 64
        self.rounds = 1 if quick else 3
        self.idle_s = 2.0 if quick else 30.0
        self.wires = ["fp16"] if quick else list(WIRE)


def start_worker(processes: Processes, servers: str) -> tuple[Process, str]:
    """An embedding worker, and its address."""
    command = [sys.executable, "-m", "persia", "serve", "worker"]
    command += ["--servers", servers, "--port", "0", "--wire-dtype", "fp16"]
    worker = processes.start("worker", command)
    while not (found := re.match(r"serving .* on (\S+)$", worker.line())):
        pass
    return worker, found[1]


def start_loader(
    processes: Processes, worker: str, sizes: Sizes, seed: int, *topics: str
) -> Process:
    """A data loader that has its ids, or finds them in topics at brokers;
    feed() makes it send."""
    command = [sys.executable, "-m", "benchmarks.system.loader", worker]
    numbers = (sizes.vocabulary, sizes.batches, seed)
    command += [*map(str, numbers), *topics]
    loader = processes.start("loader", command)
    assert loader.line() == "ready"
    return loader


def feed(loader: Process, batches: int) -> None:
    """It begins to send an epoch; its next line is the end."""
    assert loader.popen.stdin
    loader.popen.stdin.write(f"{batches}\n")
    loader.popen.stdin.flush()


def throughput(sizes: Sizes, seed: int) -> None:
    """Samples a second, and the processor time of a batch by role."""
    with Processes() as processes:
        direct, server = processes.servers(1)[0], processes.servers(1)[0]
        worker, address = start_worker(processes, server.address)
        loader = start_loader(processes, address, sizes, seed)
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
        roles = {
            "loader": loader,
            "worker": worker,
            "server": server,
            "trainer": trainer,
        }
        made: list[float] = []

        def of_four(staleness: int) -> float:
            feed(loader, sizes.steps)
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


def produce(sizes: Sizes, seed: int) -> tuple[object, str, str]:
    """The loader's batches in topics: (brokers, where they are, topics)."""
    whole = BATCH // MESSAGE_ROWS * TOPICS  # batches of each partition
    shape = (max(sizes.batches, whole), FEATURES, BATCH)
    drawn = feature_ids(Ranks("zipf", sizes.vocabulary).draw(shape, seed))
    label = np.random.default_rng(seed).random(BATCH) < 0.25
    values: list[list[bytes]] = [[] for _ in range(TOPICS)]
    for i, one in enumerate(drawn):
        columns = {f"slot{k}": one[k] for k in range(FEATURES)}
        table = pa.table(columns | {"label": label.astype(np.int64)})
        for first in range(0, BATCH, MESSAGE_ROWS):
            block = in_arrow(table.slice(first, MESSAGE_ROWS))
            values[i % TOPICS].append(block)
    brokers, address = filled(
        {f"ids{k}": blocks for k, blocks in enumerate(values)}
    )
    return brokers, address, ",".join(f"ids{k}" for k in range(TOPICS))


def from_topics(sizes: Sizes, seed: int) -> None:
    """Samples a second of four roles whose loader reads topics of Kafka, in
    turn with four whose loader has the batches in memory."""
    brokers, address, topics = produce(sizes, seed)
    times: dict[str, list[float]] = {"memory": [], "topics": []}
    with Processes() as processes:
        jobs = {}
        for name, more in {"memory": [], "topics": [address, topics]}.items():
            server = processes.servers(1)[0]
            worker = start_worker(processes, server.address)[1]
            loader = start_loader(processes, worker, sizes, seed, *more)
            trainer = processes.trainer()
            trainer.call("open", servers=server.address, seed=seed, **THREADS)
            jobs[name] = (loader, trainer, worker)
        for i in range(sizes.rounds + 1):
            for name, (loader, trainer, worker) in jobs.items():
                feed(loader, sizes.steps)
                spent = trainer.call("take", workers=worker, staleness=8)
                loader.line()
                if i:  # the first round makes the rows
                    times[name].append(float(spent["seconds"]))
    del brokers
    samples = sizes.steps * BATCH
    memory, read = (statistics.median(times[n]) for n in ("memory", "topics"))
    report(
        BENCH,
        "four roles fed from Kafka, staleness 8",
        samples / read,
        "samples/s",
        baseline="the same batches from the loader's memory",
        baseline_value=samples / memory,
        baseline_source="same run",
        target=0.9,
    )


def count_bytes(sizes: Sizes, seed: int) -> None:
    """Between worker and trainer, both ways, a batch; against pooled values,
    their gradients, and labels. fp16 has a scale of 4 bytes a row, too."""
    with Processes() as processes:
        server = processes.servers(1)[0]
        _, address = start_worker(processes, server.address)
        relay = processes.relay(address)
        loader = start_loader(processes, address, sizes, seed)
        for wire in sizes.wires:
            width = WIRE[wire]
            trainer = processes.trainer()
            trainer.call(
                "open", servers=server.address, seed=seed, wire=wire, **THREADS
            )
            before, _ = relay.delay(0)
            feed(loader, sizes.steps)
            trainer.call("take", workers=relay.address, staleness=1)
            loader.line()
            spent = (relay.delay(0)[0] - before) / sizes.steps
            values = 2 * BATCH * FEATURES * DIM * width
            label = 4 * BATCH
            scales = 2 * BATCH * FEATURES * 4 if wire == "fp16" else 0
            report(
                BENCH,
                f"bytes between worker and trainer, {wire}",
                spent,
                "bytes a batch",
                baseline="values, gradients and label"
                + (", with the scales of fp16" if scales else ""),
                baseline_value=values + label + scales,
                baseline_source="computed",
                target=1.05,
                at_most=True,
                ratio_without_scales=round(spent / (values + label), 4),
            )


def idle(sizes: Sizes, seed: int) -> None:
    """Each role when there is nothing to do, in percent of a core."""
    with Processes() as processes:
        server = processes.servers(1)[0]
        worker, address = start_worker(processes, server.address)
        loader = start_loader(processes, address, sizes, seed)
        trainer = processes.trainer()
        trainer.call("open", servers=server.address, seed=seed, **THREADS)
        feed(loader, 1)
        trainer.call("take", workers=address, staleness=1)
        loader.line()
        call = {"call": "take", "args": {"workers": address, "staleness": 1}}
        assert trainer.popen.stdin
        trainer.popen.stdin.write(json.dumps(call) + "\n")
        trainer.popen.stdin.flush()
        time.sleep(1.0)  # it waits for a batch now
        roles = {
            "loader": loader,
            "worker": worker,
            "server": server,
            "trainer": trainer,
        }
        before = {name: role.cpu() for name, role in roles.items()}
        began = time.perf_counter()
        time.sleep(sizes.idle_s)
        seconds = time.perf_counter() - began
        for name, role in roles.items():
            report(
                BENCH,
                f"idle {name}",
                100 * (role.cpu() - before[name]) / seconds,
                "% of a core",
                target=1.0,
                at_most=True,
                seconds=round(seconds, 1),
            )
        feed(loader, 1)  # ends the epoch that the trainer waits in
        trainer.line()


PARTS = {
    "throughput": throughput,
    "kafka": from_topics,
    "bytes": count_bytes,
    "idle": idle,
}


def main(argv: Sequence[str] | None = None) -> None:
    options = arguments(__doc__.split("\n")[0]).parse_args(argv)
    print_machine(BENCH)
    for name, part in PARTS.items():
        if name.startswith(options.only):
            part(Sizes(options.quick), options.seed)


if __name__ == "__main__":
    main()
