"""``persia doctor``: what it finds, and what it does when parts are broken."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import re
import resource
import shlex
import socket
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement
from typer.testing import CliRunner

from persia import _core, doctor, errors
from persia.base import requirements as module
from persia.base.cpus import cpu_quota, processors
from persia.base.requirements import required
from persia.cli.app import app
from persia.data.formats.paths import find_files
from persia.data.kafka.brokers import library
from persia.doctor import Finding, examine
from tests.ready import ended

ROOT = Path(__file__).parents[1]


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def found(name: str, root: Path = Path("/")) -> Finding:
    (one,) = [one for one in examine(root) if one.name == name]
    return one


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, None),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/cpu.max": "150000 100000\n",
                "sys/fs/cgroup/a/b/cpu.max": "max 100000\n",
            },
            1.5,
        ),
        (
            {
                "proc/self/cgroup": "0::/\n",
                "sys/fs/cgroup/cpu.max": "50000 100000\n",
            },
            0.5,
        ),
        (
            {
                "proc/self/cgroup": "9:memory:/m\n3:cpu,cpuacct:/c\n",
                "sys/fs/cgroup/cpu/c/cpu.cfs_quota_us": "400000\n",
                "sys/fs/cgroup/cpu/c/cpu.cfs_period_us": "100000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            4.0,
        ),
    ],
)
def test_the_quota_is_the_smallest_of_the_groups(
    files: dict[str, str], cores: float | None, tmp_path: Path
) -> None:
    root = write(tmp_path, files)
    assert cpu_quota(root) == cores
    allowed = float(len(os.sched_getaffinity(0)))
    assert processors(root) == min(allowed, cores or allowed)


def test_more_threads_than_the_quota_are_a_warning(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/cpu.max": "100000 100000\n",
    }
    root = write(tmp_path, files)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        one = found("torch threads", root)
        assert one.state == "warning"
        assert "OMP_NUM_THREADS=1" in one.remedy
        torch.set_num_threads(1)
        assert found("torch threads", root).state == "ok"
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("mode", "state"),
    [
        ("always [madvise] never", "ok"),
        ("[always] madvise never", "ok"),
        ("always madvise [never]", "warning"),
    ],
)
def test_huge_pages(mode: str, state: str, tmp_path: Path) -> None:
    name = "sys/kernel/mm/transparent_hugepage/enabled"
    one = found("huge pages", write(tmp_path, {name: mode}))
    assert one.state == state
    assert bool(one.remedy) == (state == "warning")


def test_a_gpu_that_torch_cannot_use_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert found("GPU", tmp_path).state == "ok"
    assert found("GPU", write(tmp_path, {"dev/nvidia0": ""})).remedy


def test_a_gpu_without_its_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "one")
    monkeypatch.setattr(doctor, "_CUDA", tmp_path / "library")
    assert found("GPU library", tmp_path).remedy
    write(tmp_path, {"library": ""})
    assert found("GPU library", tmp_path).state == "ok"


@pytest.mark.parametrize(
    ("version", "holes", "state"),
    [
        ("29.0.0", "CVE-2023-33953", "warning"),
        ("58.0.0", "", "ok"),
        ("none", "", "warning"),
    ],
)
def test_the_core_of_grpc(
    version: str, holes: str, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_core, "GRPC", version)
    monkeypatch.setattr(_core, "GRPC_HOLES", holes)
    one = found("gRPC core")
    assert one.state == state
    assert holes in one.value
    assert bool(one.remedy) == (state == "warning")


def test_few_files_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 1024))
    assert found("open files").state == "warning"


def test_a_missing_extra_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        doctor, "EXTRAS", (("no_such_package", "remote", "a thing"),)
    )
    one = found("no_such_package")
    assert one.state == "note"
    assert "no_such_package" in one.remedy


def test_a_missing_package_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    packages = {"numpy": "numpy", "no_such_package": "no_such_package"}
    monkeypatch.setattr(doctor, "PACKAGES", packages)
    one = found("packages")
    assert one.state == "broken"
    assert "no_such_package" in one.value and "numpy" not in one.value


def test_a_look_that_fails_is_a_finding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(_: Any) -> Any:
        raise OSError("no limits here")

    monkeypatch.setattr(resource, "getrlimit", fail)
    assert found("limits").state == "broken"


def test_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0, result.output
    assert "torch" in result.output
    result = CliRunner().invoke(app, ["doctor", "--json"])
    names = {one["name"]: one for one in json.loads(result.output)}
    assert names["a step"]["state"] == "ok"
    monkeypatch.setattr(
        doctor, "examine", lambda: [Finding("torch", "broken", "gone")]
    )
    assert CliRunner().invoke(app, ["doctor"]).exit_code == 1


def test_it_touches_no_server_of_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the environment names."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        address = f"127.0.0.1:{server.getsockname()[1]}"
        for name, value in {
            "PERSIA_SERVERS": address,
            "PERSIA_WORKERS": address,
            "PERSIA_NAMESPACE": "job",
            "PERSIA_RUN_ID": "run",
            "PERSIA_TOKEN": "secret",
            "PERSIA_TLS_CA": str(tmp_path / "none.pem"),
            "PERSIA_CHECKPOINTS": str(tmp_path / "none"),
            "RANK": "1",
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": address.rpartition(":")[2],
            "TORCHELASTIC_RUN_ID": "run",
            "TORCHELASTIC_RESTART_COUNT": "no number",
        }.items():
            monkeypatch.setenv(name, value)
        assert found("a step").state == "ok"
        with pytest.raises(BlockingIOError):
            server.accept()
    monkeypatch.setenv("PERSIA_NAMESPACE", "x" * 999)
    monkeypatch.setenv("RANK", "none")
    assert found("a step").state == "ok"
    assert not list(tmp_path.iterdir())


def requirement(remedy: str) -> list[Requirement]:
    """What the commands of a remedy install."""
    found = re.findall(r"pip install (.*)", remedy)
    return [Requirement(word) for line in found for word in shlex.split(line)]


def test_remedies_install_what_the_project_states(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And never another project's package of the name."""
    text = (ROOT / "pyproject.toml").read_text()
    project = tomllib.loads(text)["project"]
    extras = project["optional-dependencies"].values()
    stated = {
        Requirement(one).name: Requirement(one).specifier
        for one in itertools.chain(project["dependencies"], *extras)
    }
    real = importlib.util.find_spec
    lacks = {*doctor.PACKAGES, *(name for name, _, _ in doctor.EXTRAS)}
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: None if name in lacks else real(name),
    )
    for name in ("torch", "persia._torch"):
        monkeypatch.setitem(sys.modules, name, None)
    remedies = [one.remedy for one in examine()]
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(errors.StorageError) as caught:
        find_files("http://127.0.0.1:1/a.csv")
    remedies.append(str(caught.value))
    with pytest.raises(errors.InvalidArgument) as wrong:
        library("no_such_library")
    remedies.append(str(wrong.value))
    wanted = [one for text in remedies for one in requirement(text)]
    assert {one.name for one in wanted} >= {"torch", "PyYAML", "fsspec"}
    for one in wanted:
        assert one.specifier == stated[one.name]
        assert one.name != "persia"


