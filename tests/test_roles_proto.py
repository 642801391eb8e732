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
from tests.protobuf import stubs
from tests.remote import Servers
from tests.roles import Workers

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

    def hello(self, world: int) -> None:
        """World 0: a data loader."""
        reply = self.call.Hello(
            pb.HelloRequest(
                caller=self.caller,
                version=2,
                namespace="default",
                world=world,
            )
        )
        self.caller.boot = reply.boot


@pytest.fixture
def worker() -> Iterator[tuple[Servers, str]]:
    """Two shards and a worker."""
    with (
        contextlib.closing(Servers(2)) as servers,
        contextlib.closing(Workers(servers.addresses)) as workers,
    ):
        yield servers, workers.addresses[0]


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
    store = persia.Store(
        persia.optim.SGD(lr=1.0), servers=servers.text, read_only=True
    )
    config = persia.EmbeddingBagConfig(
        "t", DIM, feature_names=["user"], init=("constant", 1.0)
    )
    table = pb.TableSpec(**store._engine.native(config))
    feature = {"name": "user", "pooling": pb.POOLING_MEAN, "trainable": True}
    plan = pb.PlanRequest(caller=rank.caller, tables=[table])
    plan.features.add(**feature)
    assert rank.call.Declare(plan).created
    assert not rank.call.Declare(plan).created
    assert submit(loader, 1).status == pb.SubmitReply.QUEUED
    assert not beat(loader, epoch=2).done  # ends the first
    take = pb.TakeRequest(caller=rank.caller, number=1)
    setattr(take, "pass", 1)
    got = rank.call.Take(take)
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
    take.number = 2
    assert rank.call.Take(take).status == pb.TakeReply.END
    stats = rank.call.Stats(pb.StatsRequest()).stats
    assert (stats.trained, stats.queued, stats.leased) == (1, 0, 0)
    store.add_table(config)
    rows = store.rows("t", torch.tensor([5, 6, 9])).numpy()
    assert (rows == 1 - grads).all()  # twice a half for the one that is twice


def test_wrong_requests_have_names(worker: tuple[Servers, str]) -> None:
    """Statuses with a class of persia.errors."""
    _, address = worker
    client = Client(address, 1)
    take = pb.TakeRequest(number=1)
    with pytest.raises(grpc.RpcError) as error:
        client.call.Take(take)  # no pass
    assert "pass: is 0" in error.value.details()  # type: ignore[attr-defined]
    setattr(take, "pass", 1)
    with pytest.raises(grpc.RpcError) as error:
        client.call.Take(take)
    trailing = dict(error.value.trailing_metadata())  # type: ignore[attr-defined]
    assert trailing["persia-error"] == "StaleLineage"
    back = pb.ReturnRequest(lease=5)
    assert client.call.Return(back).status == pb.ReturnReply.GONE
