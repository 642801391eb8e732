"""Checkpoints of stores on servers: trainings that go on."""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import persia
from persia import errors
from persia.checkpoint import files
from persia.checkpoint import manifest as manifests
from persia.checkpoint import shards as checkpoint_shards
from tests import remote
from tests.checkpoints import Trained


class Job(Trained):
    """Trained in steps that see each other's rows, wherever those are."""

    def __init__(self, servers: remote.Servers | None, **more: Any) -> None:
        where = servers.addresses if servers else "embedded"
        super().__init__("adam", "bf16", servers=where, **more)

    def train(self, first: int, last: int) -> list[float]:
        """Steps first to last as one pass at staleness 0."""
        batches = [
            persia.Batch(None, self.batch(step)) for step in range(first, last)
        ]
        losses = [
            self.step(batch.ids)
            for batch in persia.DataLoader(batches, self.model, 0)
        ]
        self.store.flush()
        return losses


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Callable[[int], remote.Servers]]:
    """Makes servers, each behind a port; tmp_path/checkpoints is theirs."""
    (tmp_path / "checkpoints").mkdir(exist_ok=True)
    with contextlib.ExitStack() as stack:

        def make(n: int) -> remote.Servers:
            folder = str(tmp_path / "checkpoints")
            servers = remote.Servers(n, checkpoints=folder)
            stack.callback(servers.close)
            return servers

        yield make


Cluster = Callable[[int], remote.Servers]


@pytest.mark.parametrize(("n", "m"), [(1, 2), (2, 2), (3, 1), (2, 0), (0, 3)])
def test_a_job_goes_on_with_the_same_bits(
    tmp_path: Path,
    cluster: Cluster,
    n: int,
    m: int,
) -> None:
    """On m servers after n; 0: embedded."""
    root = tmp_path / "checkpoints" / "out"
    whole = Job(cluster(n) if n else None)
    whole.train(0, 3)
    folder = whole.store.save(root, **whole.state(), extra={"epoch": 3})
    assert folder == root / "step-3"
    assert not (root / "step-3" / ".proof").exists()
    losses = whole.train(3, 6)

    resumed = Job(cluster(m) if m else None)
    resumed.train(50, 52)  # something else, of which nothing may remain
    found = resumed.store.load(root, **resumed.state())
    assert found.extra == {"epoch": 3}
    assert resumed.store.updates == found.step == 3
    assert resumed.train(3, 6) == losses
    assert resumed.store.updates == 6
    # And once more from the same checkpoint.
    resumed.store.load(root, **resumed.state())
    assert resumed.train(3, 6) == losses
    ids = torch.arange(200)
    for table in ("u", "i"):
        for a, b in zip(
            whole.store.rows_and_state(table, ids),
            resumed.store.rows_and_state(table, ids),
        ):
            assert torch.equal(a, b)


def test_continue_keeps_live_rows_and_counts_what_is_repeated(
    tmp_path: Path, cluster: Cluster
) -> None:
    root = tmp_path / "checkpoints" / "out"
    servers = cluster(2)
    first = Job(servers)
    first.train(0, 3)
    first.store.save(root, **first.state())
    first.train(3, 6)
    ids = torch.arange(200)
    live = first.store.rows("u", ids)
    first.store.close()

    second = Job(servers)  # a new incarnation of the rank
    second.store.load(root, **second.state(), resume="continue")
    assert torch.equal(second.store.rows("u", ids), live)
    assert second.store.updates == 6
    second.train(3, 6)  # again
    assert torch.equal(second.store.rows("u", ids), live)
    assert second.store.updates == 6
    # One answer of each of two servers for each of three updates.
    assert second.store.stats()["client"]["duplicates"] == 6
    second.train(6, 7)
    assert second.store.updates == 7
    assert second.store.stats()["client"]["duplicates"] == 6


