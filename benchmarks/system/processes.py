"""Processes of a benchmark: servers, the relay, the echo, trainers.

All are started as a user would start them, speak through pipes, and are gone
when the ``with`` block ends, also when the benchmark itself is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "benchmarks"
NATIVE = ROOT / "benchmarks" / "native"

_libc = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1
_GRACE = 20.0  # seconds that a process has to end by itself


def _die_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def program(name: str, *libraries: str) -> Path:
    """Compiles native/NAME.c, if it is newer than what was made of it."""
    source, out = NATIVE / f"{name}.c", FOLDER / name
    if out.exists() and out.stat().st_mtime > source.stat().st_mtime:
        return out
    FOLDER.mkdir(parents=True, exist_ok=True)
    scratch = out.with_suffix(f".{os.getpid()}")
    command = [os.environ.get("CC") or shutil.which("cc") or "gcc"]
    command += "-std=c11 -O3 -D_GNU_SOURCE -Wall -Wextra -pthread".split()
    command += [str(source), "-o", str(scratch)]
    command += [f"-l{x}" for x in libraries]
    subprocess.run(command, check=True)
    scratch.replace(out)
    return out


class Process:
    """A process, its lines in and out; standard error goes to a file."""

    def __init__(
        self,
        name: str,
        command: Sequence[str | Path],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        FOLDER.mkdir(parents=True, exist_ok=True)
        self.log = FOLDER / f"{name}.log"
        self.began = time.perf_counter()
        with self.log.open("w", encoding="utf-8") as errors:
            self.popen = subprocess.Popen(
                [str(x) for x in command],
                cwd=ROOT,
                env={**os.environ, "PYTHONUNBUFFERED": "1"}
                | dict(environment or {}),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self.popen.pid

    def _read(self) -> None:
        assert self.popen.stdout
        for line in self.popen.stdout:
            self._lines.put(line.rstrip("\n"))
        self._lines.put(None)

    def line(self, timeout: float = 60.0) -> str:
        """The next line that it prints."""
        try:
            line = self._lines.get(timeout=timeout)
        except queue.Empty:
            raise self._error(f"said nothing for {timeout:g} s") from None
        if line is None:
            self._lines.put(None)
            status = self.popen.wait(_GRACE)
            raise self._error(f"ended with status {status}")
        return line

    def _error(self, what: str) -> RuntimeError:
        tail = self.log.read_text(encoding="utf-8", errors="replace")
        return RuntimeError(
            f"{self.name} {what}; the end of {self.log}:\n{tail[-2000:]}"
        )

    def ask(self, line: str, timeout: float = 600.0) -> str:
        """Sends a line and returns the answer."""
        assert self.popen.stdin
        self.popen.stdin.write(line + "\n")
        self.popen.stdin.flush()
        return self.line(timeout)

    def wait(self, timeout: float) -> int:
        """Its exit status."""
        return self.popen.wait(timeout)

    def cpu(self) -> float:
        """Seconds of processor that it has used."""
        text = Path(f"/proc/{self.pid}/stat").read_text(encoding="ascii")
        fields = text.rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def resident(self) -> int:
        """Bytes of memory that it has touched and holds."""
        text = Path(f"/proc/{self.pid}/statm").read_text(encoding="ascii")
        return int(text.split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def stop(self) -> None:
        """Asks it to end, then ends it."""
        if self.popen.poll() is None:
            assert self.popen.stdin
            with contextlib.suppress(BrokenPipeError):
                self.popen.stdin.close()
            self._signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.popen.wait(_GRACE)
        self._signal(signal.SIGKILL)  # and whatever it has started
        self.popen.wait()
        self._reader.join(_GRACE)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)


_SERVING = re.compile(r"serving shard (\d+) of (\d+) on (\S+)")


class Server(Process):
    """``persia serve ps``: one shard; port 0: any."""

    def __init__(
        self,
        name: str,
        shard: int,
        shards: int,
        options: Sequence[str],
        port: int = 0,
    ) -> None:
        command = [sys.executable, "-m", "persia", "serve", "ps"]
        command += ["--port", str(port), "--shard", f"{shard}/{shards}"]
        super().__init__(name, [*command, *options])
        self._address: str | None = None

    @property
    def address(self) -> str:
        """Waits until it serves."""
        while self._address is None:
            found = _SERVING.match(self.line())
            if found:
                self._address = found[3]
        return self._address


class Relay(Process):
    """A TCP relay that delivers every byte later."""

    def __init__(self, name: str, target: str) -> None:
        host, _, port = target.rpartition(":")
        super().__init__(name, [program("relay"), host.strip("[]"), port])
        self.address = f"127.0.0.1:{self.line()}"

    def delay(self, milliseconds: float) -> tuple[int, float]:
        """Of every byte each way from now on.  What was relayed so far:
        bytes, and seconds of processor."""
        spent = self.ask(f"{round(1000 * milliseconds)}").split()
        return int(spent[0]), int(spent[1]) * 1e-9


class Trainer(Process):
    """Objects of benchmarks.system.trainer in a process of their own."""

    def __init__(
        self, name: str, environment: Mapping[str, str] | None = None
    ) -> None:
        command = [sys.executable, "-m", "benchmarks.system.trainer"]
        super().__init__(name, command, environment)

    def call(self, name: str, /, timeout: float = 600.0, **args: Any) -> Any:
        """Calls a method of the object there; ``open`` makes it."""
        answer = json.loads(
            self.ask(json.dumps({"call": name, "args": args}), timeout)
        )
        if "error" in answer:
            raise self._error(f"in {name}({args}): {answer['error']}")
        return answer["result"]


class Processes:
    """Starts processes and ends them all, the last one first."""

    def __init__(self) -> None:
        self._all: list[Process] = []
        self._names: dict[str, int] = {}

    def __enter__(self) -> Processes:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in reversed(self._all):
            process.stop()

    def _name(self, name: str) -> str:
        self._names[name] = self._names.get(name, 0) + 1
        return f"{name}{self._names[name]}"

    def _keep(self, process: Any) -> Any:
        self._all.append(process)
        return process

    def start(
        self,
        name: str,
        command: Sequence[str | Path],
        environment: Mapping[str, str] | None = None,
    ) -> Process:
        started: Process = self._keep(
            Process(self._name(name), command, environment)
        )
        return started

    def servers(
        self, shards: int = 1, *options: str, port: int = 0
    ) -> list[Server]:
        """One process a shard; ``port`` is that of a single one."""
        return [
            self._keep(Server(self._name("ps"), shard, shards, options, port))
            for shard in range(shards)
        ]

    def relay(self, target: str) -> Relay:
        started: Relay = self._keep(Relay(self._name("relay"), target))
        return started

    def trainer(self, environment: Mapping[str, str] | None = None) -> Trainer:
        started: Trainer = self._keep(
            Trainer(self._name("trainer"), environment)
        )
        return started


# What csrc/rpc tells glibc, as its environment variable has it.
_KEEP_MEMORY = {
    "GLIBC_TUNABLES": f"glibc.malloc.mmap_threshold={32 << 20}"
    f":glibc.malloc.trim_threshold={64 << 20}"
}


class Echo:
    """Bytes through bare gRPC C core, between two processes.

    ``keep``: their malloc keeps the memory of messages, as ours does; by
    itself it gives every buffer back to the system.
    """

    def __init__(
        self, processes: Processes, threads: int, keep: bool = False
    ) -> None:
        echo = program("echo", "grpc", "gpr")
        environment = _KEEP_MEMORY if keep else None
        server = processes.start(
            "echo-server", [echo, "serve", str(threads)], environment
        )
        self._client = processes.start(
            "echo-client", [echo, "call", server.line()], environment
        )

    def run(
        self, sequences: int, flight: int, sizes: Sequence[tuple[int, int]]
    ) -> float:
        """Seconds of sequences of calls, ``flight`` at once.

        ``sizes``: bytes of request and reply of each call of a sequence.
        """
        numbers = [sequences, flight, *(x for pair in sizes for x in pair)]
        seconds = float(self._client.ask(" ".join(map(str, numbers))))
        if seconds < 0:
            raise RuntimeError("the echo failed")
        return seconds
