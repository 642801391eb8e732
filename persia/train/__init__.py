"""Training of click models: what ``persia train`` does, for scripts and
notebooks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from persia.base.lazy import lazily

if TYPE_CHECKING:
    from persia.train.best import Best
    from persia.train.elastic import Continued, Elastic
    from persia.train.logs import CSVLog, Log, TensorBoardLog, health
    from persia.train.saved import Trained, load
    from persia.train.trainer import Clock, Every, Progress, Trainer

__all__ = [
    "Best",
    "CSVLog",
    "Clock",
    "Continued",
    "Elastic",
    "Every",
    "Log",
    "Progress",
    "TensorBoardLog",
    "Trained",
    "Trainer",
    "health",
    "load",
]

__getattr__, __dir__ = lazily(
    __name__,
    {
        "Best": "best",
        "CSVLog": "logs",
        "Clock": "trainer",
        "Continued": "elastic",
        "Elastic": "elastic",
        "Every": "trainer",
        "Log": "logs",
        "Progress": "trainer",
        "TensorBoardLog": "logs",
        "Trained": "saved",
        "Trainer": "trainer",
        "health": "logs",
        "load": "saved",
    },
)
