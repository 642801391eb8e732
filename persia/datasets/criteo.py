"""The Criteo click logs: the Kaggle display advertising set and the 1TB one.

A line holds a label, 13 integers and 26 categories, separated by tabs. A
missing integer is 0, a missing category is the empty value.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import closing
from functools import partial
from typing import Literal

import numpy as np

from persia import _core, errors
from persia.base.check import kind
from persia.data.base import check_salt, read_ahead
from persia.data.batches.rows import Rows
from persia.data.formats.files import Files
from persia.data.formats.lines import LinePlan, count_lines, read_lines
from persia.data.formats.paths import File, Paths
from persia.data.schema.schema import Schema
from persia.data.source import Block, Place
from persia.data.table import held_out

INTEGERS, CATEGORIES = 13, 26
CRITEO_COLUMNS = 1 + INTEGERS + CATEGORIES


class Criteo(Files):
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
        samples: (first, end) of the lines to read, counted over all files in
            their order, malformed ones included; end may be None.
        strict: raise MalformedData at a malformed line, instead of
            counting it in ``malformed`` and logging its file and number.
        drop_last: leave out a last batch that is smaller.
        shuffle: False, or a number of samples: so many are read at a time, and
            given out in an order decided by ``seed`` and ``epoch``.
        log_dense: give log(1 + max(x, 0)) for each integer x; False gives x.
        hash_salts: hash_salt of columns (as ``{"C3": 1}``) that share a
            table with others but not their vocabulary.
        seed: of the shuffle.
        rank, world_size: take every world_size-th block of batch_size lines.

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
        batch_size: int = 1024,
        layout: Literal["auto", "kaggle", "1tb"] = "auto",
        *,
        samples: tuple[int, int | None] = (0, None),
        strict: bool = False,
        drop_last: bool = False,
        shuffle: bool | int = False,
        log_dense: bool = True,
        hash_salts: Mapping[str, int] | None = None,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if layout not in ("auto", "kaggle", "1tb"):
            raise errors.InvalidArgument(
                f"layout is {layout!r}, need 'auto', 'kaggle' or '1tb'"
            )
        super().__init__(
            paths,
            _schema(log_dense, hash_salts or {}),
            batch_size,
            format="csv",
            samples=samples,
            strict=strict,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            encoding=None,
            rank=rank,
            world_size=world_size,
        )
        if layout == "auto":
            layout = "kaggle" if len(self.files) == 1 else "1tb"
        self.layout = layout
        self.log_dense = log_dense

    def _count(self, file: File) -> int:
        return count_lines(file)

    def split(self, test: float | None = None) -> tuple[Files, Files]:
        """Training and test set, divided in the order of the lines.

        Args:
            test: the last lines that are for the test: below 1 their share,
                else their number. None: the last seventh (a day) of the
                Kaggle layout, the last file of the 1TB layout.

        Counts the lines first (see ``count_lines()``).
        """
        lines = self.count_lines()
        first = self.samples[0]
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

    def _blocks(
        self, shard: int, shards: int, place: Place
    ) -> Generator[Block, None, None]:
        before, labelled = place.before, None
        start = before + place.row
        mark = place.mark
        plan = LinePlan(
            self.samples,
            self.batch_size,
            shard,
            shards,
            before + mark[0],
            start,
        )
        block: _Room | None = None
        begin = end = place
        self._read_bytes = 0
        for unit in range(place.unit, len(self._files)):
            file = self._files[unit]
            reader: _core.CriteoReader | None = None
            read = partial(read_lines, file, mark[1])
            with closing(read_ahead(read)) as pieces:
                for piece, ends in pieces:
                    if reader is None:
                        labelled = self._has_label(file.name, piece, labelled)
                        reader = _core.CriteoReader(labelled, self._salts)
                        reader.pass_lines(mark[0])
                    for text in plan.cut(piece, reader.pass_lines):
                        while text:
                            if block is None:
                                begin = Place(
                                    unit, before, reader.lines, *mark
                                )
                                block = _Room(self._room, bool(labelled))
                            faults, lines = reader.faults, reader.lines
                            text = text[block.read(reader, text) :]
                            if reader.faults > faults:
                                columns = CRITEO_COLUMNS - (not labelled)
                                self._report(
                                    file.name, reader, faults, columns
                                )
                            self._faults.passed(reader.lines - lines)
                            end = Place(unit, before, reader.lines, *mark)
                            if block.n == block.room:
                                yield self._rows(block), begin, end
                                block = None
                    if plan.done:
                        break
                    mark = reader.lines, ends
            before += reader.lines if reader else 0
            mark = 0, 0
            if plan.done:
                break
        if block is not None and block.n:
            yield self._rows(block), begin, end
        self._faults.check()

    def _rows(self, block: _Room) -> Rows:
        n = block.n
        dense = block.integers[:n]
        if self.log_dense:
            dense = np.log(np.maximum(dense, 0) + 1)
        tensors = {"dense": dense}
        if block.label is not None:
            tensors["label"] = block.label[:n]
        return Rows(block.ids[:, :n], [], tensors)

    @property
    def _salts(self) -> tuple[int, ...]:
        return tuple(c.hash_salt for c in self.schema.categorical)

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
            text = _fault_text(fault, column, columns)
            self._faults.add(f"{path}:{line}", text, f"{fault} {column}")
        # The reader keeps only the first ones of a call.
        self._faults.count += reader.faults - before - len(known)


class _Room:
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


def _schema(log_dense: bool, salts: Mapping[str, int]) -> Schema:
    """The columns of Criteo's files."""
    dense = [f"I{i + 1}" for i in range(INTEGERS)]
    keys = [f"C{i + 1}" for i in range(CATEGORIES)]
    need = "a dict from columns to salts"
    if unknown := set(kind("hash_salts", salts, Mapping, need)) - set(keys):
        raise errors.InvalidArgument(
            f"hash_salts names {sorted(unknown)}; the columns are C1 to"
            f" C{CATEGORIES}"
        )
    return Schema.model_validate(
        {
            "delimiter": "\t",
            "quote": None,
            "header": False,
            "columns": ["label", *dense, *keys],
            "label": "label",
            "dense": [{"column": n, "log": log_dense} for n in dense],
            "categorical": [
                {
                    "column": key,
                    "hash_salt": check_salt(key, salts.get(key, 0)),
                }
                for key in keys
            ],
        }
    )


def is_criteo(file: File) -> bool:
    """Whether the first line of a file has Criteo's columns."""
    if file.size is None:  # a pipe is read once
        return True
    with file.stream() as stream:
        line = stream.read(1 << 16).partition(b"\n")[0]
    fields = line.split(b"\t")
    if len(fields) == CRITEO_COLUMNS:
        return fields[0] in (b"0", b"1")
    return len(fields) == CRITEO_COLUMNS - 1 and all(
        not f or f.lstrip(b"-").isdigit() for f in fields[:INTEGERS]
    )
