"""``persia plan``: servers, memory and network for a job."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pydantic
from pydantic import Field
from rich.console import Console
from rich.table import Table

from persia.base.counts import counted
from persia.base.options import validated
from persia.cli.flags import with_flags
from persia.cli.options import Json, print_json
from persia.cli.shared import begin
from persia.distributed import costs
from persia.errors import InvalidArgument
from persia.train.config import RowDtype, WireDtype, of_train

if TYPE_CHECKING:
    from persia.distributed.costs import ScaleCost, ServerCost
    from persia.distributed.planning import Plan

console = Console(highlight=False)


class PlanConfig(pydantic.BaseModel):
    """The options of ``persia plan``; those of ``persia train`` mean the
    same."""

    model_config = pydantic.ConfigDict(
        allow_inf_nan=False,
        extra="forbid",
        frozen=True,
        protected_namespaces=(),
    )

    rows: float = Field(
        description="Rows of all tables: distinct ids, such as 1e12.",
    )
    tables: int = Field(1, description="Number of tables that have the rows.")
    dim: int = of_train("dim")
    row_dtype: RowDtype = of_train("row_dtype")
    optimizer: str = of_train("optimizer")
    qps: float = Field(
        0.0, description="Samples a second of all ranks together."
    )
    batch_size: int = of_train("batch_size")
    ids: int = Field(26, description="Ids of a sample.")
    distinct: float = Field(
        1.0, description="Share of the ids of a batch that differ."
    )
    wire_dtype: WireDtype = of_train("wire_dtype")
    server_memory: pydantic.ByteSize = Field(
        pydantic.ByteSize(256 * 2**30),
        description="Memory of a server, such as 256GiB; a number is bytes.",
    )
    server_network: float = Field(
        25.0, description="Network of a server each way, in Gbit/s."
    )
    server_ids: float = Field(
        5e6,
        description="Distinct ids a second that a server pulls and pushes; "
        "benchmarks.cluster of the source tree measures it.",
    )
    headroom: float = Field(
        0.25, description="Share of a server to be left free."
    )
    scale: str | None = Field(
        None,
        pattern=r"^[0-9]+:[0-9]+$",
        description="Say what a change of the number of servers costs, such "
        "as 8:16, while the job trains.",
    )
    shards: int | None = Field(
        None,
        ge=1,
        le=4096,
        description="Shards of the job (default: twice the larger number of "
        "`scale`).",
    )
    move_rate: float = Field(
        costs.RATE,
        description="Rows a second that a server sends while a shard moves.",
    )
    move_slows: float = Field(
        costs.SLOWS,
        description="Share of the steps that moves take away; "
        "benchmarks.elastic of the source tree measures both.",
    )


_PANELS = {
    "rows": "Tables",
    "qps": "Traffic",
    "server_memory": "A server",
    "scale": "Another number of servers",
}


@with_flags(PlanConfig, _PANELS)
def command(json: Json = False, **flags: Any) -> None:
    """Work out how many servers a job needs, and what each must have.

    With --scale: what it costs to change their number while the job trains.

    persia plan --rows 1e12 --qps 1e6 --server-memory 1TiB

    persia plan --rows 1e9 --qps 1e5 --scale 2:3 --shards 8
    """
    from persia.distributed import planning

    config = validated(PlanConfig, flags)
    begin(config.model_dump())
    if config.scale is not None:
        _scale(config, json)
        return
    found = planning.plan(
        **_job_of(config),
        wire_dtype=config.wire_dtype,
        server_memory=config.server_memory,
        server_network=config.server_network * 1e9 / 8,
        server_ids=config.server_ids,
        headroom=config.headroom,
    )
    if json:
        print_json(dataclasses.asdict(found))
        return
    table = Table(title="plan", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column(style="dim")
    for row in _rows(found, config.optimizer, config.row_dtype):
        table.add_row(*row)
    console.print(table)


def _job_of(config: PlanConfig) -> dict[str, Any]:
    """What is planned, without the machines."""
    words = "rows dim optimizer row_dtype qps batch_size ids distinct tables"
    return config.model_dump(include=set(words.split()))


def _scale(config: PlanConfig, json: bool) -> None:
    """What a change of the number of servers costs."""
    from persia.distributed import planning

    before, to = map(int, str(config.scale).split(":"))
    shards = config.shards or min(2 * max(before, to), 4096)
    if not 1 <= before <= shards:
        raise InvalidArgument(
            f"`scale={config.scale}`: need from 1 to {shards} servers, as "
            f"there are {shards} `shards`"
        )
    # Its errors name options, and all that follows may rely on them.
    planning.plan(
        **_job_of(config),
        server_memory=1e30,
        server_network=1e30,
        server_ids=1e30,
    )
    options = config.dim, config.row_dtype, config.optimizer
    share = config.rows / config.tables / shards
    table = (
        share,
        planning.bytes_a_row(*options),
        planning.row_stride(*options),
    )
    found = costs.scale_cost(
        costs.even(before, shards, max(before, to)),
        to,
        [costs.shard_of([table] * config.tables)] * shards,
        rate=config.move_rate,
        changes=config.qps * config.ids * config.distinct / shards,
        steps=config.qps / config.batch_size,
        slows=config.move_slows,
    )
    if json:
        print_json(dataclasses.asdict(found))
        return
    sizes = f"{before} to {counted(to, 'server')}"
    print_cost(found, f"{sizes}, {counted(shards, 'shard')}")


def print_cost(cost: ScaleCost, title: str) -> None:
    """Prints what a change costs, and what each server holds."""
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column(style="dim")
    for row in _rows_of_cost(cost):
        table.add_row(*row)
    console.print(table)
    table = Table("server", "shards", "rows", "memory", title_justify="left")
    alike: dict[tuple[str, str, str], list[str]] = {}
    for server in cost.servers:
        alike.setdefault(_figures(server), []).append(server.name)
    for figures, some in alike.items():
        more = f" and {len(some) - 1:,} others" if len(some) > 1 else ""
        table.add_row(some[0] + more, *figures)
    console.print(table)


def _figures(server: ServerCost) -> tuple[str, str, str]:
    """Of a server, before and after."""
    (a, b), (c, d), (e, f) = server.shards, server.rows, server.memory
    return (
        f"{a} to {b}",
        f"{_number(c)} to {_number(d)}",
        f"{_bytes(e)} to {_bytes(f)}",
    )


def _rows_of_cost(c: ScaleCost) -> list[tuple[str, str, str]]:
    return [
        ("moves", f"{c.moves:,}", "side by side, if of different servers"),
        ("rows that move", _number(c.rows), ""),
        ("rows sent again", _number(c.again), "at most, as they change"),
        ("bytes", _bytes(c.bytes), "between servers, at most"),
        ("seconds", f"{c.seconds:,.1f}", "until all have ended"),
        ("pause", f"{c.pause:.3f} s", "in which a shard takes no updates"),
        ("steps", f"{c.steps:,.0f}", "while shards move"),
        ("steps lost", f"{c.steps_lost:,.0f}", "that it would make besides"),
    ]


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
