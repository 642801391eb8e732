"""The wheel of ``make wheel``, as somebody without a compiler meets it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from tests.system.processes import ROOT

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

LIMIT = 25 << 20  # bytes

# Both cores in one process, each with a server and a client.
BESIDE_GRPCIO = """
import subprocess, sys
from concurrent import futures
import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
import torch, persia

other = grpc.server(futures.ThreadPoolExecutor(1))
health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), other)
port = other.add_insecure_port("127.0.0.1:0")
other.start()
def ask(port):
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return stub.Check(health_pb2.HealthCheckRequest(), timeout=60).status

ps = subprocess.Popen(
    [sys.executable, "-m", "persia", "serve", "ps", "--port", "0"],
    stdout=subprocess.PIPE, text=True)
address = ps.stdout.readline().split()[-1]
store = persia.Store(servers=address)
bags = persia.EmbeddingBagCollection(
    store=store, tables=[persia.EmbeddingBagConfig("t", 4, ["t"])])
for _ in range(3):
    bags({"t": torch.tensor([1, 2])}).values().sum().backward()
    assert ask(port) == ask(address.split(":")[1]) == 1
assert store.stats()["updates"] == 3
store.close()
other.stop(0)
ps.terminate()
assert ps.wait(60) == 0
maps = open("/proc/self/maps").read()
assert "cygrpc" in maps and "libgrpc" not in maps
print("both")
"""


@pytest.fixture(scope="module")
def wheel() -> Path:
    found = sorted((ROOT / "dist").glob("persia-*-cp311-abi3-*.whl"))
    if not found:
        pytest.skip("there is no wheel: make wheel")
    return max(found, key=lambda path: path.stat().st_mtime)


@pytest.fixture(scope="module")
def place(
    wheel: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """An environment for processes: a venv with the wheel, and on PATH
    nothing but it. The packages that persia needs are those of this one."""
    folder = tmp_path_factory.mktemp("place") / "venv"
    venv.create(folder, with_pip=True, symlinks=True)
    python = folder / "bin" / "python"
    install = [python, "-m", "pip", "install", "-q", "--no-deps", "--no-index"]
    subprocess.run(
        [*install, wheel], check=True, env={"PATH": str(folder / "bin")}
    )
    site = subprocess.run(
        [python, "-c", "import sysconfig as s; print(s.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    packages = sysconfig.get_path("purelib")
    (Path(site) / "packages.pth").write_text(packages + "\n")
    return {
        "PATH": str(folder / "bin"),
        "HOME": str(folder.parent),
        "COLUMNS": "200",
    }


def run(place: dict[str, str], *command: str) -> str:
    program = Path(place["PATH"], command[0])
    result = subprocess.run(
        [program, *command[1:]],
        env=place,
        cwd=place["HOME"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def auc(output: str) -> float:
    """Of the table at the end."""
    (found,) = re.findall(r"│ AUC +│ +([\d.]+)", output)
    return float(found)


def test_it_is_small_and_has_a_tag_of_its_own(wheel: Path) -> None:
    assert wheel.stat().st_size <= LIMIT
    assert "-cp311-abi3-manylinux" in wheel.name


def test_nothing_of_its_grpc_is_visible(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        library = archive.extract("persia/libpersia.so", tmp_path)
    listed = subprocess.run(
        ["nm", "-D", "--defined-only", library],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    names = {
        line.split()[-1].partition("@")[0]
        for line in listed.split("\n")
        if line
    }
    assert [n for n in names if not n.startswith("persia_")] == []


def test_there_is_no_compiler(place: dict[str, str]) -> None:
    for tool in ("cc", "gcc", "g++", "c++", "clang", "make", "cmake", "ninja"):
        assert shutil.which(tool, path=place["PATH"]) is None


def test_the_installation_is_whole(place: dict[str, str]) -> None:
    where = "import persia; print(persia.__file__)"
    assert run(place, "python", "-c", where).startswith(place["HOME"])
    output = run(place, "persia", "doctor")
    (line,) = re.findall(r"gRPC core.*", output)
    assert "holes" not in line
    assert "broken" not in output


def test_it_trains(place: dict[str, str]) -> None:
    output = run(place, "persia", "train", "--samples", "100000")
    assert auc(output) > 0.6


def test_it_launches_servers_and_ranks(place: dict[str, str]) -> None:
    command = ["persia", "launch", "--ps", "2", "--", "python", "-m"]
    command += ["torch.distributed.run", "--nproc-per-node", "2", "-m"]
    command += ["persia", "train", "--samples", "50000"]
    assert auc(run(place, *command)) > 0.55


def test_it_serves_beside_grpcio(place: dict[str, str]) -> None:
    assert run(place, "python", "-c", BESIDE_GRPCIO) == "both\n"


def test_the_tests_of_servers_pass_on_its_core(
    wheel: Path, tmp_path: Path
) -> None:
    """The tests take the package that lies beside them."""
    for name in ("tests", "examples", "benchmarks"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    tests = ["test_exactly_once", "test_restart", "test_serve", "test_status"]
    tests = [f"tests/system/{name}.py" for name in tests]
    tests += ["tests/test_security.py", "tests/test_remote_faults.py"]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *tests],
        cwd=tmp_path,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr
