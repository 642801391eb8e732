"""Exports: a root, here or in a bucket, has versions; one of them is current.

    out/CURRENT               the name of a version
    out/v-000012/manifest.json, dense.pt2, schema.yaml, rows-0000.safetensors
    out/deltas/CHAIN/000000000042.safetensors
    out/erased.json

A version without a manifest does not exist. On this machine it is made beside
the others and renamed into place; in a bucket its manifest is written last.
CURRENT is replaced after that.
"""

from __future__ import annotations

import abc
import contextlib
import json
import os
import re
import shutil
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pydantic

from persia import _core
from persia.base.storage import WEB
from persia.base.urls import Url
from persia.checkpoint import files
from persia.checkpoint.manifest import (
    File,
    Table,
    decode_document,
    encode_manifest,
)
from persia.data.schema.schema import Schema
from persia.errors import CorruptFile, InvalidArgument, StorageError
from persia.serving.deltas.erased import ERASED
from persia.serving.deltas.packet import FOLDER, ChainPlace
from persia.serving.form import Form
from persia.serving.graph import Lookup
from persia.serving.rows import Publish, RowType

CURRENT = "CURRENT"
MANIFEST = "manifest.json"
FORMAT = "persia.export"
VERSION = 1
#: The names of versions.
NAME = re.compile(r"v-([0-9]{6,12})")
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
        chain: the packets that the version has; those behind change it.
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
    chain: ChainPlace | None = None

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


def entry_of(folder: Path, name: str) -> File:
    """A file of a folder as the manifest has it: its size and checksum."""
    with files.opened(folder) as descriptor:
        size, crc = _core.ckpt_file_crc(descriptor, name)
    return File(name=name, bytes=size, crc32c=f"{crc:08x}")


def check_file(
    folder: Path, entry: File, place: Path | Url | None = None
) -> None:
    """Reads a file and compares its checksum.

    Args:
        folder: where it is.
        entry: what the manifest says of it.
        place: where it came from, for the message.

    Raises:
        CorruptFile: it is another one.
    """
    found = entry_of(folder, entry.name)
    if found != File(**entry.model_dump(include={"name", "bytes", "crc32c"})):
        raise CorruptFile(
            f"{place or folder}: {entry.name} is damaged: {found.bytes:,} "
            f"bytes with checksum {found.crc32c}, need {entry.bytes:,} with "
            f"{entry.crc32c}"
        )


