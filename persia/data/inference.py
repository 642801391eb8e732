"""A schema from what the columns look like."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from persia import errors
from persia.data.columns import column_of
from persia.data.schema import Schema

__all__ = ["infer"]

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


def infer(data: Any) -> Schema:
    """A schema for a table, from its first 100,000 rows.

    Texts and booleans are categorical, floats are dense, lists are
    multi-valued. Integers are categorical if their name says so (``user_id``)
    or if they have few values, else dense. The label is the column of a usual
    name (``label``, ``click``, ``y``, ...) or the only column of two values.
    Columns without a second value or without a name, and texts that differ in
    each row, are left out.

    Args:
        data: what :class:`persia.data.Table` takes.

    Raises:
        SchemaMismatch: no column can be a feature.
    """
    from persia.data.table import as_table

    table = as_table(data).slice(0, 100_000)
    fields: dict[str, Any] = {
        "dense": [],
        "categorical": [],
        "multivalued": [],
    }
    columns = {n: column_of(table, n) for n in table.column_names}
    label = _label(columns)
    for name, column in columns.items():
        if label is not None and name == label["column"]:
            continue
        where, entry = _role(name, column)
        if where in ("weight", "timestamp"):
            if where not in fields:
                fields[where] = entry
        elif where:
            fields[where].append(entry)
    if not fields["categorical"] and not fields["multivalued"]:
        if fields["dense"]:  # an amount can be a value, too
            fields["categorical"] = [
                {"column": d["column"], "name": f"{d['column']}_bucket"}
                | {"buckets": 32}
                if isinstance(d, dict)
                else {"column": d, "name": f"{d}_bucket", "buckets": 32}
                for d in fields["dense"]
            ]
        else:
            raise errors.SchemaMismatch(
                f"no column can be a feature; there are {list(columns)}"
            )
    return Schema(label=label, **fields)


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
    x = column.drop_null().to_numpy(zero_copy_only=False).astype(np.float64)
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


def _role(name: str, column: pa.Array) -> tuple[str, Any]:
    """(field of the schema, entry) of a column; "" leaves it out."""
    kind, t, lower = column.type, pa.types, name.lower()
    known = column.drop_null()
    if not len(known) or _is_index(lower) or t.is_map(kind):
        return "", None
    if hasattr(column, "value_lengths"):
        inner = kind.value_type
        if hasattr(inner, "value_type") and not t.is_dictionary(inner):
            return "", None
        return "multivalued", name
    if t.is_timestamp(kind) or t.is_date(kind):
        return "timestamp", name
    if t.is_nested(kind) or t.is_temporal(kind):
        return "", None
    if lower in _WEIGHTS and _is_number(kind):
        return "weight", name
    if lower in _TIMES and _is_number(kind):
        return "timestamp", name
    if t.is_dictionary(kind):
        return "categorical", name
    distinct = len(pc.unique(known))
    if distinct == 1 and len(known) == len(column) > 1:
        return "", None
    if (t.is_floating(kind) and not _whole(known)) or t.is_decimal(kind):
        return _dense(name, known)
    if _is_number(kind):
        if _ID.search(name) or distinct <= _FEW:
            if lower == "id" and distinct == len(column) > 1:
                return "", None
            return "categorical", name
        return _dense(name, known)
    if _is_text(kind):
        separator = _separator(known)
        if separator:
            entry = {"column": name, "separator": separator}
            return "multivalued", entry
        if distinct == len(column) > 100:
            return "", None
    return "categorical", name


def _is_index(name: str) -> bool:
    """Whether a column is the index of a DataFrame: pandas gives it no name
    in CSV files."""
    return not name.strip() or name.startswith(("__index_level_", "unnamed: "))


def _whole(known: pa.Array) -> bool:
    """Whether floats are integers, as pandas has them beside a null."""
    x = known.to_numpy(zero_copy_only=False).astype(np.float64)
    return bool((np.floor(x) == x).all())


def _dense(name: str, known: pa.Array) -> tuple[str, Any]:
    x = known.to_numpy(zero_copy_only=False).astype(np.float64)
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
