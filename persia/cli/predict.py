"""``persia predict``: probabilities by a model of ``persia train``."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Annotated

import typer

from persia.errors import InvalidArgument, StorageError

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
    """Write the probability of a click for each sample, one a line.

    A malformed line is an error: lines of the output are those of the data.

    persia predict out day_23.parquet --out clicks.txt
    """
    from persia.train import load

    trained = load(root, step)
    if trained.schema is None:
        raise InvalidArgument(
            f"{root} was trained on generated data or on Criteo's "
            "lines, which have no schema: predict in Python, with "
            "persia.train.load"
        )
    batches = trained.read(data, batch_size, labels=False, strict=True)
    with contextlib.ExitStack() as stack:
        file = sys.stdout
        if out is not None:
            try:
                file = stack.enter_context(out.open("w", encoding="ascii"))
            except OSError as e:
                raise StorageError(f"--out {out}: {e.strerror or e}") from e
        for batch in batches:
            for p in trained.predict(batch).tolist():
                print(f"{p:.6g}", file=file)
