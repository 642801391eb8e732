"""Random kills by seed.

    python -m tests.chaos --seed 17
    python -m tests.chaos --seed 1 --rounds 200 --jobs 2

Prints a line for each round, and a table. The logs of a round with a violation
are kept. See ``plan.py`` for what a seed decides.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[_name] = "1"

from tests.chaos import cluster, data, plan, verdict  # noqa: E402

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


def run(seed: int, short: bool, folder: Path) -> dict[str, Any]:
    """A round; what became of it."""
    made = plan.plan(seed, short)
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


def begin(seed: int, short: bool, folder: Path) -> int:
    """A round in a process of its own."""

    def work() -> None:
        try:
            found = run(seed, short, folder)
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
        "updates": sum(one.get("trained", 0) for one in rounds),
        "missing": sum(one.get("missing", 0) for one in rounds),
        "told": sum(one.get("told", 0) for one in rounds),
        "slowest time without a batch": f"{slow:.1f} s",
        "ranks wait": sum("ranks wait" in o.get("notes", ()) for o in rounds),
    }
    return "\n".join(f"{name:30s} {value}" for name, value in rows.items())


def main() -> int:
    """All rounds; whether there was a violation."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos")
    parser.add_argument("--seed", type=int, action="append", default=[])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--keep", type=Path, default=None)
    given = parser.parse_args()
    firsts = given.seed or [1]
    seeds = [s + i for s in firsts for i in range(given.rounds)]
    root = given.keep or Path(tempfile.mkdtemp(prefix="persia-chaos-"))
    root.mkdir(parents=True, exist_ok=True)
    imports()
    running: dict[int, Path] = {}
    rounds = []
    while seeds or running:
        while seeds and len(running) < given.jobs:
            folder = root / str(seeds[0])
            shutil.rmtree(folder, ignore_errors=True)
            running[begin(seeds.pop(0), given.short, folder)] = folder
        pid, _ = os.wait()
        folder = running.pop(pid)
        found = json.loads((folder / "result.json").read_text())
        rounds.append(found)
        print(line(found), flush=True)
        if found["wrong"]:
            print(f"       logs: {folder}", flush=True)
        elif given.keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    print(table(rounds))
    return int(any(one["wrong"] for one in rounds))


if __name__ == "__main__":
    sys.exit(main())
