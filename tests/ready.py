"""Processes of Python that begin with torch imported, which takes seconds.

``Ready(words, ...)`` is ``subprocess.Popen([sys.executable, *words], ...)``
for words ``-m MODULE ...``, ``-c CODE ...`` and ``FILE ...``. A nursery, this
file as a program, imports what is slow, but nothing of Persia, and forks. Its
forks are real processes and children of the test's process, with their own
environment, folder, output and signals.

What they do not have: another seed of hashes than each other, a command line,
a marked environment in /proc, variables that are read before Python starts
(LD_PRELOAD). Where that matters, take ``subprocess.Popen``.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib.util
import inspect
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
from pathlib import Path
from socket import AF_UNIX, SOCK_SEQPACKET
from typing import Any

#: What is imported before any process is asked for.
SLOW = (
    *("torch", "torch._dynamo", "torch.distributed", "torch.nn.parallel"),
    *("numpy", "pyarrow.csv", "pyarrow.dataset", "pyarrow.parquet"),
    *("prometheus_client", "pydantic.main", "pydantic.types"),
    *("rich.console", "rich.table", "typer", "yaml"),
)
_PR_SET_CHILD_SUBREAPER = 36
_MOST = 1 << 17
#: The sys.executable of a process.
_PYTHON = "PERSIA_TEST_PYTHON"
_ONE = threading.Lock()


class Ready(subprocess.Popen[str]):
    """One of these processes.

    Args:
        words: what follows the name of the interpreter.
        more: arguments of ``Popen``; it reads and writes text.
    """

    def __init__(self, *words: str, **more: Any) -> None:
        super().__init__(words, text=True, **more)

    def _execute_child(self, *given: Any) -> None:
        sys.audit("subprocess.Popen", sys.executable, given[0], None, None)
        names = inspect.signature(subprocess.Popen._execute_child)
        all_ = names.bind(self, *given).arguments
        ours = {
            k: all_[k] for k in ("args", "cwd", "env", "start_new_session")
        }
        ours["cwd"] = str(ours["cwd"] or Path.cwd())
        ours["env"] = dict(ours["env"] or os.environ)
        pipes = [all_[k] for k in ("p2cread", "c2pwrite", "errwrite")]
        fds = [fd if fd >= 0 else i for i, fd in enumerate(pipes)]
        self.pid = _fork(json.dumps(ours).encode(), fds)
        self._child_created = True
        ends = "p2cread p2cwrite c2pread c2pwrite errread errwrite".split()
        self._close_pipe_fds(*(all_[k] for k in ends))


def ended(*words: str, timeout: float, **more: Any) -> Any:
    """Such a process at its end: a ``CompletedProcess``."""
    with Ready(
        *words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **more
    ) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(words, process.returncode, out, err)


@functools.cache
def python() -> str:
    """An interpreter for others to start: a small program that stands for one
    of these processes. It has its output and status and hands signals on
    (HUP, INT, TERM). If it is killed, the process is killed as well.
    """
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    listener = socket.socket(AF_UNIX, SOCK_SEQPACKET)
    listener.bind(f"{folder}/socket")
    listener.listen(64)
    program = Path(folder, "python")
    stand_in = Path(__file__).with_name("stand_in.py")
    program.write_text(
        f'#!/bin/sh\nexec {sys.executable} -S -E -P {stand_in} $0 "$@"\n'
    )
    program.chmod(0o755)
    _begin(_listen, listener)
    return str(program)


def _begin(work: Any, *given: Any) -> None:
    threading.Thread(target=work, args=given, daemon=True).start()


def _listen(listener: socket.socket) -> None:
    while True:
        _begin(_represent, listener.accept()[0])


def _represent(channel: socket.socket) -> None:
    """Runs what a program stands for, until it ends."""
    with channel:
        message, fds, _, _ = socket.recv_fds(channel, _MOST, 3)
        given = json.loads(message)
        words = given.pop("words")
        if words[0] == "-u":
            del words[0]
            given["env"]["PYTHONUNBUFFERED"] = "1"
        given["env"][_PYTHON] = python()
        with Ready(
            *words, stdin=fds[0], stdout=fds[1], stderr=fds[2], **given
        ) as process:
            for fd in fds:
                os.close(fd)
            end = os.pidfd_open(process.pid)
            while end not in select.select([end, channel], [], [])[0]:
                number = channel.recv(1)
                process.send_signal(number[0] if number else signal.SIGKILL)
            os.close(end)
        with contextlib.suppress(OSError):
            channel.send(str(process.returncode).encode())


def _fork(message: bytes, fds: list[int]) -> int:
    prctl = ctypes.CDLL(None).prctl
    with _ONE:
        channel = _nursery()
        prctl(_PR_SET_CHILD_SUBREAPER, 1)  # who takes the orphan
        try:
            socket.send_fds(channel, [message], fds)
            return int(channel.recv(64))
        finally:
            prctl(_PR_SET_CHILD_SUBREAPER, 0)


@functools.cache
def _nursery() -> socket.socket:
    ours, theirs = socket.socketpair(AF_UNIX, SOCK_SEQPACKET)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    with theirs:
        subprocess.Popen(
            [sys.executable, "-P", __file__, str(theirs.fileno())],
            env=environment,
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )
    return ours


# ---- the nursery -----------------------------------------------------------


def serve(channel: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Forks for each request; returns in the child, with what it is."""
    while True:
        message, fds, _, _ = socket.recv_fds(channel, _MOST, 3)
        if not message:
            sys.exit()
        here, there = os.pipe()
        if not os.fork():
            if not (pid := os.fork()):
                os.close(here)
                os.close(there)
                channel.close()
                return json.loads(message), fds
            os.write(there, str(pid).encode())
            os._exit(0)
        os.wait()  # now it is an orphan, and has its parent
        channel.send(os.read(here, 64))
        for fd in (here, there, *fds):
            os.close(fd)


