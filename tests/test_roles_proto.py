"""A stock gRPC client plays data loader and trainer by what persia.proto
says, beside an embedding worker and servers of ours."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
import torch

import persia
from persia import _core
from persia.store.engine import engine_of
from tests.protobuf import stubs
from tests.remote import Servers
from tests.roles import Workers
from tests.test_roles_failures import wait_for

if not _core.GRPC[0].isdigit():
    pytest.skip("built without gRPC", allow_module_level=True)

pb, pb_grpc = stubs()
DIM, SAMPLES = 4, 3
IDS = np.array([5, 6, 6, 9], "<u8")  # the second sample has two, mean
OFFSETS = np.array([0, 1, 3, 4], "<u8")


class Client:
    """Stubs of one worker; the caller of its requests."""

    def __init__(self, address: str, client: int) -> None:
        self.channel = grpc.insecure_channel(address)
        self.call: Any = pb_grpc.EmbeddingWorkerStub(self.channel)
        self.caller = pb.Caller(client=client)

    def hello(self, world: int, rank: int = 0) -> None:
        """World 0: a data loader."""
        reply = self.call.Hello(
            pb.HelloRequest(
                caller=self.caller,
                version=2,
                namespace="default",
                rank=rank,
                world=world,
            )
        )
        self.caller.boot = reply.boot

    def take(self, number: int, rank: int = 0, **more: Any) -> Any:
        """Of the first epoch."""
        return self.call.Take(
            pb.TakeRequest(
                caller=self.caller, rank=rank, epoch=1, number=number, **more
            )
        )


@pytest.fixture
def worker() -> Iterator[tuple[Servers, str]]:
    """Two shards and a worker."""
    with (
        contextlib.closing(Servers(2)) as servers,
        contextlib.closing(Workers(servers.addresses)) as workers,
    ):
        yield servers, workers.addresses[0]


CONFIG = persia.EmbeddingBagConfig(
    "t", DIM, feature_names=["user"], init=("constant", 1.0)
)


def plan_of(
    servers: Servers, client: Client, rows: bool = False
) -> tuple[persia.Store, Any]:
    """A store that looks, and the plan of one feature."""
    store = persia.Store(
        persia.optim.SGD(lr=1.0), servers=servers.text, read_only=True
    )
    table = pb.TableSpec(**engine_of(store).native(CONFIG))
    plan = pb.PlanRequest(caller=client.caller, tables=[table])
    plan.features.add(
        name="user", pooling=pb.POOLING_MEAN, trainable=True, rows=rows
    )
    return store, plan


def refusal(call: Any, *args: Any, **more: Any) -> tuple[str, str]:
    """The class and the text of the error of a call."""
    with pytest.raises(grpc.RpcError) as error:
        call(*args, **more)
    trailing = dict(error.value.trailing_metadata())  # type: ignore[attr-defined]
    return trailing["persia-error"], error.value.details()  # type: ignore[attr-defined]


def submit(client: Client, number: int, **more: Any) -> Any:
    """A batch of one feature."""
    request = pb.SubmitRequest(
        caller=client.caller, stream=77, number=number, **more
    )
    request.samples = SAMPLES
    request.features.add(name="user")
    request.ids.ids = IDS.tobytes()
    request.offsets.offsets = OFFSETS.tobytes()
    request.tensors.add(
        name="label", type="float32", shape=[3], data=bytes(12)
    )
    return client.call.Submit(request)


def beat(client: Client, **more: Any) -> Any:
    """The loader's sign of life."""
    return client.call.Heartbeat(
        pb.HeartbeatRequest(caller=client.caller, stream=77, **more)
    )


def test_a_stock_client_trains(worker: tuple[Servers, str]) -> None:
    """One batch from loader to rows, and the end of the pass."""
    servers, address = worker
    rank, loader = Client(address, 1), Client(address, 2)
    rank.hello(1)
    loader.hello(0)
    store, plan = plan_of(servers, rank)
    assert rank.call.Declare(plan).created
    assert not rank.call.Declare(plan).created
    assert submit(loader, 1).status == pb.SubmitReply.QUEUED
    assert not beat(loader, epoch=2).done  # ends the first
    got = rank.take(1)
    assert (got.status, got.stream, got.number) == (pb.TakeReply.BATCH, 77, 1)
    values = np.frombuffer(got.values[0].values, "<f4").reshape(SAMPLES, DIM)
    assert (values == 1).all()
    assert got.tensors[0].data == bytes(12)
    grads = np.arange(SAMPLES * DIM, dtype="<f4").reshape(SAMPLES, DIM)
    back = pb.ReturnRequest(caller=rank.caller, lease=got.lease, t=1)
    back.grads.add(no=0, dim=DIM, values=grads.tobytes())
    back.hypers.add(kind=pb.OPTIMIZER_SGD, lr=1.0, grad_scale=1.0)
    reply = rank.call.Return(back)
    assert (reply.status, reply.touched) == (pb.ReturnReply.DONE, 3)
    assert rank.call.Return(back).status == pb.ReturnReply.BEFORE
    assert list(beat(loader, epoch=2).done) == [1]
    assert not beat(loader, epoch=2, settled=1, leaves=True).done
    assert rank.take(2).status == pb.TakeReply.END
    stats = rank.call.Stats(pb.StatsRequest()).stats
    assert (stats.trained, stats.queued, stats.leased) == (1, 0, 0)
    store.add_table(CONFIG)
    rows = store.rows("t", torch.tensor([5, 6, 9])).numpy()
    assert (rows == 1 - grads).all()  # twice a half for the one that is twice


