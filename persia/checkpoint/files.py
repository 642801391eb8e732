"""The folders of checkpoints, on a local file system: they appear whole.

Nothing of torch: a server reads checkpoints, too.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, Protocol

from persia.base.check import kind
from persia.base.urls import Url
from persia.base.warning import warn
from persia.checkpoint.manifest import (
    MANIFEST,
    File,
    Manifest,
    Part,
    decode_manifest,
    encode_manifest,
    part_of,
    training_of,
)
from persia.errors import CorruptFile, InvalidArgument, StorageError

LATEST = "LATEST"
TEMPORARY = ".tmp-"
#: A file by which a server knows that a folder is the client's.
PROOF = ".proof"
#: Where it is found out whether servers could save.
TRIAL = f"{TEMPORARY}trial"
#: Where the files of remote checkpoints are made, for tables on ranks of
#: several machines: a folder that all see. Default: a temporary folder.
STAGING = "PERSIA_CHECKPOINTS"
STEP = re.compile(r"step-(0|[1-9][0-9]{0,18})")
#: What a server saves on exit.
ROWS = "rows"
# A folder that was renamed while another takes its name.
_PREVIOUS = ".previous"
_REPLACED = re.compile(rf"({STEP.pattern}|{ROWS}){re.escape(_PREVIOUS)}")


#: A path or a URI.
Folder = Path | Url


class Found(NamedTuple):
    """A checkpoint: its folder, and what it holds."""

    folder: Folder
    name: str  # in its root; "" where the path named the folder itself
    manifest: Manifest


class Checked(Protocol):
    """What can say whether a save would begin; str() of it is its name."""

    def check(self) -> None:
        """Fails (OSError, StorageError) where `writing` would; changes
        nothing.
        """


class Root(Checked, Protocol):
    """Where checkpoints are kept; str() of it is its name for messages."""

    #: It is no folder: servers send their files there themselves.
    far: bool

    def check_place(self) -> None:
        """Fails (StorageError) if the root lies in a step of another root."""

    def writing(self) -> contextlib.AbstractContextManager[Path]:
        """An empty local folder for the files of a new checkpoint; what
        interrupted saves have left is removed, and at the end the folder.
        """

    def put(
        self, temporary: Path, name: str, document: dict[str, Any]
    ) -> None:
        """Makes a checkpoint of a folder of `writing` and the entries of its
        manifest, in place of one that has the name. Who reads finds either of
        them, whole.
        """

    def point(self, name: str) -> None:
        """Makes a checkpoint the latest."""

    def remove(self, names: Iterable[str]) -> None:
        """Removes checkpoints, each in one step; what cannot be removed is no
        error where others may still read it.
        """

    def keep_only(self, name: str) -> None:
        """Removes all checkpoints but one."""

    def steps(self) -> list[int]:
        """The complete checkpoints, in the order of their saving."""

    def unfinished(self) -> list[str]:
        """What interrupted saves have left, under names of checkpoints; the
        next save removes it."""

    def read(self, name: str) -> bytes | None:
        """A small file by its path in the root; None if it is not there."""

    def at(self, name: str) -> Folder:
        """The path of a folder in the root ("": the root)."""

    def written(self, name: str) -> int:
        """When a file was written, by the clock of its file system, in ns."""

    def reading(
        self, found: Found, chosen: Collection[File]
    ) -> contextlib.AbstractContextManager[Path]:
        """A local folder that has the chosen files of a checkpoint."""

    def above(self, found: Found | None) -> Path:
        """The folder two levels above that of `reading`, or (None) of
        `writing`: what servers know as their --checkpoints.
        """


def root_in(above: Url, name: str) -> Url:
    """The URI of a root in a folder of roots."""
    return above.at(f"{above.path.rstrip('/')}/{name}")


def root_of(path: str | os.PathLike[str]) -> Root:
    """The root that a path or the URI of a file system means."""
    kind("path", path, (str, os.PathLike), "a folder, or the URI of one")
    url = Url(path)
    text = url.whole
    if "\0" in text:
        raise InvalidArgument(f"the path {text!r} has a NUL character")
    if text in ("", "file://"):  # Path("") would be the working directory
        raise InvalidArgument("the path of the checkpoints is empty")
    if isinstance(path, str) and url.scheme:
        if url.local is not None:
            return LocalRoot(Path(url.local))
        from persia.checkpoint.remote import RemoteRoot

        return RemoteRoot(Url.to_open(url))
    if re.match("[a-z][a-z0-9+.-]+:/", text) and not isinstance(path, str):
        raise InvalidArgument(
            f"{text!r} was the URI of a file system before it became a "
            f"{type(path).__name__}; give it as a string"
        )
    return LocalRoot(Path(text))


def find(root: Root, step: int | None) -> Found:
    """A checkpoint: a step of a root, its latest, or the path itself."""
    there = root.steps()
    listed = ", ".join(map(str, sorted(there))) or "none"
    name = ""
    if step is not None:
        if step not in there:
            raise StorageError(
                f"{root} has no complete checkpoint of step {step}; steps "
                f"there: {listed}"
            )
        name = f"step-{step}"
    elif root.read(MANIFEST) is None:
        name = _latest(root, listed)
    prefix = f"{name}/" if name else ""
    raw = root.read(f"{prefix}{MANIFEST}")
    if raw is None and step is None and name != _latest(root, listed):
        return find(root, None)  # another was saved, and this one removed
    if raw is None:
        raise CorruptFile(
            f"{root}/{LATEST} names {name}, which is not there; steps there: "
            f"{listed}{_advice(listed)}"
        )
    manifest = decode_manifest(raw, f"{root}/{prefix}{MANIFEST}")
    folder = root.at(name)
    if name and isinstance(folder, Path):
        name = folder.name  # it may be that of a folder being replaced
    return Found(folder, name, manifest)


def _advice(listed: str) -> str:
    return "; choose one with step=" if listed != "none" else ""


def _latest(root: Root, listed: str) -> str:
    raw = root.read(LATEST)
    if raw is None:
        raise StorageError(
            f"{root} is no checkpoint: it has neither {LATEST} nor "
            f"{MANIFEST}; steps there: {listed}{_advice(listed)}"
        )
    name = raw.decode("ascii", "replace").removesuffix("\n")
    if not STEP.fullmatch(name):
        raise CorruptFile(
            f"{root}/{LATEST} names no step: it holds {name[:40]!r}"
        )
    return name


def publish(
    root: Root, temporary: Path, document: dict[str, Any], keep: int | None
) -> Path | str:
    """Makes a checkpoint of a folder of `writing`: it is whole, then it is
    the latest, and then older ones go. A crash leaves what was the latest.

    Args:
        root: where to.
        temporary: the folder, with the files of the rows and of the dense
            part.
        document: the entries of its manifest, which is written last.
        keep: so many of the same training stay; None: all.

    Returns:
        Its folder.
    """
    name = f"step-{document['step']}"
    training = document.get("training", "")
    replaced = training_of(root.read(f"{name}/{MANIFEST}"))
    root.put(temporary, name, document)
    if replaced not in (None, training):
        warn(
            f"{root.at(name)} was a checkpoint of another training, which "
            "this save has replaced: give each training a folder of its own"
        )
    root.point(name)
    if keep is not None:
        root.remove(outdated(root, name, training, keep))
    return root.at(name)


def outdated(root: Root, newest: str, training: str, keep: int) -> list[str]:
    """The checkpoints that a save as ``newest`` with ``keep`` removes. Those
    of other trainings stay: an earlier run may have a better model."""
    old = [
        name
        for step in root.steps()
        if (name := f"step-{step}") != newest
        and training_of(root.read(f"{name}/{MANIFEST}")) == training
    ]
    return old[: max(0, len(old) - (keep - 1))]


def refuse_inside(
    root: object, path: str, is_file: Callable[[str], bool]
) -> None:
    """Raises if a root lies in a checkpoint of another root, which removes
    its checkpoints as whole folders.

    Args:
        root: named in the error.
        path: its absolute path.
        is_file: whether there is a file of a path.
    """
    whole = PurePosixPath(path)
    for one in (whole, *whole.parents):
        if STEP.fullmatch(one.name) and (
            is_file(f"{one.parent}/{LATEST}") or is_file(f"{one}/{MANIFEST}")
        ):
            raise StorageError(
                f"{root} is or lies in {one.name} of the checkpoints in "
                f"{one.parent}, which a run there would replace or remove: "
                "save into a folder outside of them"
            )


def local_files(path: str | os.PathLike[str]) -> list[Path]:
    """The files of all checkpoints of a root, or of one step, that are on
    this machine."""
    root = root_of(path)
    if not isinstance(root, LocalRoot):
        return []
    folders = [root.at(f"step-{step}") for step in root.steps()]
    if root.read(MANIFEST) is not None:
        folders.append(root.path)
    there = [root.path / LATEST]
    for folder in folders:
        with contextlib.suppress(OSError):  # another process removes some
            there += folder.iterdir()
    return there


# ---- the local file system -------------------------------------------------


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[int]:
    """A descriptor of a folder."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder survive a power cut."""
    with opened(folder) as descriptor:
        os.fsync(descriptor)


