"""Checks of the Python package that no linter makes; each yields findings.

- No module uses a private name of another: neither ``from persia.x import
  _name`` nor ``x._name`` where the module itself defines no such name.
- No module has the name of a public function or class of its package or of
  its own, so that an import of one never hides the other.
- A package imports only packages of earlier lines of PACKAGES when it is
  imported itself; what comes later it may import within functions, or for
  types.
- Modules do not import each other in a circle when they are imported.
- Tests use private names of the package in no more places than they do.
- No text of the library names a flag of a command: see
  :func:`persia.errors.flagged`.
"""

from __future__ import annotations

import ast
import graphlib
import re
from collections.abc import Iterator
from pathlib import Path

#: Packages and modules of persia; those of a line may import each other.
PACKAGES = (
    ("_core", "errors", "redaction"),
    ("base",),
    ("distributed", "optim", "admission", "eviction"),
    ("data",),
    ("store", "checkpoint", "prometheus", "kubernetes"),
    ("nn", "metrics", "datasets"),
    ("models", "loop"),
    ("serving",),
    ("train", "doctor", "torture"),
    ("cli",),
)

#: Modules that import of later packages: a server reads and writes the files
#: of checkpoints.
EXCEPT = {
    "distributed/server.py": {"checkpoint"},
    "distributed/moves.py": {"checkpoint"},
    "distributed/durable.py": {"checkpoint"},
    "distributed/kept.py": {"checkpoint"},
    "distributed/places.py": {"checkpoint"},
}

#: Underscored names that their libraries document.
DOCUMENTED = {
    "_exit",  # os
    "_getframe",  # sys
    "_replace",  # named tuples
    "_PARTITION_EOF",  # confluent_kafka.KafkaError
}

#: The file that fences torch's private names.
TORCH = "base/torch_private.py"

Finding = tuple[Path, int, str]


def _private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def _defined(tree: ast.Module) -> set[str]:
    """Names that a module gives to something."""
    names = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name):
                if isinstance(node.ctx, ast.Store):
                    names.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
    return names


def private_names(path: Path) -> Iterator[Finding]:
    """Of one module: the private names of others that it uses."""
    tree = ast.parse(path.read_text())
    own = _defined(tree) | DOCUMENTED | {"_core"}
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=module, names=names):
                for alias in names:
                    if _private(alias.name) and alias.name != "_core":
                        yield path, node.lineno, f"{module}.{alias.name}"
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                pass
            case ast.Attribute(attr=name):
                if _private(name) and name not in own:
                    yield path, node.lineno, ast.unparse(node)


def _public(path: Path) -> set[str]:
    """Public functions and classes of a module, those it exports included."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        is_package = path.name == "__init__.py"
        if is_package and isinstance(node, ast.If | ast.ImportFrom):
            for inner in ast.walk(node):
                if isinstance(inner, ast.ImportFrom):
                    names.update(a.asname or a.name for a in inner.names)
    return {name for name in names if not name.startswith("_")}


def hidden_names(package: Path) -> Iterator[Finding]:
    """Modules of a package with the name of something else of it."""
    init = package / "__init__.py"
    below = {p.parent.name for p in package.glob("*/__init__.py")}
    exported = _public(init) - below
    for path in sorted(package.glob("*.py")):
        if path.stem.startswith("_"):
            continue
        # 'from persia import errors' is the module itself, not a name in it.
        if path.stem in _public(path) or (
            path.stem in exported and _imports_from(init, path.stem)
        ):
            yield path, 1, f"{path.stem} is a function, too"


def _imports_from(init: Path, name: str) -> bool:
    """Whether a package takes a name out of a module below it."""
    package = ".".join(init.parent.parts[init.parent.parts.index("persia") :])
    return any(
        isinstance(node, ast.ImportFrom)
        and (node.module or "") != package
        and any((a.asname or a.name) == name for a in node.names)
        for node in ast.walk(ast.parse(init.read_text()))
    )


def _imported(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """What importing a module imports of persia: packages, with lines."""
    for node in tree.body:
        match node:
            case ast.ImportFrom(module="persia", names=names):
                for alias in names:
                    yield node.lineno, alias.name
            case ast.ImportFrom(module=str(module)):
                if module.startswith("persia."):
                    yield node.lineno, module.split(".")[1]


def later_packages(root: Path) -> Iterator[Finding]:
    """Imports of packages that come later in PACKAGES."""
    place = {p: i for i, line in enumerate(PACKAGES) for p in line}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).parts[0].removesuffix(".py")
        if name.startswith("__"):
            continue
        if name not in place:
            yield path, 1, f"{name} is not in PACKAGES"
            continue
        for line, other in _imported(ast.parse(path.read_text())):
            allowed = EXCEPT.get(path.relative_to(root).as_posix(), set())
            if place.get(other, 0) > place[name] and other not in allowed:
                yield path, line, f"{name} imports {other}"


def cycles(root: Path) -> list[str]:
    """Modules of a package that import each other, as a circle; empty if
    there are none."""
    paths = {
        ".".join(("persia", *path.relative_to(root).with_suffix("").parts)): (
            path
        )
        for path in root.rglob("*.py")
    }
    names = {name.removesuffix(".__init__") for name in paths}
    graph = {}
    for name, path in paths.items():
        found = set[str]()
        for node in _run_by_import(ast.parse(path.read_text()).body):
            if isinstance(node, ast.ImportFrom) and node.module in names:
                inner = {f"{node.module}.{a.name}" for a in node.names}
                found |= (inner & names) or {node.module}
            elif isinstance(node, ast.Import):
                found |= {a.name for a in node.names} & names
        own = name.removesuffix(".__init__")
        graph[own] = found - {own}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def _run_by_import(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that an import of a module runs, but for types."""
    for node in body:
        match node:
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                pass
            case ast.If() | ast.Try():
                yield from _run_by_import(
                    [*node.body, *getattr(node, "orelse", [])]
                )
            case _:
                yield node


#: Places in tests that use private names of the package: do not add any. What
#: a test must see is in persia.store.engine (engine_of), or public.
PRIVATE_IN_TESTS = 77


def private_in_tests(root: Path, tests: Path) -> list[Finding]:
    """Places in tests that use a name with an underscore that the package
    defines."""
    hidden = {
        name
        for path in root.rglob("*.py")
        for name in _defined(ast.parse(path.read_text()))
        if _private(name)
    }
    return [
        (path, line, name)
        for path in sorted(tests.rglob("*.py"))
        for path, line, name in private_names(path)
        if name.rpartition(".")[2] in hidden
    ]


#: Packages that are commands, or about them.
COMMANDS = {"cli", "torture", "doctor.py"}
#: A flag, and what may be before it in a text: a whole command to type.
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]*[a-z]")
TYPED = re.compile(r"(?:persia [a-z]+|protoc|ulimit).*--", re.DOTALL)


def flags(path: Path) -> Iterator[Finding]:
    """Flags in texts of a module that are no docstrings."""
    tree = ast.parse(path.read_text())
    docstrings = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)
    }
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in docstrings
            and (found := FLAG.search(node.value))
            # A word of a command line, and a command as a user types it.
            and found[0] != node.value
            and not TYPED.search(node.value)
        ):
            yield path, node.lineno, found[0]
