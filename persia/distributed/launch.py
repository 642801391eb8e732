"""A cluster on this machine: parameter servers, embedding workers, data
loaders, and a command that uses them.

Three kinds of processes: the one that the user started, which waits; the
*supervisor*, its child, which starts all others and reads what they print; and
these. Every way in which one of them can end ends the others. The kernel sends
a signal to the supervisor when its parent dies, and to its children when it
dies. The supervisor inherits whatever its children leave behind
(``PR_SET_CHILD_SUBREAPER``) and ends that, too.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import os
import random
import re
import secrets
import selectors
import signal
import socket
import sys
import tempfile
import time
from collections.abc import (
    Callable,
    Mapping,
    Sequence,
)
from pathlib import Path
from typing import NoReturn

from persia.distributed.autoscale import Autoscaler
from persia.distributed.commands import Cluster
from persia.distributed.driver import Driver, Role
from persia.distributed.load import LOADER, SERVER, WORKER, Limits
from persia.distributed.printer import Printer, Unprinted
from persia.distributed.processes import (
    SIGNALS,
    Process,
    become_reaper,
    descendants,
    end_with_parent,
    exit_status,
    kill,
)
from persia.distributed.security import VARIABLES
from persia.errors import (
    InvalidArgument,
    PersiaError,
    Unavailable,
    line_of,
)

_METRICS = re.compile(r"^metrics on http://\S+:(\d+)/metrics$")
_SERVING = re.compile(
    r"serving (?:(?:no )?shards?|an embedding worker) .* on ([^\s\"]+)"
)
_LINE_MAX = 1 << 16  # bytes that may wait for the end of their line
_KILL_AFTER = 5.0  # seconds that what a command left has to end itself
_MEMORY_AFTER = 5.0  # seconds for which more servers must be wanted, at most
# Of the grace: until the command and loaders have ended, and the workers.
_SHARES = (0.7, 0.8)

# With --max-restarts ranks that are started again could otherwise meet in the
# key-value store of those before (pytorch/pytorch issue 135712).
_FOR_TORCHRUN = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

_RUN_ID = "PERSIA_RUN_ID"  # see persia.cluster
_GIVEN = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST, _TRIES = 10240, 100  # the least of the ports that last


def reserve(host: str = "127.0.0.1", port: int = 0) -> socket.socket:
    """A socket that keeps a port for a server, which may listen there while it
    is open; 0: a free one.

    It is bound and does not listen, so that Linux lets another socket with
    SO_REUSEADDR, such as gRPC's, be bound to this port, but gives it to no
    socket that asks for any port.

    Raises:
        InvalidArgument: no process can listen there.
    """
    held = None
    try:
        family, kind, _, _, place = socket.getaddrinfo(
            host, 0, type=socket.SOCK_STREAM
        )[0]
        held = socket.socket(family, kind)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((place[0], port, *place[2:]))
    except OSError as error:
        if held is not None:
            held.close()
        raise InvalidArgument(
            f"no server can listen on host {host}"
            f"{f', port {port}' if port else ''}: {error.strerror}"
        ) from None
    return held


def reserve_lasting(host: str) -> socket.socket:
    """As :func:`reserve` does, a port that a later start of the job finds free
    as well: outside the range from which the system gives a port to any
    socket that asks for one.

    Raises:
        InvalidArgument: no process can listen there.
    """
    first = int(_GIVEN.read_text(encoding="ascii").split()[0])
    below = range(_FIRST, max(first, _FIRST))
    for port in random.sample(below, min(_TRIES, len(below))):
        with contextlib.suppress(InvalidArgument):
            return reserve(host, port)
    return reserve(host)


def run(cluster: Cluster) -> int:
    """Runs it to its end.

    Returns:
        The exit status of the command, or of what failed first.
    """
    # Blocked until the handlers are there: none may get lost, or end this
    # process while its child continues.
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    _flush()
    parent = os.getpid()
    supervisor = os.fork()
    if supervisor == 0:
        _supervisor_main(cluster, parent)

    def forward(number: int, frame: object) -> None:
        kill(supervisor, number)

    before = {number: signal.signal(number, forward) for number in SIGNALS}
    # Else what ends other commands a second after SIGTERM ends this one.
    wakes = signal.set_wakeup_fd(-1)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    try:
        return exit_status(os.waitpid(supervisor, 0)[1])
    finally:
        signal.set_wakeup_fd(wakes)
        for number, handler in before.items():
            signal.signal(number, handler)


def _supervisor_main(cluster: Cluster, parent: int) -> NoReturn:
    """The life of the supervisor; never returns into the parent's code."""
    status = 1
    try:
        os.setsid()  # Ctrl-C comes from the parent, once
        end_with_parent()
        become_reaper()
        if os.getppid() == parent:
            status = _Supervisor(cluster).run()
    except PersiaError as error:
        print(line_of(error), file=sys.stderr)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        _flush()
        os._exit(status)


