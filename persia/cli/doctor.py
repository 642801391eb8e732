"""``persia doctor``: what this installation and machine are fit for."""

from __future__ import annotations

import typer

from persia.cli.options import Json


def command(
    json: Json = False,
) -> None:
    """Examine this installation and machine; a remedy for what is wrong.

    The exit status is 1 if something is broken. It trains a small table in its
    own process, and reaches no server, whatever the environment says. "python
    -m persia.doctor" shows the same.

    persia doctor
    """
    from persia.doctor import main

    raise typer.Exit(main(json))
