"""Training of click models: what ``persia train`` does, for scripts and
notebooks."""

from persia.train.logs import CSVLog, Log, TensorBoardLog, health
from persia.train.trainer import Clock, Every, Progress, Trainer

__all__ = [
    "CSVLog",
    "Clock",
    "Every",
    "Log",
    "Progress",
    "TensorBoardLog",
    "Trainer",
    "health",
]
