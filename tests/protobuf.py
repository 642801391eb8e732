"""What stock protoc makes of persia.proto: the oracle of tests of the wire."""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

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


def compiled(source: str, name: str, folder: Path) -> tuple[Path, Any]:
    """A descriptor set of a source, and the class of one of its messages."""
    from google.protobuf import (
        descriptor_pb2,
        descriptor_pool,
        message_factory,
    )

    path = folder / "descriptors.pb"
    (folder / "source.proto").write_text(source)
    arguments = ["protoc", f"-I{folder}", "--include_imports"]
    arguments += [f"-I{Path(protoc.__file__).parent / '_proto'}"]
    arguments += [f"--descriptor_set_out={path}", "source.proto"]
    assert protoc.main(arguments) == 0
    files = descriptor_pb2.FileDescriptorSet.FromString(path.read_bytes())
    pool = descriptor_pool.DescriptorPool()
    for file in files.file:
        pool.Add(file)
    kind = pool.FindMessageTypeByName(name)
    return path, message_factory.GetMessageClass(kind)