def test_continue_from_the_beginning(tmp_path: Path, cluster: Cluster) -> None:
    root = tmp_path / "checkpoints" / "out"
    servers = cluster(2)
    first = Job(servers)
    first.store.save(root, **first.state())
    first.train(0, 2)
    first.store.load(root, **first.state(), resume="continue")
    first.train(0, 3)
    assert first.store.updates == 3


@pytest.mark.parametrize("told", [False, True])
def test_continue_where_a_server_has_lost_rows(
    tmp_path: Path, cluster: Cluster, told: bool
) -> None:
    """One came without rows in its place; told: before the job went on."""
    root = tmp_path / "checkpoints" / "out"
    servers = cluster(2)
    first = Job(servers)
    first.train(0, 3)
    first.store.save(root, **first.state())
    servers.kill(1)
    servers.restart(1)
    if told:
        with pytest.raises(errors.UpdatesLost, match="lost 3 updates"):
            first.train(3, 4)
    first.store.close()

    raises = Job(servers)
    before = raises.model["top"][1].weight.detach().clone()
    with pytest.raises(errors.UpdatesLost) as caught:
        raises.store.load(root, **raises.state(), resume="continue")
    # Told by a look-up, or by an update that the new one then has.
    lost = rf"at least {'[23]' if told else 3} at {servers.addresses[1]} "
    assert re.search(lost, str(caught.value))
    for words in ("rank 0", "'rollback'", "lost=continue"):
        assert words in str(caught.value)
    assert torch.equal(raises.model["top"][1].weight, before)
    assert raises.store.load(root, **raises.state()).rows["u"] > 0
    raises.train(3, 5)
    raises.store.close()


def test_continue_without_what_a_server_has_lost(
    tmp_path: Path, cluster: Cluster
) -> None:
    root = tmp_path / "checkpoints" / "out"
    servers = cluster(2)
    first = Job(servers)
    first.train(0, 3)
    first.store.save(root, **first.state())
    first.train(3, 5)
    first.store.close()
    servers.kill(1)
    servers.restart(1)
    second = Job(servers, lost="continue")
    found = second.store.load(root, **second.state(), resume="continue")
    assert found.rows == {"u": 0, "i": 0}  # none was loaded
    second.train(3, 5)
    counts = second.store.stats()["client"]
    assert (counts["lost"], counts["duplicates"]) == (3, 2)
    # One that has the rows of the checkpoint again has lost nothing.
    second.store.save(root, **second.state())
    second.store.load(root, **second.state())
    second.train(5, 6)
    second.store.load(root, **second.state(), resume="continue")
    second.store.close()


def test_continue_needs_rows_that_outlive_the_process(
    tmp_path: Path, cluster: Cluster
) -> None:
    root = tmp_path / "checkpoints" / "out"
    servers = cluster(1)
    one = Job(servers)
    one.train(0, 1)
    one.store.save(root, **one.state())
    embedded = Job(None)
    with pytest.raises(errors.InvalidArgument, match="resume='continue'"):
        embedded.store.load(root, resume="continue")
    with pytest.raises(errors.InvalidArgument, match="resume is 'go'"):
        embedded.store.load(root, resume="go")
    # The checkpoint of another job says nothing of these updates.
    found = files.find(files.LocalRoot(root), None)
    document = json.loads(
        (found.folder / "manifest.json").read_text()  # type: ignore[operator]
    )
    document["shards"][0]["ledgers"][0]["stream"] ^= 1
    (root / "step-1" / "manifest.json").write_bytes(
        manifests.encode_manifest(document)
    )
    with pytest.raises(
        errors.SchemaMismatch, match=r"namespace.*resume='rollback'"
    ):
        one.store.load(root, resume="continue")


