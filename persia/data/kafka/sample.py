"""The first messages of topics as a table, to infer a schema from."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from typing import Any

import pyarrow as pa

from persia import errors
from persia.data.formats.read_json import object_of
from persia.data.kafka.avro import Avro
from persia.data.kafka.avro import field_names as avro_names
from persia.data.kafka.brokers import Brokers, settings
from persia.data.kafka.consumer import Reader
from persia.data.kafka.protobuf import Protobuf
from persia.data.kafka.protobuf import field_names as protobuf_names
from persia.data.kafka.registry import Place
from persia.data.kafka.values import Written, bare
from persia.data.table import of_dicts

_BLOCK = 1000  # messages of a partition at a time


def sample_topics(
    brokers: str,
    topics: Sequence[str],
    *,
    rows: int = 10_000,
    value: str = "json",
    value_schema: str | os.PathLike[str] | None = None,
    value_message: str | None = None,
    value_registry: Place | None = None,
    timeout: float = 60.0,
    config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
) -> pa.Table:
    """The oldest messages of topics; those that are malformed are left out.

    Args:
        brokers: "host:port" of some brokers, with commas between them.
        topics: their names.
        rows: messages at most.

    The others are as of :class:`persia.data.Kafka`.

    Raises:
        SchemaMismatch: no message is written as ``value`` says.
        StorageError: there is no such topic.
        Unavailable, AccessDenied: as of :class:`persia.data.Kafka`.
    """
    written = Written.checked(
        value, value_schema, value_message, value_registry
    )
    reader = Reader(
        Brokers(brokers, "persia-schema", settings(config), timeout),
        topics,
        _BLOCK,
        since=None,
        ends=True,
        whole=False,
        strict=False,
        stop=threading.Event(),
    )
    values: list[bytes] = []
    with closing(reader.blocks(0, 1, None)) as blocks:
        for messages, _ in blocks:
            given = (message.value() for message in messages)
            values += [one for one in given if one is not None]
            if len(values) >= rows:
                break
    table, wrong = _table(values[:rows], written)
    if not table.num_rows:
        raise errors.SchemaMismatch(
            f"Kafka at {brokers}, topics {list(topics)}: none of "
            f"{len(values):,} messages is {value} to infer a schema from"
            + (f": {wrong}" if wrong else "")
        )
    return table


def _table(values: Sequence[bytes], written: Written) -> tuple[pa.Table, str]:
    """(the rows of messages, what is wrong with the last of the others)."""
    reader, wrong = _typed(written), ""
    read = _reader(written) if reader is None else reader.row
    rows: list[Any] = []
    for value in values:
        try:
            rows.append(read(value))
        except (ValueError, pa.ArrowException, OSError) as error:
            wrong = str(error)
    if not rows:
        return pa.table({}), wrong
    if written.form == "arrow":
        return pa.concat_tables(rows, promote_options="permissive"), wrong
    if reader is None:
        return of_dicts(rows), wrong
    columns = {n: reader.column(n, [row[n] for row in rows]) for n in rows[0]}
    return pa.table(columns), wrong


def _reader(written: Written) -> Any:
    """What makes a row, or rows, of a message."""
    if written.form == "json":
        return lambda value: object_of(bare(value))
    return lambda value: pa.ipc.open_stream(value).read_all()


def _typed(written: Written) -> Avro | Protobuf | None:
    """What reads the fields that can be columns; None: there are no types."""
    if written.schema is None:
        return None
    if written.form == "avro":
        names = avro_names(written.schema, written.path)
    else:
        names = protobuf_names(written.schema, written.path, written.message)
    usable = []
    for name in names:  # others cannot be columns
        with suppress(errors.SchemaMismatch):
            written.reader([name])
            usable.append(name)
    return written.reader(usable)
