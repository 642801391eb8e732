"""Parameter servers in the process of a test."""

from __future__ import annotations

from typing import Any

from persia import _core

_LIMIT = 64 << 20


class Servers:
    """Shards 0 .. n-1 of a namespace, each behind a port of loopback.

    Attributes:
        shards: ``_core.Server`` objects.
        addresses: of them.
    """

    def __init__(
        self, n: int, namespace: str = "default", **more: Any
    ) -> None:
        self.n = n
        self.namespace = namespace
        self._security = more.pop("security", {})
        self._more = more
        self.shards = [self._make(i) for i in range(n)]
        self.addresses = [
            f"127.0.0.1:{self._start(s, 0)}" for s in self.shards
        ]

    def _make(self, shard: int) -> Any:
        arguments = {
            "threads": 1,
            "memory_limit": 0,
            "lineage": 0,
            "message_limit": _LIMIT,
            "checkpoints": None,
        }
        return _core.Server(
            namespace=self.namespace,
            shard=shard,
            shards=self.n,
            **(arguments | self._more),
        )

    def _start(self, shard: Any, port: int) -> int:
        port = shard.start(
            address=f"127.0.0.1:{port}",
            threads=2,
            calls=256,
            connections=256,
            message_limit=_LIMIT,
            security=self._security,
        )
        shard.health(True)
        return int(port)

    @property
    def text(self) -> str:
        """For ``Store(servers=...)``."""
        return ",".join(self.addresses)

    def kill(self, shard: int) -> None:
        """Ends a server and all that it has."""
        self.shards[shard].close()

    def restart(self, shard: int) -> None:
        """A new one in its place, without rows."""
        self.shards[shard] = self._make(shard)
        port = int(self.addresses[shard].rpartition(":")[2])
        self._start(self.shards[shard], port)

    def close(self) -> None:
        """Ends all."""
        for one in self.shards:
            one.close()
