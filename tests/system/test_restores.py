"""Restores have an identity: mixtures are found, replaced rows are told."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

import persia
from persia import _core, errors
from persia.checkpoint.shards import Staged
from persia.store.engine import engine_of
from tests.ready import ended
from tests.system.processes import environment
from tests.system.test_serve import Serving, serving

if not _core.GRPC[0].isdigit():
    pytest.skip("built without gRPC", allow_module_level=True)

IDS = torch.arange(1, 101)

# Dies when the first of the servers has the rows.
LOADER = """
import os, signal, sys
import persia
from persia import _core
from persia.checkpoint import shards
from tests.system import test_restores

whole = shards.Staged._ask

def ask(self, verb, shard):
    if verb == _core.RESTORE_COMMIT and shard == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return whole(self, verb, shard)

shards.Staged._ask = ask
test_restores.Job(sys.argv[1]).store.load(sys.argv[2])
"""


class Job:
    """Each update adds 1 to each of a hundred rows."""

    def __init__(self, servers: str, **more: Any) -> None:
        self.store = persia.Store(
            persia.optim.SGD(lr=1.0), servers=servers, timeout=30, **more
        )
        self.model = persia.EmbeddingBagCollection(
            store=self.store,
            tables=[
                persia.EmbeddingBagConfig("t", 2, ["f"], init=0.0),
            ],
        )
        self.ids = persia.JaggedBatch.from_dict({"f": IDS.reshape(-1, 1)})

    def train(self, steps: int) -> None:
        for _ in range(steps):
            (-self.model(self.ids).values()).sum().backward()
        self.store.flush()

    def rows(self) -> set[float]:
        return set(self.store.rows("t", IDS.tolist()).flatten().tolist())

    def restores(self) -> list[int]:
        return [
            _core.ckpt_hello(
                engine_of(self.store).handle, shard, "default", 0
            )["restore"]
            for shard in range(2)
        ]


@pytest.fixture
def two(tmp_path: Path) -> Iterator[str]:
    """Two servers with a folder; their addresses."""
    with ExitStack() as stack:
        addresses = [
            stack.enter_context(
                serving("--shard", f"{i}/2", "--checkpoints", str(tmp_path))
            ).address
            for i in range(2)
        ]
        yield ",".join(addresses)


def kill_between_commits(servers: str, folder: Path) -> None:
    words = ("-c", LOADER, servers, str(folder))
    done = ended(*words, env=environment(), timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr


def test_a_load_that_was_cut_short(two: str, tmp_path: Path) -> None:
    job = Job(two)
    job.train(2)
    job.store.save(tmp_path / "job")
    job.train(3)
    job.store.close()
    kill_between_commits(two, tmp_path / "job")
    job = Job(two)
    assert sum(id != 0 for id in job.restores()) == 1
    assert job.store.stats()["tables"]
    calls = [
        lambda: job.model(job.ids),
        lambda: job.train(1),
        job.store.flush,
        lambda: job.store.save(tmp_path / "mixed"),
        job.rows,
        lambda: job.store.load(tmp_path / "job", resume="continue"),
    ]
    for call in calls:
        with pytest.raises(errors.RestoreIncomplete) as raised:
            call()
        assert all(one in str(raised.value) for one in two.split(","))
    assert not (tmp_path / "mixed" / "LATEST").exists()
    job.store.load(tmp_path / "job")
    assert len(set(job.restores())) == 1
    assert job.rows() == {2.0}
    job.train(1)
    assert job.rows() == {3.0}
    assert Job(two).rows() == {3.0}


def test_a_load_that_failed_half_way(
    two: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client has seen the rows of both restores, and found nothing wrong
    with that, as it was loading."""
    job = Job(two)
    job.train(2)
    job.store.save(tmp_path / "job")

    def tear(staged: Staged) -> None:
        while not staged._commit(0):
            pass
        job.rows()
        raise errors.Unavailable("server 1 was started again")

    with monkeypatch.context() as patch:
        patch.setattr(Staged, "commit", tear)
        with pytest.raises(errors.Unavailable):
            job.store.load(tmp_path / "job")
    with pytest.raises(errors.RestoreIncomplete):
        job.train(1)
    with pytest.raises(errors.RestoreIncomplete):
        job.store.save(tmp_path / "mixed")
    job.store.load(tmp_path / "job")
    assert job.rows() == {2.0}


