"""Trials of an export before the training: it would fail after it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from persia import errors
from persia.checkpoint import files
from persia.data import Schema
from persia.serving.exporting import Trial
from persia.serving.folder import versions_of
from persia.serving.trained import check_apart, trial_of
from persia.train.sources import schema_of

if TYPE_CHECKING:
    from persia.train.run import Run


def check_export(run: Run, model: torch.nn.Module) -> None:
    """Makes the graph of an export, and throws it away.

    Raises:
        InvalidArgument: there is none, or no checkpoint to export.
        StorageError: the export could not be written.
    """
    config = run.config
    if config.save is None:
        raise errors.InvalidArgument(
            "`export_to` exports the last checkpoint: give `save`, too"
        )
    versions = versions_of(config.export_to or "")
    check_apart(versions, files.root_of(config.save))
    files.check(versions)
    saved = schema_of(run.train)
    schema = None if saved is None else Schema.of_checkpoint(saved)
    train = run.train
    trial_of(model, train.keys, train.dense_features, schema, train.tasks)


def trial_to_publish(run: Run, model: torch.nn.Module) -> Trial:
    """The graph of a model that is published while it trains.

    Raises:
        InvalidArgument: there is none.
        StorageError: versions could not be written.
    """
    config, train = run.config, run.train
    versions = versions_of(config.publish_to or "")
    if config.save is not None:
        check_apart(versions, files.root_of(config.save))
    files.check(versions)
    saved = schema_of(train)
    schema = None if saved is None else Schema.of_checkpoint(saved)
    return trial_of(
        model, train.keys, train.dense_features, schema, train.tasks
    )
