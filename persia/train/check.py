"""What a training would do, found out without training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import persia
from persia import errors
from persia.checkpoint import files
from persia.train.config import TrainConfig, resolve
from persia.train.model import device_of, make_model, make_optimizer
from persia.train.roots import Roots
from persia.train.sources import (
    check_best,
    check_test,
    no_sample,
    open_data,
)
from persia.train.trials import check_export, trial_to_publish


def check_run(config: TrainConfig, resume: str | None, overwrite: bool) -> str:
    """Opens the data, and looks a first batch up in a model whose tables are
    in this process. It connects to no server and writes nothing.

    Args:
        config: of the run.
        resume: the checkpoint that it would continue from.
        overwrite: whether its first save would remove others.

    Returns:
        What would be done, in a line.

    Raises:
        PersiaError: any that the run would raise before its first step.
    """
    Roots.of(config, resume, overwrite)
    if config.save is not None:
        files.check(files.root_of(config.save))
    device_of(config.device)
    train, test = open_data(config)
    check_test(config, test)
    check_best(config, train, test)
    batch = next(iter(train), None)
    if batch is None:
        raise errors.MalformedData(no_sample(train))
    with persia.Store(
        make_optimizer(config), servers="embedded", rank=0, world_size=1
    ) as store:
        model = make_model(
            config, store, train.keys, train.dense_features, train.tasks
        )
        with torch.no_grad():
            model(batch.dense, batch.ids)
        if config.export_to is not None:
            check_export(config, train, model)
        if config.publish_to is not None:
            trial_to_publish(config, train, model)
    text = (
        f"{config.model} of dim {config.dim} on {config.data}: "
        f"{len(train.keys)} id features, {train.dense_features} dense"
    )
    return text if resume is None else f"{text}; continues {resume}"


def check_data(
    data: str,
    schema: str | None = None,
    label: str | None = None,
    *,
    batch_size: int = 1024,
    malformed_limit: float = 0.01,
    watch: Callable[[Any], Any] = lambda batches: batches,
) -> dict[str, Any]:
    """Reads all samples.

    Args:
        data: a file, glob or URL, or NAME:PATH, as ``persia train`` has it.
        schema: a YAML file or the name of a preset; None: inferred.
        label: columns of labels, with commas between; None: as the schema
            says.
        batch_size: samples read at a time.
        malformed_limit: the share of the samples that one rule may leave out.
        watch: is called with the batches, and gives what is iterated over in
            their place, to show how far it is.

    Returns:
        "samples"; "positive" by label; "features", "dense"; "malformed" and
        "malformed_lines".

    Raises:
        InvalidArgument: the label is none of clicks.
        LimitReached: too many samples are malformed.
        SchemaMismatch: a file has other columns.
        StorageError, CorruptFile: a file cannot be read.
    """
    options: dict[str, Any] = {
        "data": data,
        "schema": schema,
        "label": label,
        "eval_split": 0.0,
        "batch_size": batch_size,
        "malformed_limit": malformed_limit,
    }
    given = {k: v for k, v in options.items() if v is not None}
    source: Any = open_data(resolve(given))[0]
    if not hasattr(source, "malformed_lines"):
        raise errors.InvalidArgument(
            f"{data} is not of files: name a file, a glob or a URL"
        )
    samples, positive = 0, dict.fromkeys(source.schema.tasks, 0)
    for batch in watch(source):
        samples += len(batch)
        clicks = (batch.label.reshape(len(batch), -1) > 0).sum(0)
        for name, count in zip(positive, clicks.tolist(), strict=True):
            positive[name] += count
    return {
        "samples": samples,
        "positive": positive,
        "features": list(source.keys),
        "dense": source.dense_features,
        "malformed": source.malformed,
        "malformed_lines": list(source.malformed_lines),
    }
