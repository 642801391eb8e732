"""What the options of several commands share."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import typer

__all__ = ["seconds", "to_json"]

_SECONDS_MAX = 1e6  # poll() takes an int of milliseconds


def seconds(value: float) -> float:
    """The callback of flags that are seconds: typer's ``min`` lets nan pass,
    and nothing can wait for it, or for longer than poll() can."""
    if not 0 <= value <= _SECONDS_MAX:
        raise typer.BadParameter(
            f"{value} is not a number of seconds from 0 to {_SECONDS_MAX:,.0f}"
        )
    return value


def to_json(value: Any) -> str:
    """What ``--json`` prints: NaN and infinite numbers, which JSON has not,
    are null."""
    return json.dumps(_finite(value), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return value
