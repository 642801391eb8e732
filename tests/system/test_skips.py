"""``resume="continue"`` where a replay leaves out other batches: see
tests/system/skips_job.py."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from persia import _core, errors
from tests.ready import ended
from tests.system import skips_job
from tests.system.processes import environment
from tests.system.skips_job import BATCHES, SAVED, Job
from tests.system.test_serve import serving

if not _core.GRPC[0].isdigit():
    pytest.skip("built without gRPC", allow_module_level=True)

KILLED = 14


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[str]:
    with ExitStack() as stack:
        addresses = [
            stack.enter_context(
                serving("--shard", f"{i}/2", "--checkpoints", str(tmp_path))
            ).address
            for i in range(2)
        ]
        yield ",".join(addresses)


def life(servers: str, root: Path, **config: Any) -> None:
    done = ended(
        *("-m", skips_job.__name__, servers, str(root), json.dumps(config)),
        env=environment(OMP_NUM_THREADS="1"),
        timeout=120,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr


@pytest.mark.parametrize(
    ("before", "after", "more"),
    [
        # What the replay leaves out is applied already.
        ([3], [9], {}),
        ([8, 9], [], {"staleness": 0}),
        ([2, 6, 11, 13], [7, 12], {"update": "step"}),
    ],
)
def test_every_batch_is_applied_once(
    servers: str,
    tmp_path: Path,
    before: list[int],
    after: list[int],
    more: dict[str, Any],
) -> None:
    root = tmp_path / "out"
    life(servers, root, skips=before, killed=KILLED, **more)
    life(servers, root, skips=after, killed=BATCHES, **more)
    trained = set(range(KILLED)) - set(before)
    trained |= set(range(SAVED, BATCHES)) - set(after)
    job = Job(servers)
    assert job.counts() == [float(i in trained) for i in range(BATCHES)]
    assert job.store.stats()["client"]["lost"] == 0


def test_skips_at_the_end_are_no_loss(servers: str, tmp_path: Path) -> None:
    root = tmp_path / "out"
    life(servers, root, skips=[3, 4], killed=SAVED)
    job = Job(servers)
    job.store.load(root, **job.state(), resume="continue")
    for batch in job.loaders[0]:
        job.train(batch)
    assert job.counts() == [float(i not in (3, 4)) for i in range(BATCHES)]
    assert job.store.stats()["client"]["lost"] == 0


def test_a_store_that_is_not_the_first_of_its_process(
    servers: str, tmp_path: Path
) -> None:
    """It continues the updates of the first store of another process; a third
    store cannot while it does."""
    root = tmp_path / "out"
    life(servers, root, skips=[], killed=SAVED)
    first, second, third = Job(servers), Job(servers), Job(servers)
    second.store.load(root, **second.state(), resume="continue")
    for batch in second.loaders[0]:
        second.train(batch)
    assert second.counts() == [1.0] * BATCHES
    with pytest.raises(errors.SchemaMismatch):
        third.store.load(root, **third.state(), resume="continue")
    assert first.counts() == third.counts() == [1.0] * BATCHES


def without_loader(job: Job) -> None:
    job.train(job.batch(0))


def two_updates(job: Job) -> None:
    batch = next(iter(job.loaders[0]))
    job.train(batch)
    job.train(batch)


def of_two_batches(job: Job) -> None:
    loop = iter(job.loaders[0])
    job.loss(next(loop)).backward()
    job.loss(next(loop)).backward()
    job.store.optimizer.step()


def of_two_loops(job: Job) -> None:
    job.train(*next(zip(*job.loaders)))


@pytest.mark.parametrize(
    ("updates", "more"),
    [
        (without_loader, {}),
        (two_updates, {}),
        (of_two_batches, {"update": "step"}),
        (of_two_loops, {"passes": 2}),
    ],
)
def test_updates_without_a_place(
    servers: str,
    tmp_path: Path,
    updates: Callable[[Job], None],
    more: dict[str, Any],
) -> None:
    """Neither before a checkpoint nor after it: a replay may be of others."""
    job = Job(servers, **more)
    job.store.save(tmp_path / "none", **job.state())
    updates(job)
    job.store.save(tmp_path / "some", **job.state())
    counts = job.counts()
    with pytest.raises(errors.InvalidArgument, match=r"persia\.DataLoader"):
        job.store.load(tmp_path / "some", **job.state(), resume="continue")
    job.store.load(tmp_path / "none", **job.state(), resume="continue")

    def refused() -> None:
        updates(job)
        job.store.flush()

    with pytest.raises(errors.InvalidArgument, match=r"persia\.DataLoader"):
        refused()
    with suppress(errors.InvalidArgument):
        job.store.flush()  # of a second update on its way
    assert job.counts() == counts
    job.store.load(tmp_path / "some", **job.state())
    updates(job)
    assert sum(job.counts()) == 2 * sum(counts)
