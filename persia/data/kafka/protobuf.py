"""Messages of Protocol Buffers as rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pyarrow as pa

from persia import errors
from persia.data.kafka.brokers import library
from persia.data.kafka.columns import as_column, of_nanos

# Seconds that they may have: of the years 1 to 9999, and of 10,000 years.
_TIMES = {
    "google.protobuf.Timestamp": (-62_135_596_800, 253_402_300_799),
    "google.protobuf.Duration": (-315_576_000_000, 315_576_000_000),
}
_NS = 10**9
_WRAPPED = {
    f"google.protobuf.{name}Value"
    for name in (
        *("Bool", "Bytes", "Double", "Float", "String"),
        *("Int32", "Int64", "UInt32", "UInt64"),
    )
}


class Protobuf:
    """Reads messages.

    Args:
        data: a descriptor set, as of protoc --include_imports.
        where: it is from.
        names: the fields that rows have.
        message: the full name of their type. None: the only one of the last
            file.
        version: of the hash; in version 1 times are cut to microseconds.

    Raises:
        InvalidArgument: there is no such type, or several to choose from.
        SchemaMismatch: it is no descriptor set, or of other messages.
    """

    def __init__(
        self,
        data: bytes,
        where: str,
        names: Sequence[str],
        message: str | None,
        version: int,
    ) -> None:
        self._version = version
        kind = _find(data, where, message)
        self._class = library(
            "google.protobuf.message_factory"
        ).GetMessageClass(kind)
        self._error = library("google.protobuf.message").DecodeError
        self._indexes = _indexes(kind)
        fields = {field.name: field for field in kind.fields}
        if missing := sorted(set(names) - set(fields)):
            raise errors.SchemaMismatch(
                f"{where!r}: message {kind.full_name} has no field {missing};"
                f" it has {list(fields)}"
            )
        self._fields = {n: _reader(fields[n], where) for n in names}
        self._types = {
            n: kind for n in names if (kind := _type(fields[n])) is not None
        }
        self._times = {n for n in names if _is_time(fields[n])}

    def row(self, value: bytes) -> dict[str, Any]:
        """The fields of a message.

        Raises:
            ValueError: it is malformed.
        """
        # No message begins with 0, the number of no field.
        if value[:1] == b"\0":
            value = self._unframed(value)
        try:
            message = self._class.FromString(value)
        except self._error as error:
            raise ValueError(f"no message of the schema: {error}") from None
        return {n: read(message) for n, read in self._fields.items()}

    def column(self, name: str, values: Sequence[Any]) -> pa.Array:
        """A field of many rows.

        Raises:
            DtypeError: they cannot be one column.
        """
        known = self._types.get(name)
        if name in self._times:
            values, known = of_nanos(values, known, self._version == 1)
        return as_column(name, values, known)

    def _unframed(self, value: bytes) -> bytes:
        """What follows the id of the schema and the place of the type."""
        count, at = _number(value, 5)
        indexes = []
        for _ in range(count):
            index, at = _number(value, at)
            indexes.append(index)
        if (indexes or [0]) != self._indexes:
            raise ValueError(
                f"it is of the message type {indexes or [0]} of its file, "
                f"need {self._indexes}"
            )
        return value[at:]


def field_names(data: bytes, where: str, message: str | None) -> list[str]:
    """The fields of a message; its arguments are those of the class."""
    return [field.name for field in _find(data, where, message).fields]


def _find(data: bytes, where: str, message: str | None) -> Any:
    """The descriptor of a type."""
    try:
        every = library("google.protobuf.descriptor_pb2").FileDescriptorSet
        files = every.FromString(data).file
        pool = library("google.protobuf.descriptor_pool").DescriptorPool()
        for file in files:
            pool.Add(file)
        found = [pool.FindFileByName(file.name) for file in files]
    except Exception as error:  # of upb: TypeError, DecodeError, KeyError
        raise errors.SchemaMismatch(
            f"{where!r} is no descriptor set with all that it imports: "
            f"{error}; protoc --include_imports --descriptor_set_out makes one"
        ) from None
    types = list(found[-1].message_types_by_name.values()) if found else []
    if message is None and len(types) == 1:
        return types[0]
    try:
        if message is not None:
            return pool.FindMessageTypeByName(message)
    except KeyError:
        pass
    raise errors.InvalidArgument(
        f"value_message is {message!r}, need a message of {where!r}, such as "
        f"{[kind.full_name for kind in types]}"
    )


def _indexes(kind: Any) -> list[int]:
    """Where a type is in its file, within other types."""
    outer = kind.containing_type
    if outer is None:
        names = list(kind.file.message_types_by_name)
        return [names.index(kind.name)]
    names = [one.name for one in outer.nested_types]
    return [*_indexes(outer), names.index(kind.name)]


def _number(value: bytes, at: int) -> tuple[int, int]:
    """(a signed number of at most five bytes, where it ends)."""
    bits = 0
    for shift in range(0, 35, 7):
        if at >= len(value):
            break
        byte, at = value[at], at + 1
        bits |= (byte & 127) << shift
        if byte < 128:
            return (bits >> 1) ^ -(bits & 1), at
    raise ValueError("what follows the id of its schema is damaged")


def _reader(field: Any, where: str) -> Callable[[Any], Any]:
    """Reads a field of a message as a value of a column."""
    name = field.name
    convert: Callable[[Any], Any] | None = None
    if field.message_type is not None:
        kind = field.message_type.full_name
        if kind in _TIMES:
            convert = partial(_nanos, *_TIMES[kind])
        elif kind in _WRAPPED:
            convert = _unwrapped
        else:
            raise errors.SchemaMismatch(
                f"{where!r}: field {name!r} has the type {kind}, which no "
                "column can hold"
            )
    elif field.enum_type is not None:
        names = {
            n: v.name for n, v in field.enum_type.values_by_number.items()
        }

        def convert(value: int) -> Any:
            return names.get(value, str(value))

    if field.is_repeated:
        if convert is None:
            return lambda message: list(getattr(message, name))
        return lambda message: [convert(v) for v in getattr(message, name)]
    present = field.has_presence

    def read(message: Any) -> Any:
        if present and not message.HasField(name):
            return None
        value = getattr(message, name)
        return value if convert is None else convert(value)

    return read


def _nanos(first: int, last: int, time: Any) -> int:
    if not first <= time.seconds <= last or abs(time.nanos) >= _NS:
        raise ValueError(f"no time: {time.seconds} s and {time.nanos} ns")
    return int(time.seconds * _NS + time.nanos)


def _unwrapped(message: Any) -> Any:
    return message.value


def _is_time(field: Any) -> bool:
    inner = field.message_type
    return inner is not None and inner.full_name in _TIMES


def _type(field: Any) -> Any:
    """The type of a column; None: that of its values."""
    kind, inner = None, field.message_type
    value = field if inner is None else inner.fields_by_name.get("value")
    if _is_time(field):
        instant = inner.name == "Timestamp"
        kind = pa.timestamp("ns", "UTC") if instant else pa.duration("ns")
    elif value is not None and value.type == value.TYPE_FLOAT:
        kind = pa.float32()
    return pa.list_(kind) if kind is not None and field.is_repeated else kind
