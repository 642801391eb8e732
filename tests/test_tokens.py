"""Who may call what: each role and each method, asked by stock gRPC."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import persia
from persia import _core, errors
from persia.base.logs import said
from persia.cli.app import app
from persia.distributed import tokens
from persia.distributed.certs import Authority
from persia.distributed.renewal import LOOK_S, Renewal, renewal
from persia.distributed.security import Security
from tests.protobuf import stubs
from tests.remote import Servers
from tests.roles import Workers

if not _core.GRPC[0].isdigit():
    pytest.skip("built without gRPC", allow_module_level=True)

ALL = "train feed read publish serve scrape admin"
PS, WORKER = "/persia.v1.ParameterServer", "/persia.v1.EmbeddingWorker"
INFER = "/inference.GRPCInferenceService"

#: Of each method the roles that may call it. An administrator may call all.
TABLE = {
    f"{PS}/Hello": ALL,
    f"{PS}/Declare": "train read",
    f"{PS}/Pull": "train read",
    f"{PS}/Push": "train",
    f"{PS}/Leave": "train",
    f"{PS}/GetRows": "read publish",
    f"{PS}/PutRows": "",
    f"{PS}/Snapshot": "",
    f"{PS}/Restore": "",
    f"{PS}/Stats": ALL,
    f"{PS}/Move": "",
    f"{PS}/Many": ALL,
    f"{PS}/Changes": "publish",
    f"{WORKER}/Hello": ALL,
    f"{WORKER}/Declare": "train",
    f"{WORKER}/Submit": "feed",
    f"{WORKER}/Take": "train",
    f"{WORKER}/Return": "train",
    f"{WORKER}/Sums": "train",
    f"{WORKER}/Stats": ALL,
    f"{WORKER}/Heartbeat": "feed",
    f"{INFER}/ServerLive": ALL,
    f"{INFER}/ServerReady": ALL,
    f"{INFER}/ModelReady": ALL,
    f"{INFER}/ServerMetadata": "serve",
    f"{INFER}/ModelMetadata": "serve",
    f"{INFER}/ModelConfig": "serve",
    f"{INFER}/ModelStatistics": "serve",
    f"{INFER}/ModelInfer": "serve",
    f"{INFER}/RepositoryIndex": "serve",
    f"{INFER}/RepositoryModelLoad": "",
    f"{INFER}/RepositoryModelUnload": "",
}
DENIED = (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED)


def token_of(name: str) -> str:
    return f"{name}-" + hashlib.sha256(name.encode()).hexdigest()[:32]


def digest_of(name: str) -> str:
    return f"sha256:{hashlib.sha256(token_of(name).encode()).hexdigest()}"


LINES = "".join(f"{r} {r} {digest_of(r)}\n" for r in ALL.split())


@pytest.fixture(scope="module")
def ways() -> Iterator[dict[str, grpc.Channel]]:
    """To a server, an embedding worker and a queue of requests."""
    security = {"tokens": LINES}
    with contextlib.ExitStack() as stack:
        # The worker's own way to the servers shows no token.
        bare = stack.enter_context(contextlib.closing(Servers(1)))
        servers = Servers(1, security=security)
        stack.enter_context(contextlib.closing(servers))
        workers = Workers(bare.addresses, security=security)
        stack.enter_context(contextlib.closing(workers))
        queue = _core.InferQueue(16, 10.0)
        port = queue.listen(
            address="127.0.0.1:0",
            threads=1,
            calls=16,
            connections=16,
            message_limit=1 << 20,
            shared=False,
            security=security,
        )

        def answer() -> None:
            while (call := queue.take_other()) is not None:
                call.fail("NotFound", "no such model")

        thread = threading.Thread(target=answer)
        thread.start()
        stack.callback(thread.join)
        stack.callback(queue.close)
        stack.callback(queue.stop, 1.0)
        places = {
            PS: servers.addresses[0],
            WORKER: workers.addresses[0],
            INFER: f"127.0.0.1:{port}",
        }
        yield {
            name: stack.enter_context(grpc.insecure_channel(address))
            for name, address in places.items()
        }


def ask(
    channel: grpc.Channel, path: str, token: str | None, message: bytes = b""
) -> grpc.StatusCode:
    """The status that a server answers with."""
    shown = [] if token is None else [("authorization", f"Bearer {token}")]
    try:
        channel.unary_unary(path)(
            message, metadata=shown, timeout=60, wait_for_ready=True
        )
    except grpc.RpcError as error:
        status: grpc.StatusCode = error.code()
        return status
    return grpc.StatusCode.OK


@pytest.mark.parametrize("role", ALL.split())
def test_each_role_may_call_its_methods(
    role: str, ways: dict[str, grpc.Channel]
) -> None:
    found = {}
    for path in TABLE:
        channel = ways[path.rpartition("/")[0]]
        status = ask(channel, path, token_of(role), b"\xff")  # malformed
        assert status not in (
            grpc.StatusCode.UNIMPLEMENTED,
            grpc.StatusCode.UNAUTHENTICATED,
            grpc.StatusCode.DEADLINE_EXCEEDED,
        ), path
        found[path] = status != grpc.StatusCode.PERMISSION_DENIED
    assert found == {
        path: role == "admin" or role in roles.split()
        for path, roles in TABLE.items()
    }


def test_no_role_without_a_token(ways: dict[str, grpc.Channel]) -> None:
    for path in TABLE:
        channel = ways[path.rpartition("/")[0]]
        for token in (None, "", token_of("other"), digest_of("train")):
            assert ask(channel, path, token) == DENIED[1], path


def test_each_method_has_a_row() -> None:
    rows = {
        path: set(roles.split()) | {"admin"} for path, roles in TABLE.items()
    }
    assert {path: set(row) for path, row in _core.METHODS.items()} == rows
    services = stubs()[0].DESCRIPTOR.services_by_name
    assert {
        f"/persia.v1.{service.name}/{method.name}"
        for service in services.values()
        for method in service.methods
    } == {path for path in rows if not path.startswith(INFER)}


def test_rights_hold_for_each_of_many() -> None:
    """A call of several holds one that is not for the role."""
    pb, _ = stubs()
    caller = pb.Caller(client=7)
    many = pb.ManyRequest()
    for method, request in (
        (9, pb.StatsRequest(caller=caller)),
        (6, pb.Rows(caller=caller)),
        (5, pb.Rows(caller=caller)),
    ):
        many.parts.add(
            shard=0, method=method, message=request.SerializeToString()
        )
    with contextlib.closing(Servers(1, security={"tokens": LINES})) as made:
        with grpc.insecure_channel(made.addresses[0]) as channel:
            answer = channel.unary_unary(
                f"{PS}/Many",
                response_deserializer=pb.ManyReply.FromString,
            )(
                many.SerializeToString(),
                metadata=[("authorization", f"Bearer {token_of('scrape')}")],
                timeout=60,
                wait_for_ready=True,
            )
        names = [result.error for result in answer.results]
        assert names == ["", "AccessDenied", "AccessDenied"]
        assert made.shards[0].denied()["role", "scrape"] == 2


def test_a_stream_is_a_trainers() -> None:
    """A reader's Hello must not take over the stream of a rank."""
    pb, _ = stubs()
    hello = pb.HelloRequest(
        caller=pb.Caller(client=7, incarnation=1),
        version=2,
        namespace="default",
        world=1,
        stream=5,
    )
    with (
        contextlib.closing(Servers(1, security={"tokens": LINES})) as made,
        grpc.insecure_channel(made.addresses[0]) as channel,
    ):

        def say(role: str) -> grpc.StatusCode:
            text = hello.SerializeToString()
            return ask(channel, f"{PS}/Hello", token_of(role), text)

        assert say("read") == grpc.StatusCode.PERMISSION_DENIED
        assert say("train") == grpc.StatusCode.OK
        hello.stream = 0
        assert say("read") == grpc.StatusCode.OK


