"""The values of Kafka's messages as rows."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from persia import _core, errors
from persia.base.check import kind
from persia.data.batches.rows import Rows
from persia.data.formats.read_json import DEPTH, Objects
from persia.data.kafka.avro import Avro
from persia.data.kafka.protobuf import Protobuf
from persia.data.kafka.registry import Place
from persia.data.schema.canonical import HASH_VERSION
from persia.data.schema.encode import Encoder
from persia.data.schema.schema import Schema
from persia.data.table import check_columns

_FORMS = ("json", "arrow", "avro", "protobuf")

_FIRST = 100  # messages of which one has to fit the schema
_PREFIX = 5  # bytes
_ROWS = 10_000  # of which one has to have a field

# (what is wrong with a message, the rule that says so)
Odd = tuple[str, str]

# A table, and the message that each row is of.
_Read = tuple[pa.Table, np.ndarray[Any, np.dtype[np.int64]]]


class _Tombstone(ValueError):
    """A message that says that a key is gone."""


class WrongSchema(errors.SchemaMismatch):
    """No message fits, so it is the schema that is wrong."""


@dataclass(frozen=True)
class Written:
    """How messages are written: the arguments of :class:`Kafka`."""

    form: str
    schema: bytes | None
    path: str
    message: str | None
    registry: Place | None

    @classmethod
    def checked(
        cls,
        form: str,
        path: str | os.PathLike[str] | None,
        message: str | None,
        registry: Place | None,
    ) -> Written:
        if form not in _FORMS:
            raise errors.InvalidArgument(
                f"value is {form!r}, need one of {', '.join(_FORMS)}"
            )
        for name, given, forms in (
            ("value_schema", path, ("avro", "protobuf")),
            ("value_message", message, ("protobuf",)),
            ("value_registry", registry, ("avro",)),
        ):
            if given is not None and form not in forms:
                raise errors.InvalidArgument(
                    f"{name} goes with value="
                    f"{' or '.join(map(repr, forms))}, not {form!r}"
                )
        if form in ("json", "arrow"):
            return cls(form, None, "", None, None)
        need = "the file of their schema (.avsc, or a descriptor set)"
        if not isinstance(path, str | os.PathLike):
            kind("value_schema", path, (), need)
        assert path is not None
        if message is not None:
            kind("value_message", message, (str,), "the name of a message")
        if registry is not None:
            of = (str, os.PathLike, Mapping)
            kind("value_registry", registry, of, "a folder, a URL or a dict")
        try:
            with open(path, "rb") as file:
                text = file.read()
        except OSError as error:
            raise errors.InvalidArgument(
                f"value_schema is {os.fspath(path)!r}, need {need}: {error}"
            ) from None
        return cls(form, text, os.fspath(path), message, registry)

    def reader(
        self, names: Sequence[str], version: int = HASH_VERSION
    ) -> Avro | Protobuf | None:
        """What makes a row of a message; None: columns are made at once.

        Args:
            names: the fields that rows have.
            version: of the hash.

        Raises:
            InvalidArgument: a part of it does not exist.
            SchemaMismatch: the file is of other messages.
        """
        if self.schema is None:
            return None
        if self.form == "avro":
            return Avro(self.schema, self.path, names, self.registry)
        return Protobuf(self.schema, self.path, names, self.message, version)


class Values:
    """Makes rows of the messages of a block, as whole columns.

    Args:
        schema: with all that it measures known.
        written: how messages are written.
        patient: continue where none of the first messages fits the schema.
    """

    def __init__(
        self, schema: Schema, written: Written, patient: bool
    ) -> None:
        self._schema = schema
        self._encoder = Encoder(schema)
        self._names = sorted(schema.used_columns)
        self._objects = Objects(schema)
        self._reader = written.reader(self._names, schema.hash_version)
        if self._reader is not None:
            self._read = self._typed
        else:
            self._read = self._json if written.form == "json" else self._arrow
        self._patient = patient
        self._absent = set(self._names)  # fields that no message had
        self._rows = 0
        self._unfit: int | None = 0  # messages so far; None: one fitted

    def rows(
        self, values: Sequence[bytes | None]
    ) -> tuple[Rows | None, dict[int, Odd]]:
        """(the well-formed rows, what is wrong with which messages, and by
        which rule).

        Raises:
            SchemaMismatch: the schema is of other messages.
        """
        wrong: dict[int, Odd] = {}
        parts = self._parts(values, 0, wrong)
        rows = Rows.join(parts) if parts else None
        self._rows += 0 if rows is None else len(rows)
        if self._rows >= _ROWS and self._absent:
            raise WrongSchema(
                f"the first {self._rows} messages have no field "
                f"{sorted(self._absent)}; correct the schema"
            )
        return rows, dict(sorted(wrong.items()))

    def _parts(
        self, values: Sequence[bytes | None], first: int, wrong: dict[int, Odd]
    ) -> list[Rows]:
        """Rows of all messages; halves them where one spoils the others."""
        here: dict[int, Odd] = {}

        def report(row: int, text: str, rule: str) -> None:
            here.setdefault(first + int(owners[row]), (text, rule))

        try:
            table, owners = self._read(values, first, here)
            if not table.num_rows:
                self._count_unread(values, here.values())
                wrong.update(here)
                return []
            rows, _ = self._encoder.encode(table.select(self._names), report)
        except (WrongSchema, errors.Unavailable, errors.AccessDenied):
            raise
        except MemoryError:
            raise
        except Exception as error:  # a message never stops an iteration twice
            if len(values) == 1:
                text = str(error) or type(error).__name__
                wrong[first] = self._misfit(text), type(error).__name__
                return []
            half = len(values) // 2
            parts = self._parts(values[:half], first, wrong)
            return parts + self._parts(values[half:], first + half, wrong)
        wrong.update(here)
        self._unfit = None
        return [rows] if len(rows) else []

    def _count_unread(
        self, values: Sequence[bytes | None], texts: Iterable[Odd]
    ) -> None:
        """Counts messages of which none is written as ``value`` says."""
        texts = list(texts)
        if self._unfit is None or not texts:
            return
        self._unfit += sum(value is not None for value in values) - 1
        self._misfit(texts[-1][0])

    def _misfit(self, text: str) -> str:
        """Counts a message that does not fit the schema."""
        if self._unfit is not None:
            self._unfit += 1
            if self._unfit >= _FIRST and not self._patient:
                raise WrongSchema(
                    f"none of the first {self._unfit} messages fits the "
                    f"schema: {text}; correct the schema or value=, or pass "
                    "dead_letter= to leave them out"
                )
        return text

    # ---- JSON

    def _json(
        self, values: Sequence[bytes | None], first: int, wrong: dict[int, Odd]
    ) -> _Read:
        table, owners = self._all_json(values), np.arange(len(values))
        if table is None:
            table, owners, bad = self._objects.of_each(
                [value and bare(value) for value in values]
            )
            wrong.update({first + i: (text, rule) for i, text, rule in bad})
        self._absent -= {
            name
            for name in self._absent
            if table.column(name).null_count < table.num_rows
        }
        return table, owners

    def _all_json(self, values: Sequence[bytes | None]) -> pa.Table | None:
        """Objects, one a message; None where one is another thing."""
        whole = b"\n".join([value or b"" for value in values])
        if b"\0" in whole:  # which JSON has nowhere
            whole = b"\n".join([bare(v) if v else b"" for v in values])
        lines, deep, odd = _core.json_lines(whole, DEPTH)
        if lines != len(values) or deep or odd:
            return None
        table = self._objects.read(whole)
        if table is None or table.num_rows != lines:
            return None
        return table

    # ---- Avro, Protocol Buffers

    def _typed(
        self, values: Sequence[bytes | None], first: int, wrong: dict[int, Odd]
    ) -> _Read:
        assert self._reader is not None
        rows, found = [], []
        for i, value in enumerate(values):
            try:
                rows.append(self._reader.row(_given(value)))
                found.append(i)
            except ValueError as error:
                wrong[first + i] = str(error), "message"
        self._absent.clear()
        columns = {}
        for name in self._names if rows else ():
            column = [row[name] for row in rows]
            columns[name] = self._reader.column(name, column)
        return pa.table(columns), np.array(found, np.int64)

    # ---- Arrow

    def _arrow(
        self, values: Sequence[bytes | None], first: int, wrong: dict[int, Odd]
    ) -> _Read:
        tables, found = [], []
        for i, value in enumerate(values):
            try:
                table = pa.ipc.open_stream(_given(value)).read_all()
                table.validate(full=True)
                check_columns(self._schema, table.column_names, "the message")
            except errors.SchemaMismatch as error:
                wrong[first + i] = self._misfit(str(error)), "columns"
            except Exception as error:  # of pyarrow, of many kinds
                wrong[first + i] = f"no Arrow stream: {error}", "message"
            else:
                tables.append(table.select(self._names))
                found.append(i)
        self._absent.clear()
        if not tables:
            return pa.table({}), np.empty(0, np.int64)
        lengths = [table.num_rows for table in tables]
        owners = np.repeat(np.array(found, np.int64), lengths)
        whole = pa.concat_tables(tables, promote_options="permissive")
        return whole, owners


def _given(value: bytes | None) -> bytes:
    if value is None:
        raise _Tombstone("it has no value: a tombstone")
    return value


def bare(value: bytes) -> bytes:
    """JSON without the id of its schema, which Confluent's writers put before
    it: a zero and four bytes."""
    return value[_PREFIX:] if value[:1] == b"\0" else value
