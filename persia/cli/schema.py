"""``persia schema``: what the columns of a file look like, as YAML."""

from __future__ import annotations

from typing import Annotated

import typer

from persia import errors
from persia.base.urls import Url
from persia.cli.options import Json, print_json


def command(
    data: Annotated[
        str,
        typer.Argument(
            help="A file, glob or URL of one format; or topics, "
            "kafka://BROKER:PORT/TOPIC."
        ),
    ],
    encoding: Annotated[
        str, typer.Option(help="Encoding of text files.")
    ] = "utf-8",
    label: Annotated[
        str | None,
        typer.Option(
            help="Column of the label; of several, with commas between "
            "(default: one is looked for)."
        ),
    ] = None,
    group: Annotated[
        str | None,
        typer.Option(help="Column of what samples belong to, for GAUC."),
    ] = None,
    json: Json = False,
) -> None:
    """Print a schema, to edit and pass to persia train --schema.

    persia schema clicks.parquet > clicks.yaml
    """
    from persia.data import Files
    from persia.data.formats.paths import find_files
    from persia.datasets import Criteo
    from persia.datasets.criteo import is_criteo
    from persia.train.config import columns_in
    from persia.train.topics import infer_topics

    labels = [] if label is None else columns_in(label)
    if Url(data).scheme == "kafka":
        found = infer_topics(data, labels, group)
    elif find_files(data)[0].size is None and "://" not in data:
        raise errors.InvalidArgument(
            f"{data} is no regular file. A pipe is read once: write it into a "
            "file, whose first samples decide the schema"
        )
    elif not (labels or group) and is_criteo(find_files(data)[0]):
        found = Criteo(data).schema
    else:
        files = Files(data, encoding=encoding, label=labels, group=group)
        found = files.schema
    if json:
        print_json(found.model_dump(mode="json", exclude_defaults=True))
        return
    names = ", ".join(one.column for one in found.labels)
    typer.echo(
        f"# {Url(data)}: {len(found.features)} id features, "
        f"{len(found.dense)} dense, "
        + (f"label {names}" if names else "no label found")
    )
    if not names:
        typer.echo("# label: NAME OF THE COLUMN")
    unhashed = "numbers as they are; {column: c, buckets: 32} makes ids of one"
    typer.echo(f"# dense: {unhashed}")
    typer.echo(found.to_yaml(), nl=False)
