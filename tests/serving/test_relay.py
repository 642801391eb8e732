"""``persia serve export``: what is read through it is the folder that it
serves, byte for byte, and as soon; it gives away nothing else."""

from __future__ import annotations

import contextlib
import http.client
import random
import shutil
import signal
import socket
import subprocess
import threading
import time
import urllib.error
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import persia
from persia import errors
from persia.serving import relayed
from persia.serving.config import RelayConfig
from persia.serving.deltas.packet import ChainPlace, packet_name
from persia.serving.folder import versions_of
from persia.serving.repository import Model, Repository
from tests.ready import Ready
from tests.serving import models
from tests.serving.conftest import call, until
from tests.serving.publishing import (
    model_of,
    published,
    same,
    start,
    train,
)
from tests.serving.test_deltas_processes import options, packets, started

pytest.importorskip("uvicorn", reason="persia[serve] is not installed")
from persia.serving.relay import Relay

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache is of this test alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@contextlib.contextmanager
def relaying(*exports: Path | str, **more: object) -> Iterator[str]:
    """The address of one that serves folders."""
    config = RelayConfig.model_validate({"port": 0, **more})
    one = Relay(config, tuple(map(str, exports)))
    one.start()
    try:
        yield one.address
    finally:
        one.close()


def status_of(address: str, path: str, verb: str = "GET") -> int:
    connection = http.client.HTTPConnection(address, timeout=60)
    with contextlib.closing(connection):
        connection.request(verb, path)
        return connection.getresponse().status


def test_an_export_is_read_through_it(place: Path, tmp_path: Path) -> None:
    out = place / "out"
    with relaying(out, f"other={tmp_path / 'later'}") as address:
        url = f"http://{address}/out"
        root, here = versions_of(url), versions_of(out)
        assert root.names() == here.names() == ["v-000001", "v-000002"]
        for name in ("v-000001", None):
            far, near = (
                persia.load_model(url, name),
                persia.load_model(out, name),
            )
            assert far.manifest == near.manifest
            for file in near.manifest.files:
                want = (near.folder / file.name).read_bytes()
                assert (far.folder / file.name).read_bytes() == want
        # A version by its own URL.
        assert persia.load_model(f"{url}/v-000001").version == "v-000001"
        call("model", "ls", url)
        call("model", "verify", url)
        other = f"http://{address}/other"
        assert versions_of(other).names() == []
        with pytest.raises(errors.StorageError):
            persia.load_model(other)
        shutil.copytree(out, tmp_path / "later")
        assert persia.load_model(other).version == "v-000002"


