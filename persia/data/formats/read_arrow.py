"""Parquet and Arrow IPC files: row groups and record batches to tables."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import parquet as pq

from persia import errors
from persia.data.boundary import is_of_storage
from persia.data.formats.parquet_types import (
    as_interval,
    instants,
    int96,
    intervals,
)
from persia.data.formats.paths import File, unread
from persia.data.formats.read_csv import Mark, Piece
from persia.data.schema.canonical import HASH_VERSION
from persia.data.schema.schema import Schema
from persia.data.table import check_columns
from persia.redaction import clean

_PIECE_ROWS = 1 << 16
_CODE_BYTES = 8  # a text takes 4 and its characters
_GROUP_BYTES = 256 << 20  # a larger row group is read in pieces


class ParquetReader:
    """An open Parquet file.

    Args:
        file: its name.
        source: its bytes.
        codes: read texts that repeat as dictionaries, which need one hash
            for each of their values.
        version: of the hash; in version 1 values have the types that pyarrow
            gives them.
    """

    def __init__(
        self,
        file: File,
        source: Any,
        codes: bool = False,
        version: int = HASH_VERSION,
    ) -> None:
        self.name = file.name
        with reading(file.name, "Parquet"):
            self._file = pq.ParquetFile(source, pre_buffer=True)
            meta = self._file.metadata
            if codes and (names := _repeated(meta)):
                self._file = pq.ParquetFile(
                    source,
                    metadata=meta,
                    pre_buffer=True,
                    read_dictionary=names,
                )
            self._intervals: dict[str, str] = {}
            self._int96: set[str] = set()
            if version > 1:
                self._intervals = intervals(self._file)
                self._micros = pq.ParquetFile(
                    source, metadata=meta, coerce_int96_timestamp_unit="us"
                )
                self._int96 = int96(
                    self._file.schema_arrow, self._micros.schema_arrow
                )
        self.names = self._file.schema_arrow.names
        self.groups = [
            meta.row_group(i).num_rows for i in range(meta.num_row_groups)
        ]

    def tables(
        self, group: int, columns: Sequence[str], first: int
    ) -> Iterator[pa.Table | pa.RecordBatch]:
        """A row group from a row on, in pieces."""
        with reading(self.name, "Parquet"):
            twice = [name for name in columns if name in self._int96]
            others: Iterator[Any] = itertools.repeat(None)
            if twice:
                others = self._pieces(self._micros, group, twice, first)
            pieces = self._pieces(self._file, group, columns, first)
            for piece, other in zip(pieces, others, strict=False):
                yield self._typed(piece, other)

    def _pieces(
        self, file: Any, group: int, columns: Sequence[str], first: int
    ) -> Iterator[pa.Table | pa.RecordBatch]:
        """A row group from a row on, as pyarrow reads it."""
        size = file.metadata.row_group(group).total_byte_size
        if size <= _GROUP_BYTES:
            table = file.read_row_group(group, columns=columns)
            for at in range(first, table.num_rows, _PIECE_ROWS):
                yield table.slice(at, _PIECE_ROWS)
            return
        for batch in file.iter_batches(
            _PIECE_ROWS, row_groups=[group], columns=columns
        ):
            if first < batch.num_rows:
                yield batch.slice(first)
            first = max(0, first - batch.num_rows)

    def _typed(self, piece: Any, micros: Any) -> pa.Table | pa.RecordBatch:
        """A piece with its values as what they are."""
        for at, name in enumerate(piece.schema.names):
            column = piece.column(at)
            if name in self._int96:
                what = f"{self.name!r}: column {name!r}"
                column = instants(column, micros.column(name), what)
            elif name in self._intervals:
                column = as_interval(column, self._intervals[name])
            else:
                continue
            piece = piece.set_column(at, name, column)
        return piece


def _repeated(meta: Any) -> list[str]:
    """The texts that take few bytes a value: numbers of a dictionary. A
    dictionary made of texts that differ would cost more than it saves."""
    if not meta.num_row_groups:
        return []
    group = meta.row_group(0)
    columns = [group.column(i) for i in range(group.num_columns)]
    return [
        c.path_in_schema
        for c in columns
        if c.physical_type == "BYTE_ARRAY"
        and "." not in c.path_in_schema
        and c.has_dictionary_page
        and c.total_uncompressed_size < _CODE_BYTES * c.num_values
    ]


class ArrowReader:
    """An open Arrow IPC (Feather) file."""

    def __init__(self, file: File, source: Any) -> None:
        self.name = file.name
        with reading(file.name, "Arrow"):
            self._file = pa.ipc.open_file(source)
            self.names = self._file.schema.names
            self.groups = [
                self._file.get_batch(i).num_rows
                for i in range(self._file.num_record_batches)
            ]

    def tables(
        self, group: int, columns: Sequence[str], first: int
    ) -> Iterator[pa.Table | pa.RecordBatch]:
        """A record batch from a row on, in pieces."""
        with reading(self.name, "Arrow"):
            batch = self._file.get_batch(group).select(columns)
            batch.validate(full=True)  # offsets may point anywhere
        for at in range(first, batch.num_rows, _PIECE_ROWS):
            yield batch.slice(at, _PIECE_ROWS)


class ArrowStreamReader:
    """One file in the stream format of Arrow IPC, read from its beginning.

    Attributes:
        lines: rows so far.
        position: bytes of the file read so far.
    """

    def __init__(
        self, file: File, schema: Schema, encoding: str | None
    ) -> None:
        self._file = file
        self._schema = schema
        self.lines = 0
        self.position = 0

    def where(self, line: int) -> str:
        """The place of a row in the file."""
        return f"{self._file.name}: row {line}"

    def tables(self, mark: Mark = (0, 0)) -> Generator[Piece, None, None]:
        """Pieces of the file, and the number of each row; it has no marks."""
        columns = sorted(self._schema.used_columns)
        with self._file.stream() as stream:
            for batch in stream_tables(stream, self._file.name):
                names = batch.schema.names
                check_columns(self._schema, names, repr(self._file.name))
                batch = batch.select(columns)
                self.position = stream.position
                for at in range(0, batch.num_rows, _PIECE_ROWS):
                    part = batch.slice(at, _PIECE_ROWS)
                    numbers = self.lines + np.arange(part.num_rows)
                    self.lines += part.num_rows
                    yield part, numbers, [], mark


def stream_tables(stream: Any, name: str) -> Iterator[pa.RecordBatch]:
    """The record batches of a file in the stream format."""
    with reading(name, "Arrow"):
        for batch in pa.ipc.open_stream(stream):
            batch.validate(full=True)
            yield batch


@contextlib.contextmanager
def reading(name: str, kind: str) -> Iterator[None]:
    """Errors of pyarrow as those of a damaged file."""
    try:
        yield
    except errors.PersiaError:
        raise
    except (OSError, pa.ArrowException) as error:
        if is_of_storage(error):
            raise errors.StorageError(
                f"cannot read {name!r}: {error}"
            ) from clean(error)
        text = (str(error) or type(error).__name__).splitlines()[0]
        raise errors.CorruptFile(
            f"{name!r} is no {kind} file, or damaged or cut off: {text}"
        ) from clean(error)
    except ValueError as error:
        raise unread(name, error) from clean(error)


@contextlib.contextmanager
def open_units(
    file: File, kind: str, codes: bool = False, version: int = HASH_VERSION
) -> Iterator[ParquetReader | ArrowReader]:
    """A file whose parts are known without reading it."""
    if file.compression:
        raise errors.InvalidArgument(
            f"{file.name!r}: a {kind} file that is compressed as a whole "
            "cannot be read in parts; decompress it (its columns may be "
            "compressed)"
        )
    with file.open() as source:
        if kind == "parquet":
            yield ParquetReader(file, source, codes, version)
        else:
            yield ArrowReader(file, source)
