"""The licences of what wheels hold agree with what is linked."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOTICES = ROOT / "THIRD-PARTY.txt"
GRPC = ROOT / "csrc" / "grpc"

#: Found by headers of what csrc/grpc leaves out (xDS), and by no others.
UNUSED = {"third_party/xxhash"}
#: Texts that stand elsewhere: in LICENSE, and at the address in the note.
ELSEWHERE = {"Apache-2.0", "NVIDIA-CUDA-EULA"}
#: What the libraries of the package load: the system's, torch's, our own,
#: and, where the core is not built in, the gRPC of the system.
LOADED = re.compile(
    r"(libc|libm|libdl|libpthread|librt|libstdc\+\+|libgcc_s|ld-linux-x86-64"
    r"|libtorch_cpu|libc10|libpersia|libpersia_data|libgrpc|libgpr)"
    r"\.so(\.\d+)*"
)


def parts() -> list[dict[str, str]]:
    """The list: each part's fields."""
    found = []
    text = NOTICES.read_text(encoding="utf-8")
    for block in text.partition("\n----")[0].split("\n\n"):
        if block.startswith("Part: "):
            lines = re.sub(r"\n +", " ", block).splitlines()
            found.append(dict(line.split(": ", 1) for line in lines))
    return found


def folders() -> set[str]:
    """Those of grpcio's source archive that are listed."""
    return {f for part in parts() for f in part.get("Folders", "").split()}


def of_third_party(text: str) -> set[str]:
    """Its folders of others' code, without those below them."""
    return set(re.findall(r"(?<!/)\bthird_party/[\w-]+", text))


def test_the_archive_is_the_one_that_is_built() -> None:
    (pin,) = re.findall(
        r"^grpcio==([\d.]+)", (GRPC / "requirements.txt").read_text(), re.M
    )
    text = NOTICES.read_text(encoding="utf-8")
    assert f"Source archive: grpcio {pin} " in text


def test_each_folder_that_is_built_is_listed() -> None:
    text = (GRPC / "CMakeLists.txt").read_text()
    built = of_third_party(text.replace("${source}/", "")) - UNUSED
    assert built and built == of_third_party(" ".join(folders()))


def test_each_source_that_was_compiled_is_listed() -> None:
    """Where make wheel has built the core."""
    graph = ROOT / "build" / "grpc-core" / "build.ninja"
    if not graph.is_file():
        pytest.skip("the gRPC core is not built here")
    text = graph.read_text()
    sources = set(re.findall(r"/grpcio-[\d.]+/(\S+\.(?:cc|c|S))\b", text))
    listed = tuple(f"{folder}/" for folder in folders())
    assert sources
    assert not [s for s in sources if not s.startswith(listed)]


def test_each_licence_has_its_text() -> None:
    text = NOTICES.read_text(encoding="utf-8")
    texts = re.findall(r"^Text: (\S+)\n-+\n\n\S", text, re.M)
    named = {name for part in parts() for name in part["Licences"].split()}
    assert len(texts) == len({*texts})
    assert named == {*texts} | ELSEWHERE
    for part in parts():
        assert part["Copyright"] and part["Linked into"].endswith(".so")
    assert "Apache License" in (ROOT / "LICENSE").read_text()


@pytest.mark.slow
def test_the_libraries_load_nothing_else() -> None:
    """Another one would be copied into the wheel."""
    if shutil.which("readelf") is None:
        pytest.skip("no readelf")
    for path in (ROOT / "persia").glob("*.so"):
        done = subprocess.run(
            ["readelf", "-d", str(path)],
            capture_output=True,
            text=True,
            check=True,
        )
        needed = re.findall(r"\(NEEDED\).*\[(.+)\]", done.stdout)
        assert needed
        assert not [name for name in needed if not LOADED.fullmatch(name)]


def test_static_libraries_are_listed() -> None:
    """Of CMake's files: the gRPC core, and CUDA's runtime."""
    text = "".join(p.read_text() for p in (ROOT / "csrc").glob("*.cmake"))
    assert {*re.findall(r"[\w.+-]+\.a\b", text)} == {"libgrpc_core.a"}
    assert ("cudart static" in text) == any(
        part.get("Linked into") == "libpersia_cuda.so" for part in parts()
    )


def test_the_texts_go_into_wheels() -> None:
    """That a wheel has them checks test_package.py."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["license-files"] == ["LICENSE", "THIRD-PARTY.txt"]
