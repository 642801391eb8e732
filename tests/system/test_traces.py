"""Traces of batches through four roles, each a process of its own."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from persia import _core
from tests.collector import Collector, Span
from tests.ready import Ready
from tests.system.processes import environment, wait_until

if not _core.GRPC[0].isdigit():
    pytest.skip("built without gRPC", allow_module_level=True)

JOB = str(Path(__file__).with_name("traces_job.py"))
BATCHES = 12
IDS = 32  # of a batch, on both servers
LOADER = f"""
import sys, torch, persia
with persia.data.Sender(sys.argv[1], name="traces") as sender:
    for i in range({BATCHES}):
        ids = persia.JaggedBatch(["id"], torch.arange({IDS}) + i)
        sender.send(persia.Batch(None, ids))
    print("sent", flush=True)
    sender.flush()
"""
DIRECT = f"""
import sys, torch, persia
store = persia.Store(persia.optim.SGD(lr=1.0), servers=sys.argv[1])
bags = persia.EmbeddingBagCollection(
    store=store, tables=[persia.EmbeddingBagConfig("t", 4, ["id"])]
)
batches = [
    persia.Batch(None, persia.JaggedBatch(["id"], torch.arange({IDS}) + i))
    for i in range({BATCHES})
]
for batch in persia.DataLoader(batches, bags, staleness=2):
    bags(batch.ids).values().sum().backward()
