"""Models that ``persia train`` has saved."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

import persia
from persia import checkpoint, errors
from persia.checkpoint.saving import load_dense
from persia.data import Files, Schema, Table
from persia.data.batches.batch import Batch
from persia.metrics import Scores, TaskMetrics
from persia.serving.folder import is_export
from persia.serving.model import ExportedModel, load_model
from persia.train.config import TrainConfig, resolve
from persia.train.extra import Extra
from persia.train.model import device_of, make_model, make_optimizer
from persia.train.sources import no_sample, open_data, open_files
from persia.train.tasks import matched

_CPU = torch.device("cpu")


@dataclasses.dataclass(frozen=True)
class Trained:
    """A model of ``persia train``, with its tables.

    Attributes:
        model: called as ``model(batch.dense, batch.ids)``, gives logits [B],
            or [B, tasks]; in eval mode.
        store: its tables, in this process or on servers; it is read-only
            there. None: those of an export, which the model has.
        config: the options of its training; None: of an export, which does
            not keep them.
        schema: of the files that it was trained on; None: generated data, or
            Criteo's lines.
        tasks: the names of the labels, where samples have several; else none.
        device: of the dense part; batches are moved there.
    """

    model: nn.Module
    store: persia.Store | None
    config: TrainConfig | None
    schema: Schema | None
    tasks: Sequence[str] = ()
    device: torch.device = _CPU

    def read(
        self,
        paths: str,
        batch_size: int = 1024,
        *,
        labels: bool = True,
        strict: bool = False,
    ) -> Files:
        """Files of the same columns as those of the training.

        Args:
            paths: a file, glob or URL.
            batch_size: samples a batch.
            labels: False: the columns of labels and of the group are not
                read; they may be missing.
            strict: raise MalformedData at a malformed line.
        """
        schema = self.schema if labels else self._without_labels()
        return open_files(paths, schema, batch_size, strict=strict)

    def _without_labels(self) -> Schema | None:
        without = {"label": None, "group": None}
        return self.schema and self.schema.model_copy(update=without)

    def held_out(self) -> Any:
        """The samples that the training held out, read by its schema; None
        if there were none. Its files must be where they were."""
        if self.config is None:
            return None
        return open_data(self.config, schema=self.schema)[1]

    @torch.no_grad()
    def logits(self, batch: Batch) -> torch.Tensor:
        """What the model says of a batch: float32, [B] or [B, tasks], in the
        memory of the host."""
        if self.device.type != "cpu":
            batch = batch.to(self.device)
        logits: torch.Tensor = self.model(batch.dense, batch.ids)
        return logits.float().cpu()

    def predict(self, data: Any) -> torch.Tensor:
        """Probabilities of a click, float32.

        Args:
            data: a batch; or all that :class:`persia.data.Table` takes, a
                DataFrame for one, with or without the columns of the labels.

        Returns:
            [B], in the order of the rows; [B, tasks] where there are several
            labels.

        Raises:
            InvalidArgument: rows of columns, and the model was trained on
                data without a schema.
            MalformedData: a row is malformed.
            SchemaMismatch: a column is missing, or has another type.
        """
        if not isinstance(data, Batch):
            schema = self._without_labels()
            if schema is None:
                raise errors.InvalidArgument(
                    "the model was not trained on columns with names: give "
                    "predict() a batch of `read()`"
                )
            table = Table(data, schema, strict=True)  # each row has one
            parts = [self.predict(batch) for batch in table]
            return torch.cat([self._empty(), *parts])
        logits = self.logits(data)
        if not self.tasks:
            logits = logits.reshape(len(logits))
        return logits.sigmoid()

    def has_rows(self, table: str, ids: torch.Tensor) -> torch.Tensor:
        """Which of ids [n] have a row in a table: bool [n]."""
        if self.store is not None:
            return self.store.contains(table, ids)
        assert isinstance(self.model, ExportedModel)
        return self.model.has_rows(table, ids)

    def _empty(self) -> torch.Tensor:
        return (
            torch.zeros(0, len(self.tasks)) if self.tasks else torch.zeros(0)
        )

    def evaluate(self, batches: Any) -> Scores:
        """Scores the model on batches with labels; a sample counts by its
        weight, where the batches have weights.

        Raises:
            InvalidArgument: a batch has no label.
            MalformedData: there is no sample.
        """
        metrics = TaskMetrics(self.tasks)
        for batch in batches:
            if batch.label is None:
                raise errors.InvalidArgument("the data have no label")
            logits = matched(self.logits(batch), batch.label)
            metrics.update(logits, batch.label, batch.weight, batch.group)
        scores = metrics.compute()
        if not scores.samples:
            raise errors.MalformedData(no_sample(batches))
        return scores


def load(
    path: str | os.PathLike[str],
    step: int | None = None,
    *,
    servers: str | None = None,
    namespace: str | None = None,
    device: str = "cpu",
) -> Trained:
    """Loads what ``persia train --save`` wrote.

    Args:
        path: the checkpoint root, or the folder of a step.
        step: of the checkpoint in the root; default: the latest.
        servers: take the rows from these parameter servers, ``host:port``
            with commas between, which may be in training, and the dense part
            alone from the checkpoint. None: all from the checkpoint, into
            this process.
        namespace: of the tables on these servers; default: that of
            ``PERSIA_NAMESPACE``, else "default".
        device: of the dense part: "cpu", "cuda", or "auto", which is "cuda"
            where there is one.

    Raises:
        CorruptFile: a file is truncated or altered.
        InvalidArgument: there is no such device.
        SchemaMismatch: it is a checkpoint of something else, or the servers
            have other tables.
        StorageError: there is no checkpoint, or it cannot be read.
        Unavailable: a server does not answer.
    """
    if is_export(path):
        return _of_export(path, step, servers, device)
    place = device_of(device)
    trained, store, _ = _made(path, step, servers, namespace)
    model = trained.model
    if servers is None:
        store.load(path, step=step, model=model)
    else:
        load_dense(path, model, step)
    model = model.to(place).eval()
    return dataclasses.replace(trained, model=model, device=place)


def without_rows(
    path: str | os.PathLike[str], step: int | None = None
) -> tuple[Trained, persia.Store, Extra]:
    """The same, with the dense part alone: the tables of the store, which is
    the caller's to close, have no rows."""
    trained, store, extra = _made(path, step, None, None)
    load_dense(path, trained.model, step)
    return trained, store, extra


