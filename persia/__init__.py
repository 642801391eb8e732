"""Persia: recommender embeddings for PyTorch that outgrow any fixed vocabulary."""

from persia import errors
from persia.jagged import Batch, JaggedBatch

__all__ = ["Batch", "JaggedBatch", "errors"]
