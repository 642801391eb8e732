"""What really runs here: service times, and jobs to check the model with."""

from __future__ import annotations

import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.cluster import THREADS
from benchmarks.common import FEATURES, Ranks
from benchmarks.elastic import servers as elastic_servers
from benchmarks.model.events import Times
from benchmarks.system.processes import Processes
from persia.distributed.rounds import Rounds
from persia.distributed.scaling import Progress, Scaling, plan

VOCABULARY = 300_000  # of a feature
SEED = 1


class Run(NamedTuple):
    """A job that ran.

    Attributes:
        steps: a second, of all ranks together.
        server: seconds of processor of a step, at all servers.
        rank: seconds of processor of a step, at its rank.
        dense: seconds of them in the dense part.
    """

    steps: float
    server: float
    rank: float
    dense: float


def distinct(batch: int, batches: int) -> float:
    """Distinct ids of a batch, on average."""
    drawn = Ranks("zipf", VOCABULARY).draw((batches, FEATURES, batch), SEED)
    counts = [len(np.unique(ids)) for one in drawn for ids in one]
    return sum(counts) / batches


def first(pid: int) -> None:
    """All threads of a process run before those of others."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setscheduler(int(task.name), os.SCHED_RR, os.sched_param(1))


def run(
    servers: int,
    batch: int,
    staleness: int,
    *,
    ranks: int = 1,
    batches: int = 64,
    steps: int = 128,
    rounds: int = 3,
    real_time: bool = False,
) -> Run:
    """Trains; the best of some rounds, because other work of the machine can
    only make one slower.

    Args:
        servers: how many.
        batch: samples of a batch.
        staleness: how many updates a lookup may miss.
        ranks: trainers, which do not wait for each other.
        batches: that each has, again and again.
        steps: of a round.
        rounds: how many.
        real_time: before all other work of the machine.
    """
    with Processes() as processes, ThreadPoolExecutor(ranks) as pool:
        started = processes.servers(servers)
        trainers = [processes.trainer() for _ in range(ranks)]
        addresses = ",".join(server.address for server in started)

        def prepare(i: int) -> float:
            trainer = trainers[i]
            trainer.call(
                "open", servers=addresses, batch=batch, seed=SEED, **THREADS
            )
            trainer.call(
                "draw",
                kind="zipf",
                rows=VOCABULARY,
                batches=batches,
                seed=SEED + i,
            )
            trainer.call("steps", count=batches, staleness=staleness)
            before = trainer.cpu()
            trainer.call("dense_steps", count=steps)
            return (trainer.cpu() - before) / steps

        dense = min(pool.map(prepare, range(ranks)))
        found: list[Run] = []
        for process in (*started, *trainers) if real_time else ():
            first(process.pid)
        for _ in range(rounds):
            used = [p.cpu() for p in (*started, *trainers)]
            begin = time.perf_counter()
            list(
                pool.map(
                    lambda t: t.call(
                        "steps", count=steps, staleness=staleness
                    ),
                    trainers,
                )
            )
            seconds = time.perf_counter() - begin
            spent = [
                p.cpu() - before
                for p, before in zip((*started, *trainers), used, strict=True)
            ]
            every = steps * ranks
            found.append(
                Run(
                    every / seconds,
                    sum(spent[:servers]) / every,
                    sum(spent[servers:]) / every,
                    dense,
                )
            )
        return max(found)


class Measured(NamedTuple):
    """Service times.

    Attributes:
        times: with the dense part of the largest batch.
        step: seconds of a rank's step beside its dense part, whatever the
            batch: a part of ``times.dense``.
    """

    times: Times
    step: float


def service_times(samples: tuple[int, ...], **sizes: Any) -> Measured:
    """Of these batches at one server, and at two: the times that explain the
    processor time of all these jobs best."""
    jobs = [(servers, batch) for servers in (1, 2) for batch in samples]
    ran = [run(servers, batch, 8, **sizes) for servers, batch in jobs]
    ids = {batch: distinct(batch, 8) for batch in samples}
    calls = np.array([2.0 * servers for servers, _ in jobs])
    each = np.array([ids[batch] for _, batch in jobs])

    def explain(spent: list[float], *columns: np.ndarray) -> list[float]:
        # An error counts by its share of the whole.
        weight = 1 / np.array(spent)
        matrix = np.stack(columns, 1) * weight[:, None]
        found = np.linalg.lstsq(matrix, np.ones(len(spent)), rcond=None)[0]
        return [max(float(x), 0.0) for x in found]

    server_call, server_id = explain([r.server for r in ran], calls, each)
    client_call, client_id, step = explain(
        [r.rank - r.dense for r in ran], calls, each, np.ones(len(jobs))
    )
    dense = max(r.dense for r in ran)
    return Measured(
        Times(server_call, server_id, client_call, client_id, dense + step),
        step,
    )


class Moved(NamedTuple):
    """Rows that moved.

    Attributes:
        rate: rows a second, while rows are sent.
        rows: of a move.
    """

    rate: float
    rows: float


def moves(rows: int) -> Moved:
    """How fast shards move that no trainer uses, from two servers to a
    third."""
    done: dict[int, Progress] = {}

    def show(progress: Progress) -> None:
        done[progress.number] = progress

    with tempfile.TemporaryDirectory() as folder, Processes() as processes:
        _, addresses = elastic_servers(processes, Path(folder), "off")
        trainer = processes.trainer()
        trainer.call("open", servers=",".join(addresses[:2]), **THREADS)
        trainer.call("make_rows", first=0, stop=rows)
        with Scaling(addresses) as scaling:
            begin = time.perf_counter()
            scaling.run(plan(scaling.places(), 3), show)
            seconds = time.perf_counter() - begin
    moved = sum(progress.rows for progress in done.values())
    return Moved(moved / seconds / Rounds().share, moved / len(done))
