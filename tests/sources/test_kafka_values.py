"""Avro and Protocol Buffers in Kafka, written by their own libraries."""

from __future__ import annotations

import io
import json
import pickle
import struct
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime
from decimal import Decimal
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from persia import errors
from persia.data import Kafka, Schema
from persia.data.kafka.sample import sample_topics
from persia.data.kafka.values import Values, Written
from persia.datasets import value_hash
from persia.train.config import resolve
from persia.train.sources import open_data
from tests.kafka import Cluster, cluster
from tests.sources.test_table import same

kafka = pytest.importorskip(
    "confluent_kafka", reason="pip install 'persia[kafka]'"
)
fastavro = pytest.importorskip("fastavro", reason="persia[kafka]")
pytest.importorskip("google.protobuf", reason="persia[kafka]")

__all__ = ["cluster"]

SCHEMA = Schema(
    label="y",
    dense=["x", "f"],
    categorical=["c", "n", "r", "e", "b", "ok", "maybe"],
    multivalued=["tags", "floats"],
    timestamp="t",
)
DAY = datetime(2026, 11, 24, 10, 0, 0, 123000, UTC)


def rows(n: int) -> list[dict[str, Any]]:
    return [
        {
            "y": i % 2,
            "x": i * 0.5,
            "f": i / 10,
            "c": f"ä{i * 7 % 13}",
            "n": (1 << 60) + i,
            "r": i / 10,
            "e": ("red", "green")[i % 2],
            "b": b"blob%d" % i,
            "ok": i % 3 == 0,
            "maybe": i if i % 4 else None,
            "tags": [f"t{j}" for j in range(i % 4)],
            "floats": [j / 10 for j in range(i % 3)],
            "t": datetime.fromtimestamp(DAY.timestamp() + i, UTC),
        }
        for i in range(n)
    ]


def texts(table: list[dict[str, Any]]) -> list[bytes]:
    """The rows as JSON has them."""

    def text(value: Any) -> str:
        return (
            value.decode() if isinstance(value, bytes) else value.isoformat()
        )

    return [json.dumps(row, default=text).encode() for row in table]


def record(*fields: tuple[str, Any], **more: Any) -> dict[str, Any]:
    named = [{"name": name, "type": kind} for name, kind in fields]
    return {"type": "record", "name": "Click", "fields": named} | more


AVRO = record(
    ("y", "int"),
    ("x", "double"),
    ("f", "float"),
    ("c", "string"),
    ("n", "long"),
    ("r", "float"),
    ("e", {"type": "enum", "name": "E", "symbols": ["red", "green"]}),
    ("b", "bytes"),
    ("ok", "boolean"),
    ("maybe", ["null", "long"]),
    ("tags", {"type": "array", "items": "string"}),
    ("floats", ["null", {"type": "array", "items": "float"}]),
    ("t", {"type": "long", "logicalType": "timestamp-millis"}),
    namespace="shop",
)
PROTO = """
syntax = "proto3";
package shop;
import "google/protobuf/timestamp.proto";
import "google/protobuf/wrappers.proto";
enum E { red = 0; green = 1; }
message Other { message Inner { string c = 1; } }
message Click {
  int32 y = 1; double x = 2; float f = 3; string c = 4; sint64 n = 5;
  float r = 6; E e = 7; bytes b = 8; bool ok = 9; optional int64 maybe = 10;
  repeated string tags = 11; repeated float floats = 12;
  google.protobuf.Timestamp t = 13;
  google.protobuf.FloatValue wrapped = 14; Other other = 15;
  map<string, string> map = 16; repeated E colours = 17;
}
"""


def zigzag(n: int) -> bytes:
    """A long of Avro."""
    n, out = (n << 1) ^ (n >> 63), b""
    while n > 127:
        n, out = n >> 7, out + bytes([n & 127 | 128])
    return out + bytes([n])


def avro(schema: Any, table: list[dict[str, Any]]) -> list[bytes]:
    out = []
    for row in table:
        data = io.BytesIO()
        fastavro.schemaless_writer(data, fastavro.parse_schema(schema), row)
        out.append(data.getvalue())
    return out


@pytest.fixture
def avsc(tmp_path: Path) -> Path:
    path = tmp_path / "click.avsc"
    path.write_text(json.dumps(AVRO))
    return path


