"""Shards that go to another server, and servers with logs that end in the
middle: each shard is at one server, with all of its updates."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from persia import _core, errors
from persia.distributed import moves
from persia.distributed.places import Places
from tests.test_moves import Server, begin, end_of, scale, sizes
from tests.test_shards import Counter

if not _core.GRPC[0].isdigit():
    pytest.skip("built without gRPC", allow_module_level=True)

pytestmark = pytest.mark.slow

PLACES = ("0-1/4", "2-3/4", None)


class Job:
    """Two servers with two shards each, and one that joins; each may be ended
    and started again."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.folder = folder
        self.options: dict[str, Any] = {
            "durable": "process",
            "checkpoints": folder,
            **options,
        }
        self.servers: list[Server] = []
        for i in range(len(PLACES)):
            self.servers.append(self.make(i))

    def make(self, i: int, port: int = 0) -> Server:
        place = PLACES[i]
        where = (
            {"shard": place}
            if place is not None
            # Not asked for once its disk says it.
            else {"join": self.servers[0].address if self.servers else "x:1"}
        )
        log = str(self.folder / ("joined" if place is None else "log"))
        return Server(log=log, port=port, **where, **self.options)

    def restart(self, *which: int) -> None:
        ports = {i: int(self.servers[i].address.split(":")[1]) for i in which}
        for i in which:
            self.servers[i].close()
        for i in which:
            self.servers[i] = self.make(i, ports[i])

    @property
    def addresses(self) -> list[str]:
        return [server.address for server in self.servers]

    def counts(self) -> list[int]:
        """How many shards each has, when nothing is on its way any more."""
        while True:
            for server in self.servers:
                asked = moves.channel(
                    server.address,
                    moves.towards(server.shards.config),
                    10.0,
                )
                with contextlib.closing(asked):
                    end_of(asked)
            found = sizes(self.servers)
            if sum(found) == 4:
                return found

    def close(self) -> None:
        for server in self.servers:
            server.close()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with contextlib.closing(Job(tmp_path)) as made:
        yield made


@pytest.fixture
def counter(job: Job) -> Iterator[Counter]:
    made = Counter(job.addresses[:2])
    made.add(2)
    yield made
    made.store.close()


def test_servers_that_start_again(job: Job, counter: Counter) -> None:
    """Each begins with the shards that it has, and all updates."""
    scale(job.servers, 3)
    counter.add(1)
    before = [server.shards.here() for server in job.servers]
    assert [len(some) for some in before] == [2, 1, 1]
    job.restart(0, 1, 2)
    assert [server.shards.here() for server in job.servers] == before
    counter.check(3)
    counter.add(1)
    scale(job.servers, 1)
    counter.add(1)
    job.restart(1, 2)
    assert sizes(job.servers) == [4, 0, 0]
    job.restart(0)
    assert sizes(job.servers) == [4, 0, 0]
    counter.check(5)
    scale(job.servers, 2)
    counter.add(1)
    counter.check(6)
    # One that opens now finds them by any server.
    for some in (job.addresses[:2], job.addresses[::-1]):
        later = Counter(some)
        later.check(6)
        later.store.close()


def refuse(error: Exception) -> Callable[..., None]:
    def body(*ignored: object) -> None:
        raise error

    return body


def hang_in_commit(
    job: Job, patch: pytest.MonkeyPatch, error: Exception
) -> None:
    """A move of shard 1 whose target does not answer when it is to take it."""
    patch.setattr(moves.Moves, "commit", refuse(error))
    asked = begin(job.servers, job.addresses[2], shard=1, number=77)
    with contextlib.closing(asked):
        while 1 in job.servers[0].shards.here() and (
            job.servers[0].shards.places is None
            or not job.servers[0].shards.places.gone()
        ):
            pass


@pytest.mark.parametrize("which", [(0,), (2,), (0, 2), (2, 0)])
def test_both_sides_end_in_between(
    which: Sequence[int], job: Job, counter: Counter
) -> None:
    """The shard was taken out, and the other server has not taken it."""
    job.servers[0].shards.server(1).core.set_steps([8, 0, 2, 0, 3, 5])
    with pytest.MonkeyPatch.context() as patch:
        hang_in_commit(job, patch, errors.Unavailable("silent"))
        job.restart(*which)
    assert job.counts() == [1, 2, 1]
    steps = job.servers[2].shards.server(1).core.steps()
    assert steps[0] == 8 and steps[4:] == [3, 5]
    counter.check(2)
    counter.add(1)
    job.restart(*which)
    counter.check(3)


