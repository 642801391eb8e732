"""The drawings of the documentation, as SVG that follows the page's theme.

    python docs/_tools/drawings.py

writes them to ``docs/_static``. The transitions of state machines are read
from the tables in the headers of the C core.
"""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

# A page of the documentation gives the colours; an image that stands alone
# (the README) takes those of the reader's system.
STYLE = """
svg{--fg:#24292f;--bg:#ffffff;--line:#8b949e}
@media (prefers-color-scheme:dark){
svg{--fg:#e6edf3;--bg:#131416;--line:#768390}}
text{font:13px system-ui,sans-serif;
fill:var(--color-foreground-primary,var(--fg))}
.small{font-size:11px}.bold{font-weight:600}.mid{text-anchor:middle}
.box{fill:var(--color-background-secondary,var(--bg));stroke:var(--line);rx:6}
.end{stroke-width:2.5}.dashed{stroke-dasharray:5 4}
.line{fill:none;stroke:var(--line);stroke-width:1.4}
.head{fill:var(--line)}
.veil{fill:var(--color-background-primary,var(--bg))}
.lookup{fill:#3b82f6}.dense{fill:#8b5cf6}.update{fill:#d97706}
.on{fill:#fff}
"""


def svg(
    width: float, height: float, title: str, body: list[str], top: float = 0.0
) -> str:
    """A drawing from y = top to y = height."""
    style = " ".join(STYLE.split("\n")).strip()
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" '
        f'viewBox="0 {top:g} {width:g} {height - top:g}" width="{width:g}">'
        f"<title>{title}</title><style>{style}</style>\n"
        + "\n".join(body)
        + "\n</svg>\n"
    )


def text(x: float, y: float, words: str, kind: str = "mid") -> str:
    words = words.replace("&", "&amp;").replace("<", "&lt;")
    return f'<text class="{kind}" x="{x:g}" y="{y:g}">{words}</text>'


def box(x: float, y: float, w: float, h: float, kind: str = "box") -> str:
    return (
        f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{w:g}" '
        f'height="{h:g}"/>'
    )


Point = tuple[float, float]


def edge_of(center: Point, to: Point, w: float, h: float) -> Point:
    """Where the line from the centre of a box leaves it."""
    dx, dy = to[0] - center[0], to[1] - center[1]
    sx = (w / 2) / abs(dx) if dx else math.inf
    sy = (h / 2) / abs(dy) if dy else math.inf
    scale = min(sx, sy)
    return center[0] + dx * scale, center[1] + dy * scale


def arrow(
    a: Point, b: Point, bend: float, words: str, w: float, h: float
) -> tuple[str, str]:
    """An arrow between the boxes at two centres, and its label."""
    dx, dy = b[0] - a[0], b[1] - a[1]
    length = math.hypot(dx, dy)
    nx, ny = -dy / length, dx / length
    c = (a[0] + b[0]) / 2 + nx * bend * 2, (a[1] + b[1]) / 2 + ny * bend * 2
    p, q = edge_of(a, c, w, h), edge_of(b, c, w, h)
    ux, uy = q[0] - c[0], q[1] - c[1]
    long = math.hypot(ux, uy)
    ux, uy = ux / long, uy / long
    tip = (
        f"{q[0]:.1f},{q[1]:.1f} "
        f"{q[0] - 9 * ux + 4 * uy:.1f},{q[1] - 9 * uy - 4 * ux:.1f} "
        f"{q[0] - 9 * ux - 4 * uy:.1f},{q[1] - 9 * uy + 4 * ux:.1f}"
    )
    line = (
        f'<path class="line" d="M{p[0]:.1f} {p[1]:.1f} Q{c[0]:.1f} '
        f'{c[1]:.1f} {q[0] - 6 * ux:.1f} {q[1] - 6 * uy:.1f}"/>'
        f'<polygon class="head" points="{tip}"/>'
    )
    if not words:
        return line, ""
    mx, my = (p[0] + 2 * c[0] + q[0]) / 4, (p[1] + 2 * c[1] + q[1]) / 4
    wide = 6.2 * len(words) + 6
    label = box(mx - wide / 2, my - 9, wide, 16, "veil") + text(
        mx, my + 3, words, "small mid"
    )
    return line, label


# ---- state machines --------------------------------------------------------

