"""Tests name facts of an error, not its wording.

An error is known by its class. What a test asks of the text beyond that are
facts: names of options, tables, files, values. So the English around them may
improve. A word of a pattern is a fact if it is a name of the package's
interface, or stands elsewhere in the test's file: in the input of the call
that fails.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

__all__ = ["findings"]

ROOT = Path(__file__).parents[2]

# Names of the interface that messages use as words.
_WORDING = {"need", "given", "found", "full"}

# Patterns of wording that stay, by file, with the reason.
ALLOWED = {
    # The text of OpenSSL, which has one class for all that may be wrong.
    "tests/test_certs.py": {"mismatch"},
}

_WORD = re.compile(r"(?<![\w.-])[a-z]{3,}(?![\w(])")


@cache
def _interface() -> frozenset[str]:
    """Names of the package's modules, classes, functions, arguments and
    fields."""
    names = {"persia", "pyarrow", "torch"}
    for path in (ROOT / "persia").rglob("*.py*"):
        if path.suffix not in (".py", ".pyi"):
            continue
        names.add(path.stem)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.arg):
                names.add(node.arg)
            elif isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.AnnAssign) and isinstance(
                node.target, ast.Name
            ):
                names.add(node.target.id)
    return frozenset(names - _WORDING)


def _cases(test: ast.FunctionDef) -> dict[str, list[ast.expr]]:
    """The values of each parameter of a test."""
    found: dict[str, list[ast.expr]] = {}
    for mark in test.decorator_list:
        if (
            not isinstance(mark, ast.Call)
            or not ast.unparse(mark.func).endswith("parametrize")
            or not isinstance(mark.args[1], ast.List)
        ):
            continue
        words = mark.args[0]
        if isinstance(words, ast.Constant):
            names = str(words.value).split(",")
        else:
            names = [
                str(ast.literal_eval(x))
                for x in ast.iter_child_nodes(words)
                if isinstance(x, ast.Constant)
            ]
        for case in mark.args[1].elts:
            values = [case]
            if len(names) > 1:
                values = getattr(case, "elts", [])
            for name, value in zip(names, values, strict=False):
                found.setdefault(name.strip(), []).append(value)
    return found


def _patterns(tree: ast.Module) -> Iterator[ast.expr]:
    """What ``match=`` is given, and what is looked for in an error's text."""
    for test in ast.walk(tree):
        if not isinstance(test, ast.FunctionDef):
            continue
        cases = _cases(test)
        for node in ast.walk(test):
            if isinstance(node, ast.Call):
                for keyword in node.keywords:
                    value = keyword.value
                    if keyword.arg != "match":
                        continue
                    if isinstance(value, ast.Name):
                        yield from cases.get(value.id, [])
                    else:
                        yield value
            elif isinstance(node, ast.Compare) and re.fullmatch(
                r"str\(.*(\.value|message|error)\)",
                ast.unparse(node.comparators[0]),
            ):
                yield node.left


def _texts(node: ast.AST) -> Iterator[str]:
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield part.value


def _facts(tree: ast.Module, patterns: list[ast.expr]) -> set[str]:
    """Words of the file that stand in no pattern and in no docstring."""
    left_out = {id(x) for p in patterns for x in ast.walk(p)}
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
            left_out.add(id(body[0].value))
    words: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in left_out:
            continue
        if isinstance(node, ast.Name):
            words.add(node.id)
        elif isinstance(node, ast.Attribute):
            words.add(node.attr)
        elif isinstance(node, ast.arg | ast.keyword) and node.arg:
            words.add(node.arg)
        elif isinstance(node, ast.Constant) and isinstance(
            node.value, str | bytes
        ):
            words |= set(re.findall("[a-z]+", str(node.value)))
    return words


def findings(path: Path) -> Iterator[tuple[int, str]]:
    """Line and words of each pattern that is wording."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    patterns = list(_patterns(tree))
    facts = _interface() | _facts(tree, patterns)
    if path.is_relative_to(ROOT):
        facts |= ALLOWED.get(path.relative_to(ROOT).as_posix(), set())
    for pattern in patterns:
        for text in _texts(pattern):
            plain = re.sub(r"\\[a-zA-Z]", " ", text).replace("\\", "")
            words = set(_WORD.findall(plain)) - facts
            if words:
                yield pattern.lineno, " ".join(sorted(words))
