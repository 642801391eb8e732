"""``persia status``: servers, tables and staleness in the terminal."""

from __future__ import annotations

import dataclasses
import json
import os
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from persia.status import ServerStatus, TableStatus

__all__ = ["status"]

console = Console(highlight=False)
_BAR = 40


def status(
    addresses: Annotated[
        list[str] | None,
        typer.Argument(
            help="host:port of servers, and URLs of workers' metrics for "
            "the staleness (default: PERSIA_SERVERS)."
        ),
    ] = None,
    namespace: Annotated[
        str, typer.Option(help="Of the job.", envvar="PERSIA_NAMESPACE")
    ] = "default",
    interval: Annotated[
        float, typer.Option(min=0.0, help="Seconds over which rates are.")
    ] = 1.0,
    timeout: Annotated[
        float, typer.Option(min=0.0, help="Seconds that an answer may take.")
    ] = 10.0,
    as_json: Annotated[
        bool, typer.Option("--json", help="All numbers, as JSON.")
    ] = False,
) -> None:
    """Show what servers hold and do.

    TLS and tokens are those of the environment (PERSIA_TLS_CA, PERSIA_TOKEN,
    ...). Staleness is counted where it occurs, in the workers: they export it
    where PERSIA_METRICS_PORT is set, and are asked by the URL of their
    metrics. The exit status is 1 if a server did not answer.
    """
    from persia import status as looking

    given = addresses or os.environ.get("PERSIA_SERVERS", "").split(",")
    urls = [a for a in given if "://" in a]
    found = looking.ask(
        [a.strip() for a in given if a.strip() and a not in urls],
        namespace=namespace,
        timeout=timeout,
        interval=interval,
    )
    tables = looking.tables(found)
    stale = looking.staleness(urls, timeout)
    if as_json:
        print(
            json.dumps(
                {
                    "servers": [dataclasses.asdict(s) for s in found],
                    "tables": [dataclasses.asdict(t) for t in tables],
                    "staleness": stale,
                }
            )
        )
    else:
        console.print(_servers(found))
        if tables:
            console.print(_tables(tables))
        if urls:
            console.print(_staleness(stale))
    if any(s.error for s in found):
        raise typer.Exit(1)


def _table(title: str, columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for number, name in enumerate(columns.split(",")):
        table.add_column(name.strip(), justify="right" if number else "left")
    return table


def _servers(servers: list[ServerStatus]) -> Table:
    table = _table(
        "servers",
        "address, shard, up, memory, updates, updates/s, pulls/s, pushes/s, "
        "parked, duplicates, failed",
    )
    for s in servers:
        if s.error:
            table.add_row(s.address, f"[red]{s.error}[/]")
            continue
        stats, limit = s.stats, s.stats["memory_limit"]
        memory = _bytes(stats["memory_used"])
        if limit:
            memory += f" of {_bytes(limit)}"
        table.add_row(
            s.address,
            f"{s.shard} of {s.shards}",
            _seconds(stats["uptime_ns"] / 1e9),
            memory,
            f"{stats['updates']:,}",
            *(f"{s.rates[n]:,.1f}" for n in ("updates", "pulls", "pushes")),
            *(f"{stats[n]:,}" for n in ("parked", "duplicates", "failed")),
        )
    return table


def _tables(tables: list[TableStatus]) -> Table:
    table = _table(
        "tables",
        "table, dim, rows, uneven, bytes a row, memory, ids/s, rows/s, "
        "missed, evicted, refused, nonfinite",
    )
    for t in tables:
        table.add_row(
            t.name,
            str(t.dim),
            f"{t.rows:,}",
            f"{t.uneven:.3f}",
            f"{t.bytes / t.rows:.1f}" if t.rows else "",
            _bytes(t.bytes),
            f"{t.rates['pulled']:,.0f}",
            f"{t.rates['created']:,.0f}",
            f"{t.missed / t.pulled:.1%}" if t.pulled else "",
            *(f"{n:,}" for n in (t.evicted, t.refused, t.nonfinite)),
        )
    return table


def _staleness(found: dict[int, int]) -> Table:
    table = _table("staleness of look-ups", "batches, look-ups, share, ")
    table.columns[-1].justify = "left"
    total, most = sum(found.values()), max(found.values(), default=0)
    for k in range(max(found, default=-1) + 1):
        n = found.get(k, 0)
        bar = "█" * round(_BAR * n / most)
        table.add_row(str(k), f"{n:,}", f"{n / total:.1%}", bar)
    return table


def _bytes(value: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return (
                f"{value:,.0f} {unit}"
                if unit == "B"
                else (f"{value:,.1f} {unit}")
            )
        value /= 1024
    return f"{value:,.1f} TiB"


def _seconds(value: float) -> str:
    minutes, seconds = divmod(int(value), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts: list[Any] = [(days, "d"), (hours, "h"), (minutes, "m")]
    text = [f"{n}{unit}" for n, unit in parts if n]
    return " ".join([*text, f"{seconds}s"][:2])
