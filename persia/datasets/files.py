"""Files of text: paths and globs, decompression, and malformed lines."""

from __future__ import annotations

import codecs
import glob
import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pyarrow as pa

from persia import _core, errors
from persia._check import kind, real, whole
from persia.data.base import pair

__all__ = [
    "Faults",
    "LinePlan",
    "Paths",
    "check_rows",
    "find_files",
    "held_out",
    "open_stream",
    "read_lines",
]

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

log = logging.getLogger("persia.datasets")

CHUNK_BYTES = 1 << 20
# Longer lines are malformed: this bounds the memory that a file without line
# ends can take.
LINE_BYTES = 1 << 20
_SUFFIXES = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2", ".lz4": "lz4"}


def find_files(paths: Paths) -> list[str]:
    """The files that a path, a glob, or a list of them names.

    A glob's files come in the order of their names, numbers in them by
    value: ``day_2`` before ``day_10``.
    """
    need = "a path, a glob, or a list of them"
    if not isinstance(paths, Iterable) or isinstance(paths, bytes):
        kind("paths", paths, os.PathLike, need)
    listed = [paths] if isinstance(paths, (str, os.PathLike)) else paths
    found: list[str] = []
    for one in listed:
        path = os.fspath(kind("paths", one, (str, os.PathLike), need))
        if os.path.exists(path):
            found.append(path)
            continue
        names = sorted(glob.glob(path, recursive=True), key=_natural)
        if not names:
            raise errors.StorageError(
                f"no file at {path!r} (looked from {os.getcwd()!r})"
            )
        found += names
    if not found:
        raise errors.InvalidArgument("no path was given")
    for path in found:
        if os.path.isdir(path):
            raise errors.StorageError(
                f"{path!r} is a directory; pass a glob such as"
                f" {os.path.join(path, '*')!r}"
            )
    return found


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


def open_stream(path: str) -> Any:
    """A stream of the file's bytes, decompressed as its suffix says."""
    suffix = os.path.splitext(path)[1].lower()
    try:
        # pyarrow takes it for no data.
        empty = os.path.isfile(path) and os.path.getsize(path) == 0
        stream = pa.input_stream(path, compression=_SUFFIXES.get(suffix))
    except OSError as error:
        raise errors.StorageError(f"cannot open {path!r}: {error}") from error
    if empty and suffix in _SUFFIXES:
        stream.close()
        raise errors.CorruptFile(
            f"cannot read {path!r}: it has 0 bytes, which is no {suffix} file"
        )
    return stream


def read_lines(path: str) -> Iterator[bytes]:
    """The file's bytes, decompressed, in pieces of whole lines, without a
    byte order mark.

    Only the last piece may lack its line end. A line of more than 1 MiB is
    cut, and given so many tabs that it is malformed in any format.
    """
    tail, first = b"", True
    with open_stream(path) as stream:
        while True:
            try:
                chunk = stream.read(CHUNK_BYTES)
            except OSError as error:
                raise errors.CorruptFile(
                    f"cannot read {path!r}: {error}"
                ) from error
            if not chunk:
                break
            if first:  # no part of a column, whatever wrote it
                chunk, first = chunk.removeprefix(codecs.BOM_UTF8), False
            cut = chunk.rfind(b"\n") + 1
            if cut:
                yield b"".join((tail, chunk[:cut])) if tail else chunk[:cut]
                tail = chunk[cut:]
            elif len(tail) < LINE_BYTES:
                tail += chunk
                if len(tail) >= LINE_BYTES:
                    tail += b"\t" * 1024
    if tail:
        yield tail


def check_rows(rows: tuple[int, int | None]) -> tuple[int, int | None]:
    need = "(first, end) with 0 <= first <= end, or end None"
    first, end = pair("rows", rows, need)
    first = whole("the first of rows", first, 0, 2**63 - 1)
    if end is not None:
        end = whole("the end of rows", end, first, 2**63 - 1, " or None")
    return first, end


def held_out(test: float, lines: int) -> int:
    """How many of the lines a ``test`` of split() is."""
    if not 0 <= real(test) < math.inf:  # NaN is not, either
        raise errors.InvalidArgument(
            f"test is {test!r}; need a share below 1 or a number of lines"
        )
    return round(lines * test) if test < 1 else int(test)


class LinePlan:
    """Which lines of the files, in their order, one of several shards reads.

    Lines are dealt in blocks of ``block``: shard s of S reads the blocks
    whose number is s modulo S.

    Attributes:
        done: whether all its lines were passed.
    """

    def __init__(
        self,
        rows: tuple[int, int | None],
        block: int,
        shard: int,
        shards: int,
    ) -> None:
        self._first, self._end = rows
        self._block = block
        self._shard = shard
        self._shards = shards
        self._line = 0
        self.done = self._end == self._first

    def cut(
        self, piece: bytes, skipped: Callable[[int], None]
    ) -> Iterator[memoryview]:
        """The shard's lines of the next piece of whole lines.

        ``skipped`` is told the number of lines that it leaves out.
        """
        view = memoryview(piece)
        while view and not self.done:
            skip, take = self._next()
            if take is None:  # all to the end
                yield view
                return
            used, n = _core.lines_skip(view, True, skip or take)
            if skip:
                skipped(n)
            else:
                yield view[:used]
            view = view[used:]
            self._line += n
            self.done = self._end is not None and self._line >= self._end

    def _next(self) -> tuple[int, int | None]:
        """(lines to skip, 0) or (0, lines to take)."""
        if self._line < self._first:
            return self._first - self._line, 0
        left = None if self._end is None else self._end - self._line
        if self._shards == 1:
            return 0, left
        block, at = divmod(self._line - self._first, self._block)
        ahead = (self._shard - block) % self._shards
        if ahead:
            return ahead * self._block - at, 0
        take = self._block - at
        return 0, take if left is None else min(take, left)


class Faults:
    """Malformed lines: counted and logged, or raised if ``strict``.

    Attributes:
        count: how many there were.
        lines: what was wrong with the first 100 of them.
    """

    KEPT = 100

    def __init__(self, strict: bool) -> None:
        self.strict = strict
        self.count = 0
        self.lines: list[str] = []

    def add(self, path: str, line: int, text: str) -> None:
        message = f"{path}:{line}: {text}"
        if self.strict:
            raise errors.MalformedData(
                f"{message}; strict=False counts such lines and leaves them"
                " out"
            )
        self.count += 1
        if len(self.lines) < self.KEPT:
            self.lines.append(message)
            log.warning("%s (the line is left out)", message)
