"""Questions to servers that may not be there yet, or not at the moment."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from persia import errors

__all__ = ["patiently"]

T = TypeVar("T")

_FIRST_RETRY, _RETRY = 0.05, 2.0  # seconds


def patiently(ask: Callable[[], T], timeout: float) -> T:
    """Asks again while the server cannot be reached, for ``timeout`` seconds:
    all that is asked here may be asked twice.
    """
    until, pause = time.monotonic() + timeout, _FIRST_RETRY
    while True:
        try:
            return ask()
        except errors.Unavailable:
            if time.monotonic() + pause > until:
                raise
        time.sleep(pause)
        pause = min(2 * pause, _RETRY)
