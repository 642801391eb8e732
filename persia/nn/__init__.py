"""Modules whose weights are tables: torchrec's collections, torch's own
``Embedding`` and ``EmbeddingBag``, what they return, and conversions.
"""

from persia.nn.collections import EmbeddingBagCollection, EmbeddingCollection
from persia.nn.conversion import convert, export_torch, from_torch
from persia.nn.embedding import Embedding, EmbeddingBag
from persia.nn.outputs import JaggedTensor, KeyedTensor, Sequences

__all__ = [
    "Embedding",
    "EmbeddingBag",
    "EmbeddingBagCollection",
    "EmbeddingCollection",
    "JaggedTensor",
    "KeyedTensor",
    "Sequences",
    "convert",
    "export_torch",
    "from_torch",
]
