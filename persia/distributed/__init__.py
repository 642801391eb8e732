"""Processes of a job and how they find each other: parameter servers,
embedding workers and ranks, ``persia launch``, addresses, TLS and tokens.

Nothing here imports torch before it must: a parameter server has none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from persia.base.lazy import lazily

if TYPE_CHECKING:
    from persia.distributed.certs import write_certificates
    from persia.distributed.on_ray import run_on_ray
    from persia.distributed.security import Security

__all__ = ["Security", "run_on_ray", "write_certificates"]

__getattr__, __dir__ = lazily(
    __name__,
    {
        "Security": "security",
        "run_on_ray": "on_ray",
        "write_certificates": "certs",
    },
)
