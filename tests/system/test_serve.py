"""``persia serve ps`` as a process: its life, health, metrics, rows over a
restart, seen by clients that stock gRPC tools make."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.parse
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

import persia
from persia import _core, errors
from persia.distributed import certs
from persia.distributed.security import Security
from tests.protobuf import stubs
from tests.system.processes import environment, freeze, wait_until

if not _core.GRPC[0].isdigit():
    pytest.skip("built without gRPC", allow_module_level=True)

IDS = np.arange(1, 101, dtype="<u8")


class Serving:
    """A server process."""

    def __init__(self, *flags: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "persia", "serve", "ps", *flags],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.said: list[str] = []
        self.address = self.metrics = ""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.append(line.rstrip())
            if found := re.match(r"metrics on (http://\S+)", line):
                self.metrics = found[1]
            if found := re.match(r"serving shard.* of \d+ on (\S+)", line):
                self.address = found[1]
                break

    def stop(self, number: int = signal.SIGTERM) -> str:
        """What it said from now on; its exit status must be 0."""
        self.process.send_signal(number)
        output, messages = self.process.communicate(timeout=60)
        assert self.process.returncode == 0, messages
        return output


@contextmanager
def serving(*flags: str) -> Iterator[Serving]:
    made = Serving("--port", "0", *flags)
    try:
        assert made.address, made.process.communicate(timeout=60)
        yield made
    finally:
        made.process.kill()
        made.process.communicate(timeout=60)


class Client:
    """The generated client, with a table."""

    def __init__(self, address: str) -> None:
        self.pb: ModuleType
        self.pb, services = stubs()
        self.channel = grpc.insecure_channel(address)
        self.call: Any = services.ParameterServerStub(self.channel)
        self.caller = self.pb.Caller(client=7, incarnation=1)
        self.table = 0

    def hello(self, stream: int = 0) -> Any:
        return self.call.Hello(
            self.pb.HelloRequest(
                caller=self.caller,
                version=2,
                namespace="default",
                world=1,
                stream=stream,
            ),
            timeout=30,
            wait_for_ready=True,
        )

    def declare(self) -> Any:
        spec = self.pb.TableSpec(
            name="user",
            dim=4,
            optimizer=self.pb.OPTIMIZER_SGD,
            init=self.pb.TableSpec.INIT_CONSTANT,
            init_a=1.0,
            admission=1.0,
        )
        request = self.pb.DeclareRequest(caller=self.caller, table=spec)
        return self.call.Declare(request, timeout=30)

    def pull(self, ids: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        request = self.pb.PullRequest(caller=self.caller)
        request.tables.add(no=0, ids=ids.tobytes())
        (table,) = self.call.Pull(request, timeout=30).tables
        return np.frombuffer(table.values, "<f4").reshape(-1, 4)

    def push(self, ids: np.ndarray[Any, Any], number: int) -> Any:
        """SGD with lr 1 and gradients of -1: each row grows by 1."""
        request = self.pb.PushRequest(
            caller=self.caller, stream=77, number=number, t=number, parts=1
        )
        table = request.tables.add(
            no=0,
            dim=4,
            ids=ids.tobytes(),
            values=np.full((len(ids), 4), -1, "<f4").tobytes(),
        )
        table.hyper.lr = table.hyper.grad_scale = 1.0
        return self.call.Push(request, timeout=30)


def health(address: str) -> int:
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service="")
        answer = stub.Check(request, timeout=30, wait_for_ready=True)
    return int(answer.status)


def metrics(url: str) -> dict[str, float]:
    with urllib.request.urlopen(url, timeout=30) as page:
        families = text_string_to_metric_families(page.read().decode())
    return {
        sample.name + "".join(f"/{v}" for v in sample.labels.values()): value
        for family in families
        for sample in family.samples
        for value in [sample.value]
    }


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_life(number: int) -> None:
    with serving("--shard", "1/3") as server:
        assert server.said == [f"serving shard 1 of 3 on {server.address}"]
        assert health(server.address) == health_pb2.HealthCheckResponse.SERVING
        maps = Path(f"/proc/{server.process.pid}/maps").read_text()
        assert "libpersia.so" in maps
        assert "torch" not in maps  # it would take seconds to start
        hello = Client(server.address).hello()
        assert (hello.shard, hello.shards) == (1, 3)
        assert server.stop(number) == "stopping\n"
        port = int(server.address.rpartition(":")[2])
        with socket.socket() as free:
            free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            free.bind(("127.0.0.1", port))


def test_a_flood_of_connections() -> None:
    """Who is connected works on; who comes beyond the limit is closed, and
    may come when others have gone."""
    with (
        serving("--connections", "20", "--metrics-port", "0") as server,
        ExitStack() as stack,
    ):
        client = Client(server.address)
        client.hello()
        host, _, port = server.address.rpartition(":")
        flood = [
            stack.enter_context(socket.create_connection((host, int(port))))
            for _ in range(300)
        ]

        def flood_is_refused() -> bool:
            found = metrics(server.metrics)
            refused = found["persia_connections_refused_total"]
            return refused > 200 and found["persia_connections"] <= 20

        wait_until(flood_is_refused, 60)
        files = f"/proc/{server.process.pid}/fd"
        wait_until(lambda: len(os.listdir(files)) < 100)
        client.declare()  # over its first connection
        for one in flood:
            one.close()
        assert health(server.address) == health_pb2.HealthCheckResponse.SERVING
        server.stop()


@contextmanager
def stalled(address: str, path: str, n: int) -> Iterator[list[Any]]:
    """Calls that send nothing until the end, over a connection of their own;
    as many at once as the server takes of one, the others follow."""
    end = threading.Event()

    def nothing() -> Iterator[bytes]:
        end.wait()
        yield from ()

    def same(message: bytes) -> bytes:
        return message

    options = [("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(address, options) as channel:
        grpc.channel_ready_future(channel).result(30)
        call = channel.stream_unary(path, same, same)
        try:
            yield [call.future(nothing()) for _ in range(n)]
        finally:
            end.set()


def test_calls_that_send_nothing() -> None:
    """They may keep a full server waiting, but not for ever."""
    with serving("--calls", "4") as server, ExitStack() as stack:
        store = persia.Store(
            persia.optim.SGD(lr=1.0), servers=server.address, timeout=60.0
        )
        stack.callback(store.close)
        config = persia.EmbeddingBagConfig(
            "t", embedding_dim=4, feature_names=["f"], init=0.0
        )
        model = persia.EmbeddingBagCollection(store=store, tables=[config])
        batch = persia.Batch(
            None, persia.JaggedBatch(["f"], torch.tensor([7]))
        )
        path = "/persia.v1.ParameterServer/Stats"
        calls = stack.enter_context(stalled(server.address, path, 44))
        other = Client(server.address)
        with pytest.raises(grpc.RpcError) as timeout:  # all slots are taken
            other.call.Stats(other.pb.StatsRequest(), timeout=0.5)
        assert timeout.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        for one in persia.DataLoader([batch], model):
            (-model(one.ids).values().sum()).backward()
        assert store.rows("t", [7]).tolist() == [[1.0] * 4]
        wait_until(lambda: any(call.done() for call in calls))
        for call in (call for call in calls if call.done()):
            assert call.code() == grpc.StatusCode.UNAVAILABLE
            assert "did not arrive within 5 s" in call.details()


def test_health_checks_that_send_nothing() -> None:
    path = "/grpc.health.v1.Health/Check"
    with serving() as server, stalled(server.address, path, 32) as calls:
        assert health(server.address) == health_pb2.HealthCheckResponse.SERVING
        wait_until(lambda: sum(call.done() for call in calls) >= 16)


def test_metrics_tell_what_was_done() -> None:
    with serving("--metrics-port", "0", "--memory-limit", "1GiB") as server:
        client = Client(server.address)
        client.hello(stream=77)
        client.declare()
        client.pull(IDS)
        for number in (1, 2, 2):
            client.push(IDS[: 50 * number], number)
        found = metrics(server.metrics)
        assert found["persia_shard/default/0/1"] == 1
        assert found["persia_updates_total"] == 2
        assert found["persia_pulls_total"] == 1
        assert found["persia_pushes_total"] == 2
        assert found["persia_duplicates_total"] == 1
        assert found["persia_memory_limit_bytes"] == 1 << 30
        assert found["persia_table_rows/user"] == 100
        assert found["persia_table_created_total/user"] == 100
        assert found["persia_table_pulled_total/user"] == 100
        assert found["persia_table_missed_total/user"] == 100
        used = found["persia_memory_used_bytes"]
        assert found["persia_table_bytes/user"] == pytest.approx(used)
        assert found["process_resident_memory_bytes"] > used
        about = f"/{_core.GRPC}/{persia.__version__}"
        assert found[f"persia_build_info{about}"] == 1
        assert found["persia_snapshot_timestamp_seconds"] == 0


def test_calls_are_counted_by_their_time_and_size() -> None:
    """Also those that travel together, to several shards."""
    many = ("--shard", "0-1/2", "--metrics-port", "0")
    with (
        serving(*many) as server,
        persia.Store(
            persia.optim.SGD(lr=0.1), servers=server.address
        ) as store,
    ):
        embedding = persia.nn.Embedding(None, 4, store=store, name="user")
        for _ in range(3):
            embedding(torch.from_numpy(IDS.astype("i8"))).sum().backward()
        store.flush()
        found = metrics(server.metrics)
        call = "persia_call_seconds"
        for method in ("Pull", "Push"):
            name = f"{method}/server"
            assert found[f"{call}_count/{name}"] == 6  # of each shard
            by_time = [
                found[f"{call}_bucket/{bound}/{name}"]
                for bound in (*_core.CALL_BOUNDS, "+Inf")
            ]
            assert by_time == sorted(by_time) and by_time[-1] == 6
            total = found[f"{call}_sum/{name}"]
            assert 0 < total < 60
        assert found["persia_call_bytes_total/in/Push/server"] > 3 * 400
        assert found["persia_call_bytes_total/out/Pull/server"] > 3 * 1600
        assert found[f"{call}_count/Many/server"] == 0


def test_denied_calls_are_logged() -> None:
    """Three lines of a kind, then their number."""
    with serving("--token", "tok") as server:
        client = Client(server.address)
        for _ in range(5):
            with pytest.raises(grpc.RpcError) as raised:
                client.hello()
            assert raised.value.code() == grpc.StatusCode.UNAUTHENTICATED
        server.process.send_signal(signal.SIGTERM)
        _, messages = server.process.communicate(timeout=60)
    lines = [line for line in messages.splitlines() if " denied " in line]
    assert len(lines) == 4
    for line in lines[:3]:
        assert re.fullmatch(
            r"\S+Z denied peer=ipv4:\S+ name= "
            r"method=/persia.v1.ParameterServer/Hello reason=missing",
            line,
        )
    assert lines[3].endswith(" denied more=2")


def test_idle_connections_to_metrics_are_bounded() -> None:
    """They would take all files of the process: then its gRPC listener takes
    no connection any more."""
    with serving("--metrics-port", "0") as server, ExitStack() as stack:
        where = urllib.parse.urlsplit(server.metrics)
        assert where.hostname is not None
        open_ones = [
            stack.enter_context(
                socket.create_connection((where.hostname, where.port or 0))
            )
            for _ in range(100)
        ]
        closed = 0
        for made in reversed(open_ones):
            made.settimeout(0.5 if closed else 10)
            with suppress(TimeoutError, ConnectionResetError):
                closed += made.recv(1) == b""
            if closed >= 84:
                break
        assert closed == 84
        for made in open_ones:
            made.close()
        wait_until(lambda: bool(answered(server.metrics)))


def answered(url: str) -> bytes:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return bytes(answer.read())
    except OSError:  # it was closed: all connections were taken
        return b""


def test_rows_and_ledger_outlive_a_restart(tmp_path: Path) -> None:
    flags = ["--checkpoints", str(tmp_path), "--shard", "0/1"]
    flags += ["--restore", "job", "--or-empty", "--save-on-exit", "job"]
    with serving(*flags) as server:
        assert server.said[0] == "restored job: no checkpoint"
        client = Client(server.address)
        first = client.hello(stream=77)
        client.declare()
        client.push(IDS, 1)
        client.push(IDS[:10], 2)
        rows = client.pull(IDS)
        assert rows[:10].tolist() == [[3.0] * 4] * 10
        assert "saved job: 100 rows" in server.stop()
    with serving(*flags) as server:
        assert server.said[0] == "restored job: 100 rows"
        client = Client(server.address)
        second = client.hello(stream=77)
        assert second.lineage == first.lineage
        assert second.boot != first.boot
        assert second.updates == second.ledger.watermark == 2
        assert [table.name for table in second.tables] == ["user"]
        assert not client.declare().created
        assert client.pull(IDS).tolist() == rows.tolist()
        # What was acknowledged before is not applied again.
        assert client.push(IDS, 2).status == client.pb.PushReply.DUPLICATE
        assert client.push(IDS, 3).status == client.pb.PushReply.APPLIED
        assert client.pull(IDS).tolist() == (rows + 1).tolist()
        server.stop()
    with serving(*flags) as server:
        assert Client(server.address).pull(IDS).tolist() == (rows + 1).tolist()


def test_a_stop_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    """The job's checkpoint is given up; what is saved on exit is whole."""
    flags = ["--checkpoints", str(tmp_path), "--save-on-exit", "job"]
    ids = np.arange(400_000)
    with serving(*flags) as server:
        store = persia.Store(
            persia.optim.SGD(lr=1.0), servers=server.address, timeout=5.0
        )
        store.add_table(persia.EmbeddingBagConfig("user", 32))
        store.set_rows("user", ids, np.ones((len(ids), 32)))
        with ThreadPoolExecutor() as pool:
            saving = pool.submit(store.save, tmp_path / "job", step=1)
            wait_until(lambda: list(tmp_path.glob("job/**/shard-*")))
            assert "saved job: 400,000 rows" in server.stop()
            with suppress(errors.PersiaError):
                saving.result()
        store.close()
    with serving(*flags, "--restore", "job") as server:
        assert server.said[0] == "restored job: 400,000 rows"


