"""Checkpoints: a folder per step that is whole or not there.

A root holds ``step-N/`` folders and ``LATEST``, a file with the name of the
newest. A folder holds, per table and shard, row files of at most 256 MiB
(safetensors: ``ids``, ``vectors``, ``state``, ``clock``), ``dense.pt`` (the
states of model, optimizers and scheduler, and of each rank's loader and
random generators, read with ``weights_only=True``) and ``manifest.json``:
what there is, with the size and CRC-32C of every file.

It is written as ``.tmp-…``, synced and renamed, so that a crash at any moment
leaves the checkpoint before; the next save removes what was left. All rows
are of one moment (a cut), although other threads may push while the files are
written. Loading verifies every byte first, and changes the store, the model
and the rest together or not at all.

:meth:`persia.Store.save` and :meth:`persia.Store.load` are the way in.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import datetime
import io
import os
import random
import re
import secrets
import sys
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from persia import _checkpoint_files as files
from persia import _checkpoint_manifest as manifests
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
        path: the folder of the step, or its URI.
        step: its number.
        rows: rows loaded, per table.
        extra: what was given to ``save(extra=…)``, else None.
        lineage: names the training that the rows come from.
    """

    path: Path | str
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


def _parts(**given: Any) -> dict[str, Any]:
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
    return parts


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
) -> Path | str:
    """Implements :meth:`persia.Store.save`."""
    if keep is not None and keep < 1:
        raise InvalidArgument(
            f"keep is {keep}, need at least 1: the new checkpoint"
        )
    if step is not None and not 0 <= step < 10**19:
        raise InvalidArgument(f"step is {step}, need 0 to 10**19 - 1")
    shared = {"store": _TableSettings(store.optimizer)} | _parts(
        model=model, optimizer=optimizer, scheduler=scheduler
    )
    own = {"random": _RandomStates()} | _parts(loader=loader)
    root = files.root_of(path)
    try:
        with root.writing() as temporary:
            store.flush()
            cut = _core.Cut(store._handle)
            try:
                # First: the model may go on changing, the cut does not.
                dense = _write_dense(
                    temporary, _states(shared), [_states(own)], extra
                )
                tables = _core.ckpt_tables(store._handle)[: cut.tables]
                with files.opened(temporary) as descriptor:
                    part = _write_rows(cut, tables, descriptor)
            finally:
                cut.close()
            document = _document(store, tables, [part], dense, step)
            folder = root.publish(temporary, document, keep)
    except PersiaError:
        raise
    except OSError as error:
        raise StorageError(f"saving into {root} failed: {error}") from error
    store._checkpoint_id = str(document["id"])
    return folder


def _states(parts: Mapping[str, Any]) -> dict[str, Any]:
    return {name: part.state_dict() for name, part in parts.items()}


def _document(
    store: Store,
    tables: Sequence[dict[str, Any]],
    parts: Sequence[manifests.Part],
    dense: dict[str, Any],
    step: int | None,
) -> dict[str, Any]:
    """The entries of a manifest."""
    return {
        "format": manifests.FORMAT,
        "version": manifests.VERSION,
        "id": secrets.token_hex(16),
        "lineage": store._lineage,
        "step": max(p.updates for p in parts) if step is None else step,
        "saved": datetime.datetime.now(datetime.UTC).isoformat(),
        "torch": torch.__version__,
        **manifests.to_manifest(tables, parts),
        "dense": dense,
    }


def _write_rows(
    cut: _core.Cut, tables: Sequence[dict[str, Any]], descriptor: int
) -> manifests.Part:
    """The row files of the only shard, in this process."""
    pushes, rows = [], []
    for number, table in enumerate(tables):
        word = re.sub("[^A-Za-z0-9_-]", "_", table["name"])[:80]
        _, clock = cut.table(number)
        pushes.append(clock)
        written = cut.write(number, descriptor, f"{number:04d}-{word}", _CHUNK)
        rows += [manifests.Rows(number, *file) for file in written]
    return manifests.Part(cut.updates, 0, pushes, [], rows)


