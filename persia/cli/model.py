"""``persia model``: what exports hold, and which version answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from persia.base.counts import counted
from persia.base.logs import say
from persia.cli.bars import Counted, progress
from persia.cli.options import DryRun, Json, print_json, would
from persia.cli.shared import Commands
from persia.errors import (
    CorruptFile,
    InvalidArgument,
    PersiaError,
    SchemaMismatch,
    StaleLineage,
)

if TYPE_CHECKING:
    from persia.serving.folder import ExportManifest
    from persia.serving.form import TensorForm

commands = Commands(no_args_is_help=True)
console = Console(emoji=False, highlight=False, markup=False)

_Root = Annotated[
    str,
    typer.Argument(
        help="Folder of persia export (its current version), or of a version; "
        "or a URL of one."
    ),
]


@commands.callback()
def _model() -> None:
    """List, inspect, verify and compare exports; choose which answers."""


@commands.command()
def ls(
    root: Annotated[
        str, typer.Argument(help="Folder of persia export, or URL.")
    ],
    json: Json = False,
) -> None:
    """List the versions of an export.

    One that is damaged is a line, too.

    persia model ls exported
    """
    from persia.serving.folder import versions_of

    versions = versions_of(root)
    now = versions.current()
    found: list[dict[str, Any]] = []
    for name in versions.names():
        one: dict[str, Any] = {"version": name, "current": name == now}
        try:
            one |= _summary(versions.version(name).manifest)
        except PersiaError as error:
            one["damaged"] = str(error)
        found.append(one)
    if json:
        print_json(found)
        return
    table = _table("version", "made", "step", "rows", "bytes", "")
    for one in found:
        cells = [""] * 4
        if "damaged" not in one:
            cells = [
                one["made"][:19].replace("T", " "),
                f"{one['step']:,}",
                f"{one['rows']:,}",
                f"{one['bytes']:,}",
            ]
        notes = [word for word in ("damaged", "current") if one.get(word)]
        table.add_row(one["version"], *cells, ", ".join(notes))
    console.print(table)


@commands.command()
def inspect(root: _Root, json: Json = False) -> None:
    """Show the tables of a version, and what requests and answers hold.

    persia model inspect exported/v-000003
    """
    from persia.serving.folder import find_version
    from persia.serving.inputs import inputs_of, outputs_of

    found = find_version(root)
    manifest = found.manifest
    inputs = inputs_of(found.schema(), manifest.form)
    outputs = outputs_of(manifest)
    values = {
        "path": str(found.place),
        **_summary(manifest),
        "torch": manifest.torch,
        "checkpoint": manifest.checkpoint,
        "updates": manifest.updates,
        "publish": manifest.publish.model_dump(exclude_none=True),
        "tables": [
            {
                "name": t.options.name,
                "rows": t.rows,
                "trained": t.trained,
                "dim": t.options.dim,
                "type": t.type,
                "missing": t.options.missing,
                "bytes": t.file.bytes,
            }
            for t in manifest.tables
        ],
        "inputs": [_tensor(one) for one in inputs],
        "outputs": [_tensor(one) for one in outputs],
        "tasks": manifest.tasks,
    }
    if json:
        print_json(values)
        return
    for name in ("version", "made", "step", "updates", "checkpoint", "torch"):
        console.print(f"{name:<10} {values[name]}")
    table = _table("table", "rows", "trained", "dim", "type", "bytes")
    for t in values["tables"]:
        table.add_row(
            t["name"],
            f"{t['rows']:,}",
            f"{t['trained']:,}",
            str(t["dim"]),
            t["type"],
            f"{t['bytes']:,}",
        )
    console.print(table)
    table = _table("", "tensor", "datatype", "shape")
    for kind, tensors in (("input", inputs), ("output", outputs)):
        for one in tensors:
            table.add_row(kind, one.name, one.datatype, str(one.shape))
    console.print(table)


@commands.command()
def verify(root: _Root, json: Json = False) -> None:
    """Read every byte of a version and of the packets behind it, compare the
    checksums, and search for every row.

    persia model verify exported
    """
    from persia.serving.folder import damage, find_version
    from persia.serving.model import ExportedModel

    found = find_version(root)
    wrong, done, packets = [], 0, 0
    with (
        found.root.copied(found) as folder,
        progress("verifying", found.manifest.bytes) as tell,
    ):
        for entry, text in damage(found, folder):
            done += entry.bytes
            tell(done, f"{done:,} bytes")
            wrong += [text] if text else []
        if not wrong:
            try:
                model = ExportedModel(found, folder)
                model.check_rows()
                packets = model.verify_packets()
            except (CorruptFile, SchemaMismatch, StaleLineage) as error:
                wrong.append(str(error))
    count = len(found.manifest.files)
    if json:
        print_json(
            {
                "path": str(found.place),
                "files": count,
                "packets": packets,
                "damaged": wrong,
            }
        )
    if wrong:
        raise CorruptFile(f"{found.place} is damaged: " + "; ".join(wrong[:5]))
    if not json:
        behind = counted(packets, "packet") + " behind it"
        console.print(
            f"{found.place}: {counted(count, 'file')}"
            + (f" and {behind} whole" if packets else " whole")
        )


@commands.command()
def coverage(
    root: _Root,
    data: Annotated[
        str,
        typer.Option(
            help="A file, glob or URL with the columns of the training, such "
            "as a log of requests."
        ),
    ],
    json: Json = False,
) -> None:
    """Count the ids of data that have no row in a version, by feature.

    They get the vectors of ids that were never trained.

    persia model coverage exported --data requests.parquet
    """
    from persia.data import Files
    from persia.serving.coverage import unknown_ids
    from persia.serving.model import load_model

    model = load_model(root)
    if model.columns is None:
        raise InvalidArgument(
            f"{root} was exported without a schema: it has no columns"
        )
    batches = Counted(Files(data, model.columns, 4096), "reading")
    found = unknown_ids(model, batches)
    if json:
        print_json(found)
        return
    table = _table("feature", "ids", "unknown", "share")
    for one in found:
        share = one["unknown"] / max(one["ids"], 1)
        counts = (f"{one[n]:,}" for n in ("ids", "unknown"))
        table.add_row(one["feature"], *counts, f"{share:.2%}")
    console.print(table)


@commands.command()
def diff(
    root: Annotated[
        str, typer.Argument(help="Folder of persia export, or URL.")
    ],
    first: Annotated[str, typer.Argument(help="Version A, such as v-000003.")],
    second: Annotated[str, typer.Argument(help="Version B, to compare with.")],
    json: Json = False,
) -> None:
    """Compare the rows of two versions: those that only one of them has, and
    how far vectors have moved.

    persia model diff exported v-000003 v-000004
    """
    from persia.serving.comparison import compare
    from persia.serving.model import load_model

    found = compare(load_model(root, first), load_model(root, second))
    if json:
        print_json(found)
        return
    table = _table("table", "only in A", "only in B", "changed", "same")
    table.add_column("mean move", justify="right")
    table.add_column("largest", justify="right")
    for t in found:
        table.add_row(
            t["table"],
            *(f"{t[n]:,}" for n in ("only_a", "only_b", "changed", "same")),
            f"{t['mean_move']:.4g}",
            f"{t['largest_move']:.4g}",
        )
    console.print(table)


@commands.command()
def use(
    root: Annotated[
        str, typer.Argument(help="Folder of persia export, or URL.")
    ],
    version: Annotated[str, typer.Argument(help="Version, such as v-000003.")],
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    """Make a version the current one: processes that serve the folder take it
    within seconds.

    persia model use exported v-000003
    """
    from persia.serving.folder import versions_of

    versions = versions_of(root)
    before = versions.current()
    versions.version(version)
    if dry_run:
        would(f"use {version} in place of {before}", json)
        return
    versions.use(version)
    if json:
        print_json({"version": version, "before": before})
    else:
        say(f"{version} is current in place of {before}")


def _summary(manifest: ExportManifest) -> dict[str, Any]:
    return {
        "version": manifest.name,
        "made": manifest.made,
        "step": manifest.step,
        "rows": sum(t.rows for t in manifest.tables),
        "bytes": manifest.bytes,
    }


def _tensor(form: TensorForm) -> dict[str, Any]:
    return {
        "name": form.name,
        "datatype": form.datatype,
        "shape": form.shape,
    }


def _table(*columns: str) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    numbers = {"step", "rows", "bytes", "trained", "dim"}
    numbers |= {
        "ids",
        "unknown",
        "share",
        "only in A",
        "only in B",
        "changed",
        "same",
    }
    for name in columns:
        side = "right" if name in numbers else "left"
        table.add_column(name, justify=side)  # type: ignore[arg-type]
    return table
