"""Logs to Parquet files in time order, in bounded memory."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import parquet as pq

from persia import errors
from persia.base.check import whole
from persia.base.output import new_folder
from persia.data.faults import Faults
from persia.data.formats.files import Files
from persia.data.formats.paths import Paths
from persia.data.schema.canonical import texts
from persia.data.schema.columns import column_of
from persia.data.schema.encode import Encoder, LabelError
from persia.data.schema.schema import CategoricalColumn, Schema

FAN_IN = 32  # runs that are merged at once
GROUP_ROWS = 1 << 16
SCHEMA = "schema.yaml"
_PART = re.compile(r"part-[0-9]{5,}\.parquet")
_TIME, _ROW = "timestamp", "__row"

Join = Callable[[pa.Table], pa.Table]
Tell = Callable[[str, int], object]


@dataclass(frozen=True)
class Prepared:
    """What :func:`prepare` wrote.

    Attributes:
        files: the paths of the Parquet files, in the order of time.
        schema: the path of their schema.
        samples: in them.
        malformed: samples left out.
        malformed_lines: what was wrong with the first 100 of them.
    """

    files: list[Path]
    schema: Path
    samples: int
    malformed: int
    malformed_lines: list[str]


def prepare(
    paths: Paths,
    schema: Schema | str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    chunk_samples: int = 1 << 20,
    file_samples: int = 1 << 22,
    join: Join | None = None,
    encoding: str | None = "utf-8",
    tell: Tell | None = None,
    dry_run: bool = False,
) -> Prepared:
    """Writes a log as Parquet files in the order of its timestamps.

    Labels become 0 and 1, numbers float64, times timestamps in UTC; values
    that are hashed stay as they are, so their ids do too. Rows of the same
    time keep their order. It sorts ``chunk_samples`` samples at a time,
    writes them to temporary files, and merges these: memory does not depend on
    the number of samples; the disk holds them twice for a while.

    The files appear together when all are complete, and then replace those
    of an earlier call. An error, Ctrl-C or a kill leaves these as they were.

    Args:
        paths: a path, a URL, a glob, or a list of them.
        schema: of the log: a :class:`Schema`, the path of a YAML file, or a
            preset. It names a timestamp.
        out: a folder for part-00000.parquet, ... and schema.yaml. Other files
            in it stay. It must hold none of the files that are read, and no
            such parts without the schema that an earlier call wrote.
        chunk_samples: samples sorted at a time.
        file_samples: most samples of a file that is written.
        join: adds columns to a piece of the log before the schema is applied.
        encoding: of text files.
        tell: is called with what is done, and the rows that it is done for,
            to show how far it is.
        dry_run: check the arguments, read the first rows and write nothing.
            The files that are returned are none.

    Raises:
        InvalidArgument: the schema has no timestamp, or ``out`` holds a file
            that is read, or parts of another program.
        SchemaMismatch: a file lacks a column, or labels are no labels.
        MalformedData: no row is well-formed.
        StorageError: a file cannot be read or written.
    """
    inputs: list[str | os.PathLike[str]] = list(getattr(join, "files", ()))
    if not isinstance(schema, Schema):
        inputs += [schema] if os.path.isfile(schema) else []  # no preset
        schema = Schema.load(schema)
    if schema.timestamp is None:
        raise errors.InvalidArgument(
            "the schema names no timestamp to sort by; add timestamp: COLUMN"
        )
    _refuse_parts_of_others(Path(out))
    chunk_samples = whole("chunk_samples", chunk_samples, 1, 2**31)
    file_samples = whole("file_samples", file_samples, 1, 2**31)
    known = schema if join is None else _before_join(schema, join)
    data = Files(paths, known, encoding=encoding)
    if join is None:  # dtypes that the first rows decide
        carry = data.schema.carry
        schema = schema.model_copy(update={"carry": carry})
    inputs += data.local_paths
    faults = Faults(False)
    tables = _read(data, schema, join, faults)
    first = list(islice(tables, 1))  # opens the data, or fails
    if dry_run:
        return Prepared([], Path(out, SCHEMA), 0, faults.count, faults.lines)
    told = tell or (lambda what, rows: None)
    with new_folder(out, inputs=inputs, own=_is_own) as folder:
        work = folder / "runs"
        work.mkdir()
        read = _told(chain(first, tables), "sorting", told)
        runs = _runs(read, chunk_samples, work)
        while len(runs) > FAN_IN:
            runs = _merge_some(runs, work)
        merged = _told(_merge(runs), "merging", told)
        names, rows = _write(merged, folder, file_samples)
        shutil.rmtree(work)
        if not rows:
            raise errors.MalformedData(_why_nothing(data, faults))
        text = _after(schema).to_yaml()
        (folder / SCHEMA).write_text(text, encoding="utf-8")
    files = [Path(out, name) for name in names]
    return Prepared(files, Path(out, SCHEMA), rows, faults.count, faults.lines)


def _refuse_parts_of_others(out: Path) -> None:
    """An earlier call left its schema beside them."""
    if not out.is_dir() or (out / SCHEMA).exists():
        return
    parts = sorted(p.name for p in out.iterdir() if _PART.fullmatch(p.name))
    if parts:
        raise errors.InvalidArgument(
            f"{out} has {parts[0]} but no {SCHEMA}, so another program wrote "
            "it; give another folder, or move these files away"
        )


def _told(
    tables: Iterator[pa.Table], what: str, tell: Tell
) -> Iterator[pa.Table]:
    rows = 0
    for table in tables:
        yield table
        rows += table.num_rows
        tell(what, rows)


def _is_own(name: str) -> bool:
    return name == SCHEMA or bool(_PART.fullmatch(name))


def _why_nothing(data: Files, faults: Faults) -> str:
    text = f"no usable row in {data.files[0]!r}"
    if more := len(data.files) - 1:
        text += f" and {more} other file{'s' * (more > 1)}"
    if faults.count:
        text += f": {faults.count:,} malformed, the first {faults.lines[0]}"
    return f"{text}; nothing was written"


def _after(schema: Schema) -> Schema:
    """The schema of what is written."""
    fields = schema.model_dump(
        exclude_defaults=True,
        exclude={
            *("delimiter", "quote", "header", "columns", "strip"),
            *("time_format", "time_unit", "label", "timestamp"),
        },
    )
    fields["timestamp"] = _TIME
    labels: list[dict[str, Any]] = [
        {"column": label.task} | ({"number": True} if label.number else {})
        for label in schema.labels
    ]
    if labels:
        several = isinstance(schema.label, list)
        fields["label"] = labels if several else labels[0]
    return Schema(**fields)


# ---- reading


def _read(
    data: Files, schema: Schema, join: Join | None, faults: Faults
) -> Iterator[pa.Table]:
    """Pieces of the log with the columns that are written, in its order."""
    encoder = Encoder(schema, text=data.format == "csv" and join is None)
    first = 0
    for table, numbers, where, early in data.tables():
        wrong = list(early)
        if join is not None:
            table = join(_as_text(table))

        def report(
            row: int,
            text: str,
            kind: str,
            numbers: Any = numbers,
            wrong: Any = wrong,
        ) -> None:
            wrong.append((int(numbers[row]), text, kind))

        try:
            found = _columns(encoder, table, report)
        except LabelError as error:
            raise errors.SchemaMismatch(
                f"{where(int(numbers[error.row]))}: {error}"
            ) from None
        for row, text, kind in sorted(wrong):
            faults.add(where(row), text, kind)
        n = found.num_rows
        order = pa.array(np.arange(first, first + n))
        first += n
        yield found.append_column(_ROW, order)


def _before_join(schema: Schema, join: Join) -> Schema:
    """The columns that the log has itself, as features."""
    names = getattr(join, "columns", None)
    if names is None:
        raise errors.InvalidArgument("join needs the attribute 'columns'")
    return Schema(
        categorical=list(names),
        header=schema.header,
        columns=schema.columns,
        delimiter=schema.delimiter,
        quote=schema.quote,
    )


def _as_text(table: Any) -> pa.Table:
    """Bytes of text files as strings; those that are no UTF-8 as null."""
    columns = {}
    for name in table.schema.names:
        column = column_of(table, name)
        if pa.types.is_binary(column.type):
            try:
                column = column.cast(pa.string())
            except pa.ArrowInvalid:
                values = [_decoded(v) for v in column.to_pylist()]
                column = pa.array(values, pa.string())
        columns[name] = column
    return pa.table(columns)


def _decoded(value: bytes) -> str | None:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return None


def _columns(encoder: Encoder, table: Any, report: Any) -> pa.Table:
    """The well-formed rows of a piece, as they are written."""
    schema = encoder.schema
    rows, ok = encoder.encode(table, report)
    kept = pa.array(ok)
    specs = [*schema.features, *([schema.group] if schema.group else [])]
    hashed = {n for f in specs for n in f.columns}
    hashed |= {c.column for c in schema.carry if c.dtype == "id"}
    hashed |= {c.column for bag in schema.bags for c in bag.aligned}
    columns: dict[str, Any] = {}
    for task, name in enumerate(schema.tasks):
        columns[name] = pa.array(rows.labels[task], from_pandas=True)
    if schema.weight is not None:
        columns[schema.weight] = pa.array(rows.tensors["weight"])
    for name in sorted({c.column for c in schema.dense} - hashed):
        numbers, missing, _, _ = encoder.numbers(table, name)
        column = pa.array(numbers, pa.float64(), mask=missing)
        columns[name] = column.filter(kept)
    for carried in schema.carry:
        if carried.column not in hashed:
            values = rows.tensors[carried.tensor]
            columns[carried.column] = pa.array(values, from_pandas=True)
    given = {
        c.column
        for c in specs
        if isinstance(c, CategoricalColumn) and not c.hash
    }
    for name in sorted(hashed):
        column = column_of(table, name).filter(kept)
        if name not in given and not hasattr(column, "value_lengths"):
            column = texts(column).cast(pa.string())
            if schema.strip:
                column = pc.ascii_trim(column, " \t")
        columns[name] = column
    micros = np.round(rows.tensors["timestamp"] * 1e6).astype(np.int64)
    columns[_TIME] = pa.array(micros).cast(pa.timestamp("us", "UTC"))
    return pa.table(columns)


# ---- sorting


def _runs(tables: Iterator[pa.Table], rows: int, work: Path) -> list[Path]:
    """Sorted files of so many rows each, in the order of the log."""
    runs: list[Path] = []
    held: list[pa.Table] = []

    def flush() -> None:
        if held:
            run = _sorted(_joined(held))
            runs.append(work / f"run-{len(runs)}.parquet")
            pq.write_table(run, runs[-1], row_group_size=GROUP_ROWS)
            held.clear()

    for table in tables:
        while table.num_rows:
            room = rows - sum(t.num_rows for t in held)
            held.append(table.slice(0, room))
            table = table.slice(room)
            if room <= held[-1].num_rows:
                flush()
    flush()
    return runs


def _joined(tables: Sequence[pa.Table]) -> pa.Table:
    return pa.concat_tables(tables, promote_options="permissive")


def _keys(table: pa.Table) -> npt.NDArray[np.int64]:
    """(time, row) of each row, int64 [n, 2]."""
    times = column_of(table, _TIME).cast(pa.int64())
    return np.stack([times.to_numpy(), column_of(table, _ROW).to_numpy()], 1)


def _sorted(table: pa.Table) -> pa.Table:
    keys = _keys(table)
    order = np.lexsort((keys[:, 1], keys[:, 0]))
    return table.take(pa.array(order))


class _Run:
    """A sorted file that is read forward."""

    def __init__(self, path: Path) -> None:
        self._pieces = pq.ParquetFile(path).iter_batches(GROUP_ROWS)
        self.rows: pa.Table = pa.table({})
        self.keys: npt.NDArray[np.int64] = np.empty((0, 2), np.int64)

    def fill(self) -> bool:
        """Reads on if nothing is left; False at the end."""
        while not len(self.keys):
            piece = next(self._pieces, None)
            if piece is None:
                return False
            self.rows = pa.Table.from_batches([piece])
            self.keys = _keys(self.rows)
        return True

    def take(self, last: tuple[int, int]) -> pa.Table:
        """Takes the rows up to a key out."""
        times, rows = self.keys[:, 0], self.keys[:, 1]
        upto = (times < last[0]) | ((times == last[0]) & (rows <= last[1]))
        n = int(upto.sum())  # sorted, so they are the first ones
        out = self.rows.slice(0, n)
        self.rows, self.keys = self.rows.slice(n), self.keys[n:]
        return out


def _merge(paths: Sequence[Path]) -> Iterator[pa.Table]:
    """The rows of sorted files in order, piece by piece."""
    runs = [_Run(path) for path in paths]
    while runs := [run for run in runs if run.fill()]:
        # Up to the smallest last key, all rows are here.
        last = min((int(r.keys[-1, 0]), int(r.keys[-1, 1])) for r in runs)
        yield _sorted(_joined([run.take(last) for run in runs]))


def _merge_some(runs: list[Path], work: Path) -> list[Path]:
    """Fewer and longer runs."""
    out = []
    for i in range(0, len(runs), FAN_IN):
        some = runs[i : i + FAN_IN]
        target = work / f"{some[0].stem}-.parquet"
        writer: Any = None
        for table in _merge(some):
            writer = writer or pq.ParquetWriter(target, table.schema)
            writer.write_table(table.cast(writer.schema), GROUP_ROWS)
        writer.close()
        for path in some:
            path.unlink()
        out.append(target)
    return out


def _write(
    tables: Iterator[pa.Table], folder: Path, most: int
) -> tuple[list[str], int]:
    """Files of at most so many rows; (their names, all rows)."""
    names: list[str] = []
    writer: Any = None
    total = written = 0
    for table in tables:
        table = table.drop_columns([_ROW])
        while table.num_rows:
            if writer is None:
                names.append(f"part-{len(names):05}.parquet")
                writer = pq.ParquetWriter(
                    folder / names[-1], table.schema, compression="zstd"
                )
                written = 0
            part = table.slice(0, most - written)
            writer.write_table(part.cast(writer.schema), GROUP_ROWS)
            table = table.slice(part.num_rows)
            written += part.num_rows
            total += part.num_rows
            if written == most:
                writer.close()
                writer = None
    if writer is not None:
        writer.close()
    return names, total
