"""JSON lines to tables: one object a line."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import json as pa_json

from persia import _core, errors
from persia.data.formats.magic import check_text
from persia.data.formats.paths import File
from persia.data.formats.read_csv import Wrong
from persia.data.formats.record_reader import Ints, Piece, RecordReader
from persia.data.schema.hashing import Bad
from persia.data.schema.schema import Schema
from persia.data.table import of_dicts

CHUNK_BYTES = 4 << 20
LINE_BYTES = 4 << 20  # a longer line is malformed
DEPTH = 100  # brackets within each other; parsers crash at thousands
_SAMPLE = 256  # lines that the types of the first piece are guessed from


class JSONReader(RecordReader):
    """One file of JSON lines on its way to columns."""

    def __init__(
        self, file: File, schema: Schema, encoding: str | None
    ) -> None:
        super().__init__(file, schema, encoding)
        self._objects = Objects(schema)

    def where(self, line: int) -> str:
        """The place of a line in the file."""
        return f"{self._file.name}:{line + 1}"

    def _pieces(self, at: int) -> Iterator[tuple[Piece, int]]:
        with self._file.stream(self._encoding, lines=True) as stream:
            stream.skip(at)
            for chunk, end in _line_pieces(stream, self._file.name, at):
                self.position = stream.position
                yield self._piece(chunk), end

    def _piece(self, chunk: bytes) -> tuple[pa.Table, Ints, Wrong]:
        # Lines of spaces count, and are neither samples nor malformed.
        first = self.lines
        n, deep, odd = _core.json_lines(chunk, DEPTH)
        wrong: Wrong = []
        numbers = np.arange(first, first + n)
        table = None if deep or odd else self._objects.read(chunk)
        if table is None or table.num_rows != n:
            lines = chunk.split(b"\n")[:n]
            there = [i for i, line in enumerate(lines) if line.strip()]
            numbers = first + np.array(there, np.int64)
            if table is None or table.num_rows != len(there):
                table, kept, bad = self._objects.of_each(
                    [lines[i] for i in there]
                )
                wrong = [
                    (int(numbers[i]), text, kind) for i, text, kind in bad
                ]
                numbers = numbers[kept]
        self.lines = first + n
        if table.num_rows:
            self.seen.look(table, chunk, self._file.name)
        return table, numbers, wrong


class Objects:
    """Makes columns of JSON objects, of the fields of a schema only.

    Args:
        schema: whose fields are read.
    """

    def __init__(self, schema: Schema) -> None:
        self._names = sorted(schema.used_columns)
        self._ids = schema.columns_of_ids
        # The types of the piece before: those of the next one, most likely.
        self._kinds: dict[str, pa.DataType] | None = None

    def read(self, chunk: bytes) -> pa.Table | None:
        """Columns of lines that are objects of at most :data:`DEPTH`; None
        where a line is not, or a field has several types."""
        if self._kinds is None:
            lines = chunk.split(b"\n", _SAMPLE)[:_SAMPLE]
            table, _, _ = self.of_each([one for one in lines if one.strip()])
            self._learn(table)
        table = read_objects(chunk, self._ids, self._kinds)
        if table is None:
            table = read_objects(chunk, self._ids)
        if table is None:
            return None
        table = self._complete(table)
        self._learn(table)
        return table

    def of_each(
        self, values: Sequence[bytes | None]
    ) -> tuple[pa.Table, Ints, Wrong]:
        """Columns of objects, each by itself; which they are; and (which,
        what is wrong, its kind) of others."""
        rows: list[dict[str, Any]] = []
        kept: list[int] = []
        wrong: Wrong = []
        for i, value in enumerate(values):
            try:
                if value is None:
                    raise ValueError("it has no value: a tombstone")
                row = object_of(value)
            except ValueError as error:
                wrong.append((i, f"no JSON object: {error}", "json"))
                continue
            rows.append({n: row[n] for n in self._names if n in row})
            kept.append(i)
        bad: Bad = {}
        table = of_dicts(rows, self._names, bad)
        places = np.array(kept, np.int64)
        if bad:
            wrong += [(kept[i], *what) for i, what in bad.items()]
            good = np.ones(len(rows), bool)
            good[list(bad)] = False
            table, places = table.filter(pa.array(good)), places[good]
        if self._kinds is None or len(rows):
            self._learn(table)
        return table, places, sorted(wrong)

    def _complete(self, table: pa.Table) -> pa.Table:
        """With a column of nulls for each field that no object has."""
        for name in self._names:
            if name not in table.column_names:
                table = table.append_column(name, pa.nulls(table.num_rows))
        return table.select(self._names)

    def _learn(self, table: pa.Table) -> None:
        self._kinds = {f.name: _plain(f.type) for f in table.schema}


def _plain(kind: pa.DataType) -> pa.DataType:
    """The type that JSON's values are read as. Of values of several types
    none is known: null, so that any value is looked at again."""
    if pa.types.is_decimal(kind):
        return pa.float64()
    if pa.types.is_list(kind):
        return pa.list_(_plain(kind.value_type))
    return pa.null() if pa.types.is_binary(kind) else kind


def object_of(line: bytes) -> dict[str, Any]:
    """The object of a line.

    Raises:
        ValueError: it is none, or nested deeper than :data:`DEPTH`.
    """
    if line.startswith(b"\0"):
        raise ValueError(f"it has more than {LINE_BYTES:,} bytes, the limit")
    if not line.strip():
        raise ValueError("the line is empty")
    if _core.json_lines(line.replace(b"\n", b" "), DEPTH)[1]:
        raise ValueError(f"it has more than {DEPTH} brackets in each other")
    row = json.loads(line.decode())  # UnicodeDecodeError is a ValueError
    if not isinstance(row, dict):
        raise ValueError(f"it is a {type(row).__name__}")
    return row


def read_objects(
    chunk: bytes, ids: set[str], kinds: dict[str, pa.DataType] | None = None
) -> pa.Table | None:
    """The objects of a chunk; None if a line is no object, or a field has
    several types. Integers of fields in ``ids`` are exact.

    Args:
        chunk: lines of objects, not deeper than :data:`DEPTH`.
        ids: fields whose integers may have any size.
        kinds: the fields to read, with their types. None: all.
    """

    def read(explicit: dict[str, pa.DataType] | None) -> pa.Table:
        options = pa_json.ParseOptions()
        if explicit is not None:
            options = pa_json.ParseOptions(
                explicit_schema=pa.schema(list(explicit.items())),
                unexpected_field_behavior="ignore" if kinds else "infer",
            )
        return pa_json.read_json(
            io.BytesIO(chunk),
            read_options=pa_json.ReadOptions(
                use_threads=False, block_size=len(chunk) + 1
            ),
            parse_options=options,
        )

    try:
        table = read(kinds)
        given = kinds or {
            f.name: kind
            for f in table.schema
            if (kind := _written(f.type)) != f.type
        }
        # pyarrow makes doubles of integers that have more than 64 bits.
        exact = {
            name: kind
            for name in ids & set(table.column_names)
            if (kind := _exact(table.column(name))) is not None
        }
        if exact or (given and not kinds):
            table = read({**given, **exact})
    except (pa.ArrowException, ValueError):
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
    lines, deep, odd = _core.json_lines(chunk, DEPTH)
    table = None if deep or odd else read_objects(chunk, set())
    if table is not None and table.num_rows == lines:
        return table
    rows = []
    for line in chunk.split(b"\n")[:10_000]:
        try:
            rows.append(object_of(line))
        except ValueError:
            continue
    return of_dicts(rows, bad={})
