"""Checkpoints on remote storage (S3, GCS, HDFS), through ``pyarrow.fs``.

Such file systems rename no folder in one step, but a file appears whole. So
the files of a checkpoint are made in a local folder and uploaded, its manifest
last and then LATEST: a folder without a manifest is no checkpoint, and the
next save removes it. The names of all other files begin with the checkpoint's
id, so that one that replaces another of the same step touches none of its
files before the manifest is exchanged. One job saves into a root at a time:
there is no lock.

Servers upload their files themselves (:mod:`persia.checkpoint.far`).
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import re
import tempfile
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import fs

from persia.base.environment import variable
from persia.base.storage import (
    has_folders,
    infos_of,
    lists_folders,
    system_of,
    why,
)
from persia.base.urls import Url, decoded
from persia.base.warning import warn
from persia.checkpoint.files import (
    LATEST,
    PROOF,
    STAGING,
    STEP,
    TEMPORARY,
    TRIAL,
    Found,
    LocalRoot,
    refuse_inside,
)
from persia.checkpoint.manifest import MANIFEST, File, encode_manifest
from persia.errors import Closed, InvalidArgument, StorageError
from persia.redaction import clean

TRANSFERS = 4  # files at once
_PIECE = 8 << 20  # bytes


class RemoteFolder:
    """A folder of folders that appear whole, by its URI: each has its
    manifest last, and a small file of the root names one of them.
    """

    #: The names of such folders.
    names_are: re.Pattern[str]

    def __init__(self, url: Url) -> None:
        if ":" in url.user:
            raise InvalidArgument(
                f"{url.scheme}://...@{url.host} has a key in it, which "
                "logs, errors and the checkpoint itself would show: give "
                "keys through the environment (S3: AWS_ACCESS_KEY_ID, "
                "AWS_SECRET_ACCESS_KEY)"
            )
        self._url = url.at(url.path.rstrip("/"))
        if not self._url.path:
            raise InvalidArgument(
                f"{self} names no folder: give one, as in {self}/out"
            )
        with self._calls("used"):
            self._fs, self._path = system_of(url, self._url.path)
            plain = decoded(self._url.path)
            if plain != self._url.path and not self._is_there(self._path):
                # As URLs were read before names were taken as they are.
                _, path = system_of(url, plain)
                if self._is_there(path):
                    self._path = path

    def _is_there(self, path: str) -> bool:
        chosen = fs.FileSelector(path, allow_not_found=True)
        return bool(infos_of(self._fs, chosen))

    def __str__(self) -> str:
        return str(self._url.named)

    @contextlib.contextmanager
    def _calls(self, what: str) -> Iterator[None]:
        """Errors of pyarrow by their name: OSError or ArrowException."""
        try:
            yield
        except (OSError, pa.ArrowException) as error:
            if isinstance(error, StorageError):
                raise
            raise StorageError(
                f"{self} cannot be {what}: {why(error)}"
            ) from clean(error)

    @contextlib.contextmanager
    def _removing(self) -> Iterator[None]:
        """What cannot be removed stays: what was written is whole."""
        try:
            yield
        except (OSError, pa.ArrowException, StorageError) as error:
            warn(f"{self}: older files stay: {why(error)}")

    def _is_file(self, path: str) -> bool:
        file: bool = infos_of(self._fs, path).type == fs.FileType.File
        return file

    def check_place(self) -> None:
        with self._calls("read"):
            refuse_inside(self, self._path, self._is_file)
            bucket = self._path.partition("/")[0]
            if not has_folders(self._fs) and self._lacks(bucket):
                raise FileNotFoundError(f"there is no bucket {bucket}")

    def _lacks(self, bucket: str) -> bool:
        """What is in no bucket looks as what is not in one. Keys of a folder
        alone may not ask."""
        with contextlib.suppress(OSError):
            found = infos_of(self._fs, bucket)
            return bool(found.type == fs.FileType.NotFound)
        return False

    def read(self, name: str) -> bytes | None:
        path = f"{self._path}/{name}"
        with self._calls("read"):
            if not self._is_file(path):
                return None
            with self._fs.open_input_stream(path) as file:
                data = file.read()
        return bytes(data)

    def at(self, name: str) -> Url:
        return self._url.at(self._url.path + (f"/{name}" if name else ""))

    def _entries(self) -> dict[str, bool]:
        """The names of all that is in the root; whether it is a folder."""
        chosen = fs.FileSelector(
            self._path,
            allow_not_found=True,
            recursive=not lists_folders(self._fs),
        )
        found: dict[str, bool] = {}
        begin = len(self._path.strip("/")) + 1
        for info in infos_of(self._fs, chosen):
            name, below, _ = info.path.lstrip("/")[begin:].partition("/")
            is_folder = bool(below) or info.type == fs.FileType.Directory
            found[name] = is_folder or found.get(name, False)
        return found

    def _folders(self) -> list[str]:
        """The names of the folders, whole or not."""
        return sorted(
            name
            for name, is_folder in self._entries().items()
            if is_folder and self.names_are.fullmatch(name)
        )

    def _whole(self) -> list[str]:
        """The folders with a manifest, in the order of their writing."""
        with self._calls("read"):
            found = self._folders()
            infos = infos_of(
                self._fs, [f"{self._path}/{n}/{MANIFEST}" for n in found]
            )
        times = {
            name: info.mtime_ns or 0
            for info, name in zip(infos, found)
            if info.type == fs.FileType.File
        }
        return sorted(times, key=lambda name: (times[name], _number(name)))

    def unfinished(self) -> list[str]:
        """The folders without a manifest."""
        whole = set(self._whole())
        with self._calls("read"):
            return [name for name in self._folders() if name not in whole]

    def _upload(
        self,
        source: Path,
        name: str,
        files: Iterable[str],
        prefix: str = "",
    ) -> None:
        """Files of a local folder into one of the root; their names get the
        prefix."""
        self.make(name)

        def upload(file: str) -> None:
            self.send(source / file, f"{name}/{prefix}{file}")

        _side_by_side(upload, files)

    def make(self, name: str) -> None:
        """A folder of the root, where files need one."""
        if has_folders(self._fs):
            self._fs.create_dir(f"{self._path}/{name}", recursive=True)

    def send(
        self, source: Path, name: str, tell: Callable[[], object] = int
    ) -> None:
        """A local file becomes one of the root; ``tell`` is called now and
        then, as it makes progress."""
        with (
            source.open("rb") as local,
            self._fs.open_output_stream(f"{self._path}/{name}") as remote,
        ):
            _copy(local, remote, tell)

    def bring(
        self, name: str, target: Path, tell: Callable[[], object] = int
    ) -> None:
        """A file of the root becomes a local one, which was not there."""
        with (
            self._fs.open_input_stream(f"{self._path}/{name}") as remote,
            target.open("xb") as local,
        ):
            _copy(remote, local, tell)

    def _download(
        self,
        name: str,
        files: Iterable[str],
        target: Path,
        stop: threading.Event | None = None,
    ) -> None:
        """Files of a folder of the root ("": of the root itself) into a local
        one; raises Closed once ``stop`` is set."""

        def tell() -> None:
            if stop is not None and stop.is_set():
                raise Closed("the process ends: nothing is fetched")

        def download(file: str) -> None:
            self.bring(f"{name}/{file}".lstrip("/"), target / file, tell)

        with self._calls("read"):
            _side_by_side(download, files)

    def _write(self, name: str, data: bytes) -> None:
        with self._fs.open_output_stream(f"{self._path}/{name}") as file:
            file.write(data)

    def _remove(self, names: Iterable[str]) -> None:
        for name in names:
            self._fs.delete_file(f"{self._path}/{name}/{MANIFEST}")
            self._fs.delete_dir(f"{self._path}/{name}")


class RemoteRoot(RemoteFolder):
    """A folder of checkpoints, by its URI. Implements
    :class:`persia.checkpoint.files.Root`.
    """

    names_are = STEP

    far = True

    @property
    def _shared(self) -> bool:
        """Ranks that have tables see the folders of `writing` and
        `reading`."""
        return bool(variable(STAGING))

    # ---- writing

    @contextlib.contextmanager
    def writing(self) -> Iterator[Path]:
        self.check_place()
        folder: contextlib.AbstractContextManager[Path | str]
        if self._shared:
            folder = LocalRoot(self._staging()).writing()
        else:
            folder = tempfile.TemporaryDirectory(prefix=TEMPORARY)
        with folder as temporary:
            self._remove_unfinished()
            yield Path(temporary)

    def _remove_unfinished(self) -> None:
        """In a shared staging folder under its lock: no other one writes."""
        names = self.unfinished()
        with self._calls("read"):
            for name in names:
                if self._is_file(f"{self._path}/{name}/{LATEST}"):
                    raise StorageError(
                        f"{self.at(name)} has the checkpoints of another run: "
                        "save into another folder"
                    )
            trial = self._is_there(f"{self._path}/{TRIAL}")
        with self._removing():
            for name in [*names, *([TRIAL] if trial else [])]:
                self._fs.delete_dir(f"{self._path}/{name}")

    # ---- files that servers write

    @staticmethod
    def prefix(id: str) -> str:
        """How the names of the files of a checkpoint begin."""
        return f"{id[:8]}-"

    def system(self) -> contextlib.AbstractContextManager[None]:
        """Errors of what is done within have the name of the root."""
        return self._calls("used")

    def proves(self, name: str, proof: str) -> bool:
        """Whether a folder has this proof: see Snapshot in persia.proto."""
        return self.read(f"{name}/{PROOF}") == proof.encode()

    @contextlib.contextmanager
    def proving(self, name: str, proof: str) -> Iterator[None]:
        """A folder has a proof meanwhile."""
        with self._calls("written"):
            self.make(name)
            self._write(f"{name}/{PROOF}", proof.encode())
        yield
        with self._removing():
            self._fs.delete_file(f"{self._path}/{name}/{PROOF}")

    def sizes(self, name: str) -> dict[str, int]:
        """The files of a folder, in bytes."""
        chosen = fs.FileSelector(f"{self._path}/{name}", allow_not_found=True)
        with self._calls("read"):
            found = infos_of(self._fs, chosen)
        return {info.base_name: info.size or 0 for info in found}

    def written(self, name: str) -> int:
        """When a file was written, by the clock of the storage."""
        with self._calls("read"):
            info = infos_of(self._fs, f"{self._path}/{name}")
        return int(info.mtime_ns or 0)

    def replace(self, name: str, document: str, text: bytes, id: str) -> None:
        """Writes the file that makes a folder whole, and removes all others
        of the folder but those of this id."""
        with self._calls("written"):
            self._write(f"{name}/{document}", text)
        with self._removing():
            self._remove_others(name, (self.prefix(id), document))

    def check(self) -> None:
        self.check_place()
        self.steps()

    def _staging(self) -> Path:
        """Where the folders of `writing` and `reading` are made."""
        if self._shared:
            above, _, name = self._path.rpartition("/")
            if STEP.fullmatch(name):  # of that root
                name = above.rpartition("/")[2] or name
            return Path(variable(STAGING) or "") / name
        return Path(tempfile.gettempdir())

    def above(self, found: Found | None) -> Path:
        return self._staging().absolute().parent

    def put(
        self, temporary: Path, name: str, document: dict[str, Any]
    ) -> None:
        prefix = self.prefix(document["id"])
        here = {entry.name for entry in temporary.iterdir()}

        def renamed(file: dict[str, Any]) -> dict[str, Any]:
            return file | {"name": f"{prefix}{file['name']}"}

        names = [f["name"] for t in document["tables"] for f in t["files"]]
        names.append(document["dense"]["name"])
        text = encode_manifest(
            document
            | {
                "dense": renamed(document["dense"]),
                "tables": [
                    t | {"files": [renamed(f) for f in t["files"]]}
                    for t in document["tables"]
                ],
            }
        )

        with self._calls("written"):
            # Servers have sent theirs.
            self._upload(temporary, name, here.intersection(names), prefix)
            self._write(f"{name}/{MANIFEST}", text)
        with self._removing():
            self._remove_others(name, (prefix, MANIFEST))

    def point(self, name: str) -> None:
        with self._calls("written"):
            self._write(LATEST, f"{name}\n".encode())

    def remove(self, names: Iterable[str]) -> None:
        with self._removing():
            self._remove(names)

    def keep_only(self, name: str) -> None:
        every = [f"step-{step}" for step in self.steps()]
        self.remove(other for other in every if other != name)

    def _remove_others(self, name: str, stay: tuple[str, ...]) -> None:
        """Files of what was replaced."""
        folder = fs.FileSelector(f"{self._path}/{name}")
        for info in infos_of(self._fs, folder):
            if not info.base_name.startswith(stay):
                self._fs.delete_file(info.path)

    def steps(self) -> list[int]:
        return [_number(name) for name in self._whole()]

    @contextlib.contextmanager
    def reading(
        self, found: Found, chosen: Collection[File]
    ) -> Iterator[Path]:
        staging = self._staging()
        staging.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            prefix=TEMPORARY, dir=staging
        ) as temporary:
            folder = Path(temporary)
            self._download(found.name, [f.name for f in chosen], folder)
            yield folder


def _copy(source: Any, target: Any, tell: Callable[[], object]) -> None:
    while piece := source.read(_PIECE):
        target.write(piece)
        tell()


def _number(name: str) -> int:
    return int(name.rpartition("-")[2])


def _side_by_side(
    transfer: Callable[[str], None], names: Iterable[str]
) -> None:
    """Several files at once; those not begun are left after an error."""
    pool = concurrent.futures.ThreadPoolExecutor(TRANSFERS)
    try:
        for _ in pool.map(transfer, names):
            pass
    finally:
        pool.shutdown(cancel_futures=True)
