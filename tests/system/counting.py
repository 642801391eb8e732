"""Ranks that count: every update adds exactly 1 to one row of each shard.

    counting.py JOURNAL CONFIG

SGD with lr 1 and gradients of -1, on rows that begin as zeros: the value of a
row is the number of updates that were applied to it. What a rank has done it
writes into its journal, a file that is mapped into memory and so outlives
``kill -9``; what it is to do the test writes there.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from persia.store.engine import engine_of
from persia.torture.verdict import shard_of
from tests.ready import Ready
from tests.system.processes import environment, wait_until

ROWS = 16  # of each shard
RUNNING, PAUSED, FINISHED, FAILED = 1, 2, 3, 4
GO, PAUSE, FINISH = 0, 1, 2
EVERY = 4  # updates between two looks at what was acknowledged


class Journal:
    """The journal of one life of a rank.

    Attributes (numbers):
        state, wanted: what the rank does and is to do.
        started: updates whose backward began.
        acked: updates that all shards have acknowledged, at least.
        lost, duplicates, reconnects, retries: as the client counts them.
        pid: of its process, where the test does not know it.
        rows: started updates of each row of a shard.
    """

    FIELDS = (
        *("state", "wanted", "started", "acked"),
        *("lost", "duplicates", "reconnects", "retries", "pid"),
    )

    def __init__(self, path: Path) -> None:
        path.touch()
        if path.stat().st_size == 0:
            path.write_bytes(bytes(8 * (len(self.FIELDS) + ROWS)))
        self._all = np.memmap(path, "<u8", "r+")
        self.rows = self._all[len(self.FIELDS) :]

    def __getattr__(self, name: str) -> int:
        return int(self._all[self.FIELDS.index(name)])

    def __repr__(self) -> str:
        return str({name: getattr(self, name) for name in self.FIELDS})

    def set(self, **values: int) -> None:
        for name, value in values.items():
            self._all[self.FIELDS.index(name)] = value


def ids_of(shards: int) -> list[list[int]]:
    """ROWS lists of ids, each with one of every shard."""
    of: list[list[int]] = [[] for _ in range(shards)]
    i = 0
    while min(map(len, of)) < ROWS:
        of[shard_of(i, shards)].append(i)
        i += 1
    return [[ids[k] for ids in of] for k in range(ROWS)]


class Rank:
    """One life of a rank as the test sees it.

    Args:
        folder: of journals and messages; a life is FOLDER/NAME.
        config: arguments of :func:`work`.
    """

    def __init__(self, folder: Path, name: str, **config: Any) -> None:
        self.name = name
        self._log = folder / f"{name}.log"
        journal = folder / f"{name}.journal"
        self.journal = Journal(journal)
        with self._log.open("w") as log:
            self.process = Ready(
                *(__file__, str(journal), json.dumps(config)),
                env=environment(
                    OMP_NUM_THREADS="1",
                    TORCHELASTIC_RESTART_COUNT=str(config.get("life", 0)),
                ),
                stdout=log,
                stderr=log,
            )

    def wait_for(self, state: int, seconds: float = 60) -> None:
        """Until it is in this state; its messages if it has failed."""

        def there() -> bool:
            if self.process.poll() not in (None, 0):
                raise AssertionError(f"{self.name}: {self._log.read_text()}")
            return self.journal.state == state

        wait_until(there, seconds)

    def progress(self, seconds: float = 60) -> None:
        """Until updates that begin after this moment are acknowledged."""
        begin = self.journal.started
        wait_until(
            lambda: (
                self.process.poll() is not None
                or self.journal.acked > begin + EVERY
            ),
            seconds,
        )
        assert self.process.poll() is None, self._log.read_text()

    def pause(self) -> None:
        """Until all that it has started is acknowledged."""
        self.journal.set(wanted=PAUSE)

    def go_on(self) -> None:
        self.journal.set(wanted=GO)

    def finish(self, stop: bool = True) -> None:
        """Until it has ended; stop: it is told to."""
        if stop:
            self.journal.set(wanted=FINISH)
        self.wait_for(FINISHED)
        assert self.process.wait(60) == 0, self._log.read_text()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(60)


# ---- the rank itself -------------------------------------------------------


def work(
    journal: Journal,
    servers: str,
    rank: int,
    world: int,
    staleness: int | None = 2,
    timeout: float = 60.0,
    life: int = 0,
    steps: int | None = None,
    group: str | None = None,
    **more: Any,
) -> None:
    """Counts until it is told to finish, or so many steps.

    group: a file for the process group, which steps of all ranks
    (staleness 0) need.
    """
    import torch

    import persia
    from persia import Batch, JaggedBatch, _core

    if group is not None:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{group}", rank=rank, world_size=world
        )
    store = persia.Store(
        persia.optim.SGD(lr=1.0),
        servers=servers,
        rank=rank,
        world_size=world,
        job="counting",
        timeout=timeout,
        threads=1,
        grad_division=False,
        **more,
    )
    model = persia.EmbeddingBagCollection(
        store=store,
        tables=[
            persia.EmbeddingBagConfig(
                "t", embedding_dim=2, feature_names=["f"], init=0.0
            )
        ],
    )
    ids = ids_of(servers.count(",") + 1)
    batches = [
        JaggedBatch(
            ["f"], torch.tensor(some), lengths=torch.tensor([len(some)])
        )
        for some in ids
    ]
    order = np.random.default_rng((rank, life))

    def source() -> Iterator[Batch]:
        number = 0
        while journal.wanted != FINISH and number != steps:
            number += 1
            k = int(order.integers(ROWS))
            yield Batch(None, batches[k], torch.tensor([k]))

    def settle() -> None:
        store.flush()
        counts = _core.cluster_counts(engine_of(store).handle)
        names = ("lost", "duplicates", "reconnects", "retries")
        journal.set(**{name: counts[name] for name in names})
        journal.set(acked=journal.started)

    journal.set(state=RUNNING)
    for number, batch in enumerate(
        persia.DataLoader(source(), model, staleness)
    ):
        loss = -model(batch.ids).values().sum()
        journal.rows[int(batch.label)] += 1
        journal.set(started=number + 1)
        loss.backward()
        pause = journal.wanted == PAUSE
        if (number + 1) % EVERY == 0 or pause:
            settle()
        while pause and journal.wanted == PAUSE:
            journal.set(state=PAUSED)
            time.sleep(0.01)
        journal.set(state=RUNNING)
    settle()
    store.close()
    journal.set(state=FINISHED)


def main() -> None:
    path, config = sys.argv[1:]
    journal = Journal(Path(path))
    try:
        work(journal, **json.loads(config))
    except BaseException:
        journal.set(state=FAILED)
        raise


if __name__ == "__main__":
    main()
