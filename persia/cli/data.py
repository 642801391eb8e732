"""``persia data``: files of samples, before they are trained on."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from persia.cli.bars import Counted
from persia.cli.options import BatchSize, Json, print_json
from persia.cli.shared import Commands
from persia.errors import MalformedData

commands = Commands(no_args_is_help=True)

_SHOWN = 10  # malformed samples


@commands.callback()
def _data() -> None:
    """Check files of samples."""


@commands.command()
def check(
    data: Annotated[
        str,
        typer.Argument(
            help="A file, glob or URL, or NAME:PATH, as of persia train."
        ),
    ],
    schema: Annotated[
        str | None,
        typer.Option(
            help="Columns of the files: a YAML file or a name, as of persia "
            "train (default: inferred)."
        ),
    ] = None,
    label: Annotated[
        str | None,
        typer.Option(
            help="Column of the label; several with commas between (default: "
            "as the schema says)."
        ),
    ] = None,
    malformed_limit: Annotated[
        float,
        typer.Option(
            min=0,
            max=1,
            help="Share of the samples that one rule may leave out; more are "
            "an error.",
        ),
    ] = 0.01,
    batch_size: BatchSize = 1024,
    json: Json = False,
) -> None:
    """Read all samples of files as persia train would, and train nothing.

    It counts samples, positive ones of each label, and what is malformed,
    with the file and line of the first ones. It is an error if more than
    --malformed-limit is malformed, or no sample is left.

    persia data check clicks.parquet

    persia data check 'day_*.tsv.gz' --schema clicks.yaml --json
    """
    from persia.train.check import check_data

    found = check_data(
        data,
        schema,
        label,
        batch_size=batch_size,
        malformed_limit=malformed_limit,
        watch=lambda batches: Counted(batches, "reading"),
    )
    if json:
        print_json(found)
    else:
        _print(found)
    if not found["samples"]:
        raise MalformedData(f"there is no well-formed sample in {data}")


def _print(found: dict[str, Any]) -> None:
    print(f"samples    {found['samples']:,}")
    for name, positive in found["positive"].items():
        print(f"label      {name}: {positive:,} positive")
    print(f"features   {', '.join(found['features'])}")
    print(f"dense      {found['dense']}")
    print(f"malformed  {found['malformed']:,}")
    for line in found["malformed_lines"][:_SHOWN]:
        print(f"  {line}")
