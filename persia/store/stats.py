"""What a store counts."""

from __future__ import annotations

from functools import partial
from typing import Any, NotRequired, TypedDict, cast

from persia import _core
from persia.base.patience import patiently
from persia.store.engine import HasEngine


class TableStats(TypedDict):
    """Counters of a table, of all shards together."""

    rows: int
    bytes: int
    """Of rows, index and the filter of sightings."""
    row_bytes: int
    """Of a row, without the index."""
    pushes: int
    """Updates that touched the table."""
    pulled: int
    """Ids looked up; on servers and ranks the distinct ones of a lookup."""
    missed: int
    """Those of them without a row."""
    created: int
    evicted: int
    refused: int
    """Unseen ids that got no row."""
    nonfinite: int
    """Gradients of rows left out."""
    candidates: int
    """Rows that eviction has looked at."""


class LookaheadStats(TypedDict):
    """Counters of the look-ahead, of all passes of
    :class:`persia.DataLoader`, in batches."""

    batches: int
    """Given out."""
    prefetched: int
    """Forwards that found their rows looked up."""
    not_prefetched: int
    """Forwards that did not, while a pass was open."""
    waited: int
    """How often the loop waited for a permit."""
    waited_ns: int
    """How long it waited for permits, lookups and updates."""
    abandoned: int
    skipped: int
    read: int
    """Without a forward with gradient."""
    dropped: int
    """Their update failed."""
    staleness: dict[int, int]
    """Batches by the number of earlier ones that were open at their
    lookup."""
    prefetch: bool | None
    """Whether the latest pass does anything ahead; None before the first."""


class ClientStats(TypedDict):
    """Counters of this store's calls to servers."""

    pulls: int
    pushes: int
    ids: int
    """Looked up."""
    distinct: int
    """Of them, those sent."""
    bytes_out: int
    bytes_in: int
    retries: int
    duplicates: int
    """Updates that a server had already."""
    reconnects: int
    lost: int
    """Updates that a server had acknowledged and has no longer."""
    stale: int
    """Updates of rows that were replaced."""


class ServerStats(TypedDict):
    """Counters of a shard of a server or rank, for all its clients."""

    address: str
    beside: bool
    """Its server has an earlier shard of the list, which says its memory."""
    boot: int
    """A number that it drew at its start."""
    lineage: int
    """Of its rows; a restore changes it."""
    restore: int
    """Of the restore that brought its rows, or 0."""
    uptime_ns: int
    updates: int
    step: int
    """The last synchronous step."""
    recovers: bool
    """It applies its log, and refuses other requests meanwhile."""
    done: int
    """Rows, and bytes of the log, that it has read so far."""
    total: int
    """Bytes of the log."""
    log_waits_ns: int
    """Nanoseconds for which the disk has not answered the log, or 0."""
    memory_used: int
    memory_limit: int
    """Bytes; without a limit 0."""
    pulls: int
    pushes: int
    parked: int
    """Lookups that wait for an update."""
    duplicates: int
    failed: int


class StoreStats(TypedDict):
    """What :meth:`persia.Store.stats` returns: a dict, with these keys."""

    updates: int
    """Applied."""
    pending: int
    """Updates that threads of the store have yet to apply."""
    updates_failed: int
    held: int
    """Gradients that wait for an update."""
    memory: int
    """Bytes of all tables."""
    memory_limit: int | None
    gradients_discarded: int
    cuda_ids_copied: int
    lookahead: LookaheadStats
    tables: dict[str, TableStats]
    client: NotRequired[ClientStats]
    """With tables on servers or ranks alone."""
    servers: NotRequired[list[ServerStats]]
    """By shard, with tables on servers or ranks alone."""


class Stats(HasEngine):
    """The counters of a :class:`persia.Store`."""

    @property
    def remote(self) -> bool:
        """Whether the tables are on servers or ranks."""
        return self._engine.connection.remote

    def stats(self) -> StoreStats:
        """Counters of the store, of its look-ahead and of each table.

        Returns:
            A dict with the keys of :class:`persia.store.StoreStats`.

        Raises:
            Unavailable, DeadlineExceeded: a server cannot be reached.
        """
        tables, shards, used = self._shard_stats()
        _, failed, pending = self._engine.core.counts()
        counts = self._engine.counts
        lookahead: Any = _core.prefetch_stats(self._engine.handle)
        lookahead["prefetch"] = self._engine.prefetch
        out = StoreStats(
            updates=self._engine.core.updates(),
            pending=pending,
            updates_failed=failed,
            held=self._engine.core.held(True),
            memory=used,
            memory_limit=self._engine.arguments.memory_limit,
            gradients_discarded=counts["gradients_discarded"],
            cuda_ids_copied=counts["cuda_ids_copied"],
            lookahead=lookahead,
            tables=tables,
        )
        if self.remote:
            client: Any = _core.cluster_counts(self._engine.handle)
            out["updates"] = shards[0]["updates"]
            out["client"] = client
            out["servers"] = shards
        return out

    def _ask_stats(self, shard: int) -> dict[str, Any]:
        ask = partial(self._engine.connection.ask, _core.cluster_stats, shard)
        return patiently(ask, self._engine.connection.timeout)

    def _shard_stats(
        self,
    ) -> tuple[dict[str, TableStats], list[ServerStats], int]:
        """Of tables, of shards, and the bytes of all tables."""
        tables = self._engine.tables.items()
        if not self.remote:
            used, _ = self._engine.core.memory()
            mine: Any = {
                name: self._engine.core.stats(t.number) for name, t in tables
            }
            return mine, [], used
        addresses = _core.ckpt_shards(self._engine.handle)
        shards: Any = [self._ask_stats(i) for i in range(len(addresses))]
        for shard, address in zip(shards, addresses, strict=True):
            shard["address"] = address
        used = sum(s["memory_used"] for s in shards if not s["beside"])
        parts = [{t["name"]: t for t in s.pop("tables")} for s in shards]
        stats = {
            name: _sum_of([p[name] for p in parts if name in p])
            for name, _ in tables
        }
        return stats, shards, used


def _sum_of(shards: list[dict[str, Any]]) -> TableStats:
    """The counters of a table. Its shards all count every update."""
    out: Any = {k: sum(s[k] for s in shards) for k in _core.TABLE_COUNTERS}
    for name in ("pushes", "row_bytes"):
        out[name] = max((s[name] for s in shards), default=0)
    return cast("TableStats", out)
