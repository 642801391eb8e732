"""``persia serve model`` in several processes: one port, the rows in memory
once, one end."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

import persia
from persia import _core, errors
from persia.serving.processes import held
from tests.serving.conftest import call, lines_of, until
from tests.serving.test_server import INFER, ask, body_of, raw
from tests.system.processes import is_there

pytest.importorskip("uvicorn", reason="persia[serve] is not installed")
pytestmark = pytest.mark.slow
PROCESSES = 2


class Several:
    """A running command, and what it has said."""

    def __init__(self, process: subprocess.Popen[str], lines: list[str]):
        self.process = process
        self.lines = lines

    def address(self, word: str) -> str:
        (line,) = (one for one in self.lines if one.startswith(word))
        return line.split()[-1]

    def children(self) -> list[int]:
        pid = self.process.pid
        path = Path(f"/proc/{pid}/task/{pid}/children")
        return [int(one) for one in path.read_text().split()]


@contextlib.contextmanager
def several(root: Path, *words: str) -> Iterator[Several]:
    command = [sys.executable, "-m", "persia", "serve", "model"]
    command += [f"clicks={root}", "--port", "0"]
    command += ["--processes", str(PROCESSES), *words]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            yield Several(process, lines_of(process))
        finally:
            process.kill()


def answered(url: str) -> float:
    with urllib.request.urlopen(url, timeout=60) as page:
        text = page.read().decode()
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "persia_serving_requests_total"
    )


def test_processes_share_port_and_rows(place: Path) -> None:
    body = body_of(raw(place, 5))
    words = ["--metrics-port", "0"]
    words += [] if _core.GRPC == "none" else ["--grpc-port", "0"]
    with several(place / "out", *words) as one:
        at = one.address("serving")
        pages = [x.split()[-1] for x in one.lines if "/metrics" in x]
        assert len(pages) == PROCESSES
        for _ in range(60):  # each is a connection
            assert ask(at, INFER, body)[0] == 200
        counts = [answered(page) for page in pages]
        assert sum(counts) == 60 and all(counts)
        _check_memory(one.children(), place / "out" / "v-000002")
        if _core.GRPC != "none":
            _check_grpc(one.address("gRPC"), place)
        path = "/v2/repository/models/clicks/"
        for verb in "load", "unload":  # it would reach one of them
            status, _, headers = ask(at, f"{path}{verb}", {})
            assert (status, headers["persia-error"]) == (
                400,
                "InvalidArgument",
            )
        one.process.send_signal(signal.SIGTERM)
        assert one.process.stdout is not None
        rest = one.process.stdout.read()
        assert one.process.wait(60) == 0, rest
        assert rest.count("all requests were answered") == PROCESSES


def _check_memory(pids: list[int], version: Path) -> None:
    """The pages of rows are those of the file, and no process has its own."""
    name = "rows-0000.safetensors"
    kept = {"Pss": 0, "Private_Dirty": 0}
    for pid in pids:
        here = False
        for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
            words = line.split()
            if not words[0].endswith(":"):
                here = line.endswith(f"{version.name}/{name}")
            elif here and words[0][:-1] in kept:
                kept[words[0][:-1]] += int(words[1]) * 1024
    size = (version / name).stat().st_size
    assert 0 < kept["Pss"] <= size + os.sysconf("SC_PAGESIZE")
    assert kept["Private_Dirty"] == 0


def _check_grpc(address: str, place: Path) -> None:
    triton = pytest.importorskip(
        "tritonclient.grpc", reason="tritonclient[grpc] is not installed"
    )
    from tests.serving.test_grpc import inputs_of

    want = persia.load_model(place / "out").predict(raw(place, 5))
    with triton.InferenceServerClient(address) as client:
        found = client.infer("clicks", inputs_of(raw(place, 5)))
        assert abs(found.as_numpy("score") - want.numpy()).max() < 1e-6


def test_a_rollback_reaches_all(place: Path, tmp_path: Path) -> None:
    root = tmp_path / "out"
    shutil.copytree(place / "out", root)
    body = body_of(raw(place, 1))
    with several(root, "--poll", "0.1") as one:
        at = one.address("serving")
        call("model", "use", root, "v-000001")

        def all_answer() -> bool:
            found = [ask(at, INFER, body)[1] for _ in range(20)]
            return {x["model_version"] for x in found} == {"v-000001"}

        until(all_answer)


@pytest.mark.parametrize("which", ["child", "parent"])
def test_if_one_is_killed_all_end(which: str, place: Path) -> None:
    with several(place / "out") as one:
        children = one.children()
        assert len(children) == PROCESSES
        killed = children[1] if which == "child" else one.process.pid
        os.kill(killed, signal.SIGKILL)
        status = one.process.wait(60)
        assert status == (1 if which == "child" else -signal.SIGKILL)
        until(lambda: not any(map(is_there, children)))


def test_a_model_that_cannot_be_loaded_is_said_once(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "persia", "serve", "model"]
    command += [str(tmp_path / "none"), "--port", "0", "--processes", "3"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 1
    assert done.stderr.count("StorageError") == 1


def test_a_port_that_others_share_is_taken() -> None:
    with held("127.0.0.1", 0) as port, socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", port))  # as a child does
        other.listen()
        with pytest.raises(errors.StorageError), held("127.0.0.1", port):
            pass
