"""The counted gate: instructions, bytes and allocations against a file.

usage: python -m tests.counted.gate BUILD [--update]

Clocks on shared machines lie, counts do not. The cases of
``csrc/tests/counted`` run under valgrind's callgrind, which counts the
instructions of each; steps of a remote store are counted by a library that
is loaded before all others. ``counts.json`` holds what was counted before,
by compiler, C library, tool and instruction set (callgrind knows no AVX-512
and counts the AVX2 clones). Of another combination the counts are printed
and nothing fails. A change beyond the tolerance must change the file, with
``--update``, and its commit says why.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

FILE = Path(__file__).with_name("counts.json")
ROOT = Path(__file__).parents[2]

#: By how much a count may differ, by the longest prefix of its name; None:
#: it is reported only.
TOLERANCE: dict[str, float | None] = {
    "": 0.02,  # kernels
    "step_": 0.03,
    "remote_step_bytes": 0.0,
    "remote_step_allocations": 0.05,
    "remote_step_": None,
}

Counts = dict[str, int]

_FUNCTION = re.compile(r"fn=\((\d+)\)(?: (.*))?$")
_CALLED = re.compile(r"cfn=\((\d+)\)(?: (.*))?$")
_COST = re.compile(r"[+*-]?\d* ?(\d+)$")


def tolerance(name: str) -> float | None:
    """Of one count, as a part of what it was."""
    return TOLERANCE[
        max((p for p in TOLERANCE if name.startswith(p)), key=len)
    ]


def inclusive(profile: str, prefix: str = "counted_") -> Counts:
    """Instructions of each function whose name begins with ``prefix``, what
    it called included, by the rest of its name; of callgrind's file."""
    names: dict[str, str] = {}
    counts: Counts = {}
    current = ""
    for line in profile.splitlines():
        if found := _FUNCTION.match(line):
            number, name = found.groups()
            current = names.setdefault(number, name)
        elif found := _CALLED.match(line):
            names.setdefault(found[1], found[2])
        elif current.startswith(prefix) and (found := _COST.match(line)):
            name = current.removeprefix(prefix)
            counts[name] = counts.get(name, 0) + int(found[1])
    return counts


def count_local(build: Path, valgrind: str) -> tuple[str, Counts]:
    """What the cases are counted for, and their counts."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "profile"
        done = subprocess.run(
            [
                valgrind,
                "--tool=callgrind",
                "--toggle-collect=counted_*",
                f"--callgrind-out-file={out}",
                str(build / "counted"),
            ],
            check=True,
            capture_output=True,
            text=True,
        )
        return done.stdout.strip(), inclusive(out.read_text())


def count_remote(build: Path) -> Counts:
    """Counts of a remote step."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.counted.remote_step"],
        check=True,
        cwd=ROOT,
        env=os.environ | {"LD_PRELOAD": str(build / "libcounted_calls.so")},
        stdout=subprocess.PIPE,
        text=True,
    )
    counts: Counts = json.loads(done.stdout)
    return counts


def differences(before: Counts, now: Counts) -> list[str]:
    """A line for each count that changed beyond its tolerance."""
    lines = []
    for name in sorted(before.keys() | now.keys()):
        allowed = tolerance(name)
        if allowed is None:
            continue
        if name not in before or name not in now:
            lines.append(
                f"{name}: only {'after' if name in now else 'before'}"
            )
        elif abs(now[name] - before[name]) > allowed * before[name]:
            lines.append(
                f"{name}: {before[name]} before, {now[name]} now "
                f"({now[name] / max(before[name], 1) - 1:+.2%}, "
                f"allowed {allowed:.0%})"
            )
    return lines


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="tests.counted.gate")
    parser.add_argument("build", type=Path)
    parser.add_argument("--update", action="store_true")
    options = parser.parse_args(arguments)
    valgrind = shutil.which("valgrind")
    if valgrind is None:
        print("counted: no valgrind here, nothing was counted")
        return 0
    build = options.build.resolve()
    machine, now = count_local(build, valgrind)
    version = subprocess.run(
        [valgrind, "--version"], check=True, capture_output=True, text=True
    ).stdout.strip()
    key = f"{machine}, {version}"
    now |= count_remote(build)
    known = json.loads(FILE.read_text()) if FILE.exists() else {}
    before = known.get(key)
    print(f"counted for {key}")
    for name, n in sorted(now.items()):
        was = (
            f"{n / before[name] - 1:+9.2%}"
            if before and before.get(name)
            else ""
        )
        print(f"  {name:34} {n:12} {was}")
    if options.update:
        known[key] = now
        FILE.write_text(json.dumps(known, indent=2, sort_keys=True) + "\n")
        return 0
    if before is None:
        print(f"{FILE.name} has no counts for this: nothing was compared")
        return 0
    changed = differences(before, now)
    if changed:
        print(
            "counts changed:\n  " + "\n  ".join(changed) + "\nIf that is "
            "meant: make counted UPDATE=--update, and say why in the commit."
        )
    return bool(changed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
