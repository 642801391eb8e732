"""Pages are short, and so are their sentences; links lead somewhere."""

from __future__ import annotations

import ast
import re
import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, ROOT, blocks, name_of, pages, sentences
from tests.docs.pages import words as count
from tests.lint.words import WORDS

PAGES = pages()
#: What was measured and tried, as it was noted.
DIARY = "docs/dev/log.md"
LONGEST = 40  # words of a sentence
MEAN = 20
PAGE = 1500

#: Pages to look things up in, and lists.
REFERENCES = ("docs/reference/", "docs/dev/", "docs/data.md", "CHANGELOG.md")


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_sentences_are_short(path: Path) -> None:
    if name_of(path) == DIARY:
        return
    lengths = {s: len(re.findall(r"\w[\w'’-]*", s)) for s in sentences(path)}
    long = {s: n for s, n in lengths.items() if n > LONGEST}
    assert not long, long
    if lengths:
        assert statistics.mean(lengths.values()) <= MEAN


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_a_page_is_short(path: Path) -> None:
    if not name_of(path).startswith(REFERENCES):
        assert count(path) <= PAGE


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_files_that_a_page_links_to_are_there(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        if "://" in target or target.startswith("mailto:"):
            continue
        base = DOCS if target.startswith("/") else path.parent
        if "_generated" not in target:
            assert (base / target.lstrip("/")).exists(), target


#: What has a docstring and a name.
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_plain_words(path: Path) -> None:
    if "docs/dev/" in name_of(path):
        return
    found = [m.group() for s in sentences(path) for m in WORDS.finditer(s)]
    assert not found


def docstrings() -> Iterator[tuple[str, str]]:
    """Those of the modules, classes and functions of persia, each with its
    place."""
    for path in sorted((ROOT / "persia").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if not isinstance(node, Documented):
                continue
            text = ast.get_docstring(node)
            if text is not None:
                name = getattr(node, "name", "the module")
                yield f"{name_of(path)}: {name}", text


def comments() -> Iterator[tuple[str, str]]:
    """Those of persia and of the examples, each block with its place."""
    for folder in ("persia", "examples"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            held: list[str] = []
            text = path.read_text(encoding="utf-8")
            for number, line in enumerate(text.splitlines(), 1):
                if line.lstrip().startswith("#"):
                    held.append(line.lstrip(" #:"))
                    continue
                yield f"{name_of(path)}:{number}", " ".join(held)
                held = []
                if "  # " in line:
                    yield f"{name_of(path)}:{number}", line.split("  # ")[-1]


def sentences_of(text: str) -> Iterator[str]:
    """Of a docstring, a help or a message: as in pages, code counts as one
    word. What stands before a colon in a list of arguments is a sentence."""
    text = re.sub(r":\w+:`[^`]*`|``[^`]*``|`[^`]*`|https?://\S+", "X", text)
    for paragraph in re.split(r"\n\s*\n", text):
        words = " ".join(paragraph.split())
        if "===" not in words:  # a table
            yield from re.split(r"(?<=[.!?:;])\s+(?=\S)", words)


def long_ones(texts: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Places and sentences of more than LONGEST words."""
    return [
        (place, sentence)
        for place, text in texts
        for sentence in sentences_of(text)
        if len(re.findall(r"\w[\w'’-]*", sentence)) > LONGEST
    ]


def not_plain(texts: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Places and the words there that are in WORDS."""
    return [
        (place, found.group())
        for place, text in texts
        for found in WORDS.finditer(" ".join(text.split()))
    ]


def test_plain_words_of_docstrings() -> None:
    texts = list(docstrings())
    assert len(texts) > 2000
    assert not not_plain(texts) and not long_ones(texts)


def test_plain_words_of_comments() -> None:
    texts = list(comments())
    assert sum(bool(text) for _, text in texts) > 800
    assert not not_plain(texts)


def test_plain_words_of_help() -> None:
    """Of commands, options and arguments."""
    import tables

    texts = [
        (name, text)
        for name, command in tables.commands().items()
        for text in (
            command.help,
            *(getattr(option, "help", None) for option in command.params),
        )
        if text
    ]
    assert len(texts) > 200
    assert not not_plain(texts) and not long_ones(texts)


def messages() -> Iterator[tuple[str, str]]:
    """The strings of persia and of its C core, those of errors among them,
    each with its place. Docstrings are none."""
    for path in sorted((ROOT / "persia").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        docs = {
            id(node.value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Expr)
        }
        for node in ast.walk(tree):
            if not isinstance(node, ast.Constant | ast.JoinedStr):
                continue
            parts = getattr(node, "values", [node])
            text = "".join(
                part.value
                if isinstance(part, ast.Constant)
                and isinstance(part.value, str)
                else "{}"
                for part in parts
            )
            if id(node) not in docs:
                yield f"{name_of(path)}:{node.lineno}", text
    string = re.compile(r'"((?:\\.|[^"\\\n])*)"')
    for path in sorted((ROOT / "csrc").rglob("*.[ch]")):
        if {"tests", "fuzz"} & {*path.parts}:
            continue
        text = path.read_text(encoding="utf-8")
        text = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
        text = re.sub(r'"\s*\n\s*"', "", text)  # pieces of one string
        for found in string.findall(text):
            yield name_of(path), found


def test_plain_words_of_messages() -> None:
    texts = list(messages())
    assert len(texts) > 5000 and not not_plain(texts)
    ours = [(place, text) for place, text in texts if "</" not in text]
    assert not long_ones(ours)


def test_commands_and_options_exist() -> None:
    """Each `persia ...` in a block of shell has options that it knows."""
    import tables

    known = {
        name: {o for p in c.params for o in (*p.opts, *p.secondary_opts)}
        for name, c in tables.commands().items()
    }
    wrong, seen = [], 0
    for path in PAGES:
        for block in blocks(path, "sh"):
            text = block.text.replace("\\\n", " ")
            text = re.sub(r"#.*", "", text)
            for line in re.split(r"[\n;&|]+", text):
                if re.match(r"\s*(kubectl|gcloud)\s", line):
                    continue  # persia is the name of their things
                for part in re.split(r"\s--\s", line):
                    found = re.search(r"(?:^|\s)persia( +[a-z]+.*)$", part)
                    if not found:
                        continue
                    seen += 1
                    tail = found[1].split()
                    name = next(
                        (
                            " ".join(("persia", *tail[:n]))
                            for n in (2, 1)
                            if " ".join(("persia", *tail[:n])) in known
                        ),
                        None,
                    )
                    options = {
                        w.split("=")[0] for w in tail if w.startswith("--")
                    }
                    if name is None or options - known[name] - {"--help"}:
                        wrong.append((name_of(path), line.strip()))
    assert seen > 30 and not wrong


def test_an_option_has_one_type() -> None:
    """The same name takes the same kind of word in each command."""
    import tables

    kinds: dict[str, dict[str, list[str]]] = {}
    for name, command in tables.commands().items():
        for option in command.params:
            if option.opts[0].startswith("--"):
                described = option.type_descriptor
                kind = getattr(described, "annotation", None)
                found = kinds.setdefault(option.opts[0], {})
                found.setdefault(str(kind), []).append(name)
    assert len(kinds["--step"]) == 1 and len(kinds["--batch-size"]) == 1
    several = {name for name, found in kinds.items() if len(found) > 1}
    # launch takes LEAST:MOST as well; an export has other types of rows.
    assert several == {"--loaders", "--row-dtype"}


def test_each_command_has_an_example() -> None:
    import tables

    for name, command in tables.commands().items():
        if name != "persia":
            example = rf"^ *{name}( |$)"
            assert re.search(example, command.help or "", re.M), name


def test_variables_of_the_environment_are_documented() -> None:
    import tables

    used = set()
    for path in (ROOT / "persia").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        used |= set(re.findall(r"\"(PERSIA_[A-Z_]+)\"", text))
    assert used == set(tables.VARIABLES)


def test_no_other_variable_looks_like_an_option() -> None:
    """A command reports those that begin as its options do, and are none."""
    import tables

    begin = [f"{n.upper().replace(' ', '_')}_" for n in tables.commands()]
    begin.remove("PERSIA_")
    for variable in tables.VARIABLES:
        assert not variable.startswith(tuple(begin)), variable


def test_errors_are_those_of_the_core() -> None:
    import tables

    from persia import errors

    known = set(tables.codes())
    assert known - set(errors.__all__) == {"Ok"}
    assert set(errors.__all__) - known == {"PersiaError"}


def test_the_drawings_are_current() -> None:
    import drawings

    for name, picture in drawings.drawings().items():
        path = DOCS / "_static" / f"{name}.svg"
        assert path.read_text(encoding="utf-8") == picture
