"""Batches that end without an update: their loader is told, each once and
with its number, and the trainer trains the others."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import persia
from persia import _core, errors
from persia.cli.app import app
from persia.data import Sender
from tests.protobuf import stubs
from tests.remote import Servers
from tests.roles import Workers, servers, workers
from tests.roles_told.job import Trainer, batch, cluster, counts, missing, send
from tests.test_roles import in_thread
from tests.test_roles_failures import wait_for
from tests.test_roles_proto import DIM, Client, plan_of, refusal

__all__ = ["servers", "workers"]

if not _core.GRPC[0].isdigit():
    pytest.skip("built without gRPC", allow_module_level=True)

pytestmark = pytest.mark.timeout(60)

pb, _ = stubs()


def without_feature() -> persia.Batch:
    """The model looks up another one."""
    return persia.Batch(None, persia.JaggedBatch(["item"], torch.arange(4)))


def told(sender: Sender, *kinds: type[errors.PersiaError]) -> None:
    """What flush() raises before it returns: each batch once, several of them
    maybe in one error."""
    found = []
    for _ in range(len(kinds) + 1):
        try:
            sender.flush(8)
        except (
            errors.MissingFeature,
            errors.LimitReached,
            errors.UpdatesLost,
        ) as error:
            found.append(type(error))
    assert len(found) <= len(kinds)
    assert set(found) == set(kinds)
    sender.flush(8)
    assert sender.stats()["failed"] == len(kinds)


def test_a_sender_that_does_not_flush_warns() -> None:
    with cluster() as (servers, some):
        sender = Sender(some.addresses, timeout=8)
        sender.send(without_feature())
        send(sender, 0, 1)
        trainer = Trainer(servers, some)
        trainer.open()
        assert trainer.train(1) == 1
        wait_for(lambda: sender.stats()["failed"] == 1)
        with pytest.warns(UserWarning, match="1 batches ended without"):
            sender.close()
        trainer.close()


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("at", [0, 2, 5])
def test_a_batch_before_the_plan(at: int, count: int) -> None:
    """It lacks a feature of the model that no trainer has declared yet."""
    with cluster(count) as (servers, some):
        with Sender(some.addresses, timeout=8) as sender:
            send(sender, 0, at)
            sender.send(without_feature())
            send(sender, at, 5)
            sender.end()
            trainer = Trainer(servers, some)
            assert trainer.epoch() == 5
            told(sender, errors.MissingFeature)
            assert sender.stats()["done"] == 6
        assert missing(counts(servers, 5)) == 0
        assert some.stats("failed") == trainer.stream.stats()["failed"] == 1


def test_each_batch_before_the_plan_is_told() -> None:
    """By flush(), not by send(), whose batch has no fault."""
    with cluster() as (servers, some):
        with Sender(some.addresses, timeout=8) as sender:
            for _ in range(3):
                sender.send(without_feature())
            send(sender, 0, 1)
            trainer = Trainer(servers, some)
            trainer.open()
            assert trainer.train(1) == 1
            wait_for(lambda: sender.stats()["failed"] == 3, 8)
            sender.send(batch(1))
            sender.end()
            assert trainer.train() == 1
            with pytest.raises(errors.MissingFeature):
                sender.flush(8)
            sender.flush(8)
            assert sender.stats()["failed"] == 3
        trainer.flush()
        assert missing(counts(servers, 2)) == 0
        assert sender_is_quiet(some)


def sender_is_quiet(some: Workers) -> bool:
    """Nothing is left at the workers."""
    return all(some.stats(n) == 0 for n in ("queued", "leased", "bytes"))


def test_a_batch_behind_the_plan_is_refused_at_once() -> None:
    """Control: send() raises it, and the batch has no number."""
    with cluster() as (servers, some):
        trainer = Trainer(servers, some)
        trainer.open()
        with Sender(some.addresses, timeout=8) as sender:
            send(sender, 0, 1)
            assert trainer.train(1) == 1
            with pytest.raises(errors.MissingFeature):
                sender.send(without_feature())
            send(sender, 1, 2)
            assert trainer.train(1) == 1
            sender.flush(8)
            assert sender.stats()["sent"] == 2
            assert sender.stats()["failed"] == 0


WIDE = 512  # elements of a row


class Wide(Trainer):
    """Its rows are wide."""

    def __init__(self, servers: Servers, workers: Workers) -> None:
        super().__init__(servers, workers)
        self.model = persia.EmbeddingBagCollection(
            store=self.store,
            tables=[persia.EmbeddingBagConfig("w", WIDE, ["user"], init=0.0)],
        )


def samples(n: int) -> persia.Batch:
    """So many, of one id each."""
    return persia.Batch(
        None,
        persia.JaggedBatch(["user"], torch.arange(n)),
        torch.zeros(n),
    )


@pytest.mark.parametrize("before", [True, False], ids=["early", "late"])
def test_an_answer_over_the_limit(before: bool) -> None:
    """The embeddings of a batch do not fit into a message: the loader is
    told, before and after the model is declared."""
    with (
        contextlib.closing(Servers(2)) as servers,
        contextlib.closing(
            Workers(servers.addresses, message_limit=1 << 20)
        ) as some,
        Sender(some.addresses, timeout=8) as sender,
    ):
        trainer = Wide(servers, some)
        trainer.open()
        if not before:
            sender.send(samples(4))
            assert trainer.train(1) == 1
        raised = 0
        try:
            sender.send(samples(2000))
        except errors.LimitReached:
            raised = 1
        sender.send(samples(8))
        sender.end()
        assert trainer.train() == 1
        trainer.flush()
        told(sender, *[errors.LimitReached] * (1 - raised))
        assert some.stats("failed") == 1 - raised
        assert sender_is_quiet(some)


@pytest.mark.parametrize("count", [1, 2])
def test_a_batch_that_is_given_up(count: int) -> None:
    """Ranks hold it for four leases and die."""
    with (
        cluster(count, lease=0.3) as (servers, some),
        Sender(some.addresses, timeout=8) as sender,
    ):
        send(sender, 0, 1)
        for life in range(8):
            rank = Client(some.addresses[0], 10 + life)
            rank.hello(1)
            rank.call.Declare(plan_of(servers, rank)[1])
            if some.stats("given_up"):
                break
            rank.take(1)
            wait_for(lambda: some.stats("leased") == 0, 8)
        wait_for(lambda: some.stats("given_up") == 1, 8)
        told(sender, errors.UpdatesLost)


def test_a_batch_whose_gradients_are_wrong(
    servers: Servers, workers: Workers
) -> None:
    """A stock client returns another shape: the error is its own, and the
    batch does not count as trained."""
    rank = Client(workers.addresses[0], 1)
    rank.hello(1)
    rank.call.Declare(plan_of(servers, rank)[1])
    with Sender(workers.addresses, timeout=8) as sender:
        send(sender, 0, 1)
        lease = rank.take(1).lease
        back = pb.ReturnRequest(caller=rank.caller, lease=lease, t=1)
        back.grads.add(no=0, dim=DIM + 1, values=bytes(8 * (DIM + 1)))
        back.hypers.add(kind=pb.OPTIMIZER_SGD, lr=1.0, grad_scale=1.0)
        name, _ = refusal(rank.call.Return, back, timeout=8)
        assert name == "ShapeError"
        found = take_again(rank)
        if found is None:  # it has ended
            told(sender, errors.UpdatesLost)
            return
        back = pb.ReturnRequest(caller=rank.caller, lease=found.lease, t=1)
        back.grads.add(no=0, dim=DIM, values=bytes(8 * DIM))
        back.hypers.add(kind=pb.OPTIMIZER_SGD, lr=1.0, grad_scale=1.0)
        assert rank.call.Return(back).status == pb.ReturnReply.DONE
        told(sender)


def take_again(rank: Client) -> Any:
    """The batch that is offered once more, or None."""
    until = time.monotonic() + 5
    number = 2
    while time.monotonic() < until:
        reply = rank.take(number)
        if reply.status == pb.TakeReply.BATCH:
            return reply
        number += 1
        time.sleep(0.05)
    return None


@pytest.mark.parametrize("short", ["dense", "label", "weight"])
@pytest.mark.parametrize("more", [-1, 1])
def test_tensors_of_other_samples(
    workers: Workers, short: str, more: int
) -> None:
    """Dense values, labels and weights are of as many samples as the ids."""
    ids = persia.JaggedBatch(["user"], torch.arange(4))
    n = 4 + more
    tensor = torch.zeros(n, 3) if short == "dense" else torch.zeros(n)
    one = persia.Batch(None, ids)
    setattr(one, short, tensor)
    with Sender(workers.addresses, timeout=8) as sender:
        with pytest.raises(errors.PersiaError, match=short):
            sender.send(one)
        assert sender.stats()["sent"] == 0
        sender.send(batch(0))
        assert sender.stats()["sent"] == 1


def test_status_shows_what_failed() -> None:
    """Of each worker."""
    with cluster() as (servers, some), contextlib.ExitStack() as stack:
        sender = stack.enter_context(Sender(some.addresses, timeout=8))
        for _ in range(3):
            sender.send(without_feature())
        send(sender, 0, 1)
        trainer = Trainer(servers, some)
        trainer.open()
        assert trainer.train(1) == 1
        told(sender, *[errors.MissingFeature] * 3)
        shown = CliRunner().invoke(
            app, ["status", "--workers", some.addresses[0], "--json"]
        )
        assert shown.exit_code == 0
        assert '"failed": 3' in shown.output


def test_persia_feed_fails() -> None:
    """A batch that no trainer can use: exit status 1, and a line."""
    with cluster() as (servers, some):
        trainer = Trainer(servers, some)
        done: list[Any] = []

        def run() -> None:
            flags = ["--data", "synthetic", "--samples", "300"]
            flags += ["--batch-size", "100", "--eval-split", "0"]
            flags += ["--workers", some.addresses[0], "--timeout", "20"]
            done.append(CliRunner().invoke(app, ["feed", *flags]))

        join = in_thread(run)
        wait_for(lambda: some.stats("queued") == 3, 8)
        trainer.epoch()
        join()
        assert done[0].exit_code == 1
        assert isinstance(
            done[0].exception, errors.MissingFeature | SystemExit
        )
        assert trainer.stream.stats()["failed"] == 3
