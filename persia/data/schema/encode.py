"""From columns of any type to rows of numbers and ids, by a schema.

Whole columns at a time. What is malformed is found here, row by row only
where something is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from persia import errors
from persia.data.batches.rows import Floats, Ints, Rows
from persia.data.schema.canonical import texts
from persia.data.schema.columns import Mask, Report, column_of, shortened, tell
from persia.data.schema.declared import NO, YES
from persia.data.schema.encode_ids import IdEncoder
from persia.data.schema.schema import (
    CarryColumn,
    CategoricalColumn,
    DenseColumn,
    LabelColumn,
    Moments,
    MultivaluedColumn,
    Schema,
)

_UNITS = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}  # ticks of a second
_RARE = 0.01  # more labels of other values mean another schema

# What may be a number or a time; a cast of pyarrow decides it. So texts that
# are none, which it finds one at a time, are left out at once.
_NUMBER = r"^[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]+)?$"
_DAY = r"^[0-9]{4}-(?:0[1-9]|1[0-2])-(?:0[1-9]|[12][0-9]|3[01])"
_CLOCK = r"[ T](?:[01][0-9]|2[0-3])(?::?[0-5][0-9]){0,2}(?:[.,][0-9]+)?"
_TIME = rf"{_DAY}(?:{_CLOCK})?$"
_ZONED = rf"{_DAY}(?:{_CLOCK})?(?:Z|[+-][0-9:]+)$"


class Encoder:
    """Makes rows of tables that have the columns of a schema.

    Args:
        schema: with what it measures known (see :meth:`Schema.measured`).
        text: the columns are text without types, as of CSV: binary.
        utf8: bytes of text that are no UTF-8 are malformed.
    """

    def __init__(
        self, schema: Schema, *, text: bool = False, utf8: bool = True
    ) -> None:
        self.schema = schema
        self._text = text
        self._missing = pa.array(schema.missing, pa.string())
        self._ids = IdEncoder(
            schema, text and utf8, self.numbers, self._carried
        )

    def encode(
        self, table: pa.Table | pa.RecordBatch, report: Report
    ) -> tuple[Rows, Mask]:
        """(rows, which rows of the table they are).

        Raises:
            SchemaMismatch: a column whose type or values are not what the
                schema says; what is wrong with single rows is reported.
        """
        schema, n = self.schema, table.num_rows
        ok = self._filled(table, report)
        tensors: dict[str, npt.NDArray[Any]] = {}
        if schema.dense:
            dense = np.empty((n, len(schema.dense)), np.float32)
            for j, spec in enumerate(schema.dense):
                ok &= self._dense(table, spec, ok, report, dense[:, j])
            tensors["dense"] = dense
        if schema.label is not None:
            tensors["label"], ok = self._labels(table, ok, report)
        if schema.weight is not None:
            weights = self._weight(table, schema.weight, ok, report)
            tensors["weight"], ok = weights
        if schema.timestamp is not None:
            times = self._time(table, schema.timestamp, ok, report)
            tensors["timestamp"], ok = times
        if schema.group is not None:
            tensors["group"] = np.empty(n, np.int64)
            ok &= self._ids.single(
                table, schema.group, ok, report, tensors["group"]
            )
        for carried in schema.carry:
            found = self._carried(table, carried, ok, report)
            tensors[carried.tensor], ok = found
        singles = np.empty((len(schema.singles), n), np.int64)
        for j, one in enumerate(schema.singles):
            ok &= self._ids.single(table, one, ok, report, singles[j])
        bags = []
        for many in schema.bags:
            bag, fine = self._ids.bag(table, many, ok, report)
            bags.append(bag)
            ok &= fine
        rows = Rows(singles, bags, tensors)
        return (rows if ok.all() else rows.take(np.flatnonzero(ok))), ok

    # ---- texts and numbers

    def _filled(self, table: Any, report: Report) -> Mask:
        """Where any used column is not empty, as those of an empty line."""
        n = table.num_rows
        if not self._text:
            return np.ones(n, bool)
        empty = np.ones(n, bool)
        for column in table.columns:
            if not empty.any():
                break
            lengths = pc.binary_length(column).to_numpy(zero_copy_only=False)
            empty &= lengths == 0
        for i in np.flatnonzero(empty):
            text = "an empty line, or no value in any column that is used"
            report(int(i), text, "empty")
        return ~empty

    def _strings(self, table: Any, name: str) -> pa.Array:
        """The texts of a column; bytes that are no UTF-8 become "�"."""
        version = self.schema.hash_version
        column = column_of(table, name, version)
        column = texts(column, f"column {name!r}", version)
        if column.null_count:
            column = pc.fill_null(column, "")
        if not pa.types.is_string(column.type):
            try:
                column = column.cast(pa.string())
            except pa.ArrowInvalid:
                column = pa.array(
                    [v.decode("utf-8", "replace") for v in column.to_pylist()]
                )
        return pc.utf8_trim(column, " \t") if self.schema.strip else column

    def numbers(
        self, table: Any, name: str, decimal: str = "."
    ) -> tuple[npt.NDArray[np.float64], Mask, Mask, Any]:
        """(numbers, where one is missing, where one is wrong, the column)."""
        column = column_of(table, name)
        kind, t = column.type, pa.types
        if t.is_dictionary(kind):
            column = column.dictionary_decode()
            kind = column.type
        if t.is_null(kind):
            every = np.ones(len(column), bool)
            return np.zeros(len(column)), every, ~every, column
        if t.is_boolean(kind):
            column = column.cast(pa.uint8())
        elif t.is_decimal(kind):
            column = column.cast(pa.float64())
        elif not t.is_integer(kind) and not t.is_floating(kind):
            if t.is_nested(kind) or t.is_temporal(kind):
                raise errors.SchemaMismatch(
                    f"column {name!r} has the type {kind}, need numbers"
                )
            return self._parsed(table, name, decimal)
        missing = column.is_null().to_numpy(zero_copy_only=False)
        numbers = _raw(column)
        missing = missing | np.isnan(numbers)
        return (
            np.where(missing, 0.0, numbers),
            missing,
            ~missing & ~np.isfinite(numbers),
            column,
        )

    def _parsed(
        self, table: Any, name: str, decimal: str
    ) -> tuple[npt.NDArray[np.float64], Mask, Mask, Any]:
        column = self._strings(table, name)
        blank = pc.is_in(column, self._missing)
        missing = blank.to_numpy(zero_copy_only=False)
        filled = pc.if_else(blank, "0", column) if missing.any() else column
        if decimal == ",":
            filled = pc.replace_substring(filled, ".", "")
            filled = pc.replace_substring(filled, ",", ".")
        try:
            numbers = filled.cast(pa.float64()).to_numpy()
        except pa.ArrowInvalid:
            known = filled.dictionary_encode()
            each = _numbers(known.dictionary)
            numbers = each[known.indices.to_numpy()]
        return numbers, missing, ~np.isfinite(numbers), column

    def _dense(
        self,
        table: Any,
        spec: DenseColumn,
        ok: Mask,
        report: Report,
        out: Floats,
    ) -> Mask:
        x = _plain(column_of(table, spec.column), spec.missing)
        if x is not None and np.isfinite(x := _scaled(x, spec)).all():
            out[:] = x
            return np.ones(len(out), bool)
        numbers, missing, wrong, column = self.numbers(
            table, spec.column, spec.decimal
        )
        with np.errstate(over="ignore"):
            x = numbers.astype(np.float32)
        x[missing] = spec.missing
        x = _scaled(x, spec)
        wrong |= ~np.isfinite(x)
        out[:] = np.where(wrong, np.float32(0), x)
        tell(
            ok & wrong,
            column,
            spec.column,
            "is no finite number, nor one of the schema's values",
            report,
        )
        return ~wrong

    # ---- label, weight, time

    def _labels(
        self, table: Any, ok: Mask, report: Report
    ) -> tuple[Floats, Mask]:
        """[n] of one label; [n, tasks] of several, NaN where one is
        missing."""
        label = self.schema.label
        if not isinstance(label, list):
            assert label is not None
            return self._label(table, label, False, ok, report)
        columns = []
        for spec in label:
            column, ok = self._label(table, spec, True, ok, report)
            columns.append(column)
        return np.stack(columns, 1), ok

    def _label(
        self,
        table: Any,
        spec: LabelColumn,
        optional: bool,
        ok: Mask,
        report: Report,
    ) -> tuple[Floats, Mask]:
        name = spec.column
        column: Any
        if spec.values is not None:
            column = self._strings(table, name)
            known = pa.array(list(spec.values), pa.string())
            numbers, wrong = _looked_up(
                column, known, np.array(list(spec.values.values()))
            )
            blank = pc.is_in(column, self._missing)
            missing = wrong & blank.to_numpy(zero_copy_only=False)
            need = f"is none of the label's values {list(spec.values)}"
        else:
            numbers, missing, wrong, column = self.numbers(table, name)
            wrong = wrong | missing
            need = "is no finite number, nor one of the schema's values"
            if wrong.any() and not spec.number and spec.threshold is None:
                words = pc.utf8_lower(self._strings(table, name))
                said, unknown = _looked_up(
                    words,
                    pa.array([*YES, *NO]),
                    np.repeat([1.0, 0.0], [len(YES), len(NO)]),
                )
                numbers = np.where(wrong, said, numbers)
                wrong &= unknown
            if spec.threshold is not None:
                numbers = (numbers >= spec.threshold).astype(np.float64)
            elif not spec.number:
                other = (numbers != 0) & (numbers != 1)
                self._check_binary(ok & ~wrong, other, column, name)
                wrong |= other
        absent = missing & wrong if optional else np.zeros_like(wrong)
        wrong &= ~absent
        tell(ok & wrong, column, name, need, report)
        label = np.where(wrong, 0, numbers).astype(np.float32)
        label[absent] = np.nan
        return label, ok & ~wrong

    def _check_binary(
        self, ok: Mask, other: Mask, column: Any, name: str
    ) -> None:
        """Labels that are other numbers are an error of the schema, unless
        they are as rare as damaged rows."""
        places = np.flatnonzero(ok & other)
        if len(places) <= _RARE * len(other):
            return
        at = int(places[0])
        value = column[at].as_py()
        raise LabelError(
            at,
            f"column {name!r}: the label is {shortened(value)}, need 0 or 1; "
            f"in the schema, 'label: {{column: {name}, threshold: t}}' makes "
            "1 of what is at least t, 'values' names the number for each "
            "text, and 'number: true' takes any number",
        )

    def _weight(
        self, table: Any, name: str, ok: Mask, report: Report
    ) -> tuple[Floats, Mask]:
        numbers, missing, wrong, column = self.numbers(table, name)
        wrong = wrong | missing | (numbers < 0)
        need = "is no weight: a finite number of at least 0"
        tell(ok & wrong, column, name, need, report)
        return np.where(wrong, 0, numbers).astype(np.float32), ok & ~wrong

    def _time(
        self, table: Any, name: str, ok: Mask, report: Report
    ) -> tuple[npt.NDArray[np.float64], Mask]:
        column = column_of(table, name)
        kind, t = column.type, pa.types
        if t.is_date(kind):
            column = column.cast(pa.timestamp("ms"))
        if t.is_timestamp(column.type):
            seconds, wrong = _seconds(column)
        elif self.schema.time_format is not None:
            column = self._strings(table, name)
            read = pc.strptime(
                column, self.schema.time_format, "s", error_is_null=True
            )
            seconds, wrong = _seconds(read)
        else:
            seconds, missing, wrong, column = self.numbers(table, name)
            seconds = seconds / _UNITS[self.schema.time_unit]
            seconds, wrong = _or_times(seconds, wrong | missing, column)
        need = "is neither a time nor a number"
        tell(ok & wrong, column, name, need, report)
        return np.where(wrong, 0.0, seconds), ok & ~wrong

    # ---- carried columns

    def _carried(
        self, table: Any, spec: CarryColumn, ok: Mask, report: Report
    ) -> tuple[npt.NDArray[Any], Mask]:
        """(values [n], where they and ``ok`` are good)."""
        name, dtype = spec.column, spec.dtype or "float64"
        if dtype == "id":
            ids = np.empty(table.num_rows, np.int64)
            column = CategoricalColumn(column=name)
            good = self._ids.single(table, column, ok, report, ids)
            return ids, ok & good
        need = f"is no {dtype} (dtype: {dtype})"
        if dtype == "int64":
            column = column_of(table, name, self.schema.hash_version)
            whole, good = self._ids.given(column, name)
            tell(ok & ~good, column, name, need, report)
            return np.where(good, whole, 0), ok & good
        column = column_of(table, name)
        if pa.types.is_date(column.type):
            column = column.cast(pa.timestamp("ms"))
        if pa.types.is_timestamp(column.type):
            numbers, missing = _seconds(column)
            wrong = np.zeros_like(missing)
        else:
            numbers, missing, wrong, column = self.numbers(table, name)
            if dtype == "float64":
                numbers, wrong = _or_times(numbers, wrong, column)
        if dtype == "bool":
            wrong = wrong | missing | ((numbers != 0) & (numbers != 1))
        else:
            numbers = np.where(missing, np.nan, numbers)
        tell(ok & wrong, column, name, need, report)
        with np.errstate(over="ignore", invalid="ignore"):
            return numbers.astype(dtype), ok & ~wrong

    def values_in(
        self, table: Any, name: str, separator: str | None
    ) -> pa.Table:
        """The values of all lists of a column, as a column."""
        lists, _ = self._ids.lists(table, name, separator)
        return pa.table({name: lists.flatten()})


def encode_rows(
    encoder: Encoder, table: pa.Table | pa.RecordBatch, report: Report
) -> tuple[Rows, Mask]:
    """As :meth:`Encoder.encode`; a row that makes another library raise is
    malformed, with its reason.

    Raises:
        SchemaMismatch: see :meth:`Encoder.encode`.
    """
    try:
        return encoder.encode(table, report)
    except (errors.PersiaError, MemoryError):
        raise
    except Exception as error:
        if table.num_rows <= 1:
            if not table.num_rows:
                raise
            text = (str(error) or type(error).__name__).splitlines()[0]
            report(0, f"it cannot be read: {text}", type(error).__name__)
            none = encoder.encode(table.slice(0, 0), report)[0]
            return none, np.zeros(1, bool)
    half = table.num_rows // 2

    def later(row: int, text: str, kind: str) -> None:
        report(half + row, text, kind)

    first = encode_rows(encoder, table.slice(0, half), report)
    second = encode_rows(encoder, table.slice(half), later)
    ok = np.concatenate([first[1], second[1]])
    return Rows.join([first[0], second[0]]), ok


def asks(schema: Schema) -> bool:
    """Whether the first rows decide a part of the schema."""
    return (
        any(c.standardise is True for c in schema.dense)
        or any(isinstance(c.buckets, int) for c in schema.categorical)
        or any(c.dtype is None for c in schema.carry)
        or any(a.dtype is None for c in schema.bags for a in c.aligned)
    )


def measure(
    schema: Schema, table: Any, where: str, text: bool = False
) -> Schema:
    """The schema with what its first rows decide: means, quantiles, and
    dtypes of carried columns."""
    if not asks(schema):
        return schema
    encoder = Encoder(schema, text=text)
    dense, ids = [], []
    for d in schema.dense:
        if d.standardise is True:
            x = _known(encoder, table, d, where)
            x = np.log(np.maximum(x, 0) + 1) if d.log else x
            std = float(x.std()) or 1.0
            moments = Moments(mean=float(x.mean()), std=std)
            d = d.model_copy(update={"standardise": moments})
        dense.append(d)
    for c in schema.categorical:
        if isinstance(c.buckets, int):
            x = _known(encoder, table, c, where)
            shares = np.arange(1, c.buckets) / c.buckets
            bounds = np.unique(np.quantile(x, shares)).tolist()
            c = c.model_copy(update={"buckets": bounds})
        ids.append(c)
    carry = [
        c.model_copy(update={"dtype": _dtype(encoder, table, c.column, where)})
        if c.dtype is None
        else c
        for c in schema.carry
    ]
    update: dict[str, Any] = {
        "dense": dense,
        "categorical": ids,
        "carry": carry,
    }
    for name in ("multivalued", "sequences"):
        update[name] = [
            _with_dtypes(encoder, table, bag, where)
            for bag in getattr(schema, name)
        ]
    return schema.model_copy(update=update)


def _with_dtypes(
    encoder: Encoder, table: Any, bag: MultivaluedColumn, where: str
) -> MultivaluedColumn:
    """A feature, with the dtypes of what is aligned with it."""
    aligned = []
    for beside in bag.aligned:
        name = beside.column
        if beside.dtype is None and name in table.schema.names:
            inner = encoder.values_in(table, name, bag.separator)
            dtype = _dtype(encoder, inner, name, where)
            beside = beside.model_copy(update={"dtype": dtype})
        aligned.append(beside)
    return bag.model_copy(update={"aligned": aligned})


def _dtype(encoder: Encoder, table: Any, name: str, where: str) -> str | None:
    """Of a carried column, by its first rows."""
    if name not in table.schema.names:
        return None  # told by the check of the columns
    column = column_of(table, name)
    kind, t = column.type, pa.types
    if t.is_dictionary(kind):
        kind = kind.value_type
    if t.is_boolean(kind):
        return "bool"
    if t.is_integer(kind):
        return "int64"
    if t.is_float16(kind) or t.is_float32(kind):
        return "float32"
    if t.is_floating(kind) or t.is_decimal(kind) or t.is_null(kind):
        return "float64"
    if t.is_timestamp(kind) or t.is_date(kind):
        return "float64"
    remedy = (
        f"'carry: [{{column: {name}, dtype: id}}]' in the schema carries the "
        "ids of its values"
    )
    if t.is_nested(kind) or t.is_temporal(kind):
        raise errors.SchemaMismatch(
            f"{where}: column {name!r} of the type {kind} cannot be carried "
            f"as numbers; {remedy}"
        )
    numbers, missing, wrong, column = encoder.numbers(table, name)
    if wrong.any():
        if not _or_times(numbers, wrong, column)[1].any():
            return "float64"
        raise errors.SchemaMismatch(
            f"{where}: column {name!r} has texts; {remedy}"
        )
    whole = not missing.any() and bool((np.floor(numbers) == numbers).all())
    return "int64" if whole else "float64"


def _known(
    encoder: Encoder,
    table: Any,
    spec: DenseColumn | CategoricalColumn,
    where: str,
) -> npt.NDArray[np.float64]:
    """The finite numbers of a column, of which there is one at least."""
    name = spec.column
    if name not in table.schema.names:
        return np.zeros(1)  # told by the check of the columns
    numbers, missing, wrong, _ = encoder.numbers(table, name, spec.decimal)
    known = numbers[~missing & ~wrong]
    if not len(known):
        raise errors.SchemaMismatch(
            f"{where}: column {name!r} has no number in its first rows, so "
            "neither moments nor quantiles; give them in the schema"
        )
    return known


class LabelError(errors.SchemaMismatch):
    """A label that the schema does not allow, at a row of a piece."""

    def __init__(self, row: int, text: str) -> None:
        super().__init__(text)
        self.row = row


def _plain(column: pa.Array, missing: float) -> Floats | None:
    """Integers and floats, the usual columns; None where others are."""
    kind, t = column.type, pa.types
    if not t.is_integer(kind) and not t.is_floating(kind):
        return None
    if kind.bit_width == 64:  # rounded twice, as in all other ways
        column = column.cast(pa.float64(), safe=False)
    column = column.cast(pa.float32(), safe=False)
    if column.null_count:
        column = pc.fill_null(column, pa.scalar(missing, pa.float32()))
    out: Floats = column.to_numpy()
    return out


def _scaled(x: Floats, spec: DenseColumn) -> Floats:
    """What the model gets of numbers."""
    with np.errstate(over="ignore", invalid="ignore"):
        if spec.log:
            x = np.maximum(x, np.float32(0))
            x += np.float32(1)
            np.log(x, out=x)
        if isinstance(spec.standardise, Moments):
            mean, std = spec.standardise.mean, spec.standardise.std
            x = (x - np.float32(mean)) / np.float32(std)
        if spec.scale != 1:
            x = x * np.float32(spec.scale)
    return x


def _raw(column: pa.Array) -> npt.NDArray[np.float64]:
    """Numbers as float64, whatever is null."""
    if column.null_count:
        column = pc.fill_null(column, pa.scalar(0).cast(column.type))
    out = column.to_numpy(zero_copy_only=False)
    return np.asarray(out, np.float64)


def _looked_up(
    column: pa.Array, known: pa.Array, numbers: npt.NDArray[Any]
) -> tuple[npt.NDArray[np.float64], Mask]:
    """The number for each text, and where a text is not known."""
    at = pc.index_in(column, known.cast(column.type))
    wrong = at.is_null().to_numpy(zero_copy_only=False)
    found = numbers.astype(np.float64)[pc.fill_null(at, 0).to_numpy()]
    return found, wrong


def _numbers(column: pa.Array) -> npt.NDArray[np.float64]:
    """The numbers that texts are; NaN where one is none."""
    words = pc.utf8_lower(column)
    out = np.full(len(column), np.nan)
    out[_where(pc.equal(words, "true"))] = 1.0
    out[_where(pc.equal(words, "false"))] = 0.0
    some = _where(pc.match_substring_regex(words, _NUMBER))
    out[some] = cast_texts(column.take(some), pa.float64(), _raw)[0]
    return out


def _where(mask: pa.Array) -> Ints:
    found: Ints = np.flatnonzero(mask.to_numpy(zero_copy_only=False))
    return found


def cast_texts(
    column: pa.Array,
    kind: pa.DataType,
    read: Callable[[pa.Array], npt.NDArray[np.float64]],
) -> tuple[npt.NDArray[np.float64], Mask]:
    """(values, which are none) of texts, most of which are of a type: halves
    where one is not, so that a few cost a few casts."""
    try:
        return read(column.cast(kind)), np.zeros(len(column), bool)
    except pa.ArrowInvalid:
        if len(column) == 1:
            return np.full(1, np.nan), np.ones(1, bool)
    half = len(column) // 2
    parts = [
        cast_texts(part, kind, read)
        for part in (column.slice(0, half), column.slice(half))
    ]
    values, wrong = (np.concatenate(both) for both in zip(*parts))
    return values, wrong


def _seconds(column: pa.Array) -> tuple[npt.NDArray[np.float64], Mask]:
    wrong = column.is_null().to_numpy(zero_copy_only=False)
    ticks = pc.fill_null(column.cast(pa.int64()), 0).to_numpy()
    return ticks / _UNITS[column.type.unit], wrong


def _or_times(
    numbers: npt.NDArray[np.float64], wrong: Mask, column: pa.Array
) -> tuple[npt.NDArray[np.float64], Mask]:
    """Numbers, in which texts of times are seconds since 1970; and where a
    value is neither."""
    if not wrong.any() or not pa.types.is_string(column.type):
        return numbers, wrong
    said, unknown = times_of_texts(column)
    return np.where(wrong, said, numbers), wrong & unknown


def times_of_texts(column: pa.Array) -> tuple[npt.NDArray[np.float64], Mask]:
    """Texts in ISO 8601, with a zone or in UTC, as seconds since 1970; zero
    where one is none."""
    known = column.dictionary_encode()
    texts = known.dictionary
    out, wrong = np.zeros(len(texts)), np.ones(len(texts), bool)
    for pattern, zone in (_TIME, None), (_ZONED, "UTC"):
        some = _where(pc.match_substring_regex(texts, pattern))
        kind = pa.timestamp("us", zone)
        found, none = cast_texts(
            texts.take(some), kind, lambda c: _seconds(c)[0]
        )
        out[some], wrong[some] = np.where(none, 0.0, found), none
    at = known.indices.to_numpy()
    return out[at], wrong[at]
