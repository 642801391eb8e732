"""What loaders, ranks and strangers send to an embedding worker that is not in
order: each is an error by name, or a counted event, and the worker serves
on."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch

import persia
from persia import _core, errors
from persia.data import Sender
from tests.protobuf import stubs
from tests.remote import Servers
from tests.roles import Workers, batches, open_store, servers, workers
from tests.test_roles import feeding
from tests.test_roles_failures import Trainer, wait_for
from tests.test_roles_proto import DIM, Client, plan_of, refusal, submit

__all__ = ["servers", "workers"]

if not _core.GRPC[0].isdigit():
    pytest.skip("built without gRPC", allow_module_level=True)

pb, _ = stubs()
pytestmark = pytest.mark.timeout(60)


def serves(servers: Servers, workers: Workers, n: int = 3) -> None:
    """Whether it trains a whole epoch, and has nothing left then."""
    trainer = Trainer(servers, workers)
    before = workers.stats("trained")
    with feeding(workers, batches(n)):
        trainer.epoch()
    assert trainer.n == n
    assert workers.stats("trained") == before + n
    assert workers.stats("queued") == workers.stats("leased") == 0
    assert workers.stats("bytes") == 0


def clients(
    servers: Servers, workers: Workers, world: int = 1
) -> tuple[list[Client], Client]:
    """Ranks of stock gRPC that have declared one feature, and a loader."""
    ranks = [Client(workers.addresses[0], 1 + i) for i in range(world)]
    for i, rank in enumerate(ranks):
        rank.hello(world, i)
    ranks[0].call.Declare(plan_of(servers, ranks[0])[1])
    loader = Client(workers.addresses[0], 99)
    loader.hello(0)
    return ranks, loader


# ---- loaders ---------------------------------------------------------------


def test_a_feature_that_no_batch_has(
    servers: Servers, workers: Workers
) -> None:
    """The loader sent it before the model was declared: it is the loader's
    error, which names the feature; the trainer has the other batches."""
    trainer = Trainer(servers, workers)
    ids = persia.JaggedBatch(["user"], torch.arange(8))
    with Sender(workers.addresses, timeout=10) as sender:
        sender.send(persia.Batch(None, ids))
        sender.send(next(batches(1)))
        sender.end()
        trainer.epoch()
        with pytest.raises(errors.MissingFeature, match="item"):
            sender.flush(10)
        assert sender.stats()["failed"] == 1
        sender.flush(10)  # once
    assert workers.stats("failed") == 1
    serves(servers, workers)


def test_a_batch_over_the_limits(servers: Servers) -> None:
    """Of the queue, and of a message: the loader may send smaller ones."""
    with contextlib.closing(
        Workers(servers.addresses, queue_limit=4000)
    ) as workers:
        with Sender(workers.addresses, timeout=10) as sender:
            with pytest.raises(errors.LimitReached, match="4000"):
                sender.send(next(batches(1, samples=500)))
            sender.send(next(batches(1)))
            assert sender.stats()["sent"] == 1
        assert workers.stats("queued") == 1
    with contextlib.closing(
        Workers(servers.addresses, message_limit=1 << 20)
    ) as workers:
        with (
            Sender(workers.addresses, timeout=10) as sender,
            pytest.raises(errors.LimitReached),
        ):
            sender.send(next(batches(1, samples=50_000)))
        serves(servers, workers)


def test_ids_that_do_not_add_up(servers: Servers, workers: Workers) -> None:
    """Offsets that fall, and other numbers of ids: errors that say where."""
    _, loader = clients(servers, workers)
    request = pb.SubmitRequest(
        caller=loader.caller, stream=7, number=1, samples=3
    )
    request.features.add(name="user")
    request.ids.ids = np.arange(4, dtype="<u8").tobytes()
    for offsets, error, text in (
        ([0, 3, 2, 4], "OffsetsError", "user"),
        ([0, 1, 2, 5], "OffsetsError", "5"),
        ([0, 4], "ProtocolError", "offsets"),
    ):
        request.offsets.offsets = np.array(offsets, "<u8").tobytes()
        name, found = refusal(loader.call.Submit, request, timeout=20)
        assert name == error
        assert text in found
    request.offsets.offsets = np.array([0, 1, 3, 4], "<u8").tobytes()
    request.weights.weights = np.ones(3, "<f4").tobytes()
    name, found = refusal(loader.call.Submit, request, timeout=20)
    assert (name, "3 weights" in found) == ("ShapeError", True)
    request.ids.ids = b"12345"
    name, found = refusal(loader.call.Submit, request, timeout=20)
    assert (name, "ids" in found) == ("ProtocolError", True)
    assert workers.stats("submitted") == workers.stats("bytes") == 0


@pytest.mark.parametrize(
    ("kind", "size"), [("float33", 32), ("float32", 31), ("Tensor", 32)]
)
def test_a_tensor_of_no_type(
    servers: Servers, workers: Workers, kind: str, size: int
) -> None:
    """The trainer says what came; the batch is skipped."""
    trainer = Trainer(servers, workers)
    loader = Client(workers.addresses[0], 99)
    loader.hello(0)
    request = pb.SubmitRequest(
        caller=loader.caller, stream=7, number=1, samples=8
    )
    for name in ("user", "item", "shop"):
        request.features.add(name=name)
    request.ids.ids = np.arange(24, dtype="<u8").tobytes()
    request.tensors.add(name="label", type=kind, shape=[8], data=bytes(size))
    loader.call.Submit(request)
    with pytest.raises(errors.ProtocolError, match=kind):
        trainer.epoch()
    wait_for(lambda: workers.stats("skipped") == 1)
    assert workers.stats("bytes") == 0


class Cut:
    """Passes bytes on to an address, and cuts a connection when its client
    has sent so many."""

    def __init__(self, address: str, most: int) -> None:
        host, _, port = address.rpartition(":")
        self._to = (host, int(port))
        self.most = most
        self.cuts = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._to)
                for pair in (client, server, True), (server, client, False):
                    threading.Thread(
                        target=self._pass, args=pair, daemon=True
                    ).start()

    def _pass(
        self, source: socket.socket, to: socket.socket, counts: bool
    ) -> None:
        left = self.most if counts else 1 << 62
        with contextlib.suppress(OSError):
            while left and (data := source.recv(min(left, 65536))):
                to.sendall(data)
                left -= len(data)
            self.cuts += counts and not left
        for one in source, to:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
                one.close()

    def close(self) -> None:
        """No more connections."""
        self._listener.close()


def test_a_loader_that_dies_inside_a_message(
    servers: Servers, workers: Workers
) -> None:
    """Nothing of it is in the queue; others are served meanwhile."""
    big = next(batches(1, samples=50_000))
    with contextlib.closing(Cut(workers.addresses[0], 300_000)) as cut:
        sender = Sender(cut.address, timeout=1)
        with pytest.raises(errors.Unavailable):
            sender.send(big)
        sender._core.close(False)
        assert cut.cuts > 0
    assert workers.stats("submitted") == workers.stats("bytes") == 0
    serves(servers, workers)


def test_a_message_that_is_cut_is_sent_again(
    servers: Servers, workers: Workers
) -> None:
    """By a loader that lives: the batch is trained once."""
    trainer = Trainer(servers, workers)
    with contextlib.closing(Cut(workers.addresses[0], 300_000)) as cut:
        with Sender(cut.address, timeout=30) as sender:

            def let_through() -> None:
                wait_for(lambda: cut.cuts > 0)
                cut.most = 1 << 62

            threading.Thread(target=let_through).start()
            sender.send(next(batches(1, samples=50_000)))
        trainer.epoch()
    assert trainer.n == trainer.store.updates == 1
    assert workers.stats("trained") == 1
    assert workers.stats("bytes") == 0


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\x40\x00" + b"\xff" * 500,
        b"\x16\x03\x01" + b"\0" * 300,
    ],
)
def test_strangers(servers: Servers, workers: Workers, data: bytes) -> None:
    """Connections that do not speak gRPC, and stay."""
    host, _, port = workers.addresses[0].rpartition(":")
    with contextlib.ExitStack() as stack:
        for _ in range(4):
            one = socket.create_connection((host, int(port)))
            stack.enter_context(one)
            one.sendall(data)
        serves(servers, workers)


# ---- tables ----------------------------------------------------------------


def test_a_worker_whose_servers_have_other_tables(servers: Servers) -> None:
    """The trainer's error names the table."""
    with (
        contextlib.closing(Servers(1)) as others,
        contextlib.closing(Workers(others.addresses)) as workers,
    ):
        other = open_store(others.text)
        other.add_table(persia.EmbeddingBagConfig("u", 5, ["user"]))
        trainer = Trainer(servers, workers)
        with pytest.raises(errors.SchemaMismatch, match="u"):
            trainer.epoch()


