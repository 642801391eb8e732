"""``persia predict``: probabilities by a model of ``persia train``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from persia.base.logs import say
from persia.cli.bars import Counted
from persia.cli.options import (
    BatchSize,
    Device,
    DryRun,
    Json,
    LiveServers,
    Namespace,
    SavedModel,
    Step,
    print_json,
    would,
)
from persia.errors import InvalidArgument, MalformedData


def command(
    root: SavedModel,
    data: Annotated[
        str,
        typer.Argument(
            help="A file, glob or URL with the columns of the training; it "
            "needs no label."
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="File to write: .parquet or .csv with names of columns, "
            "else text (default: stdout, as text)."
        ),
    ] = None,
    columns: Annotated[
        str | None,
        typer.Option(
            help="Columns of the data to write before the probabilities, "
            "with commas between, such as user,item; with --out alone."
        ),
    ] = None,
    step: Step = None,
    servers: LiveServers = None,
    namespace: Namespace = "default",
    device: Device = "cpu",
    batch_size: BatchSize = 1024,
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    """Write the probability of a click for each sample, one a line; of a
    model of several labels those of all, with commas between.

    A .parquet or .csv file has a column "probability", or one named by each
    label. A malformed line is an error: lines of the output are those of the
    data. The file of --out appears when it is complete.

    persia predict out day_23.parquet --out clicks.txt

    persia predict out day_23.parquet --out clicks.parquet --columns user,item
    """
    from persia.checkpoint.files import local_files
    from persia.train import load
    from persia.train.predictions import check_columns, writer_of
    from persia.train.sources import no_sample

    names = [name.strip() for name in (columns or "").split(",") if name]
    if json and out is None:
        raise InvalidArgument("--json is about the file of --out: give that")
    trained = load(
        root, step, servers=servers, namespace=namespace, device=device
    )
    if trained.schema is None:
        raise InvalidArgument(
            f"{root} was trained on generated data or on Criteo's "
            "lines, which have no schema: predict in Python, with "
            "persia.train.load"
        )
    batches = trained.read(data, batch_size, labels=False, strict=True)
    kept = check_columns(batches, names, out)
    inputs: list[str | Path] = [*batches.local_paths, *local_files(root)]
    if dry_run:
        if next(iter(batches), None) is None:
            raise MalformedData(no_sample(batches))
        would(f"write the probabilities of {data} to {out or 'stdout'}", json)
        return
    samples = 0
    with writer_of(out, trained.tasks, kept, inputs) as write:
        for batch in Counted(batches, "predicting") if out else batches:
            samples += len(batch)
            write(trained.predict(batch).reshape(len(batch), -1).numpy())
        if not samples:
            raise MalformedData(no_sample(batches))
    if json:
        print_json({"out": str(out), "samples": samples})
    elif out:
        say(f"wrote {samples:,} probabilities to {out}", aside=True)
