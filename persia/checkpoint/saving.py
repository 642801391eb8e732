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
import os
import secrets
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from persia import _core
from persia.base.check import whole
from persia.base.logs import audit
from persia.base.patience import patiently
from persia.base.warning import warn
from persia.checkpoint import files
from persia.checkpoint import manifest as manifests
from persia.checkpoint.dense import (
    PLACE,
    Dense,
    RandomStates,
    TableSettings,
    check_classes,
    classes_of,
    load_state,
    parts_of,
    poolings_of,
    read_dense,
    say_differences,
    states_of,
    write_dense,
)
from persia.checkpoint.partial import fitted, names_of
from persia.checkpoint.ranks import Ranks
from persia.checkpoint.shards import Staged, rows_of
from persia.distributed.ranks import need_group
from persia.errors import (
    Interrupted,
    InvalidArgument,
    PersiaError,
    SchemaMismatch,
    StorageError,
    UpdatesLost,
)
from persia.store.engine import engine_of
from persia.store.state import lineages_of, updates_of

if TYPE_CHECKING:
    from persia.store.store import Store


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


def ranks_of(store: Store) -> Ranks:
    """Those who save or load together."""
    if store.world_size == 1:
        return Ranks(alone=True)
    group = need_group("a checkpoint of a store of several ranks")
    place = group.get_rank(), group.get_world_size()
    if place != (store.rank, store.world_size):
        raise InvalidArgument(
            f"this store is of rank {store.rank} of {store.world_size}, but "
            f"torch.distributed of rank {place[0]} of {place[1]}"
        )
    return Ranks(alone=False, silence=engine_of(store).connection.timeout + 5)


def _share(store: Store, root: files.Root, found: files.Found | None) -> None:
    """Lets the shards use the folder that one process is about to make for
    all, or (`found`) to read.
    """
    hosting = engine_of(store).connection.hosting
    if hosting is not None:
        above = root.above(found)
        try:
            above.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(f"{above} cannot be made: {error}") from error
        hosting.checkpoints(above, restores=found is not None)


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
    with ranks_of(store) as ranks:
        with ranks.agreed():
            if keep is not None:
                keep = whole("keep", keep, 1, 2**63 - 1)
            if step is not None:
                step = whole("step", step, 0, 10**19 - 1)
            root = files.root_of(path)
            parts = {"store": TableSettings(store.optimizer)} | parts_of(
                model=model, optimizer=optimizer, scheduler=scheduler
            )
            shared = _shared_of(store, parts)
            own = states_of(
                {"random": RandomStates()} | parts_of(loader=loader)
            )
            settle(store, root)
            own[PLACE] = _core.ckpt_place(engine_of(store).handle)
            saved = updates_of(store)
        # No rank changes a row from here to the end of lead().
        states = Dense(shared, ranks.gathered(own), extra)
        folder, engine_of(store).checkpoint_id = ranks.lead(
            lambda: _save(store, root, states, keep, step, ranks.stop)
        )
        # Other ranks may have been later with their last updates.
        engine_of(store).saved = updates_of(store) if store.remote else saved
    return folder


def settle(store: Store, root: files.Root) -> None:
    """All updates of this rank are applied, and shards that it has may use
    the folder above the root.

    Raises:
        UpdatesLost: a server has lost some that were through.
    """
    _share(store, root, None)
    store.flush()
    engine = engine_of(store)
    patiently(engine.core.look, engine.connection.timeout)


def states_of_rows(store: Store) -> Dense:
    """The states of a checkpoint that has rows alone."""
    parts = {"store": TableSettings(store.optimizer)}
    return Dense(_shared_of(store, parts), [{}], None)


def _shared_of(store: Store, parts: Mapping[str, Any]) -> dict[str, Any]:
    """The states that all ranks have in common."""
    with together(store):
        shared = states_of(parts)
    return shared | {
        "classes": classes_of(parts),
        "poolings": poolings_of(store),
        "parameters": names_of(parts),
    }


def check(store: Store, path: str | os.PathLike[str]) -> None:
    """Finds out whether a save into ``path`` could begin. All ranks call it.

    Raises:
        InvalidArgument: it is no path, or servers do not share it.
        StorageError: it could not.
    """
    with ranks_of(store) as ranks:
        root = files.root_of(path)
        ranks.lead(lambda: files.check(root))
        if not store.remote:
            return
        with ranks.agreed():
            _share(store, root, None)
        ranks.lead(lambda: _check_shards(store, root))


def _check_shards(store: Store, root: files.Root) -> None:
    try:
        rows = rows_of(engine_of(store).connection, root)
        with root.writing() as temporary:
            rows.check(root.at(files.TRIAL) if rows.is_far else temporary)
    except PersiaError:
        raise
    except OSError as error:
        raise StorageError(
            f"saving into {root} would fail: {error}"
        ) from error


