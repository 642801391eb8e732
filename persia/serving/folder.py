"""The folders of exports: a root has versions, and one of them is current.

    out/CURRENT               the name of a version
    out/v-000012/manifest.json, dense.pt2, schema.yaml, rows-0000.safetensors

A version without a manifest does not exist. It is made beside the others and
renamed into place; CURRENT is replaced last.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pydantic

from persia import _core
from persia.base.urls import Url
from persia.checkpoint import files
from persia.checkpoint.manifest import (
    File,
    Table,
    decode_document,
    encode_manifest,
)
from persia.errors import CorruptFile, InvalidArgument, StorageError
from persia.serving.form import Form
from persia.serving.graph import Lookup
from persia.serving.rows import Publish, RowType

CURRENT = "CURRENT"
MANIFEST = "manifest.json"
FORMAT = "persia.export"
VERSION = 1
_NAME = re.compile(r"v-([0-9]{6,12})")
_U64 = pydantic.Field(ge=0, lt=1 << 64)


class _Entry(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)


class ExportTable(_Entry):
    """A table of an export.

    Attributes:
        options: the table as it was trained, without rows: it says what ids
            without a row have.
        type: of the rows.
        key: of the index of the file.
        rows: of the file.
        trained: rows of the table when it was exported.
        file: with the rows.
    """

    options: Table
    type: RowType
    key: int = _U64
    rows: int = _U64
    trained: int = _U64
    file: File


class ExportManifest(_Entry):
    """What a version holds.

    Attributes:
        name: of the version, such as "v-000012".
        made: when, ISO 8601.
        torch: that made the graph.
        checkpoint: the id of the checkpoint whose rows these are.
        step, updates: of the training.
        publish: which rows were published.
        tables: of all lookups.
        lookups: that the graph names.
        form: of the graph's inputs and outputs.
        dense: the graph.
        schema_file: of the data; None: requests have ids.
        tasks: names of the labels, where there are several.
        clicks: whether the output is a logit, whose sigmoid is the
            probability of a click.
    """

    format: Literal["persia.export"]
    version: Literal[1]
    name: str
    made: str
    persia: str
    torch: str
    checkpoint: str
    step: int
    updates: int
    publish: Publish
    tables: list[ExportTable]
    lookups: dict[str, Lookup]
    form: Form
    dense: File
    schema_file: File | None = None
    tasks: list[str] = []
    clicks: bool = False

    @pydantic.model_validator(mode="after")
    def _check(self) -> ExportManifest:
        names = [t.options.name for t in self.tables]
        used = {p.table for one in self.lookups.values() for p in one.parts}
        if len(set(names)) < len(names) or used - set(names):
            raise ValueError("the lookups need other tables")
        every = [one.name for one in self.files]
        if len(set(every)) < len(every) or MANIFEST in every:
            raise ValueError("two files have one name")
        return self

    @property
    def files(self) -> list[File]:
        """All files but the manifest."""
        schema = [] if self.schema_file is None else [self.schema_file]
        return [self.dense, *schema, *(t.file for t in self.tables)]

    @property
    def bytes(self) -> int:
        """Of all files but the manifest."""
        return sum(one.bytes for one in self.files)


class Version(NamedTuple):
    """A version: its folder, and what it holds."""

    folder: Path
    manifest: ExportManifest


def read_manifest(path: Path) -> ExportManifest:
    """Raises CorruptFile, SchemaMismatch or StorageError."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        why = os.strerror(error.errno or 0)
        raise StorageError(f"{path} cannot be read: {why}") from None
    document = decode_document(raw, path, FORMAT, (VERSION,))
    try:
        return ExportManifest.model_validate(document)
    except pydantic.ValidationError as error:
        raise CorruptFile(f"{path} is not a manifest: {error}") from None


def entry_of(folder: Path, name: str) -> File:
    """A file of a folder as the manifest has it: its size and checksum."""
    with files.opened(folder) as descriptor:
        size, crc = _core.ckpt_file_crc(descriptor, name)
    return File(name=name, bytes=size, crc32c=f"{crc:08x}")