def write_file(path: Path, fill: Callable[[Any], object]) -> None:
    """Makes a new file of what ``fill(file)`` writes, and syncs it."""
    with path.open("xb") as file:
        fill(file)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, data: bytes) -> None:
    """Replaces a file as a whole: a power cut leaves the old or the new one.

    Raises:
        StorageError: it cannot be written.
    """
    part = path.with_suffix(".part")
    try:
        part.unlink(missing_ok=True)
        write_file(part, lambda file: file.write(data))
        part.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        raise StorageError(
            f"{path} cannot be written: {error.strerror}"
        ) from None


def check(root: Checked) -> None:
    """Finds out whether a save into a root could begin.

    Raises:
        StorageError: it could not.
    """
    try:
        root.check()
    except OSError as error:
        raise StorageError(
            f"saving into {root} would fail: {error}"
        ) from error


class LocalRoot:
    """A folder of checkpoints. Implements :class:`Root`."""

    far = False

    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def check_place(self) -> None:
        refuse_inside(self, str(self.path.resolve()), os.path.isfile)

    def check(self) -> None:
        self.check_place()
        path = self.path.absolute()
        there = next(p for p in (path, *path.parents) if os.path.lexists(p))
        tempfile.TemporaryDirectory(prefix=TEMPORARY, dir=there).cleanup()

    @contextlib.contextmanager
    def writing(self) -> Iterator[Path]:
        self.check_place()
        path = self.path.absolute()
        made = [p for p in (path, *path.parents) if not p.exists()]
        path.mkdir(parents=True, exist_ok=True)
        for folder in made or [path]:
            sync_folder(folder.parent)
        with self._locked():
            self._end_replace()
            self._remove_temporary()
            temporary = self.path / f"{TEMPORARY}{secrets.token_hex(8)}"
            temporary.mkdir()
            try:
                yield temporary
            finally:
                shutil.rmtree(temporary, ignore_errors=True)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """One save at a time in a root; a killed process leaves no lock."""
        # What a link of this name refers to is not ours to change.
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(self.path / ".lock", flags, 0o666), "wb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise StorageError(
                    f"another save into {self} is not complete; wait for it, "
                    "or save into another folder"
                ) from None
            yield

    def _remove_temporary(self) -> None:
        for entry in self.path.glob(f"{TEMPORARY}*"):
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()

    def replace(self, temporary: Path, name: str) -> None:
        """Gives a folder its name, within `writing`. One that has it gets
        another first, by which readers find it meanwhile: file systems that
        machines share cannot exchange two names.
        """
        there, previous = self.path / name, self.path / f"{name}{_PREVIOUS}"
        replaces = there.exists()
        if replaces:
            there.rename(previous)
        try:
            temporary.rename(there)
        except BaseException:
            if replaces:
                previous.rename(there)
            raise
        sync_folder(self.path)
        if replaces:
            shutil.rmtree(previous, ignore_errors=True)

    def _end_replace(self) -> None:
        """Of a process that was killed within `replace`."""
        for entry in list(self.path.iterdir()):
            if not _REPLACED.fullmatch(entry.name):
                continue
            there = self.path / entry.name.removesuffix(_PREVIOUS)
            if there.exists():
                shutil.rmtree(entry)
            else:
                entry.rename(there)

    def put(
        self, temporary: Path, name: str, document: dict[str, Any]
    ) -> None:
        text = encode_manifest(document)
        write_file(temporary / MANIFEST, lambda file: file.write(text))
        sync_folder(temporary)
        there = self.path / name
        if there.exists() and not (there / MANIFEST).is_file():
            raise StorageError(
                f"{there} is in the way, and no checkpoint: move it away, or "
                "save into another folder"
            )
        self.replace(temporary, name)

    def point(self, name: str) -> None:
        latest = self.path / f"{TEMPORARY}{LATEST}"
        latest.unlink(missing_ok=True)
        write_file(latest, lambda file: file.write(f"{name}\n".encode()))
        latest.rename(self.path / LATEST)
        sync_folder(self.path)

    def keep_only(self, name: str) -> None:
        with self._locked():
            every = (f"step-{step}" for step in self.steps())
            self.remove(other for other in every if other != name)

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            away = self.path / f"{TEMPORARY}old-{secrets.token_hex(8)}"
            (self.path / name).rename(away)
            shutil.rmtree(away)

    def steps(self) -> list[int]:
        found: dict[int, int] = {}
        gone = FileNotFoundError, NotADirectoryError
        entries: list[Path] = []
        with contextlib.suppress(*gone):
            entries = list(self.path.iterdir())
        for entry in entries:
            match = STEP.fullmatch(entry.name.removesuffix(_PREVIOUS))
            if match is None or entry != self.at(match[0]):
                continue
            manifest = entry / MANIFEST
            with contextlib.suppress(*gone):  # another process removes some
                if manifest.is_file():
                    found[int(match[1])] = manifest.stat().st_mtime_ns
        return sorted(found, key=lambda step: (found[step], step))

    def unfinished(self) -> list[str]:
        return []  # they have other names

    def read(self, name: str) -> bytes | None:
        folder, _, file = name.rpartition("/")
        try:
            return (self.at(folder) / file).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise StorageError(
                f"{self.path / name} cannot be read: {error}"
            ) from error

    def written(self, name: str) -> int:
        folder, _, file = name.rpartition("/")
        return (self.at(folder) / file).stat().st_mtime_ns

    def at(self, name: str) -> Path:
        there, previous = self.path / name, self.path / f"{name}{_PREVIOUS}"
        replaced = name and not there.exists() and previous.exists()
        return previous if replaced else there

    @contextlib.contextmanager
    def reading(
        self, found: Found, chosen: Collection[File]
    ) -> Iterator[Path]:
        yield self.path / found.name

    def above(self, found: Found | None) -> Path:
        named = found is None or found.name
        root = self.path.absolute()
        return root.parent if named else root.parent.parent


# ---- a server's share ------------------------------------------------------


class ShardPart(NamedTuple):
    """A checkpoint as one shard sees it."""

    folder: Path
    manifest: Manifest
    part: Part


def shard_part(
    path: Path, shard: int, shards: int, step: int | None = None
) -> ShardPart:
    """What a server that is shard `shard` of `shards` has to read.

    Args:
        path: a root, then its LATEST is read, or the folder of a step.
        shard, shards: which range of the ids; N shards may read what M wrote.
        step: of the checkpoint in the root; default: LATEST.

    Returns:
        The folder of the row files; the manifest, whose tables are numbered
        in their order (``Table.native()``: their options for the core); the
        shard's files, clocks, counters and ledgers.

    Raises:
        CorruptFile, SchemaMismatch: of the manifest; row files are not read.
        StorageError: there is no checkpoint, or it cannot be read.
    """
    found = find(LocalRoot(path), step)
    part = part_of(found.manifest, shard, shards)
    return ShardPart(path / found.name, found.manifest, part)