def _save(
    store: Store, root: files.Root, *given: Any
) -> tuple[Path | str, str]:
    """:func:`save_into`, audited."""
    try:
        folder, id = save_into(store, root, *given)
    except BaseException as error:
        audit("not saved", root=root, error=type(error).__name__)
        raise
    audit("saved", root=root, folder=folder, id=id)
    return folder, id


def save_into(
    store: Store,
    root: files.Root,
    states: Dense,
    keep: int | None,
    step: int | None,
    stop: threading.Event,
    begun: Callable[[], None] = lambda: None,
) -> tuple[Path | str, str]:
    """One process does it all; the checkpoint's folder and id.

    ``begun`` is called when the moment is taken: rows may change again.
    """
    rows = rows_of(engine_of(store).connection, root)
    document: dict[str, Any] = {
        "format": manifests.FORMAT,
        "version": manifests.VERSION,
        "id": secrets.token_hex(16),
        "lineage": lineages_of(store)[0],
        "training": engine_of(store).training,
        "job": engine_of(store).connection.run,
        "saved": datetime.datetime.now(datetime.UTC).isoformat(),
        "torch": torch.__version__,
    }
    try:
        with root.writing() as temporary:

            def between() -> None:
                begun()
                document["dense"] = write_dense(temporary, states)

            folder: files.Folder = temporary
            if rows.is_far:
                # Its name is needed before the rows have their moment.
                step = rows.updates() if step is None else step
                folder = root.at(f"step-{step}")
            tables, parts = rows.write(folder, document["id"], between, stop)
            if stop.is_set():
                raise Interrupted("the save was given up by another rank")
            if step is None:
                step = max(part.updates for part in parts)
            document |= {"step": step} | manifests.to_manifest(tables, parts)
            published = files.publish(root, temporary, document, keep)
    except PersiaError:
        raise
    except OSError as error:
        raise StorageError(f"saving into {root} failed: {error}") from error
    return published, document["id"]


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
    "admit",
    "sightings",
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
    with ranks_of(store) as ranks:
        with ranks.agreed():
            if resume not in ("rollback", "continue"):
                raise InvalidArgument(
                    f"resume is {resume!r}, need 'rollback' or 'continue'"
                )
            if engine_of(store).connection.in_step:
                raise InvalidArgument(
                    "load inside of a synchronous pass over a DataLoader of "
                    "several ranks: leave its loop first"
                )
            engine_of(store).connection.end_steps()
            if resume == "continue" and not store.remote:
                raise InvalidArgument(
                    "resume='continue' keeps the rows that servers have; the "
                    "rows of this store are in this process"
                )
            parts = {"store": TableSettings(store.optimizer)} | parts_of(
                model=model,
                optimizer=optimizer,
                scheduler=scheduler,
                loader=loader,
            )
            if random_states:
                parts["random"] = RandomStates()
            root = files.root_of(path)
            engine_of(store).drop_unfinished()
            engine_of(store).core.settle()
        found = ranks.lead(lambda: _find(root, step))
        manifest = found.manifest
        with ranks.agreed(), _reading(root):
            here = _core.ckpt_tables(engine_of(store).handle)
            tables, left = _match(found, here, strict)
            since: _Since | None = None
            with root.reading(found, [manifest.dense]) as folder:
                dense = read_dense(folder, found, parts, ranks)
            check_classes(parts, dense, found.folder)
            if not strict:
                with _loading(store):
                    left += _fit(parts, dense)
            say_differences(store, dense, found.folder)
            if resume == "continue":
                since = _since(store, found, dense)
            _share(store, root, found)
        with contextlib.ExitStack() as files_held:
            staged: list[Staged] = []  # of the rank that leads
            if resume == "rollback":
                ranks.lead(
                    lambda: staged.append(
                        _stage(
                            store, root, found, tables, ranks.stop, files_held
                        )
                    )
                )
            with _loading(store, strict):
                _apply(ranks, staged, parts, dense, found)
                with ranks.agreed():
                    _go_on(store, manifest, since)
    if left:
        warn(
            f"load(strict=False) from {found.folder} has left out, and kept "
            f"as it was here: {'; '.join(left)}"
        )
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


def _fit(parts: Mapping[str, Any], dense: dict[str, Any]) -> list[str]:
    """Leaves what fits in the states of a checkpoint; what does not."""
    saved, now = dense.get("parameters"), names_of(parts)
    left = []
    for name, part in parts.items():
        then = None if saved is None else saved.get(name)
        dense[name], out = fitted(part, dense[name], then, now.get(name))
        if out:
            left.append(f"of the {name}: {', '.join(out)}")
    return left


