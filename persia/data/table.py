"""Tables in memory as batches: DataFrames, Arrow, dicts of arrays."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from persia import errors
from persia.base.check import kind, real
from persia.data.base import Dataset, check_salt
from persia.data.batches.batch import Batch
from persia.data.batches.jagged import JaggedBatch
from persia.data.batches.rows import Rows
from persia.data.boundary import guarded
from persia.data.faults import MALFORMED_LIMIT, Faults, check_limit
from persia.data.schema.columns import column_of
from persia.data.schema.encode import Encoder, LabelError, encode_rows, measure
from persia.data.schema.encode_ids import is_same_in_versions
from persia.data.schema.hashing import Bad, as_array, hash_array
from persia.data.schema.inference import infer
from persia.data.schema.schema import Schema

_PIECE = 1 << 16  # rows

_NEED = (
    "a DataFrame (pandas, polars), an Arrow table, a Hugging Face dataset, a "
    "dict of columns, or a list of dicts"
)


class Table(Dataset):
    """A table in memory, as batches.

    The columns are read, hashed and checked when it is made: an epoch only
    cuts batches. A batch has ``dense`` float32 [B, dense columns], ``ids``,
    ``label`` float32 [B], and ``weight`` and ``timestamp`` where the schema
    names them; None for what it does not name.

    Args:
        data: a pandas or polars DataFrame, an Arrow table, a Hugging Face
            ``datasets.Dataset``, a dict of columns (lists, arrays, tensors;
            2-D for a multi-valued column), or a list of dicts.
        schema: a :class:`Schema`, the path of a YAML file, or the name of a
            preset. None: inferred (see :func:`persia.data.infer`).
        batch_size: samples of a batch; the last one may have fewer.
        shuffle: give the samples out in an order decided by ``seed`` and
            ``epoch``. A number is as True: all of them are in memory.
        seed: of the shuffle.
        drop_last: leave out a last batch that is smaller.
        strict: raise MalformedData at a malformed row; False leaves it out
            and counts it in ``malformed``.
        malformed_limit: the share of the samples that one rule, such as that
            of a column, may leave out; more raise LimitReached.
        rank, world_size: take every world_size-th batch.

    Attributes:
        schema: with what was inferred or measured.

    Raises:
        SchemaMismatch: a column of the schema is missing, or has another
            type; or a label is neither 0 nor 1.
        MalformedData: a row is malformed, and ``strict``.
        LimitReached: too many are.
        InvalidArgument: data of another kind.
    """

    @guarded
    def __init__(
        self,
        data: Any,
        schema: Schema | str | os.PathLike[str] | None = None,
        batch_size: int = 1024,
        *,
        shuffle: bool | int = False,
        seed: int = 0,
        drop_last: bool = False,
        strict: bool = False,
        malformed_limit: float = MALFORMED_LIMIT,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        super().__init__(
            batch_size,
            seed=seed,
            drop_last=drop_last,
            rank=rank,
            world_size=world_size,
        )
        bad: Bad = {}
        if schema is None:
            schema = infer(data)
        schema = as_schema(schema)
        table = as_table(data, schema.used_columns, bad)
        names = names_in(data) or table.column_names
        check_columns(schema, names, "the table")
        self.schema = measure(schema, table, "the table")
        self.shuffle = bool(shuffle)
        self.keys = [c.feature for c in self.schema.features]
        self.dense_names = [c.column for c in self.schema.dense]
        self._faults = Faults(strict, check_limit(malformed_limit))
        for row, (text, about) in sorted(bad.items()):
            self._faults.add(f"row {row}", text, about)
        self._rows = _encode(self.schema, table, self._faults, bad)
        self._faults.passed(table.num_rows)
        self._faults.check(1)
        self._same = is_same_in_versions(self.schema, table)

    @property
    def malformed(self) -> int:
        """Malformed rows that were left out."""
        return self._faults.count

    @property
    def malformed_lines(self) -> list[str]:
        """What was wrong with the first 100 of them."""
        return self._faults.lines

    @property
    def samples(self) -> int:
        """The number of samples, without malformed ones."""
        return len(self._rows)

    def use_hash_version(self, version: int) -> None:
        """As of another source; the ids were made already, so they must be
        the same in both versions.

        Raises:
            InvalidArgument: they may differ.
        """
        if version != self.hash_version and not self._same:
            raise errors.InvalidArgument(
                f"the checkpoint was trained on ids of version {version} of "
                "the hash, and those of this table were made with version "
                f"{self.hash_version}: make the table with hash_version: "
                f"{version} in its schema"
            )
        super().use_hash_version(version)

    def __len__(self) -> int:
        """The number of batches."""
        full, rest = divmod(self.samples, self.batch_size)
        full += bool(rest) and not self.drop_last
        return len(range(self.rank, full, self.world_size))

    def __repr__(self) -> str:
        return (
            f"Table(samples={self.samples}, features={self.keys}, "
            f"dense={self.dense_names}, batch_size={self.batch_size})"
        )

    def split(
        self, test: float, *, seed: int | None = None
    ) -> tuple[Table, Table]:
        """Training and test set.

        Args:
            test: the rows that are for the test: below 1 their share, else
                their number. They are the last ones,
            seed: or, with a seed, drawn at random.

        Raises:
            InvalidArgument: the test, or what is left, has labels of one
                kind only: no AUC is defined there.
        """
        held = held_out(test, self.samples)
        order = np.arange(self.samples)
        if seed is not None:
            order = np.random.default_rng(seed).permutation(self.samples)
        at = max(0, self.samples - held)
        parts = []
        for place in (np.sort(order[:at]), np.sort(order[at:])):
            part = self._copy()
            part._rows = self._rows.take(place)
            parts.append(part)
        for task, label in enumerate(self.schema.labels):
            if not label.number:
                _check_split(label.column, task, parts, seed)
        return parts[0], parts[1]

    def _batches(self, shard: int, shards: int) -> Iterator[Batch]:
        for batch, _ in self._batches_from(shard, shards, 0, None):
            yield batch

    def _batches_from(
        self, shard: int, shards: int, begin: int, at: Any
    ) -> Iterator[tuple[Batch, Any]]:
        n, size = self.samples, self.batch_size
        order: npt.NDArray[np.int64] | None = None
        if self.shuffle:
            rng = np.random.default_rng((self.seed, self.epoch))
            order = rng.permutation(n)
        first = (begin * shards + shard) * size
        for low in range(first, n, shards * size):
            high = min(low + size, n)
            if high - low < size and self.drop_last:
                return
            part = slice(low, high) if order is None else order[low:high]
            yield self._rows.take(part).batch(self.keys), None


def _check_split(
    column: str, task: int, parts: list[Table], seed: int | None
) -> None:
    for part, what in zip(parts, ("training", "test"), strict=True):
        labels = part._rows.labels[task]
        labels = labels[~np.isnan(labels)]
        if len(labels) and (labels == labels[0]).all():
            raise errors.InvalidArgument(
                f"column {column!r}: all {len(labels)} labels of the {what} "
                f"set are {labels[0]:g}; "
                + (
                    "the table is sorted by it: pass seed= to split at random"
                    if seed is None
                    else "pass another share or seed"
                )
            )


def held_out(test: float, lines: int) -> int:
    """How many of the rows a ``test`` of split() is."""
    if not 0 <= real(test) < float("inf"):  # NaN is not, either
        raise errors.InvalidArgument(
            f"test is {test!r}; need a share below 1 or a number of lines"
        )
    return round(lines * test) if test < 1 else int(test)


def as_schema(schema: Schema | str | os.PathLike[str]) -> Schema:
    """A schema, from where it is."""
    return schema if isinstance(schema, Schema) else Schema.load(schema)


def check_columns(schema: Schema, names: Sequence[str], where: str) -> None:
    """Raises SchemaMismatch unless each used column is there once."""
    if missing := sorted(schema.used_columns - set(names)):
        shown = list(names[:50]) + ["..."] * (len(names) > 50)
        raise errors.SchemaMismatch(
            f"{where} has no column {missing}; it has {shown}"
        )
    many = [n for n in schema.used_columns if list(names).count(n) > 1]
    if many:
        raise errors.SchemaMismatch(
            f"{where} has several columns {sorted(many)}; give each a name"
        )


def _encode(schema: Schema, table: pa.Table, faults: Faults, bad: Bad) -> Rows:
    """The rows of a table, without those that are bad already."""
    encoder = Encoder(schema)
    table = table.select(sorted(schema.used_columns))
    parts = []
    for first in range(0, max(table.num_rows, 1), _PIECE):
        wrong: list[tuple[int, str, str]] = []

        def report(
            row: int,
            text: str,
            kind: str,
            at: int = first,
            wrong: list[tuple[int, str, str]] = wrong,
        ) -> None:
            if at + row not in bad:
                wrong.append((at + row, text, kind))

        piece = table.slice(first, _PIECE)
        try:
            rows, ok = encode_rows(encoder, piece, report)
        except LabelError as error:
            raise errors.SchemaMismatch(
                f"row {first + error.row}, {error}"
            ) from None
        for row, text, about in sorted(wrong):
            faults.add(f"row {row}", text, about)
        if bad:
            numbers = first + np.flatnonzero(ok)
            good = ~np.isin(numbers, list(bad))
            rows = rows if good.all() else rows.take(np.flatnonzero(good))
        parts.append(rows)
    return Rows.join(parts)


def as_table(
    data: Any,
    names: Collection[str] | None = None,
    bad: Bad | None = None,
    odd: dict[str, str] | None = None,
) -> pa.Table:
    """Data of any kind as an Arrow table.

    Args:
        data: see :class:`Table`.
        names: the columns that are wanted, of those that there are; others
            are not converted. None: all.
        bad: see :func:`persia.data.schema.hashing.as_arrays`.
        odd: gets the error of each column that cannot be converted, which is
            null then. None: the first one is raised.

    Raises:
        InvalidArgument: it is no table.
        DtypeError: a column cannot be converted.
    """
    if isinstance(data, pa.RecordBatch):
        data = pa.Table.from_batches([data])
    if isinstance(data, pa.Table):
        return data if names is None else data.select(_among(data, names))
    if isinstance(data, str | bytes | os.PathLike):
        raise errors.InvalidArgument(
            f"data is {data!r}, need {_NEED}; persia.data.Files reads files"
        )
    if isinstance(data, Mapping):
        return _of_columns(data, names, bad, odd)
    if hasattr(data, "collect_schema") and hasattr(data, "collect"):
        # A LazyFrame of polars.
        return as_table(_imported(data.collect), names, bad, odd)
    if hasattr(data, "with_format") and hasattr(data, "column_names"):
        # Hugging Face
        if names is not None and hasattr(data, "select_columns"):
            data = data.select_columns(_among(data, names))
        return as_table(_imported(lambda: data.with_format("arrow")[:]), names)
    if hasattr(data, "get_columns") and hasattr(data, "columns"):  # polars
        columns = {one.name: one for one in data.get_columns()}
        return _of_columns(columns, names, bad, odd)
    if hasattr(data, "columns") and hasattr(data, "iloc"):  # pandas
        found = [str(name) for name in data.columns]
        if len(set(found)) < len(found):
            twice = sorted({n for n in found if found.count(n) > 1})
            raise errors.InvalidArgument(
                f"the DataFrame has several columns {twice}; rename them"
            )
        columns = {n: data.iloc[:, i] for i, n in enumerate(found)}
        return _of_columns(columns, names, bad, odd)
    if hasattr(data, "to_arrow"):  # duckdb
        return as_table(_imported(data.to_arrow), names)
    if hasattr(data, "__arrow_c_stream__"):
        return as_table(_imported(lambda: pa.table(data)), names)
    if hasattr(data, "__arrow_c_array__"):
        return as_table(_imported(lambda: pa.record_batch(data)), names)
    if isinstance(data, list) and data:
        if all(isinstance(row, Mapping) for row in data):
            return of_dicts(data, names, bad, odd)
        if all(isinstance(part, pa.RecordBatch) for part in data):
            return as_table(_imported(lambda: pa.Table.from_batches(data)))
    kind("data", data, (), _NEED)
    raise AssertionError


def _among(data: Any, names: Collection[str]) -> list[str]:
    return [name for name in data.column_names if name in names]


def names_in(data: Any) -> list[str]:
    """The names of the columns of data, as far as they are known without
    converting it."""
    if isinstance(data, Mapping):
        return [str(name) for name in data]
    if isinstance(data, pa.Table | pa.RecordBatch):
        return list(data.schema.names)
    if isinstance(data, list) and data and isinstance(data[0], Mapping):
        return [str(n) for n in dict.fromkeys(n for row in data for n in row)]
    return [str(name) for name in getattr(data, "columns", ())]


def _imported(read: Callable[[], Any]) -> Any:
    """What another library gives, whatever errors it has."""
    try:
        return read()
    except errors.PersiaError:
        raise
    except Exception as error:
        text = (str(error) or type(error).__name__).splitlines()[0]
        raise errors.InvalidArgument(
            f"data cannot be read as an Arrow table: {text}; need {_NEED}"
        ) from error


def of_dicts(
    rows: Sequence[Mapping[str, Any]],
    names: Collection[str] | None = None,
    bad: Bad | None = None,
    odd: dict[str, str] | None = None,
) -> pa.Table:
    """Rows as dicts; a key that a row lacks is null there.

    Args:
        rows: the dicts.
        names: the keys that become columns; None: all.
        bad: see :func:`persia.data.schema.hashing.as_arrays`.
        odd: see :func:`as_table`.
    """
    if names is None:
        found: dict[str, None] = {}
        for row in rows:
            found.update(dict.fromkeys(row))
        names = list(found)
    columns = {n: [row.get(n) for row in rows] for n in names}
    return _of_columns(columns, None, bad, odd)


def _of_columns(
    columns: Mapping[Any, Any],
    names: Collection[str] | None,
    bad: Bad | None = None,
    odd: dict[str, str] | None = None,
) -> pa.Table:
    arrays: dict[str, pa.Array] = {}
    for name, column in columns.items():
        name = str(name)
        if names is not None and name not in names:
            continue
        try:
            arrays[name] = as_array(f"column {name!r}", column, bad)
        except (errors.DtypeError, errors.ShapeError) as error:
            if odd is None or not hasattr(column, "__len__"):
                raise
            odd[name] = str(error)
            arrays[name] = pa.nulls(len(column))
    sizes = {
        str(name): len(column)
        for name, column in columns.items()
        if hasattr(column, "__len__")
    }
    sizes |= {name: len(array) for name, array in arrays.items()}
    if len(set(sizes.values())) > 1:
        raise errors.ShapeError(
            f"the columns differ in length: {sizes}; need one row each"
        )
    return pa.table(arrays)


@guarded
def ids_of(
    table: Any, columns: Sequence[str] | None, hash: bool, salt: int
) -> JaggedBatch:
    """Implements :meth:`persia.JaggedBatch.from_arrow`."""
    if columns is not None and not isinstance(columns, str):
        table = as_table(table, list(columns))  # others are not converted
    table = as_table(table)
    salt = check_salt("from_arrow", salt)
    if columns is not None and isinstance(columns, str):
        kind("columns", columns, (), "a list of names")
    names = table.column_names if columns is None else list(columns)
    features: dict[str, Any] = {}
    for name in names:
        if name not in table.column_names:
            raise errors.MissingFeature(
                f"no column {name!r} in the table; it has {table.column_names}"
            )
        column = column_of(table, name)
        lengths = None
        if hasattr(column, "value_lengths"):  # lists
            filled = column.value_lengths().fill_null(0)
            lengths = filled.to_numpy(zero_copy_only=False).astype(np.int64)
            column = column.flatten()
        if hash:
            ids = hash_array(column, salt)
        else:
            ids = _as_ids(column, name)
        values = torch.from_numpy(ids)
        features[name] = (
            values if lengths is None else (values, torch.from_numpy(lengths))
        )
    return JaggedBatch.from_dict(features)


def _as_ids(column: pa.Array, name: str) -> npt.NDArray[np.int64]:
    if not pa.types.is_integer(column.type) or column.null_count:
        raise errors.DtypeError(
            f"column {name!r} has the type {column.type} and "
            f"{column.null_count} nulls; with hash=False need integers, none "
            "of them null"
        )
    numbers: npt.NDArray[Any] = column.to_numpy(zero_copy_only=False)
    if numbers.dtype == np.uint64:
        return numbers.view(np.int64).copy()
    return numbers.astype(np.int64)
