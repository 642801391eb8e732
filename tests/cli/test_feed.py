"""``persia feed`` and ``persia train``, where batches end without an update or
servers lose some, and where there is nothing to send."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

import persia
from persia import _core, errors
from persia.cli.app import app
from persia.data import Sender, feeding
from tests.remote import Servers
from tests.roles import Workers, servers, workers
from tests.roles_told.job import Trainer, batch, cluster, waiting_trainer
from tests.test_roles import in_thread
from tests.test_roles_failures import wait_for

__all__ = ["servers", "workers"]

if not _core.GRPC[0].isdigit():
    pytest.skip("built without gRPC", allow_module_level=True)

pytestmark = pytest.mark.timeout(60)

BATCH = 10
SCHEMA = "label: click\ncategorical: [{column: user, hash: false}]\n"


def rows(tmp_path: Path, n: int, name: str = "clicks.csv") -> str:
    """A file of that many samples, each with its own id."""
    path = tmp_path / name
    lines = "".join(f"1,{i}\n" for i in range(n))
    path.write_text("click,user\n" + lines)
    (tmp_path / "schema.yaml").write_text(SCHEMA)
    return str(path)


def feeds(workers: Workers, data: str, *more: str) -> Result:
    """The command; all of the data are sent."""
    flags = ["--workers", ",".join(workers.addresses), "--timeout", "20"]
    flags += ["--schema", str(Path(data).with_name("schema.yaml"))]
    flags += ["--batch-size", str(BATCH), "--eval-split", "0"]
    return CliRunner().invoke(app, ["feed", data, *flags, *more])


def error_of(done: Result) -> BaseException | None:
    """Of the command, which prints one line of it."""
    assert done.exit_code == 1, done.output
    return done.exception


# ---- batches that end without an update ------------------------------------


class Poisoned:
    """Sends a batch that no model can use in front of some others.

    A context manager; batches before any plan are checked when it arrives.
    """

    def __init__(self, *numbers: int) -> None:
        self.numbers = numbers
        self._patch = pytest.MonkeyPatch()

    def __enter__(self) -> None:
        send, numbers = Sender.send, self.numbers
        sent: dict[int, int] = {}

        def replaced(sender: Sender, one: persia.Batch) -> None:
            n = sent[id(sender)] = sent.get(id(sender), 0) + 1
            if n in numbers:
                ids = persia.JaggedBatch(["item"], torch.arange(BATCH))
                one = persia.Batch(None, ids, one.label)
            send(sender, one)

        self._patch.setattr(Sender, "send", replaced)

    def __exit__(self, *error: object) -> None:
        self._patch.undo()


SHAPES: list[tuple[list[str], tuple[int, ...]]] = [
    ([], (1,)),
    ([], (2, 4)),
    ([], (5,)),
    (["--job", "a"], (3,)),
    (["--epochs", "2"], (2, 9)),
    (["--parts", "2", "--job", "a"], (1,)),
    (["--parts", "3", "--job", "a"], (2,)),
]


@pytest.mark.parametrize(("more", "numbers"), SHAPES)
def test_batches_that_fail(
    tmp_path: Path, more: list[str], numbers: tuple[int, ...]
) -> None:
    """Exit status 1, an error of the kind of the first, and the counts; all
    other batches are trained, those behind them and of other parts too."""
    parts = int(more[1]) if "--parts" in more else 1
    epochs = int(more[1]) if "--epochs" in more else 1
    data = rows(tmp_path, 50)
    if parts > 1:  # as many batches in each
        data = rows(tmp_path, 20 * parts)
    bad = len(numbers) * parts
    total = epochs * (5 if parts == 1 else 2 * parts)
    with cluster(loaders=parts) as (servers, some):
        done: list[Result] = []

        def run() -> None:
            with Poisoned(*numbers):
                done.append(feeds(some, data, *more))

        join = in_thread(run)
        wait_for(lambda: some.stats("queued") == total, 20)
        trainer = Trainer(servers, some)
        seen = 0
        for _ in range(epochs):
            trainer.open()
            seen += sum(1 for _ in iter(lambda: one(trainer), None))
        trainer.flush()
        join()
        assert seen == total - bad
        assert isinstance(error_of(done[0]), errors.MissingFeature)
        assert f"sent {total:,} batches" in done[0].output
        assert f"failed: {bad:,} " in done[0].output
        assert some.stats("failed") == trainer.stream.stats()["failed"] == bad
        assert some.stats("queued") == some.stats("bytes") == 0


def one(trainer: Trainer) -> bool | None:
    """Trains a batch of the pass; None: it has ended."""
    some = trainer.next()
    if some is None:
        return None
    trainer.forward(some).backward()
    return True


def test_a_loader_without_a_worker_is_no_failed_batch(
    servers: Servers, tmp_path: Path
) -> None:
    """What the connection raises ends the command at once."""
    data = rows(tmp_path, 50)
    some = Workers(servers.addresses)
    done: list[Result] = []
    join = in_thread(lambda: done.append(feeds(some, data, "--timeout", "1")))
    wait_for(lambda: some.stats("queued") == 5, 20)
    some.close()
    join()
    assert isinstance(error_of(done[0]), errors.Unavailable)
    assert "sent 5" not in done[0].output


class Unsettled:
    """In the place of a Sender: batches fail, and numbers are skipped."""

    def __init__(self, raises: Sequence[int]) -> None:
        self.position = 0
        self._raises = list(raises)
        self.skipped: list[int] = []
        self.failed = 0

    def send(self, one: Any) -> None:
        self.position += 1

    def skip(self, number: int) -> None:
        if number > self.position:
            self._settle()
            self.skipped.append(number)
            self.position = number

    def flush(self, timeout: float | None = None) -> None:
        self._settle()

    def _settle(self) -> None:
        if self.position in self._raises:
            self._raises.remove(self.position)
            self.failed += 1
            raise errors.LimitReached(f"batch {self.position}")

    def end(self) -> None: ...

    def stats(self) -> dict[str, int]:
        return {"failed": self.failed}


class Gaps(list[Any]):
    """Batches whose numbers have a gap behind the second."""

    whole = True
    epoch = 0

    def numbered(self, after: int) -> Iterator[tuple[int, Any]]:
        yield from zip([1, 2, 7, 8], self, strict=True)


def test_a_failed_batch_before_a_gap_of_numbers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """skip() waits as flush() does, and raises the same: it is repeated. A
    stream without an end prints the reason."""
    monkeypatch.setattr(feeding, "Kafka", Gaps)
    sender = Unsettled([2])
    made = persia.Batch(None, persia.JaggedBatch(["a"], torch.arange(1)))
    stream: Any = feeding.Share(
        Gaps([made] * 4),  # type: ignore[arg-type]
        sender,  # type: ignore[arg-type]
        "clicks/0",
    )
    assert stream.send_new()
    assert sender.skipped == [6] and sender.position == 8
    assert isinstance(stream.failure, errors.LimitReached)
    loader = feeding.Loader(1)
    loader.shares.append(stream)
    loader.show_failures()
    loader.show_failures()
    shown = capsys.readouterr().out
    assert shown.count("clicks/0: 1 ") == 1 and "batch 2" in shown


def check(holds: bool) -> None:
    """In a thread."""
    assert holds


# ---- nothing to send -------------------------------------------------------

EMPTY = {
    "no-line": "click,user\n",
    "malformed": "click,user\nx,1\n1,1.5\n",
}


@pytest.mark.parametrize("kind", EMPTY)
@pytest.mark.parametrize(
    "more", [[], ["--loader", "1/2"], ["--parts", "2", "--job", "a"]]
)
def test_a_file_without_a_usable_sample(
    tmp_path: Path, kind: str, more: list[str]
) -> None:
    """An error, and the epoch of a trainer that waits ends."""
    (tmp_path / "schema.yaml").write_text(SCHEMA)
    path = tmp_path / "clicks.csv"
    path.write_text(EMPTY[kind])
    parts = 2 if "--parts" in more else 1
    with cluster(loaders=parts) as (servers, some):
        trainer = Trainer(servers, some)
        with waiting_trainer() as asked:
            ended = in_thread(lambda: check(trainer.epoch() == 0))
            assert asked.wait(30)
        done = feeds(some, str(path), *more)
        assert isinstance(error_of(done), errors.MalformedData)
        ended()


def test_one_loader_of_more_than_there_are_batches(tmp_path: Path) -> None:
    """It has nothing to do, and that is no error."""
    data = rows(tmp_path, BATCH)
    with cluster(loaders=3) as (_, some):
        done = feeds(some, data, "--loader", "2/3")
        assert done.exit_code == 0, done.output
        assert "sent 0 batches" in done.output


def test_a_part_without_a_sample(
    servers: Servers, workers: Workers, tmp_path: Path
) -> None:
    """The other one has some."""
    data = rows(tmp_path, 20)
    rows(tmp_path, 0, "more.csv")
    done: list[Result] = []
    with cluster(loaders=2) as (servers, some):
        glob = str(Path(data).with_name("*.csv"))
        more = ["--parts", "2", "--job", "a"]
        join = in_thread(lambda: done.append(feeds(some, glob, *more)))
        assert Trainer(servers, some).epoch() == 2
        join()
        assert done[0].exit_code == 0, done[0].output


# ---- what servers lose -----------------------------------------------------


def trains(
    servers: Servers, workers: Workers, data: str, *more: str
) -> Result:
    """The command."""
    flags = ["--workers", ",".join(workers.addresses)]
    flags += ["--schema", str(Path(data).with_name("schema.yaml"))]
    flags += ["--servers", servers.text, "--batch-size", str(BATCH)]
    flags += ["--eval-split", "0", "--threads", "1", "--model", "dcn"]
    return CliRunner().invoke(app, ["train", data, *flags, *more])


def test_a_trainer_prints_what_failed(tmp_path: Path) -> None:
    """Not if nothing did."""
    data = rows(tmp_path, 50)
    for numbers in (), (1, 3):
        with cluster() as (servers, some):
            with Poisoned(*numbers):
                sent = in_thread(lambda on=some: fed(on, data, 1))
                wait_for(lambda on=some: on.stats("queued") == 5, 20)
            done = trains(servers, some, data)
            sent()
            assert done.exit_code == 0, done.output
            assert ("failed: 2 batches" in done.output) == bool(numbers)
            assert "lost: " not in done.output


def restart_behind(
    servers: Servers, epoch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Server 0 loses its rows when the trainer begins this epoch."""
    from persia.train.trainer import Trainer as Loop

    fit = Loop._fit_epoch

    def replaced(loop: Loop, *arguments: Any) -> bool:
        if loop.epoch == epoch:
            servers.kill(0)
            servers.restart(0)
        return fit(loop, *arguments)

    monkeypatch.setattr(Loop, "_fit_epoch", replaced)


