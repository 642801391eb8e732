"""Lines of a server as JSON, and the file that keeps who changed what."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest

import persia
from persia import _core
from persia.distributed import Security
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
