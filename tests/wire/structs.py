"""The wire_* structs as ctypes, and protobuf messages to and from them.

The structs are read from the headers themselves, and a member belongs to the
field of the same name: what C and protobuf call a number must be the same
thing.
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
HEADERS = [
    ROOT / "csrc" / name
    for name in (
        "mem/gather.h",
        "spec/lists.h",
        "wire/messages.h",
        "wire/wire.h",
    )
]
LIBRARY = ROOT / "persia" / "libpersia.so"

C_TYPES: dict[str, Any] = {
    "char": ctypes.c_char,
    "float": ctypes.c_float,
    "size_t": ctypes.c_size_t,
    "uint8_t": ctypes.c_uint8,
    "uint32_t": ctypes.c_uint32,
    "uint64_t": ctypes.c_uint64,
}
#: Fields whose member has another name.
RENAMED = {"namespace": "name_space"}
#: How many of what an array holds.
COUNTS = {"stats": "tables_n"}


def _short(name: str) -> str:
    return name.removeprefix("wire_").removeprefix("optim_")


def _read_header() -> dict[str, type[ctypes.Structure]]:
    text = "".join(header.read_text() for header in HEADERS)
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    constants = {
        name: int(value)
        for name, value in re.findall(r"(WIRE_\w+) = (\d+)", text)
    }
    structs: dict[str, type[ctypes.Structure]] = {}
    declaration = re.compile(r"(?:const |struct )?(\w+) ([^;]+);")
    for name, body in re.findall(
        r"typedef struct (\w+) \{(.*?)\} \1;", text, re.DOTALL
    ):
        members: list[tuple[str, Any]] = []
        for kind, declarators in declaration.findall(body):
            for declarator in declarators.split(","):
                match = re.fullmatch(
                    r"\s*(\*?)(\w+)(?:\[(\w+)\])?\s*", declarator
                )
                assert match, declarator
                star, member, length = match.groups()
                if star:
                    c_type: Any = ctypes.c_void_p
                else:
                    c_type = structs.get(_short(kind)) or C_TYPES[kind]
                if length:
                    c_type *= constants.get(length) or int(length)
                members.append((member, c_type))
        name = _short(name)
        structs[name] = type(name, (ctypes.Structure,), {"_fields_": members})
    return structs


STRUCTS = _read_header()
#: Message of persia.proto -> struct of wire.h.
NAMES = {
    "Caller": "caller",
    "Maker": "maker",
    "Trace": "trace",
    "HelloRequest": "hello",
    "HelloReply": "hello_reply",
    "Ledger": "ledger",
    "SlotRun": "slot_run",
    "TableSpec": "table_spec",
    "DeclareRequest": "declare",
    "DeclareReply": "declare_reply",
    "PullRequest": "pull",
    "PullTable": "pull_table",
    "PullReply": "pull_reply",
    "Values": "values",
    "PushRequest": "push",
    "PushTable": "push_table",
    "Hyper": "hyper",
    "PushReply": "push_reply",
    "LeaveRequest": "leave",
    "LeaveReply": "leave_reply",
    "Rows": "rows",
    "File": "file",
    "SnapshotRequest": "snapshot",
    "SnapshotReply": "snapshot_reply",
    "RestoreRequest": "restore",
    "RestoreReply": "restore_reply",
    "StatsRequest": "stats",
    "StatsReply": "stats_reply",
    "SlowCall": "slow_call",
    "TableStats": "table_stats",
    "MoveRequest": "move",
    "MoveReply": "move_reply",
    "Piece": "piece",
    "Sightings": "sightings",
    "Handover": "handover",
    "ManyRequest": "many",
    "Part": "part",
    "ManyReply": "many_reply",
    "ChangesRequest": "changes",
    "ChangesReply": "changes_reply",
    "Result": "result",
    "PlanRequest": "plan",
    "PlanFeature": "plan_feature",
    "PlanReply": "plan_reply",
    "SubmitRequest": "submit",
    "BatchFeature": "batch_feature",
    "BatchIds": "batch_ids",
    "BatchOffsets": "batch_offsets",
    "Tensor": "tensor",
    "SubmitReply": "submit_reply",
    "TakeRequest": "take",
    "TakeReply": "take_reply",
    "ReturnRequest": "return",
    "ReturnReply": "return_reply",
    "WorkerStatsReply": "worker_stats_reply",
    "WorkerStats": "embedding_worker_stats",
    "HeartbeatRequest": "heartbeat",
    "BatchName": "batch_name",
    "RowIds": "row_ids",
    "RowOffsets": "row_offsets",
    "BatchWeights": "batch_weights",
    "TableSum": "table_sum",
    "LoaderPart": "loader_part",
    "SumsReply": "sums_reply",
    "FailedBatch": "failed_batch",
}
#: Words of 64 bits, their zeros left out.
WORDS = {"window", "gaps"}
DTYPE_BYTES = (4, 2, 2)
#: Messages whose dtype is that of values within.
OF_DTYPE = {"PullReply", "PushRequest", "TakeReply", "ReturnRequest"}

Message = Any
Struct = Any


def _place(struct: Struct, field: Any) -> tuple[Struct, str]:
    """The struct that has the field's member, and the member's name."""
    name = RENAMED.get(field.name, field.name)
    if not hasattr(struct, name) and hasattr(struct, "grads"):
        struct = struct.grads
    assert hasattr(struct, name), field.full_name
    return struct, name


def _counted(struct: Struct) -> Struct:
    """The struct that has the count of bulk data."""
    return struct if hasattr(struct, "n") else struct.grads


def fields(message: Message) -> list[Any]:
    """The fields that mean something."""
    return [f for f in message.DESCRIPTOR.fields if f.name != "pad"]


def _element_bytes(field: Any, message: Message, dtype: int) -> int:
    """Bytes of a bulk field for one id."""
    if field.name == "values":
        return int(message.dim) * DTYPE_BYTES[dtype]
    if field.name == "vectors" and hasattr(message, "vector_bytes"):
        return int(message.vector_bytes)
    if field.name in {"vectors", "grads"}:
        return int(message.dim) * 4
    if message.DESCRIPTOR.name == "RowOffsets":
        return 4
    if field.name == "state":
        return int(message.state_floats) * 4
    sizes = {"ids": 8, "scales": 4, "rows": 4, "found": 1}
    sizes |= {"places": 4, "weights": 4, "message": 1}
    sizes |= {"clocks": 4, "fields": 4, "words": 4}
    return (sizes | {"offsets": 8, "data": 1})[field.name]


def _count(message: Message, dtype: int) -> int:
    """How many ids or rows a message with bulk data has."""
    if hasattr(message, "ids"):
        return len(message.ids) // 8
    if hasattr(message, "offsets"):
        return len(message.offsets) // _element_bytes(
            message.DESCRIPTOR.fields_by_name["offsets"], message, dtype
        )
    for name in ("data", "message"):
        if hasattr(message, name):
            return len(getattr(message, name))
    if hasattr(message, "words"):
        return len(message.words) // 4
    if hasattr(message, "weights"):
        return len(getattr(message, "places", message.weights)) // 4
    return len(message.values) // (message.dim * DTYPE_BYTES[dtype] or 1)


def fill(struct: Struct, message: Message, keep: list[Any], dtype: int = 0):
    """Put a message into a struct; `keep` holds what it points to."""
    dtype = getattr(message, "dtype", dtype)
    for field in fields(message):
        owner, name = _place(struct, field)
        value = getattr(message, field.name)
        if field.type == field.TYPE_MESSAGE and field.is_repeated:
            kind = STRUCTS[NAMES[field.message_type.name]]
            array = (kind * len(value))()
            for element, part in zip(array, value, strict=True):
                fill(element, part, keep, dtype)
            keep.append(array)
            setattr(owner, name, ctypes.addressof(array) if value else None)
            setattr(owner, COUNTS.get(name, name + "_n"), len(value))
        elif field.type == field.TYPE_MESSAGE:
            fill(getattr(owner, name), value, keep, dtype)
        elif field.is_repeated:
            array = (ctypes.c_uint64 * len(value))(*value)
            keep.append(array)
            setattr(owner, name, ctypes.addressof(array) if value else None)
            setattr(owner, name + "_n", len(value))
        elif name in WORDS:
            ctypes.memmove(getattr(owner, name), value, len(value))
        elif field.type == field.TYPE_BYTES:
            data = ctypes.create_string_buffer(value, len(value) or 1)
            keep.append(data)
            setattr(owner, name, ctypes.addressof(data) if value else None)
            _counted(struct).n = _count(message, dtype)
        elif field.type == field.TYPE_STRING:
            setattr(owner, name, value.encode())
        else:
            setattr(owner, name, value)


def extract(struct: Struct, message: Message, dtype: int = 0) -> None:
    """Put what a struct means into an empty message."""
    if message.DESCRIPTOR.name in OF_DTYPE:
        dtype = struct.dtype
    last = [f for f in fields(message) if f.type == f.TYPE_BYTES]
    for field in [f for f in fields(message) if f not in last] + last:
        owner, name = _place(struct, field)
        value = getattr(owner, name)
        if field.type == field.TYPE_MESSAGE and field.is_repeated:
            n = getattr(owner, COUNTS.get(name, name + "_n"))
            kind = STRUCTS[NAMES[field.message_type.name]] * n
            for element in kind.from_address(value) if n else ():
                extract(element, getattr(message, field.name).add(), dtype)
        elif field.type == field.TYPE_MESSAGE:
            extract(value, getattr(message, field.name), dtype)
        elif field.is_repeated:
            n = getattr(owner, name + "_n")
            kind = ctypes.c_uint64 * n
            numbers = kind.from_address(value) if n else ()
            getattr(message, field.name).extend(numbers)
        elif name in WORDS:
            words = np.ctypeslib.as_array(value).tobytes().rstrip(b"\0")
            setattr(message, name, words + bytes(-len(words) % 8))
        elif field.type == field.TYPE_BYTES:
            if value is not None:
                size = _element_bytes(field, message, dtype)
                size *= _counted(struct).n
                setattr(message, field.name, ctypes.string_at(value, size))
        elif field.type == field.TYPE_STRING:
            setattr(message, field.name, value.decode())
        else:
            setattr(message, field.name, value)


class Wire:
    """wire_put_*, wire_get_* and the rest of libpersia.so."""

    def __init__(self) -> None:
        self.lib = ctypes.CDLL(str(LIBRARY))
        self.lib.persia_err_text.restype = ctypes.c_char_p
        self.lib.persia_err_name.restype = ctypes.c_char_p

    def error(self, code: int) -> str:
        """Class and text of this thread's last error."""
        name, text = self.lib.persia_err_name(code), self.lib.persia_err_text()
        return f"{name.decode()}: {text.decode()}"

    def write(self, message: Message) -> bytes:
        """What C writes for a message; ValueError if it refuses to."""
        name, keep = NAMES[message.DESCRIPTOR.name], []
        struct = STRUCTS[name]()
        fill(struct, message, keep)
        out = STRUCTS["out"]()
        self.lib.persia_wire_out_init(ctypes.byref(out))
        try:
            code = getattr(self.lib, f"persia_wire_put_{name}")(
                ctypes.byref(out), ctypes.byref(struct)
            )
            if code:
                raise ValueError(self.error(code))
            data = ctypes.create_string_buffer(out.bytes or 1)
            self.lib.persia_wire_out_copy(ctypes.byref(out), data)
            return data.raw[: out.bytes]
        finally:
            self.lib.persia_wire_out_free(ctypes.byref(out))

    def read(self, data: bytes, empty: Message, shift: int = 0) -> Message:
        """What C reads from data that begin `shift` bytes behind an address
        aligned to 64; ValueError if it refuses to."""
        name = NAMES[empty.DESCRIPTOR.name]
        memory, struct = STRUCTS["memory"](), STRUCTS[name]()
        self.lib.persia_wire_memory_init(ctypes.byref(memory))
        room = np.empty(len(data) + shift + 64, np.uint8)
        begin = -room.ctypes.data % 64 + shift
        room[begin : begin + len(data)] = np.frombuffer(data, np.uint8)
        try:
            code = getattr(self.lib, f"persia_wire_get_{name}")(
                ctypes.c_void_p(room.ctypes.data + begin),
                ctypes.c_size_t(len(data)),
                ctypes.byref(memory),
                ctypes.byref(struct),
            )
            if code:
                raise ValueError(self.error(code))
            extract(struct, empty)
            return empty
        finally:
            self.lib.persia_wire_memory_free(ctypes.byref(memory))
