"""The files that a glob names, on this machine and in object stores."""

from __future__ import annotations

import concurrent.futures
import fnmatch
import glob
import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from pyarrow import fs

from persia import errors
from persia.base.storage import (
    WEB,
    infos_of,
    lists_folders,
    opening,
    system_of,
)
from persia.base.urls import Url, decoded, literal, pattern_of

_AT_ONCE = 16  # requests

# (its name, its path in the file system, bytes, file system)
_Found = tuple[Url, str, int | None, Any]


def local_files(path: str) -> list[str]:
    """The files of this machine that a path or glob names."""
    names = [path]
    if not os.path.exists(path):
        found = filter(_wanted(path), glob.glob(path, recursive=True))
        names = sorted(found, key=_natural)
        if not names:
            raise errors.StorageError(
                f"no file at {path!r} (looked from {os.getcwd()!r})"
            )
    for name in names:
        if os.path.isdir(name):
            raise errors.StorageError(
                f"{name!r} is a directory; pass a glob such as"
                f" {os.path.join(name, '*')!r}"
            )
    return names


def _wanted(pattern: str) -> Callable[[str], bool]:
    """Whether a glob means a file: not _SUCCESS and the like, unless it names
    them."""
    hidden = pattern.rpartition("/")[2].startswith(("_", "."))
    return lambda path: (
        hidden or not path.rpartition("/")[2].startswith(("_", "."))
    )


def remote_files(url: Url) -> list[_Found]:
    """The files of a file system that a URL names.

    A name is the one that is there: as a pattern, as it is written, or with
    ``%20`` and the like decoded.

    Raises:
        StorageError: there is none, or no access.
    """
    name = url.named
    patterns = [url.path, pattern_of(url.path), decoded(url.path)]
    if url.scheme == "file":  # where the standard has them decoded first
        patterns = patterns[::-1]
    elif url.scheme in WEB:
        patterns = patterns[:1]
    with opening(name):
        for pattern in dict.fromkeys(patterns):
            found = _found(url, pattern)
            if found:
                return found
    silent = ", or no answer" if url.scheme in WEB else ""
    raise errors.StorageError(f"no file at {name!r}{silent}")


def _found(url: Url, pattern: str) -> list[_Found]:
    path = literal(pattern)
    if path is not None:
        system, place = system_of(url, path)
        info = infos_of(system, place)
        if info.type == fs.FileType.Directory:
            raise errors.StorageError(
                f"{url.named!r} is a folder; pass a glob such as {url.named}/*"
            )
        if info.type == fs.FileType.NotFound:
            return []
        named = url.at(pattern_of(path, url.scheme)).named
        return [(named, place, info.size, system)]
    parts = pattern.split("/")
    folders = [literal(part) for part in parts]
    first = folders.index(None)  # a part that is no plain name
    folder = "/".join(folders[:first])  # type: ignore[arg-type]
    rest = parts[first:]
    web = url.scheme in WEB
    plain = Url(url.whole.partition("?")[0]) if web else url
    system, base = system_of(plain, folder)
    infos = _expanded(system, base, rest)
    infos = [info for info in infos if _wanted(rest[-1])(info.path)]
    infos.sort(key=lambda info: _natural(info.path))
    found = []
    for info in infos:
        name = pattern_of(f"{folder}/{_below(base, info)}", url.scheme)
        found.append((url.at(name).named, info.path, info.size, system))
    return found


def _expanded(system: Any, base: str, parts: Sequence[str]) -> list[Any]:
    """The files below a folder that a pattern names: * and ? stay within a
    folder, ** does not. The first part is listed alone, so that no more of a
    bucket is read than it says."""
    first, *rest = parts
    deep = "**" in first or (rest and not lists_folders(system))
    chosen = fs.FileSelector(base, allow_not_found=True, recursive=deep)
    infos = infos_of(system, chosen)
    if deep or not rest:
        return _matching(infos, base, parts)
    folders = [
        info.path
        for info in infos
        if info.type == fs.FileType.Directory
        and fnmatch.fnmatchcase(info.path.rpartition("/")[2], first)
    ]
    plain = literal("/".join(rest))
    if plain is not None:
        infos = infos_of(system, [f"{one}/{plain}" for one in folders])
        return [info for info in infos if info.is_file]
    each = partial(_within, system, rest)
    with concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as pool:
        return [info for infos in pool.map(each, folders) for info in infos]


def _within(system: Any, parts: Sequence[str], folder: str) -> list[Any]:
    deep = len(parts) > 1 or "**" in parts[0]
    chosen = fs.FileSelector(folder, allow_not_found=True, recursive=deep)
    return _matching(infos_of(system, chosen), folder, parts)


def _matching(
    infos: Iterable[Any], base: str, parts: Sequence[str]
) -> list[Any]:
    pattern = "/".join(parts)
    return [
        info
        for info in infos
        if info.is_file and _matches(_below(base, info), pattern)
    ]


def _below(base: str, info: Any) -> str:
    """The path of a file below a folder."""
    return str(info.path).lstrip("/")[len(base.strip("/")) :].lstrip("/")


def _matches(path: str, pattern: str) -> bool:
    if "**" in pattern:
        return fnmatch.fnmatchcase(path, pattern.replace("**/", "*"))
    have, want = path.split("/"), pattern.split("/")
    return len(have) == len(want) and all(
        fnmatch.fnmatchcase(a, b) for a, b in zip(have, want, strict=True)
    )


def _natural(name: str) -> list[tuple[int, int | str]]:
    parts: list[tuple[int, int | str]] = []
    digits = ""
    for c in name + "\0":
        if c in "0123456789":
            digits += c
            continue
        if digits:
            parts.append((0, int(digits)))
            digits = ""
        parts.append((1, c))
    return parts
