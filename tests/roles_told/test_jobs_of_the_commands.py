"""``persia feed`` and ``persia train``, one job after the other on the same
servers and workers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

from persia import _core
from persia.cli import feed
from persia.cli.app import app
from persia.cli.feed_loader import Loader
from tests.remote import Servers
from tests.roles import Workers, servers
from tests.test_roles import in_thread
from tests.test_roles_failures import wait_for

__all__ = ["servers"]

if not _core.GRPC[0].isdigit():
    pytest.skip("built without gRPC", allow_module_level=True)

pytestmark = pytest.mark.timeout(120)

SAMPLES, BATCH, PER_EPOCH = 600, 100, 6
EPOCHS = [2, 3, 1, 4]


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
    feed._send(loader, config, 0, 1)
    assert loader.counts()["sent"] == epochs * PER_EPOCH


def trains(servers: Servers, workers: Workers, epochs: int) -> None:
    """The command, in this process."""
    flags = ["--data", "synthetic", "--samples", str(SAMPLES)]
    flags += ["--batch-size", str(BATCH), "--eval-split", "0"]
    flags += ["--epochs", str(epochs), "--model", "dcn", "--threads", "1"]
    flags += ["--servers", servers.text]
    flags += ["--workers", ",".join(workers.addresses)]
    done = CliRunner().invoke(app, ["train", *flags])
    if done.exception is not None and done.exit_code == 1:
        raise done.exception
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize("named", [False, True], ids=["", "job"])
@pytest.mark.parametrize("late", [False, True], ids=["at-once", "later"])
def test_jobs_in_a_row(
    servers: Servers, workers: Workers, late: bool, named: bool
) -> None:
    """Of 2, 3, 1 and 4 epochs: all are trained, and the loaders end."""
    for n, epochs in enumerate(EPOCHS):
        name = f"job {n}" if named else None
        one_job(servers, workers, epochs, name, late)
    assert workers.stats("failed") == workers.stats("given_up") == 0


def one_job(
    servers: Servers,
    workers: Workers,
    epochs: int,
    name: str | None,
    late: bool,
) -> None:
    """late: the trainer begins when all is in the queues."""
    updates = epochs * PER_EPOCH
    before = workers.stats("trained")
    after = workers.stats("submitted") + updates
    fed = in_thread(lambda: feeds(workers, epochs, name))
    if late:
        wait_for(lambda: workers.stats("submitted") == after)
    trains(servers, workers, epochs)
    assert workers.stats("trained") - before == updates
    fed()
