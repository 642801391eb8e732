"""Trials of an export before the training: it would fail after it."""

from __future__ import annotations

import torch

from persia import errors
from persia.checkpoint import files
from persia.data import Dataset, Schema
from persia.serving.exporting import Trial
from persia.serving.folder import versions_of
from persia.serving.trained import check_apart, trial_of
from persia.train.config import TrainConfig
from persia.train.sources import schema_of


def check_export(
    config: TrainConfig, train: Dataset, model: torch.nn.Module
) -> None:
    """Makes the graph of an export, and throws it away.

    Raises:
        InvalidArgument: there is none, or no checkpoint to export.
        StorageError: the export could not be written.
    """
    if config.save is None:
        raise errors.InvalidArgument(
            "`export_to` exports the last checkpoint: give `save`, too"
        )
    _trial(config, config.export_to or "", train, model)


def trial_to_publish(
    config: TrainConfig, train: Dataset, model: torch.nn.Module
) -> Trial:
    """The graph of a model that is published while it trains.

    Raises:
        InvalidArgument: there is none.
        StorageError: versions could not be written.
    """
    return _trial(config, config.publish_to or "", train, model)


def _trial(
    config: TrainConfig, root: str, train: Dataset, model: torch.nn.Module
) -> Trial:
    versions = versions_of(root)
    if config.save is not None:
        check_apart(versions, files.root_of(config.save))
    files.check(versions)
    saved = schema_of(train)
    schema = None if saved is None else Schema.of_checkpoint(saved)
    return trial_of(
        model, train.keys, train.dense_features, schema, train.tasks
    )
