"""What the options and the results of several commands share."""

from __future__ import annotations

import json as json_
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import typer

from persia.base.logs import say

_SECONDS_MAX = 1e6  # poll() takes an int of milliseconds


def seconds(value: float) -> float:
    """The callback of flags that are seconds: typer's ``min`` lets nan pass,
    and nothing can wait for it, or for longer than poll() can."""
    if not 0 <= value <= _SECONDS_MAX:
        raise typer.BadParameter(
            f"{value} is not a number of seconds from 0 to {_SECONDS_MAX:,.0f}"
        )
    return value


def patience(value: float) -> float:
    """The same of seconds for which something is waited for."""
    if value == 0:
        raise typer.BadParameter("0 seconds are too few for any answer")
    return seconds(value)


Root = Annotated[
    str,
    typer.Argument(
        help="Checkpoint root of persia train --save, or the folder of a step."
    ),
]
SavedModel = Annotated[
    str,
    typer.Argument(
        help="Checkpoint root of persia train --save, the folder of a step, "
        "or a folder of persia export."
    ),
]
Step = Annotated[
    int | None,
    typer.Option(
        help="Optimizer step of a checkpoint in the root (default: latest)."
    ),
]
BatchSize = Annotated[int, typer.Option(min=1, help="Samples of a batch.")]
Json = Annotated[
    bool,
    typer.Option(
        "--json",
        help="Print the result as JSON; all other lines are on stderr.",
    ),
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Check options and inputs, say what would be done, and change "
        "nothing.",
    ),
]
Servers = Annotated[
    str | None,
    typer.Option(
        help="Addresses of all parameter servers, host:port with commas "
        "between, such as ps0:8888,ps1:8888.",
        envvar="PERSIA_SERVERS",
    ),
]
LiveServers = Annotated[
    str | None,
    typer.Option(
        "--servers",
        help="Take the rows from these parameter servers, host:port with "
        "commas between, and the dense part alone from the checkpoint.",
    ),
]
Namespace = Annotated[
    str,
    typer.Option(
        help="Namespace of the tables on the servers.",
        envvar="PERSIA_NAMESPACE",
    ),
]
Timeout = Annotated[
    float,
    typer.Option(callback=patience, help="Seconds that an answer may take."),
]
Device = Annotated[
    Literal["cpu", "cuda", "auto"],
    typer.Option(
        help="Where the dense part is; auto: on cuda, if there is one."
    ),
]


def would(what: str, json: bool = False) -> None:
    """Says what ``--dry-run`` has found out, or prints it as JSON."""
    if json:
        print_json({"would": what})
    else:
        say(f"would {what}")


def print_json(value: Any) -> None:
    """Prints a result, as ``--json`` asks for it: one line."""
    print(to_json(value), flush=True)


def to_json(value: Any) -> str:
    """A value as JSON: NaN and infinite numbers, which JSON has not, are
    null."""
    return json_.dumps(_finite(value), allow_nan=False, default=str)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return value
