"""The best model of a training, and when to stop after it."""

from __future__ import annotations

from typing import Any

from persia import errors
from persia.base.check import number
from persia.metrics import Scores

METRICS = {"auc": max, "logloss": min, "gauc": max}


class Best:
    """The best score so far, and how many scores after it were no better.

    Args:
        metric: "auc" or "gauc" (higher is better), or "logloss" (lower is
            better).
        patience: after so many scores in a row that are no better
            :attr:`stalled` is True; None: never.

    Raises:
        InvalidArgument: another metric, or a patience below 1.
    """

    def __init__(
        self, metric: str = "auc", patience: int | None = None
    ) -> None:
        if metric not in METRICS:
            raise errors.InvalidArgument(
                f"metric is {metric!r}; need one of {', '.join(METRICS)}"
            )
        if patience is not None:
            number("patience", patience, 1, 2**31)
        self.metric = metric
        self.patience = patience
        self.value: float | None = None
        """The best score; None before the first one."""
        self.step: int | None = None
        """The optimizer step of the best score."""
        self.since = 0
        """Scores after the best one."""

    @property
    def stalled(self) -> bool:
        """Whether ``patience`` scores in a row were no better."""
        return self.patience is not None and self.since >= self.patience

    def update(self, scores: Scores, step: int) -> bool:
        """Adds the scores of a step; whether they are better than all before.

        NaN, of samples with one label, is never better.

        Raises:
            InvalidArgument: the metric is GAUC, and samples have no groups.
        """
        value: float | None = getattr(scores, self.metric)
        if value is None:
            raise errors.InvalidArgument(
                "GAUC decides which model is best, and samples have no "
                "groups: name their column in the schema, 'group: COLUMN'"
            )
        if value == value and (
            self.value is None
            or METRICS[self.metric](value, self.value) != self.value
        ):
            self.value, self.step, self.since = value, step, 0
            return True
        self.since += 1
        return False

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps, in ``extra`` of ``store.save``."""
        return {
            "metric": self.metric,
            "value": self.value,
            "step": self.step,
            "since": self.since,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from ``state``; one of another metric is left out."""
        if state["metric"] == self.metric:
            self.value, self.step = state["value"], state["step"]
            self.since = state["since"]