Edges = dict[tuple[str, str], str]


def table(path: str, first: str) -> Edges:
    """The transitions of a table of states and events in a header's comment:
    a row a state, a column an event, the state that follows where they
    meet."""
    lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
    at = next(
        i
        for i, line in enumerate(lines)
        if re.match(rf" \*\s+{first}\s+[A-Z]+\s", line)
    )
    events = [
        (m.start(), m.group()) for m in re.finditer(r"[A-Z]+", lines[at])
    ]
    edges: Edges = {}
    for line in lines[at + 1 :]:
        state = re.match(r" \*  ([A-Z]+)", line)
        if state is None:
            break
        for m in re.finditer(r"[A-Z]+", line[state.end() :]):
            start = m.start() + state.end()
            event = min(events, key=lambda e: abs(e[0] - start))[1].lower()
            key = state[1], m.group()
            if key[0] != key[1]:
                edges[key] = (
                    f"{edges[key]}, {event}" if key in edges else event
                )
    return edges


def matrix(path: str) -> Edges:
    """The same of a table "from \\ to" with marks."""
    lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
    at = next(i for i, line in enumerate(lines) if "from \\ to" in line)
    states = [
        (m.start(), m.group()) for m in re.finditer(r"[A-Z]+", lines[at])
    ]
    edges: Edges = {}
    for line in lines[at + 1 :]:
        state = re.match(r" \*   ([A-Z]+)", line)
        if state is None:
            break
        for m in re.finditer(r"\bx\b", line):
            to = min(states, key=lambda s: abs(s[0] + 3 - m.start()))[1]
            edges[state[1], to] = ""
    return edges


def machine(
    title: str,
    edges: Edges,
    places: dict[str, Point],
    ends: set[str],
    hidden: set[str] = frozenset(),  # type: ignore[assignment]
    note: str = "",
    bends: dict[tuple[str, str], float] | None = None,
    head: float = 0.0,
    only: set[tuple[str, str]] | None = None,
) -> str:
    """A state machine; ``places`` are columns and rows, and arrows into
    ``hidden`` states, and those that are not among ``only``, are in the note
    alone; ``head`` is room above for arrows that bend."""
    w, h, dx, dy = 96.0, 34.0, 158.0, 78.0
    top = min(y for _, y in places.values())
    centers = {
        name: (x * dx + w / 2 + 6, (y - top) * dy + h / 2 + 8)
        for name, (x, y) in places.items()
    }
    missing = {s for pair in edges for s in pair} - set(places)
    assert not missing, f"{title}: no place for {missing}"
    lines, labels = [], []
    for (a, b), words in edges.items():
        if b in hidden or (only is not None and (a, b) not in only):
            continue
        bend = (bends or {}).get((a, b), 14.0 if (b, a) in edges else 0.0)
        line, label = arrow(centers[a], centers[b], bend, words, w, h)
        lines.append(line)
        labels.append(label)
    boxes = []
    for name, (x, y) in centers.items():
        kind = "box end" if name in ends else "box"
        boxes += [
            box(x - w / 2, y - h / 2, w, h, kind),
            text(x, y + 5, name, "mid bold"),
        ]
    width = max(x for x, _ in centers.values()) + w / 2 + 6
    height = max(y for _, y in centers.values()) + h / 2 + 8
    if note:
        height += 24
        width = max(width, 5.6 * len(note))
        boxes.append(text(6, height - 8, note, "small"))
    return svg(width, height, title, [*lines, *labels, *boxes], -head)


def partition() -> Edges:
    """The table of Python of a Kafka partition that is read."""
    sys.path.insert(0, str(ROOT))
    from persia.data.kafka.states import TABLE

    edges: Edges = {}
    for state, ways in TABLE.items():
        for event, to in ways.items():
            if to is not state:
                pair, word = (state.name, to.name), event.name.lower()
                edges[pair] = (
                    f"{edges[pair]}, {word}" if pair in edges else word
                )
    return edges


