"""What the options of several commands share."""

from __future__ import annotations

import typer

__all__ = ["seconds"]

_SECONDS_MAX = 1e6  # poll() takes an int of milliseconds


def seconds(value: float) -> float:
    """The callback of flags that are seconds: typer's ``min`` lets nan pass,
    and nothing can wait for it, or for longer than poll() can."""
    if not 0 <= value <= _SECONDS_MAX:
        raise typer.BadParameter(
            f"{value} is not a number of seconds from 0 to {_SECONDS_MAX:,.0f}"
        )
    return value
