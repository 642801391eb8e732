"""``persia launch --autoscale``: asks embedding workers for the loads of the
roles, as Prometheus does, and decides by them how many processes there are."""

from __future__ import annotations

import re
import time
import urllib.request
from collections.abc import Sequence

from persia.distributed.load import WINDOW, Decision, Scaler

_PERIOD = 5.0  # seconds between two questions
_PATIENCE = 1.0  # seconds for an answer
_LOAD = re.compile(r'^persia_load\{role="loader"\} (\S+)$', re.MULTILINE)
_TRAINED = re.compile(
    r"^persia_embedding_worker_trained_total (\S+)$", re.MULTILINE
)


class Autoscaler:
    """The number of data loaders.

    Args:
        low: at least so many.
        high: at most so many.
        out: seconds for which more must have been wanted, before there are.
        into: seconds for which fewer must have been wanted.
    """

    def __init__(
        self, low: int, high: int, out: float = 60.0, into: float = 600.0
    ) -> None:
        self.due = time.monotonic()
        self._scaler = Scaler("loader", low, high, out, into)
        self._rates: list[tuple[float, float]] = []  # (time, batches trained)
        self._check: tuple[float, Decision, float] | None = None

    def ask(
        self, ports: Sequence[int], count: int, ready: bool
    ) -> list[str | Decision]:
        """Asks workers, if it is time: what to say, and what to do.

        Args:
            ports: of the metrics of the workers.
            count: of loaders that run.
            ready: all of them send; nothing is decided while one starts.
        """
        now = time.monotonic()
        if now < self.due:
            return []
        self.due = now + _PERIOD
        loads, trained = [], 0.0
        for port in ports:
            found = _metrics(port)
            loads += [float(n) for n in _LOAD.findall(found)]
            trained += sum(map(float, _TRAINED.findall(found)))
        self._rates.append((now, trained))
        while self._rates[0][0] < now - WINDOW:
            self._rates.pop(0)
        said: list[str | Decision] = self._measured(now)
        decision = self._scaler.decide(now, count, loads if ready else [])
        if decision is not None:
            self._check = (now + 2 * WINDOW, decision, self._rate())
            said.append(decision)
        return said

    def _rate(self) -> float:
        """Batches a second."""
        (then, before), (now, after) = self._rates[0], self._rates[-1]
        return max(after - before, 0.0) / (now - then) if now > then else 0.0

    def _measured(self, now: float) -> list[str | Decision]:
        """What the last change has brought, once that is known."""
        if self._check is None or now < self._check[0]:
            return []
        _, decision, before = self._check
        self._check = None
        if not before:
            return []
        return [
            f"scale: {decision.role}s {decision.before} -> {decision.after} "
            f"brought {self._rate() / before:.2f} of the batches a second; "
            f"foreseen were up to {decision.after / decision.before:.2f}"
        ]


def _metrics(port: int) -> str:
    """The text of one worker; "": it does not answer."""
    try:
        with urllib.request.urlopen(
            f"http://127.0.0.1:{port}/metrics", timeout=_PATIENCE
        ) as answer:
            return str(answer.read().decode())
    except OSError:
        return ""
