"""``persia report``: a page about a model of ``persia train``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

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


def command(
    root: SavedModel,
    data: Annotated[
        str | None,
        typer.Argument(
            help="A file, glob or URL with the columns of the training "
            "(default: the samples that the training held out)."
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="HTML file to write.")] = Path(
        "report.html"
    ),
    curves: Annotated[
        str | None,
        typer.Option(help="The .csv file of persia train --curves."),
    ] = None,
    slice: Annotated[
        list[str] | None,
        typer.Option(
            "--slice",
            help="A feature with one id a sample: AUC of each of its most "
            "frequent ids; may be given several times (default: the feature "
            "with the fewest ids).",
        ),
    ] = None,
    step: Step = None,
    servers: LiveServers = None,
    namespace: Namespace = "default",
    device: Device = "cpu",
    batch_size: BatchSize = 1024,
    json: Json = False,
) -> None:
    """Write an HTML file with scores, calibration by decile, AUC by slice,
    norms and ages of the rows, and curves of the training.

    persia report out --curves curves.csv
    """
    import persia

    path = persia.report(
        root,
        out,
        step=step,
        curves=curves,
        data=data,
        slices=slice or (),
        batch_size=batch_size,
        servers=servers,
        namespace=namespace,
        device=device,
        watch=lambda batches: Counted(batches, "scoring"),
    )
    if json:
        print_json({"out": str(path)})
    else:
        print(f"wrote {path}")
