"""CSV text in blocks, as pyarrow's reader has to have them."""

from __future__ import annotations

import csv
import io
from collections import deque
from typing import Any

from persia.data.schema.schema import Schema

# Longer lines are malformed: this bounds the memory that a file without line
# ends can take.
LINE_BYTES = 1 << 20

_ASCII = bytes(i if i < 128 else ord("?") for i in range(256))


class Blocks(io.RawIOBase):
    """Bytes that were read already, then the rest of their stream.

    pyarrow raises at a line that has the wrong number of columns *and* bytes
    that are no UTF-8, instead of reporting it. These bytes become "?" here:
    the line is malformed with or without them.

    Args:
        head: what was read already.
        rest: the stream of what follows.
        schema: with the delimiter and the quote.
        columns: of a line.
        mark: (row, byte of the text) that head begins at.

    Attributes:
        marks: (row, byte) of the first row that begins in each block, as far
            as quotes tell; the reader takes them out.
    """

    def __init__(
        self,
        head: bytes,
        rest: Any,
        schema: Schema,
        columns: int,
        mark: tuple[int, int] = (0, 0),
    ) -> None:
        self.marks: deque[tuple[int, int]] = deque()
        self._rows, self._at = mark
        self._head = memoryview(head)
        self._rest = rest
        self._columns = columns
        self._delimiter = schema.delimiter
        self._quote = schema.quote
        self._begun = b""  # the line that the latest block ended in
        self._within = False  # a quote was open where that line began

    def readable(self) -> bool:
        return True

    def read(self, n: int = -1) -> bytes:
        if n < 0:
            part, self._head = bytes(self._head), self._head[:0]
            return part + bytes(self._rest.read())
        part, self._head = bytes(self._head[:n]), self._head[n:]
        if len(part) < n:
            # A short block would let a line reach over two ends of blocks.
            more = bytes(self._rest.read(n - len(part)))
            part = part + more if part else more
        if len(part) == n > 1 and part.endswith(b"\r"):
            # pyarrow drops a line feed that begins a block, after a carriage
            # return that ended the one before: in quotes, too.
            part = part[:-1]
            self._head = memoryview(b"\r" + self._head)
        block = part if part.isascii() else self._mended(part)
        last = part.rfind(b"\n") + 1
        if last:
            self._pass(self._begun + part[:last], self._at + last)
            self._begun = part[last:]
        else:
            self._begun += part
        self._at += len(part)
        return block

    def _pass(self, text: bytes, end: int) -> None:
        """Counts the rows that whole lines, up to a byte, end."""
        if text.count(b"\r") != text.count(b"\r\n"):
            self._rows = -1  # a row may end with it
        quote = (self._quote or "").encode()
        parts = text.split(quote) if quote and quote in text else [text]
        if self._rows >= 0:
            outside = parts[self._within :: 2]
            self._rows += sum(one.count(b"\n") for one in outside)
        self._within ^= len(parts) % 2 == 0
        if self._rows >= 0 and not self._within:
            self.marks.append((self._rows, end))

    def _odd(self, text: bytes) -> bool:
        """Whether text opens a quote, or closes one, for what follows."""
        quote = (self._quote or "").encode()
        return bool(quote) and text.count(quote) % 2 == 1

    def _mended(self, part: bytes) -> bytes:
        lines, within, out = _lines(part), self._within, []
        if len(lines) > 2 and _is_text(b"".join(lines[1:-1])):
            middle = b"".join(lines[1:-1])
            lines = [lines[0], middle, lines[-1]]
        for i, line in enumerate(lines):
            whole = self._begun + line if i == 0 else line
            if i == len(lines) - 1 and not line.endswith(b"\n"):
                whole += self._line_end()
            if not within and not _is_text(whole) and self._is_wrong(whole):
                line = line.translate(_ASCII)
            within ^= self._odd(whole)
            out.append(line)
        return b"".join(out)

    def _is_wrong(self, line: bytes) -> bool:
        """Whether a line has another number of columns. One in which a value
        in quotes continues is left as it is."""
        if self._odd(line):
            return False
        text = line.decode("latin-1").rstrip("\r\n")
        if not self._quote or self._quote not in text:
            return text.count(self._delimiter) + 1 != self._columns
        fields = csv.reader(
            [text], delimiter=self._delimiter, quotechar=self._quote
        )
        try:
            return len(next(fields)) != self._columns
        except csv.Error:
            return False

    def _line_end(self) -> bytes:
        """What follows of a line; it is read again later."""
        ahead = bytes(self._head)
        while b"\n" not in ahead and len(ahead) < LINE_BYTES:
            more = bytes(self._rest.read(1 << 16))
            if not more:
                break
            ahead += more
        self._head = memoryview(ahead)
        return ahead.partition(b"\n")[0]


def _lines(part: bytes) -> list[bytes]:
    lines = [line + b"\n" for line in part.split(b"\n")]
    lines[-1] = lines[-1][:-1]
    return lines if lines[-1] else lines[:-1]


def _is_text(line: bytes) -> bool:
    if line.isascii():
        return True
    try:
        line.decode()
    except UnicodeDecodeError:
        return False
    return True
