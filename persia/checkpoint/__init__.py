"""Checkpoints: a folder per step that is whole or not there.

:meth:`persia.Store.save` and :meth:`persia.Store.load` are the way in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from persia.base.lazy import lazily

if TYPE_CHECKING:
    from persia.checkpoint.saving import Checkpoint, read_extra

__all__ = ["Checkpoint", "read_extra"]

# A server reads manifests without torch.
__getattr__, __dir__ = lazily(
    __name__,
    {"Checkpoint": "saving", "read_extra": "saving"},
)
