"""Exports that are elsewhere, which are mapped from a local cache."""

from __future__ import annotations

import abc
import contextlib
import fcntl
import hashlib
import os
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from persia.base.environment import variable
from persia.base.urls import Url
from persia.checkpoint import files
from persia.errors import Closed, PersiaError, StorageError
from persia.serving.folder import Version, Versions, check_file

_POLL_S = 0.05


class CachedVersions(Versions):
    """The versions of a root that is not on this machine."""

    _url: Url

    @abc.abstractmethod
    def _download(
        self,
        name: str,
        files: Iterable[str],
        target: Path,
        stop: threading.Event | None = None,
    ) -> None:
        """Files of a version into a local folder; raises Closed once ``stop``
        is set."""

    @contextlib.contextmanager
    def copied(self, version: Version) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix=files.TEMPORARY) as folder:
            every = [one.name for one in version.manifest.files]
            self._download(version.name, every, Path(folder))
            yield Path(folder)

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
