"""What a store counts."""

from __future__ import annotations

from functools import partial
from typing import Any

from persia import _core
from persia.base.patience import patiently
from persia.store.engine import HasEngine

__all__ = ["Stats"]


class Stats(HasEngine):
    """The counters of a :class:`persia.Store`."""

    @property
    def remote(self) -> bool:
        """Whether the tables are on servers or ranks."""
        return self._engine.connection.remote

    def stats(self) -> dict[str, Any]:
        """Counters of the store and, under "tables", of each table.

        The store's: updates (applied), pending (updates that threads of the
        store have yet to apply), updates_failed, held (gradients that wait
        for an update), memory and memory_limit (bytes), gradients_discarded,
        cuda_ids_copied.

        A table's: rows, bytes, row_bytes, pushes (updates that touched it),
        pulled and missed (ids looked up, on servers and ranks the distinct
        ones of each lookup; those without a row), created,
        evicted, refused, nonfinite (row gradients left out), candidates
        (slots that eviction looked at).

        "loader", of all passes of :class:`persia.DataLoader`: batches given
        out; forwards prefetched and (while a pass was open) not_prefetched;
        how often the loop waited for a permit; batches by their end if they
        were not trained: abandoned, skipped, read (no forward with gradient),
        dropped (the update failed); staleness: {k: batches looked up while k
        earlier ones were open}; prefetch: whether the latest pass does
        anything ahead, None before the first.

        "client", of tables that are not embedded: pulls and pushes (calls),
        ids and distinct (ids looked up), bytes_out and bytes_in, retries,
        duplicates (updates that a server had already), reconnects, lost and
        stale (updates); and under "servers" what each shard counted, by
        number.
        """
        tables, shards, used = self._shard_stats()
        _, failed, pending = self._engine.core.counts()
        updates = self._engine.core.updates()
        remote: dict[str, Any] = {}
        if self.remote:
            updates = shards[0]["updates"]
            remote["client"] = _core.cluster_counts(self._engine.handle)
            remote["servers"] = shards
        return {
            "updates": updates,
            "pending": pending,
            "updates_failed": failed,
            "held": self._engine.core.held(True),
            "memory": used,
            "memory_limit": self._engine.arguments.memory_limit,
            **self._engine.counts,
            "loader": {
                **_core.prefetch_stats(self._engine.handle),
                "prefetch": self._engine.prefetch,
            },
            **remote,
            "tables": tables,
        }

    def _ask_stats(self, shard: int) -> dict[str, Any]:
        ask = partial(self._engine.connection.ask, _core.cluster_stats, shard)
        return patiently(ask, self._engine.connection.timeout)

    def _shard_stats(
        self,
    ) -> tuple[dict[str, dict[str, int]], list[dict[str, Any]], int]:
        """Of tables, of shards, and the bytes of all tables."""
        tables = self._engine.tables.items()
        if not self.remote:
            used, _ = self._engine.core.memory()
            stats = {n: self._engine.core.stats(t.number) for n, t in tables}
            return stats, [], used
        shards = [
            self._ask_stats(i)
            for i in range(len(self._engine.connection.addresses))
        ]
        for shard, address in zip(
            shards, _core.ckpt_shards(self._engine.handle), strict=True
        ):
            shard["address"] = address
        used = sum(s["memory_used"] for s in shards)
        parts = [{t["name"]: t for t in s.pop("tables")} for s in shards]
        stats = {
            name: _sum_of([p[name] for p in parts if name in p])
            for name, _ in tables
        }
        return stats, shards, used


def _sum_of(shards: list[dict[str, Any]]) -> dict[str, int]:
    """The counters of a table. Its shards all hear of every update."""
    out = {k: sum(s[k] for s in shards) for k in _core.TABLE_COUNTERS}
    for name in ("pushes", "row_bytes"):
        out[name] = max((s[name] for s in shards), default=0)
    return out