def small_machines() -> dict[str, str]:
    """Those of parts of a batch, and of what one room alone knows."""
    return {
        "lookup": machine(
            "The states of a lookup in the trainer",
            table("csrc/loop/batches.h", "RUN"),
            {"WAITS": (0, 0), "RUNS": (1.4, 0), "TAKEN": (2.8, 0)},
            {"TAKEN"},
            bends={("WAITS", "TAKEN"): -40.0},
            head=34.0,
        ),
        "gradient": machine(
            "The states of a gradient in the trainer",
            table("csrc/loop/batches.h", "PEND"),
            {
                "OUT": (0, 0.7),
                "PENDING": (1.4, 0),
                "UPDATING": (2.8, 0.7),
                "REFUSED": (0, 1.9),
                "APPLIED": (4.2, 0),
                "FAILED": (4.2, 0.95),
                "DISCARDED": (4.2, 1.9),
            },
            {"APPLIED", "FAILED", "DISCARDED", "REFUSED"},
            only={
                ("OUT", "PENDING"),
                ("OUT", "REFUSED"),
                ("OUT", "UPDATING"),
                ("PENDING", "UPDATING"),
                ("UPDATING", "APPLIED"),
                ("UPDATING", "FAILED"),
                ("UPDATING", "DISCARDED"),
            },
            note="APPLIED, FAILED and DISCARDED can follow OUT and PENDING, "
            "too.",
        ),
        "stream": machine(
            "The states of a data loader's stream at an embedding worker",
            table("csrc/embedding_worker/private.h", "HEAR"),
            {
                "THERE": (0, 0.8),
                "GONE": (1.6, 0),
                "LEFT": (1.6, 1.6),
                "OLD": (3.0, 0.8),
            },
            {"OLD"},
            {"OLD"},
            note="The event end leads from every state to OLD: its rows were "
            "replaced, or no rank asks for its batches.",
        ),
        "taking": machine(
            "The states of a Take of a rank",
            table("csrc/rank/private.h", "ENTER"),
            {
                "MADE": (0, 0),
                "QUEUED": (0, 1.2),
                "ASKS": (1.4, 1.2),
                "WANTS": (2.8, 0),
                "ENDS": (2.8, 2.4),
                "HOLDS": (4.2, 1.2),
                "SETTLED": (5.6, 1.2),
                "LEFT": (5.6, 2.4),
            },
            {"LEFT"},
            {"LEFT"},
            note="The event leave leads from QUEUED, ASKS and SETTLED to "
            "LEFT: it is answered, or its loop has ended.",
        ),
        "held": machine(
            "The states of a batch that a rank has",
            table("csrc/rank/private.h", "HOLD"),
            {
                "NONE": (0, 1),
                "HERE": (1.2, 1),
                "USED": (2.6, 0.2),
                "UNUSED": (2.6, 1.8),
                "SKIPPED": (4.2, 0),
                "UNDONE": (4.2, 1.4),
                "RETURNED": (5.6, 0.7),
            },
            set(),
            {"NONE", "RETURNED"},
            bends={("HERE", "SKIPPED"): 70.0},
            note="Gradients that leave lead from every state with a lease to "
            "RETURNED; the event drop leads from every state to NONE.",
        ),
        "slot": machine(
            "The states of a slot of a server's calls",
            table("csrc/rpc/stalls.h", "READ"),
            {
                "IDLE": (0, 1),
                "READING": (1.2, 0),
                "HANDLED": (2.4, 0),
                "ANSWERING": (3.6, 0),
                "SENT": (4.8, 1),
                "REFUSED": (1.8, 2),
                "DISMISSED": (3.2, 2),
            },
            set(),
        ),
        "rows": machine(
            "Whether a shard has its rows",
            table("csrc/shard/private.h", "EMPTY"),
            {
                "WHOLE": (0, 0),
                "REPLACING": (1.8, 0),
                "INCOMPLETE": (0.9, 1.2),
            },
            set(),
            head=8.0,
        ),
        "sync": machine(
            "What a shard does with the steps of a job",
            table("csrc/shard/sync.h", "COLLECT"),
            {
                "IDLE": (0, 0.6),
                "COLLECTING": (1.4, 0),
                "APPLYING": (1.4, 1.2),
                "AHEAD": (2.8, 0.6),
            },
            set(),
        ),
        "flight": machine(
            "The states of an update in flight at a shard",
            table("csrc/shard/ledger.h", "BEGIN"),
            {
                "NONE": (0, 0),
                "BEGUN": (1.2, 0),
                "COMMITTED": (2.5, 0),
                "REFUSED": (3.9, 0),
            },
            set(),
            {"NONE"},
            note="The event end leads from every state to NONE.",
        ),
    }


