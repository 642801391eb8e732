"""tests/lint/package.py of the package, and of trees that are wrong; the type
stub against the module."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from persia import _core
from tests.lint import package

ROOT = Path(__file__).parents[2]
PERSIA = ROOT / "persia"


def test_no_module_uses_private_names_of_another() -> None:
    found = [
        finding
        for path in sorted(PERSIA.rglob("*.py"))
        if path.relative_to(PERSIA).as_posix() != package.TORCH
        for finding in package.private_names(path)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("from persia.x import _name", "persia.x._name"),
        ("def f(store):\n    return store._handle", "store._handle"),
        ("import torch\ntorch._C._x()", "torch._C._x"),
    ],
)
def test_private_names_are_found(tmp_path: Path, text: str, name: str) -> None:
    (tmp_path / "a.py").write_text(text)
    found = [name for _, _, name in package.private_names(tmp_path / "a.py")]
    assert name in found


def test_own_private_names_are_not_found(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        "class A:\n"
        "    _b = 1\n"
        "    def f(self, other):\n"
        "        self._c = other._b\n"
        "        return other._c, self._d, other.__dict__\n"
    )
    assert list(package.private_names(tmp_path / "a.py")) == []


def test_modules_do_not_import_each_other() -> None:
    assert package.cycles(PERSIA) == []


def test_a_circle_of_imports_is_found(tmp_path: Path) -> None:
    (tmp_path / "__init__.py").touch()
    (tmp_path / "a.py").write_text("from persia.b import f\n")
    (tmp_path / "b.py").write_text("def g():\n    from persia import a\n")
    assert package.cycles(tmp_path) == []
    (tmp_path / "b.py").write_text("from persia import a\n")
    assert {"persia.a", "persia.b"} == {*package.cycles(tmp_path)}
    text = "if TYPE_CHECKING:\n    from persia import a\n"
    (tmp_path / "b.py").write_text(text)
    assert package.cycles(tmp_path) == []


def test_tests_use_no_more_private_names() -> None:
    found = package.private_in_tests(PERSIA, ROOT / "tests")
    assert len(found) <= package.PRIVATE_IN_TESTS, found


def test_no_module_has_the_name_of_a_function() -> None:
    found = [
        finding
        for init in sorted(PERSIA.rglob("__init__.py"))
        for finding in package.hidden_names(init.parent)
    ]
    assert found == []


def test_hidden_names_are_found(tmp_path: Path) -> None:
    root = tmp_path / "persia"
    root.mkdir()
    (root / "__init__.py").write_text(
        "from persia import errors\nfrom persia.ids import find\n"
    )
    (root / "errors.py").write_text("")
    (root / "ids.py").write_text("def find(): ...\n")
    (root / "find.py").write_text("")
    (root / "plan.py").write_text("def plan(): ...\n")
    found = {path.name for path, _, _ in package.hidden_names(root)}
    assert found == {"find.py", "plan.py"}


def test_packages_import_earlier_ones() -> None:
    assert list(package.later_packages(PERSIA)) == []


def test_later_packages_are_found(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "a.py").write_text(
        "from persia import errors, nn\nfrom persia.store.rows import Rows\n"
        "def f():\n    from persia.cli import app\n"
    )
    found = [text for _, _, text in package.later_packages(tmp_path)]
    assert found == ["base imports nn", "base imports store"]


def _stub() -> tuple[set[str], dict[str, set[str]]]:
    """Names of the stub, and of each class its own."""
    names: set[str] = set()
    classes: dict[str, set[str]] = {}
    for node in ast.parse((PERSIA / "_core.pyi").read_text()).body:
        match node:
            case ast.FunctionDef(name=name):
                names.add(name)
            case ast.ClassDef(name=name, body=body):
                names.add(name)
                own = {n.name for n in body if isinstance(n, ast.FunctionDef)}
                own |= {
                    n.target.id
                    for n in body
                    if isinstance(n, ast.AnnAssign)
                    and isinstance(n.target, ast.Name)
                }
                classes[name] = own
            case ast.AnnAssign(target=ast.Name(id=name)):
                names.add(name)
    return names, classes


def test_the_stub_has_the_names_of_the_module() -> None:
    """Types of its own have an underscore."""
    names, classes = _stub()
    names = {n for n in names if not n.startswith("_")}
    assert names == {n for n in dir(_core) if not n.startswith("_")}
    for name in classes:
        if name.startswith("_"):
            continue
        mine = {n for n in classes[name] if not n.startswith("_")}
        theirs = vars(getattr(_core, name))
        assert mine == {n for n in theirs if not n.startswith("_")}, name


@pytest.mark.slow
def test_a_server_needs_no_torch() -> None:
    code = """
import sys
import persia.distributed.server, persia.distributed.worker
import persia.cli.app, persia.distributed.launch
assert "torch" not in sys.modules
"""
    environment = {**os.environ, "PYTHONWARNINGS": "error"}
    subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, check=True
    )


def test_no_text_of_the_library_names_a_flag() -> None:
    found = [
        finding
        for path in sorted(PERSIA.rglob("*.py"))
        if path.relative_to(PERSIA).parts[0] not in package.COMMANDS
        for finding in package.flags(path)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("text", "flag"),
    [
        ('f("give --save, too")', "--save"),
        ('f(f"--wire-dtype {x} is wrong")', "--wire-dtype"),
        ('f("persia train --save", ["--port", "1"])', None),
        ('def f():\n    """See ``--save``."""', None),
    ],
)
def test_flags_are_found(tmp_path: Path, text: str, flag: str | None) -> None:
    path = tmp_path / "a.py"
    path.write_text(text)
    assert [f for _, _, f in package.flags(path)] == [flag][: flag is not None]