def test_what_a_rank_is_said_to_have(worker: tuple[Servers, str]) -> None:
    """At the end of an epoch a batch that it has not, or that its process
    before has, is not had: the answer was lost, or gradients wait."""
    servers, address = worker
    rank, loader = Client(address, 1), Client(address, 2)
    rank.hello(1)
    loader.hello(0)
    _, plan = plan_of(servers, rank)
    rank.call.Declare(plan)
    submit(loader, 1)
    beat(loader, epoch=2, ends=[1])

    def had(one: Client, number: int, **more: Any) -> int:
        """The batches, as bits."""
        got = one.take(number, **more)
        assert got.status == pb.TakeReply.END
        (loader,) = got.loaders
        assert (loader.settled, loader.last) == (0, 1)
        return int.from_bytes(loader.window, "little")

    got = rank.take(1)
    held = [pb.BatchName(stream=77, number=1)]
    assert had(rank, 2) == 0
    assert had(rank, 3, held=held) == 1
    back = pb.ReturnRequest(
        caller=rank.caller, lease=got.lease, t=1, parts=2, group=5
    )
    back.grads.add(no=0, dim=DIM, values=bytes(4 * SAMPLES * DIM))
    back.hypers.add(kind=pb.OPTIMIZER_SGD, lr=1.0, grad_scale=1.0)
    waits = rank.call.Return.future(back)  # for another batch
    other = Client(address, 3)  # another process of the rank
    other.hello(1)
    other.call.Declare(plan_of(servers, other)[1])
    assert had(other, 1) == 0
    waits.cancel()


def test_a_stock_client_takes_rows(worker: tuple[Servers, str]) -> None:
    """Distinct rows, the places of the ids, sums, and gradients by row."""
    servers, address = worker
    rank, loader = Client(address, 1), Client(address, 2)
    rank.hello(1)
    loader.hello(0)
    store, plan = plan_of(servers, rank, rows=True)
    rank.call.Declare(plan)
    submit(loader, 1)
    got = rank.take(1)
    assert not got.values
    places = np.frombuffer(got.ids.places, "<u4")
    assert sorted(set(places)) == [0, 1, 2]
    assert places[1] == places[2]  # equal ids
    assert (np.frombuffer(got.offsets.offsets, "<u4") == OFFSETS).all()
    rows = np.frombuffer(got.rows[0].values, "<f4").reshape(3, DIM)
    assert (rows == 1).all()
    grads = np.ones((1, DIM), "<f4")
    back = pb.ReturnRequest(caller=rank.caller, lease=got.lease, t=1)
    only = np.array([places[1]], "<u4")  # of id 6 alone
    back.rows.add(no=0, dim=DIM, values=grads.tobytes(), rows=only.tobytes())
    sums = rank.call.Sums(back)
    assert sums.finite
    assert not sums.gone
    assert np.frombuffer(sums.tables[0].ids, "<u8") == [6]
    back.hypers.add(kind=pb.OPTIMIZER_SGD, lr=1.0, grad_scale=1.0)
    assert rank.call.Return(back).status == pb.ReturnReply.DONE
    store.add_table(CONFIG)
    found = store.rows("t", torch.tensor([5, 6, 9]))[:, 0]
    assert found.tolist() == [1, 0, 1]


