"""Warnings that name the line of the user."""

from __future__ import annotations

import sys
import warnings
from types import FrameType

from persia.redaction import shown

_OWN = ("persia", "torch", "copy", "pickle", "multiprocessing")


def warn(message: str) -> None:
    """A UserWarning at the innermost frame outside of persia and torch."""
    level = 1
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if name.partition(".")[0] not in _OWN:
            break
        frame, level = frame.f_back, level + 1
    warnings.warn(shown(message), stacklevel=level)
