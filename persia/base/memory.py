"""How this process gives memory back to the system."""

from __future__ import annotations

import ctypes
import os

__all__ = ["keep_memory"]

_MAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1  # of glibc's malloc.h
_MAP_FROM = 32 << 20  # bytes of a block that is mapped alone
_KEEP = 256 << 20  # bytes at the end of an arena that stay


def keep_memory() -> bool:
    """Keeps the memory of one batch for the next one.

    glibc gives blocks of megabytes back at once, and clears their pages again
    for the next batch. The setting is of the whole process, so commands call
    this, and the library does not.

    Returns:
        whether it is set: not where the user has set it, nor without glibc.
    """
    given = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")
    if any(name in os.environ for name in given):
        return False
    if "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(
        mallopt(_MAP_THRESHOLD, _MAP_FROM) & mallopt(_TRIM_THRESHOLD, _KEEP)
    )
