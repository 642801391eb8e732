"""A real server process and a client that stock protoc and grpcio make of
persia.proto: what the file says is what happens. And bytes that are no
messages: they harm nobody."""

from __future__ import annotations

import random
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from typing import Any

import grpc
import numpy as np
import pytest

from persia import _core
from tests.protobuf import stubs
from tests.system.test_serve import Serving, health, serving

if not _core.GRPC[0].isdigit():
    pytest.skip("built without gRPC", allow_module_level=True)

pb, pb_grpc = stubs()
SERVICE = pb.DESCRIPTOR.services_by_name["ParameterServer"]
METHODS = [method.name for method in SERVICE.methods]
SERVING = 1  # of grpc.health.v1
DIM = 6
ROW_NONE = 2**32 - 1
DTYPES = {pb.DTYPE_FP32: "<f4", pb.DTYPE_FP16: "<f2", pb.DTYPE_BF16: "<u2"}
LIMIT = 2 << 20  # bytes of a message
Array = np.ndarray[Any, Any]


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    """One process for all tests here; it lives to the end."""
    flags = ["--namespace", "space", "--message-limit", str(LIMIT)]
    with serving(*flags) as process:
        yield process
        assert process.process.poll() is None
        assert health(process.address) == SERVING
        process.stop()


class Client:
    """Stubs, one stream of updates (0: a new one), and a table of its own."""

    def __init__(
        self, address: str, table: str, stream: int = 0, **spec: Any
    ) -> None:
        self.channel = grpc.insecure_channel(
            address, options=[("grpc.max_send_message_length", -1)]
        )
        self.call: Any = pb_grpc.ParameterServerStub(self.channel)
        self.caller = pb.Caller(client=random.getrandbits(64))
        self.stream = stream or random.getrandbits(63) + 1
        # A look, then the claim: the stream may have had another owner.
        looked = self.call.Hello(self.hello_request(), timeout=30)
        self.caller.incarnation = looked.ledger.incarnation + 1
        self.hello = self.call.Hello(self.hello_request(), timeout=30)
        self.number = self.hello.ledger.watermark
        self.caller.boot = self.hello.boot
        self.caller.lineage = self.hello.lineage
        self.spec = pb.TableSpec(
            name=table,
            dim=DIM,
            seed=3,
            optimizer=pb.OPTIMIZER_SGD,
            init=pb.TableSpec.INIT_UNIFORM,
            init_a=-1.0,
            init_b=1.0,
            admission=1.0,
            **spec,
        )
        self.table = self.declare().no

    def hello_request(self, **change: Any) -> Any:
        plain = {"version": 2, "namespace": "space"}
        plain |= {"rank": 0, "world": 1, "stream": self.stream}
        return pb.HelloRequest(caller=self.caller, **(plain | change))

    def declare(self) -> Any:
        request = pb.DeclareRequest(caller=self.caller, table=self.spec)
        return self.call.Declare(request, timeout=30)

    def pull_table(self, ids: Array, dtype: int = 0, **more: Any) -> Any:
        request = pb.PullRequest(caller=self.caller, dtype=dtype, **more)
        request.tables.add(no=self.table, ids=ids.astype("<u8").tobytes())
        reply = self.call.Pull(request, timeout=30)
        assert reply.dtype == dtype
        (table,) = reply.tables
        assert (table.no, table.dim) == (self.table, DIM)
        return table

    def pull(self, ids: Array, dtype: int = 0) -> Array:
        """fp32 [n, DIM]."""
        table = self.pull_table(ids, dtype)
        return from_wire(table.values, table.scales, dtype, len(ids))

    def push_request(
        self, ids: Array, grads: Array, dtype: int = 0, **more: Any
    ) -> Any:
        values, scales = to_wire(grads, dtype)
        self.number += 1
        request = pb.PushRequest(
            caller=self.caller,
            stream=self.stream,
            number=self.number,
            t=self.number,
            dtype=dtype,
        )
        request.tables.add(
            no=self.table,
            dim=DIM,
            ids=ids.astype("<u8").tobytes(),
            values=values,
            scales=scales,
            hyper=pb.Hyper(lr=0.5, grad_scale=1.0),
            **more,
        )
        return request

    def push(self, *args: Any, **more: Any) -> Any:
        return self.send(self.push_request(*args, **more))

    def send(self, request: Any) -> Any:
        return self.call.Push(request, timeout=30)


