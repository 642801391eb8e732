"""Certificates and tokens that are renewed while a process runs.

A thread looks at the files now and then, and at SIGHUP at once. New ones are
checked as those of the start, then given to all servers and channels of this
process that have the old ones. Wrong ones change nothing.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import signal
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from persia import _core
from persia.base.logs import audit, say

if TYPE_CHECKING:
    from persia.distributed.security import Origin, Security

LOOK_S = 10.0
_numbers = itertools.count(1)  # of sources, which the core keeps

#: What :func:`seen` finds of a file.
State = tuple[int, ...] | None


def seen(paths: tuple[str, ...]) -> tuple[State, ...]:
    """Which files there are at these names: another one is another state."""

    def one(path: str) -> State:
        try:
            found = os.stat(path)
        except OSError:
            return None
        return (
            found.st_dev,
            found.st_ino,
            found.st_mtime_ns,
            found.st_size,
        )

    return tuple(map(one, paths))


@dataclasses.dataclass
class _Source:
    """Files that belong together, as they were loaded last."""

    number: int
    origin: Origin
    refused: tuple[State, ...] | None = None  # told once
    renewed: list[Callable[[Security], object]] = dataclasses.field(
        default_factory=list
    )


class Renewal:
    """All files of a process.

    Attributes:
        counts: renewals, by "ok" and "failed".
    """

    def __init__(self) -> None:
        self.counts = {"ok": 0, "failed": 0}
        self._sources: dict[Any, _Source] = {}
        self._lock = threading.Lock()  # guards the sources
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None

    def number(
        self,
        origin: Origin,
        renewed: Callable[[Security], object] | None = None,
    ) -> int:
        """Of the source of what was loaded, for ``_core``; 0: it has no
        files, and stays.

        Args:
            origin: whence it was loaded.
            renewed: is called with what was loaded later.
        """
        if not origin.paths:
            return 0
        with self._lock:
            found = self._sources.get(origin.key)
            if found is None:
                found = _Source(next(_numbers), origin)
                self._sources[origin.key] = found
            if renewed is not None:
                found.renewed.append(renewed)
            if found.origin.seen != origin.seen:
                self._look_locked(found)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="persia-renewal", daemon=True
                )
                self._thread.start()
        return found.number

    def look(self) -> None:
        """Looks at all files now."""
        with self._lock:
            for source in self._sources.values():
                if _core.security_users(source.number):
                    self._look_locked(source)

    def ends(self) -> Mapping[str, float]:
        """When certificates that are in use end, in seconds since 1970, by
        their files."""
        with self._lock:
            return {
                path: end
                for source in self._sources.values()
                if _core.security_users(source.number)
                for path, end in source.origin.ends
            }

    def at_hangup(self) -> None:
        """SIGHUP makes it look, unless something else was decided. In the
        main thread."""
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:
            signal.signal(signal.SIGHUP, lambda *_: self._wake.set())

    def _run(self) -> None:
        while True:
            self._wake.wait(LOOK_S)
            self._wake.clear()
            self.look()

    def _look_locked(self, source: _Source) -> None:
        now = seen(source.origin.paths)
        if now == source.origin.seen:
            return
        try:
            found = source.origin.load()
            origin = found.origin or source.origin
            if seen(origin.paths) != origin.seen:
                return  # it is being written: the next time
            given = found.values() | {"source": source.number}
            _core.renew_security(given)
            for call in source.renewed:
                call(found)
        except Exception as error:  # the thread looks again
            if source.refused != now:
                self.counts["failed"] += 1
                audit("not renewed", files=_changed(source.origin, now))
                say(
                    f"certificates and tokens were not renewed: {error}; "
                    "those from before stay",
                    "warning",
                )
            source.refused = now
            return
        files = _changed(source.origin, now)
        source.origin, source.refused = origin, None
        self.counts["ok"] += 1
        say(f"certificates and tokens were renewed from {', '.join(files)}")
        audit("renewed", files=files)


def _changed(origin: Origin, now: tuple[State, ...]) -> list[str]:
    """Its files that are others now."""
    every = zip(origin.paths, origin.seen, now, strict=True)
    return [path for path, before, after in every if before != after]


renewal = Renewal()


def _forget() -> None:
    """In a forked child: its thread is not there."""
    vars(renewal).update(vars(Renewal()))


os.register_at_fork(after_in_child=_forget)