@pytest.fixture
def descriptors(tmp_path: Path) -> Path:
    protoc = pytest.importorskip("grpc_tools.protoc")
    (tmp_path / "click.proto").write_text(PROTO)
    include = Path(protoc.__file__).parent / "_proto"
    path = tmp_path / "click.pb"
    done = protoc.main(
        [
            "protoc",
            f"-I{include}",
            f"-I{tmp_path}",
            "--include_imports",
            f"--descriptor_set_out={path}",
            "click.proto",
        ]
    )
    assert done == 0
    return path


def message_class(descriptors: Path, name: str) -> Any:
    from google.protobuf import (
        descriptor_pb2,
        descriptor_pool,
        message_factory,
    )

    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(
        descriptors.read_bytes()
    ).file:
        pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(name))


def protobuf(descriptors: Path, table: list[dict[str, Any]]) -> list[Any]:
    kind = message_class(descriptors, "shop.Click")
    return [kind(**row) for row in table]


def open_(
    cluster: Cluster, topic: str, schema: Schema = SCHEMA, **more: Any
) -> Kafka:
    return Kafka(
        cluster.servers,
        topic,
        "g",
        schema,
        8,
        **{"until": "latest", "timeout": 30.0} | more,
    )


def assert_same(a: Any, b: Any) -> None:
    for one, other in zip(list(a), list(b), strict=True):
        assert same(one, other)


# ---- the same values are the same ids


def test_avro_is_as_json(cluster: Cluster, avsc: Path) -> None:
    cluster.produce("json", texts(rows(40)))
    cluster.produce("avro", avro(AVRO, rows(40)))
    data = open_(cluster, "avro", value="avro", value_schema=avsc)
    again = pickle.loads(pickle.dumps(data))
    assert_same(data, open_(cluster, "json"))
    assert data.malformed == 0
    avsc.unlink()
    first = next(iter(again))
    assert len(first) == 8
    # A restart cuts the same batches.
    other = open_(cluster, "json")
    next(iter(other))
    resumed = pickle.loads(pickle.dumps(again))
    resumed.load_state_dict(json.loads(json.dumps(again.state_dict())))
    assert_same(resumed, other)


def test_protobuf_is_as_json(cluster: Cluster, descriptors: Path) -> None:
    cluster.produce("json", texts(rows(40)))
    every = [m.SerializeToString() for m in protobuf(descriptors, rows(40))]
    cluster.produce("plain", every)
    more = {"value": "protobuf", "value_schema": descriptors}
    more["value_message"] = "shop.Click"
    data = open_(cluster, "plain", **more)
    again = pickle.loads(pickle.dumps(data))
    assert_same(data, open_(cluster, "json"))
    assert data.malformed == 0
    next(iter(again))
    other = open_(cluster, "json")
    next(iter(other))
    resumed = open_(cluster, "plain", **more)
    resumed.load_state_dict(json.loads(json.dumps(again.state_dict())))
    assert_same(resumed, other)


def test_protobuf_of_confluent(cluster: Cluster, descriptors: Path) -> None:
    registry = pytest.importorskip("confluent_kafka.schema_registry")
    protobufs = pytest.importorskip("confluent_kafka.schema_registry.protobuf")
    serialization = pytest.importorskip("confluent_kafka.serialization")
    client = registry.SchemaRegistryClient.new_client({"url": "mock://k"})
    messages = protobuf(descriptors, rows(20))
    write = protobufs.ProtobufSerializer(
        type(messages[0]), client, {"use.deprecated.format": False}
    )
    context = serialization.SerializationContext("t", "value")
    values = [write(message, context) for message in messages]
    assert values[0][:1] == b"\0"
    # Of another type of the same file, and of damaged indexes.
    values[3] = values[3][:5] + b"\4\0\0" + values[3][6:]
    values[4] = b"\0\0\0\0\1" + b"\xff" * 20
    values[5] = b"\0\0"
    cluster.produce("framed", values)
    left = texts(rows(20))
    left[3:6] = [b"-"] * 3
    cluster.produce("json", left)
    data = open_(
        cluster,
        "framed",
        value="protobuf",
        value_schema=descriptors,
        value_message="shop.Click",
    )
    assert_same(data, open_(cluster, "json"))
    assert data.malformed == 3


