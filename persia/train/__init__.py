"""Training of click models: what ``persia train`` does, for scripts and
notebooks.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from persia.train.logs import CSVLog, Log, TensorBoardLog, health
    from persia.train.saved import Trained, load
    from persia.train.trainer import Clock, Every, Progress, Trainer

__all__ = [
    "CSVLog",
    "Clock",
    "Every",
    "Log",
    "Progress",
    "TensorBoardLog",
    "Trained",
    "Trainer",
    "health",
    "load",
]

# Imported when first asked for: the command line reads the configuration of
# a training without torch, whose import takes seconds.
_WHERE = {
    "CSVLog": "logs",
    "Clock": "trainer",
    "Every": "trainer",
    "Log": "logs",
    "Progress": "trainer",
    "TensorBoardLog": "logs",
    "Trained": "saved",
    "Trainer": "trainer",
    "health": "logs",
    "load": "saved",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'persia.train' has no {name!r}")
    module = importlib.import_module(f"persia.train.{_WHERE[name]}")
    return getattr(module, name)
