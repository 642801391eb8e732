"""The process of ``persia serve ps``: its shards behind one address."""

from __future__ import annotations
