"""Rows of a store in files and back: what that takes, and how it is done
where the only shard is in this process.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from persia import _checkpoint_files as files
from persia import _core
from persia._checkpoint_manifest import Manifest, Part, Rows, Table

CHUNK = 256 << 20  # bytes of a row file at most


class StoreRows(Protocol):
    """The rows of a store, wherever its shards are. Calls that may take long
    look at `stop` now and then.
    """

    def lineage(self) -> str:
        """Names the training that they come from: 16 hexadecimal digits."""

    def write(
        self,
        folder: Path,
        between: Callable[[], None],
        stop: threading.Event,
    ) -> tuple[list[dict[str, Any]], list[Part]]:
        """Writes all rows of this moment into files of the folder.

        `between` is called when the moment is taken and rows may change
        again, before it takes time.

        Returns:
            Name and options of all tables, and what each shard wrote.
        """

    def stage(
        self,
        folder: Path,
        manifest: Manifest,
        tables: Mapping[int, Table],
        stop: threading.Event,
    ) -> Staged:
        """Reads the rows of a checkpoint, beside those that are there.

        Args:
            folder: where the row files are.
            manifest: of the checkpoint.
            tables: those of its tables that are wanted, by the store's
                number.
        """


class Staged(Protocol):
    """Rows of a checkpoint that are not in use yet."""

    def commit(self) -> None:
        """They take the place of those in use, with clocks and counters:
        all, or none and an error.
        """

    def abort(self) -> None:
        """They are forgotten; it does not fail."""


class LocalRows:
    """The rows of a store without servers. Implements :class:`StoreRows`."""

    def __init__(self, core: _core.Store, lineage: str) -> None:
        self._core = core
        self._lineage = lineage

    def lineage(self) -> str:
        return self._lineage

    def write(
        self,
        folder: Path,
        between: Callable[[], None],
        stop: threading.Event,
    ) -> tuple[list[dict[str, Any]], list[Part]]:
        cut = _core.Cut(self._core.handle)
        try:
            between()
            tables = _core.ckpt_tables(self._core.handle)[: cut.tables]
            with files.opened(folder) as descriptor:
                part = _write(cut, tables, descriptor)
        finally:
            cut.close()
        return tables, [part]

    def stage(
        self,
        folder: Path,
        manifest: Manifest,
        tables: Mapping[int, Table],
        stop: threading.Event,
    ) -> Staged:
        handle = self._core.handle
        lists = {
            number: [
                (f.name, f.rows, f.bytes, int(f.crc32c, 16))
                for f in table.files
            ]
            for number, table in tables.items()
        }
        with files.opened(folder) as at:
            for number, rows in lists.items():
                _core.ckpt_verify(handle, number, at, rows)
            staged = [
                _core.Staged(handle, number, at, rows, max(table.pushes))
                for (number, table), rows in zip(
                    tables.items(), lists.values()
                )
            ]
        return _LocalStaged(self._core, staged, manifest)


class _LocalStaged:
    """Implements :class:`Staged`."""

    def __init__(
        self,
        core: _core.Store,
        tables: list[_core.Staged],
        manifest: Manifest,
    ) -> None:
        self._core = core
        self._tables = tables
        self._manifest = manifest

    def commit(self) -> None:
        exchanged = []
        try:
            for table in self._tables:
                table.exchange()
                exchanged.append(table)
            self._core.set_updates(self._manifest.updates)
            self._core.set_t(self._manifest.t)
        except BaseException:
            for table in exchanged:
                table.exchange()
            raise

    def abort(self) -> None:
        self._tables = []


def _write(
    cut: _core.Cut, tables: list[dict[str, Any]], descriptor: int
) -> Part:
    pushes, rows = [], []
    for number, table in enumerate(tables):
        word = re.sub("[^A-Za-z0-9_-]", "_", table["name"])[:80]
        _, clock = cut.table(number)
        pushes.append(clock)
        written = cut.write(number, descriptor, f"{number:04d}-{word}", CHUNK)
        rows += [Rows(number, *file) for file in written]
    return Part(cut.updates, 0, cut.t, pushes, [], rows)