def test_types_of_avro(cluster: Cluster, tmp_path: Path) -> None:
    money = {"type": "bytes", "precision": 9, "scale": 2}
    columns: dict[str, tuple[Any, Any, Any]] = {
        "day": ({"type": "int", "logicalType": "date"}, date(2026, 1, 2), 0),
        "cost": (money | {"logicalType": "decimal"}, Decimal("7.00"), 0),
        "id": ({"type": "string", "logicalType": "uuid"}, "a" * 32, 0),
    }
    fields = [(name, kind) for name, (kind, _, _) in columns.items()]
    schema = record(*fields, ("costs", {"type": "array", "items": "M"}))
    fixed = {"type": "fixed", "name": "M", "size": 8, "precision": 9}
    schema["fields"].insert(
        0,
        {
            "name": "fixed",
            "type": [fixed | {"scale": 1, "logicalType": "decimal"}, "null"],
        },
    )
    row = {name: value for name, (_, value, _) in columns.items()}
    row |= {"fixed": Decimal("-1.5"), "costs": [Decimal("2.0"), Decimal(3)]}
    row["id"] = "123e4567-e89b-12d3-a456-426614174000"
    path = tmp_path / "row.avsc"
    path.write_text(json.dumps(schema))
    said = Schema(
        categorical=["day", "cost", "id", "fixed"], multivalued=["costs"]
    )
    cluster.produce("avro", avro(schema, [row, row | {"fixed": None}]))
    text = {"day": "2026-01-02", "cost": "7", "id": row["id"]}
    text |= {"fixed": "-1.5", "costs": ["2", "3"]}
    cluster.produce(
        "json", [json.dumps(text), json.dumps(text | {"fixed": None})]
    )
    data = open_(cluster, "avro", said, value="avro", value_schema=path)
    assert_same(data, open_(cluster, "json", said))
    assert data.malformed == 0


def test_types_of_protobuf(cluster: Cluster, descriptors: Path) -> None:
    said = Schema(
        dense=["x"], categorical=["wrapped", "e"], multivalued=["colours"]
    )
    kind = message_class(descriptors, "shop.Click")
    written = [
        {"wrapped": {"value": 0.1}, "e": 1, "colours": [0, 1, 7]},
        {"x": 3.0, "colours": []},
    ]
    cluster.produce("proto", [kind(**r).SerializeToString() for r in written])
    cluster.produce("proto", [b""])  # of nothing but defaults
    read = [
        {"x": 0, "wrapped": 0.1, "e": "green", "colours": ["red", "green", 7]},
        {"x": 3, "wrapped": None, "e": "red", "colours": []},
        {"x": 0, "wrapped": None, "e": "red", "colours": []},
    ]
    cluster.produce("json", [json.dumps(row) for row in read])
    data = open_(
        cluster,
        "proto",
        said,
        value="protobuf",
        value_schema=descriptors,
        value_message="shop.Click",
    )
    assert_same(data, open_(cluster, "json", said))
    assert data.malformed == 0


# ---- the schemas of writers


OLD = record(("y", "int"), ("x", "int"), ("old", "string"), ("c", "string"))
NEW = record(
    ("c", "string"),
    ("y", ["null", "int"]),
    ("x", "float"),
    ("new", {"type": "map", "values": "string"}),
)
READ = record(("y", "int"), ("x", "double"), ("c", "string"))
READ["fields"].append({"name": "d", "type": "string", "default": "none"})
EVOLVED = Schema(label="y", dense=["x"], categorical=["c", "d"])


def framed(number: int, values: list[bytes]) -> list[bytes]:
    return [b"\0" + struct.pack(">I", number) + value for value in values]


def produce_evolved(cluster: Cluster) -> None:
    new = {"y": 1, "x": 2.5, "c": "b", "new": {"k": "v"}}
    values = [
        *framed(1, avro(OLD, [{"y": 0, "x": 3, "old": "o", "c": "a"}])),
        *framed(2, avro(NEW, [new, new | {"y": None}])),
        *framed(3, avro(READ, [{"y": 1, "x": 1, "c": "a", "d": "e"}])),
        *framed(8, avro(READ, [{"y": 1, "x": 1, "c": "a", "d": "e"}])),
        *framed(9, [b"\0\2" * 400_000]),
        *avro(READ, [{"y": 1, "x": 1, "c": "a", "d": "e"}]),
        b"\0\0\0",
        b"",
    ]
    cluster.produce("t", values)
    read = [
        {"y": 0, "x": 3, "c": "a", "d": "none"},
        {"y": 1, "x": 2.5, "c": "b", "d": "none"},
        b"null does not become an int",
        {"y": 1, "x": 1, "c": "a", "d": "e"},
    ]
    cluster.produce("json", [json.dumps(r) for r in read[:2]])
    cluster.produce("json", [b"-", json.dumps(read[3])])


