"""Builds the native libraries with CMake; all metadata is in pyproject.toml.

The libraries are compiled against the torch of the environment in which
persia is installed, also when pip builds in isolation; only where there is
none does the build ask for one of its own.

PERSIA_GRPC_CORE, of the environment, is a folder that csrc/grpc built: its
gRPC core goes into the wheel (make wheel).  Without it the package needs that
of the system.
"""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
LIBRARIES = ("libpersia.so", "libpersia_data.so", "_core.abi3.so", "_torch.so")
FIND_TORCH = """
import importlib.util, sys
sys.exit(importlib.util.find_spec("torch") is None)
"""


def has_torch(*flags: str) -> bool:
    """Whether this interpreter, run with `flags`, finds torch."""
    return subprocess.call([sys.executable, *flags, "-c", FIND_TORCH]) == 0


def python_with_torch() -> Path:
    """An executable that finds torch.

    The flag -I leaves out PYTHONPATH, by which pip's isolated build
    environment hides the user's packages.
    """
    launcher = ROOT / "build" / "python-with-torch"
    flag = "" if has_torch() else "-I"
    launcher.parent.mkdir(exist_ok=True)
    launcher.write_text(f'#!/bin/sh\nexec "{sys.executable}" {flag} "$@"\n')
    launcher.chmod(0o755)
    return launcher


def build_requirements() -> list[str]:
    """What the machine lacks of cmake, ninja and torch."""
    needed = []
    if not shutil.which("cmake"):
        needed.append("cmake>=3.25")
    if not shutil.which("ninja"):
        needed.append("ninja")
    if not has_torch() and not has_torch("-I"):
        needed.append("torch==2.13.0")
    return needed


def compiles(compiler: str, code: str, *flags: str) -> bool:
    """Whether `compiler` is there and takes the code."""
    try:
        run = subprocess.run(
            [compiler, *flags, "-fsyntax-only", "-"],
            input=code,
            text=True,
            capture_output=True,
            check=False,
        )
    except OSError:
        return False
    return run.returncode == 0


def system_packages() -> list[str]:
    """What the machine lacks and pip cannot bring, by the names that Debian
    has for it."""
    cc, cxx = os.environ.get("CC", "cc"), os.environ.get("CXX", "c++")
    include = f"-I{sysconfig.get_path('include')}"
    python = f"python{sys.version_info[0]}.{sys.version_info[1]}-dev"
    needed = []
    if not compiles(cc, "#include <stdio.h>\n", "-xc"):
        return ["gcc", "g++", "libc6-dev", python, "libgrpc-dev"]
    if not compiles(cxx, "#include <vector>\n", "-xc++"):
        needed.append("g++")
    if not compiles(cc, "#include <Python.h>\n", "-xc", include):
        needed.append(python)
    # Without it persia is built for one process; CMake warns.
    return needed


def check_platform() -> None:
    """Ends the build where Persia does not run, with the reason."""
    found = runpy.run_path(str(ROOT / "persia" / "base" / "platforms.py"))
    if why := found["unsupported"]():
        raise SystemExit(why)


class BuildNative(build_ext):
    """Runs CMake; its outputs lie beside the Python files of the package."""

    def destination(self) -> Path:
        """The folder into which the libraries go."""
        lib = ROOT if self.inplace else Path(self.build_lib).resolve()
        return lib / "persia"

    def run(self) -> None:
        """Configure, build, and copy the headers of the C interface."""
        if packages := system_packages():
            raise SystemExit(
                "persia is compiled here, and the machine lacks "
                f"{', '.join(packages)} (names of Debian's packages): "
                f"install them (apt-get install {' '.join(packages)}), or "
                "take a wheel, which needs none of them (docs/install.md)"
            )
        build = Path(self.build_temp).resolve()
        core = os.environ.get("PERSIA_GRPC_CORE", "")
        subprocess.check_call(
            [
                "cmake",
                "-S",
                str(ROOT / "csrc"),
                "-B",
                str(build),
                "-G",
                "Ninja",
                f"-DPERSIA_PYTHON={python_with_torch()}",
                f"-DPERSIA_OUTPUT={self.destination()}",
                "-DPERSIA_WERROR=OFF",
                f"-DPERSIA_GRPC_CORE={core and Path(core).resolve()}",
                "-DCMAKE_SHARED_LINKER_FLAGS=-Wl,-S",
                "-DCMAKE_MODULE_LINKER_FLAGS=-Wl,-S",
            ]
        )
        subprocess.check_call(
            ["cmake", "--build", str(build), "--target", "libraries"]
        )
        if not self.inplace:
            for header in self.public_headers():
                target = self.header_target(header)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(header, target)

    def public_headers(self) -> list[Path]:
        """persia.h and all that it includes."""
        found = [ROOT / "csrc" / "persia.h"]
        for header in found:  # which grows
            names = re.findall(r'#include "(.+)"', header.read_text())
            headers = (ROOT / "csrc" / name for name in names)
            found += [h for h in headers if h not in found]
        return found

    def header_target(self, header: Path) -> Path:
        """Where a header lies in the installed package."""
        return (
            self.destination() / "include" / header.relative_to(ROOT / "csrc")
        )

    def get_outputs(self) -> list[str]:
        """All files that run() makes."""
        files = [self.destination() / name for name in LIBRARIES]
        files += [self.header_target(h) for h in self.public_headers()]
        return [str(f) for f in files]

    def get_output_mapping(self) -> dict[str, str]:
        """For editable installs: the libraries are built in place."""
        return {}


check_platform()
commands: dict[str, Any] = {"build_ext": BuildNative}
setup(
    cmdclass=commands,
    # The extensions need no more than Python's limited API of 3.11.
    ext_modules=[Extension("persia._core", [], py_limited_api=True)],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
    setup_requires=build_requirements(),
)
