"""The processes of a round: forks of one that has imported what takes long.

That one must not load Persia's libraries, which refuse to work in its forks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from random import Random

from persia.distributed.processes import end_with_parent
from persia.torture.plan import AGAIN, ROLLBACK, Event, Round

POLL = 0.02  # seconds
SIGNALS = {
    "KILL": signal.SIGKILL,
    "TERM": signal.SIGTERM,
    "STOP": signal.SIGSTOP,
}
STUCK = 75.0  # seconds without a batch; more than roles wait for others
_GDB = (
    *("-iex", "set auto-solib-add off"),
    *("-x", str(Path(__file__).with_name("state.gdb"))),
)
STOPS = 40.0  # seconds from SIGTERM to the end
RUNS_AGAIN = 8  # of loaders, until all is passed over


def fork(work: Callable[[], None], log: Path) -> int:
    """A process that does it, and does not outlive this one; its pid."""
    mine = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        end_with_parent(signal.SIGKILL)
        if os.getppid() != mine:
            os._exit(1)
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(out, 1)
        os.dup2(out, 2)
        sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        work()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else bool(end.code)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def free_ports(n: int, r: Random) -> list[int]:
    """Outside the range that the system gives away."""
    found: list[int] = []
    while len(found) < n:
        port = r.randrange(12000, 32000)
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            if port not in found:
                found.append(port)
    return found


@dataclasses.dataclass
class Process:
    """One of the round, in the latest of its lives.

    Attributes:
        pid: 0: it is not there.
        life: how often it was started.
        stopped: by a signal, until then; 0: it is not.
        ended: with this status, by itself.
        back: when it is to be started again; 0: it is not.
        asked: when it was sent SIGTERM; 0: it was not.
    """

    name: str
    pid: int = 0
    life: int = 0
    stopped: float = 0.0
    ended: int | None = None
    back: float = 0.0
    asked: float = 0.0
    expected: bool = False  # to end, by a signal

    @property
    def role(self) -> str:
        return self.name.rstrip("0123456789")

    @property
    def index(self) -> int:
        return int(self.name[len(self.role) :])


class Cluster:
    """Runs a round.

    Attributes:
        violations: what went wrong, as text.
        notes: what is worth to be known.
    """

    def __init__(self, made: Round, folder: Path) -> None:
        self.made, self.folder = made, folder
        n = made.servers + made.workers
        ports = free_ports(n, Random(os.getpid() * 1000 + made.seed))
        self.ports = ports[: made.servers]
        self.worker_ports = ports[made.servers :]
        self.processes = {
            name: Process(name)
            for names in made.names.values()
            for name in names
        }
        self.violations: list[str] = []
        self.notes: list[str] = []
        self.slowest = 0.0  # seconds without a batch
        self._seen, self._since = 0, time.monotonic()
        self._events = list(made.events)
        self._rank_life = 0
        self._helpers: set[int] = set()
        self._runs = 0
        self._began = time.monotonic()

    # ---- processes

    @property
    def servers(self) -> str:
        return ",".join(f"127.0.0.1:{port}" for port in self.ports)

    @property
    def workers(self) -> str:
        return ",".join(f"127.0.0.1:{port}" for port in self.worker_ports)

    def of(self, role: str) -> list[Process]:
        """All of a role."""
        return [one for one in self.processes.values() if one.role == role]

    def start(self, one: Process) -> None:
        """A new life."""
        one.life += 1
        one.back = one.stopped = one.asked = 0.0
        one.ended, one.expected = None, False
        log = self.folder / f"{one.name}.{one.life}.log"
        one.pid = fork(self._work(one), log)
        self.say(f"start {one.name} life {one.life} pid {one.pid}")

    def _work(self, one: Process) -> Callable[[], None]:
        made, folder, i = self.made, self.folder, one.index
        servers, workers, life = self.servers, self.workers, self._rank_life

        def work() -> None:
            from persia.torture import roles

            if one.role == "server":
                roles.server(made, folder, self.ports, i)
            elif one.role == "worker":
                roles.worker(made, servers, self.worker_ports[i])
            elif one.role == "loader":
                roles.loader(made, folder, workers, i)
            else:
                roles.Rank(made, folder, servers, workers, i, life).run()

        return work

    def read(self) -> bool:
        """The rows, into a file; whether they could be."""

        def work() -> None:
            from persia.torture import roles

            roles.read(self.made, self.folder, self.servers, self.workers)

        pid = fork(work, self.folder / "reader.log")
        return not os.waitpid(pid, 0)[1]

    def log(self, one: Process) -> str:
        """What it has printed in its latest life."""
        path = self.folder / f"{one.name}.{one.life}.log"
        return path.read_text() if path.exists() else ""

    def say(self, text: str) -> None:
        """Into the log of the round."""
        with (self.folder / "round.log").open("a") as log:
            log.write(f"{time.monotonic() - self._began:7.2f} {text}\n")

    def wrong(self, text: str) -> None:
        """A violation."""
        self.violations.append(text)
        self.say(f"VIOLATION {text}")

    def signal(self, one: Process, name: str) -> None:
        """Sends it; a process that is stopped continues first."""
        if not one.pid:
            return
        if one.stopped and name != "STOP":
            os.kill(one.pid, signal.SIGCONT)
            one.stopped = 0.0
        os.kill(one.pid, SIGNALS[name])
        if name == "TERM":
            one.asked = one.asked or time.monotonic()
        one.expected |= name != "STOP"

    # ---- what happens

    def run(self) -> None:
        """Until all has ended, or nothing moves."""
        try:
            self._start_all()
            while not self._is_over():
                self.poll()
                time.sleep(POLL)
        finally:
            for one in self.of("rank") + self.of("loader"):
                self.signal(one, "KILL")

    def _start_all(self) -> None:
        for role in ("server", "worker"):
            for one in self.of(role):
                self.start(one)
            for one in self.of(role):
                self._wait_for(one, "serving")
        self._since = time.monotonic()
        for one in self.of("rank") + self.of("loader"):
            self.start(one)

    def _wait_for(self, one: Process, text: str) -> None:
        until = time.monotonic() + 60
        while text not in self.log(one):
            if time.monotonic() > until:
                raise RuntimeError(f"{one.name} does not start")
            time.sleep(POLL)

    def poll(self) -> None:
        """What has ended, moved, or is due."""
        for one in self.processes.values():
            self._reap(one)
        for pid in list(self._helpers):
            if os.waitpid(pid, os.WNOHANG)[0]:
                self._helpers.discard(pid)
        now = time.monotonic()
        progress = self.folder / "progress"
        trained = progress.stat().st_size if progress.exists() else 0
        if trained != self._seen:
            self.slowest = max(self.slowest, now - self._since)
            self._seen, self._since = trained, now
        while self._events and self._events[0].at <= trained:
            self._fire(self._events.pop(0))
        for one in self.processes.values():
            if one.stopped and now >= one.stopped:
                one.stopped = 0.0
                os.kill(one.pid, signal.SIGCONT)
                self.say(f"CONT {one.name}")
            if one.back and now >= one.back and not one.pid:
                self.start(one)
            if one.asked and now - one.asked > STOPS:
                self.wrong(f"{one.name} does not end by SIGTERM")
                self.signal(one, "KILL")
                one.asked = now

    def _fire(self, event: Event) -> None:
        self.say(f"{event.signal} {event.targets} {event.seconds:.2f}")
        now = time.monotonic()
        for name in event.targets:
            one = self.processes[name]
            if event.signal == "SAVE":
                self._helpers.add(self._save(one))
                continue
            if not one.pid or one.stopped or one.expected:
                continue
            self.signal(one, event.signal)
            if event.signal == "STOP":
                one.stopped = now + event.seconds
                continue
            one.back = now + event.seconds
            if one.role == "rank":
                self._end_ranks(now + event.seconds)

    def _save(self, one: Process) -> int:
        def work() -> None:
            from persia.torture import roles

            roles.save(self.made, self.folder, self.ports, one.index)

        return fork(work, self.folder / "saver.log")

    def _end_ranks(self, back: float) -> None:
        """torchrun starts all again when one dies."""
        self._rank_life += 1
        for one in self.of("rank"):
            self.signal(one, "KILL")
            one.expected, one.ended, one.back = True, None, back

    def _reap(self, one: Process) -> None:
        if not one.pid or not (found := os.waitpid(one.pid, os.WNOHANG))[0]:
            return
        status = os.waitstatus_to_exitcode(found[1])
        self.say(f"end {one.name} status {status}")
        asked, one.pid, one.stopped = one.asked, 0, 0.0
        one.asked = 0.0
        # Before it serves it ends as any process does.
        bad = status not in (0, -signal.SIGKILL)
        if asked and bad and "serving" in self.log(one):
            self.wrong(f"{one.name}: SIGTERM ends it with {status}")
        if one.expected:
            return
        one.ended = status
        if one.role == "rank" and status == AGAIN:
            self._end_ranks(time.monotonic() + 0.1)
        elif status == 1 and self._is_behind(one):
            one.ended = 0
            self.notes.append("batches of an earlier step failed")
        elif status or one.role in ("server", "worker"):
            self.wrong(f"{one.name} died with {status}")
            self._note_states()

    def _is_behind(self, one: Process) -> bool:
        """A loader, it or its worker started again, sent what servers had
        lost, and ranks in step had passed that over: it says so, and how
        many."""
        made = self.made
        again = made.has("KILL", "worker") or made.has("TERM", "worker")
        return (
            one.role == "loader"
            and (one.life > 1 or again)
            and made.fate in ("empty", "snapshots")
            and made.staleness == 0
            and made.ranks > 1
            and (
                "batches ended without an update" in self.log(one)
                or "passed it over in a step" in self.log(one)
            )
        )

    # ---- the end

    def _is_over(self) -> bool:
        now = time.monotonic()
        quiet = now - self._since
        if any("died with" in text for text in self.violations):
            return True
        loaders, ranks = self.of("loader"), self.of("rank")
        if any(one.ended != 0 for one in loaders):
            if quiet > 12 and self._sends_to_none():
                self.notes.append("loaders wait")
                return True
            if quiet > STUCK:
                self.wrong(f"stuck: no batch for {STUCK:.0f} s")
                self._note_states()
                return True
            return False
        if self._events or any(
            p.back or p.stopped for p in self.processes.values()
        ):
            # Nothing more is trained: what is left happens now.
            while self._events:
                self._fire(self._events.pop(0))
            return False
        if self.made.fate == ROLLBACK:
            return self._loaders_again()
        if all(one.ended == 0 for one in ranks):
            return True
        if quiet > 12 and all(one.life > 1 for one in ranks if one.pid):
            self.notes.append("ranks wait")
            return True
        if quiet > STUCK:
            self.wrong("stuck: a rank does not end")
            self._note_states()
            return True
        return False

    def _note_states(self) -> None:
        """What each process waits for, where a debugger is installed."""
        if not shutil.which("gdb"):
            return
        for one in self.processes.values():
            if one.pid:
                with (self.folder / f"{one.name}.state").open("w") as out:
                    subprocess.run(
                        ["gdb", "-p", str(one.pid), "-batch", *_GDB],
                        stdout=out,
                        stderr=subprocess.STDOUT,
                        check=False,
                        timeout=120,
                    )

    def _sends_to_none(self) -> bool:
        """A loader took the place of one that is gone, as servers lost rows
        of it: it sends that again, and waits for the next trainer."""
        loses = self.made.fate in ("empty", "snapshots")
        ended = all(one.ended == 0 for one in self.of("rank"))
        return loses and self.made.kind != "unnamed" and ended

    def _loaders_again(self) -> bool:
        """Until servers have all that they send."""
        passed = all(
            _has_passed(
                (self.folder / f"{one.name}.{one.life}.log").read_text()
            )
            for one in self.of("loader")
        )
        self._runs += 1
        if passed or self._runs > RUNS_AGAIN:
            if not passed:
                self.wrong("loaders do not pass over what was trained")
            return True
        for one in self.of("loader"):
            self.start(one)
        self._since = time.monotonic()
        return False

    def close(self) -> None:
        """Servers and workers end as they should."""
        for role in ("worker", "server"):
            for one in self.of(role):
                self.signal(one, "TERM")
            while any(one.pid for one in self.of(role)):
                self.poll()
                time.sleep(POLL)

    def kill(self) -> None:
        """Nothing is left."""
        for one in self.processes.values():
            if one.pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(one.pid, signal.SIGKILL)
                    os.waitpid(one.pid, 0)
                one.pid = 0
        for pid in self._helpers:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        self._helpers.clear()


def _has_passed(text: str) -> bool:
    """Whether the loader has found all of its batches at the servers; or, of
    parts, that all have ended."""
    sent = re.findall(r"sent ([\d,]+) batches", text)
    passed = re.findall(r"([\d,]+) of them servers had already", text)
    if not sent:
        return False
    return bool(sent[-1] == (passed[-1] if passed else "0"))