def test_a_folder_of_schemas(cluster: Cluster, tmp_path: Path) -> None:
    produce_evolved(cluster)
    for number, schema in enumerate((OLD, NEW, READ), 1):
        (tmp_path / f"{number}.avsc").write_text(json.dumps(schema))
    (tmp_path / "8.avsc").write_text("no schema")
    deep = record(("c", "string"), ("next", ["null", "Click"]))
    (tmp_path / "9.avsc").write_text(json.dumps(deep))
    data = open_(
        cluster,
        "t",
        EVOLVED,
        value="avro",
        value_schema=tmp_path / "3.avsc",
        value_registry=tmp_path,
        dead_letter="dead",
    )
    assert_same(data, open_(cluster, "json", EVOLVED))
    assert data.malformed == data.stats()["dead_letters"] == 6


@pytest.fixture
def registry() -> Iterator[Callable[[dict[int, tuple[int, Any]]], str]]:
    """A server of schemas: (status, schema) by id."""
    every: dict[int, tuple[int, Any]] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            number = int(self.path.split("?")[0].rpartition("/")[2])
            status, schema = every.get(number, (404, None))
            body = {"schema": json.dumps(schema), "schemaType": "AVRO"}
            if status != 200:
                body = {"error_code": status * 100 + 3, "message": "no"}
            text = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()

    def serve(schemas: dict[int, tuple[int, Any]]) -> str:
        every.clear()
        every.update(schemas)
        return f"http://user:word@127.0.0.1:{server.server_port}"

    yield serve
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_server_of_schemas(
    cluster: Cluster, tmp_path: Path, registry: Any
) -> None:
    pytest.importorskip("confluent_kafka.schema_registry")
    produce_evolved(cluster)
    path = tmp_path / "read.avsc"
    path.write_text(json.dumps(READ))

    def data(schemas: dict[int, Any], **more: Any) -> Kafka:
        config = {"url": registry(schemas), "max.retries": 0}
        return open_(
            cluster,
            "t",
            EVOLVED,
            value="avro",
            value_schema=path,
            value_registry=config,
            **more,
        )

    good = {1: (200, OLD), 2: (200, NEW), 3: (200, READ)}
    read = data(good)
    assert_same(read, open_(cluster, "json", EVOLVED))
    assert read.malformed == 6
    with pytest.raises(errors.AccessDenied):
        list(data(good | {3: (401, None)}))
    # That it is away makes no message malformed.
    with pytest.raises(errors.Unavailable) as raised:
        list(data(good | {3: (500, None)}))
    assert "word" not in str(raised.value)


# ---- malformed messages


def test_malformed_avro(cluster: Cluster, avsc: Path) -> None:
    good = avro(AVRO, rows(9))
    huge = zigzag(1 << 40)
    head = avro(
        record(*[(f["name"], f["type"]) for f in AVRO["fields"][:3]]), rows(1)
    )[0]
    poison = [
        None,
        b"",
        good[1][:-1],
        good[1] + b"\0",
        b"\xff" * 50,
        head + huge + b"abc",
        head + zigzag(-5) + b"abc",
        head + zigzag(2) + b"\xff\xfe",
        good[0][:-8] + huge,
        framed(1, good)[0],
    ]
    cluster.produce("t", good + poison + good)
    cluster.produce("json", texts(rows(9)) + [b"-"] * 10 + texts(rows(9)))
    data = open_(cluster, "t", value="avro", value_schema=avsc)
    assert_same(data, open_(cluster, "json"))
    assert data.malformed == len(poison)
    with pytest.raises(errors.MalformedData):
        list(open_(cluster, "t", value="avro", value_schema=avsc, strict=True))


def test_absurd_values_of_avro(cluster: Cluster, tmp_path: Path) -> None:
    fields = [
        ("c", {"type": "array", "items": "string"}),
        ("m", {"type": "map", "values": "null"}),
        ("d", {"type": "int", "logicalType": "date"}),
        ("money", {"type": "bytes", "logicalType": "decimal", "precision": 9}),
        ("t", {"type": "long", "logicalType": "timestamp-millis"}),
    ]
    path = tmp_path / "row.avsc"
    path.write_text(json.dumps(record(*fields)))
    said = Schema(categorical=["d", "money"], multivalued=["c"], timestamp="t")
    huge, zero = zigzag(1 << 40), zigzag(0)
    long = zigzag(1 << 19) + b"\x7f" * (1 << 19)
    good = zero * 2 + zigzag(3) + zigzag(1) + b"\5" + zero
    poison = [
        huge,
        zero + huge,
        zigzag(-(1 << 40)) + huge,
        zero * 2 + huge + zigzag(1) + b"\5" + zero,  # a day of 2**40
        zero * 3 + zigzag(8) + b"\x7f" * 8 + zero,  # too many digits
        zero * 3 + long + zero,  # fastavro takes a minute for them
    ]
    cluster.produce("t", [good, *poison, good])
    data = open_(cluster, "t", said, value="avro", value_schema=path)
    assert sum(len(batch) for batch in data) == 2
    assert data.malformed == len(poison)


