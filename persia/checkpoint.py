"""Checkpoints: a folder per step that is whole or not there.

A root holds ``step-N/`` folders and ``LATEST``, a file with the name of the
newest. A folder holds, per table, row files of at most 256 MiB (safetensors:
``ids``, ``vectors``, ``state``, ``clock``), ``dense.pt`` (the states of
model, optimizers, scheduler, loader and random generators, read with
``weights_only=True``) and ``manifest.json``: what there is, with the size and
CRC-32C of every file.

It is written as ``.tmp-…``, synced and renamed, so that a crash at any moment
leaves the checkpoint before; the next save removes what was left. All rows
are of one moment (a cut), although other threads may push while the files are
written. Loading verifies every byte first, and changes the store, the model
and the rest together or not at all.

:meth:`persia.Store.save` and :meth:`persia.Store.load` are the way in.
"""

from __future__ import annotations

import copy
import dataclasses
import datetime
import io
import os
import random
import re
import secrets
import shutil
import sys
import warnings
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from persia import _checkpoint_files as files
from persia import _core
from persia.errors import (
    CorruptFile,
    InvalidArgument,
    PersiaError,
    SchemaMismatch,
    StorageError,
)

if TYPE_CHECKING:
    from persia.optim import SparseOptimizer
    from persia.store import Store

__all__ = ["Checkpoint", "load", "read_extra", "save"]

_CHUNK = 256 << 20  # bytes of a row file at most
_DENSE = "dense.pt"


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """What :meth:`persia.Store.load` found.

    Attributes:
        path: the folder of the step.
        step: its number.
        rows: rows loaded, per table.
        extra: what was given to ``save(extra=…)``, else None.
        lineage: names the training that the rows come from.
    """

    path: Path
    step: int
    rows: Mapping[str, int]
    extra: Any
    lineage: str


# ---- what has a state ------------------------------------------------------


class _TableSettings:
    """The groups of a store's optimizer, by table: their order may differ."""

    def __init__(self, optimizer: SparseOptimizer) -> None:
        self._groups = optimizer.param_groups

    def state_dict(self) -> dict[str, dict[str, Any]]:
        return {
            group["table"]: {k: v for k, v in group.items() if k != "params"}
            for group in self._groups
        }

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        for group in self._groups:
            group.update(state.get(group["table"], {}))


class _RandomStates:
    """The global generators of torch (CPU, CUDA), Python and numpy."""

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {
            "torch": torch.get_rng_state(),
            "python": random.getstate(),
        }
        if torch.cuda.is_available():
            state["cuda"] = torch.cuda.get_rng_state_all()
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            # ("MT19937", key uint32 [624], pos, has_gauss, cached)
            name, key, *rest = numpy.random.get_state(legacy=True)
            key = torch.from_numpy(key.astype("int64"))
            state["numpy"] = [name, key, *rest]
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        torch.set_rng_state(state["torch"])
        random.setstate(state["python"])
        if len(state.get("cuda", ())) == torch.cuda.device_count() > 0:
            torch.cuda.set_rng_state_all(state["cuda"])
        if "numpy" in state:
            import numpy as np

            name, key, *rest = state["numpy"]
            np.random.set_state((name, key.numpy().astype("uint32"), *rest))


def _unwrap(model: Any) -> Any:
    """The module inside DistributedDataParallel and torch.compile."""
    while True:
        if isinstance(model, torch.nn.parallel.DistributedDataParallel):
            model = model.module
        elif hasattr(model, "_orig_mod"):
            model = model._orig_mod
        else:
            return model


def _parts(store: Store, given: Mapping[str, Any]) -> dict[str, Any]:
    """The objects with a state_dict() that go into dense.pt, by name."""
    parts: dict[str, Any] = {}
    for name, value in given.items():
        if isinstance(value, list | tuple):
            parts |= {f"{name} {i}": one for i, one in enumerate(value)}
        elif value is not None:
            parts[name] = _unwrap(value)
    for name, value in parts.items():
        if not hasattr(value, "state_dict") or not hasattr(
            value, "load_state_dict"
        ):
            raise InvalidArgument(
                f"{name}= is a {type(value).__name__} without state_dict() "
                "and load_state_dict(); give its state as extra="
            )
    return {"store": _TableSettings(store.optimizer)} | parts


