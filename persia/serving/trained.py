"""Exports of models that ``persia train`` has saved, or is about to train."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from persia import errors
from persia.checkpoint import files
from persia.data.batches.batch import Batch
from persia.data.batches.jagged import JaggedBatch
from persia.data.schema.schema import Schema
from persia.serving.exporting import (
    Exported,
    Trial,
    publish_rows,
    trace_model,
)
from persia.serving.folder import Versions, versions_of
from persia.serving.rows import Publish, RowType


def trial_of(
    model: nn.Module,
    keys: Sequence[str],
    dense_features: int,
    schema: Schema | None,
    tasks: Sequence[str],
) -> Trial:
    """A model of ``persia train``, traced; there are no data yet.

    Args:
        model: called as ``model(dense, ids)``; it gives logits.
        keys: names of the id features.
        dense_features: how many there are.
        schema: of the data; None: each feature has one id a sample.
        tasks: names of the labels, where there are several.

    Raises:
        InvalidArgument: torch.export makes no graph of it.
    """
    several = [] if schema is None else [c.feature for c in schema.bags]
    samples = 3
    ones = torch.ones(samples, dtype=torch.int64)
    pairs = torch.ones(2 * samples, dtype=torch.int64), ones * 2
    ids = {key: pairs if key in several else ones for key in keys}
    example = Batch(
        torch.zeros(samples, dense_features) if dense_features else None,
        JaggedBatch.from_dict(ids),
    )
    graph = trace_model(model, example, schema, output="logits")
    return Trial(graph, schema, tuple(tasks), clicks=True)


def export_checkpoint(
    root: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    step: int | None = None,
    row_dtype: RowType = "fp32",
    publish: Publish | None = None,
    keep: int | None = None,
) -> Exported:
    """Exports a checkpoint of ``persia train``, whose rows are read file by
    file.

    Args:
        root: of the checkpoints, or the folder of a step.
        path: the root of the versions, a folder or the URL of one in a bucket.
        step: of the checkpoint in the root; default: the latest.
        row_dtype, publish, keep: as of :func:`persia.export`.

    Raises:
        CorruptFile: a file is truncated or altered.
        InvalidArgument: torch.export makes no graph of the model.
        SchemaMismatch: ``persia train`` did not write it: load it, and call
            :func:`persia.export` with the model.
        StorageError: it cannot be read, or the export not be written.
    """
    from persia.train.saved import without_rows

    versions = versions_of(path)
    place = files.root_of(root)
    check_apart(versions, place)
    found = files.find(place, step)
    # The same one, whatever is saved meanwhile.
    trained, store, extra = without_rows(root, _step_of(found))
    try:
        trial = trial_of(
            trained.model,
            extra.keys or [],
            extra.dense_features,
            trained.schema,
            trained.tasks,
        )
        return publish_rows(
            trial, versions, (place, found), row_dtype, publish, keep
        )
    finally:
        store.close()


def step_of(
    root: str | os.PathLike[str], step: int | None = None
) -> int | None:
    """The step of a checkpoint that is to be read again; None: ``root`` is
    its folder."""
    return _step_of(files.find(files.root_of(root), step))


def _step_of(found: files.Found) -> int | None:
    return found.manifest.step if found.name else None


def check_checkpoint(
    root: str | os.PathLike[str],
    path: str | os.PathLike[str],
    step: int | None = None,
) -> str:
    """What :func:`export_checkpoint` would write; its arguments and errors,
    as far as they show without the graph."""
    versions, place = versions_of(path), files.root_of(root)
    check_apart(versions, place)
    files.check(versions)
    found = files.find(place, step)
    rows = sum(table.rows for table in found.manifest.tables)
    return (
        f"{rows:,} rows of {len(found.manifest.tables)} tables of "
        f"{found.folder} as {versions.at(versions.next_name())}"
    )


def check_apart(versions: Versions, place: files.Root) -> None:
    """Raises InvalidArgument if an export would lie among checkpoints."""
    one, other = versions.at(""), place.at("")
    if isinstance(one, Path) and isinstance(other, Path):
        one, other = one.resolve(), other.resolve()
    if one == other:
        raise errors.InvalidArgument(
            f"{versions} has checkpoints: export into another folder"
        )