@pytest.mark.parametrize("policy", ["raise", "continue"])
@pytest.mark.parametrize("roles", [True, False])
def test_a_server_that_loses_updates(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    roles: bool,
    policy: str,
) -> None:
    """``--lost``: an error, or a line with their number."""
    data = rows(tmp_path, 50)
    done: list[Result] = []
    with cluster() as (servers, some):
        restart_behind(servers, 1, monkeypatch)
        more = ["--lost", policy, "--epochs", "2"]
        if roles:
            sent = in_thread(
                lambda: fed(some, data, 2, lost=5, ends=policy == "continue")
            )
            done.append(trains(servers, some, data, *more))
        else:
            more += ["--workers", ""]
            done.append(trains(servers, some, data, *more))
        if policy == "raise":
            assert isinstance(error_of(done[0]), errors.UpdatesLost)
        else:
            assert done[0].exit_code == 0, done[0].output
            assert "lost: 5 updates" in done[0].output
        if roles:
            for worker in some.workers if policy == "raise" else []:
                worker.close()
            sent()


def fed(
    workers: Workers,
    data: str,
    epochs: int,
    *,
    lost: int = 0,
    ends: bool = True,
) -> None:
    """What persia feed does, whose standard output is that of the test."""
    from persia.cli import feed

    config = feed.FeedConfig(
        data=data,
        schema=str(Path(data).with_name("schema.yaml")),
        batch_size=BATCH,
        eval_split=0.0,
        epochs=epochs,
        workers=",".join(workers.addresses),
        timeout=3.0,
    )
    loader = feeding.Loader(epochs)
    try:
        feed.send_share(loader, config, 0, 1)
    except errors.Unavailable:
        assert not ends
    else:
        assert loader.counts()["lost"] == lost