def _made(
    path: str | os.PathLike[str],
    step: int | None,
    servers: str | None,
    namespace: str | None,
) -> tuple[Trained, persia.Store, Extra]:
    """The model of a checkpoint, before anything of it is loaded."""
    extra = _read(path, step)
    config = resolve(extra.options)
    if extra.keys is None:
        raise errors.SchemaMismatch(
            f"{path} was written by an older Persia, which kept no names of "
            "features: continue it with `resume`, which adds them"
        )
    store = persia.Store(
        seed=config.seed,
        servers=servers or "embedded",
        namespace=namespace,
        rank=0,  # under torchrun, too: this process alone
        world_size=1,
        read_only=servers is not None,
        optimizer=make_optimizer(config),
    )
    model = make_model(
        config, store, extra.keys, extra.dense_features, extra.tasks
    )
    trained = Trained(model, store, config, _schema(extra), extra.tasks)
    return trained, store, extra


def _of_export(
    path: str | os.PathLike[str],
    step: int | None,
    servers: str | None,
    device: str,
) -> Trained:
    """A model that was exported."""
    if step is not None or servers is not None:
        raise errors.InvalidArgument(
            f"{path} is an export, which has neither steps nor servers: its "
            "rows are its own; give the folder of another version for that"
        )
    if device_of(device).type != "cpu":
        raise errors.InvalidArgument(
            f"{path} is an export, and its graph is one of the CPU: give the "
            "checkpoint for another device"
        )
    model = load_model(path)
    if not model.manifest.clicks:
        raise errors.SchemaMismatch(
            f"{path} is no model of clicks: call persia.load_model(path) as "
            "the model that was exported"
        )
    return Trained(model, None, None, model.schema, model.tasks)


def saved_options(
    path: str | os.PathLike[str], step: int | None = None
) -> dict[str, Any]:
    """The options of the run that wrote a checkpoint; arguments and errors
    are those of :func:`load`."""
    return _read(path, step).options


def saved_schema(
    path: str | os.PathLike[str], step: int | None = None
) -> Schema | None:
    """The schema of the data that a checkpoint was trained on, if they had
    one; arguments and errors are those of :func:`load`."""
    return _schema(_read(path, step))


def _schema(extra: Extra) -> Schema | None:
    saved = extra.schema
    return None if saved is None else Schema.of_checkpoint(saved)


def _read(path: str | os.PathLike[str], step: int | None) -> Extra:
    return Extra.of(checkpoint.read_extra(path, step), path)
