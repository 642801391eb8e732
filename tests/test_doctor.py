"""``persia doctor``: what it finds, and what it does when parts are broken."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from persia import _core, doctor
from persia.cli.app import app
from persia.doctor import Finding, cpu_quota, examine

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
    assert cpu_quota(write(tmp_path, files)) == cores


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
        doctor, "_EXTRAS", (("no_such_package", "remote", "a thing"),)
    )
    one = found("no_such_package")
    assert one.state == "note"
    assert "persia[remote]" in one.remedy


def test_a_missing_package_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_PACKAGES", ("numpy", "no_such_package"))
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


@pytest.mark.slow
@pytest.mark.parametrize("gone", ["torch", "persia._core"])
def test_it_starts_where_parts_are_broken(gone: str) -> None:
    code = (
        f"import runpy, sys; sys.modules[{gone!r}] = None; "
        "runpy.run_module('persia.doctor', run_name='__main__')"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1, result.stderr
    assert "broken" in result.stdout and "->" in result.stdout
