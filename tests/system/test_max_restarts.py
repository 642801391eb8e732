"""``torchrun --max-restarts``: ranks are killed and started again, servers
live on: tests/system/restarts_job.py has what the ranks do."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from persia import _core
from tests.ready import python
from tests.system import restarts_job as job
from tests.system.counting import FINISHED, Journal
from tests.system.processes import environment, marked, wait_until
from tests.system.shards import Shards
from tests.system.test_checkpoint_job import end, same

if not _core.GRPC[0].isdigit():
    pytest.skip("built without gRPC", allow_module_level=True)

# Otherwise ranks that are started again may find the addresses of those that
# were (pytorch/pytorch issue 135712).
SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}
SHARDS = 2
RANKS = (0, 1)


class Restarts:
    """A job whose ranks are killed so many times; `results` of its ranks and
    `journals` of all their lives."""

    def __init__(self, folder: Path, how: str, kills: int, seed: int) -> None:
        self.folder = folder
        self.random = random.Random(seed)
        self.told = [f"{how}, seed {seed}"]
        self.journals = [
            [Journal(folder / f"{rank}.{life}.journal") for rank in RANKS]
            for life in range(kills + 1)
        ]
        log = folder / "log"
        with Shards(SHARDS, folder) as shards, log.open("w") as file:
            command = [python(), "-m", "torch.distributed.run"]
            command += ["--standalone", "--nproc-per-node", str(len(RANKS))]
            command += ["--max-restarts", str(kills), job.__file__]
            command += [str(folder), how, shards.text, str(folder / "out")]
            self.torchrun = subprocess.Popen(
                [*command, str(kills)],
                env=environment(str(folder), **SETTINGS),
                stdout=file,
                stderr=file,
            )
            try:
                for life in range(kills):
                    self._kill(life)
                assert self.torchrun.wait(150) == 0
                wait_until(lambda: not marked(str(folder)))
            except BaseException as error:
                error.add_note(f"{self.told}\n{log.read_text()}")
                raise
            finally:
                end(str(folder))
                self.torchrun.wait()
        self.results = [torch.load(folder / f"{rank}.pt") for rank in RANKS]

    def _kill(self, life: int) -> None:
        """A rank, at a moment between the first step and the last."""
        rank = self.random.choice(RANKS)
        one = self.journals[life][rank]
        # Behind the first checkpoint; later lives also before, in a load.
        soon = life > 0 and self.random.random() < 0.2
        after = self.random.randrange(job.EVERY, job.STEPS)

        def ripe() -> bool:
            if self.torchrun.poll() is not None:
                raise AssertionError("torchrun ended")
            return one.pid > 0 and (
                soon or one.state == FINISHED or one.started > after
            )

        wait_until(ripe, 120)
        time.sleep(self.random.random() / 20)
        self.told.append(f"rank {rank} of life {life} killed: {one}")
        with contextlib.suppress(ProcessLookupError):
            os.kill(one.pid, signal.SIGKILL)


def rollback(folder: Path, kills: int, seed: int) -> None:
    done = Restarts(folder, "rollback", kills, seed)
    for begin, found, whole in done.results:
        assert begin > 0, done.told
        assert same(found, whole), done.told


def goes_on(folder: Path, kills: int, seed: int) -> None:
    """Every batch counts once, whatever was computed twice."""
    done = Restarts(folder, "continue", kills, seed)
    for rank, (begin, values, wanted) in enumerate(done.results):
        lives = [of_life[rank] for of_life in done.journals]
        assert begin > 0, done.told
        assert values == {wanted}, done.told
        assert lives[-1].lost == 0, done.told
        # What servers had had since the checkpoint they did not apply again.
        known = max(0, max(one.acked for one in lives[:-1]) - begin)
        begun = max(one.started for one in lives[:-1]) - begin
        duplicates = lives[-1].duplicates
        assert SHARDS * known <= duplicates <= SHARDS * begun, done.told


def test_rollback(tmp_path: Path) -> None:
    rollback(tmp_path, kills=1, seed=1)


@pytest.mark.long
def test_continue(tmp_path: Path) -> None:
    goes_on(tmp_path, kills=1, seed=2)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("how", [rollback, goes_on])
def test_many_restarts(tmp_path: Path, how: Any) -> None:
    how(tmp_path, kills=12, seed=random.getrandbits(32))
