"""Rounds: each is a job of four roles on this machine, and its kills."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shutil
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from persia.torture import cluster, data, plan, verdict

#: What takes long in each process of a round, and is not ours.
MODULES = (
    *("cryptography.x509", "numpy", "prometheus_client", "pyarrow.csv"),
    *("pyarrow.dataset", "pydantic", "pydantic_settings", "rich.table"),
    *("torch", "torch.distributed", "typer", "yaml", "ssl", "hmac"),
    *("rich.console", "rich.traceback", "typer.core", "zoneinfo", "csv"),
)


def imports() -> None:
    """All processes of the rounds are forks that have them."""
    for name in MODULES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    torch.set_num_threads(1)


def run(seed: int, short: bool, durable: str, folder: Path) -> dict[str, Any]:
    """A round; what became of it."""
    made = plan.of_seed(seed, short, durable)
    folder.mkdir(parents=True)
    data.write(made, folder)
    (folder / "plan.txt").write_text(
        f"{made}\n{made!r}\n" + "\n".join(map(str, made.events)) + "\n"
    )
    began = time.monotonic()
    one = cluster.Cluster(made, folder)
    found = verdict.Verdict()
    try:
        one.run()
        if one.read():
            found = verdict.judge(made, folder)
        else:
            one.wrong("the rows cannot be read: see reader.log")
        one.close()
    finally:
        one.kill()
    wrong = one.violations + found.wrong
    return {
        "seed": seed,
        "round": str(made),
        "seconds": time.monotonic() - began,
        "slowest": one.slowest,
        "trained": found.trained,
        "missing": found.missing,
        "told": found.told,
        "loaders": found.loaders,
        "signals": Counter(e.signal for e in made.events for _ in e.targets),
        "notes": one.notes + found.notes,
        "wrong": wrong,
    }


def begin(seed: int, short: bool, durable: str, folder: Path) -> int:
    """A round in a process of its own."""

    def work() -> None:
        try:
            found = run(seed, short, durable, folder)
        except BaseException:
            found = {"seed": seed, "wrong": [traceback.format_exc()]}
        (folder / "result.json").write_text(json.dumps(found))

    return cluster.fork(work, folder.parent / f"{folder.name}.log")


def line(found: dict[str, Any]) -> str:
    """Of a round."""
    verdict = "ok" if not found["wrong"] else "VIOLATION"
    text = f"{found['seed']:6d} {verdict:9s} "
    if "round" in found:
        text += (
            f"{found['seconds']:5.1f} s, slowest {found['slowest']:4.1f} s, "
            f"trained {found['trained']}, missing {found['missing']}, told "
            f"{found['told']}  {found['round']}"
        )
    for note in found.get("notes", ()):
        text += f"\n       note: {note}"
    for wrong in found["wrong"][:5]:
        text += f"\n       {wrong}"
    if found["wrong"]:
        text += f"\n       logs: {found['folder']}"
    return text


def table(rounds: list[dict[str, Any]]) -> str:
    """Of all."""
    signals: Counter[str] = Counter()
    for one in rounds:
        signals.update(one.get("signals", {}))
    bad = [one["seed"] for one in rounds if one["wrong"]]
    slow = max((one.get("slowest", 0.0) for one in rounds), default=0.0)
    rows = {
        "rounds": len(rounds),
        "with a violation": f"{len(bad)} {bad or ''}",
        "signals": ", ".join(f"{n} {k}" for k, n in sorted(signals.items())),
        "updates in the rows": sum(one.get("trained", 0) for one in rounds),
        "updates that servers lost": sum(
            one.get("missing", 0) for one in rounds
        ),
        "of these reported by trainers": sum(
            one.get("told", 0) for one in rounds
        ),
        "slowest time without a batch": f"{slow:.1f} s",
        "ranks wait": sum("ranks wait" in o.get("notes", ()) for o in rounds),
    }
    return "\n".join(f"{name:30s} {value}" for name, value in rows.items())


def play(
    seeds: Iterator[int],
    until: float,
    *,
    short: bool = False,
    durable: str = "off",
    jobs: int = 2,
    logs: Path | None = None,
) -> Iterator[dict[str, Any]]:
    """Plays rounds, so many at once.

    Args:
        seeds: of the rounds.
        until: a time of ``time.monotonic()`` after which none begins.
        short: fewer batches and kills.
        durable: level of the logs of servers, which lose nothing then.
        jobs: rounds at once.
        logs: a folder for those of all rounds. Without it those of rounds
            with a violation are kept, in a new folder.

    Yields:
        what became of a round; ``folder``: where its logs are.
    """
    root = logs or Path(tempfile.mkdtemp(prefix="persia-torture-"))
    root.mkdir(parents=True, exist_ok=True)
    imports()
    running: dict[int, Path] = {}
    while True:
        while len(running) < jobs and time.monotonic() < until:
            if (seed := next(seeds, None)) is None:
                break
            folder = root / str(seed)
            shutil.rmtree(folder, ignore_errors=True)
            running[begin(seed, short, durable, folder)] = folder
        if not running:
            return
        pid, _ = os.wait()
        folder = running.pop(pid)
        found = json.loads((folder / "result.json").read_text())
        yield found | {"folder": str(folder)}
        if not found["wrong"] and logs is None:
            shutil.rmtree(folder, ignore_errors=True)
