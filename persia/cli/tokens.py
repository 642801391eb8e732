"""``persia tokens``: the file of tokens of servers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from persia.cli.options import Json, print_json
from persia.cli.shared import Commands
from persia.errors import InvalidArgument

commands = Commands(no_args_is_help=True)
console = Console(emoji=False, highlight=False, markup=False)

_File = Annotated[Path, typer.Argument(help="File of servers: --tokens-file.")]
_Name = Annotated[str, typer.Argument(help="Who has the token.")]
_Until = Annotated[
    str | None,
    typer.Option(
        "--until",
        help="Its last day, such as 2027-01-31, or a time, such as "
        "2027-01-31T18:00:00Z, or never (default: that of the token before; "
        "the first one has no end).",
    ),
]
_To = Annotated[
    Path | None,
    typer.Option(
        "--out",
        help="File for the token, which its owner alone can read "
        "(default: it is printed).",
    ),
]


@commands.callback()
def _tokens() -> None:
    """Make, rotate, remove and list the tokens of servers."""


@commands.command()
def add(
    file: _File,
    name: _Name,
    roles: Annotated[
        str,
        typer.Option(
            help="What it is for, with commas: train, feed, read, publish, "
            "serve, scrape, admin."
        ),
    ],
    until: _Until = None,
    tables: Annotated[
        str | None,
        typer.Option(
            "--for-tables",
            help="Tables that it is for, with commas; * is any text "
            "(default: all).",
        ),
    ] = None,
    rate: Annotated[
        int | None, typer.Option(min=1, help="Calls a second of the name.")
    ] = None,
    calls: Annotated[
        int | None, typer.Option(min=1, help="Calls at once of the name.")
    ] = None,
    peer: Annotated[
        str | None,
        typer.Option(
            help="No token, but a name in the client's certificate, for "
            "servers with mutual TLS: a URI such as spiffe://cluster/trainer, "
            "or dns: and a host."
        ),
    ] = None,
    to: _To = None,
    json: Json = False,
) -> None:
    """Make a token, and add its digest to a file.

    persia tokens add tokens trainer --roles train,admin --out trainer.token
    persia tokens add tokens trainer --roles train --peer spiffe://c/trainer
    """
    from persia.distributed import tokens

    limits = {"tables": tables, "rate": rate, "calls": calls}
    options = [f"{key}={value}" for key, value in limits.items() if value]
    if peer is None:
        token = tokens.add(file, name, roles.split(","), until, options, to)
        _give(token, to, json)
        return
    if to is not None:
        raise InvalidArgument("--peer makes no token, so there is no --out")
    tokens.add_peer(file, name, roles.split(","), peer, until, options)
    if json:
        print_json({"name": name, "peer": peer})


@commands.command()
def rotate(
    file: _File,
    name: _Name,
    days: Annotated[
        int,
        typer.Option(
            min=1, max=3650, help="Days for which the old one is still valid."
        ),
    ] = 7,
    until: _Until = None,
    to: _To = None,
    json: Json = False,
) -> None:
    """Make a new token of a name; the old one is valid for some days.

    Servers see their file within ten seconds, or at SIGHUP. So --out changes
    15 seconds later.

    persia tokens rotate tokens trainer --days 2 --out trainer.token
    """
    from persia.distributed import tokens

    _give(tokens.rotate(file, name, days, until, to), to, json)


@commands.command()
def rm(file: _File, name: _Name, json: Json = False) -> None:
    """Remove all tokens of a name.

    Servers see their file within ten seconds, or at SIGHUP, and refuse them
    then.

    persia tokens rm tokens trainer
    """
    from persia.distributed import tokens

    n = tokens.remove(file, name)
    if json:
        print_json({"name": name, "removed": n})
        return
    console.print(f"removed {n} token{'s' * (n != 1)} of {name}")


@commands.command()
def ls(file: _File, json: Json = False) -> None:
    """List the tokens of a file, without their digests.

    persia tokens ls tokens
    """
    from persia.distributed import tokens

    found = tokens.read_lines(file)
    if json:
        print_json([one.told for one in found])
        return
    table = Table(box=SIMPLE_HEAD)
    for head in ("name", "roles", "until", "certificate", "limits"):
        table.add_column(head, overflow="fold")
    for one in found:
        table.add_row(
            one.name,
            ", ".join(one.roles),
            one.last_day or "",
            one.peer or "",
            " ".join(one.until(None).options),
        )
    console.print(table)


def _give(token: str, to: Path | None, json: bool) -> None:
    if json:
        print_json({"file": str(to)} if to else {"token": token})
    elif to is None:
        console.print(token, soft_wrap=True)
