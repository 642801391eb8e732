"""The page of where a behaviour is decided names what exists."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator

from tests.docs.pages import DOCS, ROOT

PAGE = DOCS / "dev" / "where.md"
IDEAS = DOCS / "dev" / "core.md"
PLACE = re.compile(r"`([\w./]+)::([\w.]+)`")
LINES = 40  # behaviours at least
PLACES = 3  # files of one line at most


def c_functions(text: str) -> set[str]:
    """The functions that a file of C defines: those that it only declares,
    calls or names in a comment are none of them."""
    text = re.sub(r"/\*.*?\*/|//[^\n]*", " ", text, flags=re.DOTALL)
    text = re.sub(r"\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'", "0", text)
    found = set()
    begins = r"^(?:\w+[ \t*\n]+)*?\*?(\w+)\("
    for match in re.finditer(begins, text, re.MULTILINE):
        depth, end = 1, match.end()
        while depth and end < len(text):
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            end += 1
        if text[end:].lstrip().startswith("{"):
            found.add(match[1])
    return found


def python_names(text: str) -> set[str]:
    """The functions, classes (with their methods) and constants of a
    module."""

    def names(body: list[ast.stmt], prefix: str) -> Iterator[str]:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield prefix + node.name
            elif isinstance(node, ast.ClassDef):
                yield prefix + node.name
                yield from names(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.Assign):
                yield from (
                    prefix + target.id
                    for target in node.targets
                    if isinstance(target, ast.Name)
                )

    return set(names(ast.parse(text).body, ""))


@functools.cache
def defined(file: str) -> set[str]:
    path = ROOT / file
    if not path.is_file():
        return set()
    text = path.read_text(encoding="utf-8")
    return python_names(text) if path.suffix == ".py" else c_functions(text)


def lines() -> list[str]:
    """Those of the tables, without their heads."""
    text = PAGE.read_text(encoding="utf-8").splitlines()
    return [
        line
        for line in text
        if line.startswith("|")
        and not line.startswith(("|---", "| behaviour |"))
    ]


def test_a_definition_is_told_from_what_looks_like_one() -> None:
    text = (
        "/* int gone(void) { */\n"
        "int declared(int a);\n"
        "static int twice(int a)\n{\n    if (a)\n        called(a);\n"
        '    say("int text(void) {");\n}\n'
        "char *\nnamed(void (*fn)(int), char c)\n{ c = '{'; }\n"
        "#define MACRO(x) { x }\n"
        "table of = {.a = call(1)};\n"
    )
    assert c_functions(text) == {"twice", "named"}
    text = "A = 1\nclass B:\n    def c(self): ...\ndef d():\n    e = 1\n"
    assert python_names(text) == {"A", "B", "B.c", "d"}


def test_every_place_exists() -> None:
    places = [p for line in lines() for p in PLACE.findall(line)]
    assert not [f"{f}::{name}" for f, name in places if name not in defined(f)]


def test_every_behaviour_has_a_place() -> None:
    assert len(lines()) >= LINES
    for line in lines():
        assert 1 <= len(set(PLACE.findall(line))) <= PLACES, line


def test_every_idea_has_its_place() -> None:
    text = IDEAS.read_text(encoding="utf-8")
    _, _, text = text.partition("## One body an idea")
    text, _, _ = text.partition("\n## ")
    named = set(re.findall(r"`([^`]+)`", text))
    files = {name for name in named if "/" in name}
    assert files
    for file in files:
        assert any((ROOT / f / file).is_file() for f in (".", "csrc")), file
    code = "\n".join(
        path.read_text(encoding="utf-8")
        for path in [
            *(ROOT / "csrc").glob("*/*.[ch]"),
            *ROOT.glob("persia/*/*.py"),
        ]
    )
    words = set(re.findall(r"\w+", code))
    names = {name.removesuffix("()") for name in named - files}
    assert names <= words
