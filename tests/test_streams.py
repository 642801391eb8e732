"""Updates of several stores on the same servers: every store keeps all of
its own, one rank of one job is one process at a time."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import persia
from persia import JaggedBatch, _core, errors
from persia.distributed.cluster import Settings
from persia.store.engine import engine_of
from tests import remote
from tests.ready import Ready

ROOT = Path(__file__).parent.parent

# A process with a store: says what each line of its input came to.
_PROCESS = """
import sys
import torch
import persia

from tests.test_streams import add, opened

store, bag = opened(sys.argv[1].split(","), **eval(sys.argv[2]))
print("open", flush=True)
for line in sys.stdin:
    try:
        print(add(store, bag, int(line)), flush=True)
    except persia.errors.PersiaError as error:
        print(type(error).__name__, flush=True)
"""


def opened(servers: Any, **more: Any) -> tuple[persia.Store, Any]:
    store = persia.Store(
        persia.optim.SGD(lr=1.0), servers=servers, timeout=20, **more
    )
    bags = persia.EmbeddingBagCollection(
        store=store,
        tables=[
            persia.EmbeddingBagConfig(
                "t", embedding_dim=4, feature_names=["f"]
            )
        ],
    )
    return store, bags


def look(bags: Any) -> torch.Tensor:
    out: torch.Tensor = bags(JaggedBatch(["f"], torch.tensor([7]))).values()
    return out


def add(store: persia.Store, bags: Any, n: int) -> int:
    """Adds 1 to row 7 in each of n updates; then how many it has."""
    for _ in range(n):
        (-look(bags).sum()).backward()
    store.flush()
    return value(store)


def value(store: persia.Store) -> int:
    """Updates of row 7: it began within 0.5 around 0."""
    return round(float(store.rows("t", [7])[0, 0]))


class Process:
    """A store in a process of its own."""

    def __init__(self, servers: remote.Servers, **more: Any) -> None:
        self._process = Ready(
            *("-c", _PROCESS, servers.text, repr(more)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env={
                name: text
                for name, text in os.environ.items()
                if name not in ("TORCHELASTIC_RUN_ID", "PERSIA_RUN_ID")
            },
        )
        assert self._line() == "open"

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def send(self, n: int) -> None:
        """Begins :func:`add`."""
        assert self._process.stdin is not None
        print(n, file=self._process.stdin, flush=True)

    def add(self, n: int) -> str:
        """As :func:`add`; or the class of its error."""
        self.send(n)
        return self._line()

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def servers() -> Iterator[remote.Servers]:
    made = remote.Servers(2)
    yield made
    made.close()


@pytest.mark.slow
def test_a_notebook_beside_a_training_job(servers: remote.Servers) -> None:
    """The trainer's updates, and the notebook's, vanished as duplicates."""
    store, bag = opened(servers.addresses)
    assert add(store, bag, 3) == 3
    notebook = Process(servers)
    try:
        assert notebook.add(30) == "33"
        assert add(store, bag, 10) == 43
        assert notebook.add(5) == "48"
        assert store.stats()["client"]["duplicates"] == 0
        assert store.stats()["client"]["lost"] == 0
    finally:
        notebook.end()
    store.close()


def test_jobs_by_name(servers: remote.Servers) -> None:
    stores = [opened(servers.addresses, job=job) for job in ("a", "b", "a")]
    for round in range(1, 5):
        for one in stores:
            add(*one, 2)
        assert value(stores[0][0]) == 6 * round
    for store, _ in stores:
        store.close()


@pytest.mark.slow
def test_a_process_that_was_replaced_is_told(servers: remote.Servers) -> None:
    """It took the stream back, two generations later, and the updates of the
    live one vanished."""
    ranks = []
    try:
        for n in range(1, 4):
            ranks.append(Process(servers, job="nightly"))
            assert ranks[-1].add(1) == str(n)
        for old in ranks[:2]:
            assert old.add(1) == "Closed"
        assert ranks[2].add(3) == "6"
        assert ranks[0].add(1) == "Closed"
        servers.restart(1)  # it knows of no stream
        assert ranks[0].add(1) == "Closed"
    finally:
        for rank in ranks:
            rank.end()


def test_what_one_server_has_of_a_process_that_ended(
    servers: remote.Servers,
) -> None:
    """Its updates are completed as empty ones, and told once."""
    first, bag = opened(servers.addresses, job="nightly")
    add(first, bag, 5)
    first.close()
    servers.restart(1)  # as if it had got none of them
    store, bag = opened(servers.addresses, job="nightly")
    with pytest.raises(errors.UpdatesLost):
        add(store, bag, 1)
    add(store, bag, 1)
    counted = store.stats()
    assert [one["updates"] for one in counted["servers"]] == [7, 7]
    assert counted["client"]["lost"] == 5
    store.close()


def ledger(servers: remote.Servers, shard: int, stream: int) -> Any:
    """What a server has of a stream: watermark, window, skipped."""
    way = servers.shards[shard].channel(5.0)
    hello = way.hello(servers.namespace, stream)
    return hello["ledger"][1:4]


@pytest.mark.slow
def test_what_a_rank_left_that_the_job_has_no_longer(
    servers: remote.Servers,
) -> None:
    """Rank 1 of two was killed when one of two servers had its updates; the
    job starts again with one rank, whose first flush completes and tells."""
    store, _ = opened(servers.addresses, job="other")
    kept = _core.cluster_shard(engine_of(store).handle, 7)  # has the row
    stream = engine_of(store).connection.stream("nightly", 1)
    gone = Process(servers, job="nightly", rank=1, world_size=2)
    assert gone.add(2) == "1"  # the gradients of two ranks are averaged
    servers.kill(1 - kept)
    gone.send(1)
    while ledger(servers, kept, stream)[0] < 3:
        time.sleep(0.01)
    gone.end()
    servers.restart(1 - kept)
    store.flush()  # its job has no such rank
    store.close()
    store, bag = opened(servers.addresses, job="nightly", rank=0, world_size=1)
    assert ledger(servers, 1 - kept, stream)[0] == 0
    with pytest.raises(errors.UpdatesLost, match=r"3 updates .*rank 1"):
        store.flush()
    store.flush()
    had = ledger(servers, kept, stream)
    assert had == ledger(servers, 1 - kept, stream)
    assert had[0] == 3
    assert had[2] == 0
    assert store.stats()["client"]["lost"] == 3
    add(store, bag, 2)
    assert [one["updates"] for one in store.stats()["servers"]] == [5, 5]
    store.close()
    store, bag = opened(servers.addresses, job="nightly", rank=0, world_size=1)
    store.flush()  # told once
    assert store.stats()["client"]["lost"] == 0
    store.close()


def test_a_store_that_only_looks(servers: remote.Servers) -> None:
    store, bag = opened(servers.addresses)
    looks, its_bag = opened(servers.addresses, read_only=True)
    assert add(store, bag, 2) == 2
    assert value(looks) == 2
    assert torch.equal(look(bag), look(its_bag))
    for change in (
        lambda: add(looks, its_bag, 1),
        lambda: looks.set_rows("t", [7], torch.ones(1, 4)),
        lambda: looks.clear(),
        lambda: looks.load("/nowhere"),
    ):
        with pytest.raises(errors.InvalidArgument, match="read_only"):
            change()
    assert add(store, bag, 2) == 4
    assert value(looks) == 4
    looks.close()
    store.close()


def test_where_a_job_has_its_name_from(
    servers: remote.Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def name(**more: Any) -> str:
        store, _ = opened(servers.addresses, **more)
        with store:
            return engine_of(store).connection.run

    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.delenv("PERSIA_RUN_ID", raising=False)
    assert len(name()) == 32
    monkeypatch.setenv("PERSIA_RUN_ID", "launched")
    assert name() == "launched"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert name() == "launched"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "rdzv")
    assert name() == "rdzv"
    assert name(job="mine") == "mine"
    for bad in ("", "x" * 256, 3):
        with pytest.raises(errors.InvalidArgument, match="job"):
            Settings(job=bad)  # type: ignore[arg-type]
