"""CSV files to tables of text: columns of bytes, and the number of each
line."""

from __future__ import annotations

import csv
from bisect import bisect_left, insort
from collections.abc import Generator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import csv as pa_csv

from persia import errors
from persia.data.boundary import is_of_storage
from persia.data.formats.csv_blocks import LINE_BYTES, Blocks
from persia.data.formats.magic import check_text
from persia.data.formats.paths import File
from persia.data.schema.schema import Schema
from persia.redaction import clean

CHUNK_BYTES = 1 << 20

Ints = npt.NDArray[np.int64]
Wrong = list[tuple[int, str, str]]  # (line, what is wrong, its kind)
# A place that a reader can begin at: (a row, the byte that it begins at).
Mark = tuple[int, int]
# (columns, the number of each row, what is wrong with others, a mark at or
# before them)
Piece = tuple[pa.Table | pa.RecordBatch, Ints, Wrong, Mark]


class CSVReader:
    """One file on its way from text to columns.

    Attributes:
        lines: data lines so far, malformed ones included.
        header: lines before them: 0 or 1.
        position: bytes of the file read so far.
    """

    def __init__(
        self, file: File, schema: Schema, encoding: str | None
    ) -> None:
        self._file = file
        self._schema = schema
        self._encoding = encoding
        self._bad: list[int] = []  # lines of the wrong number of columns
        self._good = 0  # lines given out
        self._skipped = 0  # bad ones among them
        # Not given out yet: pyarrow is some lines ahead.
        self._wrong: Wrong = []
        self._first = 0  # number of the line where the reading began
        self._blocks: Blocks | None = None
        self.lines = 0
        self.header = 0
        self.position = 0

    def where(self, line: int) -> str:
        """The place of a data line in the file."""
        return f"{self._file.name}:{line + 1 + self.header}"

    def tables(self, mark: Mark = (0, 0)) -> Generator[Piece, None, None]:
        """Pieces of the file: text, the number of each line (from 0, without
        the header), the malformed lines before the last of them, and a mark
        before them. It begins at ``mark``."""
        self._first, at = mark
        with self._file.stream(self._encoding, lines=True) as stream:
            try:
                names, rest = self._names(stream, at)
                if names is None:
                    return
                for batch in self._open(names, rest):
                    self.position = stream.position
                    yield *self._numbered(batch), mark
                    mark = self._marked(mark)
                self.position = stream.position
                self.lines = self._first + self._good + len(self._bad)
                if self._wrong:
                    yield *self._rest(names), mark
            except errors.PersiaError:  # some are OSErrors, too
                raise
            except OSError as error:
                if is_of_storage(error):
                    raise errors.StorageError(
                        f"cannot read {self._file.name!r}: {error}"
                    ) from clean(error)
                raise errors.CorruptFile(
                    f"cannot read {self._file.name!r}: {error}"
                ) from clean(error)
            except pa.ArrowInvalid as error:
                if self._wrong:
                    yield *self._rest(names), mark
                if "straddl" in str(error):
                    raise self._too_long() from error
                raise errors.MalformedData(
                    f"{self._file.name!r}: {error}"
                ) from error

    def _numbered(
        self, batch: pa.RecordBatch
    ) -> tuple[pa.RecordBatch, Ints, Wrong]:
        n = batch.num_rows
        bad = np.array(self._bad, np.int64) - self._first
        # Line b is bad and follows b - i good ones, where i counts the bad
        # ones before it.
        good = self._good + np.arange(n)
        skipped = np.searchsorted(
            bad - np.arange(len(bad)), good, side="right"
        )
        self._good += n
        if n:
            self._skipped = int(skipped[-1])
        self.lines = self._first + self._good + len(bad)
        numbers = self._first + good + skipped
        last = int(numbers[-1]) if n else -1
        wrong = [one for one in self._wrong if one[0] < last]
        self._wrong = [one for one in self._wrong if one[0] >= last]
        return batch, numbers, wrong

    def _rest(self, names: Any) -> tuple[pa.RecordBatch, Ints, Wrong]:
        used = sorted(self._schema.used_columns)
        empty = [pa.array([], pa.binary())] * len(used)
        wrong, self._wrong = self._wrong, []
        batch = pa.RecordBatch.from_arrays(empty, used)
        return batch, np.empty(0, np.int64), wrong

    def _too_long(self) -> errors.MalformedData:
        line = self.header + self.lines + 1
        return errors.MalformedData(
            f"{self._file.name!r}: line {line}, or one soon after it, has more"
            f" than {LINE_BYTES:,} bytes, the limit; is a quote not closed?"
            "  If quotes mean nothing in this file, set quote: null in the"
            " schema"
        )

    def _open(self, names: list[str], rest: Any) -> Any:
        schema = self._schema
        used = sorted(schema.used_columns)

        def malformed(row: Any) -> str:
            # Numbers count from 1, at the first line after the header.
            line = self._first + row.number - 1
            insort(self._bad, line)
            need = f"need {row.expected_columns}"
            text = f"{row.actual_columns} columns, {need}"
            self._wrong.append((line, text, "columns"))
            return "skip"

        try:
            return pa_csv.open_csv(
                rest,
                read_options=pa_csv.ReadOptions(
                    column_names=names,
                    use_threads=False,
                    block_size=CHUNK_BYTES,  # >= LINE_BYTES
                ),
                parse_options=pa_csv.ParseOptions(
                    delimiter=schema.delimiter,
                    quote_char=schema.quote or False,
                    newlines_in_values=schema.quote is not None,
                    ignore_empty_lines=False,
                    invalid_row_handler=malformed,
                ),
                convert_options=pa_csv.ConvertOptions(
                    column_types={name: pa.binary() for name in used},
                    include_columns=used,
                    strings_can_be_null=False,
                ),
            )
        except pa.ArrowInvalid as error:
            if "Empty CSV file" in str(error):
                return ()
            raise

    def _names(self, stream: Any, at: int = 0) -> tuple[list[str] | None, Any]:
        """The columns' names, and a stream of what follows the header, or of
        what begins at byte ``at``."""
        schema, name = self._schema, self._file.name
        head = b""
        while b"\n" not in head:
            chunk = stream.read(CHUNK_BYTES)
            if not chunk:
                break
            head += chunk
            if len(head) > 2 * LINE_BYTES:
                break
        check_text(name, head, "CSV")
        if head.find(b"\n", 0, LINE_BYTES + 1) < 0 and len(head) > LINE_BYTES:
            raise self._too_long()
        if not head:
            return None, None
        line, _, _ = head.partition(b"\n")
        names = header_names(line, schema, name)
        missing = sorted(schema.used_columns - set(names))
        header = schema.header
        if header == "auto":
            header = not missing
        if not header:
            assert schema.columns is not None
            return self._from(schema.columns, head, stream, at)
        if missing:
            raise errors.SchemaMismatch(
                f"{name!r} has no column {missing}; its header says {names}"
            )
        twice = sorted(n for n in schema.used_columns if names.count(n) > 1)
        if twice:
            raise errors.SchemaMismatch(
                f"{name!r} has several columns {twice}; its header says"
                f" {names}"
            )
        self.header = 1
        return self._from(names, head, stream, at or len(line) + 1)

    def _from(
        self, names: list[str], head: bytes, stream: Any, begin: int
    ) -> tuple[list[str], Blocks]:
        """The names, and what begins at a byte; ``head`` was read already."""
        stream.skip(max(0, begin - len(head)))
        self._blocks = Blocks(
            head[begin:],
            stream,
            self._schema,
            len(names),
            (self._first, begin),
        )
        return names, self._blocks

    def _marked(self, mark: Mark) -> Mark:
        """The latest mark at the end of the rows given out, else ``mark``.

        Those of the blocks are guessed where quotes stand in odd places; one
        at which pyarrow ended a piece, too, is right.
        """
        row = end = self._first + self._good + self._skipped
        bad = self._bad[bisect_left(self._bad, row) :]
        for line in bad:
            end += line == end
        assert self._blocks is not None
        marks = self._blocks.marks
        while marks and marks[0][0] <= end:
            found = marks.popleft()
            mark = found if found[0] >= row else mark
        return mark


def header_names(line: bytes, schema: Schema, name: str) -> list[str]:
    """The names in the first line of a file."""
    text = line.decode("utf-8-sig", "replace").rstrip("\r")
    names = text.split(schema.delimiter)
    if schema.quote and schema.quote in text:
        try:
            names = next(
                csv.reader(
                    [text],
                    delimiter=schema.delimiter,
                    quotechar=schema.quote,
                )
            )
        except (csv.Error, TypeError, ValueError) as error:
            raise errors.SchemaMismatch(
                f"{name!r}: its header cannot be read: {error}"
            ) from error
    if schema.strip:
        names = [name.strip(" \t") for name in names]
    return names
