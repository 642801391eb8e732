"""``persia feed`` and ``persia train``: jobs on the same servers and workers,
one after the other and two at once."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import pytest
from typer.testing import CliRunner

from persia import _core
from persia.base.options import validated
from persia.cli import feed
from persia.cli.app import app
from persia.data.feeding import Loader
from persia.distributed.addresses import job_of
from persia.train.config import TrainConfig, give_way, resolve
from persia.train.run import Run
from tests.remote import Servers
from tests.roles import Workers, servers
from tests.roles_told.job import waiting_trainer
from tests.test_roles import in_thread
from tests.test_roles_failures import wait_for

__all__ = ["servers"]

if not _core.GRPC[0].isdigit():
    pytest.skip("built without gRPC", allow_module_level=True)

pytestmark = pytest.mark.timeout(120)

SAMPLES, BATCH, PER_EPOCH = 600, 100, 6
EPOCHS = [2, 3, 1]


@pytest.fixture(params=[1, 2])
def workers(
    request: pytest.FixtureRequest, servers: Servers
) -> Iterator[Workers]:
    """One, or two."""
    with contextlib.closing(Workers(servers.addresses, request.param)) as some:
        yield some


def feeds(workers: Workers, epochs: int, job: str | None) -> None:
    """What the command does."""
    config = feed.FeedConfig(
        data="synthetic",
        samples=SAMPLES,
        batch_size=BATCH,
        eval_split=0.0,
        epochs=epochs,
        job=job,
        workers=",".join(workers.addresses),
    )
    loader = Loader(config.epochs)
    feed.send_share(loader, config, 0, 1)
    assert loader.counts()["sent"] == epochs * PER_EPOCH


def options(
    servers: Servers, workers: Workers, epochs: int, job: str | None
) -> dict[str, object]:
    """Of ``persia train``."""
    given = {
        "data": "synthetic",
        "samples": SAMPLES,
        "batch_size": BATCH,
        "eval_split": 0,
        "epochs": epochs,
        "model": "dcn",
        "threads": 1,
        "servers": servers.text,
        "workers": ",".join(workers.addresses),
    }
    return given if job is None else given | {"job": job}


def trains(
    servers: Servers, workers: Workers, epochs: int, job: str | None
) -> None:
    """The command, in this process."""
    flags = []
    for name, value in options(servers, workers, epochs, job).items():
        flags += [f"--{name.replace('_', '-')}", str(value)]
    done = CliRunner().invoke(app, ["train", *flags])
    if done.exception is not None and done.exit_code == 1:
        raise done.exception
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize("named", ["", "feed", "both"])
@pytest.mark.parametrize("first", ["none", "feed", "train"])
def test_jobs_in_a_row(
    servers: Servers, workers: Workers, first: str, named: str
) -> None:
    """Of 2, 3 and 1 epochs: all are trained, and the loaders end."""
    for n, epochs in enumerate(EPOCHS):
        name = f"job {n}" if named else None
        own = name if named == "both" else None
        updates = epochs * PER_EPOCH
        before = workers.stats("trained")
        if first == "train":
            with feeding_late(workers, epochs, name):
                trains(servers, workers, epochs, own)
        else:
            after = workers.stats("submitted") + updates
            fed = in_thread(lambda e=epochs, j=name: feeds(workers, e, j))
            if first == "feed":
                wait_for(lambda n=after: workers.stats("submitted") == n)
            trains(servers, workers, epochs, own)
            fed()
        assert workers.stats("trained") - before == updates
    assert workers.stats("failed") == workers.stats("given_up") == 0


@contextlib.contextmanager
def feeding_late(
    workers: Workers, epochs: int, job: str | None
) -> Iterator[None]:
    """A loader that begins when a trainer waits for its first batch."""
    with waiting_trainer() as asked:

        def run() -> None:
            assert asked.wait(30)
            feeds(workers, epochs, job)

        fed = in_thread(run)
        yield
        fed()


@pytest.mark.parametrize("epochs", [(2, 3), (3, 1)])
def test_two_jobs_at_once(
    servers: Servers, workers: Workers, epochs: tuple[int, int]
) -> None:
    """Each trainer has the batches of its own job, all of them."""
    trained: list[int] = [0, 0]

    def train(n: int) -> Callable[[], None]:
        given = options(servers, workers, epochs[n], f"job {n}")

        def run() -> None:
            one = Run(validated(TrainConfig, given))
            assert one.fit(lambda at: None)
            trained[n] = one.trainer.samples
            one.close()

        return run

    both = [in_thread(train(n)) for n in range(2)]
    for n in range(2):
        both.append(
            in_thread(lambda n=n: feeds(workers, epochs[n], f"job {n}"))
        )
    for join in both:
        join()
    assert trained == [n * SAMPLES for n in epochs]
    assert workers.stats("failed") == workers.stats("given_up") == 0


def test_the_job_of_a_launch_is_that_of_both_commands(
    servers: Servers, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PERSIA_RUN_ID names it where no option does: a loader of another job,
    which was there first, is left alone."""
    other = threading.Thread(
        target=lambda: feeds(workers, 1, "other"), daemon=True
    )
    other.start()
    wait_for(lambda: workers.stats("submitted") == PER_EPOCH)
    monkeypatch.setenv("PERSIA_RUN_ID", "launched")
    before = workers.stats("trained")
    fed = in_thread(lambda: feeds(workers, 2, None))
    trains(servers, workers, 2, None)
    fed()
    assert workers.stats("trained") - before == 2 * PER_EPOCH
    assert other.is_alive()
    trains(servers, workers, 1, "other")
    other.join()
    assert workers.stats("trained") - before == 3 * PER_EPOCH


def test_a_name_of_an_option_comes_before_that_of_a_launch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In both commands; a run that is continued has that of the launch."""
    monkeypatch.setenv("PERSIA_RUN_ID", "launched")
    config = feed.FeedConfig(data="synthetic", job="own")
    assert config.job_name == "own" != feed.FeedConfig(data="a").job_name
    assert job_of("own") != job_of(None) == job_of("launched")
    saved, lines = give_way({"job": "old"}, [])
    assert "job" not in saved and len(lines) == 1
    saved, lines = give_way({"job": "old"}, ["job"])
    assert resolve(saved, {"job": "own"}).job == "own" and not lines