def machines() -> dict[str, str]:
    job = matrix("csrc/shard/job.h")
    requests = table("csrc/client/private.h", "SEND")
    words = {
        ("STARTING", "RUNNING"): "files open",
        ("RUNNING", "DONE"): "all written, staged",
        ("RUNNING", "FAILED"): "error",
        ("STARTING", "FAILED"): "error",
        ("DONE", "REPLACING"): "in place",
        ("REPLACING", "DONE"): "rows read",
        ("REPLACING", "FAILED"): "error",
    }
    return {
        "partition": machine(
            "The states of a Kafka partition that is read",
            partition(),
            {
                "PLACING": (0, 1.2),
                "READING": (1.4, 1.2),
                "AHEAD": (1.4, 0),
                "QUIET": (3.2, 1.2),
                "OVERTAKEN": (1.4, 2.4),
                "DONE": (3.2, 0),
                "FAILED": (3.2, 2.4),
            },
            {"DONE", "FAILED"},
            {"FAILED"},
            bends={
                ("AHEAD", "OVERTAKEN"): -52.0,
            },
            note="The event error leads from every state but DONE to FAILED: "
            "access, storage or a timeout.",
        ),
        "batch": machine(
            "The states of a batch in the trainer",
            table("csrc/loop/batches.h", "FILL"),
            {
                "FILLING": (0, 1),
                "QUEUED": (1, 1),
                "AHEAD": (2, 0),
                "ASKED": (2, 2),
                "OUT": (3, 1),
                "READ": (4, -0.1),
                "PENDING": (4, 2.3),
                "UPDATING": (5, 1),
                "DONE": (5, 2.6),
            },
            {"DONE"},
            {"DONE"},
            "The event end leads from every state to DONE: trained, read, "
            "skipped, abandoned, or its pass has ended.",
        ),
        "update": machine(
            "The states of an update in the trainer",
            table("csrc/loop/updates.h", "ADD"),
            {
                "NEW": (0, 0.7),
                "QUEUED": (1, 0.7),
                "RUNNING": (2.2, 0.7),
                "APPLIED": (3.4, 0.7),
                "FAILED": (1.6, 1.8),
            },
            {"APPLIED", "FAILED"},
            bends={("NEW", "RUNNING"): -42.0},
            head=36.0,
        ),
        "job": machine(
            "The states of a snapshot or restore at a server",
            {pair: words.get(pair, "") for pair in job},
            {
                "STARTING": (0, 0),
                "RUNNING": (1.2, 0),
                "DONE": (3, 0),
                "REPLACING": (3, 1.2),
                "FAILED": (1.2, 1.2),
                "DROPPED": (4.2, 1.2),
            },
            {"DROPPED"},
            {"DROPPED"},
            bends={
                ("DONE", "REPLACING"): 34.0,
                ("REPLACING", "DONE"): 34.0,
            },
            note="Every state leads to DROPPED: ended, committed, replaced, "
            "or not asked about for 10 minutes.",
        ),
        "request": machine(
            "The states of a request to one server",
            requests,
            {
                "READY": (0, 1),
                "FLYING": (1.2, 1),
                "CAME": (2.4, 1),
                "DONE": (3.8, 1),
                "PAUSED": (1.8, 2.1),
            },
            {"DONE"},
            bends={("CAME", "READY"): 40.0},
            only=set(requests) - {("READY", "DONE")},
            head=36.0,
            note="A deadline, or a server that refuses, ends all requests "
            "of the call.",
        ),
        "offer": machine(
            "The states of a batch at an embedding worker",
            table("csrc/embedding_worker/private.h", "TAKE"),
            {
                "QUEUED": (0, 0.8),
                "LOOKING": (1.3, 0),
                "LEASED": (2.6, 0.8),
                "RETURNING": (3.9, 0.8),
                "DONE": (3.9, 1.9),
            },
            {"DONE"},
            {"DONE"},
            bends={
                ("QUEUED", "RETURNING"): 34.0,
                ("RETURNING", "QUEUED"): -64.0,
            },
            note="The event end leads from LOOKING, LEASED and RETURNING to "
            "DONE: trained, skipped, or failed.",
        ),
    }