def become(
    args: list[str],
    cwd: str,
    env: dict[str, str],
    start_new_session: bool,
    fds: list[int],
) -> None:
    """Does what a new interpreter does with these."""
    for i, fd in enumerate(fds):
        os.dup2(fd, i)
    for fd in set(fds) - {0, 1, 2}:
        os.close(fd)
    if start_new_session:
        os.setsid()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    if threads := env.get("OMP_NUM_THREADS"):
        sys.modules["torch"].set_num_threads(int(threads))
    sys.modules["numpy"].random.seed()
    libc = ctypes.CDLL(None)
    libc.on_exit(libc._exit, None)  # before what torch's libraries do then
    sys.executable = os.environ.pop(_PYTHON, sys.executable)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through="PYTHONUNBUFFERED" in env)
    first, *rest = args
    where = env.get("PYTHONPATH", "").split(":")
    main: Any = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    if first == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.path[:0] = ["", *where]
        code = compile(rest[0], "<string>", "exec")
    elif first == "-m":
        sys.path[:0] = [cwd, *where]
        with contextlib.suppress(ModuleNotFoundError):
            main.__spec__ = importlib.util.find_spec(f"{rest[0]}.__main__")
        if main.__spec__ is None:
            main.__spec__ = importlib.util.find_spec(rest[0])
        main.__package__ = main.__spec__.parent
        main.__file__ = main.__spec__.origin
        sys.argv = [main.__file__, *rest[1:]]
        code = main.__spec__.loader.get_code(main.__spec__.name)
    else:
        sys.path[:0] = [str(Path(first).parent), *where]
        sys.argv = list(args)
        main.__file__ = first
        code = compile(Path(first).read_bytes(), first, "exec")
    exec(code, main.__dict__)


def leave(names: set[str]) -> None:
    """Keeps modules from being taken apart at the end of a fork, which takes
    a quarter of a second."""
    kept = [sys.modules.pop(name, None) for name in names]
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


if __name__ == "__main__":
    imported: set[str] = set()
    atexit.register(leave, imported)  # as the first one: it is called last
    before = set(sys.modules)
    for name in SLOW:
        importlib.import_module(name)
    imported |= set(sys.modules) - before
    gc.collect()
    gc.freeze()  # no collection of a fork, nor its end, looks at these
    request, files = serve(socket.socket(fileno=int(sys.argv[1])))
    become(**request, fds=files)
