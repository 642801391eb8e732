"""Files and folders that take the place of others: whole, or not at all.

What is written has a hidden name beside its own until it is complete. So an
error, Ctrl-C or a kill leaves what was there before. An output that would
replace an input is refused.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO

from persia.errors import InvalidArgument, PersiaError, StorageError

AnyPath = str | os.PathLike[str]

_AT_FDCWD, _EXCHANGE = -100, 2  # of renameat2()
_NEW, _OLD = ".new", ".old"


@contextlib.contextmanager
def new_file(
    path: AnyPath,
    *,
    inputs: Iterable[AnyPath] = (),
    mode: int | None = None,
) -> Iterator[IO[str]]:
    """A text file in UTF-8 that gets its name when the block ends well.

    A pipe or a device is written to directly. Where the name is that of a
    link, what the link refers to is replaced.

    Args:
        path: its name; the folder is there.
        inputs: files of this machine that are read; it must be none of them.
        mode: its permissions; None: those of the file that it replaces.

    Raises:
        InvalidArgument: it is an input, or a URL.
        StorageError: it cannot be written.
    """
    _check_local(path)
    target = Path(os.path.realpath(path))
    with _writing(path):
        there = _stat(path)
        if there is not None and stat.S_ISDIR(there.st_mode):
            raise StorageError(f"{path} is a folder; name a file")
        if there is not None and not stat.S_ISREG(there.st_mode):
            with open(path, "w", encoding="utf-8") as file:
                yield file
            return
        if there is not None:
            _check_file(path, there, inputs)
        hidden = _hidden(target)
        try:
            with _created(hidden, 0o666 if mode is None else mode) as file:
                if there is not None and mode is None:
                    os.fchmod(file.fileno(), stat.S_IMODE(there.st_mode))
                yield file
                file.flush()
                os.fsync(file.fileno())
            hidden.replace(target)
        finally:
            hidden.unlink(missing_ok=True)


def new_files(files: Sequence[tuple[Path, str, int]]) -> None:
    """Writes small files that belong together: all are complete before the
    first gets its name.

    Args:
        files: of each the name, the text and the permissions. A link of that
            name is replaced.

    Raises:
        StorageError: one cannot be written.
    """
    made = []
    with _writing(files[0][0]):
        try:
            for path, text, mode in files:
                made.append((_hidden(path), path))
                with _created(made[-1][0], mode) as file:
                    file.write(text)
                    file.flush()
                    os.fsync(file.fileno())
            for hidden, path in made:
                hidden.replace(path)
        finally:
            for hidden, _ in made:
                hidden.unlink(missing_ok=True)


def _hidden(path: Path) -> Path:
    """A name beside one."""
    return path.with_name(f".persia-{secrets.token_hex(8)}{_NEW}")


def _created(path: Path, mode: int) -> IO[str]:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    return open(os.open(path, flags, mode), "w", encoding="utf-8")


@contextlib.contextmanager
def new_folder(
    path: AnyPath,
    *,
    inputs: Iterable[AnyPath],
    own: Callable[[str], bool],
) -> Iterator[Path]:
    """A folder that gets its name when the block ends well, and then takes
    the place of one that an earlier call made. Other files stay in it.

    Args:
        path: its name; folders above it are made.
        inputs: files of this machine that are read; none lies in it.
        own: whether a file of this name is of an earlier call.

    Yields:
        The folder to fill, empty.

    Raises:
        InvalidArgument: it holds an input, or is a URL.
        StorageError: it cannot be written, or not be replaced.
    """
    _check_local(path)
    target = Path(os.path.realpath(path))
    with _writing(path):
        place = _place_of(target, path, inputs, own)
        place.mkdir(parents=True, exist_ok=True)
        _remove_stale(place, target)
        work = place / f".{target.name}-{secrets.token_hex(8)}{_NEW}"
        work.mkdir()
        try:
            with _held(work):
                yield work
                _put(work, target, own)
        finally:
            shutil.rmtree(work, ignore_errors=True)


@contextlib.contextmanager
def _writing(path: AnyPath) -> Iterator[None]:
    try:
        yield
    except PersiaError:
        raise
    except OSError as error:
        raise StorageError(
            f"cannot write {os.fspath(path)!r}: {error}"
        ) from error


def _check_local(path: AnyPath) -> None:
    if "://" in os.fspath(path):
        raise InvalidArgument(
            f"{os.fspath(path)!r} is a URL: the output is a local path"
        )


def _stat(path: AnyPath) -> os.stat_result | None:
    with contextlib.suppress(FileNotFoundError):
        return os.stat(path)
    return None


def _check_file(
    path: AnyPath, there: os.stat_result, inputs: Iterable[AnyPath]
) -> None:
    """Of a file that is there already."""
    for one in inputs:
        found = _stat(one)
        if found is not None and os.path.samestat(there, found):
            raise InvalidArgument(
                f"{os.fspath(path)!r} is an input ({os.fspath(one)!r}), which "
                "the output would replace: name another file"
            )
    if not os.access(path, os.W_OK):
        raise StorageError(f"{os.fspath(path)!r} may not be written")


def _place_of(
    target: Path,
    path: AnyPath,
    inputs: Iterable[AnyPath],
    own: Callable[[str], bool],
) -> Path:
    """Where the new folder is made: beside the old one, or within an empty
    one that cannot be replaced."""
    if not os.path.lexists(target):
        return target.parent
    if not target.is_dir():
        raise StorageError(f"{os.fspath(path)!r} is a file; name a folder")
    for one in inputs:
        if _is_in(target, one):
            raise InvalidArgument(
                f"{os.fspath(path)!r} holds the input {os.fspath(one)!r}, "
                "which the output could replace: name another folder"
            )
    # Hidden folders are what a call that was killed has left.
    names = [n for n in os.listdir(target) if not n.endswith((_NEW, _OLD))]
    fixed = target.is_mount() or not os.access(
        target.parent, os.W_OK | os.X_OK
    )
    if fixed and any(own(name) for name in names):
        raise StorageError(
            f"{os.fspath(path)!r} has an earlier output and cannot be "
            "replaced, as it is a mount point or the folder above it may not "
            "be written: name a folder in it"
        )
    others = [n for n in names if not own(n) and (target / n).is_dir()]
    if others and not fixed:
        raise StorageError(
            f"{os.fspath(path)!r} has other folders ({sorted(others)[:3]}), "
            "which the output could not leave in place: name another folder"
        )
    return target if fixed else target.parent


def _is_in(folder: Path, path: AnyPath) -> bool:
    """Whether a path, or what it refers to, is the folder or lies in it."""
    for one in {os.path.abspath(path), os.path.realpath(path)}:
        for above in (Path(one), *Path(one).parents):
            with contextlib.suppress(OSError):
                if above.samefile(folder):
                    return True
    return False


@contextlib.contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Locks a folder while it is filled; a killed process leaves no lock."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _remove_stale(place: Path, target: Path) -> None:
    """Ends what processes that were killed have left."""
    hidden = re.compile(rf"\.{re.escape(target.name)}-[0-9a-f]{{16}}\.\w+")
    for entry in list(place.iterdir()):
        if not hidden.fullmatch(entry.name):
            continue
        if entry.suffix == _OLD and not target.exists():
            entry.rename(target)
        elif entry.suffix in (_NEW, _OLD):
            with contextlib.suppress(BlockingIOError), _held(entry):
                shutil.rmtree(entry)


def _put(work: Path, target: Path, own: Callable[[str], bool]) -> None:
    """Gives a complete folder its name."""
    for entry in work.iterdir():
        _sync(entry)
    if work.parent == target:  # which was empty
        for entry in sorted(work.iterdir()):
            entry.rename(target / entry.name)
        _sync(target)
        return
    if target.exists():
        shutil.copymode(target, work)
        for entry in target.iterdir():
            if not own(entry.name):
                os.link(entry, work / entry.name, follow_symlinks=False)
    _sync(work)
    if target.exists():
        _exchange(work, target)
    else:
        work.rename(target)
    _sync(target.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _exchange(new: Path, there: Path) -> None:
    """Exchanges two folders, in one step where the file system can."""
    call = getattr(ctypes.CDLL(None), "renameat2", None)
    names = os.fsencode(new), os.fsencode(there)
    if call is not None and not call(
        _AT_FDCWD, names[0], _AT_FDCWD, names[1], _EXCHANGE
    ):
        return
    old = new.with_suffix(_OLD)
    there.rename(old)
    try:
        new.rename(there)
    except BaseException:
        old.rename(there)
        raise
    old.rename(new)
