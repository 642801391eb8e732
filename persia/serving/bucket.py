"""Exports in a bucket (S3, GCS, HDFS), which are mapped from a local cache.

A version is uploaded file by file, its manifest last, and then CURRENT. One
process exports into a root at a time: there is no lock. What an export that
was killed has left, the next one removes.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pyarrow import fs

from persia.base.environment import variable
from persia.base.storage import has_folders, infos_of
from persia.base.urls import Url
from persia.checkpoint import files
from persia.checkpoint.manifest import MANIFEST, File, encode_manifest
from persia.checkpoint.remote import RemoteFolder
from persia.errors import Closed, PersiaError, StorageError
from persia.serving.deltas.packet import FOLDER
from persia.serving.folder import (
    CURRENT,
    NAME,
    Version,
    Versions,
    check_file,
)

_POLL_S = 0.05


class BucketVersions(RemoteFolder, Versions):
    """The versions of a root in a bucket."""

    names_are = NAME

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

    @contextlib.contextmanager
    def copied(self, version: Version) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix=files.TEMPORARY) as folder:
            every = [one.name for one in version.manifest.files]
            self._download(version.name, every, Path(folder))
            yield Path(folder)

    # ---- the cache

    def folder(
        self,
        version: Version,
        cache: Path | None,
        keep: int = 2,
        stop: threading.Event | None = None,
    ) -> Path:
        text = version.manifest.model_dump_json()
        place = (cache or _cache_of_user()) / self._name(version)
        there = place / f"{version.manifest.name}-{_digest(text)}"
        try:
            place.mkdir(parents=True, exist_ok=True)
            with _locked(place / ".lock", stop):
                if not _is_whole(there, version):
                    self._fetch(version, there, stop)
                os.utime(there)
                _remove_old(place, keep)
        except OSError as error:
            if isinstance(error, PersiaError):
                raise
            raise StorageError(
                f"{self} cannot be kept in {place}: {error}; "
                "give another folder: `cache`"
            ) from error
        return there

    def discard(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)

    def _name(self, version: Version) -> str:
        """The folder of the root within a cache."""
        path = str(self._url.named)
        if not version.name:
            path = path.rpartition("/")[0]
        return f"{path.rpartition('/')[2]}-{_digest(path)}"

    def _fetch(
        self, version: Version, there: Path, stop: threading.Event | None
    ) -> None:
        temporary = there.parent / f"{files.TEMPORARY}{secrets.token_hex(8)}"
        temporary.mkdir()
        try:
            every = version.manifest.files
            names = [one.name for one in every]
            self._download(version.name, names, temporary, stop)
            for one in every:
                check_file(temporary, one, version.place)
                with (temporary / one.name).open("rb") as file:
                    os.fsync(file)
            files.sync_folder(temporary)
            shutil.rmtree(there, ignore_errors=True)
            temporary.rename(there)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def _cache_of_user() -> Path:
    base = variable("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "persia" / "models"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _is_whole(folder: Path, version: Version) -> bool:
    try:
        return all(
            (folder / one.name).stat().st_size == one.bytes
            for one in version.manifest.files
        )
    except OSError:
        return False


def _remove_old(place: Path, keep: int) -> None:
    """All but the versions that were asked for last, and what a killed process
    has left. A process keeps a version that it has mapped."""
    for entry in place.glob(f"{files.TEMPORARY}*"):
        shutil.rmtree(entry, ignore_errors=True)
    every = [entry for entry in place.iterdir() if entry.is_dir()]
    every.sort(key=lambda entry: entry.stat().st_mtime_ns)
    for entry in every[:-keep]:
        shutil.rmtree(entry, ignore_errors=True)


@contextlib.contextmanager
def _locked(path: Path, stop: threading.Event | None) -> Iterator[None]:
    """One process fetches, others of the machine wait for it; a killed one
    leaves no lock."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(path, flags, 0o666), "wb") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if stop is not None and stop.is_set():
                    raise Closed("the process ends") from None
                time.sleep(_POLL_S)
        yield
