"""Embedding workers that join and leave while a job trains."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TypeVar

from persia.base.environment import variable
from persia.distributed.addresses import DNS, FILE, resolve_workers
from persia.distributed.security import Security
from persia.errors import Closed, PersiaError

_PERIOD = 1.0  # seconds between two looks at a file
_PERIOD_DNS = 5.0  # the same of names

log = logging.getLogger(__name__)
Owner = TypeVar("Owner")


def follow(
    owner: Owner,
    workers: str | Sequence[str] | None,
    security: Security | None,
    tell: Callable[[Owner, list[str]], None],
) -> None:
    """Reads a list of workers again and again, in a thread of its own, as
    long as there is ``owner``; nothing of a list that cannot change. One that
    is empty, or cannot be read now, stays as it was.

    Args:
        owner: what uses the list; the thread ends with it.
        workers, security: as of :func:`resolve_workers`.
        tell: is called with the addresses when they have changed; ``Closed``
            ends it.
    """
    given = variable("PERSIA_WORKERS") or "" if workers is None else workers
    texts = given.split(",") if isinstance(given, str) else given
    kinds = {
        kind
        for kind in (FILE, DNS)
        if any(t.strip().startswith(kind) for t in texts)
    }
    if not kinds:
        return
    period = _PERIOD if FILE in kinds else _PERIOD_DNS
    threading.Thread(
        target=_follow,
        args=(weakref.ref(owner), workers, security, tell, period),
        name="persia-workers",
        daemon=True,
    ).start()


def _follow(
    ref: weakref.ref[Owner],
    workers: str | Sequence[str] | None,
    security: Security | None,
    tell: Callable[[Owner, list[str]], None],
    period: float,
) -> None:
    known: list[str] = []
    before = said = ""  # why it could not be read
    while True:
        time.sleep(period)
        owner = ref()
        if owner is None:
            return
        try:
            found, _ = resolve_workers(workers, security)
            if found != known:
                tell(owner, found)
            known, before = found, ""
        except Closed:
            return
        except PersiaError as error:
            why = str(error)
            if why == before != said:  # not while it is written
                log.warning("the list of embedding workers stays: %s", why)
                said = why
            before = why
        del owner
