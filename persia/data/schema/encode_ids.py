"""From columns of any type to ids, by a schema."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from persia import _core, errors
from persia.data.batches.rows import Bags, Ints, running
from persia.data.schema.canonical import is_list, is_text, plain, texts
from persia.data.schema.columns import Mask, Report, column_of, need_text, tell
from persia.data.schema.declared import read_declared
from persia.data.schema.hashing import (
    hash_dictionary,
    hash_texts,
    ids_of_codes,
    integers,
)
from persia.data.schema.schema import (
    CarryColumn,
    CategoricalColumn,
    CrossColumn,
    MultivaluedColumn,
    Schema,
)
from persia.data.schema.text_lists import any_bracketed, list_values

# (numbers, where one is missing, where one is wrong, the column) of a column
# of a table.
Numbers = Callable[
    [Any, str, str], tuple[npt.NDArray[np.float64], Mask, Mask, pa.Array]
]
# (values of a table's column, where they are good), of some of its rows.
Carried = Callable[
    [Any, CarryColumn, Mask, Report], tuple[npt.NDArray[Any], Mask]
]


class IdEncoder:
    """Makes the ids of the features of a schema.

    Args:
        schema: with the bounds of buckets known.
        utf8: bytes that are no UTF-8 are malformed.
        numbers: reads a column of numbers, for buckets.
        carried: reads a column that is carried, for those beside ids.
    """

    def __init__(
        self, schema: Schema, utf8: bool, numbers: Numbers, carried: Carried
    ) -> None:
        self._schema = schema
        self._version = schema.hash_version
        self._utf8 = utf8
        self._numbers = numbers
        self._carried = carried
        # Of each column and salt, the latest dictionary and the ids of its
        # values: all pieces of a row group have the same one.
        self._codes: dict[tuple[str, int], tuple[pa.Array, Ints]] = {}

    # ---- features of one id a sample

    def single(
        self,
        table: Any,
        spec: CategoricalColumn | CrossColumn,
        ok: Mask,
        report: Report,
        out: Ints,
    ) -> Mask:
        """Writes the ids of a feature; where they are good."""
        if isinstance(spec, CrossColumn):
            text = self._crossed(table, spec)
            hash_texts(text, spec.hash_salt, out=out)
            return np.ones(len(out), bool)
        name = spec.column
        if spec.buckets is not None:
            column, fine = self._bucket(table, spec)
            need = "is no finite number"
            tell(ok & ~fine, column_of(table, name), name, need, report)
        else:
            column = column_of(table, name, self._version)
            need_text(column, name)
            column, fine = self._readable(column, spec, ok, report)
        if not spec.hash:
            out[:], good = self.given(column, name)
            what = "is no integer of 64 bits (hash: false)"
            tell(ok & fine & ~good, column, name, what, report)
            return fine & good
        if pa.types.is_dictionary(column.type):
            ids_of_codes(column, self._known_codes(column, spec), out)
            return fine
        text, good = self._texts(column, name)
        tell(ok & fine & ~good, column, name, _NO_TEXT, report)
        strip = self._schema.strip
        hash_texts(text, spec.hash_salt, strip=strip, out=out)
        return fine & good

    def _texts(self, column: pa.Array, name: str) -> tuple[pa.Array, Mask]:
        """The texts of values, and which values have one."""
        text = texts(column, f"column {name!r}", self._version)
        good = np.ones(len(text), bool)
        if text.null_count:
            good = text.is_valid().to_numpy(zero_copy_only=False)
            text = pc.fill_null(text, "")
        return text, good

    def _readable(
        self,
        column: pa.Array,
        spec: CategoricalColumn,
        ok: Mask,
        report: Report,
    ) -> tuple[pa.Array, Mask]:
        """A column as the type that was declared, and where it is one."""
        name = spec.column
        fine = self._decoded(column, name, ok, report)
        if spec.type is not None:
            column, good = read_declared(column, spec.type, self._schema, name)
            need = f"is no {spec.type} (type: {spec.type})"
            tell(ok & fine & ~good, column, name, need, report)
            fine &= good
        elif pa.types.is_dictionary(column.type) and (
            not spec.hash or pa.types.is_temporal(column.type.value_type)
        ):
            column = column.dictionary_decode()
        return column, fine

    def _known_codes(self, column: Any, spec: CategoricalColumn) -> Ints:
        """The ids of a column's dictionary."""
        values = column.dictionary
        key = spec.column, spec.hash_salt
        before, ids = self._codes.get(key, (None, None))
        if ids is None or not _is_same(before, values):
            ids = hash_dictionary(
                values,
                spec.hash_salt,
                strip=self._schema.strip,
                version=self._version,
            )
            self._codes[key] = values, ids
        return ids

    def _decoded(
        self, column: pa.Array, name: str, ok: Mask, report: Report
    ) -> Mask:
        """Where bytes of text files are UTF-8."""
        fine = np.ones(len(column), bool)
        if not self._utf8:
            return fine
        try:
            column.cast(pa.string())
            return fine
        except pa.ArrowInvalid:
            pass
        for i, value in enumerate(column.to_pylist()):
            try:
                value.decode()
            except UnicodeDecodeError:
                fine[i] = False
        need = (
            "is no UTF-8; give the file's encoding (encoding='cp1252' of "
            "Windows, or 'latin-1')"
        )
        tell(ok & ~fine, column, name, need, report)
        return fine

    def given(self, column: pa.Array, name: str) -> tuple[Ints, Mask]:
        """Ids that the column holds: no hash."""
        return integers(
            column,
            f"column {name!r}",
            strip=self._schema.strip,
            version=self._version,
        )

    def _crossed(self, table: Any, spec: CrossColumn) -> pa.Array:
        parts = []
        for name in spec.columns:
            column = column_of(table, name, self._version)
            need_text(column, name)
            part = self._texts(column, name)[0].cast(pa.large_binary())
            parts.append(_stripped(part) if self._schema.strip else part)
        between = pa.scalar(b"\x1f", pa.large_binary())
        return pc.binary_join_element_wise(*parts, between)

    def _bucket(
        self, table: Any, spec: CategoricalColumn
    ) -> tuple[pa.Array, Mask]:
        numbers, missing, wrong, _ = self._numbers(
            table, spec.column, spec.decimal
        )
        assert isinstance(spec.buckets, list)
        found = np.searchsorted(spec.buckets, numbers, side="right")
        return pa.array(found, mask=missing), ~wrong

    # ---- features of any number of ids a sample

    def bag(
        self, table: Any, spec: MultivaluedColumn, ok: Mask, report: Report
    ) -> tuple[Bags, Mask]:
        """(the ids of a feature, where they are good)."""
        name = spec.column
        column = column_of(table, name, self._version)
        t = pa.types
        fine = np.ones(len(column), bool)
        if spec.aligned:
            bags, fine = self._with_aligned(table, spec, ok, report)
        elif t.is_null(column.type):
            bags = Bags(np.empty(0, np.int64), running(np.zeros_like(fine)))
        elif t.is_dictionary(column.type) and is_list(column.type.value_type):
            return self._of_known_lists(column, spec, ok, report)
        elif is_list(column.type):
            bags, good = self._of_lists(column, spec)
            tell(ok & ~good, column, name, _need(spec), report)
            fine &= good
        else:
            if t.is_dictionary(column.type):
                column = column.dictionary_decode()
            fine = self._decoded(column, name, ok, report)
            bags, good = self._split(column, spec)
            tell(ok & fine & ~good, column, name, _need(spec), report)
            fine &= good
        most = spec.max_length
        if most is not None:
            lengths = np.minimum(bags.lengths, most)
            if lengths.sum() < bags.offsets[-1]:
                starts = bags.offsets[:-1]
                if spec in self._schema.sequences:
                    starts = bags.offsets[1:] - lengths
                bags = bags.gather(starts, lengths)
        return bags, fine

    def _of_known_lists(
        self,
        column: pa.Array,
        spec: MultivaluedColumn,
        ok: Mask,
        report: Report,
    ) -> tuple[Bags, Mask]:
        """The bags of a dictionary's lists, each of which is read once."""
        codes = column.indices.cast(pa.int64())
        at = pc.fill_null(codes, len(column.dictionary)).to_numpy()
        none = pa.nulls(1, column.type.value_type)
        lists = pa.concat_arrays([column.dictionary, none])
        wrong: dict[int, tuple[str, str]] = {}
        bags, good = self.bag(
            pa.table({spec.column: lists}),
            spec,
            np.ones(len(lists), bool),
            lambda row, text, kind: wrong.update({row: (text, kind)}),
        )
        fine = good[at]
        for row in np.flatnonzero(ok & ~fine):
            report(int(row), *wrong[int(at[row])])
        return bags.gather(bags.offsets[:-1][at], bags.lengths[at]), fine

    def _with_aligned(
        self, table: Any, spec: MultivaluedColumn, ok: Mask, report: Report
    ) -> tuple[Bags, Mask]:
        """A bag with what lies beside its ids; where all are good."""
        column = column_of(table, spec.column, self._version)
        read = np.ones(len(column), bool)
        if pa.types.is_binary(column.type):
            read = self._decoded(column, spec.column, ok, report)
        lists, fine = self.lists(table, spec.column, spec.separator)
        tell(ok & read & ~fine, column, spec.column, _need(spec), report)
        fine &= read
        lengths = _lengths(lists)
        aligned = {}
        for beside in spec.aligned:
            name = beside.column
            other, good = self.lists(table, name, spec.separator)
            theirs = _lengths(other)
            good &= theirs == lengths
            column = column_of(table, name, self._version)
            need = f"does not have as many values as {spec.column!r}"
            tell(ok & fine & ~good, column, name, need, report)
            fine &= good
            row = np.repeat(np.arange(len(other)), theirs)
            inner = pa.table({name: other.flatten()})
            every = np.ones(len(row), bool)
            values, known = self._carried(inner, beside, every, _unheard)
            good = np.ones(len(other), bool)
            good[row[~known]] = False
            need = f"holds what is no {beside.dtype or 'number'}"
            tell(ok & fine & ~good, column, name, need, report)
            # Where there are more or fewer, anything is beside the ids.
            same = theirs == lengths
            out = np.zeros(int(lengths.sum()), values.dtype)
            out[np.repeat(same, lengths)] = values[np.repeat(same, theirs)]
            aligned[beside.tensor] = out
            fine &= good
        bags, good = self._of_lists(lists, spec, aligned=aligned)
        tell(ok & fine & ~good, column, spec.column, _need(spec), report)
        return bags, fine & good

    def lists(
        self, table: Any, name: str, separator: str | None
    ) -> tuple[pa.Array, Mask]:
        """(a column as lists, which are good): of lists, or of texts."""
        column = column_of(table, name, self._version)
        if pa.types.is_null(column.type):
            column = column.cast(pa.list_(pa.string()))
        if is_list(column.type):
            return _plain_lists(column), np.ones(len(column), bool)
        if pa.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        return self._lists_in(self._texts(column, name)[0], name, separator)

    def _lists_in(
        self, column: pa.Array, name: str, separator: str | None
    ) -> tuple[pa.Array, Mask]:
        """(lists of the values of texts, which are good)."""
        if separator is None:
            raise errors.SchemaMismatch(
                f"column {name!r} has texts ({column.type}), and separator: "
                "null, which is for lists; give a separator"
            )
        known = column.dictionary_encode()
        found: list[list[str] | None] = []
        for value in known.dictionary.to_pylist():
            if isinstance(value, bytes):
                value = value.decode("utf-8", "replace")
            found.append(list_values(value, separator))
        lists = pa.array(found, pa.list_(pa.string())).take(known.indices)
        return lists, lists.is_valid().to_numpy(zero_copy_only=False)

    def _split(
        self, column: pa.Array, spec: CategoricalColumn
    ) -> tuple[Bags, Mask]:
        """Lists as texts: of one rule, see
        :mod:`persia.data.schema.text_lists`."""
        column = self._texts(column, spec.column)[0]
        if spec.separator is None:
            raise errors.SchemaMismatch(
                f"column {spec.column!r} has texts ({column.type}), and "
                "separator: null, which is for lists; give a separator"
            )
        if self._version > 1 and (
            spec.type is not None or any_bracketed(column)
        ):
            return self._of_texts(column, spec)
        if not spec.hash:
            if not pa.types.is_string(column.type):
                column = column.cast(pa.string())
            lists = pc.split_pattern(column, spec.separator)
            return self._of_lists(lists, spec, stripped=self._version > 1)
        _, offsets, data = column.buffers()
        n = len(column)
        ids = np.empty(((data.size if data else 0) + n) // 2 + 1, np.int64)
        lengths = np.empty(n, np.int64)
        wide = pa.types.is_large_binary(column.type)
        wide |= pa.types.is_large_string(column.type)
        used = 0
        if n:
            used = _core.strings_split(
                offsets,
                data,
                column.offset,
                n,
                wide,
                self._schema.strip or self._version > 1,
                spec.separator.encode(),
                spec.hash_salt,
                ids,
                lengths,
            )
        good = np.ones(n, bool)
        return Bags(ids[:used].copy(), running(lengths)), good

    def _of_texts(
        self, column: pa.Array, spec: CategoricalColumn
    ) -> tuple[Bags, Mask]:
        """Texts of which some are lists in brackets."""
        lists, good = self._lists_in(column, spec.column, spec.separator)
        bags, inner = self._of_lists(lists, spec)
        return bags, good & inner

    def _of_lists(
        self,
        column: pa.Array,
        spec: CategoricalColumn,
        stripped: bool = False,
        aligned: Mapping[str, npt.NDArray[Any]] | None = None,
    ) -> tuple[Bags, Mask]:
        """Lists of values; null and empty ones are none, nor what is aligned
        with them."""
        column, beside = _plain_lists(column), aligned or {}
        lengths = _lengths(column)
        inner = plain(column.flatten(), self._version)
        if is_list(inner.type):
            raise errors.DtypeError(
                f"column {spec.column!r} has lists of lists, which have no "
                "ids; need lists of values: flatten the inner ones, or make "
                "a column of each"
            )
        offsets = running(lengths.astype(np.int64))
        row = np.repeat(np.arange(len(column)), np.diff(offsets))
        fine = np.ones(len(column), bool)
        strip = self._schema.strip or stripped
        what = f"column {spec.column!r}"
        if spec.type is not None:
            inner, good = read_declared(
                inner, spec.type, self._schema, spec.column
            )
            fine[row[~good]] = False
        if spec.hash:
            text, good = self._texts(inner, spec.column)
            if strip:
                text = _stripped(text.cast(pa.large_binary()))
            kept = pc.greater(pc.binary_length(text), 0)
            used = kept.to_numpy(zero_copy_only=False)
            ids = hash_texts(text, spec.hash_salt)
        else:
            if pa.types.is_dictionary(inner.type):
                inner = inner.dictionary_decode()
            ids, good = integers(
                inner, what, strip=strip, version=self._version
            )
            used = inner.is_valid().to_numpy(zero_copy_only=False)
            if is_text(inner.type):
                filled = inner
                if strip:
                    filled = _stripped(inner.cast(pa.large_binary()))
                kept = pc.greater(pc.binary_length(filled), 0)
                used &= pc.fill_null(kept, False).to_numpy(
                    zero_copy_only=False
                )
        fine[row[~good & (used if not spec.hash else True)]] = False
        if not used.all():
            lengths = np.bincount(row[used], minlength=len(column))
            ids, offsets = ids[used], running(lengths.astype(np.int64))
            beside = {name: array[used] for name, array in beside.items()}
        return Bags(ids, offsets, beside), fine


def _plain_lists(column: pa.Array) -> pa.Array:
    """Large lists and lists of one length as lists."""
    if pa.types.is_list(column.type):
        return column
    return column.cast(pa.list_(column.type.value_type))


def _lengths(column: pa.Array) -> Ints:
    """How many values each list has; null has none."""
    lengths = pc.fill_null(column.value_lengths(), 0).to_numpy()
    return np.asarray(lengths, np.int64)


def _unheard(row: int, text: str, kind: str) -> None:
    """A report that the caller makes for the whole row."""


def is_same_in_versions(schema: Schema, table: pa.Table) -> bool:
    """Whether the ids of a table are the same in all versions of the hash."""
    bags = {c.column for c in schema.bags}
    for name in {n for f in schema.features for n in f.columns}:
        kind, t = table.schema.field(name).type, pa.types
        if is_list(kind) or t.is_dictionary(kind):
            while is_list(kind) or t.is_dictionary(kind):
                kind = kind.value_type
        elif name in bags:  # lists as texts
            return False
        if not (
            is_text(kind)
            or t.is_integer(kind)
            or t.is_floating(kind)
            or t.is_boolean(kind)
            or t.is_null(kind)
            or t.is_date(kind)
        ):
            return False
    return True


_NO_TEXT = "is a time out of the range that has a text"


def _need(spec: CategoricalColumn) -> str:
    if not spec.hash:
        return "holds what is no 64-bit id (hash: false)"
    if spec.type is not None:
        return f"is no list of {spec.type}s (type: {spec.type})"
    return "is no list: its brackets or quotes do not match"


def _is_same(a: Any, b: Any) -> bool:
    """Whether two arrays are in the same memory."""
    return (
        a.type == b.type
        and (len(a), a.offset) == (len(b), b.offset)
        and [x and x.address for x in a.buffers()]
        == [x and x.address for x in b.buffers()]
    )


def _stripped(column: pa.Array) -> pa.Array:
    """Large binary without spaces and tabs around, UTF-8 or not."""
    text = column.view(pa.large_string())  # ascii_trim looks at bytes
    return pc.ascii_trim(text, " \t").view(pa.large_binary())
