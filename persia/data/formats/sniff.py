"""What a file is: its format, its delimiter, and its first rows."""

from __future__ import annotations

import csv
import io
import re
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv as pa_csv

from persia import errors
from persia.data.formats.magic import (
    ARROW_STREAM,
    CONTAINER_BYTES,
    HEAD_BYTES,
    check_container,
    check_text,
)
from persia.data.formats.paths import File
from persia.data.formats.read_arrow import open_units, stream_tables
from persia.data.schema.schema import Schema

FORMATS = ("parquet", "csv", "json", "arrow", "arrows", "tfrecord")

_SUFFIXES = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
    ".arrows": "arrows",
    ".jsonl": "json",
    ".ndjson": "json",
    ".json": "json",
    ".tfrecord": "tfrecord",
    ".tfrecords": "tfrecord",
}
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", re.IGNORECASE)
_SAMPLE_BYTES = 8 << 20
_SAMPLE_ROWS = 100_000
_LINES = 20  # in which quotes are looked at


def format_of(file: File) -> str:
    """The format of a file, by its name and its first bytes."""
    if file.size:
        with file.open() as raw:
            check_container(file.name, raw.read(CONTAINER_BYTES))
    with file.stream() as stream:
        head = stream.read(HEAD_BYTES) if file.size is not None else b""
    if head.startswith(b"PAR1"):
        return "parquet"
    if head.startswith(b"ARROW1"):
        return "arrow"
    if head.startswith(ARROW_STREAM):
        return "arrows"
    named = _SUFFIXES.get(file.suffix)
    if named in ("parquet", "arrow") and file.size is not None:
        raise errors.CorruptFile(
            f"{file.name!r} is no {named.capitalize()} file, whatever its "
            "name says: it "
            + (f"begins with {bytes(head)!r}" if head else "is empty")
        )
    if named:
        return named
    return "json" if head.lstrip()[:1] == b"{" else "csv"


def with_delimiter(
    file: File, schema: Schema | None, encoding: str | None, guess: bool
) -> Schema | None:
    """The schema with the file's delimiter, where it does not say one: a tab
    in TSV, else what the first line has, if a guess is wanted."""
    if schema is None or "delimiter" in schema.model_fields_set:
        return schema
    found = "\t" if file.suffix in (".tsv", ".tab") else None
    if not found:
        if not guess or file.size is None:  # a pipe is read once
            return schema
        found = _delimiter(_head(file, encoding, 1 << 16), schema.quote)
    return schema.model_copy(update={"delimiter": found})


def _head(file: File, encoding: str | None, size: int) -> bytes:
    with file.stream(encoding) as stream:
        return bytes(stream.read(size)).removeprefix(b"\xef\xbb\xbf")


def _delimiter(head: bytes, quote: str | None = '"') -> str:
    """What divides lines into fields, the same number in each, by the reader
    of the files; a comma if nothing does."""
    text = head.decode("utf-8", "replace")
    lines, head = text.split("\n")[:_LINES], text.encode()
    whole = head[: head.rfind(b"\n") + 1] or head
    best = (0.0, 0, 0, ",")
    for mark in ",\t;|":
        first = _fields(lines[0], mark, quote)
        if len(first) > 1:
            # A quote within a field is one that begins elsewhere.
            fields = [f for line in lines for f in _fields(line, mark, quote)]
            odd = sum(quote in field for field in fields) if quote else 0
            share = _share(whole, mark, quote)
            best = max(best, (share, -odd, len(first), mark))
    return best[3]


def _fields(line: str, mark: str, quote: str | None) -> list[str]:
    if quote is None:
        return line.split(mark)
    try:
        return next(csv.reader([line], delimiter=mark, quotechar=quote), [])
    except csv.Error:
        return []


def _share(text: bytes, mark: str, quote: str | None) -> float:
    """The share of lines that have as many fields as the first one, in
    hundredths."""
    bad: list[Any] = []

    def skip(row: Any) -> str:
        bad.append(row.number)
        return "skip"

    try:
        table = pa_csv.read_csv(
            io.BytesIO(text),
            read_options=pa_csv.ReadOptions(
                use_threads=False,
                block_size=len(text) + 1,
                autogenerate_column_names=True,
            ),
            parse_options=pa_csv.ParseOptions(
                delimiter=mark,
                quote_char=quote or False,
                newlines_in_values=quote is not None,
                invalid_row_handler=skip,
            ),
            convert_options=pa_csv.ConvertOptions(
                check_utf8=False,
                include_columns=["f0"],
                column_types={"f0": pa.binary()},
            ),
        )
    except pa.ArrowException:
        return 0.0
    good = int(table.num_rows)
    return round(good / (good + len(bad) or 1), 2)


