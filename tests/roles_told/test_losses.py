"""Servers are started again without their rows: the trainer raises
UpdatesLost, and all of the updates that went are counted, whoever had pushed
them and wherever that process is now. What direct mode counts is the
oracle."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import persia
from persia import _core
from persia.data import Sender
from persia.store.engine import engine_of
from tests.remote import Servers
from tests.roles import Workers
from tests.roles_told.job import Trainer, batch, cluster, counts, missing, send
from tests.test_roles_failures import wait_for

if not _core.GRPC[0].isdigit():
    pytest.skip("built without gRPC", allow_module_level=True)

pytestmark = pytest.mark.timeout(60)

FIRST, REST = 30, 10
POLICIES = ["raise", "continue"]


@contextlib.contextmanager
def job(workers: int, lost: str) -> Iterator[tuple[Servers, Workers, Trainer]]:
    """Servers, workers and a rank."""
    with cluster(workers) as (servers, some):
        trainer = Trainer(servers, some, lost=lost)
        yield servers, some, trainer


def restart(servers: Servers, *shards: int) -> None:
    """Each loses its rows."""
    for shard in shards:
        servers.kill(shard)
        servers.restart(shard)


def told(trainer: Trainer, servers: Servers, n: int, times: int = 1) -> None:
    """What is missing is what was told, at the end of the job."""
    gone = missing(counts(servers, n), times)
    assert gone > 0
    assert trainer.lost == gone
    if trainer.stream is not None:
        assert trainer.stream.stats()["lost"] == gone
    raises = engine_of(trainer.store).arguments.settings.lost == "raise"
    assert bool(trainer.told) == raises
    trainer.store.flush()  # once


def trained(trainer: Trainer, workers: Workers, *senders: Sender) -> None:
    """All that was sent is at the servers, and the loaders know."""
    for sender in senders:
        sender.flush(8)
    trainer.flush()
    assert not trainer.told
    assert trainer.lost == 0


# ---- the oracle ------------------------------------------------------------


@pytest.mark.parametrize("shards", [(0,), (1,), (0, 1)])
def test_direct_mode_counts_all(shards: tuple[int, ...]) -> None:
    """The same without workers."""
    with contextlib.closing(Servers(2)) as servers:
        trainer = Trainer(servers, None)
        for n in range(FIRST):
            trainer.step(batch(n))
        trainer.flush()
        restart(servers, *shards)
        for n in range(FIRST, FIRST + REST):
            trainer.step(batch(n))
        trainer.flush()
        told(trainer, servers, FIRST + REST)
        assert trainer.lost == FIRST * len(shards)


def test_direct_mode_adds_up_losses() -> None:
    """Of two servers, one after the other."""
    with contextlib.closing(Servers(2)) as servers:
        trainer = Trainer(servers, None)
        for n in range(FIRST):
            trainer.step(batch(n))
        trainer.flush()
        restart(servers, 0)
        for n in range(FIRST, FIRST + REST):
            trainer.step(batch(n))
        trainer.flush()
        restart(servers, 1)
        trainer.flush()
        for n in range(FIRST + REST, FIRST + 2 * REST):
            trainer.step(batch(n))
        trainer.flush()
        told(trainer, servers, FIRST + 2 * REST)
        assert trainer.lost == 2 * FIRST + REST


# ---- in the middle of a job ------------------------------------------------


@pytest.mark.parametrize(
    ("workers", "shards", "victims"),
    [
        pytest.param(1, [0], [], id="a-server"),
        pytest.param(2, [0], [], id="a-server-of-two-workers"),
        pytest.param(1, [0], [0], id="a-server-and-the-worker"),
        pytest.param(1, [0, 1], [0], id="both-servers-and-the-worker"),
        pytest.param(2, [1], [0], id="a-server-and-one-of-two-workers"),
        pytest.param(2, [0], [0, 1], id="a-server-and-both-workers"),
        pytest.param(2, [0, 1], [0], id="both-servers-and-one-of-two-workers"),
    ],
)
@pytest.mark.parametrize(
    ("lost", "name"), [("raise", None), ("continue", "a")]
)
def test_servers_and_workers_die_together(
    lost: str,
    workers: int,
    shards: list[int],
    victims: list[int],
    name: str | None,
) -> None:
    """Whoever is left tells of all updates."""
    with job(workers, lost) as (servers, some, trainer):
        with Sender(some.addresses, name=name, timeout=8) as sender:
            send(sender, 0, FIRST)
            trainer.open()
            trainer.train(FIRST)
            trained(trainer, some, sender)
            for at in victims:
                some.workers[at].close()
            restart(servers, *shards)
            for at in victims:
                some.restart(at)
            send(sender, FIRST, FIRST + REST)
            sender.end()
            assert trainer.train() == REST
            sender.flush(8)
        trainer.flush()
        told(trainer, servers, FIRST + REST)
        assert trainer.lost == FIRST * len(shards)
        assert sorted(trainer.seen) == list(range(FIRST + REST))


@pytest.mark.parametrize("lost", POLICIES)
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("shards", [(0, 1), (0, 0), (1, 0, 1)])
def test_losses_before_a_return_add_up(
    lost: str, workers: int, shards: tuple[int, ...]
) -> None:
    """Two servers one after the other, and one server twice, which had nothing
    to lose then."""
    with job(workers, lost) as (servers, some, trainer):
        with Sender(some.addresses, timeout=8) as sender:
            send(sender, 0, FIRST)
            trainer.open(staleness=0)
            trainer.train(FIRST)
            trained(trainer, some, sender)
            restart(servers, *shards)
            send(sender, FIRST, FIRST + REST)
            sender.end()
            assert trainer.train() == REST
            sender.flush(8)
        trainer.flush()
        told(trainer, servers, FIRST + REST)
        assert trainer.lost == FIRST * len(set(shards))


def test_losses_at_two_lookups_before_a_return() -> None:
    """The batch in hand was looked up; then a server lost its rows, and the
    next batch was looked up; then the other server."""
    with job(1, "raise") as (servers, some, trainer):
        with Sender(some.addresses, timeout=8) as sender:
            send(sender, 0, FIRST)
            trainer.open(staleness=8)
            trainer.train(FIRST)
            trained(trainer, some, sender)
            for i, shard in enumerate((0, 1)):
                restart(servers, shard)
                taken = some.stats("taken")
                send(sender, FIRST + i, FIRST + i + 1)
                wait_for(lambda taken=taken: some.stats("taken") > taken)
                wait_for(lambda: some.stats("looking") == 0)
            sender.end()
            assert trainer.train() == 2
            sender.flush(8)
        trainer.flush()
        told(trainer, servers, FIRST + 2)
        assert trainer.lost == 2 * FIRST


# ---- when nothing more is trained ------------------------------------------


@pytest.mark.parametrize("lost", POLICIES)
@pytest.mark.parametrize(
    ("workers", "through"),
    [
        (0, "save"),
        *((n, how) for n in (1, 2) for how in ("flush", "save", "end")),
    ],
)
def test_a_loss_after_the_loader_has_left(
    lost: str,
    workers: int,
    through: str,
    tmp_path: Path,
) -> None:
    """flush() and save() tell of it before they return, as they do without
    workers, and so does the end of a pass."""
    with contextlib.ExitStack() as stack:
        servers = stack.enter_context(
            contextlib.closing(Servers(2, checkpoints=str(tmp_path)))
        )
        some = workers and stack.enter_context(
            contextlib.closing(Workers(servers.addresses, workers))
        )
        trainer = Trainer(servers, some or None, lost=lost)
        if not some:
            for n in range(FIRST):
                trainer.step(batch(n))
        else:
            with Sender(some.addresses, timeout=8) as sender:
                send(sender, 0, FIRST)
                sender.end()
                trainer.open()
                trainer.train(FIRST)
                sender.flush(8)
                if through != "end":
                    assert trainer.train() == 0
        trainer.flush()
        assert trainer.lost == 0
        restart(servers, 0)
        if through == "save":
            with trainer.telling():
                trainer.store.save(tmp_path / "out")
        elif through == "end" and some:
            assert trainer.train() == 0
        else:
            trainer.flush()
        told(trainer, servers, FIRST)
        assert trainer.lost == FIRST


@pytest.mark.parametrize("lost", POLICIES)
@pytest.mark.parametrize("how", ["left", "idle", "killed"])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_loss_of_a_stream_that_sends_no_more(
    lost: str, how: str, workers: int
) -> None:
    """Of two loaders one goes on: the updates of the other are told, too."""
    with cluster(workers, loaders=2) as (servers, some):
        trainer = Trainer(servers, some, lost=lost)
        one, other = (Sender(some.addresses, timeout=8) for _ in range(2))
        send(one, 0, FIRST)
        send(other, FIRST, 2 * FIRST)
        trainer.open()
        trainer.train(2 * FIRST)
        trained(trainer, some, one, other)
        if how == "left":
            one.close()
        elif how == "killed":
            one._core.close(False)
        restart(servers, 1)
        send(other, 2 * FIRST, 2 * FIRST + REST)
        trainer.train(REST)
        other.flush(20)
        trainer.flush()
        told(trainer, servers, 2 * FIRST + REST)
        assert trainer.lost == 2 * FIRST
        other.close()
        if how == "idle":
            one.close()


@pytest.mark.parametrize("workers", [1, 2])
def test_a_loss_of_parts_that_have_ended(workers: int) -> None:
    """Loaders with names that follow one another, and then a server and its
    worker die."""
    parts = 4
    with cluster(workers) as (servers, some):
        trainer = Trainer(servers, some)
        trainer.open()
        for part in range(parts):
            with Sender(some.addresses, name=f"{part}", timeout=8) as sender:
                send(sender, part * REST, (part + 1) * REST)
                trainer.train(REST)
                sender.flush(8)
                sender.close(ended=False)
        trained(trainer, some)
        some.workers[0].close()
        restart(servers, 0)
        some.restart(0)
        trainer.flush()
        told(trainer, servers, parts * REST)
        assert trainer.lost == parts * REST


@pytest.mark.parametrize("victims", [[], [0]], ids=["a-server", "and-worker"])
def test_the_loader_reports_what_a_server_lost(victims: list[int]) -> None:
    """Of its own batches: those that were trained."""
    with (
        job(1, "continue") as (servers, some, trainer),
        Sender(some.addresses, timeout=8) as sender,
    ):
        send(sender, 0, FIRST)
        trainer.open()
        trainer.train(FIRST)
        trained(trainer, some, sender)
        assert sender.stats()["lost"] == 0
        for at in victims:
            some.workers[at].close()
        restart(servers, 0)
        for at in victims:
            some.restart(at)
        send(sender, FIRST, FIRST + REST)
        sender.end()
        assert trainer.train() == REST
        sender.flush(8)
        wait_for(lambda: sender.stats()["lost"] == FIRST)


@pytest.mark.parametrize("victims", [[], [0]], ids=["a-server", "and-worker"])
def test_an_idle_loader_reports_what_a_server_lost(
    victims: list[int],
) -> None:
    """It sends nothing more, and its trainer is gone."""
    with (
        job(1, "continue") as (servers, some, trainer),
        Sender(some.addresses, timeout=8) as sender,
    ):
        send(sender, 0, FIRST)
        trainer.open()
        trainer.train(FIRST)
        trained(trainer, some, sender)
        trainer.close()
        trainer.store.close()
        for at in victims:
            some.workers[at].close()
        restart(servers, 0, 1)
        for at in victims:
            some.restart(at)
        wait_for(lambda: sender.stats()["lost"] == FIRST)


def test_a_worker_reports_what_was_lost_of_those_who_have_ended() -> None:
    """Trainer and loader have left before the servers are started again."""
    with job(2, "continue") as (servers, some, trainer):
        with Sender(some.addresses, timeout=8) as sender:
            send(sender, 0, FIRST)
            trainer.open()
            trainer.train(FIRST)
            trained(trainer, some, sender)
        trainer.close()
        trainer.store.close()

        def lost() -> int:
            return sum(w.stats()["lost"] for w in some.workers)

        assert lost() == 0
        restart(servers, 0, 1)
        wait_for(lambda: lost() == 2 * FIRST)
        restart(servers, 1)  # once
        other = Trainer(servers, some, lost="continue")
        assert missing(counts(servers, FIRST), 1) == lost() == 2 * FIRST
        other.store.close()


def test_nothing_is_told_where_nothing_was_lost() -> None:
    """Workers that start again, and a server that has not: control."""
    with job(2, "raise") as (servers, some, trainer):
        with Sender(some.addresses, timeout=8) as sender:
            send(sender, 0, FIRST)
            trainer.open()
            trainer.train(FIRST)
            trained(trainer, some, sender)
            some.restart(0)
            send(sender, FIRST, FIRST + REST)
            sender.end()
            assert trainer.train() == REST
            sender.flush(8)
        trainer.flush()
        assert not trainer.told
        assert trainer.lost == trainer.stream.stats()["lost"] == 0
        assert missing(counts(servers, FIRST + REST)) == 0


def test_lost_is_a_number_of_updates() -> None:
    """Not of reports, and raised once."""
    with job(1, "raise") as (servers, some, trainer):
        with Sender(some.addresses, timeout=8) as sender:
            send(sender, 0, FIRST)
            trainer.open()
            trainer.train(FIRST)
            trained(trainer, some, sender)
            restart(servers, 0)
            send(sender, FIRST, FIRST + REST)
            sender.end()
            assert trainer.train() == REST
            sender.flush(8)
        trainer.flush()
        assert len(trainer.told) == 1
        assert isinstance(trainer.told[0], persia.errors.UpdatesLost)
        assert str(FIRST) in str(trainer.told[0])
        told(trainer, servers, FIRST + REST)


def test_workers_with_other_servers() -> None:
    """The trainer's own servers lost nothing: the error names one of them, and
    after a restart, which may have lost some, it does not."""
    with (
        contextlib.closing(Servers(2)) as servers,
        cluster() as (_, some),
    ):
        trainer = Trainer(servers, some)
        trainer.open()
        with Sender(some.addresses, timeout=8) as sender:
            for restarts in (False, True):
                send(sender, REST * restarts, REST * (1 + restarts))
                trainer.train(REST)
                sender.flush(8)
                if restarts:
                    restart(servers, 0, 1)
                trainer.flush()
                text = " ".join(map(str, trainer.told))
                named = [address in text for address in servers.addresses]
                assert trainer.told and any(named) != restarts
                trainer.told.clear()