def from_wire(values: bytes, scales: bytes, dtype: int, n: int) -> Array:
    """What persia.proto says that they mean."""
    wire = np.frombuffer(values, DTYPES[dtype]).reshape(n, DIM)
    if dtype == pb.DTYPE_BF16:
        return (wire.astype("<u4") << 16).view("<f4")
    if dtype == pb.DTYPE_FP32:
        return wire
    return wire.astype("<f4") * np.frombuffer(scales, "<f4")[:, None]


def to_wire(rows: Array, dtype: int) -> tuple[bytes, bytes]:
    """The reverse; bf16 is cut off, for rows that need no rounding."""
    rows = rows.astype("<f4")
    if dtype == pb.DTYPE_FP32:
        return rows.tobytes(), b""
    if dtype == pb.DTYPE_BF16:
        return (rows.view("<u4") >> 16).astype("<u2").tobytes(), b""
    scales = np.maximum(abs(rows).max(axis=1), 1e-30) / 32768
    wire = (rows / scales[:, None]).astype("<f2")
    return wire.tobytes(), scales.astype("<f4").tobytes()


def refused(call: Callable[[], Any]) -> tuple[str, str, str]:
    """The status, the class of persia.errors and the text of a failure."""
    with pytest.raises(grpc.RpcError) as caught:
        call()
    error: Any = caught.value
    metadata = dict(error.trailing_metadata() or ())
    kind = str(metadata.get("persia-error", ""))
    return error.code().name, kind, error.details()


# ---- what persia.proto says ------------------------------------------------


def test_health(server: Serving) -> None:
    """grpc.health.v1, as orchestrators ask for it."""
    assert health(server.address) == SERVING


def test_hello(server: Serving) -> None:
    """The server tells who it is; who is at the wrong one is told so."""
    client = Client(server.address, "hello")
    hello = client.hello
    assert (hello.version_min, hello.version) == (2, 2)
    assert hello.namespace == "space"
    assert (hello.shard, hello.shards) == (0, 1)
    assert hello.boot and hello.lineage
    assert 0 < hello.message_limit <= LIMIT
    assert hello.ledger.stream == client.stream
    again = client.call.Hello(client.hello_request(), timeout=30)
    assert again.tables[client.table] == client.spec

    def ask(**change: Any) -> Callable[[], Any]:
        request = client.hello_request(**change)
        return lambda: client.call.Hello(request, timeout=30)

    _, kind, text = refused(ask(namespace="other"))
    assert kind == "SchemaMismatch" and "other" in text and "space" in text
    _, kind, text = refused(ask(version=99))
    assert kind == "SchemaMismatch" and "99" in text
    _, kind, text = refused(ask(version=99, version_min=3))
    assert kind == "SchemaMismatch" and "3 to 99" in text and "2 to 2" in text
    newer = client.hello_request(version=99, version_min=1, features=2**64 - 1)
    assert client.call.Hello(newer, timeout=30).boot == hello.boot
    client.caller.boot += 1
    _, kind, text = refused(lambda: client.pull(np.arange(3)))
    assert kind == "StaleLineage"


