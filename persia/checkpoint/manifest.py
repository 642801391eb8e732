"""The manifest of a checkpoint: what there is, and which shard reads what.

Nothing of torch: a server reads manifests, too.
"""

from __future__ import annotations

import dataclasses
import json
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import pydantic

from persia import _core
from persia.base.warning import warn
from persia.checkpoint.ledgers import (
    BYTES,
    Numbers,
    in_part,
    merge,
    of_streams,
)
from persia.errors import CorruptFile, InvalidArgument, SchemaMismatch

FORMAT = "persia.checkpoint"
VERSION = 2
MANIFEST = "manifest.json"
SHARDS_MAX = 4096
SLOTS: Final = 4096  # that ids are placed in, see csrc/ids/ids.h


class _Entry(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(
        extra="forbid", frozen=True, strict=True
    )


_U64 = pydantic.Field(ge=0, lt=1 << 64)
_U64_0 = pydantic.Field(0, ge=0, lt=1 << 64)  # of those that lack it


class File(_Entry):
    """A file of the folder; its checksum is the CRC-32C of all its bytes."""

    name: str = pydantic.Field(pattern="^[A-Za-z0-9_-][A-Za-z0-9._-]*$")
    bytes: int = _U64
    crc32c: str = pydantic.Field(pattern="^[0-9a-f]{8}$")


class RowFile(File):
    """A safetensors file with rows of one table and one shard."""

    rows: int = _U64
    shard: int = pydantic.Field(ge=0)


class Table(_Entry):
    """A table: its options, its rows, and its clock at each shard."""

    name: str
    seed: int
    dim: int
    dtype: Literal["fp32", "bf16", "int8"]
    optimizer: str
    momentum: bool
    init: Literal["uniform", "normal", "constant"]
    init_a: float
    init_b: float
    state_init: float
    admission: float
    missing: Literal["init", "zeros"]
    nonfinite: Literal["raise", "skip"]
    capacity: int
    full: str
    evict_updates: int = _U64_0
    evict_seconds: int = _U64_0
    evict_score: str = ""
    admit: str = "probability"
    sightings: int = _U64_0
    sightings_kept: int = _U64_0
    state_floats: int
    rows: int = _U64
    pushes: list[int] = pydantic.Field(min_length=1)
    files: list[RowFile]

    def native(self) -> dict[str, Any]:
        """The options as the core's numbers: arguments of its declare()."""
        options = {name: getattr(self, name) for name in _core.TABLE_OPTIONS}
        for name, names in _core.TABLE_OPTIONS.items():
            if names:
                options[name] = names.index(options[name])
        return options

    @pydantic.model_validator(mode="after")
    def _check(self) -> Table:
        for option in "optimizer", "full", "admit":
            if getattr(self, option) not in _core.TABLE_OPTIONS[option]:
                raise ValueError(
                    f"table {self.name!r} has {option} "
                    f"{getattr(self, option)!r}"
                )
        if sum(file.rows for file in self.files) != self.rows:
            raise ValueError(
                f"the rows of the files of table {self.name!r} are not "
                f"{self.rows}"
            )
        if not all(0 <= clock < 1 << 64 for clock in self.pushes):
            raise ValueError(f"a clock of table {self.name!r} is impossible")
        return self


class Ledger(_Entry):
    """The updates of a stream that a shard has: all up to the watermark except
    `skipped` of them, and watermark + 1 + i where bit i of the window
    (hexadecimal) is 1."""

    stream: int = _U64
    watermark: int = _U64
    window: str = pydantic.Field(pattern="^(0|[1-9a-f][0-9a-f]{0,1023})$")
    skipped: int = pydantic.Field(0, ge=0, lt=2**64)
    incarnation: int = pydantic.Field(0, ge=0, lt=2**64)

    def numbers(self) -> Numbers:
        """The same, as a shard takes it."""
        return Numbers(
            self.stream,
            self.watermark,
            int(self.window, 16).to_bytes(BYTES, "little"),
            self.skipped,
            self.incarnation,
        )


class Shard(_Entry):
    """Counters of a shard at the checkpoint; `sync_step`: of steps that all
    ranks took together; `t`: the highest of an update (Adam's step count);
    `restore`: the id of the restore that its rows are from, 0 if of none.
    """

    updates: int = _U64
    sync_step: int = _U64
    t: int | None = pydantic.Field(None, ge=0, lt=2**64)
    restore: int = pydantic.Field(0, ge=0, lt=1 << 64)
    ledgers: list[Ledger]

    @property
    def highest_t(self) -> int:
        """Of its updates; servers of before counted them for it."""
        return self.updates if self.t is None else self.t


class Manifest(_Entry):
    """What a checkpoint holds. `training` names the training that it is of: a
    store that has loaded a checkpoint continues its training.

    Of S slots (65536 before shards had slots) shard i of N has i * S / N up to
    (i + 1) * S / N; the slot of an id is the low 16 bits of its hash, times
    S / 65536.
    """

    format: Literal["persia.checkpoint"]
    version: Literal[2]
    id: str
    lineage: str
    training: str = ""
    job: str = ""
    step: int = pydantic.Field(ge=0)
    saved: str
    torch: str
    slots: Literal[4096, 65536] = 65536
    shards: list[Shard] = pydantic.Field(min_length=1, max_length=SHARDS_MAX)
    tables: list[Table]
    dense: File

    @pydantic.model_validator(mode="after")
    def _check(self) -> Manifest:
        names = {MANIFEST, self.dense.name}
        files = [file for table in self.tables for file in table.files]
        if len(names | {file.name for file in files}) != len(files) + 2:
            raise ValueError("two files have one name")
        if any(file.shard >= len(self.shards) for file in files):
            raise ValueError("a file is of a shard that is not there")
        if any(len(t.pushes) != len(self.shards) for t in self.tables):
            raise ValueError("a table has not one clock a shard")
        if len({table.name for table in self.tables}) != len(self.tables):
            raise ValueError("two tables have one name")
        return self

    @property
    def updates(self) -> int:
        """Of the shard that has most."""
        return max(shard.updates for shard in self.shards)

    @property
    def t(self) -> int:
        """The highest of an update."""
        return max(shard.highest_t for shard in self.shards)


def training_of(raw: bytes | None) -> str | None:
    """The training that a manifest names; None: it cannot be read."""
    try:
        return str(json.loads(raw or b"")["training"])
    except KeyError:  # of an earlier version
        return ""
    except (ValueError, TypeError):
        return None


def _upgrade(document: dict[str, Any]) -> dict[str, Any]:
    """A manifest of version 1 (one process, one shard) as one of version 2."""
    if document["shards"] != 1:
        raise ValueError("version 1 has one shard")
    shard = {"updates": document.pop("updates"), "sync_step": 0, "ledgers": []}
    tables = [
        table
        | {
            "pushes": [table["pushes"]],
            "files": [file | {"shard": 0} for file in table["files"]],
        }
        for table in document["tables"]
    ]
    return document | {"version": 2, "shards": [shard], "tables": tables}


def encode_manifest(document: dict[str, Any]) -> bytes:
    """The one text of a manifest: it ends with a checksum of the rest."""
    body = {key: document[key] for key in document if key != "crc32c"}
    crc = _core.ckpt_crc(json.dumps(body, sort_keys=True).encode())
    text = json.dumps(body | {"crc32c": f"{crc:08x}"}, indent=1)
    return (text + "\n").encode()


def decode_document(
    raw: bytes, path: Path | str, format: str, versions: Sequence[int]
) -> dict[str, Any]:
    """The reverse, of a document of this format; `path` is for messages.

    Raises:
        CorruptFile: it is not what was written.
        SchemaMismatch: it is of another format, or version.
    """
    try:
        document = json.loads(raw)
        if not isinstance(document, dict) or encode_manifest(document) != raw:
            raise ValueError("its text is not what its checksum says")
        del document["crc32c"]
    except (ValueError, KeyError, RecursionError) as error:
        raise CorruptFile(f"{path} is truncated or altered: {error}") from None
    version = document.get("version")
    if document.get("format") != format or version not in versions:
        known = " and ".join(map(str, versions))
        raise SchemaMismatch(
            f"{path} has format {document.get('format')!r}, version "
            f"{version!r}; this Persia reads {format!r}, version {known}: "
            "load it with the Persia that wrote it"
        )
    return document


def decode_manifest(raw: bytes, path: Path | str) -> Manifest:
    """The manifest of a checkpoint; errors are those of
    :func:`decode_document`."""
    document = decode_document(raw, path, FORMAT, (1, VERSION))
    try:
        if document["version"] == 1:
            document = _upgrade(document)
        return Manifest.model_validate(document)
    except (pydantic.ValidationError, KeyError, TypeError, ValueError) as e:
        raise CorruptFile(f"{path} is not a manifest: {e}") from None


# ---- shards ----------------------------------------------------------------


class Rows(NamedTuple):
    """A row file of a table, known by its number."""

    table: int
    name: str
    rows: int
    bytes: int
    crc: int


@dataclasses.dataclass(frozen=True)
class Part:
    """What one shard wrote, or is to read.

    Attributes:
        updates, sync_step, t: its counters, see :class:`Shard`.
        pushes: the clock of each table, by number.
        ledgers: of all streams that it knows.
        files: what it wrote; to be read: of all shards that had rows of its
            range.
        restore: that its rows are from.
    """

    updates: int
    sync_step: int
    t: int
    pushes: Sequence[int]
    ledgers: Sequence[Numbers]
    files: Sequence[Rows]
    restore: int = 0


def to_manifest(
    tables: Sequence[Mapping[str, Any]], parts: Sequence[Part]
) -> dict[str, Any]:
    """The entries "slots", "shards" and "tables" of a manifest.

    Args:
        tables: name and options of each, see :class:`Table`.
        parts: of each shard.
    """
    files: list[list[dict[str, Any]]] = [[] for _ in tables]
    for shard, part in enumerate(parts):
        for file in part.files:
            files[file.table].append(
                {
                    "name": file.name,
                    "rows": file.rows,
                    "bytes": file.bytes,
                    "crc32c": f"{file.crc:08x}",
                    "shard": shard,
                }
            )
    return {
        "slots": SLOTS,
        "shards": [
            {
                "updates": part.updates,
                "sync_step": part.sync_step,
                "t": part.t,
                "restore": part.restore,
                "ledgers": [
                    {
                        "stream": stream,
                        "watermark": watermark,
                        "window": f"{int.from_bytes(window, 'little'):x}",
                        "skipped": skipped,
                        "incarnation": incarnation,
                    }
                    for stream, watermark, window, skipped, incarnation in (
                        part.ledgers
                    )
                ],
            }
            for part in parts
        ],
        "tables": [
            {
                **table,
                "rows": sum(file["rows"] for file in files[number]),
                "pushes": [part.pushes[number] for part in parts],
                "files": files[number],
            }
            for number, table in enumerate(tables)
        ],
    }


def next_restore(before: Iterable[int]) -> int:
    """A new id of a restore. Of two restores the later one has the greater
    id: this one is above those of the rows that it replaces. Where all servers
    have forgotten what they had, the clock decides.

    42 bits are milliseconds, the others are random.
    """
    count = max((max(before, default=0) >> 22) + 1, time.time_ns() // 10**6)
    return min(count, (1 << 42) - 1) << 22 | secrets.randbits(22)


def hash_range(shard: int, shards: int, slots: int = SLOTS) -> range:
    """The low 16 bits of the hashes of a shard's ids, which are placed in
    slots: see csrc/ids/ids.h."""
    first, end = (-(-i * slots // shards) for i in (shard, shard + 1))
    return range(first * (65536 // slots), end * (65536 // slots))


def sources_of(shard: int, shards: int, n: int, slots: int) -> set[int]:
    """Which of n shards, whose ids were placed in so many slots, have rows of
    a shard of `shards`."""
    mine = hash_range(shard, shards)
    every = (hash_range(i, n, slots) for i in range(n))
    return {
        i
        for i, theirs in enumerate(every)
        if theirs.start < mine.stop and mine.start < theirs.stop
    }


def part_of(manifest: Manifest, shard: int, shards: int) -> Part:
    """What shard `shard` of `shards` has to read of a checkpoint.

    Its counters are its own if as many shards wrote the checkpoint, else the
    largest, as are clocks of all that rows are read of; for its ledgers see
    :func:`persia.checkpoint.ledgers.merge`. Its files are those that overlap
    its range of hash values: rows of others may be among theirs.
    """
    if not 0 <= shard < shards <= SHARDS_MAX:
        raise InvalidArgument(f"there is no shard {shard} of {shards}")
    n = len(manifest.shards)
    sources = sources_of(shard, shards, n, manifest.slots)
    chosen = [shard] if n == shards else list(range(n))
    clocks = sources | set(chosen)
    return Part(
        updates=max(manifest.shards[i].updates for i in chosen),
        sync_step=max(manifest.shards[i].sync_step for i in chosen),
        t=max(manifest.shards[i].highest_t for i in chosen),
        pushes=[max(t.pushes[i] for i in clocks) for t in manifest.tables],
        ledgers=[merge(stream) for stream in _streams(manifest, chosen)],
        files=[
            Rows(no, f.name, f.rows, f.bytes, int(f.crc32c, 16))
            for no, table in enumerate(manifest.tables)
            for f in table.files
            if f.shard in sources
        ],
        # One checkpoint, one restore.
        restore=manifest.shards[0].restore,
    )


def _streams(manifest: Manifest, shards: Iterable[int]) -> list[list[Numbers]]:
    return of_streams(
        [
            [ledger.numbers() for ledger in manifest.shards[i].ledgers]
            for i in shards
        ]
    )


def warn_in_part(manifest: Manifest, folder: Path | str, shards: int) -> int:
    """Says how many updates only a part of the rows has, where another number
    of shards reads them: they will not be whole any more. How many.
    """
    n = len(manifest.shards)
    if n == shards:
        return 0
    lost = sum(in_part(stream) for stream in _streams(manifest, range(n)))
    if lost:
        warn(
            f"{folder}: when it was saved, {lost:,} updates had reached only "
            f"some of its {n} shards. Another number of shards ({shards}) "
            "cannot complete them: they stay in some rows, and are not "
            f"trained again; to complete them, load it with {n} servers"
        )
    return lost
