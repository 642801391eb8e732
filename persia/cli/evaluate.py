"""``persia evaluate``: scores a model that ``persia train`` has saved."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import typer

from persia.cli.bars import Counted
from persia.cli.options import (
    BatchSize,
    Device,
    Json,
    LiveServers,
    Namespace,
    SavedModel,
    Step,
    print_json,
)
from persia.errors import InvalidArgument


def command(
    root: SavedModel,
    data: Annotated[
        str | None,
        typer.Argument(
            help="A file, glob or URL with the columns of the training "
            "(default: the samples that the training held out)."
        ),
    ] = None,
    step: Step = None,
    servers: LiveServers = None,
    namespace: Namespace = "default",
    device: Device = "cpu",
    batch_size: BatchSize = 1024,
    json: Json = False,
) -> None:
    """Score a saved model: AUC, log loss, normalised entropy, calibration.

    Of several labels these are means, and those of each follow. With a group
    in the schema (or --group of the training) there is GAUC, too.

    With --servers the rows are those of the servers, which may be trained at
    the time, and only the dense part is read from the checkpoint.

    Malformed lines are left out and counted. It is an error if no line is
    left.

    persia evaluate out day_23.parquet

    persia evaluate out day_23.parquet --servers ps0:8888,ps1:8888 --json
    """
    from persia.train import load

    trained = load(
        root, step, servers=servers, namespace=namespace, device=device
    )
    batches: Any = (
        trained.held_out() if data is None else trained.read(data, batch_size)
    )
    if batches is None:
        raise InvalidArgument(
            f"the training of {root} held out no samples: name a file"
        )
    found = trained.evaluate(Counted(batches, "scoring"))
    scores = dataclasses.asdict(found)
    tasks = scores.pop("tasks")
    for one in (scores, *tasks.values()):
        if one["gauc"] is None:
            del one["gauc"]
        one.pop("tasks", None)
    # Known once all of them were read.
    scores["malformed"] = getattr(batches, "malformed", 0)
    if json:
        print_json(scores | ({"tasks": tasks} if tasks else {}))
        return
    _print(scores)
    for task, one in tasks.items():
        print(f"\n{task}")
        _print(one)


def _print(scores: dict[str, float]) -> None:
    for name, value in scores.items():
        text = f"{value:,}" if isinstance(value, int) else f"{value:.5f}"
        print(f"{name.replace('_', ' '):<20} {text}")