def test_a_reader_looks_up_rows_and_changes_nothing() -> None:
    def opened(role: str, **more: Any) -> persia.Store:
        security = Security(token=token_of(role))
        return persia.Store(servers=made.text, security=security, **more)

    ids = torch.arange(3)
    with contextlib.closing(Servers(2, security={"tokens": LINES})) as made:
        with opened("train") as store:
            trained = persia.nn.Embedding(None, 2, store=store, name="t")
            trained(ids).sum().backward()
            store.flush()
            rows = trained(ids)
        with opened("read", read_only=True) as store:
            read = persia.nn.Embedding(None, 2, store=store, name="t")
            assert torch.equal(read(ids), rows)
            with pytest.raises(errors.AccessDenied):
                persia.nn.Embedding(None, 2, store=store, name="new")(ids)
        with pytest.raises(errors.AccessDenied), opened("read"):
            pass
        with pytest.raises(errors.AccessDenied), opened("feed") as store:
            persia.nn.Embedding(None, 2, store=store, name="t")(ids)


def test_tables_of_their_own() -> None:
    pb, _ = stubs()
    caller = pb.Caller(client=7)
    lines = LINES + f"read ads {digest_of('ads')} tables=ads_*,x\n"
    lines += f"train limited {digest_of('limited')} tables=user\n"

    def table(name: str) -> bytes:
        spec = pb.TableSpec(
            name=name,
            dim=4,
            optimizer=pb.OPTIMIZER_SGD,
            init=pb.TableSpec.INIT_CONSTANT,
            admission=1.0,
        )
        request = pb.DeclareRequest(caller=caller, table=spec)
        return bytes(request.SerializeToString())

    def pull(*numbers: int) -> bytes:
        request = pb.PullRequest(caller=caller)
        for no in numbers:
            ids = np.arange(3, dtype="<u8").tobytes()
            request.tables.add(no=no, ids=ids)
        return bytes(request.SerializeToString())

    def rows(no: int) -> bytes:
        return bytes(pb.Rows(caller=caller, no=no).SerializeToString())

    with contextlib.closing(Servers(1, security={"tokens": lines})) as made:
        with grpc.insecure_channel(made.addresses[0]) as channel:

            def may(name: str, method: str, message: bytes) -> bool:
                status = ask(
                    channel, f"{PS}/{method}", token_of(name), message
                )
                assert status in (
                    grpc.StatusCode.OK,
                    grpc.StatusCode.PERMISSION_DENIED,
                ), (name, method, status)
                return status == grpc.StatusCode.OK

            for name in ("ads_a", "user"):
                assert may("train", "Declare", table(name))
            assert not may("limited", "Declare", table("ads_b"))
            assert may("limited", "Declare", table("user"))
            assert may("ads", "Pull", pull(0))
            assert not may("ads", "Pull", pull(1))
            assert not may("ads", "Pull", pull(0, 1))
            assert may("ads", "GetRows", rows(0))
            assert not may("ads", "GetRows", rows(1))
            assert may("read", "Pull", pull(0, 1))
            assert may("limited", "Pull", pull(1))
            assert not may("limited", "Pull", pull(0))
        denied = made.shards[0].denied()
        assert (denied["table", "read"], denied["table", "train"]) == (3, 2)


