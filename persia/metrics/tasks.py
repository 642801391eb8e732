"""Scores of several tasks at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from persia import errors
from persia.metrics.clicks import BinaryMetrics, Groups, Scores, Values

_MEANS = ("auc", "logloss", "normalized_entropy", "calibration", "gauc")


class TaskMetrics:
    """Scores an evaluation of one task or several exactly.

    Labels [n] are one task, which needs no name. Of labels [n, tasks] NaN is
    one that the sample does not have: the task is scored without the sample.
    Memory: see :class:`BinaryMetrics`, for each task.

    Args:
        tasks: the names of the columns of labels [n, tasks]; by default
            their numbers, from "0".
    """

    def __init__(self, tasks: Sequence[str] = ()) -> None:
        self._names = list(tasks)
        self.reset()

    def reset(self) -> None:
        """Forgets all updates."""
        self._tasks: dict[str, BinaryMetrics] = {
            name: BinaryMetrics() for name in self._names
        }
        self._samples = 0

    def update(
        self,
        logits: Values,
        labels: Values,
        weights: Values | None = None,
        groups: Groups | None = None,
    ) -> None:
        """Adds one batch: logits and labels [n] or [n, tasks], and where
        samples have them weights [n] and groups [n], integers.

        Raises:
            ShapeError: logits and labels differ in their shapes.
            InvalidArgument: a label is neither 0 nor 1 (nor NaN, of several).
        """
        found = _columns(logits, labels, self._names)
        for name, (x, y) in found.items():
            kept = ~np.isnan(y) if name else np.ones(len(y), bool)
            every = bool(kept.all())
            one = self._tasks.setdefault(name, BinaryMetrics())
            one.update(
                x if every else x[kept],
                y if every else y[kept],
                weights if every else _some(weights, kept),
                groups if every else _some(groups, kept),
            )
        self._samples += len(labels)

    def gather(self) -> None:
        """Adds what the other ranks of the job have added; all call it."""
        every: list[Any] = [None] * torch.distributed.get_world_size()
        mine = self._samples, list(self._tasks)
        torch.distributed.all_gather_object(every, mine)
        self._samples = sum(samples for samples, _ in every)
        for name in dict.fromkeys(n for _, names in every for n in names):
            self._tasks.setdefault(name, BinaryMetrics()).gather()

    def compute(self) -> Scores:
        """The scores of everything added so far."""
        scores = {name: m.compute() for name, m in self._tasks.items()}
        if not scores:
            return BinaryMetrics().compute()
        if list(scores) == [""]:
            return dataclasses.replace(scores[""], samples=self._samples)
        return Scores(
            samples=self._samples,
            positives=sum(one.positives for one in scores.values()),
            tasks=scores,
            **_means(scores),
        )


def _means(scores: Mapping[str, Scores]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name in _MEANS:
        values = [getattr(one, name) for one in scores.values()]
        out[name] = None if None in values else float(np.mean(values))
    return out


def _array(values: Values) -> npt.NDArray[np.float64]:
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu().double().numpy()
    return np.asarray(values, np.float64)


def _some(values: Any, kept: Any) -> Any:
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu().numpy()
    return None if values is None else np.asarray(values)[kept]


def _columns(
    logits: Values, labels: Values, tasks: Sequence[str] = ()
) -> dict[str, tuple[Any, Any]]:
    """Logits and labels [n] of each task, by its name; that of labels [n] is
    the empty one.

    Raises:
        ShapeError: logits and labels differ in their shapes, or there are
            other numbers of names and of tasks.
    """
    x, y = _array(logits), _array(labels)
    if x.shape != y.shape or x.ndim not in (1, 2):
        raise errors.ShapeError(
            f"metrics: logits {list(x.shape)} and labels {list(y.shape)}; "
            "need [n], or [n, tasks], of both"
        )
    if y.ndim == 1:
        return {"": (x, y)}
    names = list(tasks) or [str(i) for i in range(y.shape[1])]
    if len(names) != y.shape[1]:
        raise errors.ShapeError(
            f"metrics: labels {list(y.shape)}, but the tasks are {names}"
        )
    return {name: (x[:, i], y[:, i]) for i, name in enumerate(names)}
