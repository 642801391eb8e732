"""``persia status``: servers, tables and staleness in the terminal."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from persia.base.environment import variable
from persia.cli.options import Json, Namespace, Timeout, print_json, seconds

if TYPE_CHECKING:
    from persia.distributed.status import (
        EmbeddingStatus,
        ServerStatus,
        TableStatus,
        TrainerStatus,
    )

# Names are shown as they are: neither markup nor emoji.
_PLAIN: dict[str, Any] = dict.fromkeys(("emoji", "highlight", "markup"), False)
console = Console(**_PLAIN)
_BAR = 40
_DECISIONS = 8  # of scaling that are shown
_NAME = 20  # columns of a name that must be folded


def command(
    addresses: Annotated[
        list[str] | None,
        typer.Argument(
            help="host:port of servers, and URLs of trainers' metrics for "
            "the staleness (default: PERSIA_SERVERS)."
        ),
    ] = None,
    workers: Annotated[
        str | None,
        typer.Option(
            help="host:port of embedding workers, with commas between.",
            envvar="PERSIA_WORKERS",
        ),
    ] = None,
    namespace: Namespace = "default",
    interval: Annotated[
        float,
        typer.Option(
            callback=seconds, help="Seconds over which rates are measured."
        ),
    ] = 1.0,
    timeout: Timeout = 10.0,
    json: Json = False,
    scale_log: Annotated[
        Path | None,
        typer.Option(
            help="File of the decisions of persia launch --autoscale "
            "--scale-log: the last ones are shown.",
            envvar="PERSIA_SCALE_LOG",
        ),
    ] = None,
    slow: Annotated[
        bool,
        typer.Option(
            "--slow",
            help="With the last calls that took long, of each server up to "
            "128: see persia serve ps --slow-calls.",
        ),
    ] = False,
    watch: Annotated[
        bool,
        typer.Option("--watch", help="Look again and again, until Ctrl-C."),
    ] = False,
) -> None:
    """Show what servers hold and do.

    TLS and tokens are those of the environment (PERSIA_TLS_CA, PERSIA_TOKEN,
    ...). Staleness is counted where it occurs, in the trainers: they export it
    where PERSIA_METRICS_PORT is set, and are asked by the URL of their
    metrics. The exit status is 1 if one of those asked did not answer.

    persia status ps0:8888 ps1:8888 --watch
    """
    from persia.distributed.addresses import DNS, resolve, texts_of
    from persia.distributed.security import Security

    given = [a for text in addresses or [] for a in text.split(",")]
    if all("://" in a for a in given):
        given += (variable("PERSIA_SERVERS") or "").split(",")
    between = [a for a in texts_of(workers or "") if a]
    if any(a.startswith(DNS) for a in between):
        between, _ = resolve(between, Security.from_environment())

    def look(clear: bool) -> bool:
        return _look(
            *(given, between, namespace, interval, timeout),
            *(json, clear, scale_log, slow),
        )

    if not watch:
        if not look(clear=False):
            raise typer.Exit(1)
        return
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            look(clear=True)


def _look(
    given: Sequence[str],
    workers: Sequence[str],
    namespace: str,
    interval: float,
    timeout: float,
    json: bool,
    clear: bool,
    scale_log: Path | None,
    slow: bool,
) -> bool:
    """One look, shown; whether all of those asked answered."""
    from persia.distributed import status as looking
    from persia.distributed.autoscale import last_decisions

    urls = [a for a in given if "://" in a]
    servers = [a.strip() for a in given if a.strip() and a not in urls]
    with ThreadPoolExecutor(2) as pool:
        asked = pool.submit(looking.ask_trainers, urls, timeout)
        embedding = pool.submit(
            looking.ask_embedding,
            workers,
            namespace=namespace,
            timeout=timeout,
            interval=interval,
        )
        found = (
            looking.ask(
                servers,
                namespace=namespace,
                timeout=timeout,
                interval=interval,
                slow=slow,
            )
            if servers or not (workers or scale_log)  # else these alone
            else []
        )
        trainers = asked.result()
        between = embedding.result()
    tables = looking.tables(found)
    stale = looking.staleness(trainers)
    failed = [(s.address, s.error) for s in found if s.error]
    failed += [(e.address, e.error) for e in between if e.error]
    failed += [(t.url, t.error) for t in trainers if t.error]
    decisions = last_decisions(scale_log, _DECISIONS) if scale_log else []
    if json:
        print_json(
            {
                "decisions": decisions,
                "servers": [dataclasses.asdict(s) for s in found],
                "tables": [dataclasses.asdict(t) for t in tables],
                "embedding_workers": [dataclasses.asdict(e) for e in between],
                "trainers": [dataclasses.asdict(t) for t in trainers],
                "staleness": stale,
            }
        )
    else:
        if clear:
            console.clear()
        if found:
            show(servers_table(found))
        if tables:
            show(tables_table(tables))
        if slow:
            show(_slow(found))
        if any(not e.error for e in between):
            show(_embedding(between))
        if any(not t.error for t in trainers):
            show(_staleness(stale))
        if any(t.lost for t in trainers):
            show(_lost(trainers))
        if decisions:
            show(_decided(decisions))
        elif scale_log:
            console.print(f"{scale_log}: no decision yet")
        waits = [
            (s.address, f"the disk has not taken its log for {_seconds(n)}")
            for s in found
            if (n := s.stats.get("log_waits_ns", 0) / 1e9) >= 1
        ]
        for name, error in failed + waits:
            console.print(Text.assemble(name, ": ", (error, "red")))
    return not failed


def _table(title: str, columns: str, rows: list[list[str]]) -> Table:
    """A table for 80 columns; counters ("name!") of zeros are left out."""
    table = Table(
        title=title,
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    names = [name.strip() for name in columns.split(",")]
    kept = [
        i
        for i, name in enumerate(names)
        if not name.endswith("!") or any(row[i] != "0" for row in rows)
    ]
    for i in kept:
        table.add_column(
            names[i].rstrip("!"),
            justify="right" if i else "left",
            no_wrap=bool(i),
            overflow="fold",
            min_width=max(len(row[i]) for row in rows) if i and rows else None,
        )
    for row in rows:
        table.add_row(*(row[i] for i in kept))
    return table


def show(table: Table) -> None:
    """Where there is no room, names are folded; else lines are longer than
    that, as numbers are never cut off."""
    wide = Console(**_PLAIN, width=10_000)
    if wide.measure(table).minimum > console.width:
        table.columns[0].max_width = _NAME
    wide.width = max(console.width, wide.measure(table).minimum)
    wide.print(table)


def servers_table(servers: list[ServerStatus]) -> Table:
    rows = []
    for s in servers:
        if s.error:
            continue
        stats, limit = s.stats, s.stats["memory_limit"]
        memory = _bytes(stats["memory_used"])
        if limit:
            memory += f" of {_bytes(limit)}"
        rows.append(
            [
                s.address,
                f"{s.shard}/{s.shards}",
                _seconds(stats["uptime_ns"] / 1e9),
                memory,
                f"{stats['updates']:,}",
                *(f"{s.rates[n]:,.1f}" for n in ("pulls", "pushes")),
                *(f"{stats[n]:,}" for n in ("parked", "duplicates", "failed")),
            ]
        )
    return _table(
        "servers",
        "address, shard, up, memory, updates, pulls/s, pushes/s, parked, "
        "duplicates!, failed!",
        rows,
    )


def _slow(servers: list[ServerStatus]) -> Table:
    return _table(
        "calls that took long, the last ones first",
        "server, shard, at, call, seconds, request, from",
        [
            [
                s.address,
                str(s.shard),
                time.strftime("%H:%M:%S", time.localtime(one["at"])),
                one["call"],
                f"{one['seconds']:.3f}",
                _bytes(one["bytes"]),
                one["peer"],
            ]
            for s in servers
            for one in s.slow
        ],
    )


def tables_table(tables: list[TableStatus]) -> Table:
    return _table(
        "tables",
        "table, dim, rows, uneven, B/row, memory, ids/s, rows/s, missed, "
        "evicted!, refused!, nonfinite!",
        [
            [
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
            ]
            for t in tables
        ],
    )


def _embedding(workers: list[EmbeddingStatus]) -> Table:
    from persia.prometheus import embedding_worker_states

    rows = []
    for w in workers:
        if w.error:
            continue
        stats = w.stats
        queue = f"{_bytes(stats['bytes'])} of {_bytes(stats['bytes_limit'])}"
        counters = "again late given_up failed lost loaders_gone".split()
        rows.append(
            [
                w.address,
                _seconds(stats["uptime_ns"] / 1e9),
                *(f"{stats[n]:,}" for n in ("streams", "ranks")),
                queue,
                *(f"{n:,}" for n in embedding_worker_states(stats).values()),
                f"{stats['oldest_ns'] / 1e9:,.1f} s",
                *(f"{rate:,.1f}" for rate in w.rates.values()),
                *(f"{stats[n]:,}" for n in counters),
            ]
        )
    return _table(
        "embedding workers: batches by state, and per second",
        "address, up, loaders, ranks, queue, queued, withheld!, looking!, "
        "leased, returning!, oldest, in/s, taken/s, trained/s, again!, late!, "
        "given up!, failed!, lost!, loaders gone!",
        rows,
    )


def _staleness(found: dict[int, int]) -> Table:
    total, most = sum(found.values()), max(found.values(), default=0)
    table = _table(
        "staleness of lookups",
        "batches, lookups, share, ",
        [
            [
                str(k),
                f"{found.get(k, 0):,}",
                f"{found.get(k, 0) / total:.1%}",
                "█" * round(_BAR * found.get(k, 0) / most),
            ]
            for k in range(max(found, default=-1) + 1)
        ],
    )
    table.columns[-1].justify = "left"
    return table


def _lost(trainers: list[TrainerStatus]) -> Table:
    return _table(
        "updates that servers had, and lost",
        "trainer, lost",
        [[t.url, f"{t.lost:,}"] for t in trainers if t.lost],
    )


def _decided(decisions: list[dict[str, Any]]) -> Table:
    return _table(
        "what was scaled last",
        "at, decision",
        [
            [
                time.strftime("%H:%M:%S", time.localtime(one["at"])),
                str(one["text"]).removeprefix("scale: "),
            ]
            for one in decisions
        ],
    )


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
