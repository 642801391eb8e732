"""What a process answers to probes: of Kubernetes, or of a load balancer."""

from __future__ import annotations

LIVE, READY = "/health/live", "/health/ready"
STARTUP = "/health/startup"
PATHS = (LIVE, READY, STARTUP)


class Health:
    """Whether a process is alive, ready, and past its start.

    It is alive while it answers at all: what its peers do never ends it. It
    is ready from :meth:`serves` to :meth:`ends`, and past its start from
    :meth:`serves`.
    """

    def __init__(self) -> None:
        self._started = False
        self._waits_for = "it has not begun to serve"

    def serves(self) -> None:
        """From now on it takes requests."""
        self._started = True
        self._waits_for = ""

    def ends(self) -> None:
        """From now on it takes no new requests."""
        self._waits_for = "it ends"

    def answer(self, path: str) -> tuple[bool, str]:
        """Of one of :data:`PATHS`: whether it is so, and a line of text."""
        why = self._waits_for
        if path == LIVE or (path == STARTUP and self._started):
            why = ""
        return not why, f"{why or 'ok'}\n"
