"""Which peers a process has lost, and which are back.

A thread looks at the channels of this process once a second. No message is
sent for it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterable, Sequence

from persia import _core

LOOK_S = 1.0
LOST_S = 3.0  # a peer that starts again at once is not reported
_NAMES = 8  # of a line

log = logging.getLogger("persia")

Peer = tuple[str, str]  # its service and its address


class Peers:
    """The peers of a process, by service and address."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the thread's beginning
        self._thread: threading.Thread | None = None
        self._since: dict[Peer, float | None] = {}  # None: it is connected
        self._lost: set[Peer] = set()  # reported

    def watch(self) -> None:
        """Reports from now on: a warning for peers whose connection is lost
        for three seconds, and a line when they are back."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="persia-peers", daemon=True
                )
                self._thread.start()

    def _run(self) -> None:
        while True:
            time.sleep(LOOK_S)
            self.look(_core.peers(), time.monotonic())

    def look(self, found: Iterable[tuple[str, str, bool]], now: float) -> None:
        """Compares channels with those of the look before.

        Args:
            found: of each its service, its address, and whether it is
                connected. A peer is if one of its channels is.
            now: seconds.
        """
        connected: dict[Peer, bool] = {}
        for service, address, is_up in found:
            peer = service, address
            connected[peer] = connected.get(peer, False) or is_up
        lost, back, away = [], [], 0.0
        for peer, is_up in connected.items():
            since = self._since.get(peer)
            if is_up:
                self._since[peer] = None
                if peer in self._lost and since is not None:
                    back.append(peer)
                    away = max(away, now - since)
            elif peer in self._since:
                since = self._since[peer] = now if since is None else since
                if now - since >= LOST_S and peer not in self._lost:
                    lost.append(peer)
        self._lost = (self._lost | set(lost)) - set(back)
        for peer in self._since.keys() - connected.keys():  # closed
            del self._since[peer]
            self._lost.discard(peer)
        if lost:
            _report("peers lost", f"no connection to {_named(lost)}", lost)
        if back:
            _report(
                "peers back",
                f"connected again to {_named(back)}, after {away:.0f} s",
                back,
                seconds=round(away, 1),
            )


def _named(peers: Sequence[Peer]) -> str:
    names = [
        ("embedding worker " if "Worker" in service else "server ") + address
        for service, address in peers
    ]
    more = len(names) - _NAMES
    return ", ".join(names[:_NAMES]) + (
        f" and {more} more" if more > 0 else ""
    )


def _report(
    event: str, text: str, peers: Sequence[Peer], **fields: object
) -> None:
    fields |= {"event": event, "peers": [address for _, address in peers]}
    log.warning("%s", text, extra={"fields": fields})


peers = Peers()


def _forget() -> None:
    """In a forked child: its thread is not there."""
    vars(peers).update(vars(Peers()))


os.register_at_fork(after_in_child=_forget)
