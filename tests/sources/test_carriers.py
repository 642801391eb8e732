"""One value has one id, whatever writer and format carry it.

Each carrier writes all values that it has a type for, alone and in lists, and
says which of them it changes itself.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import csv as pa_csv
from pyarrow import parquet as pq

from persia import errors
from persia.data import Files, Records, Schema, Table
from persia.data.kafka.values import Values, Written
from persia.datasets import value_hash
from tests.protobuf import compiled
from tests.sources.test_files import example, record
from tests.sources.values import REFUSED, VALUES, table_of

pandas = pytest.importorskip("pandas")

#: Opens what was written with a schema: a data set, or batches.
Open = Callable[[Schema], Any]

#: Writes a table of one row. It may leave out columns, and it may put others.
Carrier = Callable[[pa.Table, Path], tuple[Open, set[str]]]

CARRIERS: dict[str, Carrier] = {}


def carrier(write: Carrier) -> Carrier:
    CARRIERS[write.__name__] = write
    return write


def without(table: pa.Table, fails: Callable[[pa.Table], object]) -> pa.Table:
    """The columns that a writer takes, each tried alone."""
    found = []
    for name in table.column_names:
        try:
            fails(table.select([name]))
        except BaseException as error:  # of any writer; of Rust: a panic
            if isinstance(error, KeyboardInterrupt):
                raise
            continue
        found.append(name)
    return table.select(found)


def files(path: Path, table: pa.Table) -> tuple[Open, set[str]]:
    return lambda schema: Files(path, schema), set(table.column_names)


# ---- Arrow and Parquet of pyarrow


@carrier
def table_in_memory(table: pa.Table, _: Path) -> tuple[Open, set[str]]:
    return lambda s: Table(table, s, malformed_limit=1), set(
        table.column_names
    )


@carrier
def record_batches(table: pa.Table, _: Path) -> tuple[Open, set[str]]:
    batches = table.to_batches()
    return lambda s: Records(batches, s), set(table.column_names)


@carrier
def rows_of_python(table: pa.Table, _: Path) -> tuple[Open, set[str]]:
    rows = table.to_pylist()
    names = set(table.column_names)
    # Python's own times have no nanoseconds.
    return lambda s: Records(rows, s), names - {"map"}


@carrier
def lists_of_python(table: pa.Table, _: Path) -> tuple[Open, set[str]]:
    columns = {n: table.column(n).to_pylist() for n in table.column_names}
    return lambda s: Table(columns, s, malformed_limit=1), set(columns) - {
        "map"
    }


@carrier
def arrow_file(table: pa.Table, folder: Path) -> tuple[Open, set[str]]:
    path = folder / "a.arrow"
    with pa.ipc.new_file(path, table.schema) as out:
        out.write_table(table)
    return files(path, table)


@carrier
def arrow_stream(table: pa.Table, folder: Path) -> tuple[Open, set[str]]:
    path = folder / "a.arrows"
    with pa.ipc.new_stream(path, table.schema) as out:
        out.write_table(table)
    return files(path, table)


def _parquet(**options: Any) -> Carrier:
    def write(table: pa.Table, folder: Path) -> tuple[Open, set[str]]:
        def to(sink: Any, table: pa.Table) -> None:
            pq.write_table(table, sink, **options)

        table = without(table, lambda t: to(io.BytesIO(), t))
        to(folder / "a.parquet", table)
        return files(folder / "a.parquet", table)

    return write


CARRIERS |= {
    "parquet": _parquet(),
    "parquet_2": _parquet(
        data_page_version="2.0",
        use_dictionary=False,
        compression="zstd",
        use_compliant_nested_type=False,
    ),
    "parquet_without_types_of_arrow": _parquet(store_schema=False),
    "parquet_int96": _parquet(
        store_schema=False, use_deprecated_int96_timestamps=True
    ),
    "parquet_integer_decimals": _parquet(
        store_schema=False, store_decimal_as_integer=True
    ),
    "parquet_1": _parquet(
        store_schema=False, version="1.0", compression="gzip"
    ),
}


# ---- other libraries


@carrier
def polars_frame(table: pa.Table, _: Path) -> tuple[Open, set[str]]:
    polars = pytest.importorskip("polars")
    table = without(table, polars.from_arrow)
    frame = polars.from_arrow(table)
    return lambda s: Table(frame, s, malformed_limit=1), set(frame.columns)


def _polars(name: str, method: str, **options: Any) -> Carrier:
    def write(table: pa.Table, folder: Path) -> tuple[Open, set[str]]:
        polars = pytest.importorskip("polars")

        def to(sink: Any, table: pa.Table) -> None:
            getattr(polars.from_arrow(table), method)(sink, **options)

        table = without(table, lambda t: to(io.BytesIO(), t))
        to(folder / name, table)
        return files(folder / name, table)

    return write


CARRIERS |= {
    "polars_parquet": _polars("a.parquet", "write_parquet"),
    "polars_ipc": _polars("a.arrow", "write_ipc", compression="zstd"),
}


@carrier
def duckdb_parquet(table: pa.Table, folder: Path) -> tuple[Open, set[str]]:
    duckdb = pytest.importorskip("duckdb")
    path = folder / "a.parquet"

    def to(table: pa.Table) -> None:
        duckdb.from_arrow(table).write_parquet(str(path))

    table = without(table, to)
    to(table)
    # It has no fractions of a microsecond in times, and no wide decimals.
    return files(path, table)


@carrier
def duckdb_relation(table: pa.Table, _: Path) -> tuple[Open, set[str]]:
    duckdb = pytest.importorskip("duckdb")
    table = without(table, lambda t: duckdb.from_arrow(t).fetchall())
    relation = duckdb.from_arrow(table)
    return lambda s: Table(relation, s, malformed_limit=1), set(
        table.column_names
    )


@carrier
def pandas_frame(table: pa.Table, _: Path) -> tuple[Open, set[str]]:
    table = without(table, pa.Table.to_pandas)
    frame = table.to_pandas()
    # Maps are lists of pairs there.
    return lambda s: Table(frame, s, malformed_limit=1), set(frame) - {"map"}


@carrier
def pandas_of_arrow(table: pa.Table, _: Path) -> tuple[Open, set[str]]:
    def frame(table: pa.Table) -> Any:
        return table.to_pandas(types_mapper=pandas.ArrowDtype)

    table = without(table, frame)
    made = frame(table)
    return lambda s: Table(made, s, malformed_limit=1), set(made)


@carrier
def pandas_parquet(table: pa.Table, folder: Path) -> tuple[Open, set[str]]:
    def to(sink: Any, table: pa.Table) -> None:
        table.to_pandas().to_parquet(sink)

    table = without(table, lambda t: to(io.BytesIO(), t))
    to(folder / "a.parquet", table)
    opened, names = files(folder / "a.parquet", table)
    return opened, names - {"map"}


@carrier
def numpy_arrays(table: pa.Table, _: Path) -> tuple[Open, set[str]]:
    arrays = {
        name: table.column(name).to_numpy()
        for name in table.column_names
        if not name.endswith("_list") and name not in REFUSED
    }
    return lambda s: Table(arrays, s, malformed_limit=1), set(arrays)


@carrier
def tensors(table: pa.Table, _: Path) -> tuple[Open, set[str]]:
    torch = pytest.importorskip("torch")
    found = {}
    for name in table.column_names:
        kind = table.column(name).type
        if pa.types.is_integer(kind) or pa.types.is_floating(kind):
            found[name] = torch.tensor(table.column(name).to_numpy())
    return lambda s: Table(found, s, malformed_limit=1), set(found)


# ---- texts


def _plain(table: pa.Table) -> dict[str, Any]:
    """The values that JSON has a type for; others as the text that docs
    name."""
    row = {}
    for name in table.column_names:
        base = name.removesuffix("_list")
        if base in REFUSED:
            if base != "interval":
                row[name] = table.column(name)[0].as_py()
            continue
        kind = VALUES[base].array.type
        value: Any = VALUES[base].text
        if (
            pa.types.is_integer(kind)
            or pa.types.is_boolean(kind)
            or pa.types.is_float64(kind)
        ):
            value = VALUES[base].array[0].as_py()
        elif pa.types.is_null(kind):
            value = None
        row[name] = [value] if name.endswith("_list") else value
    if "map" in row:
        row["map"] = {"a": 1}
    return row


def _json(other: str) -> Carrier:
    def write(table: pa.Table, folder: Path) -> tuple[Open, set[str]]:
        row = _plain(table)
        path = folder / "a.jsonl"
        path.write_text(json.dumps(row, ensure_ascii=not other) + other)
        return lambda s: Files(path, s), set(row)

    return write


CARRIERS |= {
    "json_in_blocks": _json(""),
    "json_line_by_line": _json("\n[]\n"),
}


@carrier
def csv(table: pa.Table, folder: Path) -> tuple[Open, set[str]]:
    row = {n: [VALUES[n].text] for n in table.column_names if n in VALUES}
    pa_csv.write_csv(pa.table(row), folder / "a.csv")
    return lambda s: Files(folder / "a.csv", s), set(row) - {"missing"}


@carrier
def csv_of_types(table: pa.Table, folder: Path) -> tuple[Open, set[str]]:
    """As pandas writes them, with the types that a schema declares."""
    kinds = {}
    for name in table.column_names:
        kind = table.column(name).type
        for declared, test in (
            ("number", lambda k: pa.types.is_floating(k) and k != "halffloat"),
            ("number", pa.types.is_decimal),
            ("boolean", pa.types.is_boolean),
            ("time", pa.types.is_timestamp),
        ):
            if test(kind):
                kinds[name] = declared
    path = folder / "a.csv"
    table.select(list(kinds)).to_pandas().to_csv(path, index=False)

    def opened(schema: Schema) -> Any:
        columns = [
            {"column": c.column, "type": kinds[c.column], "hash": c.hash}
            for c in schema.categorical
        ]
        return Files(path, Schema(categorical=columns))

    return opened, set(kinds) - {"decimal256"}


# ---- messages and records


def _messages(form: str, values: list[bytes], **more: Any) -> Open:
    written = Written.checked(
        form, more.get("path"), more.get("message"), None
    )

    return lambda schema: _Messages(schema, written, values)


class _Messages:
    """What a reader of Kafka makes of messages."""

    def __init__(
        self, schema: Schema, written: Written, values: list[bytes]
    ) -> None:
        rows, wrong = Values(schema, written, False).rows(values)
        self.malformed = len(wrong)
        named = (*schema.categorical, *schema.multivalued)
        self._batches = rows and [rows.batch([c.feature for c in named])]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches or ())


@carrier
def kafka_json(table: pa.Table, _: Path) -> tuple[Open, set[str]]:
    row = _plain(table)
    framed = b"\0\0\0\0\1" + json.dumps(row).encode()
    return _messages("json", [framed]), set(row)


@carrier
def kafka_json_alone(table: pa.Table, _: Path) -> tuple[Open, set[str]]:
    row = _plain(table)
    return _messages("json", [json.dumps(row, indent=1).encode()]), set(row)


@carrier
def kafka_arrow(table: pa.Table, _: Path) -> tuple[Open, set[str]]:
    out = io.BytesIO()
    with pa.ipc.new_stream(out, table.schema) as stream:
        stream.write_table(table)
    return _messages("arrow", [out.getvalue()]), set(table.column_names)


def _avro_type(name: str, kind: pa.DataType) -> Any:
    """The type of Avro that holds a type of Arrow; None: there is none."""
    t = pa.types
    if t.is_list(kind):
        item = _avro_type(name, kind.value_type)
        return item and {"type": "array", "items": item}
    if t.is_null(kind):
        return "null"
    if t.is_timestamp(kind) and kind.unit != "s":
        unit = {"ms": "millis", "us": "micros", "ns": "nanos"}[kind.unit]
        local = "" if kind.tz else "local-"
        return {"type": "long", "logicalType": f"{local}timestamp-{unit}"}
    if t.is_decimal128(kind) or t.is_decimal256(kind):
        return {
            "type": "bytes",
            "logicalType": "decimal",
            "precision": kind.precision,
            "scale": kind.scale,
        }
    if t.is_map(kind):
        return {"type": "map", "values": "long"}
    if t.is_struct(kind):
        fields = [{"name": "a", "type": "long"}]
        return {"type": "record", "name": name, "fields": fields}
    if isinstance(kind, pa.UuidType):
        return {"type": "string", "logicalType": "uuid"}
    for test, made in (
        (t.is_boolean, "boolean"),
        (t.is_float32, "float"),
        (t.is_float64, "double"),
        (t.is_string, "string"),
        (t.is_binary, "bytes"),
        (t.is_date32, {"type": "int", "logicalType": "date"}),
        (
            lambda k: k == pa.time32("ms"),
            {"type": "int", "logicalType": "time-millis"},
        ),
        (
            lambda k: k == pa.time64("us"),
            {"type": "long", "logicalType": "time-micros"},
        ),
        (
            lambda k: k in (pa.int8(), pa.int16(), pa.int32(), pa.uint16()),
            "int",
        ),
        (lambda k: t.is_integer(k) and k != pa.uint64(), "long"),
    ):
        if test(kind):
            return made
    return None


@carrier
def kafka_avro(table: pa.Table, folder: Path) -> tuple[Open, set[str]]:
    fastavro = pytest.importorskip("fastavro")
    row, fields = {}, []
    for name in table.column_names:
        column = table.column(name)
        kind = _avro_type(name, column.type)
        if kind is None or name == "missing_list":
            continue
        stored = column
        if "timestamp-" in str(kind) and "decimal" not in str(kind):
            whole = pa.int64()
            stored = column.cast(
                pa.list_(whole) if name.endswith("_list") else whole
            )
        row[name] = stored[0].as_py()
        if name == "map":
            row[name] = {"a": 1}
        fields.append({"name": name, "type": kind})
    schema = {"type": "record", "name": "R", "fields": fields}
    path = folder / "r.avsc"
    path.write_text(json.dumps(schema))
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(schema), row)
    return _messages("avro", [out.getvalue()], path=path), set(row)


def _proto_type(kind: pa.DataType) -> str | None:
    t = pa.types
    for test, made in (
        (t.is_boolean, "bool"),
        (t.is_float32, "float"),
        (t.is_float64, "double"),
        (t.is_string, "string"),
        (t.is_binary, "bytes"),
        (t.is_timestamp, "google.protobuf.Timestamp"),
        (t.is_duration, "google.protobuf.Duration"),
        (lambda k: k == pa.uint64(), "uint64"),
        (lambda k: k == pa.uint32(), "fixed32"),
        (lambda k: k == pa.int64(), "sint64"),
        (lambda k: k == pa.int32(), "sfixed32"),
        (t.is_integer, "int32"),
        (lambda k: isinstance(k, pa.UuidType), "string"),
        (t.is_struct, "Inner"),
    ):
        if test(kind):
            return made
    return None


def _ticks(kind: pa.DataType, array: pa.Array) -> dict[str, int]:
    per = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[kind.unit]
    ticks = array.cast(pa.int64())[0].as_py()
    if pa.types.is_duration(kind):  # both numbers have the same sign
        sign = -1 if ticks < 0 else 1
        seconds, rest = divmod(abs(ticks), per)
        seconds, rest = sign * seconds, sign * rest
    else:
        seconds, rest = divmod(ticks, per)
    return {"seconds": seconds, "nanos": rest * (10**9 // per)}


@carrier
def kafka_protobuf(table: pa.Table, folder: Path) -> tuple[Open, set[str]]:
    fields, row = ["map<string, int64> map = 1;"], {"map": {"a": 1}}
    wrappers = {"double": "DoubleValue", "bool": "BoolValue"}
    for number, name in enumerate(table.column_names, 2):
        lists = name.endswith("_list")
        base = name.removesuffix("_list")
        array = REFUSED.get(base, None)
        array = VALUES[base].array if array is None else array
        if (kind := _proto_type(array.type)) is None:
            continue
        if kind in wrappers and lists:
            kind = f"google.protobuf.{wrappers[kind]}"
        if array.type == pa.uuid():
            value: Any = VALUES[base].text
        elif kind.startswith("google.protobuf.") and "Value" not in kind:
            value = _ticks(array.type, array)
        else:
            value = array[0].as_py()
            value = {"value": value} if "Value" in kind else value
        row[name] = [value] if lists else value
        rule = "repeated" if lists else "optional"
        fields.append(f"{rule} {kind} {name} = {number};")
    source = (
        'syntax = "proto3";\n'
        'import "google/protobuf/timestamp.proto";\n'
        'import "google/protobuf/duration.proto";\n'
        'import "google/protobuf/wrappers.proto";\n'
        "message Inner { int64 a = 1; }\n"
        "message Row {\n" + "\n".join(fields) + "\n}\n"
    )
    path, kind = compiled(source, "Row", folder)
    value = kind(**row).SerializeToString()
    opened = _messages("protobuf", [value], path=path, message="Row")
    return opened, set(row)


@carrier
def tfrecord(table: pa.Table, folder: Path) -> tuple[Open, set[str]]:
    row: dict[str, list[Any]] = {}
    for name in table.column_names:
        base = name.removesuffix("_list")
        if base in REFUSED:
            continue
        kind, value = VALUES[base].array.type, VALUES[base].array[0].as_py()
        t = pa.types
        whole = t.is_integer(kind) and kind != pa.uint64()
        if whole or t.is_float32(kind):
            row[name] = [value]
        elif t.is_string(kind):
            row[name] = [value.encode()]
        elif t.is_binary(kind):
            row[name] = [value]
        elif t.is_null(kind):
            row[name] = []
    path = folder / "a.tfrecord"
    path.write_bytes(record(example(**row)))
    return lambda s: Files(path, s), set(row)


# ---- the tests

# Of each type one that is no id as it is.
_NO_IDS = {"float32", "decimal", "true", "text", "uuid", "day"}
_NO_IDS |= {"instant_us_UTC", "binary"}

_DURATIONS = {f"duration_{unit}" for unit in ("s", "ms", "us", "ns")}

#: What writers change themselves, so that there is another value to read.
CHANGED: dict[str, set[str]] = {
    # Python's floats have 64 bits.
    "rows_of_python": {"float32"},
    "lists_of_python": {"float32"},
    # Parquet has no durations: they are integers, but for a note of Arrow.
    "parquet_without_types_of_arrow": _DURATIONS,
    "parquet_int96": _DURATIONS,
    "parquet_integer_decimals": _DURATIONS,
    "parquet_1": _DURATIONS,
    # Their days of 64 bits are instants, their UUIDs 16 bytes.
    "polars_frame": {"day_64", "uuid"},
    "polars_parquet": {"day_64", "uuid"},
    "polars_ipc": {"day_64", "uuid"},
    "numpy_arrays": {"day_64", "uuid"},
    # They are intervals, which have months.
    "duckdb_relation": _DURATIONS,
}


def ids_of(opened: Open, schema: Schema) -> dict[str, int | None]:
    """By column: the id of its only value. None: it is malformed."""
    batches = list(opened(schema))
    if not batches:
        return {}
    (batch,) = batches
    return {key: batch.ids[key][0].tolist()[0] for key in batch.ids}


def check(opened: Open, names: set[str], changed: set[str]) -> None:
    """Ids of all columns that were written, or that they are refused."""
    names = {n for n in names if n.removesuffix("_list") not in changed}
    names -= {"missing_list"}
    lists = sorted(n for n in names if n.endswith("_list"))
    alone = sorted(names & set(VALUES))
    assert len(alone) > 5, names
    schema = Schema(categorical=alone, multivalued=lists)
    found = ids_of(opened, schema)
    wrong = {}
    for name in (*alone, *lists):
        value = VALUES[name.removesuffix("_list")]
        if found[name] != value_hash(value.text):
            wrong[name] = value.text
    assert not wrong, wrong
    as_ids = {n for n in names & set(VALUES) if VALUES[n].id is not None}
    many = [f"{n}_list" for n in as_ids if f"{n}_list" in lists]
    schema = Schema(
        categorical=[{"column": n, "hash": False} for n in as_ids],
        multivalued=[{"column": n, "hash": False} for n in many],
    )
    found = ids_of(opened, schema)
    for name in (*as_ids, *many):
        if found[name] != VALUES[name.removesuffix("_list")].id:
            wrong[name] = "as it is"
    assert not wrong, wrong
    for name in sorted(names & set(REFUSED)):
        none(opened, {"column": name})
    for name in sorted(names & _NO_IDS):
        none(opened, {"column": name, "hash": False})


def none(opened: Open, column: dict[str, Any]) -> None:
    """A column whose only value is refused, or malformed."""
    try:
        data = opened(Schema(categorical=[column]))
        rows = sum(map(len, data))
    except errors.PersiaError:
        return
    assert rows == 0
    assert data.malformed, column


@pytest.mark.parametrize("name", CARRIERS)
def test_one_id(name: str, tmp_path: Path) -> None:
    values = {n: v.array for n, v in VALUES.items()}
    table = table_of(values | REFUSED)
    opened, names = CARRIERS[name](table, tmp_path)
    check(opened, names, CHANGED.get(name, set()))
