"""``persia log``: logs of servers."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from persia.cli.options import Json, print_json
from persia.cli.shared import Commands
from persia.errors import CorruptFile

commands = Commands(no_args_is_help=True)

_Log = Annotated[
    Path,
    typer.Argument(
        help="Folder of --log, or that of one server in it.",
        show_default=False,
    ),
]


@commands.callback()
def _log() -> None:
    """Look into the logs of servers (persia serve ps --durable)."""


@commands.command()
def inspect(log: _Log, json: Json = False) -> None:
    """Show what logs hold: records by type, bytes, times, the last cut.

    Servers may run meanwhile.

    persia log inspect /var/lib/persia
    """
    from persia.distributed.durable import described, logs_in

    found = [described(one) for one in logs_in(log)]
    if json:
        print_json(found)
        return
    for one in found:
        _print(one)


@commands.command()
def verify(log: _Log, json: Json = False) -> None:
    """Read every byte of logs, and of the rows beside them, and compare
    checksums.

    The exit status is 1 if something is damaged; file and offset are named.
    Of a server that runs the last record may not be complete yet.

    persia log verify /var/lib/persia
    """
    from persia.distributed.durable import described, logs_in, verified

    wrong = []
    checked = []
    for one in logs_in(log):
        try:
            checked.append(described(one) | {"rows": verified(one)})
        except CorruptFile as error:
            wrong.append({"log": str(one), "damaged": str(error)})
    if json:
        print_json({"logs": checked, "damaged": wrong})
    else:
        for found in checked:
            _print(found)
    if wrong:
        raise CorruptFile(
            "; ".join(f"{one['log']}: {one['damaged']}" for one in wrong)
        )


def _print(found: dict[str, Any]) -> None:
    print(
        f"{found['log']}: shard {found['shard']} of {found['shards']} of "
        f"namespace {found['namespace']!r}"
    )
    print(
        f"  positions {found['first']:,} to {found['end']:,}, "
        f"{found['segments']} files; {_cut(found)}"
    )
    for kind, count in sorted(found["records"].items()):
        print(f"  {kind:<9} {count:>12,}  {found['bytes'][kind]:>16,} bytes")
    if found["times"]:
        first, last = (
            datetime.datetime.fromtimestamp(t, datetime.UTC).isoformat()
            for t in found["times"]
        )
        print(f"  from {first} to {last}")
    if found["torn"]:
        print(f"  {found['torn']:,} bytes of a record that is not complete")


def _cut(found: dict[str, Any]) -> str:
    if found["cut"] is None:
        return "no rows beside it"
    return f"rows as of position {found['cut']:,}"
