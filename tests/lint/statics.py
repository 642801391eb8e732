"""Whether static functions of C carry the name of their object.

A static function's name is of two words at least. One of them is of the name
of its file, of a struct that the file defines, or of a type that the function
takes or returns; or its first word is of a struct of the room. So names are
found by a search, and differ in a stack trace.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

STATIC = re.compile(r"\b(?:static|INLINE|HALF_INLINE|INLINE_HOT)\b")
STRUCT = re.compile(r"\bstruct (\w+)\s*\{|^\}\s*(\w+);", re.MULTILINE)
DIRECTIVE = re.compile(
    r"^#(?:[^\n\\]|\\.)*(?:\\\n(?:[^\n\\]|\\.)*)*", re.MULTILINE
)
#: Words of a declaration that name no object.
PLAIN = re.compile(
    r"^(?:void|char|int|long|short|float|double|unsigned|signed|bool|const|"
    r"static|inline|struct|enum|union|restrict|volatile|\w+_t|[A-Z]\w*)$"
)
PLURALS = (
    ("ies", "y"),
    ("ches", "ch"),
    ("shes", "sh"),
    ("xes", "x"),
    ("sses", "ss"),
)


def singular(word: str) -> str:
    """The word without the ending of its plural."""
    for end, new in PLURALS:
        if word.endswith(end) and len(word) > len(end) + 1:
            return word[: -len(end)] + new
    plural = word.endswith("s") and not word.endswith("ss") and len(word) > 3
    return word[:-1] if plural else word


def words(name: str) -> set[str]:
    """The words of a name, in the singular."""
    return {singular(w) for w in name.lower().split("_")} - {"", "persia"}


def structs(code: str) -> Iterator[str]:
    """The names of structs that code defines."""
    for tag, alias in STRUCT.findall(code):
        yield tag or alias


def room_objects(codes: Iterable[str]) -> set[str]:
    """First and last words of all structs of a room: `worker` and `stream`
    of worker_stream."""
    found = set()
    for code in codes:
        for name in structs(code):
            parts = name.lower().split("_")
            found |= {singular(parts[0]), singular(parts[-1])}
    return found - {"wire", "persia"}


def statics(code: str) -> Iterator[tuple[str, str, str, int]]:
    """Of each static function that is defined: its name, what precedes it,
    its parameters, where the name is."""
    code = DIRECTIVE.sub(lambda m: re.sub(r"[^\n]", " ", m.group()), code)
    begin = 0
    for brace in re.finditer(r"^[{}]", code, re.MULTILINE):
        if brace.group() == "}":
            begin = brace.end()
            continue
        begin = max(begin, code.rfind(";", begin, brace.start()) + 1)
        head = code[begin : brace.start()].rstrip()
        depth, at = 0, len(head)
        while at and head.endswith(")"):
            at -= 1
            depth += {")": 1, "(": -1}.get(head[at], 0)
            if not depth:
                break
        name = re.search(r"(\w+)\s*$", head[:at])
        if name and depth == 0 and STATIC.search(head[: name.start()]):
            before = head[: name.start()]
            yield name[1], before, head[at + 1 : -1], begin + name.start()


def types(before: str, parameters: str) -> Iterator[str]:
    """The types that a function returns and takes."""
    for part in (*parameters.split(","), before + "x"):
        for word in re.findall(r"\w+(?=[ *\n]+\w)", part):
            if not PLAIN.match(word):
                yield word


def unsound(stem: str, code: str, room: set[str]) -> Iterator[tuple[str, int]]:
    """Static functions of a file whose names lack their object, and where."""
    own = set().union(words(stem), *map(words, structs(code)))
    for name, before, parameters, at in statics(code):
        objects = own.union(*map(words, types(before, parameters)))
        named = words(name.split("_")[0]) & room or words(name) & objects
        if "_" not in name.strip("_") or not named:
            yield name, at
