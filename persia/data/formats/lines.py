"""Text in pieces of whole lines, and which lines a shard reads."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterator

from persia import _core
from persia.data.formats.paths import File

CHUNK_BYTES = 1 << 20
# Longer lines are malformed: this bounds the memory that a file without line
# ends can take.
LINE_BYTES = 1 << 20


def read_lines(file: File, at: int = 0) -> Iterator[tuple[bytes, int]]:
    """The file's bytes from one on, decompressed, in pieces of whole lines,
    without a byte order mark; and the byte that each piece ends at.

    Only the last piece may lack its line end. A line of more than 1 MiB is
    cut, and given so many tabs that it is malformed in any format.
    """
    tail, first = b"", at == 0
    with file.stream(lines=True) as stream:
        stream.skip(at)
        while chunk := stream.read(CHUNK_BYTES):
            at += len(chunk)
            if first:  # no part of a column, whatever wrote it
                chunk, first = chunk.removeprefix(codecs.BOM_UTF8), False
            cut = chunk.rfind(b"\n") + 1
            if cut:
                lines = chunk[:cut]
                end = at - (len(chunk) - cut)
                yield b"".join((tail, lines)) if tail else lines, end
                tail = chunk[cut:]
            elif len(tail) < LINE_BYTES:
                tail += chunk
                if len(tail) >= LINE_BYTES:
                    tail += b"\t" * 1024
    if tail:
        yield tail, at


def count_lines(file: File) -> int:
    """The number of lines of a file; the last one may lack its end."""
    total = 0
    for chunk, _ in read_lines(file):
        total += _core.lines_skip(chunk, True, 1 << 62)[1]
    return total


class LinePlan:
    """Which lines of the files, in their order, one of several shards reads.

    Lines are dealt in blocks of ``block``: shard s of S reads the blocks
    whose number is s modulo S.

    Args:
        rows: (first, end) of the lines that are dealt.
        block: lines of a block.
        shard: s.
        shards: S.
        line: the number of the next line.
        start: lines before it are left out, too.

    Attributes:
        done: whether all its lines were passed.
    """

    def __init__(
        self,
        rows: tuple[int, int | None],
        block: int,
        shard: int,
        shards: int,
        line: int = 0,
        start: int = 0,
    ) -> None:
        self._first, self._end = rows
        self._start = max(self._first, start)
        self._block = block
        self._shard = shard
        self._shards = shards
        self._line = line
        self.done = self._end is not None and self._start >= self._end

    def cut(
        self, piece: bytes, skipped: Callable[[int], None]
    ) -> Iterator[memoryview]:
        """The shard's lines of the next piece of whole lines.

        ``skipped`` gets the number of lines that are left out.
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
        if self._line < self._start:
            return self._start - self._line, 0
        left = None if self._end is None else self._end - self._line
        if self._shards == 1:
            return 0, left
        block, at = divmod(self._line - self._first, self._block)
        ahead = (self._shard - block) % self._shards
        if ahead:
            return ahead * self._block - at, 0
        take = self._block - at
        return 0, take if left is None else min(take, left)
