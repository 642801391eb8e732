"""Data loaders while a server is away for a moment: they wait for it, as
workers and trainers do."""

from __future__ import annotations

import contextlib
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import persia
from persia import _core
from persia.data import Sender
from tests.ready import Ready
from tests.roles import CountingTrainer, Workers
from tests.roles_told.job import Trainer, send
from tests.roles_told.kept import Kept
from tests.system import test_feed_parts as feeds
from tests.system.processes import environment
from tests.test_roles_failures import wait_for

if not _core.GRPC[0].isdigit():
    pytest.skip("built without gRPC", allow_module_level=True)

pytestmark = pytest.mark.timeout(90)

AWAY = 1.5  # seconds
N = 12


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Kept]:
    """Two, which keep their rows."""
    with contextlib.closing(Kept(2, tmp_path / "checkpoints")) as both:
        yield both


@pytest.fixture
def workers(servers: Kept) -> Iterator[Workers]:
    """Two."""
    with contextlib.closing(Workers(servers.addresses, 2)) as both:
        yield both


@contextlib.contextmanager
def away(servers: Kept, shard: int) -> Iterator[None]:
    """The server is, and comes back while the block runs."""
    servers.stop(shard)
    timer = threading.Timer(AWAY, servers.start, [shard])
    timer.start()
    yield
    timer.join()
    assert servers.shards[shard] is not None


def make(workers: Workers) -> Sender:
    return Sender(workers.addresses, name="a", timeout=20)


@pytest.mark.parametrize("shard", [0, 1])
@pytest.mark.parametrize("begun", [False, True])
def test_a_named_sender_is_opened(
    servers: Kept, workers: Workers, shard: int, begun: bool
) -> None:
    """It asks the servers what they have."""
    if begun:
        with make(workers) as sender:
            trainer = Trainer(servers, workers)  # type: ignore[arg-type]
            send(sender, 0, N)
            trainer.open()
            assert trainer.train(N) == N
            sender.flush(8)
            sender.close(ended=False)
    with away(servers, shard):
        sender = make(workers)
    assert sender.position == (N if begun else 0)
    sender.close(ended=False)


@pytest.mark.parametrize("shard", [0, 1])
def test_a_sender_without_a_name_is_opened(
    servers: Kept, workers: Workers, shard: int
) -> None:
    """Control: it has nothing to ask."""
    with away(servers, shard):
        Sender(workers.addresses, timeout=20).close()


def claim(sender: Sender) -> object:
    assert sender.claim() == "own"
    return None


CALLS = pytest.mark.parametrize(
    "what",
    [
        pytest.param(claim, id="claim"),
        pytest.param(lambda sender: send(sender, 0, 1), id="send"),
        pytest.param(lambda sender: sender.end(), id="end"),
        pytest.param(lambda sender: sender.skip(5), id="skip"),
        pytest.param(lambda sender: sender.position, id="position"),
        pytest.param(lambda sender: sender.flush(8), id="flush"),
        pytest.param(lambda sender: sender.close(), id="close"),
    ],
)


@pytest.mark.parametrize("shard", [0, 1])
@CALLS
def test_what_a_named_sender_does_then(
    servers: Kept,
    workers: Workers,
    shard: int,
    what: Callable[[Sender], object],
) -> None:
    """Each call succeeds."""
    with make(workers) as sender:
        with away(servers, shard):
            what(sender)
        sender.close(ended=False)


@pytest.mark.parametrize("shard", [0, 1])
def test_a_sender_meets_a_load_while_a_server_is_away(
    servers: Kept, workers: Workers, shard: int, tmp_path: Path
) -> None:
    """It compares what it knows with the servers when they are back."""
    trainer = Trainer(servers, workers)  # type: ignore[arg-type]
    with Sender(workers.addresses, timeout=20) as sender:
        send(sender, 0, N)
        trainer.open()
        assert trainer.train(N) == N
        sender.flush(8)
        trainer.store.save(tmp_path / "checkpoints" / "out")
        send(sender, N, 2 * N)
        assert trainer.train(N) == N
        sender.flush(8)
        trainer.close()
        trainer.store.load(tmp_path / "checkpoints" / "out")
        with away(servers, shard):
            send(sender, 2 * N, 3 * N)
        sender.end()
        trainer.open()
        assert trainer.train() == N
        sender.flush(8)
        assert sender.stats()["lost"] == N


@contextlib.contextmanager
def gone(workers: Workers) -> Iterator[None]:
    """All workers are, and one comes back while the block runs."""
    for worker in workers.workers:
        worker.close()
    timer = threading.Timer(AWAY / 3, workers.restart, [0])
    timer.start()
    yield
    timer.join()


@CALLS
def test_what_a_sender_does_while_all_workers_are_away(
    servers: Kept, workers: Workers, what: Callable[[Sender], object]
) -> None:
    """Each call succeeds when one of them is there again."""
    sender = make(workers)
    with gone(workers):
        what(sender)
    sender.close(ended=False)


