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
import secrets
import sys
import threading
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from persia import _checkpoint_files as files
from persia import _checkpoint_manifest as manifests
from persia import _core
from persia._check import whole
from persia._checkpoint_ranks import Ranks
from persia._checkpoint_rows import LocalRows, Staged, StoreRows
from persia._checkpoint_shards import rows_of
from persia._patience import patiently
from persia._ranks import need_group
from persia.errors import (
    CorruptFile,
    Interrupted,
    InvalidArgument,
    PersiaError,
    RestoreIncomplete,
    SchemaMismatch,
    StorageError,
    UpdatesLost,
)

if TYPE_CHECKING:
    from persia.optim import SparseOptimizer
    from persia.store import Store

__all__ = ["Checkpoint", "check", "load", "read_extra", "save"]

_DENSE = "dense.pt"
_PLACE = "place"  # of a rank's last batch, in its states


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """What :meth:`persia.Store.load` found.

    Attributes:
        path: the folder of the step, or its URI.
        step: its number.
        rows: rows loaded, per table; 0 where those of the servers were kept.
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


def _classes(parts: Mapping[str, Any]) -> dict[str, list[str]]:
    """Of the optimizers: their class and its bases, whose states a plain
    ``load_state_dict`` takes for its own and then breaks at its next step.
    """
    top = torch.optim.Optimizer
    return {
        name: [
            cls.__qualname__
            for cls in type(part).__mro__
            if issubclass(cls, top) and cls is not top
        ]
        for name, part in parts.items()
        if isinstance(part, top)
    }


def _check_classes(
    parts: Mapping[str, Any], dense: Mapping[str, Any], folder: Path | str
) -> None:
    """An optimizer reads what its own class, or a relative of it, saved."""
    saved = dense.get("classes", {})  # absent in older checkpoints
    for name, mine in _classes(parts).items():
        theirs = saved.get(name)
        if theirs and not set(theirs) & set(mine):
            raise SchemaMismatch(
                f"the {name} saved in {folder} is of class {theirs[0]}, the "
                f"one given of class {mine[0]}: give one of the same class, "
                f"or leave {name.split()[0]}= out and let it begin anew"
            )


def _rows(store: Store) -> StoreRows:
    if store.remote:
        return rows_of(store._connection)
    return LocalRows(store._core, store._lineage)


def _ranks(store: Store) -> Ranks:
    """Those who save or load together."""
    if store.world == 1:
        return Ranks(alone=True)
    group = need_group("a checkpoint of a store of several ranks")
    place = group.get_rank(), group.get_world_size()
    if place != (store.rank, store.world):
        raise InvalidArgument(
            f"this store is of rank {store.rank} of {store.world}, but "
            f"torch.distributed of rank {place[0]} of {place[1]}"
        )
    return Ranks(alone=False, silence=store._connection.timeout + 5)


def _share(store: Store, root: files.Root, found: files.Found | None) -> None:
    """Lets the shards use the folder that one process is about to make for
    all, or (`found`) to read.
    """
    hosting = store._connection.hosting
    if hosting is not None:
        above = root.above(found)
        try:
            above.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(f"{above} cannot be made: {error}") from error
        hosting.server.checkpoints(str(above))
    elif store.remote and not root.shared:
        raise InvalidArgument(
            f"the files of {root} pass through a folder that this process "
            f"shares with the servers: set {files.STAGING} to the folder "
            "that they know as their --checkpoints"
        )


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
    with _ranks(store) as ranks:
        with ranks.agreed():
            if keep is not None:
                keep = whole("keep", keep, 1, 2**63 - 1)
            if step is not None:
                step = whole("step", step, 0, 10**19 - 1)
            root = files.root_of(path)
            parts = {"store": _TableSettings(store.optimizer)} | _parts(
                model=model, optimizer=optimizer, scheduler=scheduler
            )
            shared = _states(parts) | {"classes": _classes(parts)}
            own = _states({"random": _RandomStates()} | _parts(loader=loader))
            _share(store, root, None)
            store.flush()
            # A server may have lost updates that were through.
            patiently(store._core.look, store._connection.timeout)
            own[_PLACE] = _core.ckpt_place(store._handle)
        # No rank changes a row from here to the end of lead().
        states = _Dense(shared, ranks.gathered(own), extra)
        folder, store._checkpoint_id = ranks.lead(
            lambda: _save(store, root, states, keep, step, ranks.stop)
        )
    return folder


def check(store: Store, path: str | os.PathLike[str]) -> None:
    """Finds out whether a save into ``path`` could begin. All ranks call it.

    Raises:
        InvalidArgument: it is no path, or servers do not share it.
        StorageError: it could not.
    """
    with _ranks(store) as ranks:
        root = files.root_of(path)
        ranks.lead(lambda: files.check(root))
        if not store.remote:
            return
        with ranks.agreed():
            _share(store, root, None)
        ranks.lead(lambda: _check_shards(store, root))


def _check_shards(store: Store, root: files.Root) -> None:
    try:
        with root.writing() as temporary:
            rows_of(store._connection).check(temporary)
    except PersiaError:
        raise
    except OSError as error:
        raise StorageError(
            f"saving into {root} would fail: {error}"
        ) from error


class _Dense(NamedTuple):
    """What goes into dense.pt, by name: states that are equal on all ranks or
    of the first alone, those of each rank, and what the user gave.
    """

    shared: dict[str, Any]
    ranks: list[dict[str, Any]]
    extra: Any


def _save(
    store: Store,
    root: files.Root,
    states: _Dense,
    keep: int | None,
    step: int | None,
    stop: threading.Event,
) -> tuple[Path | str, str]:
    """One process does it all; the checkpoint's folder and id."""
    rows = _rows(store)
    document: dict[str, Any] = {
        "format": manifests.FORMAT,
        "version": manifests.VERSION,
        "id": secrets.token_hex(16),
        "lineage": rows.lineage(),
        "job": store._connection.run,
        "saved": datetime.datetime.now(datetime.UTC).isoformat(),
        "torch": torch.__version__,
    }
    try:
        with root.writing() as temporary:

            def write_dense() -> None:
                document["dense"] = _write_dense(temporary, states)

            tables, parts = rows.write(temporary, write_dense, stop)
            if stop.is_set():
                raise Interrupted("the save was given up by another rank")
            if step is None:
                step = max(part.updates for part in parts)
            document |= {"step": step} | manifests.to_manifest(tables, parts)
            folder = root.publish(temporary, document, keep)
    except PersiaError:
        raise
    except OSError as error:
        raise StorageError(f"saving into {root} failed: {error}") from error
    return folder, document["id"]


