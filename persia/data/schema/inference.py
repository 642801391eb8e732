"""A schema from what the columns look like."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from persia import errors
from persia.data.boundary import guarded
from persia.data.schema.columns import column_of
from persia.data.schema.encode import times_of_texts
from persia.data.schema.schema import Schema

_LABELS = (
    "label click clicked is_click is_clicked y target conversion converted "
    "liked like buy purchase purchased outcome class income"
).split()
_WEIGHTS = ("weight", "sample_weight")
_TIMES = ("timestamp", "time", "datetime", "date", "ts")
_ID = re.compile(
    r"(^|[_\W])(id|ids|uuid|hash|code|zip|key|user|item|product|movie|ad|site"
    r"|app|device|campaign|category|brand|shop|author|video)$",
    re.IGNORECASE,
)
_FEW = 32  # distinct integers that are categories rather than an amount
_BINARY = [{"0", "1"}, {"yes", "no"}, {"true", "false"}, {"y", "n"}]
_SEPARATORS = "|;,"
_POINT = r"^[+-]?[0-9]+(\.[0-9]*)?([eE][+-]?[0-9]+)?$"
_COMMA = r"^[+-]?([0-9]{1,3}(\.[0-9]{3})+|[0-9]+)(,[0-9]+)?$"

log = logging.getLogger("persia.data")

logged: set[str] = set()

_ODD = b"persia.odd"


def with_odd(table: pa.Table, odd: Mapping[str, str]) -> pa.Table:
    """A table that remembers why columns could not be converted."""
    fields = [
        f.with_metadata({_ODD: odd[f.name].encode()}) if f.name in odd else f
        for f in table.schema
    ]
    return pa.table(table.columns, pa.schema(fields))


@guarded
def infer(
    data: Any, label: Sequence[str] = (), group: str | None = None
) -> Schema:
    """A schema for a table, from its first 100,000 rows.

    Texts and booleans are categorical, floats are dense, lists are
    multi-valued. Integers are categorical if their name says so (``user_id``)
    or if they have few values, else dense; so are decimals without a
    fraction, and texts that are numbers. The label is the column of a usual
    name (``label``, ``click``, ``y``, ...) or the only column of two values.
    Columns without a second value or without a name, texts that differ in
    each row, and other columns of two values that have the name of a label,
    are left out.

    What each column is taken as, and why, is logged as a warning, once a
    process.

    Args:
        data: what :class:`persia.data.Table` takes.
        label: the columns of the labels; by default one is looked for.
        group: the column of the group, which may be a feature, too.

    Raises:
        SchemaMismatch: no column can be a feature, or one that is named is
            not there.
    """
    schema, lines = inferred(data, label=label, group=group)
    log_guess("the table", lines)
    return schema


def log_guess(where: str, lines: Sequence[str]) -> None:
    """Logs what was inferred, once a process."""
    text = "\n  ".join([f"the schema of {where} is a guess:", *lines])
    if text not in logged:
        logged.add(text)
        log.warning("%s\n  (`schema` decides it)", text)


def inferred(
    data: Any,
    text: bool = False,
    label: Sequence[str] = (),
    group: str | None = None,
) -> tuple[Schema, list[str]]:
    """(the schema of a table, a line about each column).

    Args:
        data: what :class:`persia.data.Table` takes.
        text: it is read from text without types, as of CSV.
        label, group: see :func:`infer`.

    Raises:
        SchemaMismatch: no column can be a feature, or one that is named is
            not there.
    """
    from persia.data.table import as_table

    odd: dict[str, str] = {}
    table = with_odd(as_table(data, odd=odd), odd).slice(0, 100_000)
    fields: dict[str, Any] = {
        "dense": [],
        "categorical": [],
        "multivalued": [],
    }
    lines = []
    columns = {n: column_of(table, n) for n in table.column_names}
    named = [*label, *([] if group is None else [group])]
    if missing := sorted(set(named) - set(columns)):
        raise errors.SchemaMismatch(
            f"there is no column {missing} for a label or group; there are "
            f"{list(columns)[:50]}"
        )
    labels: dict[str, Any] = {n: _of_label(n, columns[n]) for n in label}
    why_label = "as was asked"
    if not label and (found := _label(columns)) is not None:
        labels, why_label = {found["column"]: found}, "by its name or values"
    for name, column in columns.items():
        if name in labels:
            lines.append(f"{name}: label{_with(labels[name])}, {why_label}")
            continue
        if labels and name.lower() in _LABELS and _is_binary(column):
            lines.append(
                f"{name}: left out: it may be another label, by which "
                f"{', '.join(labels)} would be foretold"
            )
            continue
        why = (table.schema.field(name).metadata or {}).get(_ODD)
        if why is not None:
            lines.append(f"{name}: left out: {why.decode()}")
            continue
        where, entry, why = _role(name, column, text)
        if where in ("weight", "timestamp") and where in fields:
            where, why = "", f"{why}, but {fields[where]!r} is the {where}"
        if not where:
            lines.append(f"{name}: left out: {why}")
            continue
        lines.append(f"{name}: {where}{_with(entry)}: {why}")
        if where == "timestamp":
            fields |= _unit(column)
        if where in ("weight", "timestamp"):
            fields[where] = entry
        else:
            fields[where].append(entry)
    if not fields["categorical"] and not fields["multivalued"]:
        if not fields["dense"]:
            raise errors.SchemaMismatch(
                "no column can be a feature: " + "; ".join(lines)
            )
        # An amount can be a value, too.
        for dense in fields["dense"]:
            alone = {"column": dense} if isinstance(dense, str) else dense
            name = alone["column"]
            one = {"column": name, "name": f"{name}_bucket", "buckets": 32}
            if "decimal" in alone:
                one["decimal"] = alone["decimal"]
            fields["categorical"].append(one)
            lines.append(f"{name}: also {one['name']}, one of 32 buckets")
    if group is not None:
        fields["group"] = group
    every = list(labels.values())
    if len(every) > 1:
        return Schema(label=every, **fields), lines
    return Schema(label=every[0] if every else None, **fields), lines


def _of_label(name: str, column: pa.Array) -> dict[str, Any]:
    """A column that is a label, as was asked."""
    values = {} if _is_binary(column) else _two_texts(column)
    return {"column": name} | ({"values": values} if values else {})


def _with(entry: Any) -> str:
    """What an entry says besides the column."""
    if isinstance(entry, str):
        return ""
    rest = {k: v for k, v in entry.items() if k != "column"}
    text = ", ".join(f"{k}: {v}" for k, v in rest.items())
    return f" ({text})" if text else ""


def _unit(column: pa.Array) -> dict[str, Any]:
    """The unit of instants that are numbers, by how large they are."""
    if not _is_number(column.type):
        return {}
    x = np.abs(_floats(column.drop_null()))
    middle = float(np.median(x)) if len(x) else 0.0
    for unit, least in (("ns", 1e17), ("us", 1e14), ("ms", 1e11)):
        if middle >= least:
            return {"time_unit": unit}
    return {}


def _floats(known: pa.Array) -> npt.NDArray[np.float64]:
    return np.asarray(known.cast(pa.float64(), safe=False), np.float64)


def _label(columns: dict[str, pa.Array]) -> dict[str, Any] | None:
    named = [n for n in columns if n.lower() in _LABELS]
    named.sort(key=lambda n: _LABELS.index(n.lower()))
    binary = [n for n, c in columns.items() if _is_binary(c)]
    for name in named:
        if name in binary:
            return {"column": name}
    for name in named:
        threshold = _threshold(columns[name])
        if threshold is not None:
            return {"column": name, "threshold": threshold}
        values = _two_texts(columns[name])
        if values:
            return {"column": name, "values": values}
    if len(binary) == 1:
        return {"column": binary[0]}
    rating = [n for n in columns if n.lower() in ("rating", "stars", "score")]
    for name in rating:
        threshold = _threshold(columns[name])
        if threshold is not None:
            return {"column": name, "threshold": threshold}
    return None


def _is_binary(column: pa.Array) -> bool:
    if pa.types.is_boolean(column.type):
        return True
    if not _is_number(column.type) and not _is_text(column.type):
        return False
    known = pc.unique(column.drop_null())
    if not 2 <= len(known) <= 6:  # Yes, YES, yes
        return False
    if _is_number(column.type):
        return {float(v) for v in known.to_pylist()} == {0.0, 1.0}
    return {str(v).strip().lower() for v in known.to_pylist()} in _BINARY


def _two_texts(column: pa.Array) -> dict[str, int]:
    """The number for each of two texts: 1 for the rarer one."""
    if not _is_text(column.type):
        return {}
    counts = pc.value_counts(column.drop_null()).to_pylist()
    if len(counts) != 2:
        return {}
    counts.sort(key=lambda c: (-c["counts"], c["values"]))
    return {str(c["values"]): i for i, c in enumerate(counts)}


def _threshold(column: pa.Array) -> float | None:
    """What divides the numbers of a label in two."""
    if not _is_number(column.type):
        return None
    x = _floats(column.drop_null())
    if not len(x) or x.min() == x.max():
        return None
    middle = float(np.median(x))
    return middle if middle > x.min() else float(x[x > middle].min())


def _is_number(kind: pa.DataType) -> bool:
    t = pa.types
    return bool(
        t.is_integer(kind) or t.is_floating(kind) or t.is_decimal(kind)
    )


def _is_text(kind: pa.DataType) -> bool:
    t = pa.types
    return bool(
        t.is_string(kind) or t.is_large_string(kind) or t.is_dictionary(kind)
    )


def _role(name: str, column: pa.Array, text: bool) -> tuple[str, Any, str]:
    """(field of the schema, entry, why) of a column; "" leaves it out."""
    kind, t, lower = column.type, pa.types, name.lower()
    known = column.drop_null()
    if not len(known):
        return "", None, "it has no value"
    if _is_index(lower):
        return "", None, "it is the index of a DataFrame, or has no name"
    if t.is_map(kind):
        return "", None, f"values of the type {kind} have no id"
    if hasattr(column, "value_lengths"):
        inner = kind.value_type
        if (
            hasattr(inner, "value_type") and not t.is_dictionary(inner)
        ) or t.is_nested(inner):
            return "", None, f"values of the type {kind} have no id"
        return "multivalued", name, "it has lists"
    if t.is_timestamp(kind) or t.is_date(kind):
        return "timestamp", name, f"it has the type {kind}"
    if t.is_nested(kind) or t.is_temporal(kind) or t.is_union(kind):
        return (
            "",
            None,
            f"values of the type {kind} have no role",
        )
    if _is_plain_text(kind):
        found = _numbers_in(known)
        if found is not None:
            return _role_of_texts(name, known, found)
        if _are_times(known):
            return "timestamp", name, "its texts are times"
    if lower in _WEIGHTS and _is_number(kind):
        return "weight", name, "by its name"
    if lower in _TIMES and _is_number(kind):
        return "timestamp", name, "by its name"
    if t.is_dictionary(kind):
        return "categorical", name, "it has categories"
    distinct = len(pc.unique(known))
    if distinct == 1 and len(known) == len(column) > 1:
        return "", None, "it has one value in all rows"
    if _is_number(kind):
        return _role_of_numbers(name, column, known, distinct, text)
    if _is_text(kind):
        separator = _separator(known)
        if separator:
            entry = {"column": name, "separator": separator}
            return "multivalued", entry, "its texts are lists"
        if distinct == len(column) > 100:
            return "", None, "its texts differ in each row"
    declared = text and t.is_boolean(kind)
    one: Any = {"column": name, "type": "boolean"} if declared else name
    return "categorical", one, f"{distinct} values of the type {kind}"


def _role_of_numbers(
    name: str, column: pa.Array, known: pa.Array, distinct: int, text: bool
) -> tuple[str, Any, str]:
    x = _floats(known)
    if not _whole(x):
        return *_dense(name, x), "its numbers have fractions"
    large = float(np.abs(x).max()) >= 2.0**53
    if not (large or _ID.search(name) or distinct <= _FEW):
        return *_dense(name, x), f"{distinct} different whole numbers"
    if name.lower() == "id" and distinct == len(column) > 1:
        return "", None, "it is the number of the row"
    why = (
        "numbers beyond 2**53 are ids"
        if large
        else "by its name"
        if _ID.search(name)
        else f"{distinct} different whole numbers"
    )
    # As texts they may be 7.0 or NA, whose ids are those of 7 and of none.
    odd = pa.types.is_floating(column.type) or column.null_count
    entry = {"column": name, "type": "number"} if text and odd else name
    return "categorical", entry, why


def _role_of_texts(
    name: str, known: pa.Array, found: tuple[str, npt.NDArray[np.float64]]
) -> tuple[str, Any, str]:
    """Of texts all of which are numbers, or say that one is missing."""
    decimal, x = found
    distinct = len(np.unique(x))
    if _whole(x) and (_ID.search(name) or distinct <= _FEW):
        return "categorical", name, f"texts of {distinct} whole numbers"
    where, entry = _dense(name, x)
    if decimal != "." and where:
        alone: Any = {"column": name} if isinstance(entry, str) else entry
        entry = alone | {"decimal": decimal}
    why = "texts of numbers"
    return where, entry, why + (" with decimal commas" * (decimal == ","))


def _numbers_in(
    known: pa.Array,
) -> tuple[str, npt.NDArray[np.float64]] | None:
    """(the mark of decimals, the numbers) of texts that are numbers; None:
    one of them is none."""
    text = pc.utf8_trim_whitespace(known)
    missing = pc.is_in(text, pa.array(Schema.missing_texts(), text.type))
    text = text.filter(pc.invert(missing))
    if not len(text):
        return None
    for decimal, pattern in (".", _POINT), (",", _COMMA):
        if pc.all(pc.match_substring_regex(text, pattern)).as_py():
            if decimal == ",":
                text = pc.replace_substring(text, ".", "")
                text = pc.replace_substring(text, ",", ".")
            try:
                return decimal, _floats(text)
            except pa.ArrowInvalid:
                return None
    return None


def _are_times(known: pa.Array) -> bool:
    """Whether texts are times, as the reader of a timestamp reads them."""
    text = pc.utf8_trim_whitespace(known).cast(pa.string())
    first, rest = text.slice(0, 100), text.slice(100)
    return not any(
        bool(times_of_texts(part)[1].any()) for part in (first, rest)
    )


def _is_plain_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _is_index(name: str) -> bool:
    """Whether a column is the index of a DataFrame: pandas gives it no name
    in CSV files."""
    return not name.strip() or name.startswith(("__index_level_", "unnamed: "))


def _whole(x: npt.NDArray[np.float64]) -> bool:
    """Whether floats are integers, as pandas has them beside a null."""
    return bool((np.floor(x) == x).all())


def _dense(name: str, x: npt.NDArray[np.float64]) -> tuple[str, Any]:
    x = x[np.isfinite(x)]
    if not len(x):
        return "", None
    if x.min() >= 0 and x.max() > 100:
        return "dense", {"column": name, "log": True}
    return "dense", name


def _separator(known: pa.Array) -> str:
    """What divides texts into values that occur elsewhere, too."""
    for separator in _SEPARATORS:
        held = pc.match_substring(known, separator)
        share = (held.true_count or 0) / len(known)
        if share < 0.2:
            continue
        parts = pc.list_flatten(pc.split_pattern(known, separator))
        distinct = set(pc.unique(parts).to_pylist()) - {""}
        if len(distinct) <= len(pc.unique(known)):
            return separator
    return ""