def test_declare(server: Serving) -> None:
    """Again is the same table; another spec is an error that names what."""
    client = Client(server.address, "declared")
    again = client.declare()
    assert (again.no, again.created) == (client.table, False)
    client.spec.dim = DIM + 1
    status, kind, text = refused(client.declare)
    assert status == "FAILED_PRECONDITION" and kind == "SchemaMismatch"
    assert "declared" in text and "dim" in text
    client.spec.dim = 0
    status, kind, text = refused(client.declare)
    assert status == "INVALID_ARGUMENT" and kind == "ProtocolError"
    assert "DeclareRequest.table.dim" in text


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_pull(server: Serving, dtype: int) -> None:
    """Rows that are not there read as initial values, and stay so."""
    client = Client(server.address, "pulled")
    ids = np.array([1, 2**64 - 1, 0, 1, 77], np.uint64)
    exact = client.pull(ids)
    assert (abs(exact) <= 1).all() and len(np.unique(exact)) == 4 * DIM
    assert (exact[0] == exact[3]).all()
    assert (client.pull(ids) == exact).all()
    got = client.pull(ids, dtype)
    assert np.allclose(got, exact, rtol=2**-8, atol=1e-4)
    table = client.pull_table(ids, dtype, want_rows=True)
    assert np.frombuffer(table.rows, "<u4").tolist() == [ROW_NONE] * 5
    assert client.pull(ids[:0], dtype).shape == (0, DIM)


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_push(server: Serving, dtype: int) -> None:
    """SGD: each row loses lr times its gradient; again is a duplicate."""
    client = Client(server.address, f"pushed {dtype}")
    ids = np.arange(100, dtype=np.uint64) * 12345
    expected = client.pull(ids)
    powers = 2.0 ** np.arange(-3, DIM - 3)  # no dtype rounds them
    for step in range(1, 4):
        grads = powers * (ids[:, None] % 3 + 1.0) * [-1, 1][step % 2]
        grads[ids % 3 == 2] = 0.75
        request = client.push_request(ids, grads, dtype)
        reply = client.send(request)
        assert reply.status == pb.PushReply.APPLIED
        assert reply.touched == 100
        assert reply.created == (100 if step == 1 else 0)
        got = from_wire(
            request.tables[0].values, request.tables[0].scales, dtype, 100
        )
        assert (got == grads).all()
        expected = expected - np.float32(0.5) * got
        assert (client.pull(ids) == expected).all()
        again = client.send(request)
        assert again.status == pb.PushReply.DUPLICATE
        assert (client.pull(ids) == expected).all()
    hello = client.call.Hello(client.hello_request(), timeout=30)
    assert hello.ledger.watermark == 3


def test_row_numbers_are_hints(server: Serving) -> None:
    """Right ones, those of other rows and nonsense give the same rows."""
    client = Client(server.address, "hinted")
    ids = np.arange(50, dtype=np.uint64)
    client.push(ids, np.ones((50, DIM)))
    expected = client.pull(ids)
    table = client.pull_table(ids, want_rows=True)
    rows = np.frombuffer(table.rows, "<u4")
    assert len(rows) == 50 and (rows != ROW_NONE).all()
    nonsense = np.random.default_rng(1).integers(0, 2**32, 50)
    for hints in rows, rows[::-1], nonsense, np.full(50, ROW_NONE):
        hints = hints.astype("<u4").tobytes()
        reply = client.push(ids, np.ones((50, DIM)), rows=hints)
        assert (reply.touched, reply.created) == (50, 0)
        expected = expected - np.float32(0.5)
        assert (client.pull(ids) == expected).all()


def test_numbers_out_of_order(server: Serving) -> None:
    """Each once, in any order; far ahead of the others: later."""
    client = Client(server.address, "ordered")
    ids = np.arange(3, dtype=np.uint64)
    start = client.pull(ids)
    request = client.push_request(ids, np.ones((3, DIM)))
    status = pb.PushReply.Status.Name
    answers = []
    for number in [3, 1, 3, 100_000, 2, 2, 1]:
        request.number = number
        answers.append(status(client.send(request).status))
    assert answers == [
        *("APPLIED", "APPLIED", "DUPLICATE", "RETRY_LATER"),
        *("APPLIED", "DUPLICATE", "DUPLICATE"),
    ]
    assert (client.pull(ids) == start - np.float32(1.5)).all()
    request.number = request.settled = 4
    _, kind, text = refused(lambda: client.send(request))
    assert kind == "ProtocolError" and "PushRequest.settled" in text


