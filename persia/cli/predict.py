"""``persia predict``: probabilities by a model of ``persia train``."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import IO, Annotated

import typer

from persia.errors import InvalidArgument, MalformedData

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
        str,
        typer.Argument(
            help="A file, glob or URL with the columns of the training; it "
            "needs no label."
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(help="File to write (default: the output).")
    ] = None,
    step: Annotated[
        int | None, typer.Option(help="A step of the root (default: latest).")
    ] = None,
    batch_size: Annotated[
        int, typer.Option(min=1, help="Samples a batch.")
    ] = 4096,
) -> None:
    """Write the probability of a click for each sample, one a line; of a
    model of several labels those of all, with commas between.

    A malformed line is an error: lines of the output are those of the data.
    The file of --out appears when it is complete.

    persia predict out day_23.parquet --out clicks.txt
    """
    from persia.base.output import new_file
    from persia.checkpoint.files import local_files
    from persia.train import load
    from persia.train.sources import no_sample

    trained = load(root, step)
    if trained.schema is None:
        raise InvalidArgument(
            f"{root} was trained on generated data or on Criteo's "
            "lines, which have no schema: predict in Python, with "
            "persia.train.load"
        )
    batches = trained.read(data, batch_size, labels=False, strict=True)
    samples = 0
    with contextlib.ExitStack() as stack:
        file: IO[str] = sys.stdout
        if out is not None:
            inputs: list[str | Path] = [*batches.local_paths]
            inputs += local_files(root)
            file = stack.enter_context(new_file(out, inputs=inputs))
        for batch in batches:
            samples += len(batch)
            chances = trained.predict(batch).reshape(len(batch), -1)
            for line in chances.tolist():
                print(",".join(f"{p:.6g}" for p in line), file=file)
        if not samples:
            raise MalformedData(no_sample(batches))
