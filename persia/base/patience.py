"""Questions to servers that may not be there yet, or not at the moment."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from persia import errors

T = TypeVar("T")

_FIRST_RETRY, _RETRY = 0.05, 2.0  # seconds
_SAY_AFTER, _SAY_AGAIN = 3.0, 15.0  # seconds

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
def saying_so(
    addresses: Sequence[str],
    timeout: float,
    cause: Callable[[], str],
    what: str = "servers",
) -> Iterator[None]:
    """While servers are waited for, logs a warning after three seconds, and
    again every fifteen, with the time that is left.

    Args:
        addresses: of the servers.
        timeout: seconds until it is an error.
        cause: says what is wrong with them, if it finds out.
        what: what they are called.
    """
    began, over = time.monotonic(), threading.Event()

    def say() -> None:
        pause = _SAY_AFTER
        while not over.wait(pause):
            why = cause()
            left = began + timeout - time.monotonic()
            if over.is_set():
                return
            log.warning(
                "waiting for the %s %s: %.0f s left%s",
                what,
                ", ".join(addresses),
                max(0.0, left),
                f": {why}" if why else "",
            )
            pause = _SAY_AGAIN

    thread = threading.Thread(target=say, name="persia-wait", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()  # it may be asking a server that says nothing


def watching(
    held: Callable[[], float],
    cause: Callable[[], str],
    what: str = "servers",
    over: str = "the servers answer again",
) -> None:
    """Logs a warning, in a thread of its own, when something has waited for
    three seconds, then every fifteen, and when it is over.

    Args:
        held: for how many seconds it has waited. Any exception of Persia ends
            the thread.
        cause: says what is wrong; "": nothing, so they take their time for a
            reason of their own.
        what: is waited for.
        over: is said at the end.
    """
    thread = threading.Thread(
        target=_watch,
        args=(held, cause, what, over),
        name="persia-watch",
        daemon=True,
    )
    thread.start()


def _watch(
    held: Callable[[], float], cause: Callable[[], str], what: str, over: str
) -> None:
    due, said, before = 0.0, False, 0.0
    with contextlib.suppress(errors.PersiaError):
        while True:
            time.sleep(min(1.0, _SAY_AFTER))
            seconds = held()
            if seconds < before:  # else it still waits for the same
                if said:
                    log.warning(over)
                due, said = 0.0, False
            before = seconds
            if seconds < max(_SAY_AFTER, due):
                continue
            if why := cause():
                log.warning(
                    "waiting for %s for %.0f s: %s", what, seconds, why
                )
                said = True
            due = seconds + _SAY_AGAIN
