"""The files of servers that have remote storage in place of a folder.

The core writes and reads files of a folder. Each job of it (a snapshot or a
restore) has one here, and calls what is below: a file that was written is
uploaded at once and removed, so that a shard needs disk for one; the files of
a restore are downloaded, and stay until its end.

Nothing of torch.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from persia import _core
from persia.base.urls import Url
from persia.checkpoint.files import TEMPORARY, root_in
from persia.checkpoint.remote import TRANSFERS, RemoteRoot
from persia.errors import StorageError

_PREFIX = "persia-files-"
_LOOK = 0.1  # seconds between looks at what threads do


class Far:
    """The folder of a server's checkpoint roots, by its URI: what the core is
    given (``far``)."""

    def __init__(self, url: Url) -> None:
        self._url = url
        RemoteRoot(root_in(url, "x"))  # there is a library for it
        self._local = _Local()

    def close(self) -> None:
        """When no job runs."""
        self._local.close()

    def __call__(
        self, root: str, folder: str, proof: str, writes: int
    ) -> Passing:
        """A job begins.

        Raises:
            StorageError: the folder is not that of the client.
        """
        place = RemoteRoot(root_in(self._url, root))
        if writes and not place.proves(folder, proof):
            raise StorageError(
                f"{place.at(folder)} is not the folder of the client: it has "
                "no .proof of this save. Both must name the same storage"
            )
        return Passing(place, folder, place.prefix(proof), self._local)


class Passing:
    """The files of one job.

    Attributes:
        descriptor: of its folder on this machine; the core closes it.
    """

    def __init__(
        self, root: RemoteRoot, name: str, prefix: str, local: _Local
    ) -> None:
        self._root = root
        self._name = name
        self._prefix = prefix
        self._folder = local.folder()
        self._moved = self._ended = False
        self.descriptor = os.open(
            self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        )

    def put(self, name: str) -> None:
        """Uploads a file, which leaves this machine."""
        file = self._folder / name
        with self._root.system():
            self._root.send(
                file, f"{self._name}/{self._prefix}{name}", _core.poll
            )
        file.unlink()

    def get(self, names: list[str]) -> None:
        """Downloads files."""
        with (
            self._root.system(),
            concurrent.futures.ThreadPoolExecutor(TRANSFERS) as pool,
        ):
            begun = [pool.submit(self._bring, name) for name in names]
            try:
                while concurrent.futures.wait(begun, _LOOK).not_done:
                    if self._moved:
                        self._moved = False
                        _core.poll()
                for one in begun:
                    one.result()
            except BaseException:
                self._ended = True
                raise

    def _bring(self, name: str) -> None:
        self._root.bring(
            f"{self._name}/{name}", self._folder / name, self._tell
        )

    def _tell(self) -> None:
        self._moved = True
        if self._ended:
            raise StorageError("another file could not be read")

    def close(self) -> None:
        """Removes what is on this machine."""
        shutil.rmtree(self._folder, ignore_errors=True)


class _Local:
    """A folder of this machine for the folders of jobs. It is locked; one that
    is not is that of a process that was killed, and is removed."""

    def __init__(self) -> None:
        above = Path(tempfile.gettempdir())
        for entry in above.glob(f"{_PREFIX}*"):
            with contextlib.suppress(OSError):  # of another user, or gone
                _remove_unlocked(entry)
        self._path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        self._lock = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def folder(self) -> Path:
        """A new one."""
        self._path.mkdir(exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=TEMPORARY, dir=self._path))

    def close(self) -> None:
        shutil.rmtree(self._path, ignore_errors=True)
        os.close(self._lock)


def _remove_unlocked(path: Path) -> None:
    lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path)
    finally:
        os.close(lock)