def _flush() -> None:
    """As far as there are streams (not after >&-), and they take it."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with contextlib.suppress(OSError, ValueError):
                stream.flush()


class _Stopped(Exception):
    """The user, or the system, wants an end."""

    def __init__(self, number: int) -> None:
        self.number = number


class _Late(Exception):
    """Servers do not serve in time."""

    def __init__(self, servers: list[Process]) -> None:
        self.servers = servers


class _Supervisor:
    """Starts, watches and ends the processes; one thread, one loop."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.processes: dict[int, Process] = {}  # by pid
        self.serving: set[str] = set()  # names of servers and workers
        self.all_served = False
        self.deadline = 0.0  # when all must serve
        self.kept = cluster.kept()
        some = self.kept.ports() if self.kept is not None else {}
        # Ports that are kept have to be free at the next start.
        self.reserve = reserve if self.kept is None else reserve_lasting
        self.numbers = list(some) or list(range(cluster.servers))
        self.held = [
            *(
                _reserve_again(cluster, i, some[i])
                if some.get(i)
                else self.reserve(cluster.host)
                for i in self.numbers
            ),
            *(reserve(cluster.host) for _ in range(cluster.embedding_workers)),
        ]
        if self.kept is not None:
            self.kept.keep(
                dict(zip(self.numbers, self._ports(), strict=False))
            )
        self.servers: list[Process] = []  # and embedding workers
        self.loaders: list[Process] = []
        self.retired: set[int] = set()  # that are not wanted, by pid
        self.sending: set[str] = set()  # names of loaders
        self.addresses: dict[str, str] = {}  # of what serves, by name
        self.metrics: dict[str, int] = {}  # ports, by name
        self.environment: dict[str, str] = {}  # of workers and the command
        self.secured: list[str] = []  # options of servers
        self.driver: Driver | None = None
        self.folder = tempfile.TemporaryDirectory(prefix="persia-launch-")
        self.workers = Path(self.folder.name) / "workers"  # their list
        self.signals: collections.deque[int] = collections.deque()
        kinds = {
            "ps": max(
                cluster.most.get(SERVER, cluster.servers),
                self.numbers[-1] + 1,
            ),
            "worker": cluster.most.get(WORKER, cluster.embedding_workers),
            "loader": cluster.most.get(LOADER, cluster.loaders),
        }
        names = [f"{k}{i}" for k, n in kinds.items() for i in range(n)]
        scale = ["scale"] if SERVER in cluster.most else []
        self.printer = Printer(["job", *names, *scale])
        self.selector = selectors.DefaultSelector()
        # A signal writes a byte into one end, which wakes the loop.
        receive, send = socket.socketpair()
        receive.setblocking(False)
        send.setblocking(False)
        self.selector.register(receive, selectors.EVENT_READ)
        self.wake = (receive, send)
        signal.set_wakeup_fd(send.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        for number in SIGNALS:
            signal.signal(number, lambda n, frame: self.signals.append(n))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    # ---- from start to end

    def run(self) -> int:
        """The exit status of all."""
        with self.cluster.security() as (options, environment):
            try:
                return self._run(options, environment)
            except Exception:  # whatever it is, servers save their rows
                processes = self.processes.values()
                job = next((p for p in processes if p.name == "job"), None)
                others = [*self.loaders, job]
                self._end(job, [p for p in processes if p not in others])
                raise
            finally:
                self._end_all()
                self.folder.cleanup()

    def _run(self, options: list[str], environment: dict[str, str]) -> int:
        servers = self.servers
        job: Process | None = None
        self.secured = options
        try:
            environment = self._environment_of_job() | environment
            self.environment = environment
            # Servers that move shards are clients of each other.
            moves = SERVER in self.cluster.most
            ours = environment if moves else os.environ
            ports = self._ports()
            for number, port in zip(self.numbers, ports, strict=False):
                command = (
                    self.cluster.server_command(number, port, options)
                    if number < self.cluster.servers
                    else self._join_command(number, port)
                )
                servers.append(self._start(f"ps{number}", command, ours))
            for i, port in enumerate(ports[len(self.numbers) :]):
                command = self.cluster.worker_command(
                    port, _without_admin(options)
                )
                servers.append(self._start(f"worker{i}", command, environment))
            self.deadline = time.monotonic() + self.cluster.start
            if self.cluster.wait:
                self._watch(servers, self._all_serve)
            if not self._failed(servers):
                for _ in range(self.cluster.loaders):
                    self._start_loader()
                self.driver = self._make_driver()
                job = self._start("job", self.cluster.command, environment)
                self._watch(servers, functools.partial(self._done, job))
        except _Stopped as stopped:
            return self._interrupted(job, servers, stopped.number)
        except Unprinted as unprinted:
            return self._unread(job, servers, unprinted)
        except _Late as late:
            for server in late.servers:
                late_by = f"after {self.cluster.start:g} s (`start_timeout`)"
                self.printer.tell(server.story(f"does not serve {late_by}"))
            self._end(job, servers)
            return 1
        failed = self._failed(servers) or self._failed_loader()
        if failed is None and job is not None and job.status:
            failed = job
        if failed is not None:
            self.printer.tell(failed.story(failed.end()))
        self._end(job, servers)
        if failed is not None:
            return failed.status or 1
        bad = next(
            (s for s in servers if s.status and s.pid not in self.retired),
            None,
        )
        if bad is not None:  # its checkpoint was not written, for example
            self.printer.tell(bad.story(bad.end()))
            return bad.status or 1
        if self.printer.lost is not None:  # what they said at their end
            return self._unread(job, servers, self.printer.lost)
        return 0

    def _interrupted(
        self, job: Process | None, servers: list[Process], number: int
    ) -> int:
        """Ends all because of a signal; a second one ends them at once."""
        self.printer.tell(f"stopping: {signal.Signals(number).name}")
        self._end(job, servers, number)
        return (job.status if job is not None else 0) or 128 + number

    def _unread(
        self,
        job: Process | None,
        servers: list[Process],
        unprinted: Unprinted,
    ) -> int:
        """Ends all, in peace, because no process reads what they say."""
        self.printer.tell(f"stopping: {unprinted}")
        self._end(job, servers)
        return unprinted.status

    def _ports(self) -> list[int]:
        return [held.getsockname()[1] for held in self.held]

    def _environment_of_job(self) -> dict[str, str]:
        host = self.cluster.host
        host = f"[{host}]" if ":" in host else host
        addresses = [f"{host}:{port}" for port in self._ports()]
        servers = ",".join(addresses[: len(self.numbers)])
        workers = addresses[len(self.numbers) :]
        ours = self.cluster.variables | {"PERSIA_SERVERS": servers}
        if workers and WORKER in self.cluster.most:
            self.workers.write_text("\n".join(workers) + "\n")
            ours["PERSIA_WORKERS"] = f"file:{self.workers}"
        elif workers:
            ours["PERSIA_WORKERS"] = ",".join(workers)
        if self.cluster.scale_log is not None:
            ours["PERSIA_SCALE_LOG"] = str(self.cluster.scale_log)
        kept = {
            name: value
            for name, value in os.environ.items()
            if self.cluster.secured or name not in VARIABLES
        }
        run = {_RUN_ID: secrets.token_hex(16)}
        return _FOR_TORCHRUN | run | kept | ours

    # ---- what is waited for

    def _watch(self, servers: list[Process], done: Callable[[], bool]) -> None:
        """Until that is so, or a server has ended."""
        while (
            not done()
            and not self._failed(servers)
            and not self._failed_loader()
        ):
            self._scale()
            self._step(self._time_left(servers))

    def _time_left(self, servers: list[Process]) -> float | None:
        """Seconds until all must serve, or loads are asked for; None: both
        are done."""
        if self._all_serve():
            if self.driver is None:
                return None
            return max(self.driver.wakes - time.monotonic(), 0.0)
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise _Late([s for s in servers if s.name not in self.serving])
        return left

    def _all_serve(self) -> bool:
        """Those of the start: they do, or did before some were retired."""
        count = len(self.numbers) + self.cluster.embedding_workers
        self.all_served = self.all_served or len(self.serving) >= count
        return self.all_served

    def _done(self, job: Process) -> bool:
        """A server that is stopped while it starts looks like one that has
        failed: what succeeds before waits for it."""
        return bool(job.status) or (job.status == 0 and self._all_serve())

    def _failed(self, servers: list[Process]) -> Process | None:
        """A server that ended, whatever its status: none should."""
        return next(
            (
                s
                for s in servers
                if s.status is not None and s.pid not in self.retired
            ),
            None,
        )

    def _failed_loader(self) -> Process | None:
        """A data loader that ended with an error; others may end."""
        return next(
            (
                p
                for p in self.loaders
                if p.status and p.pid not in self.retired
            ),
            None,
        )

    def _start(
        self, name: str, command: Sequence[str], environment: Mapping[str, str]
    ) -> Process:
        environment = {"PYTHONUNBUFFERED": "1"} | dict(environment)
        process = Process(name, command, environment)
        self.processes[process.pid] = process
        for pipe in process.pipes():
            os.set_blocking(pipe.fileno(), False)
            self.selector.register(pipe, selectors.EVENT_READ, process)
        return process

    # ---- how many there are of each role

    def _free(self, kind: str, some: Sequence[Process]) -> str:
        """The first name of that kind that no running process has."""
        names = {p.name for p in some if p.status is None}
        i = 0
        while f"{kind}{i}" in names:
            i += 1
        for known in (self.sending, self.serving):
            known.discard(f"{kind}{i}")
        self.metrics.pop(f"{kind}{i}", None)
        return f"{kind}{i}"

    def _start_loader(self) -> Process:
        name = self._free("loader", self.loaders)
        self.loaders.append(
            self._start(
                name,
                self.cluster.loader_command(int(name.removeprefix("loader"))),
                self.environment | self.cluster.loader_variables,
            )
        )
        return self.loaders[-1]

    def _port(self) -> int:
        """One more that is free."""
        self.held.append(self.reserve(self.cluster.host))
        return int(self.held[-1].getsockname()[1])

    def _start_worker(self) -> Process:
        options = _without_admin(self.secured)
        command = self.cluster.worker_command(self._port(), options)
        name = self._free("worker", self.servers)
        self.servers.append(self._start(name, command, self.environment))
        return self.servers[-1]

    def _join_server(self) -> Process:
        name, port = self._free("ps", self.servers), self._port()
        number = int(name.removeprefix("ps"))
        if self.kept is not None:
            self.kept.keep({number: port})
        command = self._join_command(number, port)
        # It speaks with the others as a client of theirs.
        self.servers.append(self._start(name, command, self.environment))
        return self.servers[-1]

    def _join_command(self, number: int, port: int) -> list[str]:
        first = self.environment["PERSIA_SERVERS"].partition(",")[0]
        return self.cluster.join_command(number, port, first, self.secured)

    def _move_shards(self, addresses: Sequence[str], to: int) -> Process:
        command = self.cluster.move_command(addresses, to)
        return self._start("scale", command, self.environment)

    def _make_driver(self) -> Driver | None:
        """What changes the numbers; None: they stay."""
        cluster = self.cluster
        if not cluster.most:
            return None
        count, out = len(self.numbers), cluster.scale_after[0]
        servers, workers = self.servers[:count], self.servers[count:]
        kinds: dict[str, Role] = {
            SERVER: Role(servers, self._join_server, self.serving),
            WORKER: Role(workers, self._start_worker, self.serving),
            LOADER: Role(list(self.loaders), self._start_loader, self.sending),
        }
        roles = {name: kinds[name] for name in cluster.most}
        for role in roles.values():
            role.addresses = self.addresses
        least = {
            SERVER: cluster.servers,
            WORKER: cluster.embedding_workers,
            LOADER: cluster.loaders,
        }
        spec = {
            name: Limits(least[name], cluster.most[name], *after)
            for name in roles
            for after in [cluster.scale_after]
        }
        if SERVER in spec:  # memory does not wait
            spec[SERVER] = dataclasses.replace(
                spec[SERVER],
                out=min(out, _MEMORY_AFTER),
                shards=cluster.shards or 0,
            )
        driver = Driver(
            Autoscaler(
                *(spec, cluster.budget, cluster.scale_log, cluster.scale_dry)
            ),
            roles,
            self._move_shards,
            self.printer.tell,
            self.retired,
            cluster.start,
            self.workers if WORKER in cluster.most else None,
        )
        if count > cluster.servers and not cluster.scale_dry:
            driver.share()
        return driver

    def _scale(self) -> None:
        """As the loads want it."""
        if self.driver is not None and self._all_serve():
            self.driver.step(
                [
                    self.metrics[p.name]
                    for p in self.servers
                    if p.status is None and p.name in self.metrics
                ]
            )

    # ---- the loop

    def _step(self, timeout: float | None, *, ending: bool = False) -> None:
        """Waits for something to happen, and deals with it."""
        if self.signals and not ending:
            raise _Stopped(self.signals.popleft())
        for key, _ in self.selector.select(timeout):
            if key.data is None:
                with contextlib.suppress(BlockingIOError):
                    self.wake[0].recv(4096)
            else:
                self._read(key.fd, key.fileobj, key.data)
        self._reap()
        if self.printer.lost is not None and not ending:
            raise self.printer.lost
        if self.signals and not ending:
            raise _Stopped(self.signals.popleft())

    def _read(self, fd: int, pipe: object, process: Process) -> bool:
        """Whether there was something to read."""
        try:
            data = os.read(fd, 1 << 16)
        except BlockingIOError:
            return False
        rest = process.rest.pop(fd, b"") + data
        *lines, rest = re.split(rb"[\r\n]+", rest)
        if not data or len(rest) > _LINE_MAX:
            lines, rest = [*lines, rest], b""
        if rest:
            process.rest[fd] = rest
        if not data:
            self.selector.unregister(fd)
        error = pipe is process.popen.stderr
        for line in lines:
            if line:
                text = line.decode("utf-8", "replace")
                process.last.append(text)
                self._note(process, text)
                self.printer.line(process.name, text, error)
        return bool(data)

    def _note(self, process: Process, text: str) -> None:
        """Remembers which processes are ready."""
        serves = _SERVING.search(text)
        if serves and process.name.startswith(("ps", "worker")):
            self.serving.add(process.name)
            self.addresses[process.name] = serves[1]
        if process.name.startswith("loader") and text.startswith("sending "):
            self.sending.add(process.name)
        if found := _METRICS.search(text):
            self.metrics[process.name] = int(found[1])

    def _reap(self) -> None:
        """Takes note of all that ended, orphans that are ours now included."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            process = self.processes.get(pid)
            if process is not None:
                process.status = process.popen.returncode = exit_status(status)
                self._drain(process)
                if self.kept is not None and self._is_retired_server(process):
                    self.kept.forget(int(process.name.removeprefix("ps")))

    def _is_retired_server(self, process: Process) -> bool:
        """It has no shard: they have left, or have not been given."""
        is_server = process.name.startswith("ps")
        return is_server and process.pid in self.retired

    def _drain(self, process: Process) -> None:
        """Reads what a process that has ended still had to say."""
        for pipe in process.pipes():
            for _ in range(64):  # a child of its own may write for ever
                fd = pipe.fileno()
                if fd not in self.selector.get_map():
                    break
                if not self._read(fd, pipe, process):
                    break

    # ---- ending

    def _end(
        self,
        job: Process | None,
        servers: list[Process],
        number: int = signal.SIGTERM,
    ) -> None:
        """Ends the job, by this signal, and what it left, then servers."""
        began, grace = time.monotonic(), self.cluster.grace
        first, then = (began + share * grace for share in _SHARES)
        mover = self.driver.mover if self.driver is not None else None
        clients = [p for p in (*self.loaders, mover, job) if p is not None]
        if clients:
            self._stop(clients, number, first)
            self._end_orphans(first)
        workers = [p for p in servers if p.name[0] == "w"]
        self._stop(workers, signal.SIGINT, then)  # no one takes their batches
        self._stop(servers, signal.SIGTERM, began + grace)

    def _stop(
        self, processes: list[Process], number: int, deadline: float
    ) -> None:
        """Sends a signal, waits, and kills what is still there."""
        for process in processes:
            process.signal(number)
        killed = False
        while left := [p for p in processes if p.status is None]:
            seconds = deadline - time.monotonic()
            if seconds <= 0 and killed:
                names = ", ".join(f"{p.name} (pid {p.pid})" for p in left)
                self.printer.tell(f"left behind: SIGKILL does not end {names}")
                return
            if seconds <= 0 or self.signals:  # a second Ctrl-C
                self.signals.clear()
                for process in left:
                    self.printer.tell(f"killing {process.name}")
                    process.signal(signal.SIGKILL)
                seconds, killed = _KILL_AFTER, True
                deadline = time.monotonic() + seconds
            self._step(seconds, ending=True)

    def _end_orphans(self, deadline: float) -> None:
        """Ends what a command has left, asking first."""
        asked: set[int] = set()
        now = time.monotonic()
        deadline = min(max(deadline, now + 1.0), now + _KILL_AFTER)
        while True:
            mine = {p.pid for p in self.processes.values() if p.status is None}
            orphans = descendants(os.getpid(), mine)
            if not orphans:
                return
            late = time.monotonic() > deadline or bool(self.signals)
            if late and time.monotonic() > deadline + _KILL_AFTER:
                return
            for pid in orphans:
                if late or pid not in asked:
                    kill(pid, signal.SIGKILL if late else signal.SIGTERM)
            asked.update(orphans)
            self._step(0.05, ending=True)

    def _end_all(self) -> None:
        """Kills whatever is left; there is nothing in the usual case."""
        deadline = time.monotonic() + _KILL_AFTER
        while time.monotonic() < deadline:
            left = descendants(os.getpid())
            if not left:
                return
            for pid in left:
                kill(pid, signal.SIGKILL)
            self._reap()
            time.sleep(0.01)


def _reserve_again(cluster: Cluster, server: int, port: int) -> socket.socket:
    """The port that a server had."""
    try:
        return reserve(cluster.host, port)
    except InvalidArgument as error:
        raise Unavailable(
            f"{error}. The logs in {cluster.log} name server ps{server} by "
            "this port: end the process that has it (a server of an earlier "
            "start may take some seconds to end), and start again"
        ) from None


def _without_admin(options: list[str]) -> list[str]:
    """The security of a server, for a worker: it has no administration."""
    name = "--admin-token-file"
    if name not in options:
        return options
    at = options.index(name)
    return options[:at] + options[at + 2 :]
