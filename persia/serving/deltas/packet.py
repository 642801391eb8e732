"""Packets: one file each, with what changed since the packet before.

docs/reference/exports.md has the format.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import pydantic
import torch
from torch import Tensor

from persia import _core
from persia.errors import CorruptFile, SchemaMismatch
from persia.serving.rows import TYPES, RowType

FORMAT: Literal["persia-delta-1"] = "persia-delta-1"
#: Of packets below the root of an export, by chain and number.
FOLDER = "deltas"
#: The checksum of nothing: the parent of a chain's first packet.
NONE = "00000000"
_HEADER_MAX = 64 << 20
_CRC = re.compile(rb'"crc32c":"([0-9a-f]{8})"')
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

_Hex8 = Annotated[str, pydantic.Field(pattern="^[0-9a-f]{8}$")]
Ids = npt.NDArray[np.int64]
_NOTHING = np.zeros(0, np.uint8)


class _Entry(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)


class ChainPlace(_Entry):
    """A place in a chain: all packets up to one are in it.

    Attributes:
        chain: its name: a training whose rows have not been replaced.
        number: of the packet; 0: none yet.
        crc32c: of that packet.
    """

    chain: str = pydantic.Field(pattern="^[0-9a-f]{32}$")
    number: int = pydantic.Field(ge=0, lt=10**12)
    crc32c: _Hex8 = NONE

    @property
    def next_name(self) -> str:
        """Where the packet behind it is, below the root."""
        return packet_name(self.chain, self.number + 1)


class PacketTable(_Entry):
    """A table of a packet, as the rows of it are kept."""

    name: str
    type: RowType
    dim: int = pydantic.Field(ge=1, le=1 << 16)


class PacketHead(_Entry):
    """The metadata of a packet; its values are texts in the file.

    Attributes:
        chain, number: of the packet.
        parent: CRC-32C of the packet before.
        crc32c: of the file, whose eight digits here are zeros.
        tables: in the order of its tensors.
        since, until: seconds since 1970: of the packet before, or of the
            beginning, and of the moment that it describes.
        updates: of the training then.
    """

    format: Literal["persia-delta-1"]
    chain: str = pydantic.Field(pattern="^[0-9a-f]{32}$")
    number: int = pydantic.Field(ge=1, lt=10**12)
    parent: _Hex8
    crc32c: _Hex8
    tables: list[PacketTable]
    since: float
    until: float
    updates: int


class Changes(NamedTuple):
    """What changed in a table.

    Attributes:
        rows: uint8 [n, stride], as in a file of rows, each id once.
        gone: int64 ids that have no row any more.
        erased: int64 ids that were erased by hand: older versions of the
            model must not have them either.
    """

    rows: npt.NDArray[np.uint8]
    gone: Ids
    erased: Ids


class Packet(NamedTuple):
    """A packet: its head, what changed in each table, and the dense part by
    the names of its graph."""

    head: PacketHead
    tables: list[Changes]
    dense: dict[str, Tensor]

    @property
    def place(self) -> ChainPlace:
        """The place of a version that has it."""
        head = self.head
        return ChainPlace(
            chain=head.chain, number=head.number, crc32c=head.crc32c
        )


def packet_name(chain: str, number: int) -> str:
    """The path of a packet below the root."""
    return f"{FOLDER}/{chain}/{number:012d}.safetensors"


# ---- writing ---------------------------------------------------------------


class Encoded(NamedTuple):
    """A packet as a file.

    Attributes:
        parts: its bytes, one after another.
        crc32c: its checksum.
    """

    parts: list[bytes | memoryview]
    crc32c: str


def _bytes_of(x: npt.NDArray[Any]) -> memoryview:
    flat = np.ascontiguousarray(x).reshape(-1)
    return flat.view(np.uint8).data


def _dense_bytes(x: Tensor) -> memoryview:
    flat = x.detach().cpu().contiguous().reshape(-1)
    return _bytes_of(flat.view(torch.uint8).numpy() if len(flat) else _NOTHING)


def encode_packet(
    head: Mapping[str, Any],
    tables: Sequence[Changes],
    dense: Mapping[str, Tensor],
) -> Encoded:
    """A packet as a file, which shares the memory of its rows.

    Args:
        head: the fields of :class:`PacketHead` but ``format`` and ``crc32c``.
        tables: in the order of ``head["tables"]``.
        dense: tensors by name.
    """
    found = PacketHead(format=FORMAT, crc32c=NONE, **head)
    header: dict[str, Any] = {"__metadata__": _texts(found)}
    parts: list[memoryview] = []
    size = 0

    def add(
        name: str, dtype: str, shape: Sequence[int], data: memoryview
    ) -> None:
        nonlocal size
        ends = [size, size + len(data)]
        header[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": ends,
        }
        size = ends[1]
        parts.append(data)

    for name, x in dense.items():
        add(f"dense.{name}", _NAMES[x.dtype], x.shape, _dense_bytes(x))
    for i, one in enumerate(tables):
        add(f"rows.{i}", "U8", one.rows.shape, _bytes_of(one.rows))
        add(f"gone.{i}", "I64", one.gone.shape, _bytes_of(one.gone))
        add(f"erased.{i}", "I64", one.erased.shape, _bytes_of(one.erased))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    begin = len(text).to_bytes(8, "little") + text
    crc = _core.ckpt_crc(begin)
    for part in parts:
        crc = _core.ckpt_crc(part, crc)
    return Encoded([_with_crc(begin, f"{crc:08x}"), *parts], f"{crc:08x}")


def _texts(head: PacketHead) -> dict[str, str]:
    return {
        name: value
        if isinstance(value, str)
        else json.dumps(value, separators=(",", ":"))
        for name, value in head.model_dump(mode="json").items()
    }


def _with_crc(begin: bytes, crc: str) -> bytes:
    at = _CRC.search(begin)
    assert at is not None
    return begin[: at.start(1)] + crc.encode() + begin[at.end(1) :]


# ---- reading ---------------------------------------------------------------


def decode_packet(data: bytes, where: str) -> Packet:
    """The packet in the bytes of a file.

    Args:
        data: all of it.
        where: the name of the file, for messages.

    Raises:
        CorruptFile: it is cut off, or altered.
        SchemaMismatch: it is of another format.
    """
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or size > min(_HEADER_MAX, len(data) - 8):
        raise CorruptFile(f"{where} is cut off: it has {len(data):,} bytes")
    begin, rest = data[: 8 + size], memoryview(data)[8 + size :]
    at = _CRC.search(begin)
    if at is None:
        raise CorruptFile(f"{where} is no packet: it has no checksum")
    zeros = _with_crc(begin, NONE)
    found = f"{_core.ckpt_crc(rest, _core.ckpt_crc(zeros)):08x}"
    if found != at.group(1).decode():
        raise CorruptFile(
            f"{where} is damaged: its checksum is {found}, and it names "
            f"{at.group(1).decode()}"
        )
    try:
        return _decoded(json.loads(begin[8:]), rest, where)
    except (*_MALFORMED, RecursionError) as error:
        raise CorruptFile(f"{where} is no packet: {error}") from None


#: What JSON of any kind makes of the code below.
_MALFORMED = ValueError, KeyError, TypeError, AttributeError, OverflowError


def _decoded(header: dict[str, Any], rest: memoryview, where: str) -> Packet:
    head = _head_of(header.pop("__metadata__"), where)
    rows = [
        _rows_of(header.pop(f"rows.{i}"), rest)
        for i in range(len(head.tables))
    ]
    tensors = {name: _tensor_of(one, rest) for name, one in header.items()}
    tables = [
        Changes(
            rows=one,
            gone=tensors.pop(f"gone.{i}").numpy(),
            erased=tensors.pop(f"erased.{i}").numpy(),
        )
        for i, one in enumerate(rows)
    ]
    _check_shapes(head, tables)
    dense = {_dense_name(name): x for name, x in tensors.items()}
    return Packet(head, tables, dense)


def _head_of(texts: dict[str, Any], where: str) -> PacketHead:
    if texts.get("format") != FORMAT:
        raise SchemaMismatch(
            f"{where} is of the format {str(texts.get('format'))[:40]!r}, "
            f"need {FORMAT}: another version of Persia wrote it"
        )
    plain = {"format", "chain", "parent", "crc32c"}
    return PacketHead.model_validate(
        {
            name: text if name in plain else json.loads(text)
            for name, text in texts.items()
        }
    )


def _place_of(
    entry: Mapping[str, Any], data: memoryview
) -> tuple[torch.dtype, list[int], memoryview]:
    dtype = _DTYPES[entry["dtype"]]
    first, end = (int(x) for x in entry["data_offsets"])
    shape = [int(n) for n in entry["shape"]]
    if not 0 <= first <= end <= len(data) or min([*shape, 0]) < 0:
        raise ValueError("a tensor lies outside of the file")
    if math.prod(shape) * dtype.itemsize != end - first:
        raise ValueError("a tensor has another size than its shape")
    if max([*shape, 0]) >= 1 << 40:  # more than torch has names for
        raise ValueError("a tensor has an impossible shape")
    return dtype, shape, data[first:end]


def _rows_of(
    entry: Mapping[str, Any], data: memoryview
) -> npt.NDArray[np.uint8]:
    """Of the file's own bytes."""
    dtype, shape, part = _place_of(entry, data)
    if dtype != torch.uint8:
        raise ValueError("rows are no uint8")
    return np.frombuffer(part, np.uint8).reshape(shape)


