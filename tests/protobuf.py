"""What stock protoc makes of persia.proto: the oracle of tests of the wire."""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from functools import cache
from pathlib import Path
from types import ModuleType

from grpc_tools import protoc

PROTO = Path(__file__).resolve().parent.parent / "persia" / "persia.proto"


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # persia_pb2_grpc imports persia_pb2
    spec.loader.exec_module(module)
    return module


@cache
def stubs() -> tuple[ModuleType, ModuleType]:
    """The generated modules persia_pb2 (messages) and persia_pb2_grpc."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["protoc", f"-I{PROTO.parent}", f"--python_out={folder}"]
        arguments += [f"--grpc_python_out={folder}", str(PROTO)]
        assert protoc.main(arguments) == 0
        return (
            _load(Path(folder) / "persia_pb2.py"),
            _load(Path(folder) / "persia_pb2_grpc.py"),
        )