class Versions(abc.ABC):
    """The versions of a root; str() of it is its name for messages."""

    @abc.abstractmethod
    def names(self) -> list[str]:
        """The whole versions, from the oldest to the newest."""

    @abc.abstractmethod
    def entries(self) -> list[str] | None:
        """The names of all files and folders in the root; None: it is not
        there, which a bucket does not know."""

    @abc.abstractmethod
    def at(self, name: str) -> Path | Url:
        """The path of a version ("": of the root)."""

    @abc.abstractmethod
    def read(self, name: str) -> bytes | None:
        """A small file by its path in the root; None if it is not there."""

    def wait(self, name: str, seconds: float, ends: threading.Event) -> None:
        """Until a file is there, by its path in the root, for so many seconds,
        or until a process ends. It may return sooner, and a little later."""
        ends.wait(seconds)

    @abc.abstractmethod
    def sizes(self, name: str, entries: Sequence[File]) -> list[int | None]:
        """The bytes that files of a version have; None: not there."""

    @abc.abstractmethod
    def check(self) -> None:
        """Fails (OSError, StorageError) where `writing` would."""

    @abc.abstractmethod
    def writing(self) -> contextlib.AbstractContextManager[Path]:
        """An empty local folder for a new version."""

    @abc.abstractmethod
    def staging(self) -> contextlib.AbstractContextManager[Path]:
        """The same, before it is known whether the storage answers."""

    @abc.abstractmethod
    def add(
        self, temporary: Path, document: dict[str, Any], keep: int | None
    ) -> Path | Url:
        """Makes the folder the current version, within `writing` or `staging`;
        removes all but the newest ``keep``."""

    @abc.abstractmethod
    def use(self, name: str) -> None:
        """Makes a version the current one."""

    @abc.abstractmethod
    def write_file(
        self, name: str, parts: Sequence[bytes | memoryview]
    ) -> None:
        """A file by its path in the root, whole or not there, of parts that
        follow one another; one of that name is replaced."""

    @abc.abstractmethod
    def remove_files(self, names: Sequence[str]) -> None:
        """Removes files by their paths in the root, those that are there."""

    @abc.abstractmethod
    def keep_chains(self, chains: Sequence[str]) -> None:
        """Removes the packets of all other chains."""

    @abc.abstractmethod
    def rows_root(self) -> files.Root:
        """The root of checkpoints beside it, for rows of servers and ranks."""

    @abc.abstractmethod
    def folder(
        self,
        version: Version,
        cache: Path | None,
        keep: int = 2,
        stop: threading.Event | None = None,
    ) -> Path:
        """The local folder whose files are mapped.

        Args:
            version: of this root.
            cache: where those of a bucket are kept; None: that of the user.
            keep: so many versions of the root stay there.
            stop: once it is set nothing is fetched any more.

        Raises:
            Closed: `stop` is set.
            CorruptFile: what was fetched is damaged.
            StorageError: it cannot be fetched.
        """

    @abc.abstractmethod
    def discard(self, folder: Path) -> None:
        """What :meth:`folder` gave is damaged: it is not given again, where
        it is a copy."""

    @abc.abstractmethod
    def copied(
        self, version: Version
    ) -> contextlib.AbstractContextManager[Path]:
        """A local folder with the files as they are in the root."""

    def current(self) -> str:
        """The name of the current version.

        Raises:
            StorageError: there is none.
            CorruptFile: CURRENT names no version.
        """
        raw = self.read(CURRENT)
        if raw is None:
            raise StorageError(
                f"{self} is no export: it has no {CURRENT}; versions "
                f"there: {self._listed()}"
            )
        name = raw.decode("ascii", "replace").strip()
        if not self._has(name):
            raise CorruptFile(
                f"{self}/{CURRENT} names {name[:40]!r}, which is not "
                f"there; versions there: {self._listed()}"
            )
        return name

    @property
    def is_to_come(self) -> bool:
        """Whether the root is there, and its first version is still to be
        written: nothing but what an export writes is in it.

        Raises:
            StorageError: the storage gives no answer.
        """
        entries = self.entries()
        if entries is None or CURRENT in entries:
            return False
        return all(
            name.startswith(".")
            or name in ("", FOLDER, ERASED, "lost+found")
            or NAME.fullmatch(name)
            for name in entries
        )

    def next_name(self) -> str:
        """The name that a new version gets, within `writing`."""
        return f"v-{max(map(_number, self.names()), default=0) + 1:06d}"

    def version(self, name: str) -> Version:
        """A version by its name; "": the root is the folder of one.

        Raises: as :func:`find_version`.
        """
        if name:
            self._check_name(name)
        prefix = f"{name}/" if name else ""
        where = f"{self}/{prefix}{MANIFEST}"
        raw = self.read(f"{prefix}{MANIFEST}")
        if raw is None:
            raise StorageError(f"{where} is not there")
        found = Version(self, name, _decoded(raw, where))
        every = found.manifest.files
        for one, size in zip(every, self.sizes(name, every), strict=True):
            if size is None:
                raise CorruptFile(
                    f"{self}/{name} is not whole: {one.name} is missing"
                )
            if size != one.bytes:
                raise CorruptFile(
                    f"{self}/{prefix}{one.name} has {size:,} bytes, need "
                    f"{one.bytes:,}"
                )
        return found

    def check_kind(self) -> None:
        """Raises InvalidArgument where the root has checkpoints."""
        if self.read(files.LATEST) is not None:
            raise InvalidArgument(
                f"{self} has checkpoints: export into another folder"
            )

    @property
    def is_version(self) -> bool:
        """Whether the root is the folder of a version."""
        return self.read(MANIFEST) is not None

    def _has(self, name: str) -> bool:
        return bool(NAME.fullmatch(name)) and (
            self.read(f"{name}/{MANIFEST}") is not None
        )

    def _check_name(self, name: str) -> None:
        if not self._has(name):
            raise StorageError(
                f"{self} has no version {name!r}; versions there: "
                f"{self._listed()}"
            )

    def _outdated(self, newest: str, keep: int | None) -> list[str]:
        """What `add` removes."""
        names = [] if keep is None else self.names()[:-keep]
        return [name for name in names if name != newest]

    def _listed(self) -> str:
        return ", ".join(self.names()) or "none"


class Version(NamedTuple):
    """A version: its root, its name there, and what it holds."""

    root: Versions
    name: str
    manifest: ExportManifest

    @property
    def place(self) -> Path | Url:
        """Its folder, or the URL of it."""
        return self.root.at(self.name)

    def schema(self) -> Schema | None:
        """Of the data; None: requests have ids.

        Raises:
            CorruptFile: its file is damaged.
            StorageError: it cannot be read.
        """
        file = self.manifest.schema_file
        if file is None:
            return None
        name = f"{self.name}/{file.name}" if self.name else file.name
        raw = self.root.read(name) or b""
        if f"{_core.ckpt_crc(raw):08x}" != file.crc32c:
            raise CorruptFile(f"{self.place}: {file.name} is damaged")
        return Schema.of_yaml(raw.decode(), f"{self.place}/{file.name}")

    @property
    def above(self) -> Versions:
        """The root, also where the version was found as a folder."""
        place = self.place
        if self.name:
            return self.root
        if isinstance(place, Path):
            return LocalVersions(place.absolute().parent)
        above = place.path.rstrip("/").rpartition("/")[0]
        return versions_of(place.at(above)) if above else self.root