def sample(
    file: File, format: str, schema: Schema | None, encoding: str | None
) -> pa.Table:
    """The first rows of a file, with types; it may have none.

    Raises:
        SchemaMismatch: it has a column twice, or no header.
    """
    if format in ("parquet", "arrow"):
        table = _first_group(file, format)
    elif format == "arrows":
        table = _first_batches(file)
    elif format == "csv":
        table = _csv(file, schema, encoding)
    else:
        table = _records(file, format, encoding)
    names = table.column_names
    if twice := sorted({n for n in names if names.count(n) > 1}):
        raise errors.SchemaMismatch(
            f"{file.name!r} has several columns {twice}; if its first line is "
            "no header, pass a schema with header: false and columns"
        )
    # A slice of a table without columns has rows.
    return table.slice(0, _SAMPLE_ROWS) if table.num_rows else table


def _first_batches(file: File) -> pa.Table:
    with file.stream() as stream:
        parts, rows = [], 0
        for part in stream_tables(stream, file.name):
            parts.append(part)
            rows += part.num_rows
            if rows >= _SAMPLE_ROWS:
                break
        return pa.Table.from_batches(parts) if parts else pa.table({})


def _first_group(file: File, format: str) -> pa.Table:
    with open_units(file, format) as opened:
        parts, rows = [], 0
        for group in range(len(opened.groups)):
            for part in opened.tables(group, opened.names, 0):
                if isinstance(part, pa.RecordBatch):
                    part = pa.Table.from_batches([part])
                parts.append(part)
                rows += part.num_rows
                if rows >= _SAMPLE_ROWS:
                    return pa.concat_tables(parts)
        return pa.concat_tables(parts) if parts else pa.table({})


def has_spaces(file: File, encoding: str | None) -> bool:
    """Whether the names in a header have spaces around them."""
    head = _head(file, encoding, 1 << 16)
    names = head.partition(b"\n")[0].rstrip(b"\r").decode("utf-8", "replace")
    return any(n != n.strip(" ") for n in names.split(_delimiter(head)))


def _stripped(table: pa.Table) -> pa.Table:
    """Without the spaces around names and texts, if names have any."""
    names = [name.strip(" \t") for name in table.column_names]
    if names == table.column_names:
        return table
    columns = [
        pc.utf8_trim(column, " \t")
        if pa.types.is_string(column.type)
        else column
        for column in table.columns
    ]
    return pa.table(columns, names)


def _csv(file: File, schema: Schema | None, encoding: str | None) -> pa.Table:
    head = _head(file, encoding, _SAMPLE_BYTES)
    if len(head) == _SAMPLE_BYTES:
        head = head[: head.rfind(b"\n") + 1]
    if not head:
        return pa.table({})
    check_text(file.name, head, "CSV")
    # Bytes that are no UTF-8 would make a column one of bytes.
    head = head.decode("utf-8", "replace").encode()
    delimiter = schema.delimiter if schema else _delimiter(head)
    names = schema.columns if schema and schema.header is False else None
    missing = schema.missing if schema else Schema.missing_texts()
    try:
        table = pa_csv.read_csv(
            io.BytesIO(head),
            read_options=pa_csv.ReadOptions(
                use_threads=False,
                block_size=len(head) + 1,
                column_names=names,
            ),
            parse_options=pa_csv.ParseOptions(
                delimiter=delimiter,
                quote_char=(schema.quote or False) if schema else '"',
                newlines_in_values=True,
                invalid_row_handler=lambda row: "skip",
            ),
            convert_options=pa_csv.ConvertOptions(
                strings_can_be_null=True,
                null_values=missing,
            ),
        )
    except pa.ArrowInvalid as error:
        if "Empty CSV" in str(error):  # a header alone
            return pa.table({})
        raise errors.MalformedData(f"{file.name!r}: {error}") from error
    if names is None:
        _check_header(file.name, table.column_names)
    return _stripped(table)


def _check_header(name: str, names: list[str]) -> None:
    """Raises if a header looks like a row: numbers that are not 0, 1, 2, ...
    (those pandas writes)."""
    numbers = [n for n in names if _NUMBER.fullmatch(n.strip())]
    first = int(numbers[0]) if numbers and numbers[0].isdigit() else 0
    counted = [str(first + i) for i in range(len(numbers))]
    if numbers != counted:
        raise errors.SchemaMismatch(
            f"{name!r} has the columns {numbers} by its header; if its first "
            "line is no header, pass a schema with header: false and columns"
        )


def _records(file: File, format: str, encoding: str | None) -> pa.Table:
    from persia.data.formats.read_json import first_rows as of_json
    from persia.data.formats.read_tfrecord import first_rows as of_tfrecord

    if format == "json":
        return of_json(file, encoding)
    return of_tfrecord(file, _SAMPLE_ROWS)