def test_what_cannot_be_saved_on_exit_is_one_line(tmp_path: Path) -> None:
    flags = ["--checkpoints", str(tmp_path), "--save-on-exit", "job"]
    with serving(*flags) as server:
        (tmp_path / "job-0-of-1").touch()
        server.process.terminate()
        messages = server.process.communicate(timeout=60)[1]
    assert server.process.returncode == 1
    assert messages.startswith("persia: error[StorageError]: saving job into")
    assert "Traceback" not in messages
    # Now it is known from the start.
    assert "persia: error[StorageError]: saving into" in failing(*flags)


def test_a_checkpoint_of_another_number_of_shards(tmp_path: Path) -> None:
    store = persia.Store(persia.optim.SGD(lr=1.0))
    store.add_table(persia.EmbeddingBagConfig("user", 4))
    ids = np.arange(1000)
    store.set_rows("user", ids, np.arange(4000.0).reshape(1000, 4))
    store.save(tmp_path / "out", step=1)
    store.set_rows("user", ids[:1], np.zeros((1, 4)))
    store.save(tmp_path / "out", step=2)
    flags = ["--checkpoints", str(tmp_path), "--restore"]
    total = 0
    for shard in range(3):
        with serving(*flags, "out", "--shard", f"{shard}/3") as server:
            said = re.fullmatch(r"restored out: (\d+) rows", server.said[0])
            assert said is not None
            total += int(said[1])
    assert total == 1000
    with serving(*flags, "out/step-1") as server:
        found = Client(server.address).pull(ids.astype("<u8"))
        assert found.tolist() == np.arange(4000).reshape(1000, 4).tolist()
    with serving(*flags, "out") as server:
        found = Client(server.address).pull(ids[:2].astype("<u8"))
        assert found.tolist() == [[0.0] * 4, [4.0, 5.0, 6.0, 7.0]]


