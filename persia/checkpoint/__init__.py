"""Checkpoints: a folder per step that is whole or not there.

:meth:`persia.Store.save` and :meth:`persia.Store.load` are the way in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from persia.checkpoint.store import Checkpoint, check, read_extra

__all__ = ["Checkpoint", "check", "read_extra"]


def __getattr__(name: str) -> Any:
    # Imported when first asked for: a server reads manifests without torch.
    if name not in __all__:
        raise AttributeError(f"module 'persia.checkpoint' has no {name!r}")
    from persia.checkpoint import store

    return getattr(store, name)
