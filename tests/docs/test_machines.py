"""The tables of states in headers, which docs/_tools/drawings.py draws, are
those that the code checks each transition against."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

Edges = set[tuple[str, str, str]]  # from, event, to

# header, first event of its table, file of the array, array, prefixes of
# states and events
MACHINES = [
    ("loop/batches.h", "FILL", "loop/batches.c", "next", "BATCH_"),
    ("loop/batches.h", "RUN", "loop/batches.c", "lookup_next", "LOOKUP_"),
    ("loop/batches.h", "PEND", "loop/batches.c", "grad_next", "GRAD_"),
    ("loop/updates.h", "ADD", "loop/updates.c", "next", "UPDATE_"),
    (
        "embedding_worker/private.h",
        "TAKE",
        "embedding_worker/offers.c",
        "next",
        "OFFER_",
    ),
    (
        "embedding_worker/private.h",
        "HEAR",
        "embedding_worker/streams.c",
        "next",
        "STREAM_",
    ),
    ("client/private.h", "SEND", "client/fan.c", "next", "REQUEST_"),
    ("rank/private.h", "ENTER", "rank/order.c", "next", "TAKING_"),
    ("rank/private.h", "HOLD", "rank/passes.c", "next", "HELD_"),
    ("rpc/stalls.h", "READ", "rpc/stalls.c", "next", "SLOT_"),
    ("shard/private.h", "EMPTY", "shard/job_restore.c", "next", "ROWS_"),
    ("shard/sync.h", "COLLECT", "shard/sync.c", "next", "SYNC_"),
    ("shard/ledger.h", "BEGIN", "shard/ledger.c", "next", "FLIGHT_"),
]


def header(path: str, first: str) -> Edges:
    """The transitions of the table whose first event is ``first``."""
    lines = (ROOT / "csrc" / path).read_text(encoding="utf-8").splitlines()
    at = next(
        i
        for i, line in enumerate(lines)
        if re.match(rf" \*\s+{first}\s+[A-Z]+\s", line)
    )
    events = [(m.start(), m.group()) for m in re.finditer("[A-Z]+", lines[at])]
    edges: Edges = set()
    for line in lines[at + 1 :]:
        state = re.match(r" \*  ([A-Z]+)", line)
        if state is None:
            break
        for m in re.finditer("[A-Z]+", line[state.end() :]):
            start = m.start() + state.end()
            assert start in [e[0] for e in events], f"{path}: {line}"
            event = next(e[1] for e in events if e[0] == start)
            edges.add((state[1], event, m.group()))
    return edges


def names(text: str, enum: str, prefix: str) -> list[str]:
    """The names of an enum, in order, without the prefix."""
    body = re.search(rf"enum {enum} \{{(.*?)\}}", text, re.DOTALL)
    assert body is not None, enum
    code = re.sub(r"/\*.*?\*/", "", body[1], flags=re.DOTALL)
    found = [n.removeprefix(prefix) for n in re.findall(r"\w+", code)]
    return [n for n in found if n not in {"STATES", "EVENTS"}]


def code(path: str, array: str, prefix: str, head: str) -> Edges:
    """The transitions of the array in the code."""
    text = (ROOT / "csrc" / path).read_text(encoding="utf-8")
    declared = (ROOT / "csrc" / head).read_text(encoding="utf-8")
    start = re.search(
        rf"\b{array}\[{prefix}STATES\]\[{prefix}EVENTS\] = \{{(.*?)\n\}};",
        text,
        re.DOTALL,
    )
    assert start is not None, path
    # "enum offer_event {" is found by the first event that is declared.
    enums = re.findall(r"enum (\w+_event) \{\s+(\w+)", declared)
    enum = next(e for e, one in enums if one.startswith(prefix))
    events = names(declared, enum, prefix)
    blank = names(declared, enum.replace("_event", "_state"), prefix)[0]
    edges: Edges = set()
    for row in re.finditer(
        rf"\[{prefix}(\w+)\] = \{{(.*?)\}}", start[1], re.DOTALL
    ):
        cells = [c.strip() for c in row[2].split(",") if c.strip()]
        for i, cell in enumerate(cells):
            named = re.match(rf"\[{prefix}(\w+)\] = {prefix}(\w+)$", cell)
            event = named[1] if named else events[i]
            to = named[2] if named else cell.removeprefix(prefix)
            if to != "NEVER" and not (to == blank and "NEVER" not in text):
                edges.add((row[1], event.removeprefix("TO_"), to))
    return edges


@pytest.mark.parametrize(
    ("head", "first", "path", "array", "prefix"),
    MACHINES,
    ids=[f"{m[2]}:{m[3]}" for m in MACHINES],
)
def test_a_table_is_that_of_the_code(
    head: str, first: str, path: str, array: str, prefix: str
) -> None:
    """A reader of the header, and of the drawing, sees what is checked."""
    edges = header(head, first)
    assert edges
    assert edges == code(path, array, prefix, head)
