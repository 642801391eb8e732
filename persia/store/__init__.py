"""The store: tables of rows, their configuration, lookups and updates."""

from persia.store.configs import EmbeddingBagConfig, EmbeddingConfig
from persia.store.store import Store

__all__ = ["EmbeddingBagConfig", "EmbeddingConfig", "Store"]