def _states(parts: Mapping[str, Any]) -> dict[str, Any]:
    return {name: part.state_dict() for name, part in parts.items()}


def _write_dense(folder: Path, states: _Dense) -> dict[str, Any]:
    """Writes dense.pt; its entry in the manifest. Finds out now, not at the
    load, what weights_only=True refuses.
    """
    path = folder / _DENSE
    shared, ranks, extra = states
    dense = shared | {"ranks": ranks, "extra": extra}
    try:
        files.write_file(path, lambda file: torch.save(dense, file))
        torch.load(path, weights_only=True, map_location="cpu", mmap=True)
    except OSError:
        raise
    except Exception as error:
        # torch's writer fails where Ctrl-C comes into it: that comes first.
        context = error.__context__
        if context is not None and not isinstance(context, Exception):
            raise context from None
        named = shared | {"extra": extra}
        for rank, own in enumerate(ranks):
            named |= {f"{n} of rank {rank}": s for n, s in own.items()}
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
    resume: str = "rollback",
) -> Checkpoint:
    """Implements :meth:`persia.Store.load`."""
    with _ranks(store) as ranks:
        with ranks.agreed():
            if resume not in ("rollback", "continue"):
                raise InvalidArgument(
                    f"resume is {resume!r}, need 'rollback' or 'continue'"
                )
            if store._connection.in_step:
                raise InvalidArgument(
                    "load inside of a synchronous pass over a DataLoader of "
                    "several ranks: leave its loop first"
                )
            if resume == "continue" and not store.remote:
                raise InvalidArgument(
                    "resume='continue' keeps the rows that servers have; the "
                    "rows of this store are in this process"
                )
            parts = {"store": _TableSettings(store.optimizer)} | _parts(
                model=model,
                optimizer=optimizer,
                scheduler=scheduler,
                loader=loader,
            )
            if random_states:
                parts["random"] = _RandomStates()
            root = files.root_of(path)
            store._drop_unfinished()
            store._core.settle()
        found = ranks.lead(lambda: _find(root, step))
        manifest = found.manifest
        with ranks.agreed(), _reading(root):
            here = _core.ckpt_tables(store._handle)
            tables = _match(found, here, strict)
            places: tuple[int, int] | None = None
            with root.reading(found, [manifest.dense]) as folder:
                dense = _read_dense(folder, found, parts, ranks)
            _check_classes(parts, dense, found.folder)
            if resume == "continue":
                lost = _check_live(store, found)
                places = _last_place(store, found, dense), lost
            _share(store, root, found)
        staged: list[Staged] = []  # of the rank that leads
        if resume == "rollback":
            ranks.lead(
                lambda: staged.append(
                    _stage(store, root, found, tables, ranks.stop)
                )
            )
        with _loading(store):
            _apply(ranks, staged, parts, dense, found)
            with ranks.agreed():
                _go_on(store, manifest, resume, places)
    return Checkpoint(
        path=found.folder,
        step=manifest.step,
        rows={
            table.name: table.rows if resume == "rollback" else 0
            for table in tables.values()
        },
        extra=dense["extra"],
        lineage=manifest.lineage,
    )


