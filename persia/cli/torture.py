"""``persia torture``: random kills of a job on this machine."""

from __future__ import annotations

import subprocess
import sys
from json import dumps
from pathlib import Path
from typing import Annotated, Literal

import typer

from persia.cli.options import Json

Durable = Literal["off", "process", "disk"]


def command(
    minutes: Annotated[
        float,
        typer.Option(
            min=0, help="Minutes after which no round begins; 0: no limit."
        ),
    ] = 5.0,
    rounds: Annotated[
        int, typer.Option(min=0, help="Most rounds; 0: no limit.")
    ] = 0,
    seed: Annotated[
        int,
        typer.Option(
            help="Seed of the first round, which follows from it alone; that "
            "of each later round is one more."
        ),
    ] = 0,
    short: Annotated[
        bool, typer.Option("--short", help="Few batches, three kills.")
    ] = False,
    durable: Annotated[
        Durable,
        typer.Option(
            help="Servers keep a log, as of persia serve ps --durable: they "
            "are killed in each round, and may lose nothing.",
        ),
    ] = "off",
    jobs: Annotated[int, typer.Option(min=1, help="Rounds at once.")] = 2,
    logs: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the logs of all rounds (default: those of "
            "rounds with a violation, in a new folder)."
        ),
    ] = None,
    json: Json = False,
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
        "durable": durable,
        "jobs": jobs,
        "logs": None if logs is None else str(logs),
        "json": json,
    }
    # The processes of a round are forks of one without threads.
    line = [sys.executable, "-m", "persia.torture", dumps(given)]
    raise typer.Exit(subprocess.run(line, check=False).returncode)