@contextlib.contextmanager
def _loading(store: Store, strict: bool = True) -> Iterator[None]:
    """States may be loaded before their rows, and other rows at the servers
    are this store's own doing."""
    _core.ckpt_loading(engine_of(store).handle, True)
    try:
        with together(store, strict):
            yield
    finally:
        with contextlib.suppress(PersiaError):  # the store was closed
            _core.ckpt_loading(engine_of(store).handle, False)


@contextlib.contextmanager
def together(store: Store, strict: bool = True) -> Iterator[None]:
    """States of modules are saved or loaded with their rows."""
    engine_of(store).loading, engine_of(store).strict = True, strict
    try:
        yield
    finally:
        engine_of(store).loading, engine_of(store).strict = False, True


def _find(root: files.Root, step: int | None) -> files.Found:
    with _reading(root):
        return files.find(root, step)


def _greet(store: Store, restored: bool) -> None:
    ask = partial(_core.ckpt_greet, engine_of(store).handle, restored)
    patiently(ask, engine_of(store).connection.timeout)


def _stage(
    store: Store,
    root: files.Root,
    found: files.Found,
    tables: Mapping[int, manifests.Table],
    stop: threading.Event,
    files_held: contextlib.ExitStack,
) -> Staged:
    """Shards may read the files until they have the rows."""
    chosen = [file for table in tables.values() for file in table.files]
    if store.remote:
        # A server that was started again knows no table yet.
        _greet(store, restored=False)
    rows = rows_of(engine_of(store).connection, root)
    with _reading(root):
        folder = root.at(found.name)
        if not rows.is_far:
            folder = files_held.enter_context(root.reading(found, chosen))
        return rows.stage(folder, found.manifest, tables, stop)


class _Since(NamedTuple):
    """The position of a rank that continues with the live rows."""

    store: int  # its number, see Connection.number_in()
    place: int  # of the last batch of the checkpoint
    lost: int  # so many updates before it that servers have lost


def _go_on(
    store: Store, manifest: manifests.Manifest, since: _Since | None
) -> None:
    """With the rows that the store has now; since: if those are live."""
    if engine_of(store).core.held(True):
        engine_of(store).discard()  # gradients of the rows that were
    if since is None:
        engine_of(store).core.forget()  # and those that are still to be loaded
        _greet(store, restored=True)
    else:
        connection = engine_of(store).connection
        connection.adopt(manifest.job, since.store)
        go_on = partial(
            _core.ckpt_go_on,
            engine_of(store).handle,
            connection.stream(manifest.job, store.rank),
            since.place,
            since.lost,
        )
        patiently(go_on, engine_of(store).connection.timeout)
    engine_of(store).core.set_t(manifest.t)  # the same at all ranks
    engine_of(
        store
    ).core.drop_error()  # what failed before does not matter any more
    engine_of(store).checkpoint_id = manifest.id
    engine_of(store).training = manifest.training
    engine_of(store).saved = updates = updates_of(store)
    engine_of(store).loaded = manifest.lineage
    engine_of(store).rename_rows(updates)


def _since(
    store: Store, found: files.Found, dense: Mapping[str, Any]
) -> _Since:
    ranks, connection = len(dense["ranks"]), engine_of(store).connection
    had = {
        ledger.stream
        for shard in found.manifest.shards
        for ledger in shard.ledgers
    }
    number = connection.number_in(found.manifest.job, ranks, had)
    if number is None:
        raise SchemaMismatch(
            f"{found.folder} is of another namespace than "
            f"{connection.namespace!r}, or another store of this process "
            "continues it already: servers cannot say which later updates "
            "of it they have; load it with resume='rollback'"
        )
    lost = _check_live(store, found, number)
    return _Since(number, _last_place(store, found, dense, ranks), lost)


def _last_place(
    store: Store, found: files.Found, dense: Mapping[str, Any], ranks: int
) -> int:
    """The place of the last batch that a checkpoint has of this rank; of a
    rank that is a new one: see client_go_on().
    """
    if store.rank >= ranks:
        return 2**64 - 1  # after what it may have made since
    place = dense.get(PLACE)
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


