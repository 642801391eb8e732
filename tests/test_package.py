"""The wheel: one binary for Python 3.11 and later, and all that it needs."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_string
from email.message import Message
from pathlib import Path

import pytest

from tests.ready import ended

ROOT = Path(__file__).parents[1]


def test_pins_are_versions_that_every_index_has() -> None:
    """Not one of this machine's own builds, as ``pip freeze`` writes them:
    torch==2.13.0+cpu is not on PyPI, torch==2.13.0 takes either."""
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    assert any(pin.startswith("torch==") for pin in pins)
    assert [pin for pin in pins if "+" in pin or "@" in pin] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["libpersia.so", "libpersia_data.so"])
def test_exported_symbols_begin_with_persia(name: str) -> None:
    """Other libraries of the process may have a table_get() of their own."""
    table = subprocess.run(
        ["nm", "-D", "--defined-only", str(ROOT / "persia" / name)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    names = {line.split()[-1] for line in table.splitlines()}
    # The linker's, and those by which a function's clone is chosen.
    names = {n for n in names if not n.startswith("_") and "." not in n}
    assert names
    assert [n for n in sorted(names) if not n.startswith("persia_")] == []


def files_of(folder: str, *without: str) -> set[str]:
    """What is in a folder of the source tree but for what builds make."""
    return {
        str(path.relative_to(ROOT))
        for path in (ROOT / folder).rglob("*")
        if path.is_file()
        and ".so" not in path.suffixes
        and "__pycache__" not in path.parts
        and path.relative_to(ROOT).parts[1] not in without
    }


def metadata_of(site: Path) -> Message:
    """Of the one wheel that was unpacked there."""
    (found,) = site.glob("persia-*.dist-info/METADATA")
    return message_from_string(found.read_text())


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_source_archive_makes_a_wheel(tmp_path: Path) -> None:
    archive = [sys.executable, "setup.py", "-q", "sdist", "-d", str(tmp_path)]
    subprocess.run(archive, cwd=ROOT, check=True)
    (source,) = tmp_path.glob("persia-*.tar.gz")
    with tarfile.open(source) as sources:
        packed = {name.partition("/")[2] for name in sources.getnames()}
    assert files_of("csrc", "tests", "fuzz") <= packed
    assert not any(n.startswith("tests/") for n in packed)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps"]
    command += ["--no-build-isolation", "-w", str(tmp_path), str(source)]
    result = subprocess.run(
        command, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert "-cp311-abi3-linux" in wheel.name

    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(tmp_path / "site")
    needed = {
        "persia/libpersia.so",
        "persia/libpersia_data.so",
        "persia/_core.abi3.so",
        "persia/_torch.so",
        "persia/include/persia.h",
        "persia/include/table/table.h",
    }
    assert needed | files_of("persia") <= names
    for text in ("LICENSE", "THIRD-PARTY.txt"):
        assert any(n.endswith(f".dist-info/licenses/{text}") for n in names)
    assert not any("csrc" in n or n.startswith("tests") for n in names)

    # It works from there, with nothing of the source tree in reach.
    use = "import persia.train; print(persia.Store().stats()['updates'])"
    version = metadata_of(tmp_path / "site")["Version"]
    for words, said in (
        (["-c", use], "0"),
        (["-m", "persia", "--version"], f"persia {version}"),
        (["-m", "persia", "train", "--samples", "2000"], "AUC"),
    ):
        result = subprocess.run(
            [sys.executable, *words],
            cwd=tmp_path / "site",
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0, result.stderr
        assert said in result.stdout

    # The headers are whole: a C program compiles with them alone.
    include = tmp_path / "site" / "persia" / "include"
    subprocess.run(
        ["cc", "-fsyntax-only", "-x", "c", "-", f"-I{include}"],
        input="#include <persia.h>\nint main(void) { return PERSIA_OK; }\n",
        text=True,
        check=True,
    )


@pytest.mark.slow
def test_without_a_compiler_the_packages_are_named(tmp_path: Path) -> None:
    """Of the system; what pip brings is not among them."""
    result = subprocess.run(
        [sys.executable, "setup.py", "build_ext", "-t", str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"CC": "no-such-cc", "CXX": "no-such-cxx"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode != 0
    for package in ("gcc", "g++", "libgrpc-dev"):
        assert package in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.slow
def test_torch_is_imported_only_when_it_is_needed() -> None:
    """And its dynamo, which takes as long again, only by what compiles."""
    code = """
import sys
import persia
from persia.cli.app import app
assert "torch" not in sys.modules
for name in persia.__all__:
    assert getattr(persia, name) is not None
assert set(persia.__all__) <= set(dir(persia))
assert "torch" in sys.modules
names = "admission checkpoint data datasets distributed errors eviction"
names += " metrics models nn optim prometheus store train __version__"
assert set(names.split()) <= set(persia.__all__)
try:
    persia.nothing
except AttributeError as e:
    assert "'nothing'" in str(e)
else:
    raise AssertionError

import torch
from persia.train import run
bags = persia.EmbeddingBagCollection(
    tables=[persia.EmbeddingBagConfig("a", 4, ["a"])]
)
out = bags({"a": torch.tensor([1, 2])}).values()
out.sum().backward()
assert bags.store.stats()["updates"] == 1
assert "torch._dynamo" not in sys.modules
sys.argv = ["persia", "train", "--samples", "1000", "--warmup", "2"]
try:
    app()
except SystemExit as end:
    assert not end.code
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.slow
def test_a_source_tree_without_its_core_says_so(tmp_path: Path) -> None:
    skip = shutil.ignore_patterns("*.so*", "__pycache__")
    shutil.copytree(ROOT / "persia", tmp_path / "persia", ignore=skip)
    done = ended(
        *("-c", "import persia; persia.Store"),
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        timeout=60,
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError") and "make build" in last
