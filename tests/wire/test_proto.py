"""Messages against stock protobuf: it reads what C writes, and the reverse,
with the same meaning for every field."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.protobuf import stubs
from tests.wire.structs import (
    DTYPE_BYTES,
    NAMES,
    STRUCTS,
    WORDS,
    Wire,
    fields,
)

pb, pb_grpc = stubs()
wire = Wire()

METHODS = [
    method
    for service in pb.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]
REQUESTS = [method.input_type.name for method in METHODS]
REPLIES = [method.output_type.name for method in METHODS]
MESSAGES = sorted(set(REQUESTS + REPLIES))

LIMITS = {"no": 4095, "dim": 4096, "state_floats": 8192, "parts": 65536}
LIMITS |= {"first": 4095, "count": 4096}
LIMITS |= {"table": 4095, "vector_bytes": 16388, "durable": 2}
LIMITS |= {"stripe": 256, "stripes": 256}
NAME_BYTES = {"proof": 63, "type": 31}
BULKY = {"PullTable", "Values", "PushTable", "Rows", "Piece", "Sightings"}
BULKY |= {"ChangesReply"}
BULKY |= {"BatchIds", "BatchOffsets", "Tensor", "BatchWeights", "RowIds"}
BULKY |= {"RowOffsets", "TableSum"}
MAY_BE_ABSENT = {"rows", "found", "vectors", "state", "clocks", "fields"}
#: No parts mean one.
WITH_PARTS = {"PushRequest", "ReturnRequest"}
Message = Any


# ---- random messages -------------------------------------------------------


def scalar(draw: st.DrawFn, field: Any) -> Any:
    """A value of a field that is no message and no bulk data."""
    if field.enum_type:
        numbers = [value.number for value in field.enum_type.values]
        return draw(st.sampled_from(numbers))
    if field.type == field.TYPE_BOOL:
        return draw(st.booleans())
    if field.type == field.TYPE_FLOAT:
        return draw(st.floats(width=32, allow_nan=False, allow_infinity=False))
    if field.type == field.TYPE_STRING:
        most = NAME_BYTES.get(field.name, 255)
        text = st.text(
            st.characters(codec="utf-8", exclude_characters="\0"),
            max_size=most,
        )
        return draw(text.filter(lambda t: len(t.encode()) <= most))
    bits = 32 if field.type == field.TYPE_UINT32 else 64
    most = LIMITS.get(field.name, 2**bits - 1)
    return draw(st.one_of(st.just(most), st.integers(0, most)))


def bulk(message: Message, name: str, n: int, dtype: int, random_: Any):
    """Random bytes of a bulk field of n rows."""
    each = {
        "ids": 8,
        "scales": 4,
        "rows": 4,
        "found": 1,
        "values": getattr(message, "dim", 0) * DTYPE_BYTES[dtype],
        "vectors": getattr(
            message, "vector_bytes", getattr(message, "dim", 0) * 4
        ),
        "grads": getattr(message, "dim", 0) * 4,
        "state": getattr(message, "state_floats", 0) * 4,
        "offsets": 4 if message.DESCRIPTOR.name == "RowOffsets" else 8,
        "data": 1,
        "message": 1,
        "places": 4,
        "weights": 4,
        "clocks": 4,
        "fields": 4,
        "words": 4,
    }[name]
    setattr(message, name, random_.randbytes(n * each))


def fill_bulk(draw: st.DrawFn, message: Message, dtype: int) -> None:
    """Bulk data of n rows; what may be absent is, at times."""
    n = draw(st.sampled_from([0, 0, 1, 2, 3, 7, 8, 65, 300]))
    random_ = random.Random(draw(st.integers(0, 1000)))
    if hasattr(message, "dim"):
        message.dim = draw(st.sampled_from([1, 2, 5, 16, 33]))
    if hasattr(message, "vector_bytes"):
        message.vector_bytes = draw(st.sampled_from([1, 5, 64]))
    if hasattr(message, "state_floats"):
        message.state_floats = draw(st.sampled_from([1, 2, 5]))
    for field in fields(message):
        if field.type != field.TYPE_BYTES:
            continue
        if field.name == "scales":
            wanted = dtype == pb.DTYPE_FP16
        elif field.name in MAY_BE_ABSENT or (
            field.name == "weights" and hasattr(message, "places")
        ):
            wanted = draw(st.booleans())
        else:
            wanted = True
        if wanted:
            bulk(message, field.name, n, dtype, random_)


def agree(draw: st.DrawFn, message: Message) -> None:
    """What the fields of a message must have to do with each other."""
    name = message.DESCRIPTOR.name
    if name in {"HelloRequest", "LeaveRequest"}:
        message.world = draw(st.integers(1, 65536))
        message.rank = draw(st.integers(0, message.world - 1))
    elif name == "Part":
        message.shard %= 4096
        message.method %= 31
    elif name in {"MoveRequest", "MoveReply"}:
        message.shard %= 4096
        if name == "MoveRequest":
            del message.handover[1:]
    elif name == "HelloReply":
        message.shards = draw(st.integers(1, 2**32 - 1))
        message.shard = draw(st.integers(0, message.shards - 1))
    elif name == "TableSpec":
        message.name = message.name or "user"
        message.dim = message.dim or 4096
    elif name == "PushRequest":
        message.stream = message.stream or 1
        message.number = message.number or 2**64 - 1
        message.settled = draw(st.integers(0, message.number - 1))
        if draw(st.booleans()):  # parts of a step, or of a group
            message.step, message.group = message.step or 1, 0
        else:
            message.step, message.group = 0, message.group or 1
        message.parts = message.parts or 1
        message.part = draw(st.integers(0, message.parts - 1))
    elif name == "ReturnRequest":
        message.parts = message.parts or 1
        message.part = draw(st.integers(0, message.parts - 1))
        message.step, message.group = message.step or 1, 0
    elif name == "PlanRequest":
        for message_type, more in (("tables", 1), ("features", 1)):
            if len(getattr(message, message_type)) < more:
                getattr(message, message_type).add()
        for table in message.tables:
            agree(draw, table)
        for feature in message.features:
            feature.table %= len(message.tables)
    elif name == "SubmitRequest":
        agree_batch(draw, message)
    elif name == "TakeRequest":
        message.number = message.number or 1
        message.epoch >>= 3
    elif name == "HeartbeatRequest":
        message.stream = message.stream or 1
        message.first >>= 3
        message.epoch = (message.epoch >> 3) + len(message.ends) + 1
        message.ends[:] = sorted(message.ends)


def agree_batch(draw: st.DrawFn, message: Message) -> None:
    """Ids and offsets of as many bags as the batch has."""
    message.stream = message.stream or 1
    message.number = message.number or 2**64 - 1
    message.settled = draw(st.integers(0, message.number - 1))
    message.place = draw(st.integers(0, message.number))
    message.epoch >>= 3
    message.first >>= 3
    if not message.features:
        message.features.add(name="user")
    message.samples = draw(st.integers(1, 5))
    bags = len(message.features) * message.samples
    message.ClearField("offsets")
    if draw(st.booleans()):
        message.offsets.offsets = bytes(8 * (bags + 1))
    else:
        message.ids.ids = bytes(8 * bags)


def fill_message(draw: st.DrawFn, message: Message, dtype: int = 0) -> None:
    """Random values for all fields."""
    sizes: dict[str, int] = {}
    for field in fields(message):
        if field.type == field.TYPE_MESSAGE and field.is_repeated:
            key = "tables" if field.name == "stats" else field.name
            n = sizes.setdefault(key, draw(st.integers(0, 3)))
            for _ in range(n):
                part = getattr(message, field.name).add()
                fill_message(draw, part, dtype)
        elif field.type == field.TYPE_MESSAGE:
            fill_message(draw, getattr(message, field.name), dtype)
        elif field.is_repeated:
            numbers = st.lists(st.integers(0, 2**64 - 1), max_size=5)
            getattr(message, field.name).extend(draw(numbers))
        elif field.name in WORDS:
            most = 64 if message.DESCRIPTOR.name == "Ledger" else 16
            most = 32 if field.name == "gaps" else most
            words = draw(st.lists(st.integers(0, 2**64 - 1), max_size=most))
            words += [1] if words else []
            value = np.array(words[-most:], np.uint64).tobytes()
            setattr(message, field.name, value)
        elif field.type != field.TYPE_BYTES:
            setattr(message, field.name, scalar(draw, field))
            if field.name == "dtype":
                dtype = message.dtype
    if message.DESCRIPTOR.name in BULKY:
        fill_bulk(draw, message, dtype)
    agree(draw, message)


@st.composite
def messages(draw: st.DrawFn, names: list[str] = MESSAGES) -> Message:
    """Any message that a server or client could be sent."""
    message = getattr(pb, draw(st.sampled_from(names)))()
    fill_message(draw, message)
    return message


def without_pad(message: Message) -> Message:
    """The message, its padding removed; parts = 0 written out."""
    for field in message.DESCRIPTOR.fields:
        if field.name == "pad":
            message.ClearField("pad")
        elif field.type != field.TYPE_MESSAGE:
            continue
        elif field.is_repeated:
            for part in getattr(message, field.name):
                without_pad(part)
        else:
            # Whether an empty message is there has no meaning.
            without_pad(getattr(message, field.name)).SetInParent()
    if message.DESCRIPTOR.name in WITH_PARTS and not message.parts:
        message.parts = 1
    return message


def same(a: Message, b: Message) -> bool:
    """Whether two messages mean the same, bit by bit."""
    return without_pad(a).SerializeToString(deterministic=True) == without_pad(
        b
    ).SerializeToString(deterministic=True)


# ---- pieces of encoded messages --------------------------------------------


def varint(value: int) -> bytes:
    """A protobuf varint."""
    out = bytearray()
    while value >= 128:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """The varint at a place, and where it ends."""
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at


def split(data: bytes) -> list[tuple[int, bytes]]:
    """An encoded message as (number, bytes with the tag) of its fields."""
    pieces, at = [], 0
    while at < len(data):
        begin = at
        tag, at = read_varint(data, at)
        if tag & 7 == 0:
            _, at = read_varint(data, at)
        elif tag & 7 == 2:
            size, at = read_varint(data, at)
            at += size
        else:
            at += {1: 8, 5: 4}[tag & 7]
        pieces.append((tag >> 3, data[begin:at]))
    return pieces


#: Of fields that no version has: all codings, a group in a group.
UNKNOWN = [
    varint(118 << 3) + varint(2**64 - 1),
    varint(1000 << 3 | 1) + b"12345678",
    varint(119 << 3 | 2) + varint(5) + b"hello",
    varint((2**29 - 1) << 3 | 5) + b"1234",
    varint(120 << 3 | 3)
    + varint(1 << 3) + b"\x01"
    + varint(2 << 3 | 3) + varint(2 << 3 | 4)
    + varint(120 << 3 | 4),
]  # fmt: skip


# ---- tests -----------------------------------------------------------------


def test_every_struct_and_every_message_is_known() -> None:
    """No message, method or struct of one is missing in the other."""
    assert set(pb.DESCRIPTOR.message_types_by_name) == set(NAMES)
    assert set(NAMES.values()) == set(STRUCTS) - {"span", "out", "memory"}
    for name, struct in NAMES.items():
        message = getattr(pb, name)()
        assert STRUCTS[struct], name
        for field in fields(message):
            assert field.number != 15 or "pad" not in (
                message.DESCRIPTOR.fields_by_name
            )


@settings(max_examples=400)
@given(messages(), st.integers(0, 15))
def test_c_reads_what_protobuf_writes(message: Message, shift: int) -> None:
    """All fields of all messages, wherever the bytes lie."""
    got = wire.read(message.SerializeToString(), type(message)(), shift)
    assert same(got, message)


@settings(max_examples=400)
@given(messages())
def test_protobuf_reads_what_c_writes(message: Message) -> None:
    """All fields of all messages."""
    got = type(message)()
    data = wire.write(message)
    assert got.ParseFromString(data) == len(data)
    assert same(got, message)


@settings(max_examples=200)
@given(messages(), st.randoms(use_true_random=False))
def test_order_and_unknown_fields_do_not_matter(
    message: Message, random_: random.Random
) -> None:
    """Any order that keeps that of equal numbers, with fields of others."""
    pieces = split(message.SerializeToString())
    order = list(range(len(pieces)))
    random_.shuffle(order)
    where: dict[int, list[int]] = {}
    for i in sorted(order):
        where.setdefault(pieces[i][0], []).append(i)
    data = b""
    for i in order:
        data += pieces[where[pieces[i][0]].pop(0)][1]
        data += random_.choice([b"", *UNKNOWN])
    got = wire.read(data, type(message)())
    assert same(got, message)


def test_unknown_fields_of_tables_are_skipped() -> None:
    """They may be in messages within messages."""
    push = some_push()
    for table in push.tables:
        table.MergeFromString(b"".join(UNKNOWN))
    push.caller.MergeFromString(UNKNOWN[0])
    got = wire.read(push.SerializeToString(), pb.PushRequest())
    for table in push.tables:
        table.DiscardUnknownFields()
    push.DiscardUnknownFields()
    assert same(got, push)


@pytest.mark.parametrize("name", ["RestoreRequest", "HelloReply", "Stats"])
@settings(max_examples=50)
@given(st.data())
def test_two_halves_are_merged_as_protobuf_does(
    name: str, data: st.DataObject
) -> None:
    """The last scalar counts, messages are merged, lists are joined."""
    name = {"Stats": "StatsReply"}.get(name, name)
    halves = [data.draw(messages([name])) for _ in range(2)]
    if name == "HelloReply":
        halves[1].shards = 2**32 - 1
        halves[1].shard = 2**32 - 2
    joined = b"".join(half.SerializeToString() for half in halves)
    expected = type(halves[0]).FromString(joined)
    assert same(wire.read(joined, type(expected)()), expected)


def test_a_message_in_two_parts_is_checked_as_a_whole() -> None:
    """Each half of the spec alone would be refused."""
    parts = [
        pb.DeclareRequest(table=pb.TableSpec(name="user")),
        pb.DeclareRequest(table=pb.TableSpec(dim=8)),
    ]
    joined = b"".join(part.SerializeToString() for part in parts)
    got = wire.read(joined, pb.DeclareRequest())
    assert (got.table.name, got.table.dim) == ("user", 8)


def test_repeated_numbers_may_be_packed_or_not() -> None:
    """And both in one message."""
    numbers = [0, 127, 128, 2**64 - 1]
    one_by_one = b"".join(b"\x20" + varint(n) for n in numbers)
    packed = pb.SnapshotReply(pushes=numbers).SerializeToString()
    for data in one_by_one, packed, packed + one_by_one, one_by_one + packed:
        got = wire.read(data, pb.SnapshotReply())
        assert got == pb.SnapshotReply.FromString(data)
        assert list(got.pushes)[:4] == numbers


@settings(max_examples=100)
@given(messages(["PullRequest", "PullReply", "PushRequest", "Rows"]))
def test_bulk_data_are_aligned(message: Message) -> None:
    """They begin at a multiple of 8 bytes of the message."""

    def check(data: bytes, begin: int) -> None:
        at = 0
        for number, piece in split(data):
            at += len(piece)
            if number == 15 or piece[0] & 7 != 2:
                continue
            length, head = read_varint(piece, 1)
            if length and is_bulk(number, begin):
                assert (begin + at - length) % 8 == 0
            elif begin == 0 and number == tables:
                assert (at - length) % 8 == 0
                check(piece[head:], at - length)

    by_name = message.DESCRIPTOR.fields_by_name
    tables = by_name["tables"].number if "tables" in by_name else 0

    def is_bulk(number: int, begin: int) -> bool:
        descriptor = message.DESCRIPTOR
        if begin:
            descriptor = descriptor.fields_by_name["tables"].message_type
        field = descriptor.fields_by_number[number]
        return field.type == field.TYPE_BYTES

    check(wire.write(message), 0)


# ---- what is refused -------------------------------------------------------


def some_push() -> Message:
    """A push of two tables, 3 rows of 2 and 1 row of 1, fp16."""
    push = pb.PushRequest(stream=1, number=1, dtype=pb.DTYPE_FP16)
    for no, (n, dim) in enumerate([(3, 2), (1, 1)]):
        push.tables.add(
            no=no,
            dim=dim,
            ids=bytes(8 * n),
            values=bytes(2 * n * dim),
            scales=bytes(4 * n),
            rows=bytes(4 * n),
            hyper=pb.Hyper(lr=0.5),
        )
    return push


def some_reply() -> Message:
    """A pull reply of one table, 2 rows of 3, fp32."""
    reply = pb.PullReply()
    reply.tables.add(dim=3, values=bytes(24), rows=bytes(8))
    return reply


def declare(**spec: Any) -> Message:
    """A table spec with something wrong in it."""
    return pb.DeclareRequest(
        table=pb.TableSpec(**{"name": "user", "dim": 8, **spec})
    )


def test_what_is_altered_below_is_right_before() -> None:
    """Else the refusals below would mean nothing."""
    for message in some_push(), some_reply(), declare():
        assert same(
            wire.read(message.SerializeToString(), type(message)()), message
        )


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("tables[1].ids = bytes(7)", "tables[1].ids: has 7 bytes, no mult"),
        ("tables[0].ids = bytes(8)", "tables[0].values: has 12 bytes, 1 row"),
        ("tables[0].ids = b''", "tables[0].values: has 12 bytes, 0 rows"),
        ("tables[0].values = b''", "tables[0].values: no gradients for 3"),
        ("tables[0].values = bytes(10)", "tables[0].values: has 10 bytes, 3"),
        ("tables[0].dim = 0", "tables[0].values: has 12 bytes, 3 rows of 0"),
        ("tables[0].dim = 4097", "tables[0].dim: is 4097, at most 4096"),
        ("tables[0].no = 4096", "tables[0].no: is 4096, at most 4095"),
        ("tables[1].scales = b''", "tables[1].scales: fp16 needs a scale"),
        ("tables[1].scales = bytes(8)", "tables[1].scales: has 8 bytes, 1"),
        ("tables[1].rows = bytes(3)", "tables[1].rows: has 3 bytes, 1 row"),
        ("dtype = 0", "tables[0].values: has 12 bytes, 3 rows of 8 bytes"),
        ("dtype = 2", "tables[0].scales: only fp16 has scales"),
        ("dtype = 3", "dtype: is 3, at most 2"),
        ("dtype = -1", "dtype: is 18446744073709551615, at most 2"),
        ("tables[0].hyper.kind = 99", "tables[0].hyper.kind: is 99, at most"),
        ("tables[0].hyper.lr = nan", "tables[0].hyper.lr: is not finite"),
        ("tables[1].hyper.eps = inf", "tables[1].hyper.eps: is not finite"),
        ("stream = 0", "stream: is 0, which is no stream"),
        ("number = 0", "number: is 0, numbers begin at 1"),
        ("settled = 1", "settled: is 1, it must be below the number 1"),
        ("part = 1", "part: is 1 of 1"),
        ("parts = 65537", "parts: is 65537, at most 65536"),
        ("parts = 2", "step: is 0, but 2 parts belong to a step, from 1"),
        ("tables.extend([T()] * 4095)", "tables: has 4097 elements, at most"),
    ],
)
def test_a_wrong_push_is_refused_by_field(change: str, text: str) -> None:
    """The error names message, table and field."""
    push = some_push()
    names = {"m": push, "nan": np.nan, "inf": np.inf, "T": pb.PushTable}
    exec(f"m.{change}", names)
    with pytest.raises(ValueError, match="ProtocolError") as caught:
        wire.read(push.SerializeToString(), pb.PushRequest())
    assert f"message PushRequest.{text}" in str(caught.value)


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (declare(name=""), "DeclareRequest.table.name: is empty"),
        (declare(name="a\0b"), "DeclareRequest.table.name: has a 0 at byte 1"),
        (declare(name="é" * 128), "DeclareRequest.table.name: has 256 bytes"),
        (declare(dim=0), "DeclareRequest.table.dim: is 0, 1 to 4096 allowed"),
        (declare(dtype=99), "DeclareRequest.table.dtype: is 99, at most"),
        (declare(optimizer=99), "DeclareRequest.table.optimizer: is 99"),
        (declare(init=3), "DeclareRequest.table.init: is 3, at most 2"),
        (declare(full=99), "DeclareRequest.table.full: is 99, at most"),
        (declare(missing=2), "DeclareRequest.table.missing: is 2, at most"),
        (declare(nonfinite=2), "DeclareRequest.table.nonfinite: is 2, at"),
        (declare(init_a=np.inf), "DeclareRequest.table.init_a: is not fini"),
        (pb.DeclareRequest(), "DeclareRequest.table.name: is empty"),
        (pb.HelloReply(), "HelloReply.shard: is 0 of 0"),
        (pb.HelloReply(shard=2, shards=2), "HelloReply.shard: is 2 of 2"),
        (
            pb.HelloReply(shards=1, ledger=pb.Ledger(window=bytes(520))),
            "HelloReply.ledger.window: has 520 bytes, a multiple of 8 up to",
        ),
        (
            pb.HelloReply(shards=1, ledger=pb.Ledger(window=bytes(7))),
            "HelloReply.ledger.window: has 7 bytes, a multiple of 8 up to 512",
        ),
        (pb.HelloRequest(rank=4, world=4), "HelloRequest.rank: is 4 of a w"),
        (pb.LeaveRequest(), "LeaveRequest.rank: is 0 of a world of 0"),
        (pb.SnapshotRequest(verb=3), "SnapshotRequest.verb: is 3, at most 2"),
        (pb.RestoreRequest(verb=3), "RestoreRequest.verb: is 3, at most 2"),
        (
            pb.SnapshotReply(pushes=[1] * 4097),
            "SnapshotReply.pushes: has 4097 elements, at most 4096",
        ),
        (
            pb.StatsReply(stats=[pb.TableStats()]),
            "StatsReply.stats: has 1 elements, tables has 0",
        ),
        (
            pb.StatsReply(tables=[pb.TableSpec(name="x", dim=1)]),
            "StatsReply.stats: has 0 elements, tables has 1",
        ),
        (pb.Rows(ids=bytes(9)), "Rows.ids: has 9 bytes, no multiple of 8"),
        (pb.Rows(found=b"1"), "Rows.found: has 1 bytes, 0 rows of 1 bytes"),
        (
            pb.Rows(ids=bytes(8), state_floats=8193),
            "Rows.state_floats: is 8193, at most 8192",
        ),
        (pb.PushReply(status=5), "PushReply.status: is 5, at most 4"),
    ],
)
def test_a_wrong_message_is_refused_by_field(
    message: Message, text: str
) -> None:
    """The error names message and field."""
    with pytest.raises(ValueError, match="ProtocolError") as caught:
        wire.read(message.SerializeToString(), type(message)())
    assert f"message {text}" in str(caught.value)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"\x80", "PullRequest: the message ends in a varint"),
        (b"\x10", "PullRequest.dtype: the message ends in a varint"),
        (b"\x20" + b"\xff" * 9 + b"\x02", "after: a varint has more"),
        (b"\x20" + b"\xff" * 11, "after: a varint has more than 64"),
        (b"\x00", "PullRequest: there is no field 0"),
        (b"\xf8\xff\xff\xff\xff\x00\x00", "there is no field 4294967295"),
        (b"\x2a\x05\x08\x01", "PullRequest.tables: its length is 5, 2 are"),
        (b"\x2a\x02\x12\x01", "tables[0].ids: its length is 1, 0 are left"),
        (b"\x2a\x02\x08\x01\x2a\x02\x08\x80", "tables[1].no: the message"),
        (b"\x0a\x05\x09\x01\x02\x03\x04", "caller.client: 8 bytes are need"),
        (b"\x28\x01", "PullRequest.tables: is varint instead of length-"),
        (b"\x12\x00", "PullRequest.dtype: is length-delimited instead of"),
        (b"\x18\x02", "PullRequest.want_rows: is 2, at most 1"),
        (b"\x24", "PullRequest.after: has coding 4, which cannot"),
        (b"\x26", "PullRequest.after: has coding 6, which cannot"),
        (b"\xa3\x06", "PullRequest, field 100: the message ends in a group"),
        (b"\xa3\x06\xac\x06", "PullRequest, field 100: ends as group 101"),
        (b"\xa3\x06" * 50, "field 100: more than 16 groups in groups"),
        (b"\xff" * 30, "PullRequest: a varint has more than 64 bits"),
    ],
)
def test_what_is_no_protobuf_is_refused(data: bytes, text: str) -> None:
    """Truncated, overlong, impossible."""
    with pytest.raises(ValueError, match="ProtocolError") as caught:
        wire.read(data, pb.PullRequest())
    assert text in str(caught.value)


@pytest.mark.parametrize(
    "name",
    [b"\xff", b"\xc3", b"\xc0\x80", b"\xe0\x80\x80", b"\xed\xa0\x80",
     b"\xf4\x90\x80\x80", b"\xf0\x80\x80\x80", b"a\x80", b"\xe2\x82"],
)  # fmt: skip
def test_a_name_that_is_not_utf8_is_refused(name: bytes) -> None:
    """Else a stock client could not read it in a reply."""
    with pytest.raises(UnicodeDecodeError):
        name.decode()
    data = b"\x12" + varint(len(name)) + name
    data = b"\x32" + varint(len(data)) + data
    with pytest.raises(ValueError, match=r"files\[0\].name: is not UTF-8"):
        wire.read(data, pb.SnapshotReply())


@settings(max_examples=200)
@given(messages(), st.data())
def test_altered_bytes_are_read_or_refused(
    message: Message, data: st.DataObject
) -> None:
    """And what is read can be written again."""
    raw = bytearray(message.SerializeToString())
    for _ in range(data.draw(st.integers(1, 4))):
        if raw:
            at = data.draw(st.integers(0, len(raw) - 1))
            raw[at] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(raw)))
    for part in bytes(raw), bytes(raw[:cut]):
        try:
            got = wire.read(part, type(message)())
        except ValueError as error:
            if not str(error).startswith("ProtocolError: message "):
                raise
            continue
        again = type(message).FromString(wire.write(got))
        assert same(again, got)