@pytest.mark.parametrize("form", ["json", "protobuf"])
def test_a_rule_counts_whatever_the_values_are(
    form: str, cluster: Cluster, descriptors: Path
) -> None:
    """Each message has another odd text in the same column."""
    kind = message_class(descriptors, "shop.Click")
    count = 400
    for i in range(count):
        c = f"odd {i}" if i % 20 == 0 else str(i)
        row = {"y": i % 2, "c": c, "x": 0.5}
        value = (
            json.dumps(row).encode()
            if form == "json"
            else kind(**row).SerializeToString()
        )
        cluster.produce("t", [value])
    said = Schema(
        label="y", dense=["x"], categorical=[{"column": "c", "hash": False}]
    )
    more: dict[str, Any] = {}
    if form == "protobuf":
        more = {
            "value": form,
            "value_schema": descriptors,
            "value_message": "shop.Click",
        }
    with pytest.raises(errors.LimitReached):
        list(open_(cluster, "t", said, **more))
    data = open_(cluster, "t", said, malformed_limit=0.1, **more)
    assert sum(map(len, data)) == count - 20
    assert data.malformed == 20


def test_schemas_without_a_bound(avsc: Path) -> None:
    for wrong in (
        record(("c", "string"), ("next", ["null", "Click"])),
        record(("c", "string"), ("nulls", {"type": "array", "items": "null"})),
        record(
            ("c", "string"),
            ("none", {"type": "array", "items": record(name="Empty")}),
        ),
        "[" * 100_000,
    ):
        text = wrong if isinstance(wrong, str) else json.dumps(wrong)
        avsc.write_text(text)
        with pytest.raises(errors.SchemaMismatch):
            Kafka(
                "b:1",
                "t",
                "g",
                Schema(categorical=["c"]),
                value="avro",
                value_schema=avsc,
            )


def test_a_sample_has_the_types_of_the_schema(
    cluster: Cluster, avsc: Path, descriptors: Path
) -> None:
    cluster.produce("avro", avro(AVRO, rows(3)))
    found = protobuf(descriptors, rows(3))
    cluster.produce("proto", [one.SerializeToString() for one in found])
    for topic, more in (
        ("avro", {"value": "avro", "value_schema": avsc}),
        (
            "proto",
            {
                "value": "protobuf",
                "value_schema": descriptors,
                "value_message": "shop.Click",
            },
        ),
    ):
        table = sample_topics(cluster.servers, [topic], **more)
        assert table.column("t").to_pylist() == [r["t"] for r in rows(3)]
        assert str(table.column("f").type) == "float"


def test_times_of_protobuf_in_one_block(descriptors: Path) -> None:
    """What one message has decides nothing about another."""
    kind = message_class(descriptors, "shop.Click")
    far = -62135596800
    messages = [
        kind(t={"seconds": far, "nanos": 0}),
        kind(t={"seconds": 0, "nanos": 1}),
        kind(t={"seconds": 0, "nanos": 1000}),
    ]
    values = [one.SerializeToString() for one in messages]
    written = Written.checked("protobuf", descriptors, "shop.Click", None)
    schema = Schema(categorical=["t"])
    made, wrong = Values(schema, written, False).rows(values)
    assert made is not None
    assert not wrong
    found = made.batch(["t"]).ids.values().tolist()
    assert found == [
        value_hash(text)
        for text in (
            "0001-01-01 00:00:00",
            "1970-01-01 00:00:00.000000001",
            "1970-01-01 00:00:00.000001",
        )
    ]
    both = kind(t={"seconds": far, "nanos": 1}).SerializeToString()
    made, wrong = Values(schema, written, True).rows([both, values[1]])
    assert made is not None
    assert (list(wrong), len(made)) == ([0], 1)


