"""The Criteo click logs: the Kaggle display advertising set and the 1TB one.

A line holds a label, 13 integers and 26 categories, separated by tabs. A
missing integer is 0, a missing category is the empty value.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import closing
from functools import partial
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from persia import _core, errors
from persia._check import kind, whole
from persia.data.base import Dataset, check_salt, read_ahead
from persia.datasets.files import (
    Faults,
    LinePlan,
    Paths,
    check_rows,
    find_files,
    held_out,
    read_lines,
)
from persia.jagged import Batch, JaggedBatch

__all__ = ["Criteo"]

INTEGERS, CATEGORIES = 13, 26
CRITEO_COLUMNS = 1 + INTEGERS + CATEGORIES


class Criteo(Dataset):
    """Criteo's TSV files, plain or compressed (.gz, .zst, .bz2, .lz4).

    A batch has ``dense`` [B, 13], the ids of 26 features ``C1`` ... ``C26``
    (:func:`persia.datasets.value_hash` of the column's text), and ``label``
    [B] (None for files without labels, such as Kaggle's test.txt).

    Args:
        paths: a path, a glob, or a list of them.
        batch_size: samples of a batch.
        layout: "kaggle" (one training file of 7 days in order; test.txt
            has no labels), "1tb" (a file a day, always with labels) or
            "auto": the first for one file, the second for several. It
            decides what :meth:`split` takes by default.
        rows: (first, end) of the lines to read, counted over all files in
            their order, malformed ones included; end may be None.
        strict: raise MalformedData at a malformed line, instead of
            counting it in ``malformed`` and logging its file and number.
        drop_last: leave out a last batch that is smaller.
        shuffle: 0, or a number of rows: so many are read at a time, and
            given out in an order decided by ``seed`` and ``epoch``.
        log_dense: give log(1 + max(x, 0)) for each integer x; False gives x.
        hash_salts: hash_salt of columns (as ``{"C3": 1}``) that share a
            table with others but not their vocabulary.
        seed: of the shuffle.
        shard: (rank, world): take every world-th block of batch_size lines.

    Attributes:
        malformed: malformed lines seen so far in this process.
        malformed_lines: what was wrong with the first 100 of them.

    Raises:
        StorageError: a file is missing or cannot be opened.
        CorruptFile: a compressed file is damaged or cut off.
        SchemaMismatch: a file's first line has not 40 (or 39) columns.
    """

    def __init__(
        self,
        paths: Paths,
        batch_size: int = 4096,
        layout: Literal["auto", "kaggle", "1tb"] = "auto",
        *,
        rows: tuple[int, int | None] = (0, None),
        strict: bool = False,
        drop_last: bool = False,
        shuffle: int = 0,
        log_dense: bool = True,
        hash_salts: Mapping[str, int] | None = None,
        seed: int = 1,
        shard: tuple[int, int] = (0, 1),
    ) -> None:
        super().__init__(
            batch_size, seed=seed, drop_last=drop_last, shard=shard
        )
        if layout not in ("auto", "kaggle", "1tb"):
            raise errors.InvalidArgument(
                f"layout is {layout!r}, need 'auto', 'kaggle' or '1tb'"
            )
        self.files = find_files(paths)
        if layout == "auto":
            layout = "kaggle" if len(self.files) == 1 else "1tb"
        self.layout = layout
        self.rows = check_rows(rows)
        self.shuffle = whole("shuffle", shuffle, 0, 2**63 - 1)
        self.log_dense = log_dense
        self.keys = [f"C{i + 1}" for i in range(CATEGORIES)]
        self.dense_names = [f"I{i + 1}" for i in range(INTEGERS)]
        need = "a dict from columns to salts"
        salts = dict(kind("hash_salts", hash_salts or {}, Mapping, need))
        if unknown := salts.keys() - set(self.keys):
            raise errors.InvalidArgument(
                f"hash_salts names {sorted(unknown)}; the columns are C1 to"
                f" C{CATEGORIES}"
            )
        self._salts = tuple(
            check_salt(key, salts.get(key, 0)) for key in self.keys
        )
        self._faults = Faults(strict)
        self._lines: list[int] | None = None  # of each file, once counted

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

        The first call reads (and decompresses) all files without parsing.
        """
        if self._lines is None:
            self._lines = [_count_lines(path) for path in self.files]
        first, end = self.rows
        total = sum(self._lines)
        return max(0, min(total, total if end is None else end) - first)

    def split(self, test: float | None = None) -> tuple[Criteo, Criteo]:
        """Training and test set, divided in the order of the lines.

        Args:
            test: the last lines that are for the test: below 1 their share,
                else their number. None: the last seventh (a day) of the
                Kaggle layout, the last file of the 1TB layout.

        Counts the lines first (see :meth:`count_lines`).
        """
        lines = self.count_lines()
        first = self.rows[0]
        if test is None and self.layout == "1tb" and len(self.files) > 1:
            assert self._lines is not None
            at = max(0, min(lines, sum(self._lines[:-1]) - first))
        else:
            wanted = 1 / 7 if test is None else test
            at = max(0, lines - held_out(wanted, lines))
        return (
            self._range(first, first + at),
            self._range(first + at, first + lines),
        )

    def _range(self, first: int, end: int) -> Criteo:
        part = copy.copy(self)
        part._forget()
        part.rows = (first, end)
        part._faults = Faults(self._faults.strict)
        return part

    def _batches(self, shard: int, shards: int) -> Iterator[Batch]:
        plan = LinePlan(self.rows, self.batch_size, shard, shards)
        room = self.batch_size
        if self.shuffle:
            room *= -(-self.shuffle // self.batch_size)  # rounded up
        block: _Rows | None = None
        number, labelled = 0, None
        for path in self.files:
            reader: _core.CriteoReader | None = None
            with closing(read_ahead(partial(read_lines, path))) as pieces:
                for piece in pieces:
                    if reader is None:
                        labelled = self._has_label(path, piece, labelled)
                        reader = _core.CriteoReader(labelled, self._salts)
                    for text in plan.cut(piece, reader.pass_lines):
                        while text:
                            if block is None:
                                block = _Rows(room, bool(labelled))
                            before = reader.faults
                            text = text[block.read(reader, text) :]
                            if reader.faults > before:
                                columns = CRITEO_COLUMNS - (not labelled)
                                self._report(path, reader, before, columns)
                            if block.n == room:
                                yield from self._give_out(block, number)
                                block, number = None, number + 1
                    if plan.done:
                        break
            if plan.done:
                break
        if block is not None:
            yield from self._give_out(block, number)

    def _has_label(self, path: str, piece: bytes, before: bool | None) -> bool:
        """Whether the lines of a file, of which piece is the first, have
        labels; ``before`` says it of the files before."""
        counts = [line.count(b"\t") + 1 for line in piece.split(b"\n", 16)]
        allowed = (
            (CRITEO_COLUMNS,)
            if self.layout == "1tb"
            else (CRITEO_COLUMNS, CRITEO_COLUMNS - 1)
        )
        columns = next((c for c in counts if c in allowed), None)
        if columns is None:
            raise errors.SchemaMismatch(
                f"{path!r} is no Criteo file: its first line has {counts[0]}"
                f" columns, need {' or '.join(map(str, allowed))} (a label, 13"
                " integers, 26 categories, separated by tabs); other files"
                " need a schema"
            )
        labelled = columns == CRITEO_COLUMNS
        if before is not None and labelled != before:
            raise errors.SchemaMismatch(
                f"{path!r} has {'' if labelled else 'no '}labels, unlike the"
                " files before it; read files with and without labels apart"
            )
        return labelled

    def _report(
        self, path: str, reader: _core.CriteoReader, before: int, columns: int
    ) -> None:
        """Takes over the malformed lines that the reader met just now; they
        should have had so many columns."""
        known = reader.take_faults()
        for line, fault, column in known:
            self._faults.add(path, line, _fault_text(fault, column, columns))
        # The reader keeps only the first ones of a call.
        self._faults.count += reader.faults - before - len(known)

    def _give_out(self, block: _Rows, number: int) -> Iterator[Batch]:
        order: npt.NDArray[np.int64] | None = None
        if self.shuffle:
            rng = np.random.default_rng((self.seed, self.epoch, number))
            order = rng.permutation(block.n)
        for first in range(0, block.n, self.batch_size):
            end = min(first + self.batch_size, block.n)
            if end - first < self.batch_size and self.drop_last:
                return
            part = slice(first, end) if order is None else order[first:end]
            yield self._batch(block, part)

    def _batch(
        self, block: _Rows, part: slice | npt.NDArray[np.int64]
    ) -> Batch:
        dense, ids = block.integers[part], block.ids[:, part]
        if self.log_dense:
            dense = np.log(np.maximum(dense, 0) + 1)
        label = None if block.label is None else block.label[part]
        return Batch(
            torch.from_numpy(dense),
            JaggedBatch(self.keys, torch.from_numpy(ids.reshape(-1))),
            None if label is None else torch.from_numpy(label),
        )


class _Rows:
    """Room for rows, and how many there are."""

    def __init__(self, room: int, labelled: bool) -> None:
        self.n = 0
        self.room = room
        self.label = np.empty(room, np.float32) if labelled else None
        self.integers = np.empty((room, INTEGERS), np.float32)
        self.ids = np.empty((CATEGORIES, room), np.int64)

    def read(self, reader: _core.CriteoReader, text: memoryview) -> int:
        """Reads lines until text or room end; returns the bytes used."""
        used, self.n = reader.read(
            text, True, self.n, self.room, self.label, self.integers, self.ids
        )
        return used


def _fault_text(kind: int, column: int, columns: int) -> str:
    """What a fault of csrc/data/data.h says, as (kind, column), in a file of
    so many columns."""
    if kind == 0:
        return f"{column} columns, need {columns}"
    if kind == 1:
        return "column 1: the label is neither 0 nor 1"
    return f"column {column}: not an integer of up to 18 digits"


def _count_lines(path: str) -> int:
    total = 0
    for chunk in read_lines(path):
        total += _core.lines_skip(chunk, True, 1 << 62)[1]
    return total