def test_many_send_one_update(server: Serving) -> None:
    """At the same time: it is applied once.  Copies that came while the first
    was under way get its answer, the others are duplicates."""
    client = Client(server.address, "raced")
    ids = np.arange(2000, dtype=np.uint64)
    start = client.pull(ids)
    requests = [client.push_request(ids, np.ones((2000, DIM)))] * 16
    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(client.send, requests))
    applied = {r.updates for r in replies if r.status == pb.PushReply.APPLIED}
    others = [r for r in replies if r.status != pb.PushReply.APPLIED]
    assert len(applied) == 1  # the same update of the shard in all answers
    assert all(r.status == pb.PushReply.DUPLICATE for r in others)
    assert (client.pull(ids) == start - np.float32(0.5)).all()


def test_a_gradient_that_is_not_finite(server: Serving) -> None:
    """The table's policy: the push fails, or its row is left out."""
    ids = np.arange(4, dtype=np.uint64)
    grads = np.ones((4, DIM))
    grads[2, 1] = np.nan
    client = Client(server.address, "raises")
    start = client.pull(ids)
    status, kind, text = refused(lambda: client.push(ids, grads))
    assert status == "INVALID_ARGUMENT" and kind == "NonFiniteGradient"
    assert "raises" in text
    assert (client.pull(ids) == start).all()
    client = Client(
        server.address, "skips", nonfinite=pb.TableSpec.NONFINITE_SKIP
    )
    for dtype in DTYPES:
        assert client.push(ids, grads, dtype).nonfinite == 1
    expected = client.pull(ids)
    start = client.pull(np.array([2]))
    assert (expected[2] == start).all() and np.isfinite(expected).all()


def test_whole_rows(server: Serving) -> None:
    """PutRows and GetRows, with optimizer state; clear."""
    client = Client(server.address, "whole", momentum=True)
    ids = np.arange(1, 4, dtype="<u8")
    vectors = np.arange(3 * DIM, dtype="<f4").reshape(3, DIM)
    rows = pb.Rows(
        caller=client.caller,
        no=client.table,
        ids=ids.tobytes(),
        dim=DIM,
        state_floats=DIM,
        vectors=vectors.tobytes(),
        state=(-vectors).tobytes(),
    )
    client.call.PutRows(rows, timeout=30)
    assert (client.pull(ids) == vectors).all()
    asked = pb.Rows(caller=client.caller, no=client.table)
    asked.ids = np.array([2, 9], "<u8").tobytes()
    got = client.call.GetRows(asked, timeout=30)
    assert (got.dim, got.state_floats) == (DIM, DIM)
    assert got.found == b"\1\0"
    assert got.vectors[: 4 * DIM] == vectors[1].tobytes()
    assert got.state[: 4 * DIM] == (-vectors[1]).tobytes()
    empty = pb.Rows(caller=client.caller, no=client.table, clear=True)
    client.call.PutRows(empty, timeout=30)
    assert client.call.GetRows(asked, timeout=30).found == b"\0\0"


def test_stats(server: Serving) -> None:
    """One entry a table, in the order of their numbers."""
    client = Client(server.address, "counted")
    client.push(np.arange(10), np.ones((10, DIM)))
    client.pull(np.arange(15))
    stats = client.call.Stats(
        pb.StatsRequest(caller=client.caller), timeout=30
    )
    assert stats.boot == client.hello.boot
    assert stats.tables[client.table] == client.spec
    table = stats.stats[client.table]
    assert (table.rows, table.created, table.pushes) == (10, 10, 1)
    assert (table.pulled, table.missed) == (15, 5)
    assert stats.memory_used > 0 and stats.uptime_ns > 0


def test_what_this_server_does_not_do_is_an_error(server: Serving) -> None:
    """It was given no folder of checkpoints; there is no table 4000."""
    client = Client(server.address, "refused")
    names = {"root": "job", "folder": "step-1", "proof": "x"}
    for call, asked in [
        (client.call.Snapshot, pb.SnapshotRequest(**names)),
        (client.call.Restore, pb.RestoreRequest(lineage=5, **names)),
    ]:
        asked.caller.CopyFrom(client.caller)
        _, kind, text = refused(lambda c=call, a=asked: c(a, timeout=30))
        assert kind and "checkpoint" in text
    client.table = 4000
    for attempt in (
        lambda: client.pull(np.arange(3)),
        lambda: client.push(np.arange(3), np.ones((3, DIM))),
    ):
        _, kind, text = refused(attempt)
        assert kind == "InvalidArgument" and "4000" in text