def _tensor_of(entry: Mapping[str, Any], data: memoryview) -> Tensor:
    dtype, shape, part = _place_of(entry, data)
    if not len(part):
        return torch.empty(shape, dtype=dtype)
    # A copy: aligned, and the file's bytes may go.
    return torch.frombuffer(bytearray(part), dtype=dtype).reshape(shape)


def _check_shapes(head: PacketHead, tables: Sequence[Changes]) -> None:
    for about, one in zip(head.tables, tables, strict=True):
        stride = _core.rows_stride(TYPES[about.type], about.dim)
        if one.rows.shape[1:] != (stride,):
            raise ValueError(
                f"the rows of table {about.name!r} are "
                f"{list(one.rows.shape)}, need [n, {stride}]"
            )
        if not _is_finite(about, one.rows):
            raise ValueError(f"a row of table {about.name!r} is not finite")
        for ids in one.gone, one.erased:
            if ids.dtype != np.int64 or ids.ndim != 1:
                raise ValueError("ids are no int64 [n]")


def _is_finite(about: PacketTable, rows: npt.NDArray[np.uint8]) -> bool:
    """Whether all values are finite, as those beside a file must be."""
    if about.type in ("fp32", "fp16"):
        size = 4 if about.type == "fp32" else 2
        values = rows[:, 8 : 8 + size * about.dim].view(f"<f{size}")
    else:
        most = 128 if about.type == "int8" else 8  # times the scale
        with np.errstate(over="ignore"):
            values = rows[:, 8:12].view("<f4") * np.float32(most)
    return bool(np.isfinite(values).all())


def _dense_name(name: str) -> str:
    prefix, _, rest = name.partition(".")
    if prefix != "dense" or not rest:
        raise ValueError(f"there is a tensor {name[:40]!r}")
    return rest
