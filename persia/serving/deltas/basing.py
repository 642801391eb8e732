"""Versions that are written while the training continues."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable

from persia.serving.exporting import Exported

#: How much less than other threads those get that write: versions need the
#: processor for longer, and packets are waited for.
VERSIONS, PACKETS = 19, 10
_LOOK_S = 0.1


def yield_processor(nice: int) -> None:
    """This thread, and those that it starts, leave the processor to others:
    where threads compute together, all of them wait for the slowest."""
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)


class Basing:
    """Writes a version in a thread of its own.

    Args:
        write: is called there with a function that it calls when the moment of
            the rows is taken, and an event: once that is set, it fails.

    Attributes:
        done: what was written; None: nothing yet.
        error: of `write`, which has failed.
    """

    def __init__(
        self,
        write: Callable[[Callable[[], None], threading.Event], Exported],
    ) -> None:
        self._write = write
        self._stop = threading.Event()
        self._begun = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name="persia-export", daemon=True
        )
        self.done: Exported | None = None
        self.error: Exception | None = None

    def _run(self) -> None:
        yield_processor(VERSIONS)
        try:
            self.done = self._write(self._begun.set, self._stop)
        except Exception as error:
            self.error = error
        finally:
            self._begun.set()

    def begin(self, timeout: float) -> None:
        """Returns when the moment is taken, or was given up after so many
        seconds."""
        self._thread.start()
        end = time.monotonic() + timeout
        while not self._begun.wait(_LOOK_S):
            if time.monotonic() > end:
                self._stop.set()
                return

    @property
    def runs(self) -> bool:
        """Whether it writes."""
        return self._thread.is_alive()

    def wait(self, end: float) -> bool:
        """Until it has ended, or until a moment of the monotonic clock;
        whether it has ended."""
        while self.runs and time.monotonic() < end:
            self._thread.join(_LOOK_S)
        return not self.runs

    def stop(self, patience: float) -> None:
        """Gives it up, and waits so many seconds for its end."""
        self._stop.set()
        self._thread.join(patience)