class Versions(files.LocalRoot):
    """The versions of a root, a folder of this machine."""

    def names(self) -> list[str]:
        """The whole versions, from the oldest to the newest."""
        found = []
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            for entry in self.path.iterdir():
                if _NAME.fullmatch(entry.name) and (
                    (entry / MANIFEST).is_file()
                ):
                    found.append(entry.name)
        return sorted(found, key=_number)

    def current(self) -> str:
        """The name of the current version.

        Raises:
            StorageError: there is none.
            CorruptFile: CURRENT names no version.
        """
        raw = self.read(CURRENT)
        if raw is None:
            raise StorageError(
                f"{self.path} is no export: it has no {CURRENT}; versions "
                f"there: {', '.join(self.names()) or 'none'}"
            )
        name = raw.decode("ascii", "replace").strip()
        if not _NAME.fullmatch(name) or name not in self.names():
            raise CorruptFile(
                f"{self.path / CURRENT} names {name[:40]!r}, which is not "
                f"there; versions there: {', '.join(self.names()) or 'none'}"
            )
        return name

    def next_name(self) -> str:
        """The name that a new version gets, within `writing`."""
        return f"v-{max(map(_number, self.names()), default=0) + 1:06d}"

    def add(
        self, temporary: Path, document: dict[str, Any], keep: int | None
    ) -> Path:
        """Makes the folder the current version, within `writing`; removes all
        but the newest ``keep``."""
        text = encode_manifest(document)
        files.write_file(temporary / MANIFEST, lambda f: f.write(text))
        files.sync_folder(temporary)
        name = str(document["name"])
        self.replace(temporary, name)
        self.point(name)
        if keep is not None:
            self._remove([n for n in self.names()[:-keep] if n != name])
        return self.path / name

    def use(self, name: str) -> None:
        """Makes a version the current one."""
        if name not in self.names():
            raise StorageError(
                f"{self.path} has no version {name!r}; versions there: "
                f"{', '.join(self.names()) or 'none'}"
            )
        with self._locked():
            self.point(name)

    def point(self, name: str) -> None:
        there = self.path / f"{files.TEMPORARY}{CURRENT}"
        there.unlink(missing_ok=True)
        files.write_file(there, lambda f: f.write(f"{name}\n".encode()))
        there.rename(self.path / CURRENT)
        files.sync_folder(self.path)


def _number(name: str) -> int:
    return int(name.removeprefix("v-"))


def versions_of(path: str | os.PathLike[str]) -> Versions:
    """The root of a path.

    Raises:
        InvalidArgument: it is empty, or a URI of another file system.
    """
    url = Url(path)
    text = url.whole
    if isinstance(path, str) and url.scheme:
        if url.local is None:
            raise InvalidArgument(
                f"{url.named}: exports are written to, and mapped from, a "
                "folder of this machine: copy the folder of a version from "
                "the bucket, or to it"
            )
        text = url.local
    if not text or "\0" in text:
        raise InvalidArgument(f"the path of an export is {text!r}")
    return Versions(Path(text))


def is_export(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a root of exports, or the folder of a version."""
    try:
        root = versions_of(path).path
        if (root / CURRENT).is_file():
            return True
        raw = (root / MANIFEST).read_bytes()
        return bool(json.loads(raw).get("format") == FORMAT)
    except (InvalidArgument, OSError, ValueError, AttributeError):
        return False


def find_version(
    path: str | os.PathLike[str], version: str | None = None
) -> Version:
    """A version of a root, its current one, or the path itself.

    Raises:
        StorageError: it is not there.
        CorruptFile: its manifest is altered, or a file is missing or has
            another size.
        SchemaMismatch: another Persia wrote it.
    """
    root = versions_of(path)
    if version is None and (root.path / MANIFEST).is_file():
        folder = root.path
    else:
        name = root.current() if version is None else version
        if not _NAME.fullmatch(name) or name not in root.names():
            raise StorageError(
                f"{root.path} has no version {name!r}; versions there: "
                f"{', '.join(root.names()) or 'none'}"
            )
        folder = root.path / name
    manifest = read_manifest(folder / MANIFEST)
    for one in manifest.files:
        try:
            size = (folder / one.name).stat().st_size
        except OSError:
            raise CorruptFile(
                f"{folder} is not whole: {one.name} is missing"
            ) from None
        if size != one.bytes:
            raise CorruptFile(
                f"{folder / one.name} has {size:,} bytes, need {one.bytes:,}"
            )
    return Version(folder, manifest)


def check_file(folder: Path, entry: File) -> None:
    """Reads a file and compares its checksum; raises CorruptFile."""
    found = entry_of(folder, entry.name)
    if found != File(**entry.model_dump(include={"name", "bytes", "crc32c"})):
        raise CorruptFile(
            f"{folder / entry.name} is damaged: {found.bytes:,} bytes with "
            f"checksum {found.crc32c}, need {entry.bytes:,} with "
            f"{entry.crc32c}"
        )


def damage(version: Version) -> Iterator[tuple[File, str]]:
    """Reads every byte of a version: each file, and what is wrong with it,
    ""; nothing."""
    for entry in version.manifest.files:
        try:
            check_file(version.folder, entry)
        except (CorruptFile, StorageError) as error:
            yield entry, str(error)
        else:
            yield entry, ""
