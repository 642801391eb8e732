"""Your data as it is: tables in memory, files, and any iterable of rows.

Each source is an iterable of :class:`persia.Batch`: it reads, hashes and
checks whole columns in background threads, by a :class:`Schema` that it
infers where none is given. Nothing here touches a table of embeddings: all of
it works in the forked workers of ``torch.utils.data.DataLoader`` (pass
``batch_size=None``), which then share the batches among them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from persia.base.lazy import lazily

if TYPE_CHECKING:
    from persia.data.base import Dataset
    from persia.data.formats.files import Files
    from persia.data.kafka.source import Kafka
    from persia.data.records import Records
    from persia.data.schema.inference import infer
    from persia.data.schema.schema import Schema
    from persia.data.sender import Sender
    from persia.data.sorting import Prepared, prepare
    from persia.data.table import Table

__all__ = [
    "Dataset",
    "Files",
    "Kafka",
    "Prepared",
    "Records",
    "Schema",
    "Sender",
    "Table",
    "infer",
    "prepare",
]

__getattr__, __dir__ = lazily(
    __name__,
    {
        "Dataset": "base",
        "Files": "formats.files",
        "Kafka": "kafka.source",
        "Prepared": "sorting",
        "Records": "records",
        "Schema": "schema.schema",
        "Sender": "sender",
        "Table": "table",
        "infer": "schema.inference",
        "prepare": "sorting",
    },
)