def test_nothing_else_is_given_away(place: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(place / "out", out)
    (out / "key.pem").write_text("secret")
    (out / "v-000001" / ".hidden").write_text("secret")
    (tmp_path / "erased.json").write_text("secret")
    with relaying(out) as address:
        assert status_of(address, "/out/CURRENT") == 200
        for path in (
            *("/", "/out", "/out/", "/out/key.pem", "/x/CURRENT"),
            *("/out/v-000001", "/out/v-000001/", "/out/v-000001/.hidden"),
            *("/out/../erased.json", "/out/%2e%2e/erased.json"),
            *("/out/v-000001/../key.pem", "/out/v-000009/manifest.json"),
            *("/out//CURRENT", "/out/deltas"),
        ):
            assert status_of(address, path) == 404, path
        for verb in ("PUT", "POST", "DELETE"):
            assert status_of(address, "/out/CURRENT", verb) == 405
        url = f"http://{address}/out"
        with pytest.raises(errors.InvalidArgument):
            persia.export(
                model_of(models.store()), url, example=models.batch(3)
            )
        with pytest.raises(errors.InvalidArgument):
            versions_of(url).use("v-000001")
        assert status_of(address, "/out/CURRENT") == 200
    for wrong in ("http://:8/out", f"http://{address}", "http://a:x/out"):
        with pytest.raises(errors.InvalidArgument):
            versions_of(wrong)
    with pytest.raises(errors.StorageError):
        versions_of(url).names()
    with pytest.raises(errors.InvalidArgument):
        Relay(RelayConfig(port=0), ("s3://bucket/out",))


def test_packets_are_followed_through_it(tmp_path: Path) -> None:
    """What the publisher and an operator do reaches two readers."""
    torch.manual_seed(0)
    out, store = tmp_path / "out", models.store()
    model = model_of(store)
    train(model)
    with start(model, out) as publisher, relaying(out) as address:
        url = f"http://{address}/out"
        one = Repository({"m": url, "n": url}, 2, 0.05)
        try:
            now = [one.models[name] for name in "mn"]
            for round_ in range(4):
                if round_ == 2:
                    store.erase(models.KEYS[0], list(range(-20, 20)))
                if round_ == 3:
                    store.clear(models.KEYS[1])  # a new chain
                train(model)
                publisher.flush()
                publisher.publish()
                publisher.flush()
                want = publisher.place
                for each in now:  # torch exports beside no other thread
                    until_at(each, want)
                for each in now:
                    same(each.current, model, tmp_path / "want")
            # Versions of before that are asked for by name, too.
            first = persia.load_model(url, "v-000001")
            ids = torch.arange(-20, 20)
            assert not first.has_rows(models.KEYS[0], ids).any()
        finally:
            one.close()


def until_at(model: Model, place: ChainPlace) -> None:
    def is_there() -> bool:
        if not model.is_ready:
            return False
        follower = model.current.follower
        return follower is not None and follower.place == place

    until(is_there)


@pytest.mark.parametrize("how", ["damaged", "missing", "foreign"])
def test_packets_are_refused_as_in_a_folder(how: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    model = model_of(models.store())
    train(model)
    with start(model, out) as publisher, relaying(out) as address:
        for _ in range(3):
            train(model)
            published(publisher)
        chain = publisher.place.chain
        files = [out / packet_name(chain, n) for n in range(1, 4)]
        if how == "damaged":
            data = bytearray(files[1].read_bytes())
            data[-1] ^= 1
            files[1].write_bytes(data)
        elif how == "missing":
            files[1].unlink()
        else:
            shutil.copy(files[2], files[1])
        loaded = persia.load_model(f"http://{address}/out")
        want = errors.CorruptFile if how == "damaged" else errors.StaleLineage
        with pytest.raises(want):
            loaded.verify_packets()
        if how == "missing":
            assert loaded.catch_up() == 1
        else:
            with pytest.raises(want):
                loaded.catch_up()
        assert loaded.packets == 1


def test_a_file_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relayed, "_WAIT_S", 5.0)
    name, ends = packet_name("0" * 32, 1), threading.Event()
    file = tmp_path / "out" / name
    file.parent.mkdir(parents=True)
    with relaying(tmp_path / "out") as address:
        root = versions_of(f"http://{address}/out")
        root.wait(packet_name("0" * 32, 2), 0, ends)  # it never comes
        threads = [
            threading.Thread(target=root.wait, args=(name, 0, ends))
            for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        file.write_bytes(b"x")
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        assert root.read(name) == b"x"
        root.wait(name, 0, ends)  # it is there


def test_a_slow_reader_holds_up_no_other(tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / "v-000001").mkdir(parents=True)
    with (out / "v-000001" / "rows-0000.safetensors").open("wb") as file:
        file.truncate(1 << 30)
    (out / "CURRENT").write_text("v-000001\n")
    with relaying(out, grace=1) as address, contextlib.ExitStack() as stack:
        host, _, port = address.rpartition(":")
        for _ in range(8):
            slow = socket.create_connection((host, int(port)))
            stack.enter_context(slow)
            slow.sendall(
                b"GET /out/v-000001/rows-0000.safetensors HTTP/1.1\r\n"
                b"host: x\r\n\r\n"
            )
            assert slow.recv(1)
        root = versions_of(f"http://{address}/out")
        for _ in range(20):
            assert root.read("CURRENT") == b"v-000001\n"


def test_an_answer_that_is_broken_off_is_an_error(tmp_path: Path) -> None:
    """Of each length: nothing of it is used."""
    whole = b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nabcd"
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            for n in [*range(len(whole)), len(whole)]:
                one, _ = server.accept()
                with one:
                    one.recv(1 << 16)
                    one.sendall(whole[:n])

        thread = threading.Thread(target=answer)
        thread.start()
        root = versions_of(f"http://127.0.0.1:{server.getsockname()[1]}/out")
        for _ in range(len(whole)):
            with pytest.raises(errors.StorageError):
                root.read("CURRENT")
        assert root.read("CURRENT") == b"abcd"
        thread.join()


def test_tls_and_tokens(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, tokens = tmp_path / "certs", tmp_path / "tokens"
    call("certs", made, "--hosts", "localhost")
    for role in ("read", "serve", "train"):
        file = tmp_path / f"{role}.token"
        call("tokens", "add", tokens, role, "--roles", role, "--out", file)
    with relaying(
        place / "out",
        tls_cert=made / "server.pem",
        tls_key=made / "server-key.pem",
        tokens_file=tokens,
    ) as address:
        url = f"https://localhost:{address.rpartition(':')[2]}/out"
        with pytest.raises(errors.StorageError):  # who signed it?
            versions_of(url).names()
        monkeypatch.setenv("PERSIA_TLS_CA", str(made / "ca.pem"))
        root = versions_of(url)
        with pytest.raises(errors.AccessDenied):
            root.names()
        for role in ("serve", "train", "read"):
            token = tmp_path / f"{role}.token"
            monkeypatch.setenv("PERSIA_TOKEN_FILE", str(token))
            if role != "read":
                with pytest.raises(errors.AccessDenied):
                    root.names()
        assert root.names()
        assert persia.load_model(url).version == "v-000002"
    with pytest.raises(errors.InvalidArgument):  # it would be read by others
        versions_of("http://192.0.2.1:1/out").names()


def until_follows(address: str, training: Ready) -> None:
    def follows() -> bool:
        with contextlib.suppress(urllib.error.HTTPError):  # no version yet
            return bool(packets(address, training))
        return False

    until(follows)


def relay_process(out: Path, port: int = 0) -> tuple[Ready, int]:
    process = Ready(
        *("-m", "persia", "serve", "export", str(out), "--port", str(port)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("serving "):
            return process, int(line.rpartition(":")[2])
    raise AssertionError("it does not serve")


def test_killed_relays_readers_and_trainings(
    place: Path, tmp_path: Path
) -> None:
    """Whoever is killed in the middle of packets: what is applied is whole,
    and is followed again."""
    rng = random.Random(3)
    out = tmp_path / "out"
    with contextlib.ExitStack() as stack:

        def training_() -> Ready:
            one = Ready(
                *("-m", "persia", *options(place, out), "--epochs", "100000"),
                stdout=subprocess.DEVNULL,
            )
            stack.callback(one.wait)
            stack.callback(one.kill)
            return one

        def relay_(port: int = 0) -> tuple[Ready, int]:
            one = relay_process(out, port)
            stack.callback(one[0].wait)
            stack.callback(one[0].kill)
            return one

        def serving_() -> tuple[Ready, str]:
            one = started(f"http://127.0.0.1:{port}/out")
            stack.callback(one[0].wait)
            stack.callback(one[0].kill)
            return one

        relay, port = relay_()
        training = training_()
        until(lambda: (out / "CURRENT").exists())
        serving = serving_()
        for who in ("relay", "training", "serving", "relay"):
            until_follows(serving[1], training)
            time.sleep(rng.random() * 0.2)
            if who == "relay":
                relay.kill()
                relay.wait()
                relay, _ = relay_(port)
            elif who == "training":
                training.kill()
                training.wait()
                training = training_()
            else:
                serving[0].kill()
                serving[0].wait()
                serving = serving_()
        until_follows(serving[1], training)
        loaded = persia.load_model(f"http://127.0.0.1:{port}/out")
        loaded.catch_up()
        loaded.check_rows()
        for process in (serving[0], relay):
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
