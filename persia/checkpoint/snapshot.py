"""What one server wrote of its shard, on exit or for a checkpoint.

Nothing of torch: a server reads and writes it.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pydantic
from pydantic import Field

from persia.checkpoint import manifest as manifests
from persia.checkpoint.files import (
    ROWS,
    LocalRoot,
    sync_folder,
    write_file,
)
from persia.errors import CorruptFile, StorageError

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
    def decode(cls, raw: bytes, path: Path) -> Snapshot:
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
    def of_root(cls, root: LocalRoot) -> tuple[Path, Snapshot] | None:
        """What a server saved in a root, and its folder.

        Raises:
            CorruptFile: it is damaged.
            StorageError: it cannot be read.
        """
        folder = root.at(ROWS)
        try:
            raw = (folder / SNAPSHOT).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StorageError(f"{folder} cannot be read: {error}") from error
        return folder, cls.decode(raw, folder / SNAPSHOT)

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


def save_rows(root: LocalRoot, write: Callable[[Path], Snapshot]) -> Snapshot:
    """Puts the rows of a shard into a root, in the place of those that it has.

    Args:
        root: of :meth:`Snapshot.of_root`.
        write: writes the rows into a folder.
    """
    with root.writing() as temporary:
        snapshot = write(temporary)
        text = manifests.encode_manifest(snapshot.model_dump(mode="json"))
        write_file(temporary / SNAPSHOT, lambda file: file.write(text))
        sync_folder(temporary)
        root.replace(temporary, ROWS)
    return snapshot
