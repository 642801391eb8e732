"""Exports: models that answer without a store, and who serves them.

:func:`persia.export` and :func:`persia.load_model` are the way in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from persia.base.lazy import lazily

if TYPE_CHECKING:
    from persia.serving.exporting import Exported, export
    from persia.serving.model import ExportedModel, load_model
    from persia.serving.rows import Publish

__all__ = ["Exported", "ExportedModel", "Publish", "export", "load_model"]

__getattr__, __dir__ = lazily(
    __name__,
    {
        "Exported": "exporting",
        "ExportedModel": "model",
        "Publish": "rows",
        "export": "exporting",
        "load_model": "model",
    },
)
