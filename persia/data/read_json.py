"""JSON lines to tables: one object a line."""

from __future__ import annotations

import io
import json
from collections.abc import Generator, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import json as pa_json

from persia import errors
from persia.data.magic import check_text
from persia.data.paths import File
from persia.data.read_csv import Mark, Piece, Wrong
from persia.data.schema import Schema
from persia.data.table import of_dicts

__all__ = ["JSONReader"]

CHUNK_BYTES = 4 << 20
LINE_BYTES = 4 << 20  # a longer line is malformed

Ints = npt.NDArray[np.int64]


class JSONReader:
    """One file of JSON lines on its way to columns.

    Attributes:
        lines: lines so far, malformed ones included.
        position: bytes of the file read so far.
    """

    def __init__(
        self, file: File, schema: Schema, encoding: str | None
    ) -> None:
        self._file = file
        self._names = sorted(schema.used_columns)
        self._ids = {n for f in schema.features for n in f.columns}
        self._encoding = encoding
        self._seen: set[str] = set()
        self.lines = 0
        self.position = 0

    def where(self, line: int) -> str:
        """The place of a line in the file."""
        return f"{self._file.name}:{line + 1}"

    def tables(self, mark: Mark = (0, 0)) -> Generator[Piece, None, None]:
        """Pieces of the file: columns, the number of each line, what is wrong
        with other lines, and a mark before them. It begins at ``mark``."""
        self.lines, at = mark
        if at:  # its beginning was checked when it was read
            self._seen.update(self._names)
        with self._file.stream(self._encoding, lines=True) as stream:
            stream.skip(at)
            for chunk, end in _line_pieces(stream, self._file.name, at):
                self.position = stream.position
                yield *self._piece(chunk), mark
                mark = self.lines, end

    def _piece(self, chunk: bytes) -> tuple[pa.Table, Ints, Wrong]:
        first, n = self.lines, chunk.count(b"\n")
        n += not chunk.endswith(b"\n")
        wrong: Wrong = []
        numbers = np.arange(first, first + n)
        table = read_objects(chunk, self._ids)
        if table is None or table.num_rows != n:
            table, numbers = self._by_line(chunk, first, wrong)
        self.lines = first + n
        missing = set(self._names) - set(table.column_names)
        self._seen.update(set(self._names) - missing)
        if (never := sorted(missing - self._seen)) and table.num_rows:
            raise errors.SchemaMismatch(
                f"{self._file.name!r} has no field {never} in its first "
                f"{self.lines} lines; they have {table.column_names}"
            )
        for name in missing:
            nulls = pa.nulls(table.num_rows)
            table = table.append_column(name, nulls)
        return table.select(self._names), numbers, wrong

    def _by_line(
        self, chunk: bytes, first: int, wrong: Wrong
    ) -> tuple[pa.Table, Ints]:
        """A chunk with a line that is malformed, or with fields of several
        types."""
        rows: list[dict[str, Any]] = []
        numbers: list[int] = []
        for i, line in enumerate(chunk.split(b"\n")):
            if not line and i == chunk.count(b"\n"):
                break  # what follows the last line end
            try:
                row = object_of(line)
            except ValueError as error:
                text = f"no JSON object: {error}"
                wrong.append((first + i, text, "json"))
                continue
            rows.append({n: row.get(n) for n in self._names if n in row})
            numbers.append(first + i)
        return of_dicts(rows), np.array(numbers, np.int64)


def object_of(line: bytes) -> dict[str, Any]:
    if line.startswith(b"\0"):
        raise ValueError(f"it has more than {LINE_BYTES:,} bytes, the limit")
    if not line.strip():
        raise ValueError("the line is empty")
    row = json.loads(line.decode())  # UnicodeDecodeError is a ValueError
    if not isinstance(row, dict):
        raise ValueError(f"it is a {type(row).__name__}")
    return row


def read_objects(chunk: bytes, ids: set[str]) -> pa.Table | None:
    """The objects of a chunk; None if a line is no object, or a field has
    several types. Integers of fields in ``ids`` are exact."""

    def read(explicit: pa.Schema | None) -> pa.Table:
        return pa_json.read_json(
            io.BytesIO(chunk),
            read_options=pa_json.ReadOptions(
                use_threads=False, block_size=len(chunk) + 1
            ),
            parse_options=pa_json.ParseOptions(explicit_schema=explicit),
        )

    try:
        table = read(None)
        given = {
            f.name: kind
            for f in table.schema
            if (kind := _written(f.type)) != f.type
        }
        # pyarrow makes doubles of integers that have more than 64 bits.
        for name in ids & set(table.column_names):
            kind = _exact(table.column(name))
            if kind is not None:
                given[name] = kind
        if given:
            table = read(pa.schema(list(given.items())))
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return None
    return table


def _written(kind: pa.DataType) -> pa.DataType:
    """The type of values as they are written: texts that look like a time
    are texts, also in lists and objects."""
    if pa.types.is_timestamp(kind):
        return pa.string()
    if pa.types.is_list(kind):
        return pa.list_(_written(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([(f.name, _written(f.type)) for f in kind])
    return kind


def _exact(column: pa.ChunkedArray) -> pa.DataType | None:
    """The type to read a column of large numbers with; None: as it is."""
    kind, lists = column.type, pa.types.is_list(column.type)
    if lists:
        column, kind = pc.list_flatten(column), kind.value_type
    if not pa.types.is_floating(kind) or not len(column):
        return None
    if not (pc.max(pc.abs(column)).as_py() or 0) >= 2.0**53:
        return None
    exact = pa.decimal128(38, 0)  # of another number: read line by line
    return pa.list_(exact) if lists else exact


def _line_pieces(
    stream: Any, name: str, at: int = 0
) -> Iterator[tuple[bytes, int]]:
    """Text in pieces of whole lines, each with the byte that it ends at,
    from byte ``at`` on; a line that is too long has one zero byte."""
    tail, long, first = b"", False, at == 0
    while chunk := stream.read(CHUNK_BYTES):
        at += len(chunk)
        if first:
            chunk, first = chunk.removeprefix(b"\xef\xbb\xbf"), False
            _check(name, chunk)
        cut = chunk.rfind(b"\n") + 1
        if not cut:
            if not long:
                tail += chunk
                long = len(tail) > LINE_BYTES
                tail = b"\0" if long else tail
            continue
        if long:
            chunk = chunk[chunk.find(b"\n") :]
            cut, long = chunk.rfind(b"\n") + 1, False
        yield tail + chunk[:cut], at - (len(chunk) - cut)
        tail = chunk[cut:]
    if tail:
        yield tail, at


def _check(name: str, head: bytes) -> None:
    check_text(name, head, "JSON")
    if head.lstrip()[:1] == b"[":
        raise errors.SchemaMismatch(
            f"{name!r} is one JSON array; need JSON lines, an object a line "
            "(jq -c '.[]' makes them)"
        )


def first_rows(file: File, encoding: str | None) -> pa.Table:
    """The first lines, as columns of what they hold."""
    with file.stream(encoding) as stream:
        chunk, _ = next(_line_pieces(stream, file.name), (b"", 0))
    table = read_objects(chunk, set())
    if table is not None:
        return table
    rows = []
    for line in chunk.split(b"\n")[:10_000]:
        try:
            rows.append(object_of(line))
        except ValueError:
            continue
    return of_dicts(rows)
