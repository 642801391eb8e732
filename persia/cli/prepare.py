"""``persia prepare``: a log as Parquet files in time order."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from persia.errors import InvalidArgument

__all__ = ["command"]


def command(
    source: Annotated[
        str,
        typer.Argument(
            help="taobao:FOLDER, avazu:FILE, or a file, glob or URL with "
            "--schema."
        ),
    ],
    out: Annotated[
        str, typer.Argument(help="Folder for Parquet files and schema.yaml.")
    ],
    schema: Annotated[
        str | None,
        typer.Option(help="Columns of the files; it names a timestamp."),
    ] = None,
    chunk_rows: Annotated[
        int, typer.Option(help="Rows that are sorted in memory at a time.")
    ] = 1 << 20,
    file_rows: Annotated[
        int, typer.Option(help="Most rows of a file that is written.")
    ] = 1 << 22,
) -> None:
    """Sort a log by its timestamps, in bounded memory.

    persia prepare avazu:train.gz avazu

    persia train 'avazu/*.parquet' --schema avazu/schema.yaml --window 1d
    """
    from persia import data, datasets

    options: dict[str, Any] = {
        "chunk_rows": chunk_rows,
        "file_rows": file_rows,
    }
    name, _, path = source.partition(":")
    if name == "taobao" and schema is None:
        made = datasets.prepare_taobao(path, out, **options)
    elif name == "avazu" and schema is None:
        made = data.prepare(path, "avazu", out, **options)
    elif schema is None:
        raise InvalidArgument(
            f"persia prepare {source}: need --schema with a timestamp, or "
            "taobao:FOLDER or avazu:FILE (Criteo's logs have no times; they "
            "are in order already)"
        )
    else:
        made = data.prepare(source, schema, out, **options)
    for line in made.malformed_lines[:3]:
        typer.echo(f"{line} (left out)")
    typer.echo(
        f"{made.rows:,} rows in {len(made.files)} files in {out}, "
        f"{made.malformed:,} malformed left out"
    )
    typer.echo(f"persia train '{out}/*.parquet' --schema {made.schema}")
