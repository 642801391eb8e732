"""Metrics: exact ones of a whole evaluation, and ones that follow a stream.

Those of clicks take labels of 0 and 1, and *scores* where only the order
matters (the AUC), else *logits* (scores before the sigmoid), all of one
dimension; :class:`TaskMetrics` takes also those of several tasks, in which
NaN is a label that is missing; those of rankings take the scores of several
items for each query. All take tensors or arrays, and touch no table.

:class:`AUC`, :class:`GAUC`, :class:`LogLoss`, :class:`NormalizedEntropy`,
:class:`Calibration`, :class:`RecallAtK` and :class:`NDCGAtK` have
``update()``, ``compute()`` and ``reset()``; where torch.distributed is
initialised, ``compute()`` is over the updates of all ranks, and all ranks call
it.
"""

from persia.metrics.clicks import (
    BinaryMetrics,
    Scores,
    StreamingAUC,
    auc,
    logloss,
)
from persia.metrics.ranking import NDCGAtK, RecallAtK
from persia.metrics.streams import (
    AUC,
    GAUC,
    Calibration,
    LogLoss,
    NormalizedEntropy,
)
from persia.metrics.tasks import TaskMetrics

__all__ = [
    "AUC",
    "GAUC",
    "BinaryMetrics",
    "Calibration",
    "LogLoss",
    "NDCGAtK",
    "NormalizedEntropy",
    "RecallAtK",
    "Scores",
    "StreamingAUC",
    "TaskMetrics",
    "auc",
    "logloss",
]
