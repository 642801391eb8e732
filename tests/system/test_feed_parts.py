"""``persia feed --parts``: loaders that share the data, and die."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from persia import _core
from persia.data import Sender
from tests.kafka import PARTITIONS, Cluster, cluster
from tests.ready import Ready
from tests.remote import Servers
from tests.roles import CountingTrainer, Workers, servers
from tests.system.processes import environment
from tests.test_roles_failures import wait_for

__all__ = ["cluster", "servers"]

if not _core.GRPC[0].isdigit():
    pytest.skip("built without gRPC", allow_module_level=True)

pytestmark = pytest.mark.timeout(180)

PARTS, FILES, ROWS, BATCH = PARTITIONS, 6, 250, 10


@pytest.fixture
def workers(servers: Servers) -> Iterator[Workers]:
    """Two, for so many parts; a silent loader loses its parts after 3 s."""
    with contextlib.closing(
        Workers(
            servers.addresses,
            2,
            loaders=PARTS,
            silence=9.0,
            queue_limit=4096,
        )
    ) as both:
        yield both


def schema(tmp_path: Path) -> Path:
    path = tmp_path / "schema.yaml"
    path.write_text(
        "label: click\ncategorical: [{column: user, hash: false}]\n"
    )
    return path


def files(tmp_path: Path) -> str:
    """Each id in one row of one file."""
    for i in range(FILES):
        rows = "".join(f"1,{i * ROWS + k}\n" for k in range(ROWS))
        (tmp_path / f"part-{i}.csv").write_text("click,user\n" + rows)
    return str(tmp_path / "part-*.csv")


def feed(
    workers: Workers,
    tmp_path: Path,
    data: str,
    *more: str,
    parts: int = PARTS,
) -> subprocess.Popen[str]:
    return Ready(
        *("-m", "persia", "feed", data, "--job", "test"),
        *("--schema", str(schema(tmp_path)), "--batch-size", str(BATCH)),
        *("--workers", ",".join(workers.addresses), *more),
        *("--parts", str(parts)),
        env=environment(OMP_NUM_THREADS="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def ends_well(loader: subprocess.Popen[str]) -> str:
    out, _ = loader.communicate(timeout=120)
    assert loader.returncode == 0, out
    return out


def test_a_part_is_of_one_sender(servers: Servers, workers: Workers) -> None:
    senders = [Sender(workers.addresses, name="part") for _ in range(2)]
    assert [s.claim() for s in senders] == ["own", "held"]
    assert senders[0].claim() == "own"
    for sender in senders:
        sender.close(ended=False)
    late = Sender(workers.addresses, name="part")
    wait_for(lambda: late.claim() == "own")
    late.end()
    late.close()
    assert Sender(workers.addresses, name="part").claim() == "ended"
    more = Sender(workers.addresses, name="part")
    assert more.claim(epochs=2) == "own"
    more.close(ended=False)


def test_parts_of_a_loader_that_died(
    servers: Servers, workers: Workers, tmp_path: Path
) -> None:
    trainer = CountingTrainer(servers, workers)
    trainer.most = 30
    data = files(tmp_path)
    more = ("--eval-split", "0")
    first = feed(workers, tmp_path, data, *more, "--loader", "0/2")
    wait_for(lambda: trainer.batches >= 10)
    second = feed(workers, tmp_path, data, *more, "--loader", "1/2")
    wait_for(lambda: trainer.batches >= 30)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    trainer.most = 1 << 62
    ends_well(second)
    third = feed(workers, tmp_path, data, *more)  # finds nothing to do
    assert "sent 0 batches" in ends_well(third)
    wait_for(lambda: trainer.epochs == 1)
    assert trainer.counts(FILES * ROWS) == [1.0] * FILES * ROWS


@pytest.mark.long
def test_epochs(servers: Servers, workers: Workers, tmp_path: Path) -> None:
    trainer = CountingTrainer(servers, workers)
    more = ("--eval-split", "0", "--epochs", "3")
    data = files(tmp_path)
    loaders = [
        feed(workers, tmp_path, data, *more, "--loader", f"{i}/2")
        for i in range(2)
    ]
    for loader in loaders:
        ends_well(loader)
    wait_for(lambda: trainer.epochs == 3)
    assert trainer.counts(FILES * ROWS) == [3.0] * FILES * ROWS


def produce(
    cluster: Cluster, first: int, per_partition: int, topic: str = "clicks"
) -> None:
    """Message i of all is in partition i % PARTITIONS."""
    for p in range(PARTITIONS):
        ids = range(first + p, first + per_partition * PARTITIONS, PARTITIONS)
        values: list[Any] = [
            json.dumps({"click": 1, "user": i}).encode() for i in ids
        ]
        cluster.produce(topic, values, p)


def test_topics(
    servers: Servers, workers: Workers, tmp_path: Path, cluster: Cluster
) -> None:
    """Killed at any time, and started again with more messages."""
    trainer = CountingTrainer(servers, workers)
    url = f"kafka://{cluster.servers}/clicks?group=g"
    half = 25 * BATCH + 7  # the last 7 wait for more
    produce(cluster, 0, half)
    trainer.most = 20
    killed = feed(workers, tmp_path, url, "--metrics-port", "0")
    wait_for(lambda: trainer.batches >= 20)
    assert killed.stdout
    page = killed.stdout.readline().split()[-1]
    with urllib.request.urlopen(page) as answer:
        metrics = answer.read().decode()
    (lag,) = re.findall(r'persia_feed_lag{partition="clicks/0"} (.*)', metrics)
    assert 0 < float(lag) <= half
    (sent,) = re.findall(r"(?m)^persia_feed_sent_total (.*)", metrics)
    assert float(sent) >= 20
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    trainer.most = 1 << 62
    url += "&timeout=50&dead_letter=dead"  # of the same streams
    ends_well(feed(workers, tmp_path, url))
    whole = 25 * BATCH * PARTITIONS
    n = half * PARTITIONS
    assert trainer.counts(n) == [1.0] * whole + [0.0] * (n - whole)
    ends_well(feed(workers, tmp_path, url))  # nothing new
    assert trainer.counts(n) == [1.0] * whole + [0.0] * (n - whole)
    produce(cluster, n, 13)
    ends_well(feed(workers, tmp_path, url, "--epochs", "2"))
    total = n + 13 * PARTITIONS
    assert trainer.counts(total) == [1.0] * total
    assert cluster.committed("clicks") == [half + 13] * PARTITIONS


def test_more_partitions(
    servers: Servers, tmp_path: Path, cluster: Cluster
) -> None:
    """The same job has another topic, too: no message is trained again."""
    url, n = f"kafka://{cluster.servers}/clicks?group=g", 5 * BATCH
    first = n * PARTITIONS
    with contextlib.closing(
        Workers(servers.addresses, loaders=PARTITIONS)
    ) as workers:
        trainer = CountingTrainer(servers, workers)
        produce(cluster, 0, n)
        ends_well(feed(workers, tmp_path, url))
        assert trainer.counts(first) == [1.0] * first
    produce(cluster, first, n, "views")
    url = url.replace("clicks", "clicks,views")
    with contextlib.closing(
        Workers(servers.addresses, loaders=2 * PARTITIONS)
    ) as workers:
        trainer = CountingTrainer(servers, workers)
        ends_well(feed(workers, tmp_path, url, parts=2 * PARTITIONS))
        assert trainer.counts(2 * first) == [1.0] * 2 * first


def test_topics_without_an_end(
    servers: Servers, workers: Workers, tmp_path: Path, cluster: Cluster
) -> None:
    """Messages are sent as they arrive, also after a loader was killed."""
    trainer = CountingTrainer(servers, workers)
    url, n = f"kafka://{cluster.servers}/clicks?group=g", 3 * BATCH
    each = n * PARTITIONS
    produce(cluster, 0, n)
    loader = feed(workers, tmp_path, url, "--follow")
    try:
        wait_for(lambda: trainer.counts(each) == [1.0] * each)
        # Nothing more arrives, and what is trained is committed.
        wait_for(lambda: cluster.committed("clicks") == [n] * PARTITIONS)
        produce(cluster, each, n)
        wait_for(lambda: trainer.counts(2 * each) == [1.0] * 2 * each)
        loader.kill()
        loader.communicate()
        produce(cluster, 2 * each, n)
        loader = feed(workers, tmp_path, url, "--follow")
        wait_for(lambda: trainer.counts(3 * each) == [1.0] * 3 * each)
    finally:
        loader.kill()
        loader.communicate()
    assert trainer.epochs == 0


@pytest.mark.long
def test_topics_after_a_rollback(tmp_path: Path, cluster: Cluster) -> None:
    """New workers and loaders send what follows the checkpoint."""
    url, n = f"kafka://{cluster.servers}/clicks?group=g", 10 * BATCH
    first, both = n * PARTITIONS, 2 * n * PARTITIONS
    with (
        contextlib.closing(Servers(2, checkpoints=str(tmp_path))) as servers,
        contextlib.closing(
            Workers(servers.addresses, loaders=PARTS)
        ) as workers,
    ):
        trainer = CountingTrainer(servers, workers)
        produce(cluster, 0, n)
        ends_well(feed(workers, tmp_path, url))
        trainer.store.save(tmp_path / "out")
        produce(cluster, first, n)
        assert "--epochs" in ends_well(feed(workers, tmp_path, url))
        ends_well(feed(workers, tmp_path, url, "--epochs", "2"))
        assert trainer.counts(both) == [1.0] * both
        trainer.store.load(tmp_path / "out")
        assert trainer.counts(both) == [1.0] * first + [0.0] * (both - first)
        ends_well(feed(workers, tmp_path, url, "--epochs", "3"))
        assert trainer.counts(both) == [1.0] * both
