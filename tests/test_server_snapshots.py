"""What a server begins with: the checkpoint of its job, or what it has saved
on exit."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import persia
from persia import JaggedBatch, _core
from persia.checkpoint import manifest as manifests
from persia.distributed.server import ServeConfig, Server

if not _core.GRPC[0].isdigit():
    pytest.skip("built without gRPC", allow_module_level=True)

EARLY, LATE = "2000-01-01T00:00:00+00:00", "2100-01-01T00:00:00+00:00"


class Life:
    """One life of a server, with a store of the job."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.server = Server(
            ServeConfig(
                port=0,
                checkpoints=folder,
                restore="job",
                or_empty=True,
                save_on_exit="job",
            )
        )
        self.server.restore()
        host = self.server.start().rpartition(":")[0]
        port = self.server.core.port
        self.store = persia.Store(
            persia.optim.SGD(lr=1.0),
            servers=f"{host}:{port}",
            job="trained",
            lost="continue",
        )
        self.bags = persia.EmbeddingBagCollection(
            store=self.store,
            tables=[
                persia.EmbeddingBagConfig(
                    "t", embedding_dim=2, feature_names=["f"], init=0.0
                )
            ],
        )

    def add(self, times: int) -> None:
        for _ in range(times):
            batch = JaggedBatch(["f"], torch.tensor([7]))
            (-self.bags(batch).values().sum()).backward()
        self.store.flush()

    def value(self) -> int:
        return int(self.store.rows("t", [7])[0, 0])

    def save(self) -> None:
        self.store.save(self.folder / "job", step=1)

    def exit(self) -> None:
        self.server.stop()
        self.server.save("job")


@contextmanager
def life(folder: Path) -> Iterator[Life]:
    one = Life(folder)
    try:
        yield one
    finally:
        one.store.close()
        one.server.close()


def stamp(path: Path, saved: str) -> None:
    """As a machine with another clock would have written it."""
    document = json.loads(path.read_bytes()) | {"saved": saved}
    path.write_bytes(manifests.encode_manifest(document))
    year = int(saved[:4]) - 1970
    os.utime(path, (year * 31_556_952,) * 2)


@pytest.mark.parametrize("own_clock", [EARLY, LATE])
def test_clocks_do_not_choose(tmp_path: Path, own_clock: str) -> None:
    own = tmp_path / "job-0-of-1/rows/shard.json"
    with life(tmp_path) as one:
        one.add(1)
        one.save()
        one.add(2)
        one.exit()  # after the checkpoint: 3
    stamp(own, own_clock)
    with life(tmp_path) as one:
        assert one.value() == 3
        one.add(1)
        one.save()  # after the exit: 4
    stamp(own, own_clock)
    with life(tmp_path) as one:
        assert one.value() == 4


@pytest.mark.parametrize("own_clock", [EARLY, LATE])
def test_a_checkpoint_that_was_loaded_counts(
    tmp_path: Path, own_clock: str
) -> None:
    """It takes rows back to fewer updates, which are the later ones."""
    own = tmp_path / "job-0-of-1/rows/shard.json"
    with life(tmp_path) as one:
        one.add(1)
        one.store.save(tmp_path / "job", step=1)
        one.add(5)
        one.store.save(tmp_path / "job", step=2)
        one.store.load(tmp_path / "job", step=1)
        one.add(1)
        one.exit()
    stamp(own, own_clock)
    with life(tmp_path) as one:
        assert one.value() == 2
        one.store.load(tmp_path / "job", step=1)
        one.save()
    stamp(own, own_clock)
    with life(tmp_path) as one:
        assert one.value() == 1


def test_restores_are_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what servers had, whatever clocks say; else by the clock."""
    now = time.time_ns()
    ids = [0]
    for step in 0, 0, -(10**12), -(10**15), 10**12:
        monkeypatch.setattr(time, "time_ns", lambda s=step: now + s)
        ids.append(manifests.next_restore(ids))
    assert ids == sorted(set(ids))
    monkeypatch.setattr(time, "time_ns", lambda: now + 2 * 10**12)
    assert manifests.next_restore([]) > ids[-1]
    assert manifests.next_restore([2**64 - 1]) < 2**64
