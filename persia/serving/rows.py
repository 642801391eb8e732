"""The rows of an export: files made of a checkpoint, and mapped."""

from __future__ import annotations

import datetime
import json
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pydantic

from persia import _core, errors
from persia.checkpoint import files
from persia.checkpoint.files import Found, Root
from persia.checkpoint.manifest import Table
from persia.checkpoint.rows import RowBlock, read_rows

RowType = Literal["fp32", "fp16", "int8", "int4"]
#: Types of rows, by name.
TYPES: dict[RowType, int] = {
    "fp32": _core.ROWS_FP32,
    "fp16": _core.ROWS_FP16,
    "int8": _core.ROWS_INT8,
    "int4": _core.ROWS_INT4,
}
FORMAT = "persia-rows-1"
_PIECE = 1 << 14  # rows
_CHOSEN = npt.NDArray[np.bool_]


class Publish(pydantic.BaseModel):
    """Which rows an export has, of those that the table keeps. An id whose row
    is left out is, to who loads the export, an id without a row.

    Attributes:
        min_count: of at least so many updates, as the table counts them: LFU
            halves a count with time. Needs a table that counts them:
            one with ``eviction=persia.eviction.LFU(...)``, or a score of
            ``count``.
        last_updates: touched by one of the last so many updates of the table.
        last_seconds: touched in the last so many seconds before the
            checkpoint. Needs ``eviction=persia.eviction.TTL(...)`` in seconds.
        most_rows: at most so many of a table: those of the most updates, if
            the table counts them, else those touched last.
    """

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    min_count: float | None = pydantic.Field(default=None, gt=0)
    last_updates: int | None = pydantic.Field(default=None, ge=1)
    last_seconds: float | None = pydantic.Field(default=None, gt=0)
    most_rows: int | None = pydantic.Field(default=None, ge=1)

    def __init__(self, **options: Any) -> None:
        try:
            super().__init__(**options)
        except pydantic.ValidationError as error:
            wrong = [f"{e['loc'][0]}: {e['msg']}" for e in error.errors()]
            raise errors.InvalidArgument("; ".join(wrong)) from None

    @property
    def everything(self) -> bool:
        """Whether it leaves nothing out."""
        return self == Publish()

    def check(self, table: Table) -> None:
        """Raises InvalidArgument if the table does not keep what it asks."""
        counts = table.full in ("evict_lfu", "evict_score")
        if self.min_count is not None and not counts:
            raise errors.InvalidArgument(
                f"table {table.name!r} does not count the updates of a row: "
                "publish by `last_updates` or `most_rows`, or give the table "
                "eviction=persia.eviction.LFU(...)"
            )
        if self.last_seconds is not None and not table.evict_seconds:
            raise errors.InvalidArgument(
                f"table {table.name!r} does not keep when a row was touched: "
                "publish by `last_updates`, or give the table "
                "eviction=persia.eviction.TTL(...) in seconds"
            )

    def chosen(self, block: RowBlock, saved: float) -> _CHOSEN:
        """Which rows of a block may be published, except ``most_rows``."""
        out = np.ones(len(block.ids), bool)
        if self.min_count is not None:
            out &= block.fields["count"] >= self.min_count
        if self.last_updates is not None:
            out &= block.age < self.last_updates
        if self.last_seconds is not None:
            seen = block.fields["seen"].astype(np.int64)
            out &= saved - seen <= self.last_seconds
        return out


def _rank(block: RowBlock) -> npt.NDArray[np.float64]:
    """A number that is greater for rows to be published first."""
    found = block.fields.get("count")
    if found is not None:
        return found.astype(np.float64)
    return -block.age.astype(np.float64)


class _Selection:
    """The rows of a table that are published, in the order of their files.

    Where all are not, the files are read twice.
    """

    def __init__(
        self, root: Root, found: Found, table: Table, publish: Publish
    ) -> None:
        self._source = root, found, table
        self.rows = table.rows
        self._chosen: list[_CHOSEN] | None = None
        if publish.everything:
            return
        publish.check(table)
        saved = datetime.datetime.fromisoformat(found.manifest.saved)
        self._chosen, ranks = [], []
        for block in read_rows(*self._source):
            chosen = publish.chosen(block, saved.timestamp())
            self._chosen.append(chosen)
            ranks.append(np.where(chosen, _rank(block), -np.inf))
        every = np.concatenate([np.zeros(0), *ranks])
        if publish.most_rows is not None and publish.most_rows < len(every):
            first = np.argsort(-every, kind="stable")[: publish.most_rows]
            top = np.zeros(len(every), bool)
            top[first] = True
            ends = np.cumsum([len(one) for one in self._chosen])[:-1]
            for one, part in zip(
                self._chosen, np.split(top, ends), strict=True
            ):
                one &= part
        self.rows = int(sum(one.sum() for one in self._chosen))

    def __iter__(
        self,
    ) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]]:
        for i, block in enumerate(read_rows(*self._source)):
            ids, vectors = block.ids, block.vectors
            if self._chosen is not None:
                chosen = self._chosen[i]
                ids, vectors = ids[chosen], vectors[chosen]
            for at in range(0, len(ids), _PIECE):
                some = slice(at, at + _PIECE)
                yield ids[some], vectors[some]


def write_rows(
    folder: Path,
    name: str,
    kind: RowType,
    publish: Publish,
    source: tuple[Root, Found, Table],
) -> tuple[int, int]:
    """Writes the rows of a table of a checkpoint.

    Args:
        folder: of the export.
        name: of the new file.
        kind: of the rows.
        publish: which of them.
        source: the root of checkpoints, the checkpoint, and the table.

    Returns:
        Rows of the file, and the key of its index.

    Raises:
        InvalidArgument: a row has a value that this kind cannot hold; or
            ``publish`` asks for what the table does not keep.
        CorruptFile, StorageError: of the checkpoint.
    """
    table = source[2]
    selection = _Selection(*source, publish)
    key = secrets.randbits(64) | 1
    metadata = {
        "format": FORMAT,
        "table": table.name,
        "type": kind,
        "dim": str(table.dim),
        "key": str(key),
        "rows": str(selection.rows),
        "missing": table.missing,
    }
    with files.opened(folder) as descriptor:
        writer = _core.RowsWriter(
            descriptor,
            name,
            TYPES[kind],
            table.dim,
            key,
            selection.rows,
            json.dumps(metadata),
        )
        for ids, vectors in selection:
            writer.add(
                np.ascontiguousarray(ids),
                np.ascontiguousarray(vectors, np.float32),
            )
        writer.finish()
    return selection.rows, key


def open_rows(
    folder: Path, name: str, kind: RowType, key: int, absent: Table
) -> _core.RowsFile:
    """Maps a file of rows.

    Args:
        folder: of the export.
        name: of the file.
        kind: of its rows.
        key: of its index.
        absent: the table, whose initial vectors ids without a row have.

    Raises:
        CorruptFile: its header is damaged, or it is cut off.
        SchemaMismatch: it has other rows.
        StorageError: it cannot be read.
    """
    options: dict[str, Any] = absent.native()
    # Without rows nothing is evicted or admitted.
    options |= {"capacity": 0, "full": _core.FULL_RAISE}
    options |= {"evict_updates": 0, "evict_seconds": 0, "evict_score": ""}
    with files.opened(folder) as descriptor:
        return _core.RowsFile(
            descriptor, name, TYPES[kind], absent.dim, key, options
        )
