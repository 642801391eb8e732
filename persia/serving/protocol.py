"""The Open Inference Protocol v2 over HTTP: bodies to tensors, and back.

Bytes come from anywhere: whatever they are, they are decoded, or refused with
an error that names the tensor. Nothing of a socket is known here.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from persia.errors import (
    DtypeError,
    InvalidArgument,
    LimitReached,
    ProtocolError,
    ShapeError,
)

Array = npt.NDArray[Any]
#: Name, datatype, shape, and the elements row after row, little-endian; each
#: of BYTES behind four bytes of its length.
RawTensor = tuple[str, str, Sequence[int], Any]

_TYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype("?"),
    "UINT8": np.dtype("u1"),
    "UINT16": np.dtype("<u2"),
    "UINT32": np.dtype("<u4"),
    "UINT64": np.dtype("<u8"),
    "INT8": np.dtype("i1"),
    "INT16": np.dtype("<i2"),
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
    "FP16": np.dtype("<f2"),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
}
_NAMES = {dtype: name for name, dtype in _TYPES.items()}
#: Parameters of a tensor that ask for another answer than one without them.
_REFUSED = "shared_memory_region", "classification"
_DIMS = 8
_TENSORS = 4096
_ELEMENTS = 1 << 26  # of a tensor


@dataclasses.dataclass(frozen=True)
class Request:
    """What a client asks.

    Attributes:
        inputs: its tensors, whose bytes were not counted yet: that does
            ``_core.InferRequest``, for all protocols.
        outputs: the names that are asked for; None: all.
        binary: the outputs that are given as bytes; None: all, or none, as
            ``binary_default`` says.
        binary_default: for outputs of which nothing is said.
        id: of the client; it is given back.
        parameters: of the request.
    """

    inputs: list[RawTensor]
    outputs: Sequence[str] | None
    binary: Mapping[str, bool]
    binary_default: bool
    id: str | None
    parameters: Mapping[str, Any]

    @property
    def timeout(self) -> float | None:
        """Seconds that it may take; None: as the server says."""
        value = self.parameters.get("timeout")
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise InvalidArgument(
                f"the parameter timeout is {value!r}, need microseconds"
            )
        return value / 1e6


def decode(body: bytes, header: int | None) -> Request:
    """A request of its body.

    Args:
        body: JSON, and behind it the tensors that are bytes.
        header: bytes of the JSON, where the client says so.

    Raises:
        ProtocolError: it is malformed.
        InvalidArgument, DtypeError, ShapeError, LimitReached: a tensor is
            not what it says.
    """
    if header is None:
        header = len(body)
    if not 0 <= header <= len(body):
        raise ProtocolError(
            f"Inference-Header-Content-Length is {header}, and the body has "
            f"{len(body)} bytes"
        )
    try:
        document = json.loads(body[:header])
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"the request is no JSON: {error}") from None
    if not isinstance(document, dict):
        raise ProtocolError("the request is no JSON object")
    entries = document.get("inputs")
    if not isinstance(entries, list) or not 0 < len(entries) <= _TENSORS:
        raise ProtocolError("the request has no list of inputs")
    rest = _Rest(memoryview(body)[header:])
    inputs = [_input(entry, rest) for entry in entries]
    if len({one[0] for one in inputs}) < len(inputs):
        raise ProtocolError("an input occurs twice")
    if rest.left:
        raise ProtocolError(
            f"{rest.left} bytes follow the last tensor: see "
            "binary_data_size of the inputs"
        )
    return _request(document, inputs)


def _request(document: Mapping[str, Any], inputs: list[RawTensor]) -> Request:
    parameters = _object(document, "parameters")
    outputs, binary = None, {}
    if (asked := document.get("outputs")) is not None:
        if not isinstance(asked, list):
            raise ProtocolError("outputs is no list")
        outputs = []
        for one in asked:
            if not isinstance(one, dict):
                raise ProtocolError("an output is no object")
            name = _text(one, "name")
            outputs.append(name)
            wanted = _parameters_of(name, one).get("binary_data")
            if wanted is not None:
                binary[name] = bool(wanted)
    given = document.get("id")
    if given is not None and not isinstance(given, str):
        raise ProtocolError("the id is no string")
    return Request(
        inputs=inputs,
        outputs=outputs,
        binary=binary,
        binary_default=bool(parameters.get("binary_data_output", False)),
        id=given,
        parameters=parameters,
    )


class _Rest:
    """The bytes behind the JSON."""

    def __init__(self, data: memoryview) -> None:
        self._data = data

    @property
    def left(self) -> int:
        return len(self._data)

    def take(self, n: int) -> memoryview:
        found, self._data = self._data[:n], self._data[n:]
        return found


def _object(entry: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = entry.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ProtocolError(f"{key} is no object")
    return value


def _parameters_of(name: str, tensor: Mapping[str, Any]) -> Mapping[str, Any]:
    found = _object(tensor, "parameters")
    for one in _REFUSED:
        if one in found:
            raise InvalidArgument(
                f"{name}: the parameter {one} of a tensor is not supported"
            )
    return found


def _text(entry: Mapping[str, Any], key: str) -> str:
    value = entry.get(key)
    if not isinstance(value, str) or not value:
        raise ProtocolError(f"a tensor has no {key}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ProtocolError(f"the {key} of a tensor is no text") from None
    return value


def _input(entry: Any, rest: _Rest) -> RawTensor:
    if not isinstance(entry, dict):
        raise ProtocolError("an input is no object")
    name, datatype = _text(entry, "name"), _text(entry, "datatype")
    shape = entry.get("shape")
    if type(shape) is not list or not all(type(n) is int for n in shape):
        raise ShapeError(f"{name}: the shape is {shape!r}, need 1 to 8 sizes")
    if any(abs(n) > _ELEMENTS for n in shape):
        raise LimitReached(
            f"{name}: shape {shape} has more than {_ELEMENTS:,} elements"
        )
    size = _parameters_of(name, entry).get("binary_data_size")
    data = entry.get("data")
    if (size is None) == (data is None):
        raise ProtocolError(
            f"{name}: need data, or binary_data_size, and not both"
        )
    if data is not None:
        return name, datatype, shape, _of_json(name, datatype, shape, data)
    if not isinstance(size, int) or not 0 <= size <= rest.left:
        raise ProtocolError(
            f"{name}: binary_data_size is {size!r}, and {rest.left} bytes are "
            "left"
        )
    return name, datatype, shape, rest.take(size)


def _flat(data: Any, out: list[Any], limit: int) -> None:
    """The elements of nested lists."""
    stack = [iter([data])]
    while stack:
        for one in stack[-1]:
            if isinstance(one, list):
                stack.append(iter(one))
                if len(stack) > _DIMS + 2:
                    raise ProtocolError("data is nested too deep")
                break
            out.append(one)
            if len(out) > limit:
                return
        else:
            stack.pop()


def _of_json(
    name: str, datatype: str, shape: Sequence[int], data: Any
) -> bytes | Array:
    count = math.prod(shape)
    values: list[Any] = []
    _flat(data, values, count)
    if len(values) != count:
        more = "more than " if len(values) > count else ""
        raise ShapeError(
            f"{name}: shape {shape} has {count} elements, data "
            f"{more}{min(len(values), count)}"
        )
    if datatype == "BYTES":
        return _texts(name, values)
    if datatype not in _TYPES:
        raise DtypeError(
            f"{name}: no datatype {datatype!r}; there are "
            f"{', '.join(_TYPES)} and BYTES"
        )
    kind = _TYPES[datatype]
    allowed: tuple[type, ...] = (int,)
    if kind.kind == "b":
        allowed = (bool,)
    elif kind.kind == "f":
        allowed = (int, float)
    for one in values:
        if not isinstance(one, allowed) or (
            isinstance(one, bool) and kind.kind != "b"
        ):
            raise DtypeError(f"{name}: {one!r} is no {datatype}")
    try:
        # Integers never pass through floats, which have 53 bits.
        return np.array(values, kind)
    except (OverflowError, ValueError, TypeError):
        raise DtypeError(f"{name}: a value is no {datatype}") from None


def _texts(name: str, values: Sequence[Any]) -> bytes:
    parts = []
    for one in values:
        if not isinstance(one, str):
            raise DtypeError(f"{name}: {one!r} is no text")
        try:
            text = one.encode()
        except UnicodeEncodeError:
            raise DtypeError(f"{name}: half a character") from None
        parts += [len(text).to_bytes(4, "little"), text]
    return b"".join(parts)


def arrays_of(
    tensors: Iterable[tuple[str, str, Sequence[int], bytes]],
) -> dict[str, Array]:
    """Arrays by name, of tensors whose bytes are those of their shapes: as
    ``_core.InferRequest.tensors`` gives them. BYTES is an array of ``bytes``
    objects.

    Raises:
        ProtocolError: a name occurs twice.
        DtypeError: numpy has no such type.
    """
    found: dict[str, Array] = {}
    for name, datatype, shape, data in tensors:
        if name in found:
            raise ProtocolError(f"input {name!r} occurs twice")
        if datatype == "BYTES":
            found[name] = _elements(data).reshape(shape)
        elif datatype in _TYPES:
            array = np.frombuffer(data, _TYPES[datatype])
            found[name] = array.reshape(shape)
        else:
            raise DtypeError(f"{name}: {datatype} cannot be read here")
    return found


def _elements(data: bytes) -> Array:
    found, at = [], 0
    while at < len(data):
        end = at + 4 + int.from_bytes(data[at : at + 4], "little")
        found.append(data[at + 4 : end])
        at = end
    out = np.empty(len(found), object)
    out[:] = found
    return out


def output_of(name: str, array: Array) -> RawTensor:
    """An array as an output of that name."""
    return name, _NAMES[array.dtype], array.shape, array


def encode(
    request: Request,
    model: str,
    version: str,
    outputs: Mapping[str, Array],
) -> tuple[bytes, int | None]:
    """The body of an answer, and the bytes of its JSON; None: it is all.

    Args:
        request: that it answers.
        model, version: that computed it.
        outputs: arrays of the types of the protocol, by name; all that the
            request asks for are there.
    """
    names = list(outputs) if request.outputs is None else request.outputs
    entries, parts = [], []
    for name in names:
        array = np.ascontiguousarray(outputs[name])
        entry: dict[str, Any] = {
            "name": name,
            "datatype": _NAMES[array.dtype],
            "shape": list(array.shape),
        }
        if request.binary.get(name, request.binary_default):
            raw = array.tobytes()
            entry["parameters"] = {"binary_data_size": len(raw)}
            parts.append(raw)
        else:
            entry["data"] = _numbers(array)
        entries.append(entry)
    document: dict[str, Any] = {
        "model_name": model,
        "model_version": version,
        "outputs": entries,
    }
    if request.id is not None:
        document["id"] = request.id
    text = json.dumps(document, allow_nan=False).encode()
    return b"".join([text, *parts]), len(text) if parts else None


def _numbers(array: Array) -> list[Any]:
    """JSON has no NaN: null stands for it, and for infinite numbers."""
    values: list[Any] = array.reshape(-1).tolist()
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        return [v if math.isfinite(v) else None for v in values]
    return values
