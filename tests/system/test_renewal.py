"""Certificates and tokens are renewed while servers and clients use them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import torch

import persia
from persia import _core
from persia.distributed import tokens
from persia.distributed.certs import Authority
from persia.distributed.renewal import renewal
from persia.distributed.security import Security
from tests.protobuf import stubs
from tests.system.processes import wait_until
from tests.system.test_serve import Serving, metrics, serving

pytestmark = pytest.mark.slow

if not _core.GRPC[0].isdigit():
    pytest.skip("built without gRPC", allow_module_level=True)

STATS = "/persia.v1.ParameterServer/Stats"
NAMES = ("ca.pem", "server.pem", "server-key.pem", "client.pem")
NAMES += ("client-key.pem", "token", "tokens")


class Mount:
    """A folder of secrets as Kubernetes mounts it: each file is a link into
    ``..data``, which is itself a link that is exchanged.

    Args:
        folder: an empty one.
        authorities: of the first, the second, ... certificates; each is
            trusted all the time.
    """

    def __init__(self, folder: Path, *authorities: Authority) -> None:
        self.folder = folder
        self._ca = "".join(one.pem for one in authorities)
        self._tokens = folder / "made"
        self._made = [
            self._make(str(number), one)
            for number, one in enumerate(authorities)
        ]
        self.show(0)
        for name in NAMES:
            (folder / name).symlink_to(f"..data/{name}")

    def _make(self, name: str, authority: Authority) -> Path:
        made = self.folder / f"..{name}"
        made.mkdir()
        server = authority.issue("s", ["localhost", "127.0.0.1"], server=True)
        client = authority.issue("c", server=False)
        word = tokens.add(self._tokens, "trainer", ["train", "admin"])
        lines = self._tokens.read_text()
        for file, text in zip(
            NAMES, (self._ca, *server, *client, word, lines)
        ):
            (made / file).write_text(text)
            (made / file).chmod(0o600)
        return made

    def show(self, number: int) -> None:
        """What the files lead to from now on, all at once."""
        link = self.folder / "..new"
        link.symlink_to(self._made[number].name)
        os.replace(link, self.folder / "..data")

    def path(self, name: str) -> str:
        return str(self.folder / name)

    def flags(self) -> list[str]:
        """Of a server."""
        names = {
            "--tls-cert": "server.pem",
            "--tls-key": "server-key.pem",
            "--tls-ca": "ca.pem",
            "--tokens-file": "tokens",
        }
        found = ["--mutual-tls", "--metrics-port", "0"]
        for flag, name in names.items():
            found += [flag, self.path(name)]
        return found

    def security(self) -> Security:
        """Of a client."""
        return Security.load(
            ca=self.path("ca.pem"),
            cert=self.path("client.pem"),
            key=self.path("client-key.pem"),
            token_file=self.path("token"),
        )

    def context(self) -> ssl.SSLContext:
        made = ssl.create_default_context(cafile=self.path("ca.pem"))
        made.load_cert_chain(
            self.path("client.pem"), self.path("client-key.pem")
        )
        return made

    def shown(self, address: str) -> str:
        """The certificate with which a server begins a connection, PEM."""
        host, _, port = address.rpartition(":")
        with (
            socket.create_connection((host, int(port)), timeout=60) as bare,
            self.context().wrap_socket(bare, server_hostname=host) as one,
        ):
            found = one.getpeercert(binary_form=True)
        assert found
        return ssl.DER_cert_to_PEM_cert(found)

    def text(self, name: str) -> str:
        return (self.folder / name).read_text()


class Load:
    """Calls of stock gRPC, each over a connection of its own, and others that
    keep theirs; with the certificate and token that the files have."""

    def __init__(self, mount: Mount, address: str) -> None:
        self._mount, self._address = mount, address
        self._over = threading.Event()
        self.done, self.errors = 0, list[grpc.RpcError]()
        self._threads = [
            threading.Thread(target=self._run, args=(keeps,))
            for keeps in (False, True)
        ]

    def _channel(self) -> grpc.Channel:
        names = ("ca.pem", "client-key.pem", "client.pem")
        now = (self._mount.folder / "..data").resolve()  # all of one moment
        texts = [(now / name).read_bytes() for name in names]
        return grpc.secure_channel(
            self._address, grpc.ssl_channel_credentials(*texts)
        )

    def _call(self, channel: grpc.Channel, token: str) -> None:
        shown = [("authorization", f"Bearer {token}")]
        call = channel.unary_unary(STATS)
        call(b"", metadata=shown, timeout=60, wait_for_ready=True)
        self.done += 1

    def _run(self, keeps: bool) -> None:
        token = self._mount.text("token").strip()
        kept = self._channel() if keeps else None
        while not self._over.is_set():
            try:
                if kept is not None:
                    self._call(kept, token)
                    continue
                with self._channel() as channel:
                    self._call(channel, token)
            except grpc.RpcError as error:
                self.errors.append(error)
                break
        if kept is not None:
            kept.close()

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def more(self) -> None:
        """Waits until calls were made that begin now."""
        before = self.done
        wait_until(lambda: self.errors or self.done > before + 10)


@pytest.fixture
def mount(tmp_path: Path) -> Mount:
    return Mount(
        tmp_path, Authority("one", days=30), Authority("two", days=10)
    )


@contextlib.contextmanager
def served(mount: Mount, *flags: str) -> Iterator[Serving]:
    with serving("--shard", "0/1", *mount.flags(), *flags) as server:
        yield server


def renewed(server: Serving, outcome: str, n: int) -> dict[str, float]:
    """The metrics once so many renewals have ended so."""
    name = f"persia_security_renewals_total/{outcome}"

    def found() -> dict[str, float] | None:
        known = metrics(server.metrics)
        return known if known[name] == n else None

    return wait_until(found) or {}


def test_certificates_are_renewed_under_load(mount: Mount) -> None:
    """By the link of a mounted secret, without a restart or an error."""
    audits = mount.folder / "audits"
    with served(mount, "--audit-log", str(audits)) as server:
        assert mount.shown(server.address) == mount.text("server.pem")
        name = "persia_certificate_not_after_seconds/"
        name += mount.path("server.pem")
        before = metrics(server.metrics)[name]
        with Load(mount, server.address) as load:
            load.more()
            mount.show(1)
            server.process.send_signal(signal.SIGHUP)
            after = renewed(server, "ok", 1)[name]
            load.more()
            assert mount.shown(server.address) == mount.text("server.pem")
            load.more()
        assert not load.errors
        assert before - after == pytest.approx(20 * 86400, abs=3600)
    lines = [json.loads(line) for line in audits.read_text().splitlines()]
    (line,) = (one for one in lines if one.get("event") == "renewed")
    assert mount.path("server.pem") in line["files"]


def test_wrong_files_change_nothing(mount: Mount) -> None:
    audits = mount.folder / "audits"
    wrong = (
        ("server-key.pem", mount.text("client-key.pem")),
        ("server.pem", "no certificate"),
        ("tokens", "train trainer short"),
    )
    with served(mount, "--audit-log", str(audits)) as server:
        was = mount.text("server.pem")
        with Load(mount, server.address) as load:
            load.more()
            for path, text in wrong:
                there = Path(mount.path(path)).resolve()
                good = there.read_text()
                there.write_text(text)
                failed = metrics(server.metrics)[
                    "persia_security_renewals_total/failed"
                ]
                server.process.send_signal(signal.SIGHUP)
                renewed(server, "failed", int(failed) + 1)
                there.write_text(good)
                load.more()
                assert mount.shown(server.address) == was
        assert not load.errors
    lines = [json.loads(line) for line in audits.read_text().splitlines()]
    kept = [line for line in lines if line.get("event") == "not renewed"]
    for line, (path, _) in zip(kept, wrong, strict=True):
        assert mount.path(path) in line["files"]
    assert kept[0]["files"] == [mount.path(wrong[0][0])]  # that one alone


def test_a_store_trains_on_through_a_renewal(mount: Mount) -> None:
    """Both sides get other certificates and tokens, and no update is lost or
    doubled."""
    stubs()
    with (
        served(mount) as server,
        persia.Store(
            servers=server.address,
            security=mount.security(),
            optimizer=persia.optim.SGD(1.0),
        ) as store,
    ):
        embedding = persia.nn.Embedding(
            None, 2, store=store, name="t", init=0.0
        )
        ids = torch.arange(10)

        def step() -> None:
            (-embedding(ids).sum()).backward()

        for round in range(2):
            for _ in range(5):
                step()
            mount.show(1 - round)
            server.process.send_signal(signal.SIGHUP)
            renewed(server, "ok", round + 1)
            renewal.look()
            for _ in range(5):
                step()
        store.flush()
        assert embedding(ids).tolist() == [[20.0, 20.0]] * 10
