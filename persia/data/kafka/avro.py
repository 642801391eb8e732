"""Avro's messages as rows.

What an attacker may write is bounded by the schema: it does not contain
itself, and an item of an array takes bytes. fastavro reads values without
their logical types, which whole columns get later.
"""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Mapping, Sequence
from decimal import Context, Decimal
from functools import cache
from typing import Any

import pyarrow as pa

from persia import errors
from persia.data.kafka.brokers import library
from persia.data.kafka.columns import as_column
from persia.data.kafka.registry import Place, Registry

_LOGICAL = {
    ("int", "date"): pa.date32(),
    ("int", "time-millis"): pa.time32("ms"),
    ("long", "time-micros"): pa.time64("us"),
    **{
        ("long", f"{local}timestamp-{word}"): pa.timestamp(unit, zone)
        for word, unit in (("millis", "ms"), ("micros", "us"), ("nanos", "ns"))
        for local, zone in (("", "UTC"), ("local-", None))
    },
}
_DIGITS = 76  # of the longest decimal of Arrow
_DECIMAL_BYTES = 32


class Avro:
    """Reads messages.

    Args:
        text: the schema that rows have, JSON.
        where: it is from.
        names: the fields that rows have.
        registry: has the schemas that messages are written with, whose ids
            they begin with. None: they are written with ``text``.

    Raises:
        SchemaMismatch: it is no schema of rows with these fields.
    """

    def __init__(
        self,
        text: bytes,
        where: str,
        names: Sequence[str],
        registry: Place | None,
    ) -> None:
        self._read = library("fastavro").schemaless_reader
        self._names = names
        try:
            self._schema = _parse(text)
            self._types = _types(_fields(text), names)
        except ValueError as error:
            raise errors.SchemaMismatch(f"{where!r}: {error}") from None
        self._decimals = {
            name: one.scale
            for name, kind in self._types.items()
            if pa.types.is_decimal(one := _item(kind))
        }
        self._registry = None
        if registry is not None:
            self._registry = Registry(registry, "avsc", _parse)

    def row(self, value: bytes) -> dict[str, Any]:
        """The fields of a message.

        Raises:
            ValueError: it is malformed.
            Unavailable: the registry does not answer.
            AccessDenied: it refuses access.
        """
        data = io.BytesIO(value)
        writer, reader = self._schema, None
        if self._registry is not None:
            if len(value) < 5 or value[0]:
                raise ValueError("it does not begin with the id of a schema")
            (number,) = struct.unpack(">I", value[1:5])
            writer, reader = self._registry.schema(number), self._schema
            data.seek(5)
        try:
            row = self._read(data, writer, reader)
        except Exception as error:  # it has many of its own, and no base
            text = f"{type(error).__name__}: {error}"
            raise ValueError(f"no Avro of the schema: {text}") from None
        if left := len(value) - data.tell():
            framed = self._registry is None and value[:1] == b"\0"
            hint = "; if it begins with a schema's id, pass value_registry="
            raise ValueError(
                f"no Avro of the schema: {left} bytes are left"
                + (hint if framed else "")
            )
        for name, scale in self._decimals.items():
            row[name] = _decimal(row[name], scale)
        return {name: row[name] for name in self._names}

    def column(self, name: str, values: Sequence[Any]) -> pa.Array:
        """A field of many rows.

        Raises:
            DtypeError: they cannot be one column.
        """
        return as_column(name, values, self._types.get(name))


def _load(text: bytes) -> Any:
    """The JSON of a schema, parsed: names are full.

    Raises:
        ValueError: it is no schema.
    """
    try:
        return library("fastavro").parse_schema(json.loads(text))
    except (Exception, RecursionError) as error:
        raise ValueError(
            f"no Avro schema: {type(error).__name__}: {error}"
        ) from None


def field_names(text: bytes, where: str) -> list[str]:
    """The fields of a schema.

    Raises:
        SchemaMismatch: it is no schema of rows.
    """
    try:
        _parse(text)
        return list(_fields(text)[0])
    except ValueError as error:
        raise errors.SchemaMismatch(f"{where!r}: {error}") from None


def _parse(text: bytes) -> Any:
    """A schema that messages are read with.

    Raises:
        ValueError: it is none, or a message may be of any size or depth.
    """
    schema = _load(text)
    if not isinstance(schema, dict) or schema.get("type") != "record":
        raise ValueError("need a record as the Avro schema of a row")
    _bounded(schema, {}, frozenset())
    return _load(json.dumps(_plain(json.loads(text))).encode())