def test_a_trainer_shows_what_it_lost(tmp_path: Path) -> None:
    """Its metrics, and the table and JSON of ``persia status``."""
    from persia import prometheus

    with cluster() as (servers, _):
        trainer = Trainer(servers, None, lost="continue")
        for n in range(3):
            trainer.step(batch(n))
        trainer.flush()
        port = prometheus.export(trainer.store, 0)
        url = f"http://127.0.0.1:{port}/metrics"

        def status(*more: str) -> str:
            given = ["status", servers.addresses[0], url, "--interval", "0"]
            done = CliRunner().invoke(app, [*given, *more])
            assert done.exit_code == 0, done.output
            return done.output

        assert json.loads(status("--json"))["trainers"][0]["lost"] == 0
        assert "and lost" not in status()
        servers.kill(1)
        servers.restart(1)
        trainer.step(batch(3))
        trainer.flush()
        assert trainer.lost == 3
        assert json.loads(status("--json"))["trainers"][0]["lost"] == 3
        assert "and lost" in status()
        trainer.store.close()


def test_options_that_change_nothing(tmp_path: Path) -> None:
    """--job without workers, --lost without servers: an error."""
    data = rows(tmp_path, 50)
    flags = ["--schema", str(tmp_path / "schema.yaml"), "--threads", "1"]
    for more in ["--job", "a"], ["--lost", "continue"]:
        done = CliRunner().invoke(
            app, ["train", data, *flags, "--servers", "embedded", *more]
        )
        assert isinstance(error_of(done), errors.InvalidArgument), more
    for command in "train", "feed":
        done = CliRunner().invoke(app, [command, data, "--job", ""])
        assert isinstance(error_of(done), errors.InvalidArgument)
