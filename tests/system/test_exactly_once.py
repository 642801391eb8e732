"""Every update is applied once, or it is reported: servers and ranks are
killed at random moments while ranks count (tests/system/counting.py)."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import persia
from persia import _core, errors
from tests.system.counting import PAUSED, ROWS, RUNNING, Journal, Rank, ids_of
from tests.system.shards import Shards

if not _core.GRPC[0].isdigit():
    pytest.skip("built without gRPC", allow_module_level=True)

SHARDS = 2
RANKS = (0, 1)


class Count:
    """Servers and ranks that count on them.

    Args:
        folder: of everything.
        seed: of what happens.
        more: options of the ranks.
    """

    def __init__(self, folder: Path, seed: int, **more: Any) -> None:
        self.random = random.Random(seed)
        self.more = more
        self.folder = folder
        self.shards = Shards(SHARDS, folder / "checkpoints")
        self.ranks: dict[int, Rank] = {}
        self.dead: list[Journal] = []
        self.exact = True  # nothing is counted as lost twice
        self.told: list[str] = []  # what happened, for messages
        try:
            for rank in RANKS:
                self.begin(rank, 0)
            for one in self.ranks.values():
                one.wait_for(RUNNING)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for one in self.ranks.values():
            one.kill()
        self.shards.close()

    def begin(self, rank: int, life: int) -> None:
        """A life of a rank."""
        self.ranks[rank] = Rank(
            self.folder,
            f"rank-{rank}-{life}",
            servers=self.shards.text,
            rank=rank,
            world=len(RANKS),
            life=life,
            **{
                "staleness": self.random.choice([1, 2, 5, None]),
                "lost": "continue",
                "timeout": 30.0,
                **self.more,
            },
        )

    # ---- what happens

    def a_while(self, seconds: float = 0.1) -> None:
        time.sleep(self.random.uniform(0, seconds))

    def snapshot(self) -> None:
        self.shards.save(self.random.randrange(SHARDS))

    def server_dies(self) -> None:
        shard = self.random.randrange(SHARDS)
        self.shards.kill(shard)
        self.a_while()
        self.shards.start(shard)

    def all_servers_die(self) -> None:
        for shard in range(SHARDS):
            self.shards.kill(shard)
        for shard in range(SHARDS):
            self.shards.start(shard)

    def server_dies_in_a_snapshot(self) -> None:
        shard = self.random.randrange(SHARDS)

        def save() -> None:
            # Or it was ready before.
            with contextlib.suppress(errors.PersiaError):
                self.shards.save(shard)

        thread = threading.Thread(target=save)
        thread.start()
        self.a_while(0.05)
        self.shards.kill(shard)
        self.shards.start(shard)
        thread.join()

    def server_dies_after_a_stop(self) -> None:
        """Requests have come to it that it does not answer."""
        shard = self.random.randrange(SHARDS)
        with self.shards.frozen(shard):
            self.a_while(0.3)
            self.shards.kill(shard)
        self.shards.start(shard)

    def rank_dies(self) -> None:
        rank = self.random.choice(RANKS)
        one = self.ranks[rank]
        one.kill()
        self.dead.append(one.journal)
        self.begin(rank, len(self.dead))

    def rank_and_server_die(self) -> None:
        """The other server still knows what the rank has sent. Of what is
        missing now an earlier life may have counted a part."""
        self.exact = False
        shard = self.random.randrange(SHARDS)
        rank = self.random.choice(RANKS)
        self.shards.kill(shard)
        self.ranks[rank].kill()
        self.dead.append(self.ranks[rank].journal)
        self.shards.start(shard)
        self.begin(rank, len(self.dead))

    def rank_dies_while_a_server_stops(self) -> None:
        """What it has sent is applied when its next life is there."""
        with self.shards.frozen(self.random.randrange(SHARDS)):
            self.a_while(0.3)
            self.rank_dies()
            self.a_while(3.0)

    def nothing(self) -> None:
        pass

    def happens(self, event: Callable[[], None]) -> None:
        self.told.append(event.__name__)
        event()

    def round(self, *events: Callable[[], None]) -> None:
        """Something happens; then all is counted."""
        self.a_while(0.2)
        for event in events:
            self.happens(event)
            # A rank that dies must have told what servers had lost before.
            for one in self.ranks.values():
                one.progress()
            if self.random.random() < 0.6:
                self.happens(self.snapshot)
                self.a_while(0.2)
        for one in self.ranks.values():
            one.pause()
        for one in self.ranks.values():
            one.wait_for(PAUSED)
        self.check()
        for one in self.ranks.values():
            one.go_on()

    # ---- counting

    def values(self) -> torch.Tensor:
        """All rows, seen by somebody else who is taken for rank 0."""
        config = persia.EmbeddingBagConfig("t", embedding_dim=2, init=0.0)
        sgd = persia.optim.SGD(lr=1.0)
        with persia.Store(sgd, servers=self.shards.text, timeout=30) as store:
            store.add_table(config)
            return store.rows("t", torch.tensor(ids_of(SHARDS)).flatten())

    def check(self) -> None:
        values = self.values()
        assert torch.equal(values[:, 0], values[:, 1])
        rows = values[:, 0].reshape(ROWS, SHARDS).numpy()
        lives = [one.journal for one in self.ranks.values()] + self.dead
        started = np.sum([one.rows for one in lives], axis=0).astype(int)
        report = "\n".join(
            [", ".join(self.told), f"rows: {rows.astype(int).tolist()}"]
            + [f"{one}" for one in lives]
        )
        assert (rows <= started[:, None]).all(), report
        missing = SHARDS * started.sum() - int(rows.sum())
        lost = sum(one.lost for one in lives)
        # Of what a rank had under way when it was killed nobody knows.
        unknown = sum(one.started - one.acked for one in self.dead)
        assert missing <= lost + SHARDS * unknown, report
        assert lost <= missing or not self.exact, report
        alive = [one.journal for one in self.ranks.values()]
        assert all(one.started == one.acked for one in alive), report


def in_step(folder: Path, seed: int, steps: int, kills: int) -> None:
    """Ranks that take every step together; servers are killed."""
    count = Count(folder, seed, steps=steps, staleness=0, group=f"{folder}/g")
    try:
        for _ in range(kills):
            if count.random.random() < 0.5:
                count.happens(count.snapshot)
            count.a_while(0.3)
            count.happens(
                count.random.choice(
                    [count.server_dies, count.server_dies_after_a_stop]
                )
            )
        for one in count.ranks.values():
            one.finish(stop=False)
        count.check()
    finally:
        count.close()


def test_killed_servers_of_ranks_in_step(tmp_path: Path) -> None:
    in_step(tmp_path, seed=1, steps=400, kills=3)


def test_killed_servers_do_not_wait_for_a_rank_that_has_left(
    tmp_path: Path,
) -> None:
    """They come back from snapshots of a time when it was there."""
    count = Count(tmp_path, seed=1, staleness=0, group=f"{tmp_path}/g")
    try:
        goes_on, leaves = (count.ranks[rank] for rank in RANKS)
        leaves.progress()
        for shard in range(SHARDS):
            count.shards.save(shard)
        leaves.finish()
        goes_on.progress()
        count.all_servers_die()
        goes_on.progress()
        goes_on.finish()
        assert goes_on.journal.lost > 0
    finally:
        count.close()


EVENTS = (
    Count.server_dies,
    Count.all_servers_die,
    Count.server_dies_in_a_snapshot,
    Count.server_dies_after_a_stop,
    Count.rank_dies,
    Count.rank_and_server_die,
    Count.rank_dies_while_a_server_stops,
)


def test_killed_servers_and_ranks(tmp_path: Path) -> None:
    count = Count(tmp_path, seed=1)
    try:
        count.round(count.nothing)
        count.round(count.server_dies_in_a_snapshot)
        count.round(count.rank_dies_while_a_server_stops)
        count.round(count.server_dies_after_a_stop, count.all_servers_die)
        for one in count.ranks.values():
            one.finish()
    finally:
        count.close()


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_fifty_rounds(tmp_path: Path) -> None:
    seed = random.getrandbits(32)
    print(f"seed {seed}")
    count = Count(tmp_path, seed)
    try:
        for _ in range(50):
            some = count.random.choices(EVENTS, k=2)
            count.round(*(getattr(count, one.__name__) for one in some))
        for one in count.ranks.values():
            one.finish()
    finally:
        count.close()