def _check_live(store: Store, found: files.Found, number: int) -> int:
    """The rows that are there are those that the checkpoint was made of, and
    have the updates of this rank that it has; how many they lack.
    """
    connection, manifest = engine_of(store).connection, found.manifest
    rows = rows_of(connection)
    hosting = connection.hosting
    outlived = hosting is None or hosting.keeps
    if not outlived and manifest.lineage not in (
        rows.lineage(),
        engine_of(store).loaded,
    ):
        raise InvalidArgument(
            "resume='continue' keeps the rows that servers have; the rows of "
            f"this store are in its ranks, and those of {found.folder} ended "
            "with the ranks that saved it: load it with resume='rollback', "
            "or keep the rows on servers, which outlive ranks"
        )
    rows.check_one(
        rows.restores(),
        "resume='continue' keeps the rows that servers have",
        f"load {found.folder} with resume='rollback', which reaches all of "
        "them",
    )
    stream = connection.stream(manifest.job, store.rank, number)
    lost = rows.lost(manifest, stream)
    if lost and engine_of(store).arguments.settings.lost == "raise":
        which = ", ".join(f"{n} at {server}" for server, n in lost.items())
        raise UpdatesLost(
            f"servers have lost updates of rank {store.rank} that are in "
            f"{found.folder}, at least {which} (they were started again with "
            "older rows, or without any): load it with resume='rollback', or "
            "continue without these updates (`lost=continue`)"
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
            return read_dense(folder, found, (), None)["extra"]


def load_dense(
    path: str | os.PathLike[str], model: Any, step: int | None = None
) -> None:
    """Loads the dense part of a model that was saved, and no rows: those are
    on servers.

    Args:
        path: a root, then its LATEST is read, or the folder of a step.
        model: the module that was given to ``Store.save(model=…)``.
        step: of the checkpoint in the root; default: LATEST.

    Raises:
        CorruptFile: a file is truncated or altered.
        SchemaMismatch: it is the dense part of another model.
        StorageError: there is no checkpoint, or it cannot be read.
    """
    root = files.root_of(path)
    with _reading(root):
        found = files.find(root, step)
        with root.reading(found, [found.manifest.dense]) as folder:
            state = read_dense(folder, found, ("model",), None)["model"]
    state = {k: v for k, v in state.items() if not k.endswith("_extra_state")}
    try:
        left = model.load_state_dict(state, strict=False)
    except RuntimeError as error:  # of other shapes
        raise SchemaMismatch(f"{found.folder}: {error}") from None
    missing = [k for k in left.missing_keys if not k.endswith("_extra_state")]
    if missing or left.unexpected_keys:
        raise SchemaMismatch(
            f"{found.folder} is of another model: it lacks {missing} and has "
            f"{left.unexpected_keys}"
        )


def _match(
    found: files.Found, here: Sequence[Mapping[str, Any]], strict: bool
) -> tuple[dict[int, manifests.Table], list[str]]:
    """What the checkpoint has of the store's tables, by their number; and
    what is left out."""
    folder = found.folder
    saved = {table.name: table for table in found.manifest.tables}
    declared = {
        table["name"]: number
        for number, table in enumerate(here)
        if not table["name"].startswith(_core.DROPPED)
    }
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
    left = [f"table {n!r} (not here)" for n in saved.keys() - declared.keys()]
    left += [
        f"table {n!r} (not there)" for n in declared.keys() - saved.keys()
    ]
    for number, table in list(both.items()):
        try:
            _check_table(here[number], table, folder)
        except SchemaMismatch as error:
            if strict:
                raise
            left.append(str(error).partition(": declare ")[0])
            del both[number]
    return both, sorted(left)


def _check_table(
    mine: Mapping[str, Any], theirs: manifests.Table, folder: Path | str
) -> None:
    for field, option in _MUST_AGREE.items():
        if mine[field] != getattr(theirs, field):
            raise SchemaMismatch(
                f"table {theirs.name!r}: {option} is {mine[field]!r} in this "
                f"store and {getattr(theirs, field)!r} in {folder}: declare "
                "it as it was saved, or give the new table another name"
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


def _on_host(state: Any) -> Any:
    """A copy of a state that takes no memory of the device."""
    if isinstance(state, torch.Tensor):
        return state.detach().clone() if state.is_cpu else state.detach().cpu()
    if isinstance(state, dict):
        out = copy.copy(state)  # with what torch keeps beside the entries
        for key, value in state.items():
            out[key] = _on_host(value)
        return out
    if type(state) in (list, tuple):
        return type(state)(map(_on_host, state))
    return copy.deepcopy(state)


def _apply(
    ranks: Ranks,
    staged: Sequence[Staged],
    parts: Mapping[str, Any],
    dense: Mapping[str, Any],
    found: files.Found,
) -> None:
    """Changes states, then rows and counters: on all ranks or none."""
    before = {
        name: _on_host(part.state_dict()) for name, part in parts.items()
    }

    def commit() -> None:
        for one in staged:
            one.commit()

    try:
        with ranks.agreed():
            for name, part in parts.items():
                load_state(part, dense[name], name, found.folder)
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
