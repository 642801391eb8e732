"""What one server wrote of its shard, on exit or for a checkpoint.

Nothing of torch: a server reads and writes it.
"""

from __future__ import annotations

import datetime
import json
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pydantic
from pydantic import Field

from persia.checkpoint import manifest as manifests
from persia.checkpoint.files import (
    PROOF,
    ROWS,
    LocalRoot,
    sync_folder,
    write_file,
)
from persia.errors import CorruptFile

if TYPE_CHECKING:
    from persia.checkpoint.remote import RemoteRoot

SNAPSHOT = "shard.json"


class RowsFile(manifests.File):
    table: int = Field(ge=0)
    rows: int = Field(ge=0)


class Snapshot(pydantic.BaseModel):
    """The description of one shard's rows, beside their files."""

    model_config = pydantic.ConfigDict(
        extra="forbid", frozen=True, strict=True
    )

    format: Literal["persia.shard"] = "persia.shard"
    version: Literal[1] = 1
    saved: str
    shard: int
    shards: int
    lineage: int
    updates: int
    sync_step: int
    t: int | None = None
    slots: Literal[4096, 65536] = 65536  # see Manifest
    restore: int = 0
    log: int = 0  # position in the server's log
    tables: list[dict[str, str | int | float]]
    pushes: list[int]
    ledgers: list[manifests.Ledger]
    files: list[RowsFile]

    @classmethod
    def of(cls, hello: dict[str, Any], answer: dict[str, Any]) -> Snapshot:
        """Of the answers to Hello and Snapshot."""
        return cls(
            saved=datetime.datetime.now(datetime.UTC).isoformat(),
            shard=hello["shard"],
            shards=hello["shards"],
            lineage=hello["lineage"],
            updates=answer["updates"],
            sync_step=answer["step"],
            t=answer["t"],
            slots=manifests.SLOTS,
            restore=answer["restore"],
            log=answer["log"],
            tables=hello["tables"][: len(answer["pushes"])],
            pushes=answer["pushes"],
            ledgers=[
                manifests.Ledger(
                    stream=stream,
                    watermark=watermark,
                    window=f"{int.from_bytes(window, 'little'):x}",
                    skipped=skipped,
                    incarnation=incarnation,
                )
                for stream, watermark, window, skipped, incarnation in (
                    answer["ledgers"]
                )
            ],
            files=[
                RowsFile(
                    table=table,
                    name=name,
                    rows=rows,
                    bytes=size,
                    crc32c=f"{crc:08x}",
                )
                for table, name, rows, size, crc in answer["files"]
            ],
        )

    @classmethod
    def decode(cls, raw: bytes, path: object) -> Snapshot:
        """From the bytes of its file; ``path`` is for messages."""
        try:
            document = json.loads(raw)
            if manifests.encode_manifest(document) != raw:
                raise ValueError("its text is not what its checksum says")
            del document["crc32c"]
            return cls.model_validate(document)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CorruptFile(
                f"{path} is truncated or altered: {error}"
            ) from None

    @classmethod
    def of_root(
        cls, root: LocalRoot | RemoteRoot
    ) -> tuple[str, Snapshot] | None:
        """What a server saved in a root, and the name of its folder there.

        Raises:
            CorruptFile: it is damaged.
            StorageError: it cannot be read.
        """
        folder = root.at(ROWS)
        # It may have another name for a moment, see LocalRoot.replace().
        name = folder.name if isinstance(folder, Path) else ROWS
        raw = root.read(f"{name}/{SNAPSHOT}")
        if raw is None:
            return None
        return name, cls.decode(raw, f"{folder}/{SNAPSHOT}")

    def named(self, prefix: str) -> Snapshot:
        """The same with a prefix before the names of its files."""
        files = [
            file.model_copy(update={"name": f"{prefix}{file.name}"})
            for file in self.files
        ]
        return self.model_copy(update={"files": files})

    def encode(self) -> bytes:
        """The bytes of its file."""
        return manifests.encode_manifest(self.model_dump(mode="json"))

    def part(self) -> manifests.Part:
        """What the shard has to read."""
        return manifests.Part(
            updates=self.updates,
            sync_step=self.sync_step,
            t=self.updates if self.t is None else self.t,
            pushes=self.pushes,
            ledgers=[ledger.numbers() for ledger in self.ledgers],
            files=[
                manifests.Rows(
                    file.table,
                    file.name,
                    file.rows,
                    file.bytes,
                    int(file.crc32c, 16),
                )
                for file in self.files
            ],
            restore=self.restore,
        )


def save_rows(
    root: LocalRoot | RemoteRoot, write: Callable[[str, str], Snapshot]
) -> Snapshot:
    """Puts the rows of a shard into a root, in the place of those that it has.

    Args:
        root: of :meth:`Snapshot.of_root`.
        write: writes the rows into a folder of the root, which has the proof
            that follows.
    """
    proof = secrets.token_hex(16)
    if not isinstance(root, LocalRoot):
        with root.proving(ROWS, proof):
            snapshot = write(ROWS, proof)
        snapshot = snapshot.named(root.prefix(proof))
        root.replace(ROWS, SNAPSHOT, snapshot.encode(), proof)
        return snapshot
    with root.writing() as temporary:
        (temporary / PROOF).write_text(proof)
        snapshot = write(temporary.name, proof)
        (temporary / PROOF).unlink()
        text = snapshot.encode()
        write_file(temporary / SNAPSHOT, lambda file: file.write(text))
        sync_folder(temporary)
        root.replace(temporary, ROWS)
    return snapshot
