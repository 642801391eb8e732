"""``persia prepare``: a log as Parquet files in time order."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from persia.base.counts import counted
from persia.base.logs import say
from persia.cli.bars import progress
from persia.cli.options import DryRun, Json, print_json, would
from persia.errors import InvalidArgument


def command(
    data: Annotated[
        str,
        typer.Argument(
            help="A log: taobao:FOLDER, avazu:FILE, or a file, glob or URL "
            "with --schema."
        ),
    ],
    out: Annotated[
        str, typer.Argument(help="Folder for Parquet files and schema.yaml.")
    ],
    schema: Annotated[
        str | None,
        typer.Option(help="Columns of the files; it names a timestamp."),
    ] = None,
    chunk_samples: Annotated[
        int, typer.Option(help="Samples that are sorted in memory at a time.")
    ] = 1 << 20,
    file_samples: Annotated[
        int, typer.Option(help="Most samples of a file that is written.")
    ] = 1 << 22,
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    """Sort a log by its timestamps, in bounded memory.

    persia prepare avazu:train.gz avazu

    persia train 'avazu/*.parquet' --schema avazu/schema.yaml --window 1d
    """
    from persia import datasets
    from persia.data import prepare

    options: dict[str, Any] = {
        "chunk_samples": chunk_samples,
        "file_samples": file_samples,
        "dry_run": dry_run,
    }
    name, _, path = data.partition(":")
    if schema is None and name not in ("taobao", "avazu"):
        raise InvalidArgument(
            f"persia prepare {data}: need --schema with a timestamp, or "
            "taobao:FOLDER or avazu:FILE (Criteo's logs have no times; they "
            "are in order already)"
        )
    with progress("sorting") as tell:
        options["tell"] = lambda what, n: tell(n, f"{n:,} samples", what)
        if name == "taobao" and schema is None:
            made = datasets.prepare_taobao(path, out, **options)
        elif schema is None:
            made = prepare(path, "avazu", out, **options)
        else:
            made = prepare(data, schema, out, **options)
    for line in made.malformed_lines[:3]:
        say(f"{line} (left out)")
    if dry_run:
        would(f"write the samples of {data} to {out}, in time order", json)
    elif json:
        print_json(
            {
                "files": [str(file) for file in made.files],
                "schema": str(made.schema),
                "samples": made.samples,
                "malformed": made.malformed,
            }
        )
    else:
        print(
            f"{counted(made.samples, 'sample')} in "
            f"{counted(len(made.files), 'file')} in {out}, "
            f"{made.malformed:,} malformed left out"
        )
        print(f"persia train '{out}/*.parquet' --schema {made.schema}")