# ---- saving ----------------------------------------------------------------


def save(
    store: Store,
    path: str | os.PathLike[str],
    *,
    model: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    loader: Any = None,
    extra: Any = None,
    keep: int | None = None,
    step: int | None = None,
) -> Path:
    """Implements :meth:`persia.Store.save`."""
    if keep is not None and keep < 1:
        raise InvalidArgument(
            f"keep is {keep}, need at least 1: the new checkpoint"
        )
    if step is not None and not 0 <= step < 10**19:
        raise InvalidArgument(f"step is {step}, need 0 to 10**19 - 1")
    parts = _parts(
        store,
        {
            "model": model,
            "optimizer": optimizer,
            "scheduler": scheduler,
            "loader": loader,
        },
    )
    root = Path(path)
    try:
        root.mkdir(parents=True, exist_ok=True)
        files.sync_folder(root.parent)
        with files.locked(root):
            files.remove_temporary(root)
            name = _save_locked(store, root, parts, extra, step)
            if keep is not None:
                files.prune(root, keep, name)
    except PersiaError:
        raise
    except OSError as error:
        raise StorageError(f"saving into {root} failed: {error}") from error
    return root / name


def _save_locked(
    store: Store,
    root: Path,
    parts: Mapping[str, Any],
    extra: Any,
    step: int | None,
) -> str:
    temporary = root / f"{files.TEMPORARY}{secrets.token_hex(8)}"
    store.flush()
    cut = _core.Cut(store._handle)
    try:
        tables = _core.ckpt_tables(store._handle)[: cut.tables]
        temporary.mkdir()
        with files.opened(temporary) as descriptor:
            # First: the model may go on changing, the cut does not.
            _write_dense(temporary / _DENSE, parts, extra)
            document: dict[str, Any] = {
                "format": files.FORMAT,
                "version": files.VERSION,
                "id": secrets.token_hex(16),
                "lineage": store._lineage,
                "step": cut.updates if step is None else step,
                "shards": 1,
                "updates": cut.updates,
                "saved": datetime.datetime.now(datetime.UTC).isoformat(),
                "torch": torch.__version__,
                "tables": _write_tables(cut, tables, descriptor),
                "dense": _entry(descriptor, _DENSE),
            }
            text = files.encode_manifest(document)
            files.write_file(
                temporary / files.MANIFEST, lambda file: file.write(text)
            )
            os.fsync(descriptor)
        name = f"step-{document['step']}"
        files.publish(root, temporary, name)
        store._checkpoint_id = str(document["id"])
    finally:
        cut.close()
        shutil.rmtree(temporary, ignore_errors=True)
    return name


def _entry(descriptor: int, name: str) -> dict[str, Any]:
    size, crc = _core.ckpt_file_crc(descriptor, name)
    return {"name": name, "bytes": size, "crc32c": f"{crc:08x}"}


def _write_tables(
    cut: _core.Cut, tables: Sequence[dict[str, Any]], descriptor: int
) -> list[dict[str, Any]]:
    entries = []
    for number, table in enumerate(tables):
        word = re.sub("[^A-Za-z0-9_-]", "_", table["name"])[:80]
        rows, pushes = cut.table(number)
        written = cut.write(number, descriptor, f"{number:04d}-{word}", _CHUNK)
        entries.append(
            table
            | {
                "rows": rows,
                "pushes": pushes,
                "files": [
                    {"name": n, "rows": r, "bytes": b, "crc32c": f"{c:08x}"}
                    for n, r, b, c in written
                ],
            }
        )
    return entries


def _write_dense(path: Path, parts: Mapping[str, Any], extra: Any) -> None:
    """Finds out now, not at the load, what weights_only=True refuses."""
    dense = {name: part.state_dict() for name, part in parts.items()}
    dense |= {"random": _RandomStates().state_dict(), "extra": extra}
    try:
        files.write_file(path, lambda file: torch.save(dense, file))
        torch.load(path, weights_only=True, map_location="cpu", mmap=True)
    except OSError:
        raise
    except Exception as error:
        bad = [name for name, state in dense.items() if not _readable(state)]
        raise InvalidArgument(
            f"the state of {' and '.join(bad) or 'the model'} cannot be "
            "saved: torch.load(weights_only=True) would refuse it; keep to "
            f"tensors, numbers, strings, lists and dicts ({error})"
        ) from error