store.flush()
store.close()
"""
LOOKUP = "lookup", "embedding-worker"
#: What becomes of a batch that is trained at once, on two servers.
WHOLE = Counter(
    {
        ("batch", "loader"): 1,
        ("submit", "loader"): 1,
        ("queue", "embedding-worker"): 1,
        ("lookup", "embedding-worker"): 1,
        ("pull", "server"): 2,
        ("take", "trainer"): 1,
        ("train", "trainer"): 1,
        ("return", "trainer"): 1,
        ("apply", "embedding-worker"): 1,
        ("push", "server"): 2,
    }
)


class Job:
    """Two servers and an embedding worker, and what a test adds."""

    def __init__(self, env: dict[str, str]) -> None:
        self._env = env
        self.all: list[subprocess.Popen[str]] = []
        found = [
            self._serving("ps", "--shard", f"{i}/2", "--port", "0")
            for i in range(2)
        ]
        self.servers = ",".join(address for _, address in found)
        self.worker, self.workers = self.serve_worker("0")

    def serve_worker(self, port: str) -> tuple[subprocess.Popen[str], str]:
        return self._serving(
            "worker", "--servers", self.servers, "--port", port
        )

    def _serving(self, *words: str) -> tuple[subprocess.Popen[str], str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "persia", "serve", *words],
            env=environment(**self._env),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.all.append(process)
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.match(r"serving .* on (\S+)$", line)
        assert found, line
        return process, found[1]

    def start(self, *words: str) -> subprocess.Popen[str]:
        process = Ready(
            *words,
            env=environment(**self._env),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self.all.append(process)
        return process

    def loader(self) -> subprocess.Popen[str]:
        return self.start("-c", LOADER, self.workers)

    def trainer(self, *more: str) -> subprocess.Popen[str]:
        return self.start(JOB, self.servers, self.workers, *more)

    def stop(self) -> None:
        """All end in peace: what they have not sent yet, they send now."""
        for process in self.all:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                _, messages = process.communicate(timeout=60)
                assert process.returncode == 0, messages

    def kill(self) -> None:
        for process in self.all:
            process.kill()
            process.communicate()


@contextlib.contextmanager
def job(env: dict[str, str]) -> Iterator[Job]:
    """Its servers and its worker run."""
    one = Job(env)
    try:
        yield one
    finally:
        one.kill()


def ended(*processes: subprocess.Popen[str]) -> None:
    """In peace."""
    for process in processes:
        _, messages = process.communicate(timeout=60)
        assert process.returncode == 0, messages


def first(spans: list[Span]) -> Span:
    """The one above all others, of spans that are one tree."""
    names = {span.id: span for span in spans}
    assert len(names) == len(spans)
    roots = [span for span in spans if not span.parent]
    assert len(roots) == 1
    for span in spans:
        assert span.began <= span.ended
        if span.parent:
            assert names[span.parent].name in {
                "persia.pull": {"persia.lookup"},
                "persia.push": {"persia.apply"},
            }.get(span.name, {"persia.batch"})
    return roots[0]


def said(process: subprocess.Popen[str], line: str) -> None:
    """The next line that it prints."""
    assert process.stdout is not None
    assert process.stdout.readline() == line + "\n"


def lookups(collector: Collector) -> int:
    """The most of one batch."""
    all_ = collector.traces().values()
    return max((kinds(one)[LOOKUP] for one in all_), default=0)


def kinds(spans: list[Span]) -> Counter[tuple[str, str]]:
    return Counter(
        (
            span.name.removeprefix("persia."),
            span.service.removeprefix("persia-"),
        )
        for span in spans
    )


@pytest.mark.slow
@pytest.mark.parametrize("rate", [1.0, 0.5])
def test_a_batch_is_one_tree_in_four_processes(rate: float) -> None:
    """All of it is sampled, or nothing; the name of the loader decides."""
    with Collector() as collector:
        with job(collector.environment(rate)) as one:
            ended(one.loader(), one.trainer())
            one.stop()
        traces = collector.traces()
    assert len(traces) == BATCHES if rate == 1 else 0 < len(traces) < BATCHES
    numbers = set()
    for spans in traces.values():
        root = first(spans)
        assert kinds(spans) == WHOLE
        assert not any(span.failed for span in spans)
        numbers.add(root.about["persia.number"])
        for name in "persia.pull", "persia.push":
            of = [s.about for s in spans if s.name == name]
            assert {about["persia.shard"] for about in of} == {0, 1}
            assert sum(about["persia.rows"] for about in of) == IDS
    assert len(numbers) == len(traces)


@pytest.mark.slow
def test_without_embedding_workers_the_trainer_s_is_the_first() -> None:
    """What it looks up ahead has no number yet, so servers do not know whose
    pull it is."""
    with Collector() as collector:
        with job(collector.environment()) as one:
            ended(one.start("-c", DIRECT, one.servers))
            one.stop()
        traces = collector.traces()
    numbers = set()
    for spans in traces.values():
        numbers.add(first(spans).about["persia.number"])
        assert kinds(spans) == {
            ("batch", "trainer"): 1,
            ("lookup", "trainer"): 1,
            ("train", "trainer"): 1,
            ("apply", "trainer"): 1,
            ("push", "server"): 2,
        }
    assert numbers == set(range(1, BATCHES + 1))


@pytest.mark.slow
def test_attempts_after_kills_are_of_the_same_tree() -> None:
    """A trainer is killed that has a batch, then the worker that has all."""
    with Collector() as collector:
        with job(collector.environment()) as one:
            loader = one.loader()
            said(loader, "sent")
            for tries in 1, 2:
                holder = one.trainer("hold")
                said(holder, "holds")
                wait_until(lambda n=tries: lookups(collector) == n)
                holder.kill()
                holder.wait()
            one.worker.kill()
            one.worker.wait()
            one.serve_worker(one.workers.rpartition(":")[2])
            ended(loader, one.trainer())
            one.stop()
        traces = collector.traces()
    assert len(traces) == BATCHES
    for spans in traces.values():
        root = first(spans)
        found = kinds(spans)
        assert found["submit", "loader"] == 2
        assert found["apply", "embedding-worker"] == 1
        assert found["push", "server"] == 2
        of = [s for s in spans if s.name == "persia.submit"]
        assert {s.parent for s in of} == {root.id}
        assert {s.about["persia.attempt"] for s in of} == {1, 2}
    assert max(kinds(spans)[LOOKUP] for spans in traces.values()) == 3


@pytest.mark.slow
def test_a_collector_that_is_away_ends_nothing() -> None:
    """The job trains, and its processes end."""
    with Collector() as collector:
        env = collector.environment()
    with job(env) as one:
        ended(one.loader(), one.trainer())
        one.stop()


@pytest.mark.parametrize("rate", ["x", "2", "-0.1", "nan"])
def test_a_wrong_rate_is_named(rate: str) -> None:
    done = Ready(
        *("-m", "persia", "serve", "ps", "--port", "0"),
        env=environment(PERSIA_TRACE_RATE=rate),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    _, messages = done.communicate(timeout=60)
    assert done.returncode == 2
    assert "PERSIA_TRACE_RATE" in messages
