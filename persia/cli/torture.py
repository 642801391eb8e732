"""``persia torture``: random kills of a job on this machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["command"]


def command(
    minutes: Annotated[
        float,
        typer.Option(min=0, help="After which no round begins; 0: no limit."),
    ] = 5.0,
    rounds: Annotated[
        int, typer.Option(min=0, help="How many at most; 0: no limit.")
    ] = 0,
    seed: Annotated[
        int,
        typer.Option(help="Of the first round, which follows from it alone."),
    ] = 1,
    short: Annotated[
        bool, typer.Option("--short", help="Few batches, three kills.")
    ] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Rounds at once.")] = 2,
    logs: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the logs of all rounds (default: those of "
            "rounds with a violation, in a new folder)."
        ),
    ] = None,
) -> None:
    """Kill servers, workers, loaders and trainers of jobs on this machine.

    In each round four roles train on rows that count, and processes are
    killed, stopped and started again. Then the rows are compared with what
    the processes have reported: no batch may be applied twice or in part, no
    loss may be unknown, all must end. The exit status is 1 if a round
    violates that.

    persia torture --minutes 10
    """
    given = {
        "minutes": minutes,
        "rounds": rounds,
        "seed": seed,
        "short": short,
        "jobs": jobs,
        "logs": None if logs is None else str(logs),
    }
    # The processes of a round are forks of one without threads.
    line = [sys.executable, "-m", "persia.torture", json.dumps(given)]
    raise typer.Exit(subprocess.run(line, check=False).returncode)
