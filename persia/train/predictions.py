"""Files of predictions, with columns of the data beside them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import csv, parquet

from persia import errors
from persia.base.output import new_file
from persia.data import Files, Schema
from persia.data.formats.paths import Paths
from persia.data.schema.columns import column_of

Write = Callable[[npt.NDArray[np.float32]], None]


class Kept:
    """Columns of files, as they are there, in the order of the rows.

    Args:
        paths: of the files.
        like: the files as the model reads them.
        names: of the columns.

    Raises:
        SchemaMismatch: a file has no such column.
    """

    def __init__(self, paths: Paths, like: Files, names: Sequence[str]):
        known = like.schema
        schema = Schema(
            categorical=list(names),
            header=known.header,
            columns=known.columns,
            delimiter=known.delimiter,
            quote=known.quote,
        )
        self.names = names
        files = Files(
            paths, schema, format=like.format, encoding=like.encoding
        )
        self._pieces = files.tables()
        self._held = self._next()

    def take(self, n: int) -> list[Any]:
        """The columns of the next ``n`` rows."""
        some = []
        while n and self._held is not None:
            piece = self._held.slice(0, n)
            n -= piece.num_rows
            some.append(piece)
            self._held = self._held.slice(piece.num_rows)
            if not self._held.num_rows:
                self._held = self._next()
        table = pa.concat_tables(some, promote_options="permissive")
        return [table.column(name) for name in self.names]

    def _next(self) -> Any:
        for table, *_ in self._pieces:
            if table.num_rows:
                return pa.table(
                    {
                        name: _text(column_of(table, name))
                        for name in self.names
                    }
                )
        return None


def _text(column: Any) -> Any:
    """Bytes of text files as text."""
    column = getattr(column, "combine_chunks", lambda: column)()
    return column.cast(pa.string()) if _is_bytes(column.type) else column


def _is_bytes(kind: Any) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def check_columns(
    batches: Files, names: Sequence[str], out: Path | None
) -> Kept | None:
    """The columns that go beside predictions, if there are any.

    Raises:
        InvalidArgument: the output has no columns.
        SchemaMismatch: the files lack one.
    """
    if not names:
        return None
    if out is None or out.suffix not in (".parquet", ".csv"):
        raise errors.InvalidArgument(
            "`columns` goes with `out`, a FILE.parquet or FILE.csv"
        )
    return Kept(batches.files, batches, names)


@contextlib.contextmanager
def writer_of(
    out: Path | None,
    tasks: Sequence[str],
    kept: Kept | None,
    inputs: Iterable[str | Path],
) -> Iterator[Write]:
    """Writes probabilities [n, tasks] of batches, in the order of the data.

    Args:
        out: a .parquet or .csv file with names of columns, or another one,
            of text; None: stdout. It appears when the block ends well.
        tasks: names of the columns; none: "probability".
        kept: columns that stand before them.
        inputs: files that ``out`` must not be.
    """
    with contextlib.ExitStack() as stack:
        file: Any = sys.stdout
        if out is not None:
            file = stack.enter_context(new_file(out, inputs=inputs))
        if out is None or out.suffix not in (".parquet", ".csv"):

            def write(chances: npt.NDArray[np.float32]) -> None:
                for line in chances.tolist():
                    print(",".join(f"{p:.6g}" for p in line), file=file)

            yield write
            return
        columns = _Columns(file.buffer, out.suffix, tasks, kept)
        stack.enter_context(contextlib.closing(columns))
        yield columns.write


class _Columns:
    """Batches of columns into a file, by pyarrow."""

    def __init__(
        self,
        file: Any,
        suffix: str,
        tasks: Sequence[str],
        kept: Kept | None,
    ) -> None:
        self._sink = pa.PythonFile(file)
        self._open = (
            parquet.ParquetWriter if suffix == ".parquet" else csv.CSVWriter
        )
        self._names = list(tasks) or ["probability"]
        self._kept = kept
        self._writer: Any = None

    def write(self, chances: npt.NDArray[np.float32]) -> None:
        names: list[str] = []
        columns: list[Any] = []
        if self._kept is not None:
            names += self._kept.names
            columns += self._kept.take(len(chances))
        names += self._names
        columns += [pa.array(column) for column in chances.T]
        table = pa.table(columns, names)
        if self._writer is None:
            self._schema = table.schema
            self._writer = self._open(self._sink, table.schema)
        try:
            self._writer.write_table(table.cast(self._schema))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise errors.InvalidArgument(
                f"`out` cannot hold these columns: {error}; lists go into "
                "a .parquet file"
            ) from None

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