def _readable(state: object) -> bool:
    file = io.BytesIO()
    try:
        torch.save(state, file)
        file.seek(0)
        torch.load(file, weights_only=True, map_location="cpu")
    except Exception:
        return False
    return True


# ---- loading ---------------------------------------------------------------

# What must agree, and how a config calls it.
_MUST_AGREE = {
    "dim": "embedding_dim",
    "dtype": "data_type",
    "optimizer": "optimizer",
    "momentum": "momentum",
    "state_floats": "optimizer state",
}
# What decides how rows begin that are not in the checkpoint.
_SHOULD_AGREE = (
    "seed",
    "init",
    "init_a",
    "init_b",
    "state_init",
    "admission",
)


def load(
    store: Store,
    path: str | os.PathLike[str],
    *,
    model: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    loader: Any = None,
    step: int | None = None,
    strict: bool = True,
    random_states: bool = True,
) -> Checkpoint:
    """Implements :meth:`persia.Store.load`."""
    parts = _parts(
        store,
        {
            "model": model,
            "optimizer": optimizer,
            "scheduler": scheduler,
            "loader": loader,
        },
    )
    if random_states:
        parts["random"] = _RandomStates()
    folder = files.find(Path(path), step)
    manifest = files.read_manifest(folder)
    here = _core.ckpt_tables(store._handle)
    pairs = _match(manifest, here, folder, strict)
    try:
        with files.opened(folder) as descriptor:
            dense = _read_dense(descriptor, folder, manifest.dense, parts)
            staged = _stage(store._handle, descriptor, pairs)
    except PersiaError as error:
        error.add_note(f"while loading {folder}; nothing was changed")
        raise
    except OSError as error:
        raise StorageError(f"{folder} cannot be read: {error}") from error
    _apply(store, staged, manifest.updates, parts, dense, folder)
    store._lineage = manifest.lineage
    store._checkpoint_id = manifest.id
    return Checkpoint(
        path=folder,
        step=manifest.step,
        rows={table.name: table.rows for _, table in pairs},
        extra=dense["extra"],
        lineage=manifest.lineage,
    )


def read_extra(path: str | os.PathLike[str], step: int | None = None) -> Any:
    """What was given to ``Store.save(extra=…)``, and nothing else: for the
    options that decide which store to make before it can be loaded.

    Args:
        path: a root, then its LATEST is read, or the folder of a step.
        step: of the checkpoint in the root; default: LATEST.

    Raises:
        CorruptFile: a file is truncated or altered.
        StorageError: there is no checkpoint, or it cannot be read.
    """
    folder = files.find(Path(path), step)
    manifest = files.read_manifest(folder)
    try:
        with files.opened(folder) as descriptor:
            dense = _read_dense(descriptor, folder, manifest.dense, ())
    except PersiaError:
        raise
    except OSError as error:
        raise StorageError(f"{folder} cannot be read: {error}") from error
    return dense["extra"]


def _match(
    manifest: files.Manifest,
    here: Sequence[Mapping[str, Any]],
    folder: Path,
    strict: bool,
) -> list[tuple[int, files.Table]]:
    """Numbers of the store's tables with what the checkpoint has of them."""
    saved = {table.name: table for table in manifest.tables}
    declared = {table["name"]: number for number, table in enumerate(here)}
    if strict and saved.keys() - declared.keys():
        raise SchemaMismatch(
            f"tables {sorted(saved.keys() - declared.keys())} are in {folder} "
            f"but not in this store (it has {sorted(declared)}): make the "
            "modules before the load, or give strict=False to leave them out"
        )
    if strict and declared.keys() - saved.keys():
        raise SchemaMismatch(
            f"tables {sorted(declared.keys() - saved.keys())} are not in "
            f"{folder} (it has {sorted(saved)}): give strict=False to keep "
            "the rows that they have now"
        )
    pairs = [(declared[name], saved[name]) for name in declared.keys() & saved]
    for number, table in sorted(pairs, key=lambda pair: pair[0]):
        _check_table(here[number], table, folder)
    return pairs


