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
import functools
import os
import re
import secrets
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import (
    Callable,
    Iterator,
    Mapping,
    Sequence,
)
from pathlib import Path
from typing import NoReturn

from persia.distributed.autoscale import Autoscaler
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
from persia.errors import InvalidArgument, PersiaError, line_of

_METRICS = re.compile(r"^metrics on http://\S+:(\d+)/metrics$")
_SERVING = re.compile(r"serving (shards?|an embedding worker) .* on ")
_LINE_MAX = 1 << 16  # bytes that may wait for the end of their line
_KILL_AFTER = 5.0  # seconds that what a command left has to end itself
# Of the grace: until the command and loaders have ended, and the workers.
_SHARES = (0.7, 0.8)

_NAME = "localhost"  # of all servers in their certificate, whatever the host

# With --max-restarts ranks that are started again could otherwise meet in the
# key-value store of those before (pytorch/pytorch issue 135712).
_FOR_TORCHRUN = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

_RUN_ID = "PERSIA_RUN_ID"  # see persia.cluster


def reserve(host: str = "127.0.0.1") -> socket.socket:
    """A socket that keeps a free port for a server, which may listen there
    while it is open.

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
        held.bind(place)
    except OSError as error:
        if held is not None:
            held.close()
        raise InvalidArgument(
            f"no server can listen on host {host}: {error.strerror}"
        ) from None
    return held


class Cluster:
    """Servers, and a command with their addresses in PERSIA_SERVERS.

    The command starts with the servers: what it imports takes longer than
    their start, and clients wait for servers that do not listen yet.

    Args:
        command: and its arguments.
        servers: how many.
        shards: of the tables, which the servers divide among them; None: one
            for each server.
        options: of ``persia serve ps``, for each server.
        checkpoints: folder of the servers' checkpoints, which the command
            finds in PERSIA_CHECKPOINTS.
        metrics_port: of server 0, the others follow; None: no metrics.
        tls: make certificates and tokens for servers and command.
        embedding_workers: which the command finds in PERSIA_WORKERS.
        loaders: data loaders, which send them batches.
        loaders_max: as many as that are started while ranks wait for them,
            and ended while they wait for ranks; None: ``loaders`` stay.
        scale_after: seconds for which more, and fewer, must have been wanted.
        feed: options of ``persia feed``, for each loader.
        loader_variables: more of them, in the environment of the loaders.
        parts: of the data, which loaders share; 0: each has its own.
        secured: the options of the servers have some already, which the
            command finds in its environment. Else what is there of others is
            not for these servers, and the command does not get it.
        host: where the servers listen.
        wait: start the command when all servers serve: they load rows, which
            may take longer than clients wait.
        start: seconds within which all servers must be ready.
        grace: seconds from a signal until all have ended: what has not then
            is killed.
    """

    def __init__(
        self,
        command: Sequence[str],
        servers: int = 1,
        options: Sequence[str] = (),
        *,
        shards: int | None = None,
        checkpoints: Path | None = None,
        metrics_port: int | None = None,
        tls: bool = False,
        embedding_workers: int = 0,
        loaders: int = 0,
        loaders_max: int | None = None,
        scale_after: tuple[float, float] = (60.0, 600.0),
        feed: Sequence[str] = (),
        loader_variables: Mapping[str, str] | None = None,
        parts: int = 0,
        secured: bool = False,
        host: str = "127.0.0.1",
        wait: bool = False,
        start: float = 60.0,
        grace: float = 30.0,
    ) -> None:
        if not command:
            raise InvalidArgument(
                "no command: persia launch --ps 2 -- python train.py"
            )
        if shutil.which(command[0]) is None:
            raise InvalidArgument(
                f"{command[0]}: no such command, or it cannot be executed"
            )
        if servers < 1:
            raise InvalidArgument(f"servers is {servers}, need at least 1")
        if shards is not None and shards < servers:
            raise InvalidArgument(
                f"shards is {shards}, but each of {servers} servers needs one"
            )
        if loaders and not embedding_workers:
            raise InvalidArgument(
                "data loaders send batches to embedding workers: give "
                "`embedding_workers`, too"
            )
        if parts and not loaders:
            raise InvalidArgument(
                "`parts` are what data loaders share: give `loaders`, too"
            )
        if loaders_max is not None and not loaders <= loaders_max <= parts:
            raise InvalidArgument(
                f"`loaders` from {loaders} to {loaders_max} share {parts} "
                "parts of the data: give `parts`, at least as many"
            )
        if embedding_workers and secured:
            raise InvalidArgument(
                "`embedding_workers` with TLS or tokens of `ps_config`: "
                "they would have none; give `tls` in their place"
            )
        self.embedding_workers = embedding_workers
        self.loaders = loaders
        self.loaders_max = loaders_max
        self.scale_after = scale_after
        self.feed = list(feed)
        self.loader_variables = dict(loader_variables or {})
        self.parts = parts
        self.command = list(command)
        self.servers = servers
        self.shards = shards
        self.options = list(options)
        self.variables: dict[str, str] = {}
        if checkpoints is not None:
            # The command may look there before a server has made it; where it
            # cannot be made the servers say so.
            with contextlib.suppress(OSError):
                checkpoints.mkdir(parents=True, exist_ok=True)
            folder = str(checkpoints.absolute())
            self.options += ["--checkpoints", folder]
            self.variables["PERSIA_CHECKPOINTS"] = folder
        self.metrics_port = metrics_port
        self.tls = tls
        self.secured = secured
        self.host = host
        self.wait = wait
        self.start = start
        self.grace = grace

    def server_command(
        self, server: int, port: int, options: Sequence[str]
    ) -> list[str]:
        """What starts a server."""
        command = [sys.executable, "-m", "persia", "serve", "ps"]
        command += ["--host", self.host, "--port", str(port)]
        command += ["--shard", f"{server}/{self.servers}"]
        if self.shards is not None:
            command += ["--server-count", str(self.servers)]
            command += ["--shards", str(self.shards)]
        if self.metrics_port is not None:
            command += ["--metrics-port", str(self.metrics_port + server)]
        command += ["--grace", str(min(self.grace, 86400))]
        return [*command, *self.options, *options]

    def worker_command(self, port: int, options: Sequence[str]) -> list[str]:
        """What starts an embedding worker."""
        command = [sys.executable, "-m", "persia", "serve", "worker"]
        command += ["--host", self.host, "--port", str(port)]
        command += ["--loaders", str(max(self.parts or self.loaders, 1))]
        if self.loaders_max is not None:
            command += ["--metrics-port", "0"]
        command += ["--grace", str(min(self.grace, 86400))]
        return [*command, "--timeout", str(max(self.start, 1.0)), *options]

    def loader_command(self, loader: int) -> list[str]:
        """What starts a data loader."""
        command = [sys.executable, "-m", "persia", "feed", *self.feed]
        if self.parts:
            command += ["--parts", str(self.parts)]
        count = self.loaders_max or self.loaders
        return [*command, "--loader", f"{loader}/{count}"]

    def command_lines(self) -> list[list[str]]:
        """What would be started, for people: ports are chosen then."""
        return [
            *(self.server_command(i, 0, []) for i in range(self.servers)),
            *(
                self.worker_command(0, [])
                for _ in range(self.embedding_workers)
            ),
            *(self.loader_command(i) for i in range(self.loaders)),
            self.command,
        ]

    @contextlib.contextmanager
    def security(self) -> Iterator[tuple[list[str], dict[str, str]]]:
        """Options of the servers and environment of the command."""
        if not self.tls:
            yield [], {}
            return
        from persia.distributed.certs import write_certificates

        with tempfile.TemporaryDirectory(prefix="persia-launch-") as name:
            folder = Path(name)
            write_certificates(folder, ["127.0.0.1", _NAME])
            options = {
                "--tls-ca": "ca.pem",
                "--tls-cert": "server.pem",
                "--tls-key": "server-key.pem",
                "--token-file": "token",
                "--admin-token-file": "admin-token",
            }
            variables = {
                "PERSIA_TLS_CA": "ca.pem",
                "PERSIA_TLS_CERT": "client.pem",
                "PERSIA_TLS_KEY": "client-key.pem",
                "PERSIA_TOKEN_FILE": "token",
                "PERSIA_ADMIN_TOKEN_FILE": "admin-token",
            }
            flags = ["--mutual-tls"]
            for option, file in options.items():
                flags += [option, str(folder / file)]
            files = {k: str(folder / v) for k, v in variables.items()}
            yield flags, {"PERSIA_TLS_SERVER_NAME": _NAME} | files


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
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    try:
        return exit_status(os.waitpid(supervisor, 0)[1])
    finally:
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
        self.deadline = 0.0  # when all must serve
        count = cluster.servers + cluster.embedding_workers
        self.held = [reserve(cluster.host) for _ in range(count)]
        self.loaders: list[Process] = []
        self.retired: set[int] = set()  # loaders that are not wanted, by pid
        self.sending: set[str] = set()  # names of loaders
        self.metrics: dict[str, int] = {}  # ports, by worker
        self.environment: dict[str, str] = {}  # of loaders
        self.autoscaler: Autoscaler | None = None
        if cluster.loaders_max is not None:
            self.autoscaler = Autoscaler(
                cluster.loaders, cluster.loaders_max, *cluster.scale_after
            )
        self.signals: collections.deque[int] = collections.deque()
        kinds = {
            "ps": cluster.servers,
            "worker": cluster.embedding_workers,
            "loader": cluster.loaders_max or cluster.loaders,
        }
        names = [f"{k}{i}" for k, n in kinds.items() for i in range(n)]
        self.printer = Printer(["job", *names])
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

    def _run(self, options: list[str], environment: dict[str, str]) -> int:
        servers: list[Process] = []
        job: Process | None = None
        try:
            environment = self._environment_of_job() | environment
            ports = self._ports()
            for shard in range(self.cluster.servers):
                command = self.cluster.server_command(
                    shard, ports[shard], options
                )
                servers.append(self._start(f"ps{shard}", command, os.environ))
            for i, port in enumerate(ports[self.cluster.servers :]):
                command = self.cluster.worker_command(
                    port, _without_admin(options)
                )
                servers.append(self._start(f"worker{i}", command, environment))
            self.deadline = time.monotonic() + self.cluster.start
            if self.cluster.wait:
                self._watch(servers, self._all_serve)
            if not self._failed(servers):
                self.environment = environment | self.cluster.loader_variables
                for _ in range(self.cluster.loaders):
                    self._start_loader()
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
        bad = next((s for s in servers if s.status), None)
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
        servers = ",".join(addresses[: self.cluster.servers])
        workers = ",".join(addresses[self.cluster.servers :])
        ours = self.cluster.variables | {"PERSIA_SERVERS": servers}
        if workers:
            ours["PERSIA_WORKERS"] = workers
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
            if self.autoscaler is None:
                return None
            return max(self.autoscaler.due - time.monotonic(), 0.0)
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise _Late([s for s in servers if s.name not in self.serving])
        return left

    def _all_serve(self) -> bool:
        cluster = self.cluster
        return len(self.serving) == cluster.servers + cluster.embedding_workers

    def _done(self, job: Process) -> bool:
        """A server that is stopped while it starts looks like one that has
        failed: what succeeds before waits for it."""
        return bool(job.status) or (job.status == 0 and self._all_serve())

    @staticmethod
    def _failed(servers: list[Process]) -> Process | None:
        """A server that ended, whatever its status: none should."""
        return next((s for s in servers if s.status is not None), None)

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

    # ---- how many loaders there are

    def _start_loader(self) -> None:
        names = {p.name for p in self.loaders if p.status is None}
        i = 0
        while f"loader{i}" in names:
            i += 1
        self.sending.discard(f"loader{i}")
        command = self.cluster.loader_command(i)
        self.loaders.append(
            self._start(f"loader{i}", command, self.environment)
        )

    def _scale(self) -> None:
        """As the loads want it, until the data has ended."""
        wanted = [p for p in self.loaders if p.pid not in self.retired]
        if (
            self.autoscaler is None
            or not self._all_serve()
            or any(p.status is not None for p in wanted)
        ):
            return
        ports = list(self.metrics.values())
        ready = all(p.name in self.sending for p in wanted)
        for said in self.autoscaler.ask(ports, len(wanted), ready):
            self.printer.tell(str(said))
            if isinstance(said, str):
                continue
            for _ in range(said.before, said.after):
                self._start_loader()
            for process in wanted[said.after :]:
                self.retired.add(process.pid)
                process.signal(signal.SIGTERM)

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
        if _SERVING.search(text) and process.name.startswith(("ps", "worker")):
            self.serving.add(process.name)
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
        clients = [*self.loaders, *([] if job is None else [job])]
        if clients:
            self._stop(clients, number, first)
            self._end_orphans(first)
        workers = [p for p in servers if p.name[0] == "w"]
        self._stop(workers, signal.SIGTERM, then)
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


def _without_admin(options: list[str]) -> list[str]:
    """The security of a server, for a worker: it has no administration."""
    name = "--admin-token-file"
    if name not in options:
        return options
    at = options.index(name)
    return options[:at] + options[at + 2 :]
