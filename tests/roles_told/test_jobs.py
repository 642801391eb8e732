"""Jobs that follow one another, or run at once, on the same servers and
workers: each trains its own epochs, all of them."""

from __future__ import annotations

import threading

import pytest

from persia import _core
from persia.data import Sender
from tests.remote import Servers
from tests.roles import Workers
from tests.roles_told.job import Trainer, batch, cluster, counts
from tests.test_roles import in_thread

if not _core.GRPC[0].isdigit():
    pytest.skip("built without gRPC", allow_module_level=True)

pytestmark = pytest.mark.timeout(60)

BATCHES = 6
EPOCHS = [2, 3, 1, 4]


class Job:
    """A loader and a rank, which train batches of their own.

    Args:
        n: the job's number.
        names: whether its loader has a name, and both know the job's.
    """

    def __init__(
        self,
        servers: Servers,
        workers: Workers,
        n: int,
        epochs: int,
        names: bool = False,
    ) -> None:
        self._workers = workers
        self._epochs = epochs
        self._name = f"job {n}" if names else None
        self.ids = range(n * BATCHES, (n + 1) * BATCHES)
        self.seen: list[list[int]] = []
        self.trainer = Trainer(servers, workers, job=f"job {n}", of=self._name)
        self.joined = threading.Event()
        self.flushed = False

    def sender(self) -> Sender:
        """Its loader."""
        return Sender(
            self._workers.addresses,
            name=self._name,
            job=self._name,
            timeout=8,
        )

    def feed(self) -> None:
        """All epochs; waits until they are trained."""
        with self.sender() as s:
            for _ in range(self._epochs):
                for n in self.ids:
                    s.send(batch(n))
                    self.joined.set()
                s.end()
            s.flush(8)
        self.flushed = True

    def train(self) -> None:
        """As many passes."""
        for _ in range(self._epochs):
            first = len(self.trainer.seen)
            self.trainer.epoch()
            self.seen.append(sorted(self.trainer.seen[first:]))

    def check(self) -> None:
        """Each epoch has its batches, once."""
        assert self.seen == [list(self.ids)] * self._epochs
        assert self.flushed

    def run(self, first: str = "feed") -> None:
        """Both at once, or the loader or the rank before the other."""
        works = {"feed": self.feed, "train": self.train}
        begun = in_thread(works.pop(first))
        if first == "feed":
            assert self.joined.wait(8)
        for work in works.values():
            work()
        begun()
        self.check()


def applied(servers: Servers, jobs: int, epochs: list[int]) -> None:
    """The rows have each job's epochs."""
    found = counts(servers, jobs * BATCHES)
    want = [(n, n) for n in epochs for _ in range(BATCHES)]
    assert found == want


@pytest.mark.parametrize("names", [False, True])
@pytest.mark.parametrize("first", ["feed", "train"])
@pytest.mark.parametrize("workers", [1, 2])
def test_jobs_in_a_row(workers: int, first: str, names: bool) -> None:
    """Of 2, 3, 1 and 4 epochs."""
    with cluster(workers) as (servers, some):
        for n, epochs in enumerate(EPOCHS):
            Job(servers, some, n, epochs, names).run(first)
        applied(servers, len(EPOCHS), EPOCHS)


@pytest.mark.parametrize("same", [False, True], ids=["new", "same"])
@pytest.mark.parametrize("epochs", [(2, 2), (3, 1), (1, 3), (6, 8)])
def test_a_rank_of_two_jobs(epochs: tuple[int, int], same: bool) -> None:
    """The process of the rank is new, or goes on."""
    with cluster() as (servers, some):
        first = Job(servers, some, 0, epochs[0])
        first.run()
        second = Job(servers, some, 1, epochs[1])
        if same:
            second.trainer = first.trainer
        second.run()
        applied(servers, 2, list(epochs))


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    ("how", "names"), [("killed", True), ("left", True), ("left", False)]
)
@pytest.mark.parametrize("half", ["in-an-epoch", "between-epochs"])
def test_a_job_after_one_that_was_killed(
    workers: int, how: str, names: bool, half: str
) -> None:
    """Half way, with batches in the queues: they are neither trained nor
    waited for."""
    with cluster(workers, silence=5.0) as (servers, some):
        first = Job(servers, some, 0, 3, names)
        sender = first.sender()  # of two of its three epochs
        for _ in range(2):
            for n in first.ids:
                sender.send(batch(n))
            sender.end()
        first.trainer.open()
        assert first.trainer.train(3) == 3
        if half == "between-epochs":
            assert first.trainer.train() == BATCHES - 3
        first.trainer.flush()
        first.trainer.close()
        if how == "killed":
            sender._core.close(False)
        else:
            sender.close()
        left = counts(servers, BATCHES)
        second = Job(servers, some, 1, 2, names)
        second.run()
        assert counts(servers, BATCHES) == left
        assert counts(servers, 2 * BATCHES)[BATCHES:] == [(2, 2)] * BATCHES


def test_two_jobs_at_once() -> None:
    """Each rank has the batches of its own loader."""
    with cluster(2) as (servers, some):
        jobs = [Job(servers, some, n, 3, names=True) for n in range(2)]
        joins = [in_thread(job.feed) for job in jobs]
        joins += [in_thread(job.train) for job in jobs]
        for join in joins:
            join()
        for job in jobs:
            job.check()
        applied(servers, 2, [3, 3])


def test_an_epoch_is_that_of_its_own_job() -> None:
    """One job is in its third epoch when another begins with its first, and
    goes on beside it."""
    with cluster() as (servers, some):
        first, second = (Job(servers, some, n, 3, names=True) for n in (0, 1))
        joins = [in_thread(first.feed)]
        for _ in range(2):
            first.trainer.epoch()
        joins.append(in_thread(second.feed))
        second.trainer.epoch()
        first.trainer.epoch()
        for _ in range(2):
            second.trainer.epoch()
        for join in joins:
            join()
        assert [len(job.trainer.seen) for job in (first, second)] == [18, 18]
        assert set(first.trainer.seen) == set(first.ids)
        assert set(second.trainer.seen) == set(second.ids)
        applied(servers, 2, [3, 3])
