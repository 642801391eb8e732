"""``persia evaluate``: scores a model that ``persia train`` has saved."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from persia.cli.options import to_json
from persia.errors import InvalidArgument

__all__ = ["command"]


def command(
    root: Annotated[
        str,
        typer.Argument(
            help="Checkpoint root of persia train --save, or the folder of a "
            "step."
        ),
    ],
    data: Annotated[
        str | None,
        typer.Argument(
            help="A file, glob or URL with the columns of the training "
            "(default: the samples that the training held out)."
        ),
    ] = None,
    step: Annotated[
        int | None, typer.Option(help="A step of the root (default: latest).")
    ] = None,
    batch_size: Annotated[
        int, typer.Option(min=1, help="Samples a batch.")
    ] = 4096,
    json: Annotated[
        bool, typer.Option("--json", help="The scores as JSON.")
    ] = False,
) -> None:
    """Score a saved model: AUC, log loss, normalised entropy, calibration.

    Of several labels these are means, and those of each follow. With a group
    in the schema (or --group of the training) there is GAUC, too.

    Malformed lines are left out and counted. It is an error if no line is
    left.

    persia evaluate out day_23.parquet
    """
    from persia.train import load

    trained = load(root, step)
    batches = (
        trained.held_out() if data is None else trained.read(data, batch_size)
    )
    if batches is None:
        raise InvalidArgument(
            f"the training of {root} held out no samples: name a file"
        )
    scores = dataclasses.asdict(trained.evaluate(batches))
    tasks = scores.pop("tasks")
    for one in (scores, *tasks.values()):
        if one["gauc"] is None:
            del one["gauc"]
        one.pop("tasks", None)
    # Known once all of them were read.
    scores["malformed"] = getattr(batches, "malformed", 0)
    if json:
        print(to_json(scores | ({"tasks": tasks} if tasks else {})))
        return
    _print(scores)
    for task, one in tasks.items():
        print(f"\n{task}")
        _print(one)


def _print(scores: dict[str, float]) -> None:
    for name, value in scores.items():
        text = f"{value:,}" if isinstance(value, int) else f"{value:.5f}"
        print(f"{name.replace('_', ' '):<20} {text}")