class LocalVersions(files.LocalRoot, Versions):
    """The versions of a folder of this machine."""

    def check_place(self) -> None:
        super().check_place()
        self.check_kind()

    def names(self) -> list[str]:
        found = []
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            for entry in self.path.iterdir():
                if NAME.fullmatch(entry.name) and (
                    (entry / MANIFEST).is_file()
                ):
                    found.append(entry.name)
        return sorted(found, key=_number)

    def entries(self) -> list[str] | None:
        try:
            return os.listdir(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise StorageError(f"{self}: {error}") from None

    def sizes(self, name: str, entries: Sequence[File]) -> list[int | None]:
        def size(path: Path) -> int | None:
            try:
                return path.stat().st_size
            except OSError:
                return None

        return [size(self.path / name / one.name) for one in entries]

    def staging(self) -> contextlib.AbstractContextManager[Path]:
        return self.writing()

    def add(
        self, temporary: Path, document: dict[str, Any], keep: int | None
    ) -> Path:
        text = encode_manifest(document)
        files.write_file(temporary / MANIFEST, lambda f: f.write(text))
        files.sync_folder(temporary)
        name = str(document["name"])
        self.replace(temporary, name)
        self.point(name)
        self.remove(self._outdated(name, keep))
        return self.path / name

    def use(self, name: str) -> None:
        self._check_name(name)
        with self._locked():
            self.point(name)

    def point(self, name: str) -> None:
        there = self.path / f"{files.TEMPORARY}{CURRENT}"
        there.unlink(missing_ok=True)
        files.write_file(there, lambda f: f.write(f"{name}\n".encode()))
        there.rename(self.path / CURRENT)
        files.sync_folder(self.path)

    def write_file(
        self, name: str, parts: Sequence[bytes | memoryview]
    ) -> None:
        there = self.path / name
        new = there.with_name(f"{files.TEMPORARY}{there.name}")
        try:
            there.parent.mkdir(parents=True, exist_ok=True)
            new.unlink(missing_ok=True)
            files.write_file(new, lambda file: file.writelines(parts))
            new.rename(there)
            files.sync_folder(there.parent)
        except OSError as error:
            raise StorageError(
                f"{there} cannot be written: {error}"
            ) from error

    def remove_files(self, names: Sequence[str]) -> None:
        for name in names:
            with contextlib.suppress(OSError):
                (self.path / name).unlink()

    def keep_chains(self, chains: Sequence[str]) -> None:
        with contextlib.suppress(FileNotFoundError):
            for entry in list((self.path / FOLDER).iterdir()):
                if entry.name not in chains:
                    shutil.rmtree(entry, ignore_errors=True)

    def rows_root(self) -> files.Root:
        return files.LocalRoot(Path(f"{self.path}-rows"))

    def folder(
        self,
        version: Version,
        cache: Path | None,
        keep: int = 2,
        stop: threading.Event | None = None,
    ) -> Path:
        return self.path / version.name

    def discard(self, folder: Path) -> None:
        pass  # no copy

    @contextlib.contextmanager
    def copied(self, version: Version) -> Iterator[Path]:
        yield self.path / version.name


def _decoded(raw: bytes, where: str) -> ExportManifest:
    document = decode_document(raw, where, FORMAT, (VERSION,))
    try:
        return ExportManifest.model_validate(document)
    except pydantic.ValidationError as error:
        raise CorruptFile(f"{where} is not a manifest: {error}") from None


def _number(name: str) -> int:
    return int(name.removeprefix("v-"))


def versions_of(path: str | os.PathLike[str]) -> Versions:
    """The root of a path or URL.

    Raises:
        InvalidArgument: it is empty, or names no folder.
        StorageError: the storage gives no answer.
    """
    url = Url(path)
    text = url.whole
    if isinstance(path, str) and url.scheme:
        if url.local is None:
            if url.scheme in WEB:
                from persia.serving.relayed import RelayedVersions

                return RelayedVersions(Url.to_open(url))
            from persia.serving.bucket import BucketVersions

            return BucketVersions(Url.to_open(url))
        text = url.local
    if not text or "\0" in text:
        raise InvalidArgument(f"the path of an export is {text!r}")
    return LocalVersions(Path(text))


def is_export(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a root of exports, or the folder of a version."""
    try:
        root = versions_of(path)
        if root.read(CURRENT) is not None:
            return True
        raw = root.read(MANIFEST)
        return raw is not None and json.loads(raw).get("format") == FORMAT
    except (InvalidArgument, StorageError, ValueError, AttributeError):
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
    if version is not None:
        return root.version(version)
    return root.version("" if root.is_version else root.current())


def damage(version: Version, folder: Path) -> Iterator[tuple[File, str]]:
    """Reads every byte of a version, whose files are in a folder: each file,
    and what is wrong with it, ""; nothing."""
    for entry in version.manifest.files:
        try:
            check_file(folder, entry)
        except (CorruptFile, StorageError) as error:
            yield entry, str(error)
        else:
            yield entry, ""
