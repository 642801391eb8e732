"""A rank with embedding workers that answer as a script says, in stock
gRPC."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import grpc
import pytest

import persia
from persia import _core, errors
from tests.protobuf import stubs
from tests.remote import Servers
from tests.roles import servers

__all__ = ["servers"]

if not _core.GRPC[0].isdigit():
    pytest.skip("built without gRPC", allow_module_level=True)

pb, pb_grpc = stubs()
pytestmark = pytest.mark.timeout(60)

STREAM, JOB = 7, 5


def reply(status: str, **more: Any) -> Any:
    """To a Take in the first epoch."""
    value = pb.TakeReply.Status.Value(status)
    return pb.TakeReply(status=value, epoch=1, job=JOB, first=1, **more)


def end(settled: int, last: int) -> Any:
    """That it has, of a loader that sent so many batches."""
    part = pb.LoaderPart(stream=STREAM, settled=settled, last=last)
    return reply("END", loaders=[part])


class Scripted(pb_grpc.EmbeddingWorkerServicer):  # type: ignore[name-defined,misc]
    """Answers each Take by a function of how many it had before."""

    def __init__(self, boot: int, answer: Callable[[int], Any]) -> None:
        self.boot, self.answer, self.takes = boot, answer, 0

    def Hello(self, request: Any, context: Any) -> Any:
        return pb.HelloReply(
            version=2,
            version_min=1,
            namespace="default",
            shards=1,
            boot=self.boot,
            message_limit=1 << 20,
        )

    def Declare(self, request: Any, context: Any) -> Any:
        return pb.PlanReply(created=True)

    def Take(self, request: Any, context: Any) -> Any:
        self.takes += 1
        return self.answer(self.takes - 1)


@contextlib.contextmanager
def serving(*workers: Scripted) -> Iterator[list[str]]:
    """Addresses of them."""
    addresses, running = [], []
    for worker in workers:
        server = grpc.server(ThreadPoolExecutor(4))
        pb_grpc.add_EmbeddingWorkerServicer_to_server(worker, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        running.append(server)
        addresses.append(f"127.0.0.1:{port}")
    try:
        yield addresses
    finally:
        for server in running:
            server.stop(None)


def epoch(servers: Servers, workers: list[str]) -> int:
    """Batches of one."""
    store = persia.Store(persia.optim.SGD(lr=1.0), servers=servers.text)
    with store:
        model = persia.EmbeddingBagCollection(
            store=store, tables=[persia.EmbeddingBagConfig("t", 4, ["user"])]
        )
        stream = persia.Stream(workers, timeout=3, move_after=1)
        return sum(1 for _ in persia.DataLoader(stream, model, 1))


def test_one_that_had_ended_is_asked_again(servers: Servers) -> None:
    """A batch was missing, and is done at a worker that had ended the epoch;
    the other one has nothing, and knows of no end."""
    idle = Scripted(11, lambda _: reply("IDLE"))
    ended = Scripted(12, lambda n: end(min(n, 1), 1))
    with serving(idle, ended) as addresses:
        assert epoch(servers, addresses) == 0
    assert ended.takes > 1


def test_a_batch_that_stays_missing_is_an_error(servers: Servers) -> None:
    """After the timeout, whatever else waits."""
    idle = Scripted(11, lambda _: reply("IDLE"))
    ended = Scripted(12, lambda _: end(0, 1))
    with (
        serving(idle, ended) as addresses,
        pytest.raises(errors.Unavailable, match="batch 1 "),
    ):
        epoch(servers, addresses)


def test_workers_that_hang_are_greeted_side_by_side() -> None:
    """Each answers once all are being greeted. One after the other it would be
    one of them, and another one that is asked why it does not answer."""
    lock, met = threading.Lock(), threading.Event()
    inside: Counter[int] = Counter()

    def hello(
        number: int, request: bytes, context: grpc.ServicerContext
    ) -> bytes:
        with lock:
            inside[number] += 1
            if len(+inside) == 3:
                met.set()
        while context.is_active() and not met.wait(0.01):
            pass
        with lock:
            inside[number] -= 1
        context.abort(grpc.StatusCode.UNAVAILABLE, "not now")
        raise AssertionError

    servers, addresses = [], []
    for i in range(3):
        server = grpc.server(ThreadPoolExecutor(4))
        handler = grpc.unary_unary_rpc_method_handler(partial(hello, i))
        server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(
                    "persia.v1.EmbeddingWorker", {"Hello": handler}
                ),
            )
        )
        addresses.append(
            f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        )
        server.start()
        servers.append(server)
    with pytest.raises(errors.Unavailable):
        persia.data.Sender(",".join(addresses), timeout=6.0)
    for server in servers:
        server.stop(None).wait()
    assert met.is_set()