def test_servers_start_again_between_two_calls(
    tmp_path: Path, cluster: Cluster
) -> None:
    """Who saves or asks for counts waits for them, and says Hello."""
    root = tmp_path / "checkpoints" / "out"
    servers = cluster(2)
    job = Job(servers, timeout=20.0, lost="continue")
    job.train(0, 2)
    calls: list[Callable[[], object]] = [
        lambda: job.store.save(root, **job.state()),
        job.store.stats,
        lambda: job.store.updates,
        lambda: job.store.add_table(persia.EmbeddingBagConfig("later", 4)),
    ]
    for call in calls:
        servers.kill(0)
        again = threading.Timer(0.3, servers.restart, [0])
        again.start()
        call()
        again.join()
    assert job.store.stats()["client"]["lost"] == 2


@pytest.mark.slow
def test_a_server_dies(tmp_path: Path, cluster: Cluster) -> None:
    root = tmp_path / "checkpoints" / "out"
    servers = cluster(2)
    job = Job(servers, timeout=4.0)
    job.train(0, 2)
    good = job.store.save(root, **job.state())
    weight = job.model["top"][1].weight.detach().clone()
    job.train(2, 3)
    trained = job.model["top"][1].weight.detach().clone()
    servers.kill(1)
    gone = servers.addresses[1]
    with pytest.raises(errors.Unavailable, match=gone):
        job.store.save(root, **job.state())
    assert files.find(files.LocalRoot(root), None).folder == good
    assert sorted(os.listdir(root)) == [".lock", "LATEST", "step-2"]
    with pytest.raises(errors.Unavailable, match=gone):
        job.store.load(root, **job.state())
    assert torch.equal(job.model["top"][1].weight, trained)
    # A new one in its place, without rows, gets them from the checkpoint.
    servers.restart(1)
    job.store.load(root, **job.state())
    assert torch.equal(job.model["top"][1].weight, weight)
    losses = job.train(2, 4)
    fresh = Job(None)
    fresh.store.load(root, **fresh.state())
    assert fresh.train(2, 4) == losses
    ids = torch.arange(100)
    assert torch.equal(fresh.store.rows("u", ids), job.store.rows("u", ids))


def test_a_server_is_started_again_in_the_middle_of_a_save(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "checkpoints" / "out"
    servers = cluster(2)
    job = Job(servers, lost="continue")
    job.train(0, 2)
    poll = checkpoint_shards.poll

    def killed(*arguments: Any) -> Any:
        monkeypatch.undo()
        servers.kill(1)
        servers.restart(1)
        return poll(*arguments)

    monkeypatch.setattr(checkpoint_shards, "poll", killed)
    words = f"started again .*save again .*{servers.addresses[1]}"
    with pytest.raises(errors.Unavailable, match=words):
        job.store.save(root, **job.state())
    assert job.store.save(root, **job.state()) == root / "step-2"


def test_a_save_where_servers_do_not_write(
    tmp_path: Path, cluster: Cluster
) -> None:
    job = Job(cluster(1))
    with pytest.raises(errors.StorageError) as caught:
        job.store.save(tmp_path / "elsewhere" / "out")
    for word in (
        str(tmp_path / "elsewhere" / "out"),
        f"`checkpoints={tmp_path / 'elsewhere'}`",
    ):
        assert word in str(caught.value)


def test_lookups_ahead_of_a_load_are_done_anew(
    tmp_path: Path, cluster: Cluster
) -> None:
    where = cluster(2)
    store = persia.Store(persia.optim.SGD(lr=1.0), servers=where.addresses)
    bags = persia.EmbeddingBagCollection(
        store=store, tables=[persia.EmbeddingBagConfig("t", 2, init=0.0)]
    )
    ids = torch.arange(10)
    batches = [persia.Batch(None, persia.JaggedBatch(["t"], ids))] * 12
    for staleness in (0, 4):
        store.clear()
        for i, batch in enumerate(persia.DataLoader(batches, bags, staleness)):
            if i == 6:
                store.load(tmp_path / "checkpoints" / "out")
            values = bags(batch.ids).values()
            if i == 6:
                assert values.eq(3.0).all()
            values.sum().neg().backward()
            if i == 2:
                store.flush()
                store.save(tmp_path / "checkpoints" / "out")
        store.flush()
        assert store.rows("t", ids).eq(9.0).all()
