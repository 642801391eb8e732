"""Processes that are killed in the middle of packets, and versions that are
rolled back, while a client asks on."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import persia
from persia import _core
from persia.serving.config import ModelConfig
from persia.serving.folder import versions_of
from persia.serving.process import serving
from tests.ready import Ready
from tests.serving.conftest import call, lines_of, until
from tests.serving.publishing import Versioned
from tests.serving.test_server import ask, body_of, raw

pytest.importorskip("uvicorn", reason="persia[serve] is not installed")
pytestmark = pytest.mark.slow

IDS = list(range(64))
REQUEST = {
    "inputs": [{"name": "t", "datatype": "INT64", "shape": [64], "data": IDS}]
}


class Client(threading.Thread):
    """Asks on and on, and looks at each answer: no row is torn, none is newer
    than the dense part, and the dense part is none that is older than the last
    one.

    Args:
        address: that is asked, until it gives no answer.

    Attributes:
        last: the version of the last answer.
        seen: how many there were.
        whole: whether all rows of the last answer were of its version.
        wrong: what was wrong.
    """

    def __init__(self, address: str) -> None:
        super().__init__()
        self._address = address
        self.last, self.seen, self.whole = 0.0, 0, False
        self.wrong: list[Any] = []
        self._ends = threading.Event()
        self.start()

    def run(self) -> None:
        while not self._ends.wait(0.002):
            try:
                status, text, _ = ask(
                    self._address, "/v2/models/out/infer", REQUEST
                )
            except (OSError, http.client.HTTPException):
                return
            if status == 200:
                self._look(text)
            else:
                self.wrong.append(text)

    def _look(self, text: Any) -> None:
        (out,) = text["outputs"]
        found = np.reshape(out["data"], (64, 9))
        rows, version = found[:, :8], found[0, 8]
        torn = (rows != rows[:, :1]).any()
        if torn or rows.max() > version or version < self.last:
            self.wrong.append((text["model_version"], found, self.last))
        self.seen += version > self.last
        self.last = version
        self.whole = bool((rows == version).all())

    def end(self) -> float:
        """The version of the last answer."""
        self._ends.set()
        self.join(60)
        assert not self.wrong
        return self.last


@contextlib.contextmanager
def process(*words: str) -> Iterator[tuple[Ready, str]]:
    """A command, and the address that it names; killed at the end."""
    one = Ready(
        *("-m", "persia", *words),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        address = lines_of(one)[-1].split()[-1]
        assert one.stdout is not None
        threading.Thread(target=one.stdout.read, daemon=True).start()
        yield one, address
    finally:
        one.kill()
        one.wait()


def serve(out: Path) -> Any:
    words = ("serve", "model", str(out), "--port", "0", "--poll", "0.1")
    return process(*words, "--threads", "1")


def training(folder: Path, begin: int, *more: str) -> Ready:
    job = ("-m", "tests.serving.chain_job", str(folder), str(begin))
    return Ready(*job, *more)


def more_seen(client: Client) -> None:
    """Waits for packets."""
    before = client.seen
    until(lambda: client.wrong or client.seen > before + 5)


def all_seen(client: Client, out: Path) -> None:
    """Waits until it gets what is published, after the end of all. Where a
    training was killed while it added a version, the one before answers as it
    was exported."""
    versions = versions_of(out)
    if versions.current() != versions.names()[-1]:
        return
    loaded = persia.load_model(out)
    loaded.catch_up()
    last = float(loaded(*Versioned.example)[0, 8])
    until(lambda: client.wrong or (client.last == last and client.whole))


@pytest.mark.parametrize(
    "seed",
    [0, *(pytest.param(i, marks=pytest.mark.long) for i in range(1, 6))],
)
def test_killed_trainings_and_servers_of_models(
    seed: int, tmp_path: Path
) -> None:
    rng = random.Random(seed)
    out = tmp_path / "out"
    for turn in range(2):
        before = versions_of(out).names()
        trains = training(tmp_path, 1_000_000 * turn)
        try:
            until(lambda b=before: versions_of(out).names() > b)
            with serve(out) as (_, address):
                client = Client(address)
                more_seen(client)
                time.sleep(rng.random() * 0.3)
                if rng.random() < 0.5:
                    trains.kill()
            client.end()  # its server was killed
            with serve(out) as (_, address):
                client = Client(address)
                time.sleep(rng.random() * 0.3)
                trains.kill()
                assert trains.wait() == -signal.SIGKILL
                all_seen(client, out)
                client.end()
        finally:
            trains.kill()
            trains.wait()


@pytest.mark.long
@pytest.mark.skipif(not _core.GRPC[0].isdigit(), reason="without gRPC")
def test_killed_servers_of_rows(tmp_path: Path) -> None:
    """With logs: no update is lost, and no change of one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = ("serve", "ps", "--port", str(port), "--shard", "0/1")
    words += ("--checkpoints", str(tmp_path), "--durable", "process")
    words += ("--log", str(tmp_path / "log"))
    out, rng = tmp_path / "out", random.Random(1)
    with contextlib.ExitStack() as stack:
        rows, _ = stack.enter_context(process(*words))
        trains = training(tmp_path, 1, f"127.0.0.1:{port}")
        stack.callback(trains.wait)
        stack.callback(trains.kill)
        until(lambda: bool(versions_of(out).names()))
        _, address = stack.enter_context(serve(out))
        client = Client(address)
        for _ in range(3):
            more_seen(client)
            time.sleep(rng.random() * 0.5)
            rows.kill()
            rows.wait()
            assert trains.poll() is None
            rows, _ = stack.enter_context(process(*words))
        more_seen(client)
        (tmp_path / "stop").touch()
        assert trains.wait(120) == 0
        all_seen(client, out)
        client.end()


def test_a_rollback_fails_no_request(place: Path, tmp_path: Path) -> None:
    root = tmp_path / "m"
    shutil.copytree(place / "out", root)
    config = ModelConfig(port=0, threads=2, poll=0.02)
    columns = raw(place, 5)
    want = {
        name: persia.load_model(root, name).predict(columns).tolist()
        for name in ("v-000001", "v-000002")
    }
    assert want["v-000001"] != want["v-000002"]
    wrong: list[Any] = []
    seen: list[str] = []
    ends = threading.Event()
    with serving(config, (str(root),)) as one:

        def asks() -> None:
            while not ends.is_set():
                status, text, _ = ask(
                    one.address, "/v2/models/m/infer", body_of(columns)
                )
                if status != 200 or not np.allclose(
                    text["outputs"][0]["data"],
                    want[text["model_version"]],
                    0,
                    1e-6,
                ):
                    wrong.append(json.dumps(text))
                    return
                seen.append(text["model_version"])

        threads = [threading.Thread(target=asks) for _ in range(4)]
        for thread in threads:
            thread.start()
        for turn in range(8):
            name = f"v-00000{1 + turn % 2}"
            call("model", "use", root, name)
            until(lambda n=name: wrong or n in seen[-4:])
        ends.set()
        for thread in threads:
            thread.join()
    assert not wrong