def _write_dense(
    folder: Path,
    shared: dict[str, Any],
    ranks: Sequence[dict[str, Any]],
    extra: Any,
) -> dict[str, Any]:
    """Writes dense.pt; its entry in the manifest. Finds out now, not at the
    load, what weights_only=True refuses.
    """
    path = folder / _DENSE
    dense = shared | {"ranks": list(ranks), "extra": extra}
    try:
        files.write_file(path, lambda file: torch.save(dense, file))
        torch.load(path, weights_only=True, map_location="cpu", mmap=True)
    except OSError:
        raise
    except Exception as error:
        named = shared | {"extra": extra}
        for rank, states in enumerate(ranks):
            named |= {f"{n} of rank {rank}": s for n, s in states.items()}
        bad = [name for name, state in named.items() if not _readable(state)]
        raise InvalidArgument(
            f"the state of {' and '.join(bad) or 'the model'} cannot be "
            "saved: torch.load(weights_only=True) would refuse it; keep to "
            f"tensors, numbers, strings, lists and dicts ({error})"
        ) from error
    with files.opened(folder) as descriptor:
        size, crc = _core.ckpt_file_crc(descriptor, _DENSE)
    return {"name": _DENSE, "bytes": size, "crc32c": f"{crc:08x}"}


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
    parts = {"store": _TableSettings(store.optimizer)} | _parts(
        model=model, optimizer=optimizer, scheduler=scheduler, loader=loader
    )
    if random_states:
        parts["random"] = _RandomStates()
    root = files.root_of(path)
    with _reading(root):
        found = files.find(root, step)
        here = _core.ckpt_tables(store._handle)
        pairs = _match(found, here, strict)
        manifest = found.manifest
        chosen = [file for _, table in pairs for file in table.files]
        with (
            root.reading(found, [manifest.dense, *chosen]) as folder,
            files.opened(folder) as descriptor,
        ):
            dense = _read_dense(descriptor, folder, found, parts)
            staged = _stage(store._handle, descriptor, pairs)
    _apply(store, staged, manifest.updates, parts, dense, found)
    store._lineage = manifest.lineage
    store._checkpoint_id = manifest.id
    return Checkpoint(
        path=found.folder,
        step=manifest.step,
        rows={table.name: table.rows for _, table in pairs},
        extra=dense["extra"],
        lineage=manifest.lineage,
    )


@contextlib.contextmanager
def _reading(root: files.Root) -> Iterator[None]:
    try:
        yield
    except PersiaError as error:
        error.add_note(f"while loading from {root}; nothing was changed")
        raise
    except OSError as error:
        raise StorageError(f"{root} cannot be read: {error}") from error


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
    root = files.root_of(path)
    with _reading(root):
        found = files.find(root, step)
        with (
            root.reading(found, [found.manifest.dense]) as folder,
            files.opened(folder) as descriptor,
        ):
            return _read_dense(descriptor, folder, found, ())["extra"]


def _match(
    found: files.Found, here: Sequence[Mapping[str, Any]], strict: bool
) -> list[tuple[int, manifests.Table]]:
    """Numbers of the store's tables with what the checkpoint has of them."""
    folder = found.folder
    saved = {table.name: table for table in found.manifest.tables}
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
    mine: Mapping[str, Any], theirs: manifests.Table, folder: Path | str
) -> None:
    for field, option in _MUST_AGREE.items():
        if mine[field] != getattr(theirs, field):
            raise SchemaMismatch(
                f"table {theirs.name!r}: {option} is {mine[field]!r} in this "
                f"store and {getattr(theirs, field)!r} in {folder}: declare "
                "it as it was saved, or give it another name and train anew"
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
    descriptor: int, folder: Path, found: files.Found, parts: Collection[str]
) -> dict[str, Any]:
    """ "extra" and the states of the parts that are wanted, by name."""
    entry = found.manifest.dense
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
    # Version 1 has the states of its only rank among those of all.
    ranks = dense.pop("ranks", [{}])
    dense |= ranks[0]
    for name in {"extra", *parts} - dense.keys():
        raise SchemaMismatch(
            f"{found.folder} holds no state of the {name} (it has "
            f"{sorted(dense)}): leave {name.split()[0]}= out, or save it, too"
        )
    return dense


def _stage(
    handle: int, descriptor: int, pairs: Sequence[tuple[int, manifests.Table]]
) -> list[_core.Staged]:
    """The rows of the checkpoint, beside those of the store."""
    lists = [
        [(f.name, f.rows, f.bytes, int(f.crc32c, 16)) for f in table.files]
        for _, table in pairs
    ]
    for (number, _), rows in zip(pairs, lists):
        _core.ckpt_verify(handle, number, descriptor, rows)
    return [
        _core.Staged(handle, number, descriptor, rows, max(table.pushes))
        for (number, table), rows in zip(pairs, lists)
    ]


def _load_state(part: Any, state: Any, name: str, folder: Path | str) -> None:
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
    found: files.Found,
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
            _load_state(part, dense[name], name, found.folder)
    except BaseException:
        for table in exchanged:
            table.exchange()
        store._core.set_updates(updates_before)
        for name, part in parts.items():
            part.load_state_dict(before[name])
        raise
    if store._core.held(True):
        store._discard()  # gradients of the rows that were