def test_a_refusal_for_a_limit_says_when_to_come_again() -> None:
    lines = LINES + f"scrape slow {digest_of('slow')} rate=1\n"
    with contextlib.closing(Servers(1, security={"tokens": lines})) as made:
        with grpc.insecure_channel(made.addresses[0]) as channel:
            call = channel.unary_unary(f"{PS}/Stats")
            shown = [("authorization", f"Bearer {token_of('slow')}")]

            def refused() -> Any:
                try:
                    call(b"", metadata=shown, timeout=60, wait_for_ready=True)
                except grpc.RpcError as error:
                    return error
                return None

            found = [one for _ in range(50) if (one := refused())]
            assert found
            for error in found:
                assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
                trailing = dict(error.trailing_metadata())
                assert trailing["persia-error"] == "LimitReached"
                assert 0 < int(trailing["retry-after-ms"]) <= 1001
            # One that has no limit is not held up by it.
            status = ask(channel, f"{PS}/Stats", token_of("scrape"))
            assert status == grpc.StatusCode.OK
        assert made.shards[0].denied()["limit", "scrape"] == len(found)


# ---- files -----------------------------------------------------------------


@pytest.fixture
def own_renewal(monkeypatch: pytest.MonkeyPatch) -> Renewal:
    """It has no thread: a test calls `look`."""
    made = Renewal()
    monkeypatch.setattr(made, "_run", lambda: None)
    monkeypatch.setattr("persia.distributed.security.renewal", made)
    return made


