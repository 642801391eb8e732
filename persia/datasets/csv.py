"""CSV files with a declared schema."""

from __future__ import annotations

import copy
import csv
import io
import os
from bisect import bisect_right, insort
from collections.abc import Generator, Iterator
from contextlib import closing
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import torch
from pyarrow import csv as pa_csv

from persia import _core, errors
from persia._check import whole
from persia.data.base import Dataset, read_ahead
from persia.data.schema import CategoricalColumn, DenseColumn, Schema
from persia.datasets.files import (
    CHUNK_BYTES,
    LINE_BYTES,
    Faults,
    Paths,
    check_rows,
    find_files,
    held_out,
    open_stream,
)
from persia.jagged import Batch, JaggedBatch

__all__ = ["CSV"]


class CSV(Dataset):
    """CSV files, plain or compressed (.gz, .zst, .bz2, .lz4), as batches.

    A batch has ``dense`` float32 [B, dense columns] (None without such
    columns), ``ids`` with the schema's categorical features, then its
    multi-valued ones, and ``label`` float32 [B] (None without one). Ids are
    :func:`persia.datasets.value_hash` of the text of each value.

    Args:
        paths: a path, a glob, or a list of them.
        schema: a :class:`Schema`, the path of a YAML file, or the name of a
            preset: "adult", "avazu", "movielens".
        batch_size: samples of a batch.
        rows: (first, end) of the lines to read, headers left out, counted
            over all files in their order, malformed ones included; end may
            be None. A value in quotes may hold line ends: they count as
            part of its line, here and in messages.
        strict: raise MalformedData at a malformed line, instead of
            counting it in ``malformed`` and logging its file and number.
        drop_last: leave out a last batch that is smaller.
        shuffle: 0, or a number of rows: so many are read at a time, and
            given out in an order decided by ``seed`` and ``epoch``.
        seed: of the shuffle.
        shard: (rank, world): take every world-th block of batch_size lines.

    Raises:
        StorageError: a file is missing or cannot be opened.
        CorruptFile: a compressed file is damaged or cut off.
        MalformedData: a line is longer than 1 MiB, or ``strict`` and one is
            malformed.
        SchemaMismatch: a file lacks a column of the schema, or has it twice.
    """

    def __init__(
        self,
        paths: Paths,
        schema: Schema | str | os.PathLike[str],
        batch_size: int = 4096,
        *,
        rows: tuple[int, int | None] = (0, None),
        strict: bool = False,
        drop_last: bool = False,
        shuffle: int = 0,
        seed: int = 1,
        shard: tuple[int, int] = (0, 1),
    ) -> None:
        super().__init__(
            batch_size, seed=seed, drop_last=drop_last, shard=shard
        )
        if not isinstance(schema, Schema):
            schema = Schema.load(schema)
        self.schema = schema
        self.files = find_files(paths)
        self.rows = check_rows(rows)
        self.shuffle = whole("shuffle", shuffle, 0, 2**63 - 1)
        self.keys = [c.feature for c in self.schema.features]
        self.dense_names = [c.column for c in self.schema.dense]
        self._faults = Faults(strict)
        self._lines: int | None = None  # of all files, once counted

    @property
    def malformed(self) -> int:
        """Malformed lines seen so far in this process."""
        return self._faults.count

    @property
    def malformed_lines(self) -> list[str]:
        """What was wrong with the first 100 of them: "file:line: text"."""
        return self._faults.lines

    def count_lines(self) -> int:
        """The number of lines in the range ``rows``, malformed ones included.

        The first call reads all files.
        """
        if self._lines is None:
            self._lines = sum(
                _File(path, self.schema, Faults(False)).count()
                for path in self.files
            )
        first, end = self.rows
        total = self._lines
        return max(0, min(total, total if end is None else end) - first)

    def split(self, test: float) -> tuple[CSV, CSV]:
        """Training and test set, divided in the order of the lines.

        Args:
            test: the last lines that are for the test: below 1 their share,
                else their number.

        Counts the lines first (see :meth:`count_lines`).
        """
        held_out(test, 0)  # raises before the lines are counted
        lines, first = self.count_lines(), self.rows[0]
        at = first + max(0, lines - held_out(test, lines))
        return self._range(first, at), self._range(at, first + lines)

    def _range(self, first: int, end: int) -> CSV:
        part = copy.copy(self)
        part._forget()
        part.rows = (first, end)
        part._faults = Faults(self._faults.strict)
        return part

    def _batches(self, shard: int, shards: int) -> Iterator[Batch]:
        size = self.batch_size
        room = size * max(1, -(-self.shuffle // size))  # rounded up
        pending: list[pa.Table] = []
        rows = number = 0
        with closing(
            read_ahead(partial(self._tables, shard, shards))
        ) as tables:
            for table in tables:
                pending.append(table)
                rows += table.num_rows
                if rows < room:
                    continue
                whole = pa.concat_tables(pending)
                at = 0
                for at in range(0, rows - room + 1, room):
                    yield from self._give_out(whole.slice(at, room), number)
                    number += 1
                pending = [whole.slice(at + room)]
                rows = pending[0].num_rows
        if rows:
            yield from self._give_out(pa.concat_tables(pending), number)

    def _tables(self, shard: int, shards: int) -> Iterator[pa.Table]:
        """The checked rows that belong to the shard, piece by piece."""
        first, end = self.rows
        before = 0  # lines of the files before
        for path in self.files:
            file = _File(path, self.schema, self._faults)
            with closing(file.tables()) as tables:
                for table, lines in tables:
                    at = before + lines - first
                    wanted = at >= 0
                    if end is not None:
                        wanted &= at < end - first
                    if shards > 1:
                        wanted &= at // self.batch_size % shards == shard
                    table = file.parse(table, lines, wanted)
                    if table.num_rows:
                        yield table
                    if end is not None and len(at) and at[-1] >= end - first:
                        return
            before += file.lines

    def _give_out(self, table: pa.Table, number: int) -> Iterator[Batch]:
        if self.shuffle:
            rng = np.random.default_rng((self.seed, self.epoch, number))
            table = table.take(rng.permutation(table.num_rows))
        for at in range(0, table.num_rows, self.batch_size):
            part = table.slice(at, self.batch_size)
            if part.num_rows < self.batch_size and self.drop_last:
                return
            yield self._batch(part)

    def _batch(self, table: pa.Table) -> Batch:
        n = table.num_rows
        dense = None
        if self.schema.dense:
            dense = np.empty((n, len(self.schema.dense)), np.float32)
            for j in range(dense.shape[1]):
                dense[:, j] = table.column(f"dense{j}").to_numpy()
        label = None
        if self.schema.label:
            label = np.array(table.column("label").to_numpy())
        parts = [
            _hash(table.column(f"ids{j}"), column, self.schema.strip)
            for j, column in enumerate(
                [*self.schema.categorical, *self.schema.multivalued]
            )
        ]
        values = torch.from_numpy(np.concatenate([v for v, _ in parts]))
        lengths = None
        if self.schema.multivalued:
            lengths = torch.from_numpy(np.concatenate([le for _, le in parts]))
        return Batch(
            None if dense is None else torch.from_numpy(dense),
            JaggedBatch(self.keys, values, lengths),
            None if label is None else torch.from_numpy(label),
        )


def _hash(
    column: pa.ChunkedArray, spec: CategoricalColumn, strip: bool
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """(ids, lengths [rows]) of a column of binary values."""
    array = column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):  # of no chunks, in old pyarrow
        array = pa.concat_arrays(array.chunks)
    _, offsets, data = array.buffers()
    n = len(array)
    lengths = np.ones(n, np.int64)
    wide = pa.types.is_large_binary(array.type)
    head = (offsets, data, array.offset, n, wide, strip)
    if spec.separator is None:
        ids = np.empty(n, np.int64)
        _core.strings_hash(*head, spec.hash_salt, ids)
        return ids, lengths
    ids = np.empty(((data.size if data else 0) + n) // 2 + 1, np.int64)
    used = _core.strings_split(
        *head, spec.separator.encode(), spec.hash_salt, ids, lengths
    )
    return ids[:used], lengths


class _File:
    """One file on its way from text to checked columns.

    Attributes:
        lines: data lines so far, malformed ones included.
    """

    def __init__(self, path: str, schema: Schema, faults: Faults) -> None:
        self._path = path
        self._schema = schema
        self._faults = faults
        self._bad: list[int] = []  # lines of the wrong number of columns
        self._good = 0  # lines given out
        self._head = 0  # lines of the header: 0 or 1
        # (line, what is wrong), not reported yet: pyarrow is some lines ahead.
        self._wrong: list[tuple[int, str]] = []
        self.lines = 0

    def count(self) -> int:
        with closing(self.tables(check=False)) as tables:
            for _ in tables:
                pass
        return self.lines

    def tables(
        self, check: bool = True
    ) -> Generator[tuple[pa.Table, npt.NDArray[np.int64]], None, None]:
        """Pieces of the file as text, with the number of each line (from 0,
        without the header)."""
        with open_stream(self._path) as stream:
            try:
                names, rest = self._names(stream)
                if names is None:
                    return
                for batch in self._open(names, rest, check):
                    n = batch.num_rows
                    bad = np.array(self._bad, np.int64)
                    # Line b is bad and follows b - i good ones, where i
                    # counts the bad ones before it.
                    good = self._good + np.arange(n)
                    skipped = np.searchsorted(
                        bad - np.arange(len(bad)), good, side="right"
                    )
                    self._good += n
                    self.lines = self._good + len(bad)
                    yield pa.Table.from_batches([batch]), good + skipped
                self.lines = self._good + len(self._bad)
                self._report(None)
            except errors.PersiaError:  # some are OSErrors, too
                raise
            except OSError as error:
                raise errors.CorruptFile(
                    f"cannot read {self._path!r}: {error}"
                ) from error
            except pa.ArrowInvalid as error:
                self._report(None)
                if "straddl" in str(error):
                    raise self._too_long() from error
                raise errors.MalformedData(
                    f"{self._path!r}: {error}"
                ) from error

    def _too_long(self) -> errors.MalformedData:
        line = self._head + self.lines + 1
        return errors.MalformedData(
            f"{self._path!r}: line {line}, or one soon after it, has more"
            f" than {LINE_BYTES:,} bytes, the limit; is a quote not closed?"
            "  If quotes mean nothing in this file, set quote: null in the"
            " schema"
        )

    def _open(self, names: list[str], rest: Any, check: bool) -> Any:
        schema = self._schema
        used = sorted(schema.used_columns)

        def malformed(row: Any) -> str:
            # Numbers count from 1, at the first line after the header.
            line = row.number - 1
            insort(self._bad, line)
            if check:
                need = f"need {row.expected_columns}"
                text = f"{row.actual_columns} columns, {need}"
                self._wrong.append((line, text))
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

    def _names(self, stream: Any) -> tuple[list[str] | None, Any]:
        """The columns' names, and a stream of what follows the header."""
        schema = self._schema
        head = b""
        while b"\n" not in head:
            chunk = stream.read(CHUNK_BYTES)
            if not chunk:
                break
            head += chunk
            if len(head) > 2 * LINE_BYTES:
                break
        if head.find(b"\n", 0, LINE_BYTES + 1) < 0 and len(head) > LINE_BYTES:
            raise self._too_long()
        if not head:
            return None, None
        line, _, _ = head.partition(b"\n")
        text = line.decode("utf-8-sig", "replace").rstrip("\r")
        names = text.split(schema.delimiter)
        if schema.quote and schema.quote in text:
            names = self._unquote(text)
        if schema.strip:
            names = [name.strip(" \t") for name in names]
        missing = sorted(schema.used_columns - set(names))
        header = schema.header
        if header == "auto":
            header = not missing
        if not header:
            assert schema.columns is not None
            return schema.columns, _Joined(head, stream)
        if missing:
            raise errors.SchemaMismatch(
                f"{self._path!r} has no column {missing}; its header says"
                f" {names}"
            )
        twice = sorted(n for n in schema.used_columns if names.count(n) > 1)
        if twice:
            raise errors.SchemaMismatch(
                f"{self._path!r} has several columns {twice}; its header says"
                f" {names}"
            )
        self._head = 1
        return names, _Joined(head[len(line) + 1 :], stream)

    def _unquote(self, header: str) -> list[str]:
        schema = self._schema
        assert schema.quote is not None
        try:
            return next(
                csv.reader(
                    [header],
                    delimiter=schema.delimiter,
                    quotechar=schema.quote,
                )
            )
        except (csv.Error, TypeError, ValueError) as error:
            raise errors.SchemaMismatch(
                f"{self._path!r}: its header cannot be read: {error}"
            ) from error

    def parse(
        self,
        table: pa.Table,
        lines: npt.NDArray[np.int64],
        wanted: npt.NDArray[np.bool_],
    ) -> pa.Table:
        """The wanted rows that are well-formed, numbers read as such."""
        last = int(lines[-1]) if len(lines) else -1
        if not wanted.all():
            table, lines = table.filter(pa.array(wanted)), lines[wanted]
        schema = self._schema
        columns: dict[str, Any] = {}
        ok = ~self._empty(table)
        text = "an empty line, or no value in any column that is used"
        self._wrong += [(int(line), text) for line in lines[~ok]]
        for j, spec in enumerate(schema.dense):
            texts = self._texts(table, spec.column)
            blank = pc.is_in(texts, pa.array(schema.missing))
            numbers, fine = _numbers(
                pc.if_else(blank, str(spec.missing), texts)
            )
            numbers = _transform(numbers, spec)
            fine &= np.isfinite(numbers)
            columns[f"dense{j}"] = pa.array(numbers)
            ok = self._keep(ok, fine, spec.column, texts, lines)
        if schema.label is not None:
            texts = self._texts(table, schema.label.column)
            if schema.label.values is None:
                numbers, fine = _numbers(texts)
            else:
                at = pc.index_in(
                    texts, pa.array(list(schema.label.values), pa.string())
                )
                fine = pc.is_valid(at).to_numpy(zero_copy_only=False)
                known = np.array(
                    list(schema.label.values.values()), np.float32
                )
                numbers = known[pc.fill_null(at, 0).to_numpy()]
            columns["label"] = pa.array(numbers)
            ok = self._keep(ok, fine, schema.label.column, texts, lines)
        for j, feature in enumerate(
            [*schema.categorical, *schema.multivalued]
        ):
            columns[f"ids{j}"] = table.column(feature.column)
        self._report(last)
        parsed = pa.table(columns)
        return parsed if ok.all() else parsed.filter(pa.array(ok))

    def _empty(self, table: pa.Table) -> npt.NDArray[np.bool_]:
        """Where all used columns are empty, as pyarrow reads empty lines."""
        empty = np.ones(table.num_rows, bool)
        for column in table.columns:
            if not empty.any():
                break
            lengths = pc.binary_length(column).to_numpy()
            empty &= lengths == 0
        return empty

    def _texts(self, table: pa.Table, name: str) -> pa.Array:
        """A column as strings; bytes that are no UTF-8 become "�"."""
        column = table.column(name).combine_chunks()
        if isinstance(column, pa.ChunkedArray):
            column = pa.concat_arrays(column.chunks)
        try:
            texts = column.cast(pa.string())
        except pa.ArrowInvalid:
            texts = pa.array(
                [v.decode("utf-8", "replace") for v in column.to_pylist()]
            )
        return pc.utf8_trim(texts, " \t") if self._schema.strip else texts

    def _keep(
        self,
        ok: npt.NDArray[np.bool_],
        fine: npt.NDArray[np.bool_],
        column: str,
        texts: pa.Array,
        lines: npt.NDArray[np.int64],
    ) -> npt.NDArray[np.bool_]:
        """``ok`` without the lines whose field is not fine, each noted."""
        for i in np.flatnonzero(ok & ~fine):
            text = (
                f"column {column!r}: {texts[i].as_py()[:80]!r} is no"
                " finite number, nor one of the schema's values"
            )
            self._wrong.append((int(lines[i]), text))
        return ok & fine

    def _report(self, last: int | None) -> None:
        """Reports what is wrong up to a line (None: the end), in order."""
        self._wrong.sort()
        n = len(self._wrong)
        if last is not None:
            n = bisect_right(self._wrong, last, key=itemgetter(0))
        found, self._wrong = self._wrong[:n], self._wrong[n:]
        for line, text in found:
            self._faults.add(self._path, line + 1 + self._head, text)


def _numbers(
    texts: pa.Array,
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.bool_]]:
    """Finite numbers, and where the texts are such."""
    try:
        numbers = texts.cast(pa.float32()).to_numpy()
    except pa.ArrowInvalid:
        numbers = np.array([_number(t) for t in texts.to_pylist()], np.float32)
    fine = np.isfinite(numbers)
    return np.where(fine, numbers, np.float32(0)), fine


def _number(text: str) -> float:
    try:
        return float(pa.scalar(text).cast(pa.float32()).as_py())
    except pa.ArrowInvalid:
        return float("nan")


def _transform(
    x: npt.NDArray[np.float32], spec: DenseColumn
) -> npt.NDArray[np.float32]:
    if spec.log:
        x = np.log(np.maximum(x, 0) + np.float32(1))
    with np.errstate(over="ignore"):  # told with the line
        return x * np.float32(spec.scale)


class _Joined(io.RawIOBase):
    """Bytes that were read already, then the rest of their stream."""

    def __init__(self, head: bytes, rest: Any) -> None:
        self._head = memoryview(head)
        self._rest = rest

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
        return part
