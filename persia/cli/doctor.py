"""``persia doctor``: what this installation and machine are fit for."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from persia.cli.options import to_json

__all__ = ["command"]


def command(
    json: Annotated[
        bool, typer.Option("--json", help="The findings, as JSON.")
    ] = False,
) -> None:
    """Examine this installation and machine; a remedy for what is wrong.

    The exit status is 1 if something is broken. Where the command itself does
    not start, "python -m persia.doctor" shows the same.

    persia doctor
    """
    from persia.doctor import examine, show

    found = examine()
    if json:
        print(to_json([dataclasses.asdict(one) for one in found]))
    else:
        print(show(found))
    if any(one.state == "broken" for one in found):
        raise typer.Exit(1)