def test_another_client_completes_it(two: str, tmp_path: Path) -> None:
    first = Job(two)
    first.train(2)
    first.store.save(tmp_path / "job")
    first.store.close()
    kill_between_commits(two, tmp_path / "job")
    job = Job(two)
    with pytest.raises(errors.RestoreIncomplete):
        job.train(1)
    Job(two).store.load(tmp_path / "job")
    assert job.rows() == {2.0}
    job.train(3)
    assert job.rows() == {5.0}


@pytest.mark.parametrize("lost", ["raise", "continue"])
def test_rows_that_another_client_replaced(
    two: str, tmp_path: Path, lost: str
) -> None:
    job = Job(two, lost=lost)
    job.train(1)
    other = Job(two)
    other.store.save(tmp_path / "job")
    job.train(10)
    other.store.load(tmp_path / "job")
    if lost == "raise":
        with pytest.raises(errors.RowsReplaced, match="10 updates"):
            job.model(job.ids)
    assert job.rows() == {1.0}
    assert job.store.stats()["client"]["lost"] == 10
    job.train(2)
    job.store.save(tmp_path / "job")
    assert job.rows() == {3.0}
    assert job.store.stats()["client"]["lost"] == 10


@pytest.mark.parametrize("call", ["push", "save"])
def test_the_call_that_tells_of_replaced_rows(
    two: str, tmp_path: Path, call: str
) -> None:
    job = Job(two)
    job.train(1)
    other = Job(two)
    other.store.save(tmp_path / "job")
    job.train(4)
    pooled = job.model(job.ids).values()
    other.store.load(tmp_path / "job")
    calls = {
        "push": lambda: (pooled.sum().backward(), job.store.flush()),
        "save": lambda: job.store.save(tmp_path / "job"),
    }
    with pytest.raises(errors.RowsReplaced):
        calls[call]()
    assert job.store.stats()["client"]["lost"] == 4


def test_one_load_is_nobody_elses(two: str, tmp_path: Path) -> None:
    job = Job(two)
    job.train(3)
    job.store.save(tmp_path / "job")
    job.train(2)
    job.store.load(tmp_path / "job")
    job.train(1)
    assert job.rows() == {4.0}
    assert job.store.stats()["client"]["lost"] == 0


def test_a_servers_own_snapshot_keeps_the_restore(tmp_path: Path) -> None:
    def flags(shard: int, port: str) -> list[str]:
        return [
            *("--shard", f"{shard}/2", "--port", port),
            *("--checkpoints", str(tmp_path), "--restore", "job"),
            *("--or-empty", "--save-on-exit", "job"),
        ]

    servers = [Serving(*flags(i, "0")) for i in range(2)]
    try:
        text = ",".join(one.address for one in servers)
        job = Job(text)
        job.train(2)
        job.store.save(tmp_path / "job")
        job.store.load(tmp_path / "job")
        before = job.restores()
        assert before[0] == before[1] != 0
        job.train(1)
        servers[1].stop()
        port = servers[1].address.rpartition(":")[2]
        servers[1] = Serving(*flags(1, port))
        job.train(1)
        assert Job(text).restores() == before
        assert Job(text).rows() == {4.0}
        # Killed, it begins with a checkpoint of before that restore: what is
        # lost is told, and then its rows are the job's.
        servers[1].process.kill()
        servers[1].process.wait()
        (tmp_path / "job-1-of-2").rename(tmp_path / "away")
        servers[1] = Serving(*flags(1, port))
        with pytest.raises(errors.UpdatesLost):
            job.train(1)
        job.train(1)
        assert Job(text).restores() == before
        Job(text).rows()
    finally:
        for one in servers:
            one.process.kill()
            one.process.communicate()
