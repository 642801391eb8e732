"""What the rows say of a round."""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from persia.torture.plan import DURABLE, ROLLBACK, Round


def shard_of(i: int, shards: int) -> int:
    """The shard of an id, by the hash that csrc/ids/ids.h describes."""
    h = (i + 0x9E3779B97F4A7C15) % 2**64
    h = ((h ^ h >> 30) * 0xBF58476D1CE4E5B9) % 2**64
    h = ((h ^ h >> 27) * 0x94D049BB133111EB) % 2**64
    return ((h ^ h >> 31) >> 4 & 4095) * shards // 4096


@dataclasses.dataclass
class Verdict:
    """Of a round. Updates are counted at each server.

    Attributes:
        trained: updates that are in the rows.
        missing: that are not.
        told: by trainers.
        loaders: batches that loaders told to be lost.
        workers: updates that embedding workers told to be lost.
        waits: batches in the queues of workers: their loader waits.
        wrong: violations.
    """

    trained: int = 0
    missing: int = 0
    told: int = 0
    loaders: int = 0
    workers: int = 0
    waits: int = 0
    wrong: list[str] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)


def judge(made: Round, folder: Path) -> Verdict:
    """All but how the processes ended."""
    out = Verdict()
    found = json.loads((folder / "rows.json").read_text())
    applied = _rows(made, found, out)
    _sites(made, found, applied, out)
    _logs(made, folder, out)
    for stats in found["workers"]:
        out.waits += stats.get("queued", 0)
        for name in ("failed", "given_up"):
            if stats.get(name):
                out.notes.append(f"{name} {stats[name]}")
    _compare(made, out)
    return out


def _rows(
    made: Round, found: dict[str, Any], out: Verdict
) -> dict[tuple[int, int], int]:
    """How often each batch was applied at each server."""
    applied = {}
    for n, batch in enumerate(found["batches"]):
        counts = defaultdict(set)
        for i in batch["device_ip"]:
            counts[shard_of(i, made.servers)].add(found["rows"][i])
        for shard, values in counts.items():
            if len(values) > 1:
                out.wrong.append(f"torn: batch {n} at server {shard}")
            value = int(max(values))
            if value > made.epochs:
                out.wrong.append(f"doubled: batch {n} at server {shard}")
            applied[n, shard] = value
            out.trained += value
            out.missing += max(0, made.epochs - value)
    return applied


def _sites(
    made: Round,
    found: dict[str, Any],
    applied: dict[tuple[int, int], int],
    out: Verdict,
) -> None:
    """Rows that batches share have the sum of what was applied."""
    want: Counter[int] = Counter()
    unknown = set()
    for n, batch in enumerate(found["batches"]):
        for site in batch["site_id"]:
            times = applied.get((n, shard_of(site, made.servers)))
            if times is None:
                unknown.add(site)
            else:
                want[site] += times
    for site, value in enumerate(found["sites"]):
        if site not in unknown and value != want[site]:
            out.wrong.append(
                f"torn: site {site} has {value:g}, need {want[site]}"
            )


def _logs(made: Round, folder: Path, out: Verdict) -> None:
    for log in sorted(folder.glob("*.log")):
        text = log.read_text(errors="replace")
        if "Traceback" in text and "KeyboardInterrupt" not in text:
            out.notes.append(f"traceback in {log.name}")
        if log.name.startswith("rank"):
            lost = [int(n) for n in re.findall(r"(?m)^lost (\d+)$", text)]
            out.told += max(lost, default=0)
            seen = re.findall(r"(?m)^staleness (\d+)$", text)
            if any(int(n) > made.staleness for n in seen):
                out.wrong.append(f"staleness: {max(map(int, seen))}")
        elif log.name.startswith("loader"):
            lost = [int(n) for n in re.findall(r"(?m)^lost (\d+)$", text)]
            lost += [
                int(n.replace(",", ""))
                for n in re.findall(
                    r"([\d,]+) batches that were trained", text
                )
            ]
            out.loaders += max(lost, default=0)
        elif log.name.startswith("worker"):
            lost = [
                int(n.replace(",", ""))
                for n in re.findall(r"have lost ([\d,]+) updates", text)
            ]
            out.workers += max(lost, default=0)


def _compare(made: Round, out: Verdict) -> None:
    """What is missing was reported."""
    if made.fate == ROLLBACK:
        if out.missing:
            out.wrong.append(f"missing: {out.missing} after a rollback")
        return
    if made.fate == DURABLE and out.told:
        out.wrong.append(f"told {out.told}, although servers have a log")
    if out.missing == out.told:
        return
    text = (
        f"missing {out.missing}, told {out.told} (loaders {out.loaders}, "
        f"workers {out.workers})"
    )
    dies = (
        made.has("KILL", "rank")
        or made.has("TERM", "rank")
        or made.ends_by_loss
    )
    # A loader that is started again sends what servers lack then, and one
    # whose worker dies what it has not heard to be done.
    sends = (
        made.has("KILL", "loader")
        or made.has("TERM", "loader")
        or made.has("KILL", "worker")
        or made.has("TERM", "worker")
    )
    others = max(out.loaders * made.servers, out.workers)
    most = max(out.told, others) if dies else out.told
    most += out.waits * made.servers
    exact = not (dies or sends)
    if exact or out.missing > most:
        out.wrong.append(text)
    else:
        out.notes.append(text)
