"""What ranks do that tests/system/test_max_restarts.py kills.

    torchrun ... restarts_job.py FOLDER HOW SERVERS ROOT KILLS

HOW: "rollback" or "continue", as ``Store.load(resume=...)`` has it. Life i of
a rank is FOLDER/RANK.i.journal (tests/system/counting.py); in lives 0 to
KILLS - 1 ranks do not end by themselves. What those of the last return is
FOLDER/RANK.pt.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import persia
from tests.system.checkpoint_job import Counter, Trained
from tests.system.counting import FINISHED, RUNNING, Journal

STEPS = 60
EVERY = 7  # steps between two checkpoints
STALENESS = 3  # of "continue"


class Life:
    """A life of a rank: where it begins, and that it is killed.

    Args:
        job: with `store`, `loader`, and `state()` of what is saved.
    """

    def __init__(
        self, journal: Journal, job: Any, root: str, how: str, last: bool
    ) -> None:
        self.journal = journal
        self.store: persia.Store = job.store
        self.job = job
        self.root = root
        self.last = last
        state = job.state()
        if Path(root, "LATEST").exists():
            self.begin = self.store.load(root, **state, resume=how).extra
        else:
            # Else ranks that were started again would find rows, and not
            # know how they came about.
            self.begin = 0
            self.save(0)
        journal.set(started=self.begin, pid=os.getpid(), state=RUNNING)

    def save(self, done: int) -> None:
        self.store.save(
            self.root, **self.job.state(), extra=done, step=done, keep=2
        )

    def did(self, step: int) -> None:
        """After this step, from 1."""
        self.journal.set(started=step)
        if step % EVERY == 0:
            self.save(step)  # waits for what is under way
            self.journal.set(acked=step)
        if step == STEPS and not self.last:
            self.journal.set(state=FINISHED)
            while True:  # to be killed
                time.sleep(1)
        time.sleep(0.005)


def rollback(journal: Journal, servers: str, root: str, last: bool) -> Any:
    """All ranks together, staleness 0; in the end also without any kills."""
    rank = dist.get_rank()
    job = Trained(servers, rank, STEPS)
    life = Life(journal, job, root, "rollback", last)
    losses = job.train(life.did)
    found = {"losses": losses, **job.everything()}
    whole = Trained("ranks", rank, STEPS)
    losses = whole.train()[life.begin :]
    return life.begin, found, {"losses": losses, **whole.everything()}


def goes_on(journal: Journal, servers: str, root: str, last: bool) -> Any:
    """Each rank counts for itself; rows stay as they are."""
    job = Counter(servers, STEPS, STALENESS)
    life = Life(journal, job, root, "continue", last)
    for step, batch in enumerate(job.loader, life.begin + 1):
        journal.set(started=step)
        job.push(batch)
        life.did(step)
    values = job.values()
    counts = job.store.stats()["client"]
    journal.set(duplicates=counts["duplicates"], lost=counts["lost"])
    return life.begin, values, STEPS * dist.get_world_size()


def main() -> None:
    folder, how, servers, root, kills = sys.argv[1:]
    life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    rank = os.environ["RANK"]
    journal = Journal(Path(folder, f"{rank}.{life}.journal"))
    dist.init_process_group("gloo")
    run = rollback if how == "rollback" else goes_on
    result = run(journal, servers, root, life == int(kills))
    torch.save(result, Path(folder, f"{rank}.pt"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
