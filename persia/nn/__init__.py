"""torch's ``Embedding`` and ``EmbeddingBag`` on tables, and what modules
return. The collections are in :mod:`persia` itself."""

from persia.nn.embedding import Embedding, EmbeddingBag
from persia.nn.outputs import JaggedTensor, KeyedTensor, Sequences
from persia.nn.views import TableView

__all__ = [
    "Embedding",
    "EmbeddingBag",
    "JaggedTensor",
    "KeyedTensor",
    "Sequences",
    "TableView",
]