@contextlib.contextmanager
def _loading(store: Store) -> Iterator[None]:
    """States may come before their rows, and other rows at the servers are
    this store's own doing.
    """
    store._loading = True
    _core.ckpt_loading(store._handle, True)
    try:
        yield
    finally:
        store._loading = False
        with contextlib.suppress(PersiaError):  # the store was closed
            _core.ckpt_loading(store._handle, False)


def _find(root: files.Root, step: int | None) -> files.Found:
    with _reading(root):
        return files.find(root, step)


def _greet(store: Store, restored: bool) -> None:
    ask = partial(_core.ckpt_greet, store._handle, restored)
    patiently(ask, store._connection.timeout)


def _stage(
    store: Store,
    root: files.Root,
    found: files.Found,
    tables: Mapping[int, manifests.Table],
    stop: threading.Event,
) -> Staged:
    chosen = [file for table in tables.values() for file in table.files]
    if store.remote:
        # A server that was started again knows no table yet.
        _greet(store, restored=False)
    with _reading(root), root.reading(found, chosen) as folder:
        return _rows(store).stage(folder, found.manifest, tables, stop)


def _go_on(
    store: Store,
    manifest: manifests.Manifest,
    resume: str,
    places: tuple[int, int] | None,
) -> None:
    """With the rows that the store has now; places: the last batch of the
    checkpoint, and how many updates before it servers have lost.
    """
    if store._core.held(True):
        store._discard()  # gradients of the rows that were
    if resume == "rollback":
        store._core.forget()  # and those that are still to come
    if store.remote and resume == "rollback":
        _greet(store, restored=True)
    elif store.remote:
        assert places is not None
        connection = store._connection
        connection.adopt(manifest.job)
        stream = connection.stream(manifest.job, store.rank)
        go_on = partial(_core.ckpt_go_on, store._handle, stream, *places)
        patiently(go_on, store._connection.timeout)
    store._core.set_t(manifest.t)  # the same at all ranks
    store._core.drop_error()  # what failed before does not matter any more
    store._lineage = manifest.lineage
    store._checkpoint_id = manifest.id


def _last_place(
    store: Store, found: files.Found, dense: Mapping[str, Any]
) -> int:
    """The place of the last batch that a checkpoint has of this rank; of a
    rank that is a new one: see client_go_on().
    """
    ranks, run = len(dense["ranks"]), found.manifest.job
    had = {
        ledger.stream
        for shard in found.manifest.shards
        for ledger in shard.ledgers
    }
    streams = [store._connection.stream(run, rank) for rank in range(ranks)]
    if had and not had & set(streams):
        raise SchemaMismatch(
            f"{found.folder} is of another namespace than "
            f"{store._connection.namespace!r}: which updates the servers have "
            "of those that follow it cannot be told; load it with "
            "resume='rollback'"
        )
    if store.rank >= ranks:
        return 2**64 - 1  # after what it may have made since
    place = dense.get(_PLACE)
    if not isinstance(place, int):
        raise InvalidArgument(
            f"resume='continue' knows an update by the place of its batch in "
            f"a persia.DataLoader, and {found.folder} has no place of rank "
            f"{store.rank}: before it was saved some update was made outside "
            "of such a loop, of several batches, or as another one of its "
            "batch (or it was saved by an earlier version of Persia): load "
            "it with resume='rollback'"
        )
    return place


