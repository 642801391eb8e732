"""What a process answers to probes, of Kubernetes or of a load balancer, and
reports to systemd."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable

LIVE, READY = "/health/live", "/health/ready"
STARTUP = "/health/startup"
PATHS = (LIVE, READY, STARTUP)


class Health:
    """Whether a process is alive, ready, and past its start.

    It is alive while it answers at all: what its peers do never ends it. It
    is ready from :meth:`serves` to :meth:`ends`, while what it :meth:`needs`
    is there, and past its start from :meth:`serves`. A unit with
    ``Type=notify`` gets a report of both moments.
    """

    def __init__(self) -> None:
        self._started = False
        self._waits_for = "it has not begun to serve"
        self._needs: Callable[[], str] | None = None

    def needs(self, why: Callable[[], str]) -> None:
        """It is ready only while this gives "", not a reason."""
        self._needs = why

    def serves(self) -> None:
        """From now on it takes requests."""
        self._started = True
        self._waits_for = ""
        _notify("READY=1")

    def ends(self) -> None:
        """From now on it takes no new requests."""
        self._waits_for = "it ends"
        _notify("STOPPING=1")

    def answer(self, path: str) -> tuple[bool, str]:
        """Of one of :data:`PATHS`: whether it is so, and a line of text."""
        why = self._waits_for
        if not why and self._needs is not None:
            why = self._needs()
        if path == LIVE or (path == STARTUP and self._started):
            why = ""
        return not why, f"{why or 'ok'}\n"


def _notify(state: str) -> None:
    """Reports to systemd, where it waits for it: sd_notify(3)."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    if address.startswith("@"):  # of no file
        address = "\0" + address[1:]
    with (
        contextlib.suppress(OSError),  # it is not there any more
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as to,
    ):
        to.sendto(state.encode(), address)