# ---- staleness -------------------------------------------------------------

Block = tuple[str, int, int, int]  # lane, batch, begin, end


def schedule(bound: int, until: int) -> list[Block]:
    """Lookups of 2, dense steps of 3 and updates of 2 units under a bound."""
    look: list[int] = []
    dense: list[int] = []
    applied: list[int] = []
    blocks: list[Block] = []
    for i in range(20):
        begin = look[-1] if look else 0
        if i > bound:  # at most `bound` batches before it are open
            begin = max(begin, applied[i - 1 - bound])
        look.append(begin + 2)
        start = max(look[-1], dense[-1] if dense else 0)
        dense.append(start + 3)
        update = max(dense[-1], applied[-1] if applied else 0)
        applied.append(update + 2)
        blocks += [
            ("lookup", i + 1, begin, begin + 2),
            ("dense", i + 1, start, start + 3),
            ("update", i + 1, update, update + 2),
        ]
    return [b for b in blocks if b[3] <= until]


def staleness() -> str:
    until, unit, lane, left = 24, 24.0, 24.0, 96.0
    names = {"lookup": "lookup", "dense": "dense step", "update": "update"}
    body, y = [], 8.0
    for bound in (0, 1, 2):
        blocks = schedule(bound, until)
        done = sum(1 for b in blocks if b[0] == "dense")
        body.append(text(0, y + 12, f"τ = {bound}: {done} batches", "bold"))
        y += 20
        for i, (kind, name) in enumerate(names.items()):
            top = y + i * lane
            body.append(text(left - 8, top + 15, name, "small end-label"))
            body.append(
                f'<path class="line" d="M{left:g} {top + lane - 2:g} '
                f'H{left + until * unit:g}"/>'
            )
            for what, number, begin, end in blocks:
                if what != kind:
                    continue
                x, wide = left + begin * unit, (end - begin) * unit - 2
                body.append(
                    f'<rect class="{kind}" x="{x:g}" y="{top:g}" '
                    f'width="{wide:g}" height="{lane - 4:g}" rx="3"/>'
                )
                body.append(
                    f'<text class="small mid on" style="fill:#fff" '
                    f'x="{x + wide / 2:g}" y="{top + 14:g}">{number}</text>'
                )
        y += 3 * lane + 14
    body.append(text(left, y + 4, "time →", "small"))
    picture = svg(
        left + until * unit + 6,
        y + 12,
        "Lookups, dense steps and updates at staleness bounds 0, 1 and 2",
        body,
    )
    return picture.replace(
        "</style>", ".end-label{text-anchor:end}</style>", 1
    )


# ---- roles -----------------------------------------------------------------


def roles() -> str:
    w, h = 168.0, 58.0
    places = {
        "data loader": (100.0, 40.0, "makes batches of ids"),
        "embedding worker": (360.0, 40.0, "looks up, pools, sums"),
        "parameter servers": (640.0, 40.0, "rows + optimizer state"),
        "trainer": (360.0, 190.0, "dense network, DDP"),
    }
    body, labels = [], []
    arrows = (
        ("data loader", "embedding worker", 0.0, "ids, labels"),
        ("embedding worker", "parameter servers", 12.0, "rows, sums"),
        ("parameter servers", "embedding worker", 12.0, "vectors"),
        ("embedding worker", "trainer", 40.0, "embeddings, labels"),
        ("trainer", "embedding worker", 40.0, "gradients"),
    )
    for a, b, bend, words in arrows:
        line, label = arrow(places[a][:2], places[b][:2], bend, words, w, h)
        body.append(line)
        labels.append(label)
    body += labels
    for name, (x, y, about) in places.items():
        body += [
            box(x - w / 2, y - h / 2, w, h),
            text(x, y - 4, name, "mid bold"),
            text(x, y + 15, about, "small mid"),
        ]
    return svg(740, 228, "The four roles and what passes between them", body)


def drawings() -> dict[str, str]:
    """All of them, by their names."""
    return {
        "staleness": staleness(),
        "roles": roles(),
        **{
            f"states-{name}": one
            for name, one in (machines() | small_machines()).items()
        },
    }


def main() -> None:
    for name, picture in drawings().items():
        path = ROOT / "docs" / "_static" / f"{name}.svg"
        path.write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    main()
