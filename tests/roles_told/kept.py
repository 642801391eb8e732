"""Servers in the process of a test that keep their rows when they stop."""

from __future__ import annotations

import re
from pathlib import Path

from persia.distributed.server import ServeConfig, Server
from tests.system.shards import free_port

NAME = "job"


class Kept:
    """Shards of a namespace, whose rows are in a folder when they stop, and
    which begin with what is there.

    Attributes:
        addresses: of them.
        shards: that are there; None: one is away.
    """

    def __init__(
        self, n: int, folder: Path, namespace: str = "default"
    ) -> None:
        self.n = n
        self.namespace = namespace
        self._folder = folder
        self._ports = [free_port() for _ in range(n)]
        self.addresses = [f"127.0.0.1:{port}" for port in self._ports]
        self.shards: list[Server | None] = [None] * n
        for shard in range(n):
            self.start(shard)

    @property
    def text(self) -> str:
        """For ``Store(servers=...)``."""
        return ",".join(self.addresses)

    def start(self, shard: int) -> None:
        """With its rows."""
        one = Server(
            ServeConfig(
                shard=f"{shard}/{self.n}",
                port=self._ports[shard],
                threads=2,
                namespace=self.namespace,
                checkpoints=self._folder,
                restore=NAME,
                or_empty=True,
                save_on_exit=NAME,
                grace=5.0,
            )
        )
        one.restore()
        assert re.search(f":{self._ports[shard]}$", one.start())
        self.shards[shard] = one

    def stop(self, shard: int) -> None:
        """As SIGTERM does it."""
        one, self.shards[shard] = self.shards[shard], None
        assert one is not None
        one.stop()
        one.save(NAME)
        one.close()

    def kill(self, shard: int) -> None:
        """As kill -9 does it."""
        one, self.shards[shard] = self.shards[shard], None
        if one is not None:
            one.close()

    def close(self) -> None:
        """Ends all."""
        for shard in range(self.n):
            self.kill(shard)