def test_an_installed_persia_states_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there = required(), required("kafka")
    lines = [*there[0]]
    lines += [f'{one}; extra == "kafka"' for one in there[1]]
    monkeypatch.setattr(module, "source_tree", lambda: None)
    monkeypatch.setattr(module.metadata, "requires", lambda _: lines)
    assert (required(), required("kafka")) == there
    assert required("remote") == []


@pytest.mark.slow
def test_a_library_that_is_missing_is_a_line(tmp_path: Path) -> None:
    """In every command; doctor works all the same."""
    text = "libgrpc.so.29: cannot open shared object file: No such file"
    (tmp_path / "run.py").write_text(
        "import sys\n"
        "class Missing:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'persia._core':\n"
        f"            raise ImportError({text!r})\n"
        "sys.meta_path.insert(0, Missing())\n"
        "from persia.cli import main\n"
        "main()\n"
    )

    def call(*args: str) -> Any:
        there = {**os.environ, "PYTHONPATH": str(ROOT)}
        run = str(tmp_path / "run.py")
        return ended(run, *args, env=there, timeout=60)

    for command in (["train", "--json"], ["checkpoint", "ls", "x"]):
        done = call(*command)
        assert done.returncode == 1
        (line,) = done.stderr.splitlines()
        assert line.startswith("persia: error[ImportError]: ")
        assert "libgrpc.so.29" in line and "libgrpc29" in line
        assert not requirement(line)
    for words in ([], ["--json"]):
        done = call("doctor", *words)
        assert done.returncode == 1 and not done.stderr
        assert "libgrpc.so.29" in done.stdout
    states = {one["name"]: one for one in json.loads(done.stdout)}
    assert states["C core"]["state"] == "broken"


@pytest.mark.slow
@pytest.mark.parametrize("gone", ["torch", "persia._core"])
def test_it_starts_where_parts_are_broken(gone: str) -> None:
    code = (
        f"import runpy, sys; sys.modules[{gone!r}] = None; "
        "runpy.run_module('persia.doctor', run_name='__main__')"
    )
    there = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = ended("-c", code, env=there, timeout=60)
    assert result.returncode == 1, result.stderr
    assert "broken" in result.stdout and "->" in result.stdout
