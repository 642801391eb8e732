"""Lines of a server as JSON, and the file that keeps who changed what."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

import persia
from persia import _core
from persia.distributed import Security
from tests.remote import Servers
from tests.system.processes import environment
from tests.system.test_serve import Client

if not _core.GRPC[0].isdigit():
    pytest.skip("built without gRPC", allow_module_level=True)

TABLE = persia.EmbeddingBagConfig('a "quoted" name', 4, ["f"])


def objects(text: str) -> list[dict[str, Any]]:
    """Of lines that are each an object with time and level."""
    found = [json.loads(line) for line in text.splitlines()]
    for one in found:
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:.]+Z", one["time"])
        assert one["level"] in ("info", "warning", "error")
    return found


def ended(process: subprocess.Popen[str]) -> tuple[str, str]:
    process.send_signal(signal.SIGTERM)
    output, messages = process.communicate(timeout=60)
    assert process.returncode == 0, messages
    return output, messages


@pytest.mark.slow
def test_lines_and_audits(tmp_path: Path) -> None:
    """Calls that were denied are counted in both; the file has all that was
    erased, and what the lines have not."""
    audits = tmp_path / "audits"
    audits.write_text('{"time": "2026-01-01T00:00:00Z", "level": "info"}\n')
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "persia", "serve", "ps", "--port", "0"),
            *("--token", "tok", "--log-format", "json"),
            *("--audit-log", str(audits)),
        ],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        (said,) = objects(process.stdout.readline())
        assert (said["role"], said["namespace"]) == ("server", "default")
        address = said["message"].rpartition(" ")[2]
        client = Client(address)
        for _ in range(5):
            with pytest.raises(grpc.RpcError):
                client.hello()
        with contextlib.closing(
            persia.Store(
                persia.optim.SGD(lr=1.0),
                servers=address,
                security=Security(token="tok"),
            )
        ) as store:
            store.add_table(TABLE)
            for i in range(5):
                store.erase(TABLE.name, [i, i + 100])
        _, messages = ended(process)
    finally:
        process.kill()
        process.communicate()
    lines = [one for one in objects(messages) if "event" in one]
    kept = objects(audits.read_text())[1:]
    for one in lines + kept:
        assert (one["role"], one["shard"]) == ("server", 0)
    assert [one["event"] for one in lines] == [
        *("denied",) * 3,
        *("erased",) * 3,
        *("denied", "erased"),
    ]
    assert [one.get("more") for one in lines[6:]] == [2, 2]
    assert [one["event"] for one in kept] == [
        *("denied",) * 3,
        *("erased",) * 5,
        "denied",
    ]
    assert kept[-1]["more"] == 2
    assert {one["reason"] for one in kept[:3]} == {"missing"}
    for one in kept[3:8]:
        assert one["name"] == "token"  # of --token
        assert (one["table"], one["ids"]) == (TABLE.name, 2)
        assert one["peer"].startswith("ipv4:127.0.0.1:")


def denied_by(name: str, audits: Path, *words: str) -> None:
    """A process of that role denies calls: the first three are lines, and how
    many more there were."""
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "persia", "serve", *words),
            *("--port", "0", "--token", "tok", "--log-format", "json"),
            *("--audit-log", str(audits)),
        ],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        said = (json.loads(line) for line in process.stdout)
        texts = [next(said)["message"]]
        while not texts[-1].startswith("serving "):
            texts.append(next(said)["message"])
        address = texts[-1].rpartition(" ")[2]
        methods = {"/persia.v1.EmbeddingWorker/Stats"}
        if name == "serving":
            methods = {"/inference.GRPCInferenceService/ServerMetadata"}
            (found,) = (t for t in texts if t.startswith("gRPC on "))
            for _ in range(5):
                with pytest.raises(urllib.error.HTTPError):
                    urllib.request.urlopen(f"http://{address}/v2")
            address = found.rpartition(" ")[2]
        with grpc.insecure_channel(address) as channel:
            (method,) = methods
            call = channel.unary_unary(method)
            for _ in range(5):
                with pytest.raises(grpc.RpcError):
                    call(b"", metadata=[("authorization", "Bearer no")])
        _, messages = ended(process)
    finally:
        process.kill()
        process.communicate()
    lines = [one for one in objects(messages) if "event" in one]
    kept = [one for one in objects(audits.read_text()) if "event" in one]
    assert [one | {"time": ""} for one in lines] == [
        one | {"time": ""} for one in kept
    ]
    doors = 2 if name == "serving" else 1  # HTTP, gRPC
    assert len(lines) == 4 * doors
    for one in lines:
        assert (one["event"], one["role"]) == ("denied", name)
        assert "shard" not in one
    full = [one for one in lines if "more" not in one]
    assert {one["method"] for one in full} == methods
    assert {one["reason"] for one in full} <= {"missing", "wrong"}
    assert all("127.0.0.1:" in one["peer"] for one in full)
    assert [one["more"] for one in lines if "more" in one] == [2] * doors


@pytest.mark.slow
def test_embedding_workers_say_what_they_deny(tmp_path: Path) -> None:
    with contextlib.closing(Servers(1)) as servers:
        denied_by(
            *("embedding-worker", tmp_path / "audits", "worker"),
            *("--servers", servers.text),
        )


@pytest.mark.slow
def test_served_models_say_what_they_deny(tmp_path: Path) -> None:
    pytest.importorskip("uvicorn", reason="persia[serve] is not installed")
    store = persia.Store(persia.optim.SGD(lr=1.0))
    model = torch.nn.Sequential(
        persia.nn.Embedding(None, 4, store=store, name="t"),
        torch.nn.Linear(4, 1),
    )
    persia.export(model, tmp_path / "m", example=torch.tensor([1, 2]))
    store.close()
    denied_by(
        *("serving", tmp_path / "audits", "model", str(tmp_path / "m")),
        *("--grpc-port", "0"),
    )


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "persia", "serve", "ps", "--dry-run"),
            *("--audit-log", str(tmp_path / "none" / "audits")),
        ],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert "StorageError" in done.stderr and "audits" in done.stderr
