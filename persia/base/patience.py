"""Questions to servers that may not be there yet, or not at the moment."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from persia import errors

__all__ = ["patiently", "saying_so"]

T = TypeVar("T")

_FIRST_RETRY, _RETRY = 0.05, 2.0  # seconds
_SAY_AFTER, _SAY_AGAIN = 5.0, 15.0  # seconds

log = logging.getLogger("persia")


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


@contextlib.contextmanager
def saying_so(addresses: Sequence[str], timeout: float) -> Iterator[None]:
    """While servers are waited for, logs a warning after five seconds, and
    again every fifteen, with the time that is left."""
    began, over = time.monotonic(), threading.Event()

    def say() -> None:
        pause = _SAY_AFTER
        while not over.wait(pause):
            left = began + timeout - time.monotonic()
            log.warning(
                "waiting for the servers %s: %.0f s left",
                ", ".join(addresses),
                max(0.0, left),
            )
            pause = _SAY_AGAIN

    thread = threading.Thread(target=say, name="persia-wait", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
