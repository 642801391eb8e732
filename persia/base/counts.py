"""Numbers of things in texts."""

from __future__ import annotations


def counted(n: int, what: str) -> str:
    """ "1 file", "2,000 files", "0 batches", "2 epochs"."""
    many = "es" if what == "batch" else "s"
    return f"{n:,} {what}{'' if n == 1 else many}"
