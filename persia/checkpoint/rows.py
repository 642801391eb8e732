"""Reads row files of a checkpoint, without a store.

Nothing of torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from persia import _core
from persia.checkpoint.files import Found, Root, opened
from persia.checkpoint.manifest import RowFile, Table
from persia.errors import CorruptFile, StorageError

_FIELDS = "count", "seen"
_TYPES = {"U64": "<u8", "U32": "<u4", "U8": "u1", "F32": "<f4", "BF16": "<u2"}


class RowBlock(NamedTuple):
    """The rows of a file."""

    ids: npt.NDArray[np.int64]
    vectors: npt.NDArray[np.float32]
    state: npt.NDArray[np.float32]
    age: npt.NDArray[np.int64]
    """Updates of the table since the last one that touched the row."""
    fields: dict[str, npt.NDArray[Any]]
    """What the eviction of the table keeps of a row: "count", updates that
    touched it, float32; "seen", seconds since 1970 of the last, uint32."""


def read_rows(root: Root, found: Found, table: Table) -> Iterator[RowBlock]:
    """The rows of a table, a file at a time.

    Raises:
        CorruptFile: a file is not the one that was saved.
        StorageError: it cannot be read.
    """
    for entry in table.files:
        if not entry.rows:  # what admission has seen
            continue
        with root.reading(found, [entry]) as folder:
            columns = _columns(folder, entry)
            ids = columns["ids"].view(np.int64)
            clock = columns["clock"].astype(np.int64)
            # The file has the low 32 bits of the clock.
            age = (table.pushes[entry.shard] - clock) & 0xFFFFFFFF
            state = columns.get("state", np.empty((len(ids), 0), np.float32))
            fields = {n: columns[n] for n in _FIELDS if n in columns}
            vectors = _vectors(columns["vectors"])
            yield RowBlock(ids, vectors, state, age, fields)


def _vectors(raw: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    if raw.dtype == np.uint16:  # bfloat16: the high half of a float32
        return (raw.astype(np.uint32) << 16).view(np.float32)
    if raw.dtype == np.uint8:  # int8: a scale, then integers
        scale = np.ascontiguousarray(raw[:, :4]).view(np.float32)
        return raw[:, 4:].view(np.int8) * scale
    return raw.astype(np.float32, copy=False)


def _columns(folder: Path, entry: RowFile) -> dict[str, npt.NDArray[Any]]:
    path = folder / entry.name
    try:
        with opened(folder) as descriptor:
            found = _core.ckpt_file_crc(descriptor, entry.name)
        data = path.read_bytes()
    except OSError as e:
        why = os.strerror(e.errno or 0)
        raise StorageError(f"{path}: {why}") from None
    if found != (entry.bytes, int(entry.crc32c, 16)):
        raise CorruptFile(
            f"{path} is damaged: {found[0]:,} bytes with checksum "
            f"{found[1]:08x}, need {entry.bytes:,} with {entry.crc32c}"
        )
    try:
        begin = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:begin])
        return {
            name: np.frombuffer(
                data,
                _TYPES[at["dtype"]],
                int(np.prod(at["shape"])),
                begin + at["data_offsets"][0],
            ).reshape(at["shape"])
            for name, at in header.items()
            if name != "__metadata__"
        }
    except (ValueError, KeyError, TypeError, IndexError) as e:
        raise CorruptFile(f"{path} is no file of rows: {e!r}") from None
