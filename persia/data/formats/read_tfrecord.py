"""TFRecord files of tf.train.Example to tables, without TensorFlow.

A record is its length, a checksum of that, its bytes, and a checksum of
those: CRC-32C, masked. An Example is a map from names to lists of bytes,
floats or integers, in protocol buffers.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import numpy as np
import pyarrow as pa

from persia import _core, errors
from persia.base.requirements import library
from persia.data.formats.paths import File
from persia.data.formats.read_csv import Wrong
from persia.data.formats.record_reader import Ints, Piece, RecordReader
from persia.data.schema.canonical import HASH_VERSION
from persia.data.schema.hashing import Bad, as_array
from persia.data.schema.schema import Schema

PIECE_RECORDS = 8192
RECORD_BYTES = 64 << 20  # a longer record is a sign of damage

# Python's floats have 64 bits, those of Examples 32.
_FLOATS = {
    pa.float64(): pa.float32(),
    pa.list_(pa.float64()): pa.list_(pa.float32()),
}


class TFRecordReader(RecordReader):
    """One file of Examples on its way to columns."""

    def __init__(
        self, file: File, schema: Schema, encoding: str | None
    ) -> None:
        super().__init__(file, schema, encoding)
        self._version = schema.hash_version
        self._bags = {c.column for c in schema.bags}
        self._bags |= {c.column for bag in schema.bags for c in bag.aligned}

    def where(self, line: int) -> str:
        """The place of a record in the file."""
        return f"{self._file.name}: record {line}"

    def _pieces(self, at: int) -> Iterator[tuple[Piece, int]]:
        with self._file.stream() as stream:
            stream.skip(at)
            rows: list[dict[str, Any]] = []
            numbers: list[int] = []
            wrong: Wrong = []
            for record in _records(stream, self._file.name, self.lines):
                at += len(record) + 16
                try:
                    rows.append(_example(record))
                    numbers.append(self.lines)
                except ValueError as error:
                    text = f"no tf.train.Example: {error}"
                    wrong.append((self.lines, text, "example"))
                self.lines += 1
                if len(rows) + len(wrong) == PIECE_RECORDS:
                    self.position = stream.position
                    yield self._piece(rows, numbers, wrong), at
                    rows, numbers, wrong = [], [], []
            self.position = stream.position
            if rows or wrong:
                yield self._piece(rows, numbers, wrong), at

    def _piece(
        self, rows: list[dict[str, Any]], numbers: list[int], wrong: Wrong
    ) -> tuple[pa.Table, Ints, Wrong]:
        """Examples as columns, without those that have odd values."""
        bad: Bad = {}
        table = table_of(rows, self._names, self._bags, bad, self._version)
        found = np.array(numbers, np.int64)
        if rows:
            self.seen.look(table, None, self._file.name)
        if bad:
            wrong += [(numbers[i], *what) for i, what in bad.items()]
            good = np.ones(len(rows), bool)
            good[list(bad)] = False
            table, found = table.filter(pa.array(good)), found[good]
        return table, found, sorted(wrong)


def table_of(
    rows: list[dict[str, Any]],
    names: list[str],
    bags: set[str],
    bad: Bad | None = None,
    version: int = HASH_VERSION,
) -> pa.Table:
    """Examples as columns: lists, or the only value of each.

    Args:
        rows: of values by name.
        names: of the columns.
        bags: those of lists.
        bad: see :func:`persia.data.schema.hashing.as_arrays`.
        version: of the hash; in version 1 floats have 64 bits.
    """
    columns = {}
    for name in names:
        lists = [row.get(name) for row in rows]
        if name in bags:
            column = as_array(f"feature {name!r}", lists, bad)
        else:
            values = [v[0] if v else None for v in lists]
            column = as_array(f"feature {name!r}", values, bad)
        short = version > 1 and _FLOATS.get(column.type)
        columns[name] = column.cast(short) if short else column
    return pa.table(columns)


def first_rows(file: File, most: int) -> pa.Table:
    """The first records, as columns of what they hold."""
    rows: list[dict[str, Any]] = []
    with file.stream() as stream:
        for record in _records(stream, file.name):
            rows.append(_example(record))
            if len(rows) == min(most, PIECE_RECORDS):
                break
    names = list(dict.fromkeys(name for row in rows for name in row))
    bags = {n for n in names if any(len(row.get(n, ())) > 1 for row in rows)}
    table = table_of(rows, names, bags)
    for i, field in enumerate(table.schema):  # texts are bytes there
        kind = field.type
        text = pa.types.is_binary(kind)
        lists = pa.types.is_list(kind) and pa.types.is_binary(kind.value_type)
        if text or lists:
            to = pa.string() if text else pa.list_(pa.string())
            try:
                column = table.column(i).cast(to)
            except pa.ArrowInvalid:
                continue
            table = table.set_column(i, field.name, column)
    return table


def _records(stream: Any, name: str, number: int = 0) -> Iterator[bytes]:
    while head := stream.read(12):
        where = f"{name!r}: record {number}"
        if len(head) < 12:
            raise errors.CorruptFile(f"{where} is cut off")
        size, check = struct.unpack("<QI", head)
        if masked(head[:8]) != check:
            raise errors.CorruptFile(
                f"{where}: the checksum of its length is wrong: no TFRecord "
                "file, or a damaged one"
            )
        if size > RECORD_BYTES:
            raise errors.MalformedData(
                f"{where} has {size:,} bytes; the limit is {RECORD_BYTES:,}"
            )
        body = stream.read(size + 4)
        if len(body) < size + 4:
            raise errors.CorruptFile(f"{where} is cut off")
        if masked(body[:size]) != struct.unpack("<I", body[size:])[0]:
            raise errors.CorruptFile(f"{where}: its checksum is wrong")
        yield body[:size]
        number += 1


def masked(data: bytes) -> int:
    crc = _core.ckpt_crc(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


@cache
def _example_class() -> Any:
    """tf.train.Example, as TensorFlow's example.proto and feature.proto have
    it."""
    pb = partial(library, extra="tfrecord", what="TFRecord files")
    descriptors = pb("google.protobuf.descriptor_pb2")
    types = descriptors.FieldDescriptorProto
    file = descriptors.FileDescriptorProto(
        name="persia/example.proto", package="tensorflow", syntax="proto3"
    )

    def field(to: Any, number: int, name: str, kind: int, of: str = "") -> Any:
        made = to.field.add(name=name, number=number, type=kind)
        made.label = types.LABEL_OPTIONAL
        if of:
            made.type_name = f".tensorflow.{of}"
        return made

    feature = file.message_type.add(name="Feature")
    feature.oneof_decl.add(name="kind")
    for number, kind in enumerate(("Bytes", "Float", "Int64"), 1):
        values = file.message_type.add(name=f"{kind}List")
        of = getattr(types, f"TYPE_{kind.upper()}")
        field(values, 1, "value", of).label = types.LABEL_REPEATED
        name = f"{kind.lower()}_list"
        one = field(feature, number, name, types.TYPE_MESSAGE, f"{kind}List")
        one.oneof_index = 0
    features = file.message_type.add(name="Features")
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    field(entry, 1, "key", types.TYPE_STRING)
    field(entry, 2, "value", types.TYPE_MESSAGE, "Feature")
    of = "Features.FeatureEntry"
    every = field(features, 1, "feature", types.TYPE_MESSAGE, of)
    every.label = types.LABEL_REPEATED
    example = file.message_type.add(name="Example")
    field(example, 1, "features", types.TYPE_MESSAGE, "Features")
    pool = pb("google.protobuf.descriptor_pool").DescriptorPool()
    pool.Add(file)
    found = pool.FindMessageTypeByName("tensorflow.Example")
    return pb("google.protobuf.message_factory").GetMessageClass(found)


def _example(data: bytes) -> dict[str, list[Any]]:
    """The features of a tf.train.Example.

    Raises:
        ValueError: it is none.
    """
    try:
        example = _example_class().FromString(data)
    except library(
        "google.protobuf.message", "tfrecord", "TFRecord files"
    ).DecodeError as error:
        raise ValueError(str(error)) from None
    out: dict[str, list[Any]] = {}
    for name, feature in example.features.feature.items():
        kind = feature.WhichOneof("kind")
        out[name] = list(getattr(feature, kind).value) if kind else []
    return out
