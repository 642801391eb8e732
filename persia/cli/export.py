"""``persia export``: makes a model of ``persia train`` ready to be served."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from persia.base.counts import counted
from persia.base.logs import say
from persia.cli.bars import Counted
from persia.cli.options import DryRun, Json, Root, Step, print_json, would

if TYPE_CHECKING:
    from persia.train import Trained


def command(
    root: Root,
    out: Annotated[
        str,
        typer.Argument(
            help="Folder of the versions, or its URL in a bucket; a new one "
            "is added."
        ),
    ],
    row_dtype: Annotated[
        Literal["fp32", "fp16", "int8", "int4"],
        typer.Option(help="Type of the vectors; integers have a scale a row."),
    ] = "fp32",
    step: Step = None,
    keep: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Newest versions that stay (default: all).",
        ),
    ] = None,
    min_count: Annotated[
        float | None,
        typer.Option(help="Only rows of at least so many updates."),
    ] = None,
    last_updates: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Only rows that the last so many updates have touched.",
        ),
    ] = None,
    last_seconds: Annotated[
        float | None,
        typer.Option(help="Only rows that were touched in so many seconds."),
    ] = None,
    most_rows: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="At most so many rows of a table: those of the most updates, "
            "or those touched last.",
        ),
    ] = None,
    eval_data: Annotated[
        str | None,
        typer.Option(
            help="A file, glob or URL with the columns of the training: the "
            "checkpoint and the export are scored on it, and what types and "
            "left out rows cost is printed.",
        ),
    ] = None,
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    """Write a checkpoint of persia train as a new version of an export: rows
    that are mapped, the dense part as a graph, the schema.

    persia.load_model and persia serve model take it.

    persia export out exported

    persia export out exported --row-dtype int8 --keep 3 --last-updates 100000

    persia export out exported --row-dtype int8 --eval-data day_23.parquet

    persia export s3://bucket/out s3://bucket/models/clicks
    """
    from persia.serving.rows import Publish
    from persia.serving.trained import (
        check_checkpoint,
        export_checkpoint,
        step_of,
    )
    from persia.train import load

    publish = Publish(
        min_count=min_count,
        last_updates=last_updates,
        last_seconds=last_seconds,
        most_rows=most_rows,
    )
    if dry_run:
        would(f"export {check_checkpoint(root, out, step)}", json)
        return
    # The same one, whatever is saved meanwhile.
    step = step_of(root, step)
    costs = {}
    if eval_data is not None:
        costs = {"checkpoint": _scored(load(root, step), eval_data)}
    found = export_checkpoint(
        root, out, step=step, row_dtype=row_dtype, publish=publish, keep=keep
    )
    if eval_data is not None:
        costs["export"] = _scored(load(found.path), eval_data)
    if json:
        values: dict[str, Any] = {
            "path": str(found.path),
            "version": found.version,
            "rows": dict(found.rows),
            "left_out": dict(found.left_out),
            "bytes": found.bytes,
            "scores": costs,
        }
        print_json(values)
        return
    left = sum(found.left_out.values())
    say(
        f"exported {counted(sum(found.rows.values()), 'row')} of "
        f"{counted(len(found.rows), 'table')}, {found.bytes:,} bytes, to "
        f"{found.path}"
        + (f"; left out: {counted(left, 'row')}" if left else "")
    )
    for name, score in costs.get("export", {}).items():
        change = score - costs["checkpoint"][name]
        say(f"{name} {score:.5f}, {change:+.5f} to that of the checkpoint")


def _scored(trained: Trained, data: str) -> dict[str, float]:
    """AUC and log loss, by name."""
    found = trained.evaluate(Counted(trained.read(data), "scoring"))
    return {"auc": found.auc, "logloss": found.logloss}