def test_the_answer_was_lost_with_both(
    job: Job, counter: Counter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other server has the shard, and the first one has not heard."""
    commit = moves.Moves.commit

    def twice(self: moves.Moves, number: int) -> None:
        commit(self, number)
        raise errors.Unavailable("the answer is lost")

    with monkeypatch.context() as patch:
        patch.setattr(moves.Moves, "commit", twice)
        asked = begin(job.servers, job.addresses[2], shard=1, number=77)
        asked.close()
        while 1 not in job.servers[2].shards.here():
            pass
        counter.add(1)
        job.restart(2, 0)
    assert job.counts() == [1, 2, 1]
    counter.check(3)


def test_the_other_server_has_lost_its_disk(
    job: Job, counter: Counter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one takes the shard back from its log."""
    with monkeypatch.context() as patch:
        hang_in_commit(job, patch, errors.Unavailable("silent"))
        port = int(job.addresses[2].split(":")[1])
        job.servers[2].close()
        (job.folder / "joined").rename(job.folder / "gone")
        job.servers[2] = job.make(2, port)
        job.restart(0)
    assert job.counts() == [2, 2, 0]
    counter.check(2)
    counter.add(1)
    job.restart(0)
    counter.check(3)


@pytest.mark.parametrize("step", ["prepare", "arrive", "leave"])
def test_a_disk_that_takes_no_file(
    step: str, job: Job, counter: Counter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shard stays, and is served."""
    full = errors.StorageError("No space left on device")
    with monkeypatch.context() as patch:
        patch.setattr(Places, step, refuse(full))
        with pytest.raises(errors.Unavailable, match="No space left"):
            scale(job.servers, 3)
    assert job.counts() == [2, 2, 0]
    counter.add(1)
    job.restart(0, 2)
    assert sizes(job.servers) == [2, 2, 0]
    counter.check(3)
    assert not list(job.folder.glob("joined/*-of-4-at-*-*"))
    scale(job.servers, 3)
    counter.check(3)


def test_the_log_goes_with_the_shard(job: Job, counter: Counter) -> None:
    ids = torch.arange(10_000)
    counter.store.set_rows("t", ids, torch.ones(len(ids), 2))
    scale(job.servers, 3)
    assert not list(job.folder.glob("log/default-3-of-4/*"))
    (arrived,) = job.folder.glob("joined/default-3-of-4-at-join-*")
    assert any(arrived.glob("log-*"))
    job.restart(2)
    rows = torch.as_tensor(counter.store.rows("t", ids.tolist()))
    assert torch.equal(rows, torch.ones(len(ids), 2))


def test_servers_of_other_shards(job: Job, counter: Counter) -> None:
    """A log folder of servers whose shards have moved."""
    scale(job.servers, 3)
    counter.store.close()
    for server in job.servers:
        server.close()
    log = str(job.folder / "log")
    with pytest.raises(errors.SchemaMismatch, match="shards 2, 3"):
        Server(shard="0-3/4", log=log, **job.options)
    job.servers.clear()


def test_two_that_join_in_one_folder(job: Job) -> None:
    with pytest.raises(errors.Unavailable, match="`log`"):
        job.make(2)


def test_one_that_starts_again_before_it_has_a_shard(
    job: Job, counter: Counter
) -> None:
    """A move to it began, so its disk knows the job, but none of the others.
    Clients that name it find all shards."""
    places = job.servers[2].shards.places
    assert places is not None
    places.arriving(0, 7)
    job.restart(2)
    assert sizes(job.servers) == [2, 2, 0]
    other = Counter(job.addresses[::-1])
    other.check(2)
    other.store.close()


def test_a_server_without_a_log(job: Job, counter: Counter) -> None:
    """It takes no shard of one that has one."""
    options = {k: v for k, v in job.options.items() if k != "durable"}
    other = Server(join=job.addresses[0], **options)
    with contextlib.closing(other):
        with pytest.raises(errors.Unavailable, match="durable"):
            scale([*job.servers[:2], other], 3)
        assert sizes(job.servers) == [2, 2, 0]
        counter.add(1)
        counter.check(3)


@pytest.mark.parametrize(
    "missing", ["*.moves", "*-at-join-*[0-9a-f]", "*-at-join-*/log-*"]
)
def test_what_is_missing_after_a_move(
    missing: str, job: Job, counter: Counter
) -> None:
    """A server that lacks it does not begin, and removes nothing."""
    scale(job.servers, 3)
    before = job.servers[2].shards.here()
    job.servers.pop().close()
    (path,) = job.folder.joinpath("joined").glob(missing)
    path.rename(job.folder / "kept")
    for _ in range(2):
        with pytest.raises(errors.CorruptFile):
            job.make(2)
    path.parent.mkdir(exist_ok=True)
    (job.folder / "kept").rename(path)
    job.servers.append(job.make(2))
    assert job.servers[2].shards.here() == before == [3]


def test_the_file_of_a_server_that_only_gave_is_missing(
    job: Job, counter: Counter
) -> None:
    """It does not take the shard for one of its own, which has no rows."""
    scale(job.servers, 3)
    left = {2, 3} - set(job.servers[1].shards.here())
    assert left
    job.servers.pop(1).close()
    (path,) = job.folder.joinpath("log").glob("*-at-2.moves")
    path.rename(job.folder / "kept")
    for _ in range(2):
        with pytest.raises(errors.CorruptFile):
            job.make(1)
    (job.folder / "kept").rename(path)
    job.servers.insert(1, job.make(1))
    assert not left & set(job.servers[1].shards.here())
