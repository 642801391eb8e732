"""Checks of arguments where they are given: errors of Persia, whatever kind of
object it was.
"""

from __future__ import annotations

import math
import operator
from typing import Any, TypeVar

from persia import errors

T = TypeVar("T")


def kind(what: str, value: T, kinds: Any, need: str) -> T:
    """``value``, if it is an instance of ``kinds``."""
    if not isinstance(value, kinds):
        text = repr(value)
        if len(text) > 60:
            text = f"a {type(value).__name__}"
        raise errors.InvalidArgument(f"{what} is {text}, need {need}")
    return value


def whole(what: str, value: Any, low: int, high: int, else_: str = "") -> int:
    """``value`` as an int in [low, high]; 1e9 is one, 1.5 and True are not."""
    x: int | None = None
    if isinstance(value, float):
        x = int(value) if value.is_integer() else None
    elif not isinstance(value, bool):
        try:
            x = operator.index(value)
        except TypeError:
            x = None
    if x is None or not low <= x <= high:
        raise errors.InvalidArgument(
            f"{what} is {value!r}, need an integer from {low} to {high}{else_}"
        )
    return x


def real(value: Any) -> float:
    """``value`` as a float; NaN, which no check lets pass, if it is none."""
    try:
        return math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return math.nan  # a tensor of several elements is a RuntimeError


def number(what: str, value: Any, low: float, high: float = math.inf) -> float:
    """``value`` as a float in [low, high)."""
    x = real(value)
    if not (low <= x < high):
        bound = (
            f"in [{low}, {high})"
            if high < math.inf
            else f"finite and at least {low}"
        )
        raise errors.InvalidArgument(
            f"{what} is {value!r}, need a number {bound}"
        )
    return x
