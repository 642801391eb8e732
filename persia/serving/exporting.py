"""Exports: what was trained, as a folder that serves."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import inspect
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import torch
from torch import nn

from persia import errors
from persia.base.check import kind, whole
from persia.base.urls import Url
from persia.base.version import __version__
from persia.checkpoint import files, saving
from persia.checkpoint.dense import Dense, unwrap
from persia.checkpoint.files import Found, Root
from persia.checkpoint.manifest import File, Table
from persia.data.batches.batch import Batch
from persia.data.schema.schema import Schema
from persia.nn.lookups import stores_of
from persia.serving.branches import check_branches
from persia.serving.deltas.packet import ChainPlace
from persia.serving.folder import (
    FORMAT,
    VERSION,
    ExportTable,
    Versions,
    entry_of,
    versions_of,
)
from persia.serving.form import Form
from persia.serving.graph import Graph, trace
from persia.serving.rows import Publish, RowType, write_rows
from persia.store.engine import engine_of
from persia.store.store import Store

_DENSE, _SCHEMA = "dense.pt2", "schema.yaml"


@dataclasses.dataclass(frozen=True)
class Exported:
    """What an export has written.

    Attributes:
        path: the folder of the version, or its URL.
        version: its name, such as "v-000001".
        rows: of each table.
        left_out: rows of each table that ``publish`` left out.
        bytes: of all files.
    """

    path: Path | Url
    version: str
    rows: Mapping[str, int]
    left_out: Mapping[str, int]
    bytes: int


@dataclasses.dataclass(frozen=True)
class Trial:
    """A model that was traced, and what its users know of it.

    Attributes:
        graph: of the model.
        schema: of the data; None: requests have ids.
        tasks: names of the labels, where there are several.
        clicks: whether the output is a logit.
    """

    graph: Graph
    schema: Schema | None = None
    tasks: Sequence[str] = ()
    clicks: bool = False


def trace_model(
    model: nn.Module,
    example: Any,
    schema: Schema | None = None,
    output: str = "output",
) -> Graph:
    """The graph of a model that is called with ``example``.

    Args:
        model: with tables of Persia.
        example: as of :func:`export`.
        schema: of the data.
        output: the name of its output.

    Raises:
        InvalidArgument: torch.export makes no graph of it, or one that gives
            something else where a size is 0 or 1, or the example is no call
            of it.
    """
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = {}
    if isinstance(example, Batch):
        args = example.dense, example.ids
    elif isinstance(example, tuple):
        args = example
    elif isinstance(example, Mapping):
        args, kwargs = (), example
    else:
        args = (example,)
    single = [] if schema is None else [c.feature for c in schema.singles]
    try:
        bound = inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise errors.InvalidArgument(
            f"the example is no call of {type(model).__name__}: {error}"
        ) from None
    names = list(bound.arguments)[: len(args)]
    names += [f"input{i}" for i in range(len(names), len(args))]
    form, tensors = Form.of(names, args, kwargs, single)
    graph = trace(model, form, tensors, output)
    check_branches(model, graph, tensors)
    return graph


def export(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    example: Any,
    store: Store | None = None,
    row_dtype: RowType = "fp32",
    publish: Publish | None = None,
    keep: int | None = None,
    schema: Schema | str | os.PathLike[str] | None = None,
    tasks: Sequence[str] = (),
    clicks: bool = False,
) -> Exported | None:
    """Writes a model with its rows into a folder from which
    :func:`persia.load_model` and ``persia serve model`` take it.

    A new version appears in ``path`` whole, or not at all, and is the current
    one then. Rows and the dense part are of one moment: call it between two
    steps. The model and the store are afterwards as they were. Rows of
    several ranks, or of servers, pass through a checkpoint in the folder of
    the name of ``path`` and ``-rows``. In a bucket it is uploaded, what names
    it last.

    Args:
        model: any module with tables of Persia, those of
            :func:`persia.convert` among them.
        path: the root of the versions, a folder or the URL of one in a bucket.
        example: what the model is called with, of two samples or more, whose
            values do not matter: a :class:`persia.Batch` (the call is
            ``model(batch.dense, batch.ids)``), a tuple of arguments, a dict
            of them by name, or the only one.
        store: of the tables; None: that of the model.
        row_dtype: how vectors are kept: "fp32"; "fp16"; "int8" or "int4",
            integers with a scale a row.
        publish: leaves rows out.
        keep: so many versions stay, the newest; None: all.
        schema: of the data: requests have columns then, with raw values; None:
            they have ids.
        tasks: names of the labels, where the output is [B, tasks].
        clicks: the output is a logit; its sigmoid is what requests get.

    Returns:
        What was written; None on all ranks but the first, which all call it.

    Raises:
        InvalidArgument: torch.export makes no graph of the model; or it has
            several stores; or rows of this type cannot hold a value.
        StorageError: a file cannot be written.
    """
    root = versions_of(path)
    check_options(row_dtype, keep)
    if schema is not None and not isinstance(schema, Schema):
        schema = Schema.load(schema)
    model = unwrap(kind("model", model, nn.Module, "a module"))
    store = store_of(model, store)
    # First, for it may fail.
    graph = trace_model(model, example, schema)
    trial = Trial(graph, schema, tuple(tasks), clicks)
    check_tables(graph, list(store.tables))
    return export_store(trial, root, store, row_dtype, publish, keep)


def export_store(
    trial: Trial,
    root: Versions,
    store: Store,
    row_dtype: RowType = "fp32",
    publish: Publish | None = None,
    keep: int | None = None,
    chain: ChainPlace | None = None,
) -> Exported | None:
    """Writes a version: a traced model with the rows of a store.

    Args:
        trial: the model.
        root: of the versions.
        store: of its tables.
        row_dtype, publish, keep: as of :func:`export`.
        chain: of packets that the version begins with.
    """
    more = row_dtype, publish, keep, chain
    if store.world_size > 1 or store.remote:
        shared = root.rows_root()
        saving.save(store, shared.at(""), keep=1)
        if store.rank != 0:
            return None
        source = shared, files.find(shared, None)
        with _writing(root) as temporary:
            return _write(trial, root, temporary, source, *more)
    with _writing(root) as temporary:
        saved = files.LocalRoot(temporary / "checkpoint")
        before = engine_of(store).checkpoint_id, engine_of(store).saved
        saving.save(store, saved.path)
        engine_of(store).checkpoint_id, engine_of(store).saved = before
        return _write(
            trial, root, temporary, (saved, files.find(saved, None)), *more
        )


@dataclasses.dataclass(frozen=True)
class Moment:
    """How a version is written whose rows are of the moment of a call.

    Attributes:
        states: of :func:`persia.checkpoint.saving.states_of_rows`.
        begun: is called when rows may change again.
        stop: once it is set, nothing is written.
        chain: gives the place of the version, once it is known.
    """

    states: Dense
    begun: Callable[[], None]
    stop: threading.Event
    chain: Callable[[], ChainPlace]


def export_moment(
    trial: Trial,
    root: Versions,
    store: Store,
    row_dtype: RowType,
    keep: int,
    moment: Moment,
) -> Exported:
    """Writes a version as :func:`export_store` does, in another thread than
    that of the training. One rank calls it.

    Raises:
        Interrupted: `moment.stop` is set.
        Unavailable: another save took its place, or a server is away.
        StorageError: it cannot be written.
    """
    with _written(root, root.staging()) as temporary:
        rows: Root = files.LocalRoot(temporary / "checkpoint")
        if store.remote:
            rows = root.rows_root()
        stop = moment.stop
        saving.save_into(
            store, rows, moment.states, 1, None, stop, moment.begun
        )
        source = rows, files.find(rows, None)
        chain = moment.chain()
        return _write(
            trial, root, temporary, source, row_dtype, None, keep, chain
        )


def publish_rows(
    trial: Trial,
    path: str | os.PathLike[str] | Versions,
    source: tuple[Root, Found],
    row_dtype: RowType = "fp32",
    publish: Publish | None = None,
    keep: int | None = None,
) -> Exported:
    """Writes a version: a traced model with the rows of a checkpoint.

    Args:
        trial: the model.
        path: the root of the versions.
        source: the root of checkpoints, and the checkpoint.
        row_dtype, publish, keep: as of :func:`export`.
    """
    root = path if isinstance(path, Versions) else versions_of(path)
    check_options(row_dtype, keep)
    check_tables(trial.graph, [t.name for t in source[1].manifest.tables])
    with _writing(root) as temporary:
        return _write(trial, root, temporary, source, row_dtype, publish, keep)


def _writing(root: Versions) -> contextlib.AbstractContextManager[Path]:
    return _written(root, root.writing())


@contextlib.contextmanager
def _written(
    root: Versions, folder: contextlib.AbstractContextManager[Path]
) -> Iterator[Path]:
    try:
        with folder as temporary:
            yield temporary
    except errors.PersiaError:
        raise
    except OSError as error:
        raise errors.StorageError(
            f"exporting into {root} failed: {error}"
        ) from error


def _write(
    trial: Trial,
    root: Versions,
    temporary: Path,
    source: tuple[Root, Found],
    row_dtype: RowType,
    publish: Publish | None,
    keep: int | None,
    chain: ChainPlace | None = None,
) -> Exported:
    found = source[1]
    folder = temporary / "version"
    folder.mkdir()
    graph = trial.graph
    files.write_file(folder / _DENSE, graph.write)
    schema = _write_schema(folder, trial.schema)
    tables = [
        _write_table(folder, i, source, name, row_dtype, publish or Publish())
        for i, name in enumerate(graph.tables)
    ]
    document: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "name": root.next_name(),
        "made": datetime.datetime.now(datetime.UTC).isoformat(),
        "persia": __version__,
        "torch": torch.__version__,
        "checkpoint": found.manifest.id,
        "step": found.manifest.step,
        "updates": found.manifest.updates,
        "publish": (publish or Publish()).model_dump(),
        "tables": [one.model_dump(mode="json") for one in tables],
        "lookups": {n: v.model_dump() for n, v in graph.lookups.items()},
        "form": graph.form.model_dump(),
        "dense": entry_of(folder, _DENSE).model_dump(),
        "schema_file": None if schema is None else schema.model_dump(),
        "tasks": list(trial.tasks),
        "clicks": trial.clicks,
    }
    if chain is not None:
        document["chain"] = chain.model_dump()
    there = root.add(folder, document, keep)
    every = [graph_file.bytes for graph_file in (t.file for t in tables)]
    return Exported(
        path=there,
        version=document["name"],
        rows={t.options.name: t.rows for t in tables},
        left_out={t.options.name: t.trained - t.rows for t in tables},
        bytes=document["dense"]["bytes"] + sum(every),
    )


def _write_schema(folder: Path, schema: Schema | None) -> File | None:
    if schema is None:
        return None
    text = schema.to_yaml().encode()
    files.write_file(folder / _SCHEMA, lambda file: file.write(text))
    return entry_of(folder, _SCHEMA)


def _write_table(
    folder: Path,
    number: int,
    source: tuple[Root, Found],
    name: str,
    row_dtype: RowType,
    publish: Publish,
) -> ExportTable:
    root, found = source
    table = next(t for t in found.manifest.tables if t.name == name)
    file = f"rows-{number:04d}.safetensors"
    count, key = write_rows(
        folder, file, row_dtype, publish, (root, found, table)
    )
    none = {"rows": 0, "files": [], "pushes": [0]}
    return ExportTable(
        options=Table.model_validate(table.model_dump() | none),
        type=row_dtype,
        key=key,
        rows=count,
        trained=table.rows,
        file=entry_of(folder, file),
    )


def check_options(row_dtype: RowType, keep: int | None) -> None:
    if row_dtype not in get_args(RowType):
        raise errors.InvalidArgument(
            f"row_dtype is {row_dtype!r}, need one of "
            f"{', '.join(get_args(RowType))}"
        )
    if keep is not None:
        whole("keep", keep, 1, 2**63 - 1)


def store_of(model: nn.Module, store: Store | None) -> Store:
    stores = stores_of(model)
    if store is not None:
        kind("store", store, Store, "a persia.Store")
        if stores != [store]:
            raise errors.InvalidArgument(
                "store= is not the one store of the model's tables"
            )
    if not stores:
        raise errors.InvalidArgument(
            f"{type(model).__name__} has no table of Persia; persia.convert "
            "leaves embeddings with max_norm or scale_grad_by_freq as they are"
        )
    if len(stores) != 1:
        raise errors.InvalidArgument(
            f"the tables of {type(model).__name__} are in {len(stores)} "
            "stores; an export has those of one: make them with the same "
            "store="
        )
    return stores[0]


def check_tables(graph: Graph, known: Sequence[str]) -> None:
    missing = sorted(set(graph.tables) - set(known))
    if missing:
        raise errors.SchemaMismatch(
            f"the rows of tables {missing} are not there; there are "
            f"{sorted(known)}"
        )
