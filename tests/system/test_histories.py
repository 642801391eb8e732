"""Servers that come back with less than they had, or with rows of another
training, and who is told; servers that say nothing."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

import persia
from persia import _core, errors
from tests.system.shards import Shards

if not _core.GRPC[0].isdigit():
    pytest.skip("built without gRPC", allow_module_level=True)

IDS = 40


class _Counting:
    """Each update adds exactly 1 to each of the rows."""

    def __init__(self, shards: Shards) -> None:
        self.store = persia.Store(
            persia.optim.SGD(lr=1.0), servers=shards.text, timeout=120
        )
        self._bags = persia.EmbeddingBagCollection(
            store=self.store,
            tables=[persia.EmbeddingBagConfig("t", 2, ["f"], init=0.0)],
        )
        ids = torch.arange(IDS).reshape(IDS, 1)
        self._ids = persia.JaggedBatch.from_dict({"f": ids})

    def loss(self) -> torch.Tensor:
        return (-self._bags(self._ids).values()).sum()

    def train(self, steps: int) -> None:
        batches = persia.DataLoader([self._ids] * steps, self._bags, 0)
        for batch in batches:
            (-self._bags(batch).values()).sum().backward()

    def counts(self) -> set[float]:
        return set(self.store.rows("t", range(IDS)).flatten().tolist())

    def lost(self) -> int:
        return int(self.store.stats()["client"]["lost"])


def test_a_save_tells_of_lost_updates_first(tmp_path: Path) -> None:
    with Shards(2, tmp_path) as shards:
        job = _Counting(shards)
        job.train(5)
        job.store.save(tmp_path / "job", step=5)
        job.train(3)
        job.store.flush()
        shards.kill(1)
        shards.start(1)
        with pytest.raises(errors.UpdatesLost, match="lost 3 updates"):
            job.store.save(tmp_path / "job", step=8, keep=1)
        assert (tmp_path / "job" / "step-5").exists()
        assert not (tmp_path / "job" / "step-8").exists()
        assert job.counts() == {8, 5}
        job.store.save(tmp_path / "job", step=8)  # it was told once
        shards.kill(0)
        shards.start(0)
        job.train(1)
        shards.kill(0)
        shards.start(0)
        assert job.counts() == {8, 6}  # who looks ...
        assert job.lost() == 4
        with pytest.raises(errors.UpdatesLost, match="lost 1 update"):
            job.store.flush()  # ... is told with the next
        job.store.close()


def test_rows_of_a_training_that_was_given_up(tmp_path: Path) -> None:
    """The newest checkpoint is not the one that the job goes on from."""
    with Shards(2, tmp_path) as shards:
        job = _Counting(shards)
        for step in (5, 10):
            job.train(5)
            job.store.save(tmp_path / "job", step=step)
        job.store.load(tmp_path / "job", step=5)
        job.train(2)
        assert job.counts() == {7}
        shards.kill(1)
        shards.start(1)
        words = r"rows of another training: they have update 10, .* made 7"
        for _ in range(2):
            with pytest.raises(errors.PersiaError, match=words):
                job.train(1)
        job.store.load(tmp_path / "job", step=5)
        job.train(7)
        assert job.counts() == {12}
        # Its numbers cover what this training has lost: it is told even so,
        # and one server's word is none for the other.
        for shard in range(2):
            shards.kill(shard)
            shards.start(shard)
        with pytest.raises(errors.UpdatesLost, match=r"lost 7 .* lost 7 up"):
            job.store.save(tmp_path / "job", step=12)
        job.store.load(tmp_path / "job", step=10)
        job.train(1)
        assert job.counts() == {11}
        job.store.close()


def test_an_interrupted_close_waits_for_nobody() -> None:
    with Shards(1, None) as shards:
        job = _Counting(shards)
        loss = job.loss()
        with shards.frozen(0):
            loss.backward()
            interrupt = threading.Timer(
                0.5, os.kill, (os.getpid(), signal.SIGINT)
            )
            interrupt.start()
            start = time.monotonic()
            with pytest.raises(KeyboardInterrupt):
                job.store.close()
            assert time.monotonic() - start < 60
            interrupt.join()
        assert job.store.closed
