"""Exports in a bucket (S3, GCS, HDFS), which are mapped from a local cache.

A version is uploaded file by file, its manifest last, and then CURRENT. One
process exports into a root at a time: there is no lock. What an export that
was killed has left, the next one removes.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pyarrow import fs

from persia.base.storage import has_folders, infos_of
from persia.base.urls import Url
from persia.checkpoint import files
from persia.checkpoint.manifest import MANIFEST, File, encode_manifest
from persia.checkpoint.remote import RemoteFolder
from persia.serving.cache import CachedVersions
from persia.serving.deltas.packet import FOLDER
from persia.serving.folder import CURRENT, NAME


class BucketVersions(RemoteFolder, CachedVersions):
    """The versions of a root in a bucket."""

    names_are = NAME

    def check_place(self) -> None:
        super().check_place()
        self.check_kind()

    def names(self) -> list[str]:
        return sorted(self._whole(), key=lambda name: int(name[2:]))

    def entries(self) -> list[str] | None:
        with self._calls("read"):
            return list(self._entries())

    def sizes(self, name: str, entries: Sequence[File]) -> list[int | None]:
        folder = f"{self._path}/{name}".rstrip("/")
        with self._calls("read"):
            infos = infos_of(
                self._fs, [f"{folder}/{one.name}" for one in entries]
            )
        is_file = fs.FileType.File
        return [i.size if i.type == is_file else None for i in infos]

    def check(self) -> None:
        self.check_place()
        self.names()

    @contextlib.contextmanager
    def writing(self) -> Iterator[Path]:
        self.check_place()
        with self.staging() as folder:
            yield folder

    @contextlib.contextmanager
    def staging(self) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix=files.TEMPORARY) as folder:
            yield Path(folder)

    def add(
        self, temporary: Path, document: dict[str, Any], keep: int | None
    ) -> Url:
        name = str(document["name"])
        unfinished = self.unfinished()
        with self._removing():
            for old in unfinished:
                self._fs.delete_dir(f"{self._path}/{old}")
        every = [entry.name for entry in temporary.iterdir()]
        with self._calls("written"):
            self._upload(temporary, name, every)
            self._write(f"{name}/{MANIFEST}", encode_manifest(document))
        self.point(name)
        with self._removing():
            self._remove(self._outdated(name, keep))
        return self.at(name)

    def use(self, name: str) -> None:
        self._check_name(name)
        self.point(name)

    def point(self, name: str) -> None:
        with self._calls("written"):
            self._write(CURRENT, f"{name}\n".encode())

    def write_file(
        self, name: str, parts: Sequence[bytes | memoryview]
    ) -> None:
        there = f"{self._path}/{name}"
        with self._calls("written"):
            if has_folders(self._fs):
                folder = there.rpartition("/")[0]
                self._fs.create_dir(folder, recursive=True)
            with self._fs.open_output_stream(there) as file:
                for part in parts:
                    file.write(part)

    def remove_files(self, names: Sequence[str]) -> None:
        paths = [f"{self._path}/{name}" for name in names]
        with self._removing():
            is_file = fs.FileType.File
            for info in infos_of(self._fs, paths) if paths else []:
                if info.type == is_file:
                    self._fs.delete_file(info.path)

    def keep_chains(self, chains: Sequence[str]) -> None:
        above = f"{self._path}/{FOLDER}"
        chosen = fs.FileSelector(above, allow_not_found=True, recursive=True)
        with self._removing():
            found = set()
            for info in infos_of(self._fs, chosen):
                _, _, below = info.path.partition(f"/{FOLDER}/")
                found.add(below.partition("/")[0])
            for name in found - {*chains, ""}:
                self._fs.delete_dir(f"{above}/{name}")

    def rows_root(self) -> files.Root:
        return files.root_of(self._url.at(f"{self._url.path}-rows"))
