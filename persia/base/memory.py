"""How this process gives memory back to the system."""

from __future__ import annotations

from persia import _core

_KEEP = 256 << 20  # bytes at the end of each of glibc's arenas


def keep_memory() -> bool:
    """Keeps the memory of one batch for the next one.

    Without it glibc returns blocks of megabytes, and clears their pages again
    for the next batch. The setting is of the whole process, so commands call
    this, and the library does not.

    Returns:
        whether it is set: not where the user has set it, nor without glibc.
    """
    return _core.keep_memory(_KEEP)