def test_malformed_protobuf(cluster: Cluster, descriptors: Path) -> None:
    good = [m.SerializeToString() for m in protobuf(descriptors, rows(9))]
    kind = message_class(descriptors, "shop.Click")
    late = kind(y=1, t={"seconds": 1 << 61})
    poison = [
        None,
        good[1][:-1],
        b"\x0a",
        b"\x22" + b"\xff" * 5 + b"\x0f",  # a text of 2**35 bytes
        b"\x22\2\xff\xfe",  # no UTF-8
        b"\x9b\x06" * 10_000,  # groups in groups
        late.SerializeToString(),
        b"\xff" * 20,
    ]
    cluster.produce("t", good + poison + good)
    cluster.produce("json", texts(rows(9)) + [b"-"] * 8 + texts(rows(9)))
    data = open_(
        cluster,
        "t",
        value="protobuf",
        value_schema=descriptors,
        value_message="shop.Click",
        dead_letter="dead",
    )
    assert_same(data, open_(cluster, "json"))
    assert data.stats()["dead_letters"] == len(poison)


# ---- arguments


def test_bad_arguments(avsc: Path, descriptors: Path, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("no schema")
    (tmp_path / "alone.avsc").write_text('"string"')
    alone = tmp_path / "alone.pb"  # without what it imports
    from google.protobuf import descriptor_pb2

    files = descriptor_pb2.FileDescriptorSet.FromString(
        descriptors.read_bytes()
    )
    del files.file[:-1]
    alone.write_bytes(files.SerializeToString())
    invalid, mismatch = errors.InvalidArgument, errors.SchemaMismatch
    proto = {"value": "protobuf", "value_schema": descriptors}
    click = proto | {"value_message": "shop.Click"}
    c = {"schema": Schema(categorical=["c"])}
    for error, wrong in (
        (invalid, {"value": "yaml"}),
        (invalid, {"value_schema": None}),
        (invalid, {"value": "json", "value_schema": avsc}),
        (invalid, {"value": "avro", "value_schema": 3}),
        (invalid, {"value": "avro", "value_schema": tmp_path / "absent"}),
        (invalid, {"value_registry": tmp_path / "absent"}),
        (invalid, {"value_registry": {"url": "http://h", "wrong": 1}}),
        (invalid, {"value_registry": 3}),
        (invalid, {"value_message": "shop.Click"}),
        (invalid, proto),  # of several messages
        (invalid, proto | {"value_message": "shop.Absent"}),
        (invalid, proto | {"value_message": 3}),
        (invalid, proto | {"value_registry": tmp_path}),
        (mismatch, {"value_schema": text}),
        (mismatch, {"value_schema": tmp_path / "alone.avsc"}),
        (mismatch, {"schema": Schema(categorical=["absent"])}),
        (mismatch, proto | {"value_schema": text}),
        (mismatch, proto | {"value_schema": alone}),
        (mismatch, proto | {"value_message": "shop.Other"} | c),
        (mismatch, click | {"schema": Schema(categorical=["other"])}),
        (mismatch, click | {"schema": Schema(multivalued=["map"])}),
    ):
        given = {"schema": SCHEMA, "value": "avro", "value_schema": avsc}
        with pytest.raises(error):
            Kafka("b:1", "t", "g", **given | wrong)
    inner = proto | {"value_message": "shop.Other.Inner"} | c
    assert Kafka("b:1", "t", "g", **inner).keys == ["c"]


def test_the_url(
    cluster: Cluster, avsc: Path, descriptors: Path, tmp_path: Path
) -> None:
    cluster.produce("avro", avro(AVRO, rows(20)))
    cluster.produce("framed", framed(7, avro(AVRO, rows(20))))
    (tmp_path / "7.avsc").write_text(json.dumps(AVRO))
    messages = protobuf(descriptors, rows(20))
    cluster.produce("proto", [m.SerializeToString() for m in messages])
    cluster.produce("json", texts(rows(20)))
    (tmp_path / "t.yaml").write_text(SCHEMA.to_yaml())
    for url in (
        f"avro?group=g&value=avro&value_schema={avsc}",
        f"framed?group=g&value=avro&value_schema={avsc}"
        f"&value_registry={tmp_path}",
        f"proto?group=g&value=protobuf&value_schema={descriptors}"
        "&value_message=shop.Click",
    ):
        options = {
            "data": f"kafka://{cluster.servers}/{url}",
            "schema": str(tmp_path / "t.yaml"),
            "batch_size": 8,
        }
        data, _ = open_data(resolve(options))
        assert_same(data, open_(cluster, "json"))