def test_leave(server: Serving) -> None:
    """A rank that never joined may leave; nobody waits for it."""
    client = Client(server.address, "left")
    request = pb.LeaveRequest(caller=client.caller, rank=0, world=1)
    hello = client.call.Hello(client.hello_request(), timeout=30)
    assert client.call.Leave(request, timeout=30).step == hello.t


# ---- what is no message ----------------------------------------------------


def raw(channel: grpc.Channel, method: str, data: bytes) -> str:
    """The status of a request of arbitrary bytes."""
    call = channel.unary_unary(f"/{SERVICE.full_name}/{method}")
    try:
        call(data, timeout=30)
    except grpc.RpcError as error:
        return str(error.code().name)
    return "OK"


def samples(client: Client) -> dict[str, bytes]:
    """A good request of each method, none of which changes rows."""
    ids = np.arange(9, dtype="<u8")
    pull = pb.PullRequest(caller=client.caller, want_rows=True)
    pull.tables.add(no=client.table, ids=ids.tobytes())
    push = client.push_request(ids, np.ones((9, DIM)), pb.DTYPE_FP16)
    push.tables[0].no = 4095
    rows = pb.Rows(caller=client.caller, no=4095, ids=ids.tobytes(), dim=1)
    rows.vectors = bytes(36)
    made = {
        "Hello": client.hello_request(),
        "Declare": pb.DeclareRequest(caller=client.caller, table=client.spec),
        "Pull": pull,
        "Push": push,
        "Leave": pb.LeaveRequest(caller=client.caller, rank=3, world=9),
        "GetRows": rows,
        "PutRows": rows,
        "Snapshot": pb.SnapshotRequest(caller=client.caller, root="r"),
        "Restore": pb.RestoreRequest(caller=client.caller, root="r"),
        "Stats": pb.StatsRequest(caller=client.caller),
        "Move": pb.MoveRequest(
            caller=client.caller, verb=pb.MoveRequest.STATUS
        ),
    }
    part = pb.Part(method=METHODS.index("Pull"))
    part.message = pull.SerializeToString()
    made["Many"] = pb.ManyRequest(parts=[part])
    made["Changes"] = pb.ChangesRequest(
        caller=client.caller, no=client.table, reader=7
    )
    assert list(made) == METHODS
    return {name: m.SerializeToString() for name, m in made.items()}


def still_the_same(server: Serving, client: Client, before: Array) -> None:
    """The process lives, serves and has the rows that it had."""
    assert server.process.poll() is None
    assert health(server.address) == SERVING
    assert (client.pull(np.arange(20)) == before).all()


def test_altered_requests(server: Serving) -> None:
    """Cut short, altered or random: an error, and life goes on."""
    client = Client(server.address, "altered")
    client.push(np.arange(20), np.ones((20, DIM)))
    before = client.pull(np.arange(20))
    random_ = random.Random(5)
    seen: set[str] = set()
    for method, good in samples(client).items():
        for _ in range(40):
            cut = good[: random_.randrange(len(good))]
            changed = bytearray(good)
            for _ in range(random_.randrange(1, 4)):
                changed[random_.randrange(len(good))] = random_.randrange(256)
            noise = random_.randbytes(random_.choice([0, 1, 7, 500, 20_000]))
            # PutRows with `clear` and a table's number would be obeyed.
            for data in (noise,) if method == "PutRows" else (cut, changed):
                seen.add(raw(client.channel, method, bytes(data)))
            seen.add(raw(client.channel, method, noise))
    assert "INVALID_ARGUMENT" in seen
    assert not seen & {"UNAVAILABLE", "INTERNAL", "UNKNOWN"}
    assert "DEADLINE_EXCEEDED" not in seen
    still_the_same(server, client, before)


def test_requests_that_are_too_large_or_unknown(server: Serving) -> None:
    """They have the statuses that gRPC has for them."""
    client = Client(server.address, "large")
    before = client.pull(np.arange(20))
    huge = bytes(LIMIT + 1)
    assert raw(client.channel, "Pull", huge) == "RESOURCE_EXHAUSTED"
    assert raw(client.channel, "NoSuchMethod", b"") == "UNIMPLEMENTED"
    still_the_same(server, client, before)


