"""How a process ends at SIGTERM and Ctrl-C.

:class:`Ending` is the rule of all processes, :class:`Signals` that of those
that serve, :func:`end_at_once` that of short commands.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn, Self

from persia.base.health import Health
from persia.base.logs import say
from persia.errors import flagged

NUMBERS = (signal.SIGTERM, signal.SIGINT)

_AT_ONCE = 1.0  # seconds that the main thread has, at least
_SAY = 200  # ms that stderr has to take the last line


class Ended(SystemExit):
    """A signal ends the process: its code is 128 and the signal's number."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)


def ended() -> int | None:
    """The signal for which :class:`Ended` was raised. Code of others may have
    made another exception of it."""
    return _ended[0] if _ended else None


_ended: list[int] = []


def _raise(number: int) -> NoReturn:
    _ended.append(number)
    raise Ended(number)


class Ending:
    """How a process ends that may wait for peers, files or mounts.

    The first SIGTERM or SIGINT calls ``first`` in the main thread. Whatever
    that thread does then, the process ends when ``grace`` seconds are over
    (one, if it is less), and one second after another signal. A thread sees
    to it: the main thread may be in a call that no signal interrupts. In
    another thread than the main one it does nothing.

    Args:
        grace: seconds from the first signal.
        first: is called with its number. Default: raises :class:`Ended`.
        patient: signals after which there is no limit of time.
        numbers: the signals that it takes.

    Attributes:
        number: the first signal; None: there was none.
        what: what is not done if the grace is over, for the last line.
        status: the exit status then. None: 128 and the signal's number.
    """

    def __init__(
        self,
        grace: float,
        first: Callable[[int], object] = _raise,
        *,
        patient: tuple[int, ...] = (),
        numbers: tuple[int, ...] = NUMBERS,
    ) -> None:
        self.grace = grace
        self.first = first
        self.number: int | None = None
        self.what = "not all was done"
        self.status: int | None = None
        self._patient = patient
        self._until = math.inf
        self._taken = 0
        self._came = threading.Event()
        self._before: dict[int, Any] = {}
        if threading.current_thread() is not threading.main_thread():
            return  # signals are another's affair
        # A signal writes its number into one end, which wakes the thread.
        self._receive, self._send = socket.socketpair()
        self._send.setblocking(False)
        self._before = {n: signal.signal(n, self._take) for n in numbers}
        self._old = signal.set_wakeup_fd(
            self._send.fileno(), warn_on_full_buffer=False
        )
        _active.add(self)
        threading.Thread(
            target=self._watch, name="persia-signals", daemon=True
        ).start()

    def wait(self, seconds: float | None = None) -> bool:
        """Until there was a signal, or for so many seconds; whether there
        was one."""
        return self._came.wait(seconds)

    @property
    def left(self) -> float:
        """Seconds of the grace that are left."""
        if self.number is None:
            return self.grace
        return max(0.0, self._until - time.monotonic())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> bool | None:
        """After a signal the limit holds until the process has ended."""
        if self.number is None:
            self.close()
        return None

    def close(self) -> None:
        """Signals do what they did before."""
        if not self._before:
            return
        _active.discard(self)
        signal.set_wakeup_fd(self._old)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._send.close()

    def _take(self, number: int, frame: object) -> None:
        """In the main thread. It takes no lock, which that may hold."""
        self._taken += 1
        self._begin(number)
        if self._taken > 1:
            _raise(number)
        self.first(number)

    def _watch(self) -> None:
        until, begun = math.inf, False
        while True:
            left = until - time.monotonic()
            if left <= 0:
                self._end()
            self._receive.settimeout(None if left == math.inf else left)
            try:
                numbers = self._receive.recv(64)
            except TimeoutError:
                continue
            if not numbers:
                self._receive.close()
                return
            for number in numbers:
                if number in self._before:
                    self._begin(number)
                    if begun:
                        until = min(until, time.monotonic() + _AT_ONCE)
                    else:
                        until, begun = self._until, True
                    self._came.set()

    def _begin(self, number: int) -> None:
        """The first signal. The main thread may see it before the watch."""
        if self.number is None:
            if number not in self._patient:
                self._until = time.monotonic() + max(self.grace, _AT_ONCE)
            self.number = number

    def _end(self) -> NoReturn:
        assert self.number is not None
        status = 128 + self.number if self.status is None else self.status
        kind = "error[DeadlineExceeded]" if status else "warning"
        name = signal.Signals(self.number).name
        _say(
            f"persia: {kind}: ended {self.grace:g} s after {name}: "
            f"{flagged(self.what)}\n"
        )
        os._exit(status)


class _Stopped(BaseException):
    """A signal arrived before anything was served."""


class Signals(Ending):
    """SIGTERM and SIGINT of what serves: the first is noted, another one is
    fatal, and so is the end of the grace. Before :meth:`keep` the first one
    ends the block, and the process says what was not served.

    Args:
        grace: seconds from the first signal.
        unserved: what is not served, if a signal arrives before.

    Attributes:
        health: of the process.
    """

    def __init__(
        self, grace: float, unserved: str = "nothing was served"
    ) -> None:
        super().__init__(grace, _stop)
        self.status = 0
        self.health = Health()
        self._unserved = unserved

    def __exit__(self, *error: object) -> bool:
        super().__exit__()
        stopped = any(isinstance(e, _Stopped) for e in error)
        if stopped:
            say(f"stopping: {self._unserved}")
        return stopped

    def keep(self) -> None:
        """From now on a signal ends :meth:`serve`."""
        self.first = _nothing

    def serve(
        self,
        line: str,
        undone: str,
        tell: Callable[[Signals], None] | None = None,
    ) -> None:
        """The process serves, until the first signal.

        Args:
            line: what is served, and where.
            undone: what is not done if the grace is over.
            tell: is called when that was said.
        """
        self.health.serves()
        say(line)
        if tell is not None:
            tell(self)
        self.wait()
        self.health.ends()
        self.what = undone
        say("stopping")

    def share(self, grace: float) -> float:
        """So many seconds of the grace, if as many are left."""
        return min(grace, self.left)


def _stop(number: int) -> None:
    raise _Stopped


def _nothing(number: int) -> None:
    pass


def end_at_once() -> None:
    """SIGTERM ends this process within a second from now on, and a second
    Ctrl-C, also where the main thread is in a call that does not return.

    It leaves alone what something else decided. The first process of a
    container would ignore SIGTERM otherwise.
    """
    usual = (signal.SIG_DFL, signal.default_int_handler)
    numbers = tuple(n for n in NUMBERS if signal.getsignal(n) in usual)
    Ending(0.0, _leave, patient=(signal.SIGINT,), numbers=numbers)


def _leave(number: int) -> None:
    if number == signal.SIGTERM:
        os._exit(128 + number)
    raise KeyboardInterrupt


def _say(text: str) -> None:
    """On stderr, if that takes it: its lock may be another thread's."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        fd = sys.__stderr__.fileno()  # type: ignore[union-attr]
        room = select.poll()
        room.register(fd, select.POLLOUT)
        if room.poll(_SAY):
            os.write(fd, text.encode())


_active: set[Ending] = set()


def _forget() -> None:
    """In a forked child: its signals are not those of its parent."""
    if not _active:
        return
    _active.clear()
    with contextlib.suppress(ValueError):
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)


os.register_at_fork(after_in_child=_forget)
