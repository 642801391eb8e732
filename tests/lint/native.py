"""Checks of csrc/ that no compiler makes; prints each finding.

usage: python tests/lint/native.py csrc

- A room includes only rooms above it in ROOMS (those of ONLY fewer still),
  and of them only the public header `<room>/<room>.h` (or those of MORE).
- Python.h, torch, gRPC and CUDA are each included by one room alone.
- Calls that write without bounds, hide errors or share hidden state are
  banned.
- Rooms that a simulation runs read no clock, start no thread and open no file
  by themselves.
- Files have at most 800 lines of at most 79 columns, no tabs, no unfinished
  business; functions outside of tests have bodies of at most 60 lines.
- Comments have none of the words that stand for a plainer one.
- Every header compiles alone.
- What csrc/spec/generate.py makes of persia.proto is current.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

#: The rooms in their order: the list of docs/dev/rooms.md.
ROOMS = (
    *("base", "simd", "data", "spec", "mem", "sched", "ids", "pool", "cuda"),
    *("optim", "evict", "admit", "table", "ckpt", "wire", "rpc", "shard"),
    *("server", "client", "worker", "store", "role", "py", "torch"),
)

#: Public headers of a room beside `<room>.h`.
MORE = {"mem": {"device.h"}}

#: Rooms that may include fewer than all above them.
ONLY = {
    "spec": {"base"},
    "wire": {"base", "simd", "spec", "mem"},
    "rpc": {"base", "mem", "sched"},
}

#: Rooms that are a library of their own: who may include them.
APART = {"data": {"py"}}

#: System headers that belong to one room: (pattern, room).
OWNED = (
    (re.compile(r"Python\.h$"), "py"),
    (re.compile(r"(torch|ATen|c10)/"), "torch"),
    (re.compile(r"grpc"), "rpc"),
    (re.compile(r"cuda"), "cuda"),
)

BANNED = {
    "strcpy": "memcpy with a checked length, or snprintf",
    "strcat": "snprintf",
    "strncpy": "memcpy with a checked length, or snprintf",
    "strncat": "snprintf",
    "sprintf": "snprintf",
    "vsprintf": "vsnprintf",
    "gets": "fgets",
    "scanf": "a parser that reports where it failed",
    "sscanf": "a parser that reports where it failed",
    "fscanf": "a parser that reports where it failed",
    "atoi": "strtol, and check the end",
    "atol": "strtol, and check the end",
    "atoll": "strtoll, and check the end",
    "atof": "strtod, and check the end",
    "strtok": "strcspn, or strtok_r",
    "rand": "philox4x32",
    "srand": "philox4x32",
    "random": "philox4x32",
    "drand48": "philox4x32",
    "alloca": "a buffer with a known bound",
    "system": "posix_spawn",
    "tmpnam": "mkstemp",
    "mktemp": "mkstemp",
    "localtime": "localtime_r",
    "gmtime": "gmtime_r",
    "asctime": "strftime",
    "usleep": "a condition variable with a deadline",
}

#: What rooms of the core take from base/system.h and from ckpt_places, so
#: that a simulation can put its own in their place.
SIMULATED = frozenset(
    ("sched", "table", "shard", "server", "client", "worker", "store")
)
MACHINE = re.compile(
    r"(?<![\w.>])(clock_gettime|nanosleep|time|pthread_cond_(?:timed)?wait|"
    r"pthread_create|pthread_join|getrandom|getentropy|open|openat|fopen)"
    r"\s*\("
)

MAX_LINES = 800
MAX_COLUMNS = 79
MAX_BODY = 60

INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')
CALL = re.compile(r"(?<![\w.>])(" + "|".join(BANNED) + r")\s*\(")
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
# Comments, strings and character constants, in one alternation so that a
# quote inside a comment opens nothing.
LITERAL = re.compile(
    r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|' r"'(?:\\.|[^'\\\n])*'",
    re.DOTALL,
)

#: What comments say in place of a plainer word: "arrives", "is given",
#: "continues", "in flight", "again", "no client", "except".
WORDS = re.compile(
    r"\b((?:is|are|was|were|be) told|told so|anew|[Nn]obody|[Ww]hoever"
    r"|goes on|go on|going on|who does not|under way|in hand|but for"
    r"|hears?|tells? of|(?:[Cc]omes?|came)(?! from))\b"
)

Finding = tuple[Path, int, str]


def code_only(text: str) -> str:
    """The text with comments and literals blanked, lines kept."""

    def blank(match: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", match.group())

    return LITERAL.sub(blank, text)


def check_includes(path: Path, room: str, text: str) -> Iterator[Finding]:
    """Room order, public headers only, owners of outside libraries."""
    for number, line in enumerate(text.splitlines(), 1):
        match = INCLUDE.match(line)
        if not match:
            continue
        quote, target = match.groups()
        for pattern, owner in OWNED:
            if quote == "<" and pattern.match(target) and room != owner:
                yield path, number, f"<{target}> belongs to room {owner} alone"
        if quote == "<":
            continue
        other, slash, name = target.partition("/")
        if not slash or other not in ROOMS:
            yield path, number, f'write "{room}/..." instead of "{target}"'
        elif other == room:
            continue
        elif ROOMS.index(other) > ROOMS.index(room):
            yield path, number, f"room {room} stands above {other}"
        elif other not in ONLY.get(room, {other}) or room not in APART.get(
            other, {room}
        ):
            yield path, number, f"room {room} must not know {other}"
        elif name not in {f"{other}.h"} | MORE.get(other, set()):
            yield path, number, f"{target} is private to room {other}"


def check_text(path: Path, text: str) -> Iterator[Finding]:
    """Sizes, white space, unfinished business."""
    lines = text.splitlines()
    if len(lines) > MAX_LINES:
        yield path, len(lines), f"{len(lines)} lines, at most {MAX_LINES}"
    if text and not text.endswith("\n"):
        yield path, len(lines), "no newline at the end"
    for number, line in enumerate(lines, 1):
        if len(line) > MAX_COLUMNS:
            yield path, number, f"{len(line)} columns, at most {MAX_COLUMNS}"
        if "\t" in line or line != line.rstrip():
            yield path, number, "a tab, or white space at the end"
        if match := UNFINISHED.search(line):
            yield path, number, f"unfinished: {match.group()}"


def check_bodies(path: Path, text: str) -> Iterator[Finding]:
    """Lengths of functions: what is between braces in the first column."""
    begin = 0
    for number, line in enumerate(code_only(text).splitlines(), 1):
        if line.startswith("{"):
            begin = number
        elif line.startswith("}") and begin:
            lines = number - begin - 1
            if lines > MAX_BODY:
                what = f"a function of {lines} lines, at most {MAX_BODY}"
                yield path, begin, what
            begin = 0


def check_words(path: Path, text: str) -> Iterator[Finding]:
    """Plain words in comments."""
    for match in LITERAL.finditer(text):
        if match.group().startswith("/"):
            comment = re.sub(r"\s*\n[\s*/]*", " ", match.group())
            for word in WORDS.finditer(comment):
                line = text.count("\n", 0, match.start()) + 1
                yield path, line, f"in plainer words: {word.group()!r}"


def check_calls(path: Path, text: str) -> Iterator[Finding]:
    """Banned calls."""
    for number, line in enumerate(code_only(text).splitlines(), 1):
        for match in CALL.finditer(line):
            name = match.group(1)
            yield path, number, f"{name}() is banned: use {BANNED[name]}"


def check_machine(path: Path, text: str) -> Iterator[Finding]:
    """Calls that a simulation could not replace."""
    for number, line in enumerate(code_only(text).splitlines(), 1):
        for match in MACHINE.finditer(line):
            name = match.group(1)
            yield path, number, f"{name}(): see base/system.h and ckpt_places"


def check_alone(csrc: Path, path: Path) -> Iterator[Finding]:
    """A header must compile with nothing included before it."""
    command = ["cc", "-std=gnu11", "-D_GNU_SOURCE", "-fsyntax-only", "-Wall"]
    command += ["-Werror", f"-I{csrc}", "-x", "c", "-include", str(path)]
    result = subprocess.run(
        [*command, "/dev/null"], capture_output=True, text=True, check=False
    )
    if result.returncode:
        yield path, 1, "does not compile alone:\n" + result.stderr


def check_generated(csrc: Path) -> Iterator[Finding]:
    """The generated files are those of today's persia.proto."""
    generator = csrc / "spec" / "generate.py"
    if not generator.exists():
        return
    result = subprocess.run(
        [sys.executable, str(generator), "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode:
        yield generator, 1, (result.stdout + result.stderr).strip()


def check_tree(csrc: Path) -> Iterator[Finding]:
    """All findings in a source tree."""
    for path in sorted(csrc.rglob("*")):
        if path.suffix not in {".c", ".h", ".cpp", ".cu"}:
            continue
        text = path.read_text(encoding="utf-8")
        room = path.relative_to(csrc).parts[0]
        yield from check_text(path, text)
        yield from check_words(path, text)
        if room in ROOMS:
            yield from check_calls(path, text)
            yield from check_includes(path, room, text)
            yield from check_bodies(path, text)
            if room in SIMULATED:
                yield from check_machine(path, text)
        elif path.parent == csrc or room in {"tests", "fuzz"}:
            pass
        else:
            yield path, 1, f"{room} is not a room: add it to ROOMS in order"
        if path.suffix == ".h" and room not in {"py", "torch"}:
            yield from check_alone(csrc, path)
    yield from check_generated(csrc)


def main() -> int:
    """Print the findings of the tree named on the command line."""
    found = 0
    for path, line, message in check_tree(Path(sys.argv[1])):
        print(f"{path}:{line}: {message}")
        found += 1
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
