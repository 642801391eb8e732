"""Exports: models that answer without a store, and who serves them.

:func:`persia.export` and :func:`persia.load_model` are the way in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from persia.base.lazy import lazily

if TYPE_CHECKING:
    from persia.serving.deltas.publisher import Publisher
    from persia.serving.exporting import Exported
    from persia.serving.model import ExportedModel
    from persia.serving.rows import Publish

__all__ = ["Exported", "ExportedModel", "Publish", "Publisher"]

__getattr__, __dir__ = lazily(
    __name__,
    {
        "Exported": "exporting",
        "ExportedModel": "model",
        "Publish": "rows",
        "Publisher": "deltas.publisher",
    },
)
