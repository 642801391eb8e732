"""``persia plan``: servers, memory and network for a job."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import pydantic
import typer
from rich.console import Console
from rich.table import Table

from persia import errors
from persia.train.config import OPTIMIZERS

if TYPE_CHECKING:
    from persia.distributed.planning import Plan

__all__ = ["command"]

console = Console(highlight=False)


def command(
    rows: Annotated[
        float, typer.Option(help="Distinct ids of all tables, such as 1e12.")
    ],
    dim: Annotated[int, typer.Option(help="Floats an embedding.")] = 16,
    optimizer: Annotated[
        str,
        typer.Option(help=f"Of the embeddings: {', '.join(OPTIMIZERS)}."),
    ] = "adagrad",
    dtype: Annotated[
        str, typer.Option(help="Of stored vectors: fp32, bf16 or int8.")
    ] = "fp32",
    qps: Annotated[
        float, typer.Option(help="Samples a second of all ranks together.")
    ] = 0.0,
    batch: Annotated[
        int, typer.Option(help="Samples of a rank's batch.")
    ] = 4096,
    ids: Annotated[int, typer.Option(help="Ids of a sample.")] = 26,
    distinct: Annotated[
        float,
        typer.Option(help="Share of the ids of a batch that differ."),
    ] = 1.0,
    tables: Annotated[int, typer.Option(help="Tables.")] = 1,
    wire: Annotated[
        str, typer.Option(help="Dtype on the wire: fp32, fp16 or bf16.")
    ] = "fp16",
    server_memory: Annotated[
        str, typer.Option(help="Memory of a server.")
    ] = "256GiB",
    server_network: Annotated[
        float, typer.Option(help="Gbit/s of a server, each way.")
    ] = 25.0,
    server_ids: Annotated[
        float,
        typer.Option(
            help="Distinct ids a second that a server pulls and pushes; "
            "benchmarks.cluster of the source tree measures it."
        ),
    ] = 5e6,
    headroom: Annotated[
        float, typer.Option(help="Share of a server to be left free.")
    ] = 0.25,
) -> None:
    """Work out how many servers a job needs, and what each must have."""
    from persia.distributed import planning

    try:
        size = pydantic.TypeAdapter(pydantic.ByteSize).validate_python(
            server_memory
        )
    except pydantic.ValidationError:
        raise errors.InvalidArgument(
            f"--server-memory {server_memory}: need bytes, such as 256GiB"
        ) from None
    found = planning.plan(
        rows,
        dim,
        optimizer=optimizer,
        dtype=dtype,
        qps=qps,
        batch=batch,
        ids=ids,
        distinct=distinct,
        tables=tables,
        wire=wire,
        server_memory=size,
        server_network=server_network * 1e9 / 8,
        server_ids=server_ids,
        headroom=headroom,
    )
    table = Table(title="plan", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column(style="dim")
    for row in _rows(found, optimizer, dtype):
        table.add_row(*row)
    console.print(table)


def _rows(p: Plan, optimizer: str, dtype: str) -> list[tuple[str, str, str]]:
    row = f"{dtype} vector, state of {optimizer}, index"
    out = [
        ("servers", f"{p.shards:,}", f"because of: {p.because}"),
        ("parameters", _number(p.parameters), "rows x dim"),
        ("bytes a row", f"{p.row_bytes:.1f}", row),
        ("memory", _bytes(p.memory), "of all rows"),
        ("rows a server", _number(p.shard_rows), ""),
        ("memory a server", _bytes(p.shard_memory), ""),
    ]
    if p.calls:
        out += [
            ("ids/s a server", _number(p.ids), "distinct, pull and push"),
            (
                "calls/s a server",
                f"{p.calls:,.0f}",
                "one pull, one push a batch",
            ),
            ("into a server", f"{p.bytes_in * 8e-9:.2f} Gbit/s", ""),
            ("out of a server", f"{p.bytes_out * 8e-9:.2f} Gbit/s", ""),
        ]
    return out


def _number(value: float) -> str:
    for size, suffix in ((1e12, " T"), (1e9, " G"), (1e6, " M")):
        if value >= size:
            return f"{value / size:,.2f}{suffix}"
    return f"{value:,.0f}"


def _bytes(value: float) -> str:
    return pydantic.ByteSize(value).human_readable(separator=" ")