def failing(*flags: str) -> str:
    """What a server that cannot serve says."""
    made = Serving("--port", "0", *flags)
    assert not made.address
    _, messages = made.process.communicate(timeout=60)
    assert made.process.returncode == 1
    assert "Traceback" not in messages
    return messages


def test_what_cannot_be_restored_is_named(tmp_path: Path) -> None:
    flags = ["--checkpoints", str(tmp_path), "--restore", "job"]
    assert "has no checkpoint job" in failing(*flags)
    with serving(*flags[:2], "--save-on-exit", "job") as server:
        client = Client(server.address)
        client.hello(stream=77)
        client.declare()
        client.push(IDS, 1)
        server.stop()
    (rows,) = tmp_path.glob("job-0-of-1/rows/*.safetensors")
    whole = rows.read_bytes()
    rows.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert "CorruptFile" in failing(*flags)
    rows.write_bytes(whole)
    description = tmp_path / "job-0-of-1/rows/shard.json"
    text = description.read_text()
    description.write_text(text.replace('"updates": 1', '"updates": 2'))
    assert "shard.json is truncated or altered" in failing(*flags)
    description.write_text(text)
    (tmp_path / "job-0-of-1").rename(tmp_path / "job-1-of-2")
    assert "has no checkpoint job" in failing(*flags)
    message = failing(*flags, "--shard", "1/2")
    assert "job-1-of-2 holds shard 0 of 1" in message


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_it_serves(tmp_path: Path, number: int) -> None:
    """It ends in peace, and does not save rows that it has not read."""
    folder = tmp_path / "job-0-of-1" / "rows"
    folder.mkdir(parents=True)
    pipe = folder / "shard.json"
    os.mkfifo(pipe)
    flags = ["--checkpoints", str(tmp_path), "--restore", "job"]
    flags += ["--save-on-exit", "job", "--port", "0"]
    process = subprocess.Popen(
        [sys.executable, "-m", "persia", "serve", "ps", *flags],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )

    def being_read() -> int:
        try:
            return os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:  # by nobody
            return 0

    try:
        end = wait_until(being_read)
        # A signal just before the call would not end it.
        waits = Path(f"/proc/{process.pid}/wchan")
        wait_until(lambda: re.search("^0$|pipe_read", waits.read_text()))
        process.send_signal(number)
        output, messages = process.communicate(timeout=60)
        os.close(end)
    finally:
        process.kill()
        process.communicate(timeout=60)
    assert (process.returncode, messages) == (0, "")
    assert output == "stopping: nothing was served, nothing is saved\n"
    assert os.listdir(folder) == ["shard.json"]