def test_a_claim_is_never_made_up(servers: Kept, workers: Workers) -> None:
    """What another loader has is not had because no worker can say so."""
    with contextlib.closing(make(workers)) as first:
        assert first.claim() == "own"
        send(first, 0, 1)
        with make(workers) as second:
            for worker in workers.workers:
                worker.close()
            timer = threading.Timer(AWAY / 3, workers.restart, [0])
            timer.start()
            assert second.claim() == "held"
            timer.join()
            second.close(ended=False)


@pytest.mark.parametrize("shard", [0, 1])
@pytest.mark.parametrize("rows", [False, True])
def test_a_pass_begins_while_a_server_is_away(
    servers: Kept, workers: Workers, shard: int, rows: bool
) -> None:
    """A trainer waits for it, too, to declare tables and to look up."""
    with make(workers) as sender:
        send(sender, 0, 2 * N)
        trainer = Trainer(servers, workers, rows=rows, timeout=20)  # type: ignore[arg-type]
        with away(servers, shard):
            trainer.open()
            assert trainer.train(N) == N
        with away(servers, shard):
            assert trainer.train(N) == N
        sender.flush(8)
        trainer.close()
        trainer.store.close()


def test_a_pass_begins_while_all_workers_are_away(
    servers: Kept, workers: Workers
) -> None:
    """And while they are, it continues when one is there again."""
    trainer = Trainer(servers, workers, timeout=20)  # type: ignore[arg-type]
    with make(workers) as sender:
        with gone(workers):
            trainer.open()
        send(sender, 0, N)
        assert trainer.train(N) == N
        sender.flush(8)
    trainer.close()
    trainer.store.close()


def test_a_server_that_stays_away_is_an_error(
    servers: Kept, workers: Workers
) -> None:
    """Within the timeout, by name."""
    servers.kill(1)
    with pytest.raises(persia.errors.Unavailable):
        Sender(workers.addresses, name="a", timeout=1)


@pytest.mark.parametrize(
    "what", [claim, lambda sender: sender.end()], ids=["claim", "end"]
)
def test_workers_that_stay_away_are_an_error(
    servers: Kept, workers: Workers, what: Callable[[Sender], object]
) -> None:
    """Within the timeout."""
    sender = Sender(workers.addresses, name="a", timeout=1)
    for worker in workers.workers:
        worker.close()
    with pytest.raises(persia.errors.Unavailable):
        what(sender)
    sender.close(ended=False)


# ---- persia feed -----------------------------------------------------------


ROWS = feeds.FILES * feeds.ROWS


def feed(workers: Workers, folder: Path, *more: str) -> subprocess.Popen[str]:
    """All samples; each has a row of its own."""
    data = str(folder / "part-*.csv")
    command = ["feed", data, "--job", "test", "--eval-split", "0"]
    command += ["--schema", str(feeds.schema(folder))]
    command += ["--batch-size", str(feeds.BATCH), "--timeout", "60"]
    command += ["--workers", ",".join(workers.addresses), *more]
    return Ready(
        *("-m", "persia", *command),
        env=environment(OMP_NUM_THREADS="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


@contextlib.contextmanager
def feeding(
    begin: Callable[[], subprocess.Popen[str]],
) -> Iterator[Callable[[], None]]:
    """What is called starts one more; all of them must end well."""
    loaders: list[subprocess.Popen[str]] = []
    try:
        yield lambda: loaders.append(begin())
        for one in loaders:
            assert "sent" in feeds.ends_well(one)
    finally:
        for one in loaders:
            one.kill()
            one.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("shard", [0, pytest.param(1, marks=pytest.mark.long)])
def test_feeds_with_parts(servers: Kept, tmp_path: Path, shard: int) -> None:
    """One sends, one has nothing to do and asks, and one begins: a server is
    away meanwhile."""
    feeds.files(tmp_path)
    with contextlib.closing(
        Workers(servers.addresses, 2, loaders=2, queue_limit=4096)
    ) as some:
        trainer = CountingTrainer(servers, some)  # type: ignore[arg-type]
        trainer.most = 20
        with feeding(lambda: feed(some, tmp_path, "--parts", "2")) as begin:
            begin()
            wait_for(lambda: trainer.batches == 20)
            begin()
            time.sleep(4)  # it has begun, and asks every two seconds
            servers.stop(shard)
            begin()
            time.sleep(4)  # both have asked
            servers.start(shard)
            trainer.most = 1 << 62
        assert trainer.counts(ROWS) == [1.0] * ROWS


@pytest.mark.slow
@pytest.mark.parametrize("shard", [0, 1])
def test_a_feed_with_a_share(
    servers: Kept, workers: Workers, tmp_path: Path, shard: int
) -> None:
    """It begins while a server is away, and one is away while it sends."""
    feeds.files(tmp_path)
    trainer = CountingTrainer(servers, workers)  # type: ignore[arg-type]
    trainer.most = 40
    with feeding(lambda: feed(workers, tmp_path, "--loader", "0/1")) as begin:
        servers.stop(shard)
        begin()
        time.sleep(4)  # it asks for the server
        servers.start(shard)
        wait_for(lambda: trainer.batches == 40)
        with away(servers, 1 - shard):
            trainer.most = 1 << 62
    assert trainer.counts(ROWS) == [1.0] * ROWS
