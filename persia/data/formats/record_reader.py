"""What readers of records with named fields share."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from persia import errors
from persia.data.formats import read_csv
from persia.data.formats.paths import File
from persia.data.formats.read_csv import Mark, Wrong
from persia.data.schema.schema import Schema

_CHUNK_BYTES = 4 << 20

Ints = npt.NDArray[np.int64]
#: Columns, the number of each record, and what is wrong with others.
Piece = tuple[pa.Table, Ints, Wrong]


class RecordReader(ABC):
    """One file of records on its way to columns.

    Attributes:
        seen: the fields of the schema that it had so far.
        lines: records so far, malformed ones included.
        position: bytes of the file read so far.
    """

    def __init__(
        self, file: File, schema: Schema, encoding: str | None
    ) -> None:
        self._file = file
        self._names = sorted(schema.used_columns)
        self._encoding = encoding
        self.seen = Seen(self._names)
        self.lines = 0
        self.position = 0

    @abstractmethod
    def where(self, line: int) -> str:
        """The place of a record in the file."""

    @abstractmethod
    def _pieces(self, at: int) -> Iterator[tuple[Piece, int]]:
        """Pieces of the file from a byte on, each with the byte after it;
        counts their lines."""

    def tables(
        self, mark: Mark = (0, 0)
    ) -> Generator[read_csv.Piece, None, None]:
        """Pieces of the file, with a mark before each. It begins at
        ``mark``."""
        self.lines, at = mark
        if at:  # its beginning was checked when it was read
            self.seen.all()
        for piece, end in self._pieces(at):
            yield *piece, mark
            mark = self.lines, end


class Seen:
    """Which fields of a schema a source has had so far.

    A record may lack a field; one that no record of any file has is an error
    of the schema.

    Args:
        names: of the fields.

    Attributes:
        others: files to look into for a field that the first records lack.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._absent = set(names)
        self.others: Sequence[File] = ()

    def all(self) -> None:
        """No field is looked for any more."""
        self._absent.clear()

    def look(self, table: pa.Table, chunk: bytes | None, file: str) -> None:
        """Looks for fields in a piece that has rows.

        Args:
            table: with a column for each field; null where it is absent.
            chunk: the text of the piece, which may have nulls; None: the
                columns say it.
            file: its name.

        Raises:
            SchemaMismatch: no file has a field of the schema.
        """
        for name in sorted(self._absent):
            column = table.column(name)
            if column.null_count < len(column) or (
                chunk is not None and any(k in chunk for k in _keys(name))
            ):
                self._absent.discard(name)
        for name in sorted(self._absent):
            if not any(_occurs(other, name) for other in self.others):
                raise errors.SchemaMismatch(
                    f"{file!r} has no field {name!r}, and neither has any "
                    "other file of the data; correct the schema"
                )
        self._absent.clear()


def _keys(name: str) -> list[bytes]:
    """A field's name in quotes, as files have it; b"name" in TFRecords."""
    plain = json.dumps(name, ensure_ascii=False)
    written = {plain, json.dumps(name)}
    return [key.encode("utf-8", "surrogatepass") for key in written]


def _occurs(file: File, name: str) -> bool:
    """Whether the name of a field is anywhere in the text of a file."""
    keys = [key[1:-1] for key in _keys(name)]
    longest, tail = max(map(len, keys)), b""
    with file.stream() as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            text = tail + chunk
            if any(key in text for key in keys):
                return True
            tail = text[-longest:]
    return False