def frame(kind: int, flags: int, stream: int, data: bytes) -> bytes:
    """An HTTP/2 frame."""
    head = struct.pack(">I", len(data))[1:] + bytes([kind, flags])
    return head + struct.pack(">I", stream) + data


def opening(method: str) -> bytes:
    """The start of an HTTP/2 connection with one gRPC call of a method,
    up to its message."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": f"/{SERVICE.full_name}/{method}",
        ":authority": "localhost",
        "content-type": "application/grpc",
        "te": "trailers",
    }
    block = b"".join(
        b"\0" + bytes([len(k)]) + k.encode() + bytes([len(v)]) + v.encode()
        for k, v in fields.items()
    )
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, b"")
    return preface + frame(1, 4, 1, block)


def framed(message: bytes) -> bytes:
    """As gRPC sends it."""
    return b"\0" + struct.pack(">I", len(message)) + message


def connect(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=30)


def beginnings(good: bytes, random_: random.Random) -> list[bytes]:
    """What may come over a connection and is no Pull, or only a part of this
    one."""
    message = framed(good)
    call = opening("Pull")
    return [
        b"",
        b"\0",
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        *(random_.randbytes(n) for n in (1, 100, 10_000, 200_000)),
        call[:10],
        call[:24],
        call[: len(call) // 2],
        call,
        call + random_.randbytes(5000),
        call + frame(0, 0, 1, message[:3]),
        call + frame(0, 0, 1, message[: len(message) // 2]),
        # A message whose end is missing; one that is longer than it says.
        call + frame(0, 1, 1, message[:-1]),
        call + frame(0, 1, 1, message + b"more"),
        # 4 GiB to come; compressed by nobody knows what.
        call + frame(0, 0, 1, b"\0\xff\xff\xff\xff" + good),
        call + frame(0, 1, 1, b"\1" + message[1:]),
        call + frame(3, 0, 1, struct.pack(">I", 8)),
    ]


def test_bytes_on_the_port(server: Serving) -> None:
    """Noise, HTTP, half connections and half messages; while they stay
    open, others are served."""
    client = Client(server.address, "noisy")
    client.push(np.arange(20), np.ones((20, DIM)))
    before = client.pull(np.arange(20))
    random_ = random.Random(6)
    good = samples(client)["Pull"]
    message = framed(good)
    call = opening("Pull")
    sockets = []
    try:
        for data in beginnings(good, random_):
            made = connect(server.address)
            sockets.append(made)
            try:
                made.sendall(data)
            except OSError:  # it was closed: also fine
                continue
        still_the_same(server, client, before)
    finally:
        for made in sockets:
            made.close()
    still_the_same(server, client, before)
    # The frames above are right: with the whole message there is an answer.
    with closing(connect(server.address)) as made:
        made.sendall(call + frame(0, 1, 1, message))
        answer = b""
        while before.tobytes()[: 9 * DIM * 4] not in answer:
            piece = made.recv(65536)
            assert piece, answer
            answer += piece


def test_connections_that_say_nothing_do_not_delay_the_end() -> None:
    """Only requests that the server has admitted have its grace: half
    messages, idle connections and answers that their clients leave unread
    end at once, before rows are saved."""
    sockets = []
    with serving("--grace", "3600", "--namespace", "space") as other:
        client = Client(other.address, "quiet")
        client.push(np.arange(20), np.ones((20, DIM)))
        good = samples(client)["Pull"]
        whole = opening("Pull") + frame(0, 1, 1, framed(good))
        try:
            for data in [*beginnings(good, random.Random(7)), whole]:
                made = connect(other.address)
                sockets.append(made)
                with suppress(OSError):  # it was closed: also fine
                    made.sendall(data)
            time.sleep(0.5)
            other.process.send_signal(signal.SIGTERM)
            other.process.communicate(timeout=60)
        finally:
            for made in sockets:
                made.close()
        assert other.process.returncode == 0
