"""The process that all of a round's processes are forks of: it has loaded
what takes them long to load, and nothing of Persia's own libraries."""

from __future__ import annotations

import itertools
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

from persia.distributed.processes import end_with_parent
from persia.torture.rounds import line, play, table


def main(given: dict[str, Any]) -> int:
    """Plays rounds with the options of ``persia torture``; whether one of
    them violates what is promised."""
    end_with_parent()
    seeds = itertools.count(given["seed"])
    minutes, rounds, logs = given["minutes"], given["rounds"], given["logs"]
    found = []
    for one in play(
        itertools.islice(seeds, rounds) if rounds else seeds,
        time.monotonic() + 60 * minutes if minutes else math.inf,
        short=given["short"],
        durable=given["durable"],
        jobs=given["jobs"],
        logs=None if logs is None else Path(logs),
    ):
        found.append(one)
        out = sys.stderr if given["json"] else sys.stdout
        print(line(one), file=out, flush=True)
    print(json.dumps(found, default=str) if given["json"] else table(found))
    return int(any(one["wrong"] for one in found))


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