def test_batches_by_place(worker: tuple[Servers, str]) -> None:
    """Each of two ranks gets the places that are its own, in order."""
    servers, address = worker
    ranks = [Client(address, 1), Client(address, 2)]
    loader = Client(address, 3)
    for i, rank in enumerate(ranks):
        rank.hello(2, i)
    loader.hello(0)
    _, plan = plan_of(servers, ranks[0])
    ranks[0].call.Declare(plan)
    for number in (2, 1, 4):  # place 3 comes later
        submit(loader, number, place=number)
    got = [rank.take(1, i, place=i + 1) for i, rank in enumerate(ranks)]
    assert [one.number for one in got] == [1, 2]
    looked = ranks[0].take(2, 0, place=3, look=True)
    assert looked.status == pb.TakeReply.EMPTY
    submit(loader, 3, place=3)
    beat(loader, epoch=2)
    assert ranks[0].take(3, 0, place=3).number == 3
    skip = pb.ReturnRequest(
        caller=ranks[1].caller,
        rank=1,
        lease=got[1].lease,
        reason=pb.ReturnRequest.SKIPPED,
    )
    assert ranks[1].call.Return(skip).status == pb.ReturnReply.DONE
    other = Client(address, 4)  # another process of rank 1
    other.hello(2, 1)
    assert other.take(1, 1, place=2).status == pb.TakeReply.DONE
    assert other.take(2, 1, place=4).number == 4
    assert other.take(3, 1, place=6).status == pb.TakeReply.END


def test_batches_of_other_ranks_are_not_waited_for(
    worker: tuple[Servers, str],
) -> None:
    """A rank that has had its places of an epoch is at the end of it, also
    while those of a slower one are in the queue: their steps may wait for it
    to leave."""
    servers, address = worker
    ranks = [Client(address, 1), Client(address, 2)]
    loader = Client(address, 3)
    for i, rank in enumerate(ranks):
        rank.hello(2, i)
    loader.hello(0)
    ranks[0].call.Declare(plan_of(servers, ranks[0])[1])
    for number in range(1, 5):
        submit(loader, number, place=number)
    beat(loader, epoch=2, ends=[4])
    got = [ranks[0].take(i + 1, 0, place=2 * i + 1) for i in range(2)]
    assert [one.number for one in got] == [1, 3]
    held = [pb.BatchName(stream=77, number=n) for n in (1, 3)]
    end = ranks[0].take(3, 0, place=5, held=held)
    assert end.status == pb.TakeReply.END
    (part,) = end.loaders
    assert (part.settled, part.last) == (0, 4)
    assert int.from_bytes(part.window, "little") == 0b1111
    assert ranks[1].take(1, 1, place=2).number == 2


def test_a_copy_that_its_rank_passed_over() -> None:
    """Another worker got the batch, too, and its rank had it there: it is no
    batch without an update."""
    with (
        contextlib.closing(Servers(2)) as servers,
        contextlib.closing(Workers(servers.addresses, 2)) as workers,
    ):
        address = workers.addresses[0]
        rank, loader = Client(address, 1), Client(address, 2)
        there = Client(workers.addresses[1], 1)
        again = Client(workers.addresses[1], 2)
        for one in rank, there:
            one.hello(2)
            one.call.Declare(plan_of(servers, one)[1])
        for one in loader, again:
            one.hello(0)
        submit(loader, 1, place=1)
        submit(loader, 3, place=3)
        submit(again, 1, place=1, attempt=2)
        got = there.take(1, place=1)
        back = pb.ReturnRequest(caller=there.caller, stream=77, number=1)
        back.lease, back.reason = got.lease, pb.ReturnRequest.SKIPPED
        assert there.call.Return(back).status == pb.ReturnReply.DONE
        assert rank.take(2, place=3).number == 3
        wait_for(lambda: workers.stats("had") == 1)
        assert not beat(loader).failed
        assert workers.stats("failed") == workers.stats("given_up") == 0


def test_places_that_cannot_be(worker: tuple[Servers, str]) -> None:
    """Errors say what is missing."""
    servers, address = worker
    rank, loader = Client(address, 1), Client(address, 2)
    rank.hello(1)
    loader.hello(0)
    _, plan = plan_of(servers, rank)
    rank.call.Declare(plan)
    name, text = refusal(submit, loader, 1, place=2)
    assert (name, "place" in text) == ("ProtocolError", True)
    submit(loader, 1)  # without its place
    name, text = refusal(rank.take, 1, place=1)
    assert (name, "place" in text) == ("InvalidArgument", True)
    with contextlib.closing(Workers(servers.addresses, loaders=2)) as two:
        rank = Client(two.addresses[0], 1)
        rank.hello(1)
        rank.call.Declare(plan_of(servers, rank)[1])
        name, text = refusal(rank.take, 1, place=1)
        assert (name, "--loaders 1" in text) == ("InvalidArgument", True)


def test_wrong_requests_have_names(worker: tuple[Servers, str]) -> None:
    """Statuses with a class of persia.errors."""
    _, address = worker
    client = Client(address, 1)
    take = pb.TakeRequest(epoch=1)
    _, text = refusal(client.call.Take, take)
    assert "number: is 0" in text
    take.number = 1
    name, _ = refusal(client.call.Take, take)
    assert name == "StaleLineage"
    back = pb.ReturnRequest(lease=5)
    assert client.call.Return(back).status == pb.ReturnReply.GONE
