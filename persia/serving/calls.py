"""The calls of gRPC's service ``inference.GRPCInferenceService`` that ask for
no inference: they are small, and rare. The C core reads those of ModelInfer.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

from persia import _core
from persia.errors import InternalError, PersiaError, ProtocolError
from persia.serving.service import Service

_THREADS = 4  # a load may take long, and the others are asked meanwhile
#: Of Triton's configurations, by their numbers.
_TYPES = [
    f"TYPE_{kind}"
    for kind in (
        *("INVALID", "BOOL", "UINT8", "UINT16", "UINT32", "UINT64"),
        *("INT8", "INT16", "INT32", "INT64"),
        *("FP16", "FP32", "FP64", "STRING", "BF16"),
    )
]
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


class Calls:
    """Threads that answer them until the queue is closed.

    Args:
        service: that answers.
        queue: of the calls.
    """

    def __init__(self, service: Service, queue: _core.InferQueue) -> None:
        self._service = service
        self._queue = queue
        self._threads = [
            threading.Thread(
                target=self._work, name=f"persia-calls-{i}", daemon=True
            )
            for i in range(_THREADS)
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """After the queue was closed."""
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while (call := self._queue.take_other()) is not None:
            try:
                call.reply_message(answer(self._service, call))
            except PersiaError as error:
                call.fail(error.code, str(error))
            except Exception as error:  # a bug, or no memory
                text = f"{type(error).__name__}: {error}"
                call.fail(InternalError.code, text)


def answer(service: Service, call: _core.InferRequest) -> bytes:
    """The message that answers a call.

    Raises:
        ProtocolError: its message is malformed.
        PersiaError: what the service raises.
    """
    asked = read(call.message())
    method = call.method
    if method == "ServerLive":
        return number(1, True)
    if method == "ServerReady":
        return number(1, service.is_ready)
    if method == "ServerMetadata":
        about = service.about()
        return (
            text(1, about["name"])
            + text(2, about["version"])
            + b"".join(text(3, one) for one in about["extensions"])
        )
    if method == "ModelReady":
        name, version = text_of(asked, 1), text_of(asked, 2)
        return number(1, service.model_is_ready(name, version))
    if method == "ModelMetadata":
        about = service.model_about(text_of(asked, 1), text_of(asked, 2))
        return _metadata(about)
    if method == "ModelConfig":
        config = service.config(text_of(asked, 1), text_of(asked, 2))
        return part(1, _config(config))
    if method == "ModelStatistics":
        one = service.statistics(text_of(asked, 1), text_of(asked, 2))
        return part(1, _statistics(one))
    if method == "RepositoryIndex":
        every = service.index(asked.get(2, [0])[-1] == 1)
        return b"".join(
            part(
                1,
                text(1, one["name"])
                + text(2, one["version"])
                + text(3, one["state"]),
            )
            for one in every
        )
    if method == "RepositoryModelLoad":
        service.load(text_of(asked, 2), _parameters(asked))
    else:
        service.unload(text_of(asked, 2))
    return b""


def _metadata(about: dict[str, Any]) -> bytes:
    out = [text(1, about["name"])]
    out += [text(2, one) for one in about["versions"]]
    out.append(text(3, about["platform"]))
    for no, key in (4, "inputs"), (5, "outputs"):
        for one in about[key]:
            sizes = b"".join(varint(n) for n in one["shape"])
            tensor = text(1, one["name"]) + text(2, one["datatype"])
            out.append(part(no, tensor + part(3, sizes)))
    return b"".join(out)


def _config(config: dict[str, Any]) -> bytes:
    out = [text(1, config["name"]), text(2, config["platform"])]
    for no, key, sizes in (5, "input", 4), (6, "output", 3):
        for one in config[key]:
            dims = b"".join(varint(n) for n in one["dims"])
            kind = number(2, _TYPES.index(one["data_type"]))
            tensor = text(1, one["name"]) + kind + part(sizes, dims)
            out.append(part(no, tensor))
    return b"".join(out)


def _statistics(one: dict[str, Any]) -> bytes:
    out = [text(1, one["name"]), text(2, one["version"])]
    names = "last_inference", "inference_count", "execution_count"
    out += [number(i, one[name]) for i, name in enumerate(names, 3)]
    kinds = [
        part(i, number(1, found["count"]) + number(2, found["ns"]))
        for i, found in enumerate(one["inference_stats"].values(), 1)
    ]
    return b"".join([*out, part(6, b"".join(kinds))])


def _parameters(asked: Fields) -> dict[str, str]:
    """Those of a load that are texts: a map's entry has the name as field 1,
    and the value as field 2, whose text is field 3."""
    found = {}
    for entry in asked.get(3, ()):
        fields = read(_bytes(entry))
        value = fields.get(2, [b""])[-1]
        found[text_of(fields, 1)] = text_of(read(_bytes(value)), 3)
    return found


# ---- messages of protobuf

Fields = dict[int, list[int | bytes]]


def read(message: bytes) -> Fields:
    """The fields of a message, by number.

    Raises:
        ProtocolError: it is malformed.
    """
    found: Fields = {}
    for number, value in _fields(message):
        found.setdefault(number, []).append(value)
    return found


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    at = 0
    while at < len(message):
        tag, at = _number(message, at)
        coding = tag & 7
        if coding == _VARINT:
            value, at = _number(message, at)
            yield tag >> 3, value
            continue
        size = {_FIXED64: 8, _FIXED32: 4}.get(coding)
        if coding == _BYTES:
            size, at = _number(message, at)
        if size is None or size > len(message) - at:
            raise ProtocolError("the request is no message")
        yield tag >> 3, message[at : at + size]
        at += size


def _number(message: bytes, at: int) -> tuple[int, int]:
    value = 0
    for i, byte in enumerate(message[at : at + 10]):
        value |= (byte & 0x7F) << (7 * i)
        if byte < 0x80:
            return value, at + i + 1
    raise ProtocolError("the request is no message: a number is cut off")


def _bytes(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise ProtocolError("the request is no message of this method")
    return value


def text_of(fields: Fields, number: int) -> str:
    """A text; "" where it is not there.

    Raises:
        ProtocolError: it is none.
    """
    try:
        return _bytes(fields.get(number, [b""])[-1]).decode()
    except UnicodeDecodeError:
        raise ProtocolError("a name is no UTF-8") from None


def varint(value: int) -> bytes:
    """A number; below 0 in 64 bits."""
    value %= 1 << 64
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def part(number: int, data: bytes) -> bytes:
    """A field of bytes."""
    return varint(number << 3 | _BYTES) + varint(len(data)) + data


def text(number: int, value: str) -> bytes:
    """A field of text."""
    return part(number, value.encode())


def number(field: int, value: int) -> bytes:
    """A field that is a number, or true or false."""
    return varint(field << 3 | _VARINT) + varint(value)