def _check_live(store: Store, found: files.Found) -> int:
    """The rows that are there are those that the checkpoint was made of, and
    have the updates of this rank that it has; how many they lack.
    """
    connection, manifest = store._connection, found.manifest
    rows = rows_of(connection)
    if connection.hosting is not None and manifest.lineage not in (
        rows.lineage(),
        store._lineage,  # loaded by this store before
    ):
        raise InvalidArgument(
            "resume='continue' keeps the rows that servers have; the rows of "
            f"this store are in its ranks, and those of {found.folder} ended "
            "with the ranks that saved it: load it with resume='rollback', "
            "or keep the rows on servers, which outlive ranks"
        )
    restores = rows.restores()
    if len(set(restores.values())) > 1:
        which = ", ".join(f"{id:016x} at {on}" for on, id in restores.items())
        raise RestoreIncomplete(
            "resume='continue' keeps the rows that servers have, and those "
            f"stem from different restores ({which}): load {found.folder} "
            "with resume='rollback', which reaches all of them"
        )
    lost = rows.lost(manifest, connection.stream(manifest.job, store.rank))
    if lost and store._settings.lost == "raise":
        which = ", ".join(f"{n} at {server}" for server, n in lost.items())
        raise UpdatesLost(
            f"servers have lost updates of rank {store.rank} that are in "
            f"{found.folder}, at least {which} (they were started again with "
            "older rows, or without any): load it with resume='rollback', or "
            "go on without these updates (Store(lost='continue'))"
        )
    return sum(lost.values())


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
        with root.reading(found, [found.manifest.dense]) as folder:
            return _read_dense(folder, found, (), None)["extra"]


def _match(
    found: files.Found, here: Sequence[Mapping[str, Any]], strict: bool
) -> dict[int, manifests.Table]:
    """What the checkpoint has of the store's tables, by their number."""
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
    both = {no: saved[name] for name, no in declared.items() if name in saved}
    for number, table in both.items():
        _check_table(here[number], table, folder)
    return both


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
    folder: Path,
    found: files.Found,
    parts: Collection[str],
    ranks: Ranks | None,
) -> dict[str, Any]:
    """What was given as extra, and the states of the parts that are wanted,
    by name; without `ranks`, those that all ranks share.
    """
    entry = found.manifest.dense
    path = folder / entry.name
    with files.opened(folder) as descriptor:
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
    every = dense.setdefault("ranks", [{}])
    if (
        not isinstance(every, list)
        or not every
        or not all(isinstance(one, dict) for one in every)
    ):
        raise CorruptFile(f"{path} has no states of ranks")
    if ranks is not None:
        dense |= _own_states(every, parts, ranks, found)
    for name in {"extra", *parts} - dense.keys():
        raise SchemaMismatch(
            f"{found.folder} holds no state of the {name} (it has "
            f"{sorted(dense)}): leave {name.split()[0]}= out, or save it, too"
        )
    return dense


def _own_states(
    every: Sequence[dict[str, Any]],
    parts: Collection[str],
    ranks: Ranks,
    found: files.Found,
) -> dict[str, Any]:
    """The states of this rank, of those that the ranks saved."""
    if len(every) == ranks.world:
        return every[ranks.rank]
    if any(name.split()[0] == "loader" for name in parts):
        raise SchemaMismatch(
            f"{found.folder} was saved by {len(every)} ranks, this job has "
            f"{ranks.world}: the positions of their loaders mean other "
            "batches here; leave loader= out and choose where to begin"
        )
    if ranks.rank < len(every):
        return every[ranks.rank]
    return {"random": _RandomStates().state_dict()}  # it stays as it is


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
    ranks: Ranks,
    staged: Sequence[Staged],
    parts: Mapping[str, Any],
    dense: Mapping[str, Any],
    found: files.Found,
) -> None:
    """Changes states, then rows and counters: on all ranks or none."""
    before = {
        name: copy.deepcopy(part.state_dict()) for name, part in parts.items()
    }

    def commit() -> None:
        for one in staged:
            one.commit()

    try:
        with ranks.agreed():
            for name, part in parts.items():
                _load_state(part, dense[name], name, found.folder)
        ranks.lead(commit)
    except BaseException as error:
        for one in staged:
            one.abort()
        for name, part in parts.items():
            try:
                part.load_state_dict(before[name])
            except Exception as another:
                error.add_note(
                    f"the {name} could not be set back, either: {another}"
                )
        raise
