"""Rows kept beside the ``state_dict()`` of a model."""

from __future__ import annotations

import os
import tempfile
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

from persia.base.check import whole
from persia.checkpoint import files, saving
from persia.checkpoint.dense import TableSettings
from persia.errors import InvalidArgument
from persia.store.engine import engine_of
from persia.store.state import updates_of

if TYPE_CHECKING:
    import torch

    from persia.store.store import Store


def keep_rows(
    model: torch.nn.Module,
    path: str | os.PathLike[str] | None = None,
    *,
    keep: int | None = None,
) -> KeptRows:
    """From here on ``state_dict()`` of a model saves its rows, too, and
    ``load_state_dict()`` brings them back.

    So best weights that a library's trainer, an early stopping or a loop of
    your own keeps and loads again are whole: the state names the rows, which
    are a checkpoint in ``path``. Rows that have not changed are not saved
    again. A state of another process finds its rows if this one keeps them
    in the same ``path``. Settings of the store's optimizer, such as ``lr``,
    stay as they are at a load; the state of the rows is loaded with them.

    Args:
        model: a module with tables.
        path: a folder, or its URI, for the checkpoints of rows; None: a
            temporary folder of this process, removed at the end. Several
            ranks need the same path, and call ``state_dict()`` together. On
            servers it lies in their ``--checkpoints``.
        keep: remove all but so many of them, the oldest first; None: keep
            all. A state whose rows were removed raises RowsMissing.

    Returns:
        What keeps them, until its ``close()`` or the end of its ``with``
        block, and as long as the stores of the model live.

    Raises:
        InvalidArgument: the model has no tables, or is of several ranks and
            no path is given.
    """
    from persia.nn.lookups import stores_of

    stores = stores_of(model)
    if not stores:
        raise InvalidArgument(
            f"keep_rows: this {type(model).__name__} has no tables (yet): "
            "call it after persia.convert(), or where the tables are made"
        )
    if keep is not None:
        keep = whole("keep", keep, 1, 2**63 - 1)
    ranks = max(store.world_size for store in stores)
    if path is None and ranks > 1:
        raise InvalidArgument(
            f"keep_rows: each of the {ranks} ranks would have a temporary "
            "folder of its own: give a path, the same on all ranks"
        )
    return KeptRows(stores, path, keep)


class KeptRows:
    """The rows beside the states of a model, see :func:`persia.keep_rows`."""

    def __init__(
        self,
        stores: list[Store],
        path: str | os.PathLike[str] | None,
        keep: int | None,
    ) -> None:
        if path is None:
            folder = tempfile.TemporaryDirectory(prefix="persia-rows-")
            self._end = weakref.finalize(self, folder.cleanup)
            path = folder.name
        several = len(stores) > 1
        self._of = {
            store: _Kept(store, _part(path, f"store-{i}" if several else ""))
            for i, store in enumerate(stores)
        }
        for store, one in self._of.items():
            one.keep = keep
            engine_of(store).keeper = one

    def close(self) -> None:
        """States hold no rows any more; saved ones stay in their folder."""
        for store, one in self._of.items():
            if engine_of(store).keeper is one:
                engine_of(store).keeper = None

    def __enter__(self) -> KeptRows:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _part(path: str | os.PathLike[str], name: str) -> str:
    path = os.fspath(path)
    if not name:
        return path
    return f"{path}/{name}" if "://" in path else str(Path(path) / name)


class _Kept:
    """Those of one store."""

    keep: int | None = None

    def __init__(self, store: Store, path: str) -> None:
        self._store = weakref.ref(store)
        self._path = path
        self._saved: tuple[str, dict[str, int]] | None = None

    def _now(self, store: Store) -> tuple[str, dict[str, int]]:
        return engine_of(store).lineage, updates_of(store)

    def save(self) -> None:
        """Saves the rows, unless they are there as they are now."""
        store = self._store()
        if store is None or self._saved == self._now(store):
            return
        root = files.root_of(self._path)
        step = max(root.steps(), default=0) + 1
        saving.save(store, self._path, step=step, keep=self.keep)
        self._saved = self._now(store)

    def bring_back(self, checkpoint: str) -> bool:
        """Loads the rows of a state; False: they are not here."""
        store = self._store()
        if store is None or not checkpoint:
            return False
        root = files.root_of(self._path)
        for step in sorted(root.steps(), reverse=True):
            if files.find(root, step).manifest.id != checkpoint:
                continue
            settings = TableSettings(store.optimizer)
            now = settings.state_dict()
            saving.load(store, self._path, step=step, random_states=False)
            settings.load_state_dict(now)
            self._saved = self._now(store)
            return True
        return False