def _check_table(
    mine: Mapping[str, Any], theirs: files.Table, folder: Path
) -> None:
    for field, option in _MUST_AGREE.items():
        if mine[field] != getattr(theirs, field):
            raise SchemaMismatch(
                f"table {theirs.name!r}: {option} is {mine[field]!r} in this "
                f"store and {getattr(theirs, field)!r} in {folder}: declare "
                "it as it was saved, or give it another name and train anew"
            )
    if sum(file.rows for file in theirs.files) != theirs.rows:
        raise CorruptFile(
            f"{folder / files.MANIFEST}: the rows of the files of table "
            f"{theirs.name!r} are not {theirs.rows}"
        )
    differing = [
        f"{field} ({mine[field]!r} here, {getattr(theirs, field)!r} there)"
        for field in _SHOULD_AGREE
        if mine[field] != getattr(theirs, field)
    ]
    if differing:
        warnings.warn(
            f"table {theirs.name!r}: new rows will begin otherwise than in "
            f"the training that {folder} is of: {', '.join(differing)}",
            stacklevel=5,
        )


def _read_dense(
    descriptor: int, folder: Path, entry: files.File, parts: Collection[str]
) -> dict[str, Any]:
    path = folder / entry.name
    size, crc = _core.ckpt_file_crc(descriptor, entry.name)
    if size != entry.bytes or f"{crc:08x}" != entry.crc32c:
        raise CorruptFile(
            f"{path} is truncated or altered: {size} bytes with checksum "
            f"{crc:08x}, the manifest says {entry.bytes} with {entry.crc32c}"
        )
    try:
        dense = torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:
        raise CorruptFile(f"{path} cannot be read: {error}") from error
    if not isinstance(dense, dict):
        raise CorruptFile(f"{path} holds a {type(dense).__name__}, no dict")
    for name in {"extra", *parts} - dense.keys():
        raise SchemaMismatch(
            f"{folder} holds no state of the {name} (it has {sorted(dense)}): "
            f"leave {name.split()[0]}= out, or save it, too"
        )
    return dense


def _stage(
    handle: int, descriptor: int, pairs: Sequence[tuple[int, files.Table]]
) -> list[_core.Staged]:
    """The rows of the checkpoint, beside those of the store."""
    lists = [
        [(f.name, f.rows, f.bytes, int(f.crc32c, 16)) for f in table.files]
        for _, table in pairs
    ]
    for (number, _), rows in zip(pairs, lists):
        _core.ckpt_verify(handle, number, descriptor, rows)
    return [
        _core.Staged(handle, number, descriptor, rows, table.pushes)
        for (number, table), rows in zip(pairs, lists)
    ]


def _load_state(part: Any, state: Any, name: str, folder: Path) -> None:
    try:
        part.load_state_dict(state)
    except PersiaError:
        raise
    except (
        AttributeError,
        LookupError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as e:
        raise SchemaMismatch(
            f"the {name} saved in {folder} does not fit the one given: {e}"
        ) from e


def _apply(
    store: Store,
    staged: Sequence[_core.Staged],
    updates: int,
    parts: Mapping[str, Any],
    dense: Mapping[str, Any],
    folder: Path,
) -> None:
    """Changes rows, counters and states together, or nothing."""
    before = {
        name: copy.deepcopy(part.state_dict()) for name, part in parts.items()
    }
    updates_before = store.updates
    exchanged = []
    try:
        for table in staged:
            table.exchange()
            exchanged.append(table)
        store._core.set_updates(updates)
        for name, part in parts.items():
            _load_state(part, dense[name], name, folder)
    except BaseException:
        for table in exchanged:
            table.exchange()
        store._core.set_updates(updates_before)
        for name, part in parts.items():
            part.load_state_dict(before[name])
        raise
    if store._core.held(True):
        store._discard()  # gradients of the rows that were
