"""Numbers of things in texts."""

from __future__ import annotations


def counted(n: int, what: str) -> str:
    """ "1 file", "2,000 files", "0 batches"."""
    many = "es" if what.endswith("ch") else "s"
    return f"{n:,} {what}{'' if n == 1 else many}"
