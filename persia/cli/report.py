"""``persia report``: a page about a model of ``persia train``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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
    out: Annotated[Path, typer.Option(help="File to write.")] = Path(
        "report.html"
    ),
    log: Annotated[
        str | None,
        typer.Option(help="The .csv file of persia train --log, for curves."),
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
    step: Annotated[
        int | None, typer.Option(help="A step of the root (default: latest).")
    ] = None,
    batch_size: Annotated[
        int, typer.Option(min=1, help="Samples a batch.")
    ] = 4096,
) -> None:
    """Write an HTML file with scores, calibration by decile, AUC by slice,
    norms and ages of the rows, and curves of a log.

    persia report out --log log.csv
    """
    import persia

    path = persia.report(
        root,
        out,
        step=step,
        log=log,
        data=data,
        slices=slice or (),
        batch_size=batch_size,
    )
    print(f"wrote {path}")
