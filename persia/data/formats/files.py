"""Files of any usual format as batches: Parquet, CSV, JSON lines, Arrow,
TFRecord; local or remote."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import numpy as np
import pyarrow as pa

from persia import errors
from persia.data.base import read_ahead
from persia.data.boundary import guarded, guarding
from persia.data.faults import MALFORMED_LIMIT
from persia.data.formats.partitions import in_file, of_folders, with_folders
from persia.data.formats.paths import File, Paths, find_files
from persia.data.formats.read_arrow import ArrowStreamReader, open_units
from persia.data.formats.read_csv import CSVReader, Wrong
from persia.data.formats.read_json import JSONReader
from persia.data.formats.read_tfrecord import TFRecordReader
from persia.data.formats.sniff import (
    FORMATS,
    format_of,
    has_spaces,
    sample,
    with_delimiter,
)
from persia.data.schema.encode import Encoder, asks, measure
from persia.data.schema.inference import inferred, log_guess
from persia.data.schema.schema import LabelColumn, Schema
from persia.data.source import Part, Place, Source, wanted_rows
from persia.data.table import as_schema, check_columns, held_out

_READERS: dict[str, Any] = {
    "arrows": ArrowStreamReader,
    "csv": CSVReader,
    "json": JSONReader,
    "tfrecord": TFRecordReader,
}


# See Files.tables().
RawPiece = tuple[Any, Any, Callable[[int], str], Wrong]

_MANY = 100  # labels that are not equal by chance


def _row_of(name: str, row: int) -> str:
    return f"{name}: row {row}"


@dataclass(frozen=True)
class _Unit:
    """What is read as a whole: a file, or a row group of one.

    Attributes:
        file: where it is.
        group: the number of the row group; -1: the whole file.
        rows: of it, where that is known without reading; else -1.
        first: its first row's number in the file.
        before: rows of all units before it in the order of the files.
    """

    file: File
    group: int = -1
    rows: int = -1
    first: int = 0
    before: int = 0


class Files(Source):
    """Files as batches: Parquet, CSV or TSV, JSON lines, Arrow, TFRecord.

    Text files may be compressed (.gz, .zst, .bz2, .lz4). Reading,
    decompressing, parsing and hashing run in background threads. A batch is
    as that of :class:`persia.data.Table`, and the same rows have the same ids
    in every format.

    Args:
        paths: a path, a URL, a glob of either, or a list of them: local,
            ``s3://``, ``gs://``, ``hdfs://`` (through ``pyarrow.fs``), or
            ``http(s)://`` and others (through fsspec, if installed).
        schema: a :class:`Schema`, the path of a YAML file, or the name of a
            preset. None: inferred from the first rows.
        batch_size: samples of a batch; the last one may have fewer.
        format: "parquet", "csv", "json", "arrow", "arrows" (Arrow's stream
            format) or "tfrecord"; None: what the first file's name and first
            bytes say.
        samples: (first, end) of the samples to read, headers left out,
            counted over all files in their order, malformed ones included;
            end may be None. A CSV value in quotes may hold line ends: they
            count as part of its line, here and in messages.
        strict: raise MalformedData at a malformed row, instead of counting it
            in ``malformed`` and leaving it out.
        malformed_limit: the share of the samples that one rule, such as that
            of a column, may leave out. Beyond it the iteration ends with
            LimitReached: after 10,000 samples, or at the end of 100 or more.
        shuffle: False, or a number of samples: so many are read at a time, and
            given out in an order decided by ``seed`` and ``epoch``.
        shuffle_files: read the files, and the row groups in them, in an order
            decided by ``seed`` and ``epoch``.
        seed: of the shuffle.
        drop_last: leave out a last batch that is smaller.
        encoding: of text files.
        rank, world_size: of Parquet and Arrow files take the rank-th of
            world_size equal ranges of samples, of others every
            world_size-th block of batch_size samples.
        label: columns of labels, in the place of those of the schema; several
            are tasks.
        group: the column of the group, in the place of that of the schema.

    Attributes:
        files: the names of the files.
        schema: with what was inferred or measured.

    Raises:
        StorageError: a file is missing or cannot be opened.
        CorruptFile: a file is damaged or cut off.
        MalformedData: a line is longer than 1 MiB, or ``strict`` and a row is
            malformed.
        SchemaMismatch: a file lacks a column of the schema, or has it twice,
            or with another type; or a label is neither 0 nor 1.
    """

    @guarded
    def __init__(
        self,
        paths: Paths,
        schema: Schema | str | os.PathLike[str] | None = None,
        batch_size: int = 1024,
        *,
        format: str | None = None,
        samples: tuple[int, int | None] = (0, None),
        strict: bool = False,
        malformed_limit: float = MALFORMED_LIMIT,
        shuffle: bool | int = False,
        shuffle_files: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        encoding: str | None = "utf-8",
        rank: int = 0,
        world_size: int = 1,
        label: Sequence[str] = (),
        group: str | None = None,
    ) -> None:
        if format is not None and format not in FORMATS:
            raise errors.InvalidArgument(
                f"format is {format!r}, need one of {', '.join(FORMATS)}"
            )
        if schema is not None:
            schema = as_schema(schema).chosen(label, group)
        self._files = find_files(paths)
        self.files = [file.name for file in self._files]
        some = [file for file in self._files if file.size != 0]
        self.format = format or format_of((some or self._files)[0])
        self.encoding = encoding
        self.shuffle_files = bool(shuffle_files)
        if self.format == "csv":
            guess = format is None
            head = (some or self._files)[0]
            schema = with_delimiter(head, schema, encoding, guess)
        schema = self._known(schema, label, group)
        super().__init__(
            schema,
            batch_size,
            samples=samples,
            strict=strict,
            malformed_limit=malformed_limit,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            rank=rank,
            world_size=world_size,
        )
        self._all: list[_Unit] | None = None
        self._lines: list[int] | None = None  # of each file, once counted
        self._read_bytes = 0

    def _known(
        self, schema: Schema | None, label: Sequence[str], group: str | None
    ) -> Schema:
        """The schema, with what the first rows decide: those of the first
        file that has some."""
        if schema is not None and not asks(schema):
            return schema
        for file in self._files:
            first = sample(file, self.format, schema, self.encoding)
            if first.num_rows:
                break
        else:
            raise errors.SchemaMismatch(
                f"{self._files[0].name!r} and {len(self._files) - 1} other "
                "files have no rows to infer a schema from; pass schema="
            )
        text = self.format == "csv"
        if schema is None:
            try:
                schema, lines = inferred(first, text, label, group)
            except errors.SchemaMismatch as error:
                raise errors.SchemaMismatch(
                    f"{file.name!r}: {error}"
                ) from None
            if text and has_spaces(file, self.encoding):
                schema = schema.model_copy(update={"strip": True})
                lines.append("strip: names have spaces around them")
            log_guess(f"{file.name!r} ({first.num_rows:,} rows)", lines)
        if text:
            known = with_delimiter(file, schema, self.encoding, True)
            assert known is not None
            schema = known
        first = with_folders(first, of_folders(schema, file))
        return measure(schema, first, repr(file.name))

    @property
    def sizes(self) -> list[tuple[str, int | None]]:
        """(name, bytes) of the files; None where that is not known."""
        return [(file.name, file.size) for file in self._files]

    @property
    def local_paths(self) -> list[str]:
        """The paths of those files that are on this machine."""
        return [path for file in self._files if (path := file.local)]

    # ---- what is known without reading

    def _units(self) -> list[_Unit]:
        """The units in the order of the files."""
        if self._all is not None:
            return self._all
        if self.format not in ("parquet", "arrow"):
            self._all = [_Unit(file) for file in self._files]
            return self._all
        units, before = [], 0
        for file in self._files:
            with open_units(file, self.format) as opened:
                schema = in_file(self.schema, of_folders(self.schema, file))
                check_columns(schema, opened.names, repr(file.name))
                first = 0
                for group, rows in enumerate(opened.groups):
                    unit = _Unit(file, group, rows, first, before)
                    units.append(unit)
                    first, before = first + rows, before + rows
        self._all = units
        return units

    def _in_order(self) -> list[_Unit]:
        """The units in the order of this epoch."""
        units = self._units()
        if not self.shuffle_files:
            return units
        if units and units[0].rows < 0 and self.samples != (0, None):
            raise errors.InvalidArgument(
                "shuffle_files goes with a range of rows in Parquet and Arrow "
                "files only: in others no row's number is known beforehand"
            )
        rng = np.random.default_rng((self.seed, self.epoch, 1 << 32))
        return [units[i] for i in rng.permutation(len(units))]

    @property
    def _total(self) -> int | None:
        """Rows of all files, where that is known."""
        units = self._units()
        if all(unit.rows >= 0 for unit in units):
            return sum(unit.rows for unit in units)
        return None if self._lines is None else sum(self._lines)

    def count_lines(self) -> int:
        """The number of samples to read, malformed ones included.

        The first call reads all files, except Parquet and Arrow ones.
        """
        if self._total is None:
            self._lines = [self._count(file) for file in self._files]
        total = self._total
        assert total is not None
        first, end = self.samples
        return max(0, min(total, total if end is None else end) - first)

    def _count(self, file: File) -> int:
        reader = self._reader(file)
        with closing(reader.tables()) as tables:
            for _ in tables:
                pass
        return int(reader.lines)

    def __len__(self) -> int:
        """The number of batches, if no row is malformed.

        Raises:
            TypeError: it is not known: ``count_lines()`` counts the rows.
        """
        if self._total is None:
            raise TypeError(
                "how many rows text files have is not known; count_lines() "
                "reads and counts them"
            )
        n, size = self.count_lines(), self.batch_size
        rank, world = self.rank, self.world_size
        if self._units() and self._units()[0].rows >= 0:
            n = n * (rank + 1) // world - n * rank // world
        else:
            blocks = len(range(rank, -(-n // size), world))
            short = -n % size if (-(-n // size) - 1) % world == rank else 0
            n = blocks * size - short
        return n // size if self.drop_last else -(-n // size)

    @property
    def progress(self) -> float | None:
        """The share of the pass that was read, 0 to 1; None if not known."""
        sizes = [file.size for file in self._files]
        if self.format in ("parquet", "arrow") or None in sizes:
            return None
        total = sum(size for size in sizes if size is not None)
        return min(1.0, self._read_bytes / total) if total else None

    def _parts_of(self, n: int) -> list[Self]:
        """Of whole files, if there are enough; else of rows."""
        if self.samples != (0, None) or len(self._files) < n:
            return super()._parts_of(n)
        parts = [self._copy() for _ in range(n)]
        for i, part in enumerate(parts):
            part._files = self._files[i::n]
            part.files = self.files[i::n]
            part._all = part._lines = None
        return parts

    def split(self, test: float) -> tuple[Files, Files]:
        """Training and test set, divided in the order of the rows.

        Args:
            test: the last rows that are for the test: below 1 their share,
                else their number.

        Counts the rows first (see :meth:`count_lines`).

        Raises:
            InvalidArgument: a part of 100 rows or more, of Parquet or Arrow
                files, has labels of one kind only.
        """
        held_out(test, 0)  # raises before the lines are counted
        lines, first = self.count_lines(), self.samples[0]
        at = first + max(0, lines - held_out(test, lines))
        train, held = self._range(first, at), self._range(at, first + lines)
        if train.format in ("parquet", "arrow"):  # a column is read alone
            train._check_labels()
            held._check_labels()
        return train, held

    def _check_labels(self) -> None:
        """Raises if there are many labels, all of them equal."""
        for spec in self.schema.labels:
            if not spec.number:
                self._check_label(spec)

    def _check_label(self, spec: LabelColumn) -> None:
        alone = Schema.model_construct(
            label=[spec], strip=self.schema.strip, missing=self.schema.missing
        )
        encoder, count = Encoder(alone), 0
        found: set[float] = set()
        first, end = self.samples
        assert end is not None
        units = self._units()
        tables = self._tables(units, (first, end), Place(), [spec.column])
        for _, _, table in tables:
            rows = encoder.encode(table, lambda *_: None)[0]
            (label,) = rows.labels
            label = label[~np.isnan(label)]
            count += len(label)
            found.update(np.unique(label).tolist())
            if len(found) > 1:
                return
        if count >= _MANY:
            raise errors.InvalidArgument(
                f"{self.files[0]!r}, rows {first} to {end}: column "
                f"{spec.column!r}: all {count} labels of a part of the split "
                f"are {found.pop():g}; are the rows sorted by it? Split them "
                "by files, or mix them before"
            )

    def of_files(self, first: int, end: int | None) -> Self:
        """Those of some files, by their number, as of a slice."""
        part = self._copy()
        part._files = self._files[first:end]
        part.files = self.files[first:end]
        part._all = part._lines = None
        return part

    def _range(self, first: int, end: int) -> Files:
        part = self._copy()
        part.samples = (first, end)
        return part

    def __repr__(self) -> str:
        shown = ", ".join(map(repr, self.files[:2]))
        shown += ", ..." if len(self.files) > 2 else ""
        return (
            f"{type(self).__name__}({shown}, features={self.keys}, "
            f"dense={self.dense_names}, batch_size={self.batch_size})"
        )

    # ---- reading

    def _reader(self, file: File) -> Any:
        """Of a file that is read from its beginning."""
        schema = in_file(self.schema, of_folders(self.schema, file))
        reader = _READERS[self.format](file, schema, self.encoding)
        if self.format in ("json", "tfrecord"):
            every = [file, *self._files]  # the same one is likely to have it
            reader.seen.others = [f for f in every if f.size is not None]
        return reader

    def tables(self) -> Generator[RawPiece, None, None]:
        """The columns of the schema as the files hold them, of all rows in
        the order of the files: (table, the number of each row in its file,
        where a number is, what is wrong with other rows)."""
        units = self._units()
        if units and units[0].rows >= 0:
            columns = sorted(self.schema.used_columns)
            every = (0, sum(unit.rows for unit in units))
            for number, first, table in self._tables(
                units, every, Place(), columns
            ):
                unit = units[number]
                numbers = unit.first + first + np.arange(table.num_rows)
                yield table, numbers, partial(_row_of, unit.file.name), []
            return
        for unit in units:
            reader = self._reader(unit.file)
            with closing(reader.tables()) as tables:
                for table, numbers, wrong, _ in tables:
                    table = self._with_folders(table, unit.file)
                    yield table, numbers, reader.where, wrong

    def _with_folders(self, table: Any, file: File) -> Any:
        values = of_folders(self.schema, file)
        return with_folders(table, values, self.format == "csv")

    def _parts(
        self, shard: int, shards: int, place: Place
    ) -> Generator[Part, None, None]:
        units = self._in_order()
        rows = self.samples
        if units and units[0].rows >= 0:
            first, n = rows[0], self.count_lines()
            rows = (
                first + n * shard // shards,
                first + n * (shard + 1) // shards,
            )
            yield from self._of_groups(units, rows, place)
            return
        before, self._read_bytes = place.before, 0
        for number in range(place.unit, len(units)):
            start, mark = 0, (0, 0)
            if number == place.unit:
                start, mark = place.row, place.mark
            file = units[number].file
            reader = self._reader(file)
            with (
                guarding(f"cannot read {file.name!r}"),
                closing(
                    self._of_text(
                        (file, reader),
                        *(number, before, start, mark, shard, shards),
                    )
                ) as parts,
            ):
                yield from parts
            before += reader.lines
            if rows[1] is not None and before >= rows[1]:
                return

    def _of_text(
        self,
        opened: tuple[File, Any],
        unit: int,
        before: int,
        start: int,
        mark: tuple[int, int],
        shard: int,
        shards: int,
    ) -> Generator[Part, None, None]:
        """The rows of a file, by its reader, from a mark on."""
        text = self.format == "csv"
        encoder = Encoder(
            self.schema, text=text, utf8=self.encoding is not None
        )
        file, reader = opened
        done, end = self._read_bytes, self.samples[1]
        with closing(read_ahead(partial(reader.tables, mark))) as tables:
            for table, numbers, early, mark in tables:
                self._read_bytes = done + reader.position
                wanted = wanted_rows(
                    before + numbers,
                    self.samples,
                    self.batch_size,
                    shard,
                    shards,
                )
                wanted &= numbers >= start
                at = numbers[-1] if len(numbers) else -1
                if not wanted.all():
                    table = table.filter(pa.array(wanted))
                    numbers = numbers[wanted]
                table = self._with_folders(table, file)
                early = [
                    one
                    for one in early
                    if self._has(before + one[0], shard, shards)
                    and one[0] >= start
                ]
                kept, numbers = self._encode(
                    encoder, table, numbers, reader.where, early
                )
                if len(kept):
                    yield Part(kept, numbers, unit, before, mark)
                if end is not None and before + at >= end:
                    return

    def _has(self, number: int, shard: int, shards: int) -> bool:
        at, size = np.array([number]), self.batch_size
        return bool(wanted_rows(at, self.samples, size, shard, shards)[0])

    def _of_groups(
        self, units: list[_Unit], rows: tuple[int, int], place: Place
    ) -> Generator[Part, None, None]:
        """The rows of units that can be read from any row on."""
        encoder = Encoder(self.schema)
        columns = sorted(self.schema.used_columns)
        read = partial(self._tables, units, rows, place, columns)
        with closing(read_ahead(read, 2)) as tables:
            for number, first, table in tables:
                unit = units[number]
                numbers = np.arange(first, first + table.num_rows)

                def where(row: int, unit: _Unit = unit) -> str:
                    return f"{unit.file.name}: row {unit.first + row}"

                kept, numbers = self._encode(encoder, table, numbers, where)
                if len(kept):
                    yield Part(kept, numbers, number, unit.before)

    def _tables(
        self,
        units: list[_Unit],
        rows: tuple[int, int],
        place: Place,
        columns: list[str],
    ) -> Iterator[tuple[int, int, Any]]:
        """(unit, first row of it, table) of all wanted rows."""
        for number in range(place.unit, len(units)):
            unit = units[number]
            low = max(0, rows[0] - unit.before)
            high = min(unit.rows, rows[1] - unit.before)
            if number == place.unit:
                low = max(low, place.row)
            if low >= high:
                continue
            values = of_folders(self.schema, unit.file)
            inside = [name for name in columns if name not in values]
            values = {n: v for n, v in values.items() if n in columns}
            version = self.schema.hash_version
            with open_units(unit.file, self.format, True, version) as opened:
                for table in opened.tables(unit.group, inside, low):
                    table = with_folders(table, values)
                    yield number, low, table.slice(0, high - low)
                    low += table.num_rows
                    if low >= high:
                        break
