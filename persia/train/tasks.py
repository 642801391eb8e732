"""Losses and running scores of one label a sample, or of several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from persia import errors
from persia.data.batches.batch import Batch
from persia.metrics import StreamingAUC


def label_of(batch: Batch) -> Tensor:
    """The labels of a batch: [B], or [B, tasks].

    Raises:
        InvalidArgument: it has none.
    """
    if batch.label is None:
        raise errors.InvalidArgument(
            "the data have no label: a model is neither trained nor scored "
            "without"
        )
    return batch.label


def check_clicks(label: Tensor) -> None:
    """Raises unless labels are 0 or 1; of several, NaN is one that a sample
    does not have.

    Raises:
        InvalidArgument: one is something else.
    """
    wrong = (label != 0) & (label != 1)
    if not bool(wrong.any()):
        return
    if label.ndim > 1:
        wrong &= ~label.isnan()
    for sample, *task in wrong.nonzero()[:1].tolist():
        raise errors.InvalidArgument(
            f"label {sample} of a batch is {float(label[sample, *task]):g}: a "
            "Trainer trains cross entropy, which needs 0 or 1. Make them of a "
            "number by a threshold ('label: {column: ..., threshold: 4}' in a "
            "schema), or train with a loss and a loop of your own"
        )


def matched(logits: Tensor, label: Tensor) -> Tensor:
    """Logits in the shape of their labels; [B, 1] and [B] are alike.

    Raises:
        ShapeError: there are more or fewer of them.
    """
    if logits.shape == label.shape:
        return logits
    if logits.shape[:1] != label.shape[:1] or logits.numel() != label.numel():
        raise errors.ShapeError(
            f"the model gives logits {list(logits.shape)} for labels "
            f"{list(label.shape)}; need a logit for each label"
        )
    return logits.reshape(label.shape)


def task_loss(logits: Tensor, label: Tensor, weight: Tensor | None) -> Tensor:
    """The mean cross entropy, each sample's times its weight; of several
    tasks the sum of these means over the samples that have the label.

    Args:
        logits: [B], or [B, tasks].
        label: of the same shape; in [B, tasks] NaN is no label.
        weight: [B], or None.
    """
    if label.ndim == 1:
        return binary_cross_entropy_with_logits(logits, label, weight=weight)
    has = ~label.isnan()
    each = binary_cross_entropy_with_logits(
        logits,
        label.nan_to_num(),
        weight=None if weight is None else weight[:, None],
        reduction="none",
    )
    each = torch.where(has, each, 0.0)
    return (each.sum(0) / has.sum(0).clamp(min=1)).sum()


class RunningAUC:
    """The AUC of each task over a stream.

    Args:
        tasks: the names of the columns of labels [n, tasks].
    """

    def __init__(self, tasks: Sequence[str] = ()) -> None:
        self._names = list(tasks)
        self.tasks: list[StreamingAUC] = []

    def update(self, logits: Tensor, labels: Tensor, weights: Tensor) -> None:
        """Adds logits and labels [n] or [n, tasks], and weights [n]; labels
        that are NaN are left out."""
        tasks = labels.shape[1] if labels.ndim == 2 else 1
        while len(self.tasks) < tasks:
            self.tasks.append(StreamingAUC())
        for i, auc in enumerate(self.tasks):
            x, y = (v if v.ndim == 1 else v[:, i] for v in (logits, labels))
            has = ~y.isnan()
            auc.update(x[has], y[has], weights[has])

    def compute(self) -> float:
        """The mean of the AUCs of the tasks."""
        aucs = [auc.compute() for auc in self.tasks]
        return sum(aucs) / len(aucs) if aucs else float("nan")

    def by_task(self) -> Mapping[str, float]:
        """The AUC of each task, by its name, where tasks have names."""
        return {
            name: auc.compute()
            for name, auc in zip(self._names, self.tasks, strict=False)
        }
