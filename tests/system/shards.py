"""Parameter servers as processes that tests kill, freeze and start again."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

from persia.torture.roles import Saver
from tests.system.processes import freeze
from tests.system.test_serve import Serving


def free_port() -> int:
    """A port that nobody has, outside the range that the system gives to
    whoever asks for any: a server that was killed finds it free again."""
    for port in random.sample(range(15000, 30000), 1000):
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no free port")


class Shards:
    """Shards 0 to n - 1 of a namespace, each a process with a fixed port.

    Args:
        n: how many.
        folder: of their checkpoints; None: they have none, and start again
            without rows.
        flags: more options of ``persia serve ps``.
    """

    def __init__(self, n: int, folder: Path | None, *flags: str) -> None:
        self.n = n
        self.folder = folder
        self._flags = list(flags)
        self.ports = [free_port() for _ in range(n)]
        self.processes: list[Serving | None] = [None] * n
        for shard in range(n):
            self.start(shard)

    @property
    def addresses(self) -> list[str]:
        return [f"127.0.0.1:{port}" for port in self.ports]

    @property
    def text(self) -> str:
        """For ``Store(servers=...)``."""
        return ",".join(self.addresses)

    def start(self, shard: int) -> Serving:
        """Starts it from the last snapshot, if there is one."""
        flags = ["--port", str(self.ports[shard]), "--threads", "2"]
        flags += ["--shard", f"{shard}/{self.n}", *self._flags]
        if self.folder is not None:
            flags += ["--checkpoints", str(self.folder)]
            flags += ["--restore", "job", "--or-empty"]
        process = Serving(*flags)
        if not process.address:
            output, messages = process.process.communicate(timeout=60)
            raise AssertionError(f"shard {shard}: {output}{messages}")
        self.processes[shard] = process
        return process

    def pid(self, shard: int) -> int:
        process = self.processes[shard]
        assert process is not None
        return process.process.pid

    def save(self, shard: int) -> int:
        """Takes a snapshot of this shard alone; how many rows."""
        assert self.folder is not None
        address = self.addresses[shard]
        saver = Saver(address, shard, self.n, self.folder)
        try:
            return saver.save("job")
        finally:
            saver.close()

    def kill(self, shard: int) -> None:
        """kill -9."""
        process = self.processes[shard]
        self.processes[shard] = None
        if process is not None:
            process.process.kill()
            process.process.communicate(timeout=60)

    @contextlib.contextmanager
    def frozen(self, shard: int) -> Iterator[None]:
        """It is there, and does nothing."""
        freeze(self.pid(shard))
        try:
            yield
        finally:
            if self.processes[shard] is not None:
                os.kill(self.pid(shard), signal.SIGCONT)

    def close(self) -> None:
        for shard in range(self.n):
            self.kill(shard)

    def __enter__(self) -> Shards:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
