"""``persia schema``: what the columns of a file look like, as YAML."""

from __future__ import annotations

from typing import Annotated

import typer

from persia.base.urls import Url

__all__ = ["command"]


def command(
    data: Annotated[
        str,
        typer.Argument(
            help="A file, glob or URL of one format; or topics, "
            "kafka://BROKER:PORT/TOPIC."
        ),
    ],
    encoding: Annotated[str, typer.Option(help="Of text files.")] = "utf-8",
) -> None:
    """Print a schema, to edit and pass to persia train --schema.

    persia schema clicks.parquet > clicks.yaml
    """
    from persia.data import Files
    from persia.data.paths import find_files
    from persia.datasets import Criteo
    from persia.datasets.criteo import is_criteo
    from persia.train.topics import infer_topics

    if Url(data).scheme == "kafka":
        found = infer_topics(data)
    elif is_criteo(find_files(data)[0]):
        found = Criteo(data).schema
    else:
        found = Files(data, encoding=encoding).schema
    label = ", ".join(one.column for one in found.labels)
    typer.echo(
        f"# {Url(data)}: {len(found.features)} id features, "
        f"{len(found.dense)} dense, "
        + (f"label {label}" if label else "no label found")
    )
    if not label:
        typer.echo("# label: NAME OF THE COLUMN")
    unhashed = "numbers as they are; {column: c, buckets: 32} makes ids of one"
    typer.echo(f"# dense: {unhashed}")
    typer.echo(found.to_yaml(), nl=False)