# ---- ranks -----------------------------------------------------------------


def test_a_rank_that_takes_and_never_returns(servers: Servers) -> None:
    """Its lease ends: another rank gets the batch, and its late gradients
    change nothing."""
    with contextlib.closing(Workers(servers.addresses, lease=0.5)) as workers:
        ranks, loader = clients(servers, workers, world=2)
        submit(loader, 1)
        first = ranks[0].take(1)
        began = time.monotonic()
        while (second := ranks[1].take(1, 1)).status != pb.TakeReply.BATCH:
            assert time.monotonic() - began < 20
        assert second.number == first.number == 1
        assert second.lease != first.lease
        back = pb.ReturnRequest(caller=ranks[0].caller, lease=first.lease, t=1)
        back.grads.add(no=0, dim=DIM, values=bytes(12 * DIM))
        back.hypers.add(kind=pb.OPTIMIZER_SGD, lr=1.0, grad_scale=1.0)
        assert ranks[0].call.Return(back).status == pb.ReturnReply.GONE
        assert workers.stats("again") == workers.stats("late") == 1
        assert workers.stats("trained") == 0


def test_gradients_that_are_none_of_the_batch(
    servers: Servers, workers: Workers
) -> None:
    """Errors that name the feature; the batch is offered again, and after
    four times its loader gets the error."""
    (rank,), loader = clients(servers, workers)

    def grads(back: Any) -> Any:
        back.grads.add(no=0, dim=DIM, values=bytes(12 * DIM))
        return back

    def another_width(back: Any) -> Any:
        back.grads.add(no=0, dim=2, values=bytes(24))
        return back

    def no_feature(back: Any) -> Any:
        back.grads.add(no=4, dim=DIM, values=bytes(12 * DIM))
        return back

    def no_rows(back: Any) -> Any:
        back.rows.add(no=0, dim=DIM, values=bytes(4 * DIM))
        return back

    def fewer(back: Any) -> Any:
        back.grads.add(no=0, dim=DIM, values=bytes(8 * DIM))
        return back

    kinds = (
        (another_width, "ShapeError", "user"),
        (no_feature, "ShapeError", "feature"),
        (no_rows, "ShapeError", "table 0"),
        (fewer, "ShapeError", "user"),
        (grads, "InvalidArgument", "hyper-parameters of 0 tables"),
    )
    for number, (make, error, text) in enumerate(kinds, 1):
        submit(loader, number)
        for n in range(4):
            assert workers.stats("failed") == number - 1
            got = rank.take(10 * number + n)
            assert got.number == number
            back = pb.ReturnRequest(caller=rank.caller, lease=got.lease, t=1)
            name, found = refusal(rank.call.Return, make(back), timeout=20)
            assert name == error
            assert text in found
        assert workers.stats("failed") == workers.stats("given_up") == number
    wait_for(lambda: workers.stats("bytes") == 0)
    assert workers.stats("trained") == 0


def test_gradients_with_a_nan(servers: Servers, workers: Workers) -> None:
    """Nothing is applied, and the trainer's error names the table."""
    trainer = Trainer(servers, workers)
    with feeding(workers, batches(2)):
        loader = iter(persia.DataLoader(trainer.stream, trainer.model, 0))
        batch = next(loader)
        loss = trainer.model(batch.dense, batch.ids).sum() * float("nan")
        loss.backward()
        with pytest.raises(errors.NonFiniteGradient, match="table"):
            trainer.store.flush()
        loader.close()
        del batch, loss
    assert trainer.store.updates == 0
    assert workers.stats("failed") == 1