def test_a_port_that_is_taken_is_named() -> None:
    with serving() as server:
        port = server.address.rpartition(":")[2]
        assert f"127.0.0.1:{port}" in failing("--port", port)


def test_tls_and_tokens(tmp_path: Path) -> None:
    certs.write_certificates(tmp_path, ["localhost", "127.0.0.1"])

    def file(name: str) -> str:
        return str(tmp_path / name)

    flags = ["--host", "0.0.0.0", "--mutual-tls"]
    flags += ["--tls-ca", file("ca.pem"), "--tls-cert", file("server.pem")]
    flags += ["--tls-key", file("server-key.pem")]
    flags += ["--token-file", file("token")]
    flags += ["--admin-token-file", file("admin-token")]

    def hello(security: Security, address: str) -> dict[str, Any]:
        way = _core.Channel(address, security.arguments(), 30.0)
        try:
            return way.hello("default", 0)
        finally:
            way.close()

    whole = Security.load(
        ca=file("ca.pem"),
        cert=file("client.pem"),
        key=file("client-key.pem"),
        token_file=file("token"),
    )
    with serving(*flags) as server:
        port = server.address.rpartition(":")[2]
        address = f"127.0.0.1:{port}"
        assert hello(whole, address)["shards"] == 1
        wrong = Security.load(
            ca=file("ca.pem"),
            cert=file("client.pem"),
            key=file("client-key.pem"),
            token="wrong",
        )
        with pytest.raises(errors.AccessDenied):
            hello(wrong, address)
        no_certificate = Security.load(
            ca=file("ca.pem"), token_file=file("token")
        )
        with pytest.raises(errors.Unavailable):
            hello(no_certificate, address)
        # Whole rows are for administrators; look-ups are for all.
        store = persia.Store(
            persia.optim.SGD(lr=1.0), servers=address, security=whole
        )
        store.add_table(persia.EmbeddingBagConfig("user", 4))
        for whole_rows in (
            lambda: store.rows("user", [1]),
            lambda: store.set_rows("user", [1], np.zeros((1, 4))),
        ):
            with pytest.raises(errors.AccessDenied, match="Rows"):
                whole_rows()
        store.close()
        server.stop()


def test_a_second_signal_does_not_wait() -> None:
    with serving("--grace", "600") as server:
        # Frozen, it notices both at once.
        freeze(server.process.pid)
        server.process.send_signal(signal.SIGTERM)
        server.process.send_signal(signal.SIGINT)
        os.kill(server.process.pid, signal.SIGCONT)
        server.process.communicate(timeout=60)
        assert server.process.returncode in (0, 130, 143)
