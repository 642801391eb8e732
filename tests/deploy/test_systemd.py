"""The units of deploy/systemd: as systemd reads them, and their very commands
as processes."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import signal
import socket
import string
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import persia
from persia import _core
from persia.distributed import write_certificates
from tests.deploy.manifests import DEPLOY
from tests.deploy.test_manifests import variables
from tests.system.processes import environment
from tests.system.shards import free_port

sys.path.insert(0, str(DEPLOY.parent / "docs" / "_tools"))
import tables

if not _core.GRPC[0].isdigit():
    pytest.skip("built without gRPC", allow_module_level=True)

PROGRAM = "/opt/persia/bin/persia"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
ANALYZE = shutil.which("systemd-analyze")
EVERY = pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
#: Credentials -> files of `persia certs`.
KEYS = {
    "ca.crt": "ca.pem",
    "tls.crt": "server.pem",
    "tls.key": "server-key.pem",
    "token": "token",
    "admin-token": "admin-token",
}
EXPOSED = 30  # of 100, at most: what systemd-analyze security counts


def settings(path: Path) -> dict[str, list[str]]:
    """Those of a unit; a name may be there several times."""
    found: dict[str, list[str]] = {}
    text = path.read_text(encoding="utf-8").replace("\\\n", " ")
    for line in text.splitlines():
        name, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            found.setdefault(name, []).append(value)
    return found


def command(path: Path) -> list[str]:
    """Its words, from "persia" on."""
    (line,) = settings(path)["ExecStart"]
    words = shlex.split(line)
    assert words[0] == PROGRAM
    return ["persia", *words[1:]]


@pytest.mark.skipif(ANALYZE is None, reason="no systemd-analyze")
@EVERY
def test_systemd_takes_the_unit(path: Path, tmp_path: Path) -> None:
    unit = tmp_path / path.name
    unit.write_text(path.read_text().replace(PROGRAM, "/bin/true"))
    assert ANALYZE is not None
    for words in (
        ["verify", "--man=no"],
        ["security", "--offline=true", f"--threshold={EXPOSED}"],
    ):
        done = subprocess.run(
            [ANALYZE, *words, str(unit)], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        if words[0] == "verify":  # it does not fail for an unknown name
            assert path.name not in done.stderr, done.stderr


@EVERY
def test_options_and_variables_are_known(path: Path) -> None:
    words = command(path)
    flags = {w.partition("=")[0] for w in words if w.startswith("--")}
    name = " ".join(w for w in words if re.fullmatch(r"\w+", w))
    model = tables.configurations()[name]
    known = {
        "--" + (f.alias or key).replace("_", "-")
        for key, f in model.model_fields.items()
    }
    assert flags <= known
    text = path.read_text(encoding="utf-8")
    used = re.findall(r"\b(PERSIA_\w+)=|\$\{(\w+)\}", text)
    assert {one or other for one, other in used} <= variables()


@EVERY
def test_credentials_and_times_agree(path: Path) -> None:
    found = settings(path)
    loaded = {c.partition(":")[0] for c in found["LoadCredential"]}
    used = set(re.findall(r"%d/([\w.-]+)", path.read_text(encoding="utf-8")))
    assert loaded == used <= set(KEYS)
    flags = dict(w.split("=") for w in command(path) if "=" in w)
    grace = float(flags.get("--grace", "30"))
    assert float(found["TimeoutStopSec"][0]) >= grace + 5


def test_each_process_of_a_machine_has_ports_of_its_own() -> None:
    ports = [
        word
        for path in UNITS
        for word in command(path)
        if re.match(r"--(metrics-)?port=", word)
    ]
    numbers = [word.partition("=")[2] for word in ports]
    assert len(set(numbers)) == len(numbers)


class Unit:
    """A unit that runs as a process, as systemd would start it."""

    def __init__(
        self,
        path: Path,
        folder: Path,
        ports: dict[str, int],
        job: dict[str, str],
    ) -> None:
        found = settings(path)
        (folder / "state").mkdir(exist_ok=True)

        def here(text: str) -> str:
            text = text.replace("%i", "0").replace("%d", str(folder / "keys"))
            text = text.replace("%S", str(folder / "state"))
            text = text.replace("%C", str(folder / "cache"))
            text = string.Template(text).safe_substitute(job)
            return re.sub(
                r"port=(\d+)",
                lambda m: f"port={ports.setdefault(m[1], free_port())}",
                text,
            ).replace("=0.0.0.0", "=127.0.0.1")

        own = " ".join(found.get("Environment", []))
        given = dict(w.split("=", 1) for w in here(own).split())
        self._notes = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._notes.settimeout(60)
        self._notes.bind(str(folder / f"{path.stem}.notify"))
        given["NOTIFY_SOCKET"] = self._notes.getsockname()
        self.log = folder / f"{path.stem}.out"
        with open(self.log, "wb") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *map(here, command(path))],
                env=environment(**job, **given),
                stdout=out,
                stderr=subprocess.STDOUT,
            )

    def said(self) -> bytes:
        """Its next word to systemd."""
        try:
            return self._notes.recv(100)
        except TimeoutError:
            raise AssertionError(self.log.read_text()) from None

    def stop(self) -> int:
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(60)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._notes.close()


def export(root: Path) -> None:
    """A model of ids."""
    store = persia.Store(persia.optim.SGD(lr=1.0))
    rows = persia.nn.Embedding(None, 4, store=store, name="t")
    model = torch.nn.Sequential(rows, torch.nn.Linear(4, 1))
    persia.export(model, root, example=torch.tensor([1, 2]))
    store.close()


def test_the_commands_start_and_report_it(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    write_certificates(keys, ["127.0.0.1"])
    for name, made in KEYS.items():
        if name != made:
            os.symlink(keys / made, keys / name)
    ports = {"8888": free_port()}
    job = {
        "PERSIA_SHARDS": "1",
        "PERSIA_SERVERS": f"127.0.0.1:{ports['8888']}",
        "PERSIA_SERVE_PS_CHECKPOINTS": str(tmp_path / "checkpoints"),
        "PERSIA_SERVE_PS_RESTORE": "clicks",
        "PERSIA_SERVE_PS_SAVE_ON_EXIT": "clicks",
        "PERSIA_TRAIN_EXPORT_TO": str(tmp_path / "exported"),
    }
    names = ["persia-ps@.service", "persia-worker.service"]
    if importlib.util.find_spec("uvicorn"):  # persia[serve]
        names.append("persia-model.service")
        export(tmp_path / "exported")
    started: list[Unit] = []
    folder = DEPLOY / "systemd"
    try:
        for name in names:
            started.append(Unit(folder / name, tmp_path, ports, job))
            assert started[-1].said() == b"READY=1"
        for unit in reversed(started):
            assert unit.stop() == 0, unit.log.read_text()
            assert unit.said() == b"STOPPING=1"
    finally:
        for unit in started:
            unit.kill()
    assert "saved clicks" in started[0].log.read_text()
    assert any((tmp_path / "state" / "persia-ps-0").iterdir())
