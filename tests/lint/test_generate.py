"""csrc/spec/generate.py: what a line more in persia.proto becomes in C, and
that Python's copies have what the lists have."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import get_args

import pytest

from persia import _core
from persia.checkpoint.manifest import Table
from persia.optim import RowLimits

ROOT = Path(__file__).resolve().parents[2]


def load() -> ModuleType:
    path = ROOT / "csrc" / "spec" / "generate.py"
    spec = importlib.util.spec_from_file_location("generate", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["generate"] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


generate = load()
PROTO = generate.PROTO.read_text()


def outputs(text: str) -> dict[str, str]:
    return {
        path.name: content
        for path, content in generate.outputs(generate.parse(text)).items()
    }


def test_an_option_beyond_number_15_is_one_line() -> None:
    line = "  float admission = 15; "
    assert line in PROTO
    more = "  uint32 patience = 60;  // @max=9 steps\n"
    out = outputs(PROTO.replace(line, more + line))
    assert "uint32_t patience; /* steps */" in out["lists.h"]
    assert '.name = "patience"' in out["lists.c"]
    assert 'U32, "patience", .limit = 9)' in out["messages.c"]
    assert "WIRE_FIELDS_MAX = 60" in out["messages.h"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("  bytes pad = 15;\n", "", "bytes pad"),
        ("fixed64 boot", "sfixed64 boot", "no message sfixed64"),
        ("uint64 seed = 2;", "oneof seed = 2 {", "oneof seed"),
        ("// @max=TABLES numbered", "// numbered", "@max"),
    ],
)
def test_what_is_not_known_is_refused(
    old: str, new: str, message: str
) -> None:
    assert old in PROTO
    with pytest.raises(generate.ProtoError, match=message):
        outputs(PROTO.replace(old, new))


def test_python_knows_every_option_and_setting() -> None:
    assert set(_core.TABLE_OPTIONS) == set(Table.model_fields) - {
        *("state_floats", "rows", "pushes", "files"),
    }
    assert set(RowLimits.__annotations__) < set(_core.HYPER_PARAMETERS)
    dtypes = get_args(Table.model_fields["dtype"].annotation)
    assert _core.TABLE_OPTIONS["dtype"] == dtypes
    assert _core.HYPER_PARAMETERS["kind"] == _core.TABLE_OPTIONS["optimizer"]
