"""``persia launch --autoscale``: asks the roles for their loads, as Prometheus
does, and decides by them how many processes there are."""

from __future__ import annotations

import dataclasses
import json
import re
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from persia.base.logs import audit, say
from persia.distributed.load import (
    SERVER,
    WINDOW,
    Decision,
    Limits,
    Look,
    plan,
)
from persia.errors import InvalidArgument, StorageError

_PERIOD = 2.0  # seconds between two questions
_PATIENCE = 1.0  # seconds for an answer
_LOAD = re.compile(r'^persia_load\{role="([a-z-]+)"\} (\S+)$', re.MULTILINE)
_TRAINED = re.compile(
    r"^persia_embedding_worker_trained_total (\S+)$", re.MULTILINE
)


@dataclasses.dataclass
class _Check:
    """What is to be found out of a decision later."""

    due: float
    decision: Decision
    before: float  # batches a second


class Autoscaler:
    """The numbers of processes of a job.

    Args:
        spec: the roles whose numbers may change.
        budget: processes of all these roles together, at most; None: no
            limit.
        log: a file that gets each decision, as a line of JSON.
        dry: decisions are said, and not to be carried out.
    """

    def __init__(
        self,
        spec: Mapping[str, Limits],
        budget: int | None = None,
        log: Path | None = None,
        dry: bool = False,
    ) -> None:
        self.due = time.monotonic()
        self._dry = dry
        self._spec, self._budget, self._log = spec, budget, log
        self._looks: list[Look] = []
        self._last: dict[int, float] = {}  # batches trained, by port
        self._trained = 0.0
        self._rates: list[tuple[float, float]] = []  # (time, batches trained)
        self._check: _Check | None = None

    def ask(
        self, ports: Sequence[int], counts: Mapping[str, int], ready: bool
    ) -> list[str | Decision]:
        """Asks processes, if it is time: what to say, and what to do.

        Args:
            ports: of the metrics of servers and embedding workers.
            counts: of processes, by role.
            ready: none starts or ends; else nothing is decided.
        """
        now = time.monotonic()
        if now < self.due:
            return []
        self.due = now + _PERIOD
        loads = self._look(now, ports)
        if ready:
            self._looks.append(Look(now, loads))
        else:
            self._looks.clear()
        keep = max(
            (max(s.out, s.into) for s in self._spec.values()), default=0
        )
        while self._looks and self._looks[0].at < now - keep - _PERIOD:
            self._looks.pop(0)
        said: list[str | Decision] = list(self._measured(now, loads))
        decision = plan(self._looks, counts, self._spec, self._budget)
        if decision is None:
            return said
        self._looks.clear()
        fields = dataclasses.asdict(decision)
        if self._dry:
            self._write(f"{decision} (dry run)", **fields, dry=True)
            return [*said, f"{decision} (dry run)"]
        self._check = _Check(now + 2 * WINDOW, decision, self._rate())
        self._write(str(decision), **fields)
        return [*said, decision]

    def failed(self, decision: Decision, why: str) -> str:
        """A decision was not carried out; what to say."""
        self._check = None
        text = f"scale: {decision.role}s stay at {decision.before}: {why}"
        self._write(text, **dataclasses.asdict(decision), failed=why)
        return text

    def _look(self, now: float, ports: Sequence[int]) -> dict[str, float]:
        """The load of each role: of servers that of the fullest one."""
        found: dict[str, list[float]] = {}
        for port in ports:
            text = _metrics(port)
            for role, load in _LOAD.findall(text):
                found.setdefault(role, []).append(float(load))
            for trained in map(float, _TRAINED.findall(text)):
                known = self._last.get(port, 0.0)
                self._trained += max(trained - known, 0.0)
                self._last[port] = trained
        self._rates.append((now, self._trained))
        while self._rates[0][0] < now - WINDOW:
            self._rates.pop(0)
        return {
            role: max(all_of) if role == SERVER else sum(all_of) / len(all_of)
            for role, all_of in found.items()
        }

    def _rate(self) -> float:
        """Batches a second."""
        (then, before), (now, after) = self._rates[0], self._rates[-1]
        return (after - before) / (now - then) if now > then else 0.0

    def _measured(self, now: float, loads: Mapping[str, float]) -> list[str]:
        """What the last change has brought, once that is known."""
        check = self._check
        if check is None or now < check.due:
            return []
        self._check = None
        decision, rate = check.decision, self._rate()
        load = loads.get(decision.role, 0.0)
        gain = f"{rate / check.before:.2f}" if check.before else "?"
        text = (
            f"scale: {decision.role}s {decision.before} -> {decision.after} "
            f"brought {gain} of the batches a second; the load is {load:.2f}, "
            f"foreseen was {decision.foreseen:.2f}"
        )
        self._write(
            text,
            **dataclasses.asdict(decision),
            batches_before=check.before,
            batches_after=rate,
            load_after=load,
            foreseen=decision.foreseen,
        )
        return [text]

    def _write(self, text: str, **fields: Any) -> None:
        audit("scaled", text=text, **fields)
        if self._log is not None:
            line = json.dumps({"at": time.time(), "text": text} | fields)
            try:
                with self._log.open("a") as file:
                    file.write(line + "\n")
            except OSError as error:  # the job continues
                say(f"{self._log}: {error.strerror}: {text}", "warning")


def check_log(log: Path) -> None:
    """Whether decisions can be written there; makes the file.

    Raises:
        InvalidArgument: they cannot.
    """
    try:
        log.open("a").close()
    except OSError as error:
        raise InvalidArgument(f"`scale_log={log}`: {error.strerror}") from None


def last_decisions(log: Path, n: int) -> list[dict[str, Any]]:
    """The last lines of a file of decisions.

    Raises:
        StorageError: it cannot be read, or is another file.
    """
    try:
        lines = log.read_text().splitlines()
        return [dict(json.loads(line)) for line in lines[-n:]]
    except (OSError, ValueError, TypeError) as error:
        raise StorageError(f"{log}: no decisions: {error}") from None


def _metrics(port: int) -> str:
    """The text of one process; "": it does not answer."""
    try:
        with urllib.request.urlopen(
            f"http://127.0.0.1:{port}/metrics", timeout=_PATIENCE
        ) as answer:
            return str(answer.read().decode())
    except OSError:
        return ""
