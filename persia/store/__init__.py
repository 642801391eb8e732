"""The store: tables of rows, their configuration, lookups and updates.

:class:`persia.Store` is the way in; what its ``stats()`` returns is here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from persia.base.lazy import lazily

if TYPE_CHECKING:
    from persia.store.stats import (
        ClientStats,
        LookaheadStats,
        ServerStats,
        StoreStats,
        TableStats,
    )

__all__ = [
    "ClientStats",
    "LookaheadStats",
    "ServerStats",
    "StoreStats",
    "TableStats",
]

__getattr__, __dir__ = lazily(__name__, dict.fromkeys(__all__, "stats"))