def _plain(node: Any) -> Any:
    """A schema without logical types."""
    if isinstance(node, list):
        return [_plain(one) for one in node]
    if isinstance(node, dict):
        return {
            key: part if key == "default" else _plain(part)
            for key, part in node.items()
            if key != "logicalType"
        }
    return node


def _bounded(
    node: Any, named: dict[str, bool], inside: frozenset[str]
) -> bool:
    """Whether values of a type take no bytes.

    Args:
        node: the type.
        named: the same of names so far.
        inside: the records around it.
    """
    if isinstance(node, list):
        for one in node:
            _bounded(one, named, inside)
        return False
    if isinstance(node, str):
        if node in inside:
            raise ValueError(f"record {node!r} contains itself, no row can")
        return named.get(node, node == "null")
    match node["type"]:
        case "record" | "error":
            inside |= {node["name"]}
            every = [
                _bounded(f["type"], named, inside) for f in node["fields"]
            ]
            named[node["name"]] = all(every)
            return all(every)
        case "array":
            if _bounded(node["items"], named, inside):
                raise ValueError("an array has items that take no bytes")
        case "map":
            _bounded(node["values"], named, inside)
        case "fixed":
            named[node["name"]] = node["size"] == 0
            return bool(node["size"] == 0)
        case other:
            return bool(other == "null")
    return False


# ---- columns


def _fields(text: bytes) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """(the types of a row's fields, types that have a name)."""
    named: dict[str, Any] = {}

    def collect(node: Any) -> None:
        if isinstance(node, list):
            for one in node:
                collect(one)
        elif isinstance(node, dict):
            if "name" in node and "type" in node:
                named[node["name"]] = node
            for key in ("type", "items", "values"):
                collect(node.get(key))
            for field in node.get("fields", ()):
                collect(field["type"])

    schema = _load(text)
    collect(schema)
    return {f["name"]: f["type"] for f in schema["fields"]}, named


def _types(
    fields: tuple[Mapping[str, Any], Mapping[str, Any]], names: Sequence[str]
) -> dict[str, Any]:
    """The types of columns, where the values do not show it."""
    of, named = fields
    if missing := sorted(set(names) - set(of)):
        raise ValueError(f"has no field {missing}; it has {list(of)}")
    kinds = {n: _kind(n, of[n], named, lists=True) for n in names}
    return {n: kind for n, kind in kinds.items() if kind is not None}


def _kind(name: str, node: Any, named: Mapping[str, Any], lists: bool) -> Any:
    """The type of a column; None: that of its values."""
    if isinstance(node, list):
        rest = [one for one in node if one != "null"]
        kinds = [_kind(name, one, named, lists) for one in rest]
        if len(kinds) == 1:
            return kinds[0]
        if set(kinds) - {None, pa.float32()}:
            raise ValueError(f"field {name!r} is a union with a logical type")
        return None
    if isinstance(node, str):
        node = named.get(node, {"type": node})
    kind = node["type"]
    if kind == "array" and lists:
        item = _kind(name, node["items"], named, lists=False)
        return None if item is None else pa.list_(item)
    if kind in ("record", "error", "array", "map"):
        raise ValueError(f"field {name!r} has the type {kind}, in no column")
    if kind == "float":
        return pa.float32()
    logical = node.get("logicalType")
    if logical == "decimal" and kind in ("bytes", "fixed"):
        digits = node["precision"]
        if digits > _DIGITS:
            raise ValueError(f"field {name!r} has {digits} digits")
        wide = pa.decimal256 if digits > 38 else pa.decimal128
        return wide(digits, node.get("scale", 0))
    if (kind, logical, node.get("size")) == ("fixed", "uuid", 16):
        return pa.uuid()
    return _LOGICAL.get((kind, logical))


def _item(kind: Any) -> Any:
    return kind.value_type if pa.types.is_list(kind) else kind


@cache
def _digits() -> Context:
    return Context(prec=_DIGITS + 2)


def _decimal(value: Any, scale: int) -> Any:
    if value is None:
        return None
    if isinstance(value, list):
        return [_decimal(one, scale) for one in value]
    if len(value) > _DECIMAL_BYTES:
        raise ValueError(f"a decimal has {len(value)} bytes")
    number = int.from_bytes(value, "big", signed=True)
    return Decimal(number).scaleb(-scale, _digits())