def statuses(address: str, *names: str) -> list[bool]:
    with grpc.insecure_channel(address) as channel:
        return [
            ask(channel, f"{PS}/Stats", token_of(name)) == grpc.StatusCode.OK
            for name in names
        ]


def test_a_file_of_tokens_is_read_again(
    tmp_path: Path, own_renewal: Renewal, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "tokens"
    path.write_text(f"train a {digest_of('a')}\n")
    path.chmod(0o600)
    security = Security.load(tokens_file=path).arguments()
    with contextlib.closing(Servers(1, security=security)) as made:
        (address,) = made.addresses
        assert statuses(address, "a", "b") == [True, False]
        path.write_text(path.read_text() + f"train a {digest_of('b')}\n")
        own_renewal.look()
        assert statuses(address, "a", "b") == [True, True]

        # By another file in its place, as secrets are mounted.
        other = tmp_path / "other"
        other.write_text(f"feed b {digest_of('b')}\n")
        other.chmod(0o600)
        os.replace(other, path)
        own_renewal.look()
        assert statuses(address, "a", "b") == [False, True]
        assert own_renewal.counts == {"ok": 2, "failed": 0}

        for wrong in ("", "train a short\n", f"boss b {digest_of('b')}\n"):
            path.write_text(wrong)
            own_renewal.look()
            own_renewal.look()
            assert statuses(address, "a", "b") == [False, True]
        path.unlink()
        own_renewal.look()
        assert statuses(address, "a", "b") == [False, True]
        assert own_renewal.counts == {"ok": 2, "failed": 4}

        path.write_text(f"feed a {digest_of('a')}\n")
        path.chmod(0o600)
        own_renewal.look()
        assert statuses(address, "a", "b") == [True, False]
    said = capsys.readouterr()
    assert token_of("a") not in said.out + said.err


def test_what_no_server_uses_is_not_read(
    tmp_path: Path, own_renewal: Renewal
) -> None:
    path = tmp_path / "tokens"
    path.write_text(LINES)
    path.chmod(0o600)
    Security.load(tokens_file=path).arguments()
    path.write_text("wrong")
    own_renewal.look()
    assert own_renewal.counts == {"ok": 0, "failed": 0}
    assert not own_renewal.ends()
    assert renewal is not own_renewal


def test_the_same_files_are_one_source(
    tmp_path: Path, own_renewal: Renewal
) -> None:
    """A later load has other texts, and gives them to all."""
    path = tmp_path / "token"
    path.write_text(token_of("a"))
    path.chmod(0o600)
    first = Security.load(token_file=path).arguments()
    with contextlib.closing(Servers(1, security=first)) as made:
        assert statuses(made.addresses[0], "a", "b") == [True, False]
        path.write_text(token_of("b"))
        second = Security.load(token_file=path).arguments()
        assert first["source"] == second["source"] > 0
        assert statuses(made.addresses[0], "a", "b") == [False, True]
    word = Security.load(token="word").arguments()
    assert word["source"] == 0


def test_a_certificate_is_in_the_place_of_a_token(tmp_path: Path) -> None:
    """For its own name alone, and where no token is shown."""
    path = tmp_path / "tokens"
    uri = "spiffe://cluster/trainer"
    run("add", path, "trainer", "--roles", "train", "--peer", uri)
    run("add", path, "host", "--roles", "read", "--peer", "dns:reader")
    feeds = tokens.add(path, "loader", ["feed"])
    path.write_text(f"{path.read_text()}train late peer:a://late 2020-01-31")
    authority = Authority("test", 1)
    cert, key = authority.issue("server", ["127.0.0.1"], server=True)
    lines = path.read_text()
    security = Security(
        ca=authority.pem, cert=cert, key=key, mutual=True, tokens=lines
    )
    with contextlib.closing(Servers(1, security=security.arguments())) as made:
        address = made.addresses[0]

        def status(method: str, token: str | None = None, **names: Any) -> Any:
            cert, key = authority.issue("client", server=False, **names)
            shown = grpc.ssl_channel_credentials(
                authority.pem.encode(), key.encode(), cert.encode()
            )
            with grpc.secure_channel(address, shown) as channel:
                return ask(channel, f"{PS}/{method}", token)

        denied, unknown = DENIED
        assert status("Stats", uris=[uri]) is grpc.StatusCode.OK
        assert status("Push", uris=[uri]) not in DENIED
        assert status("Push", hosts=["reader"]) is denied
        assert status("Stats", hosts=["reader", "b"]) is grpc.StatusCode.OK
        for names in (
            {},
            {"uris": [f"{uri}2"]},
            {"uris": ["a://late"]},
            {"hosts": ["127.0.0.1"]},
        ):
            assert status("Stats", **names) is unknown
        # A token that is shown decides.
        assert status("Push", feeds, uris=[uri]) is denied
        assert status("Stats", "x" * 32, uris=[uri]) is unknown
        assert status("Stats", f"peer:{uri}", uris=[uri]) is unknown
        cert, key = authority.issue("client", server=False, uris=[uri])
        client = Security(ca=authority.pem, cert=cert, key=key)
        store = persia.Store(
            persia.optim.SGD(lr=1.0), servers=address, security=client
        )
        with contextlib.closing(store):
            store.add_table(persia.EmbeddingBagConfig("t", 2, ["t"]))
            store.flush()
            with pytest.raises(errors.AccessDenied):
                store.save(tmp_path / "out")


def test_a_certificate_without_verification_has_no_name(
    tmp_path: Path,
) -> None:
    """A server that asks for none gives it no role."""
    authority, other = Authority("test", 1), Authority("other", 1)
    cert, key = authority.issue("server", ["127.0.0.1"], server=True)
    security = Security(cert=cert, key=key, tokens="admin a peer:a://b")
    with contextlib.closing(Servers(1, security=security.arguments())) as made:
        for of in authority, other:
            mine, own = of.issue("client", server=False, uris=["a://b"])
            shown = grpc.ssl_channel_credentials(
                authority.pem.encode(), own.encode(), mine.encode()
            )
            with grpc.secure_channel(made.addresses[0], shown) as channel:
                found = ask(channel, f"{PS}/Stats", None)
            assert found is grpc.StatusCode.UNAUTHENTICATED


def test_lines_of_certificates_are_not_rotated(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    tokens.add_peer(path, "a", ["train"], "spiffe://c/a")
    with pytest.raises(errors.InvalidArgument):
        tokens.rotate(path, "a", 1, None)
    tokens.add(path, "a", ["train"])
    tokens.rotate(path, "a", 1, None)
    found = [
        (one.peer, one.last_day is None) for one in tokens.read_lines(path)
    ]
    assert found == [("spiffe://c/a", True), (None, False), (None, True)]
    assert "spiffe://c/a" in run("ls", path)
    before = path.read_text()
    for wrong in ("", "dns:", "name", "a b://c"):
        with pytest.raises(errors.InvalidArgument):
            tokens.add_peer(path, "b", ["train"], wrong)
    assert path.read_text() == before


# ---- the command -----------------------------------------------------------


def run(*words: object) -> str:
    result = CliRunner().invoke(app, ["tokens", *map(str, words)])
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize(
    ("name", "roles", "options"),
    [
        ("bob b", ["train"], []),
        ("bob", ["train", " feed"], []),
        ("bob", ["train"], ["tables=a b"]),
        ("", ["train"], []),
    ],
)
def test_a_field_with_a_space_is_named(
    name: str, roles: list[str], options: list[str], tmp_path: Path
) -> None:
    wrong = next(f for f in (name, *roles, *options) if f.split() != [f])
    with pytest.raises(errors.InvalidArgument) as caught:
        tokens.add(tmp_path / "tokens", name, roles, options=options)
    assert repr(wrong) in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_token_is_made_and_rotated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "TAKEN_S", 0.0)
    path, to = tmp_path / "tokens", tmp_path / "trainer.token"
    first = run("add", path, "trainer", "--roles", "train,admin").strip()
    assert path.stat().st_mode & 0o777 == 0o600
    assert first not in path.read_text()
    run(
        "add",
        path,
        "ads",
        "--roles",
        "read",
        "--for-tables",
        "ads_*",
        "--out",
        tmp_path / "ads.token",
    )
    assert (tmp_path / "ads.token").stat().st_mode & 0o777 == 0o600
    run("rotate", path, "trainer", "--days", 2, "--out", to)
    lines = tokens.read_lines(path)
    assert [one.name for one in lines] == ["trainer", "ads", "trainer"]
    assert lines[0].last_day and not lines[2].last_day
    assert lines[0].roles == lines[2].roles == ("train", "admin")
    shown = run("ls", path)
    assert "trainer" in shown and "sha256" not in shown
    security = {"tokens": path.read_text()}
    with (
        contextlib.closing(Servers(1, security=security)) as made,
        grpc.insecure_channel(made.addresses[0]) as channel,
    ):
        for token in (first, to.read_text().strip()):
            status = ask(channel, f"{PS}/Stats", token)
            assert status == grpc.StatusCode.OK


def test_a_form_feed_in_a_comment_begins_no_line(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_bytes(b"# was:\x0cadmin old %s\n" % (b"a" * 64))
    tokens.add(path, "new", ["read"])
    assert [one.name for one in tokens.read_lines(path)] == ["new"]


def test_a_client_gets_its_token_when_servers_know_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, to = tmp_path / "tokens", tmp_path / "a.token"
    tokens.add(path, "a", ["train"], to=to)
    first, waited = to.read_text(), []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        assert len(tokens.read_lines(path)) == 2
        assert to.read_text() == first

    monkeypatch.setattr(tokens.time, "sleep", sleep)
    second = tokens.rotate(path, "a", 2, None, to)
    assert to.read_text().strip() == second != first.strip()
    assert waited and waited[0] > LOOK_S


def test_a_token_that_no_client_gets_changes_nothing(tmp_path: Path) -> None:
    path, to = tmp_path / "tokens", tmp_path / "none" / "a.token"
    tokens.add(path, "a", ["train"])
    before = path.read_text()
    for word in ("add", "rotate"):
        roles = ["--roles", "read"] if word == "add" else []
        words = ["tokens", word, path, "a", *roles, "--out", to]
        done = CliRunner().invoke(app, list(map(str, words)))
        assert done.exit_code == 1, done.output
        assert path.read_text() == before
    with pytest.raises(errors.InvalidArgument):
        tokens.add(path, "b", ["read"], to=path)
    assert path.read_text() == before


def test_changes_at_once_are_all_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tokens"
    tokens.add(path, "first", ["read"])
    write, both = tokens._write, threading.Barrier(2)

    def slow(path: Path, lines: list[str | tokens.Line]) -> None:
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.5)  # the other one has read the file, too
        write(path, lines)

    monkeypatch.setattr(tokens, "_write", slow)
    threads = [
        threading.Thread(target=tokens.add, args=(path, name, ["read"]))
        for name in ("a", "b")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    names = {one.name for one in tokens.read_lines(path)}
    assert names == {"first", "a", "b"}


def test_what_is_over_goes_with_the_next_rotation(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text(
        f"train a {digest_of('a')} 2020-01-31\n"
        f"read b {digest_of('b')} 2020-01-31\n"
    )
    tokens.rotate(path, "a", 1, "2090-12-31")
    found = [(one.name, one.last_day) for one in tokens.read_lines(path)]
    assert found == [("b", "2020-01-31"), ("a", "2090-12-31")]
    with pytest.raises(errors.InvalidArgument):
        tokens.rotate(path, "c", 1, None)
    before = path.read_text()
    for name, roles in (("a b", ["train"]), ("a", ["boss"]), ("a", [])):
        with pytest.raises(errors.InvalidArgument):
            tokens.add(path, name, roles)
    assert path.read_text() == before


def test_an_old_token_is_valid_for_whole_days(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    tokens.add(path, "a", ["train"], "2090-12-31", ["rate=5"])
    now = datetime.datetime.now(datetime.UTC)
    tokens.rotate(path, "a", 1, None)
    old, new = tokens.read_lines(path)
    assert old.last_day is not None
    end = datetime.datetime.fromisoformat(old.last_day)
    day = datetime.timedelta(days=1)
    assert abs(end - (now + day)) < datetime.timedelta(minutes=5)
    assert new.options == ("2090-12-31", "rate=5")  # as before
    tokens.rotate(path, "a", 40_000, tokens.NEVER)
    _, old, new = tokens.read_lines(path)
    assert (old.last_day, new.last_day) == ("2090-12-31", None)
    soon = datetime.date.today() + day  # its end is later than in 24 h
    tokens.add(path, "b", ["read"], str(soon))
    tokens.rotate(path, "b", 1, tokens.NEVER)
    old = next(one for one in tokens.read_lines(path) if one.name == "b")
    assert old.last_day is not None and "T" in old.last_day


@pytest.mark.parametrize(
    "last", ["2020-01-31", "2020-01-31T18:00:00Z", "soon", "2027-13-01"]
)
def test_a_token_that_has_ended_is_not_made(last: str, tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    tokens.add(path, "a", ["train"])
    before = path.read_text()
    with pytest.raises(errors.InvalidArgument):
        tokens.add(path, "b", ["train"], last)
    with pytest.raises(errors.InvalidArgument):
        tokens.rotate(path, "a", 1, last)
    assert path.read_text() == before
    ended = f"train c {digest_of('c')} 2020-01-31\n"
    path.write_text(ended)
    with pytest.raises(errors.InvalidArgument):
        tokens.rotate(path, "c", 1, None)
    assert path.read_text() == ended


def test_the_file_of_another_name_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "TAKEN_S", 0.0)
    path, to = tmp_path / "tokens", tmp_path / "a.token"
    tokens.add(path, "a", ["train"], to=to)
    before = path.read_text(), to.read_text()
    with pytest.raises(errors.InvalidArgument):
        tokens.add(path, "b", ["read"], to=to)
    tokens.add(path, "b", ["read"])
    second = path.read_text()
    with pytest.raises(errors.InvalidArgument):
        tokens.rotate(path, "b", 1, None, to)
    assert (path.read_text(), to.read_text()) == (second, before[1])
    tokens.rotate(path, "a", 1, None, to)
    assert to.read_text() != before[1]


def test_a_name_is_removed_and_comments_stay(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    words = f"# the team of ads\nread  ads {digest_of('ads')}\n\n# others\n"
    path.write_text(words)
    tokens.add(path, "trainer", ["train"])
    tokens.rotate(path, "trainer", 1, None)
    assert path.read_text().startswith(words)
    assert run("rm", path, "trainer").startswith("removed 2 tokens")
    assert path.read_text() == words
    for name in "trainer", "ads":  # not there; the last one
        with pytest.raises(errors.InvalidArgument):
            tokens.remove(path, name)
    assert path.read_text() == words


def test_changes_of_tokens_are_audited(tmp_path: Path) -> None:
    path, audits = tmp_path / "tokens", tmp_path / "audits"
    with said(audits=audits):
        secrets = [tokens.add(path, "a", ["train"], "2090-12-31", ["rate=5"])]
        tokens.add_peer(path, "b", ["read"], "spiffe://c/b")
        with pytest.raises(errors.InvalidArgument):
            tokens.add(path, "c", ["boss"])
        secrets.append(tokens.rotate(path, "a", 1, None))
        tokens.remove(path, "a")
    text = audits.read_text()
    found = [json.loads(line) for line in text.splitlines()]
    a = {"file": str(path), "name": "a"}
    right = {"roles": ["train"], "until": "2090-12-31", "options": ["rate=5"]}
    of_b = {"roles": ["read"], "until": None, "peer": "spiffe://c/b"}
    assert [
        {k: v for k, v in one.items() if k not in ("time", "level")}
        for one in found
    ] == [
        {"event": "token added", "peer": None} | a | right,
        {"event": "token added", "options": []} | a | {"name": "b"} | of_b,
        {"event": "token rotated", "peer": None, "days": 1} | a | right,
        {"event": "token removed", "lines": 2} | a,
    ]
    assert "sha256:" not in text
    assert not any(secret in text for secret in secrets)


@given(st.text(max_size=200))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        found = tokens.lines_of(text)
    except errors.InvalidArgument:
        return
    again = "\n".join(map(str, found))
    assert tokens.lines_of(again) == found
