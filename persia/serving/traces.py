"""What became of a request to a served model, where it is sampled."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence

from persia.base.traces import Span, keep_spans, new_id, request_trace

#: When something began and ended, in ns of ``time.monotonic_ns()``.
Times = tuple[int, int]


class RequestTrace:
    """The spans of one request, until it has ended.

    Args:
        trace: its id.
        parent: the span of the caller; 0: none.
        began: when it arrived.
    """

    def __init__(self, trace: int, parent: int, began: int) -> None:
        self._trace, self._parent = trace, parent
        self._began = began
        self._own = new_id()
        self._parts: list[Span] = []
        self._about: dict[str, str | int] = {}

    def about(self, **values: str | int) -> None:
        """More attributes."""
        self._about |= values

    def part(
        self, name: str, times: Times, below: Sequence[Times] = ()
    ) -> None:
        """A part of it has ended.

        Args:
            name: of the part.
            times: of it.
            below: of the lookups in it.
        """
        own = new_id()
        self._parts.append(Span(name, self._trace, own, self._own, *times))
        self._parts += [
            Span("lookup", self._trace, new_id(), own, *one) for one in below
        ]

    def end(self, error: str | None = None) -> None:
        """It was answered; or with an error of that class."""
        own = Span(
            name="request",
            trace=self._trace,
            id=self._own,
            parent=self._parent,
            began=self._began,
            ended=time.monotonic_ns(),
            about=self._about,
            error=error,
            asked=True,
        )
        keep_spans([own, *self._parts])


def trace_of(traceparent: str | None, waited: float) -> RequestTrace | None:
    """Of a request, if it is sampled.

    Args:
        traceparent: the header of that name, or None.
        waited: seconds since it arrived.
    """
    found = request_trace(traceparent)
    if found is None:
        return None
    return RequestTrace(*found, time.monotonic_ns() - int(waited * 1e9))


# ---- lookups ---------------------------------------------------------------

_noted = threading.local()


@contextlib.contextmanager
def noting(wanted: bool) -> Iterator[list[Times]]:
    """The lookups of this thread within the block, if they are wanted."""
    found: list[Times] = []
    _noted.times = found if wanted else None
    try:
        yield found
    finally:
        _noted.times = None


def note_lookup(began: int) -> None:
    """A lookup has ended, which began then."""
    times = getattr(_noted, "times", None)
    if times is not None:
        times.append((began, time.monotonic_ns()))
