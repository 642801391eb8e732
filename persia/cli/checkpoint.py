"""``persia checkpoint``: what checkpoints hold, and whether it is whole."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from persia.base.counts import counted
from persia.cli.bars import progress
from persia.cli.options import Json, Step, print_json
from persia.cli.shared import Commands
from persia.errors import CorruptFile, SchemaMismatch, StorageError

commands = Commands(no_args_is_help=True)
console = Console(emoji=False, highlight=False, markup=False)

_NOTES = ("damaged", "unfinished", "latest")
_Root = Annotated[
    str, typer.Argument(help="Checkpoint root, or the folder of a step.")
]


@commands.callback()
def _checkpoint() -> None:
    """List, inspect and verify checkpoints, local or remote."""


@commands.command()
def ls(
    root: Annotated[
        str, typer.Argument(help="Root of the checkpoints, a folder or URI.")
    ],
    json: Json = False,
) -> None:
    """List the checkpoints of a root, by their steps.

    One that is damaged is a line, too: inspect and verify say more of it. So
    is one whose save was interrupted, in a bucket: the next save removes it.

    persia checkpoint ls out
    """
    from persia.checkpoint import files

    place = files.root_of(root)
    latest = (place.read(files.LATEST) or b"").decode("ascii", "replace")
    found: list[dict[str, Any]] = []
    for step in sorted(place.steps()):
        try:
            one = _described(files.find(place, step))
        except (CorruptFile, SchemaMismatch) as error:
            path = str(place.at(f"step-{step}"))
            one = {"path": path, "step": step, "damaged": str(error)}
        one["latest"] = latest.strip() == f"step-{step}"
        found.append(one)
    for name in place.unfinished():
        step = int(name.removeprefix("step-"))
        path = str(place.at(name))
        found.append({"path": path, "step": step, "unfinished": True})
    found.sort(key=lambda one: int(one["step"]))
    if not found:
        raise StorageError(f"{place} has no checkpoints; give their root")
    if json:
        print_json(found)
        return
    table = _table("step", "saved", "updates", "rows", "bytes", "")
    for one in found:
        cells = [""] * 4
        if "saved" in one:
            cells = [
                one["saved"][:19].replace("T", " "),
                f"{one['updates']:,}",
                f"{sum(t['rows'] for t in one['tables']):,}",
                f"{one['bytes']:,}",
            ]
        notes = [note for note in _NOTES if one.get(note)]
        table.add_row(str(one["step"]), *cells, ", ".join(notes))
    console.print(table)


@commands.command()
def inspect(root: _Root, step: Step = None, json: Json = False) -> None:
    """Show the tables, shards and origin of a checkpoint.

    persia checkpoint inspect out --step 20000
    """
    from persia.checkpoint import files

    one = _described(files.find(files.root_of(root), step))
    if json:
        print_json(one)
        return
    for name in ("step", "id", "saved", "job", "updates", "shards", "torch"):
        console.print(f"{name:<8} {one[name]}")
    table = _table("table", "rows", "dim", "dtype", "optimizer", "bytes")
    for t in one["tables"]:
        table.add_row(
            t["name"],
            f"{t['rows']:,}",
            str(t["dim"]),
            t["dtype"],
            t["optimizer"],
            f"{t['bytes']:,}",
        )
    console.print(table)


@commands.command()
def verify(root: _Root, step: Step = None, json: Json = False) -> None:
    """Read every byte of a checkpoint and compare its checksums.

    persia checkpoint verify s3://bucket/out
    """
    from persia import _core
    from persia.checkpoint import files

    place = files.root_of(root)
    found = files.find(place, step)
    manifest = found.manifest
    entries = [f for table in manifest.tables for f in table.files]
    every = [manifest.dense, *entries]
    wrong = []
    with (
        place.reading(found, every) as folder,
        files.opened(folder) as descriptor,
        progress("verifying", sum(entry.bytes for entry in every)) as tell,
    ):
        done = 0
        for entry in every:
            tell(done, f"{done:,} bytes")
            done += entry.bytes
            try:
                size, crc = _core.ckpt_file_crc(descriptor, entry.name)
            except OSError as error:
                wrong.append(f"{entry.name}: {os.strerror(error.errno or 0)}")
                continue
            if (size, f"{crc:08x}") != (entry.bytes, entry.crc32c):
                wrong.append(
                    f"{entry.name}: {size:,} bytes with checksum {crc:08x}, "
                    f"need {entry.bytes:,} with {entry.crc32c}"
                )
    if json:
        print_json(
            {"path": str(found.folder), "files": len(every), "damaged": wrong}
        )
    if wrong:
        raise CorruptFile(
            f"{found.folder}: {len(wrong)} of {counted(len(every), 'file')} "
            "damaged: " + "; ".join(wrong[:5])
        )
    if not json:
        console.print(f"{found.folder}: {counted(len(every), 'file')} whole")


def _described(found: Any) -> dict[str, Any]:
    manifest = found.manifest
    tables = [
        {
            "name": table.name,
            "rows": table.rows,
            "dim": table.dim,
            "dtype": table.dtype,
            "optimizer": table.optimizer,
            "bytes": sum(file.bytes for file in table.files),
        }
        for table in manifest.tables
    ]
    return {
        "path": str(found.folder),
        "step": manifest.step,
        "id": manifest.id,
        "lineage": manifest.lineage,
        "job": manifest.job,
        "saved": manifest.saved,
        "torch": manifest.torch,
        "updates": manifest.updates,
        "shards": len(manifest.shards),
        "bytes": manifest.dense.bytes + sum(t["bytes"] for t in tables),
        "tables": tables,
    }


def _table(*columns: str) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        numeric = name in ("rows", "updates", "bytes", "dim", "step")
        table.add_column(name, justify="right" if numeric else "left")
    return table
