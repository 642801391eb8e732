"""Your data as it is: tables in memory, files, and any iterable of rows.

Each source is an iterable of :class:`persia.Batch`: it reads, hashes and
checks whole columns in background threads, by a :class:`Schema` that it
infers where none is given. Nothing here touches a table of embeddings: all of
it works in the forked workers of ``torch.utils.data.DataLoader`` (pass
``batch_size=None``), which then share the batches among them.
"""

from persia.data.base import Dataset
from persia.data.files import Files
from persia.data.hashing import hash_ids
from persia.data.infer import infer
from persia.data.kafka import Kafka
from persia.data.records import Records
from persia.data.schema import Schema
from persia.data.sender import Sender
from persia.data.table import Table

__all__ = [
    "Dataset",
    "Files",
    "Kafka",
    "Records",
    "Schema",
    "Sender",
    "Table",
    "hash_ids",
    "infer",
]
