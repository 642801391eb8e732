"""How two versions of a model differ."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from persia.serving.model import ExportedModel


def compare(one: ExportedModel, other: ExportedModel) -> list[dict[str, Any]]:
    """The rows of two versions, table by table.

    Returns:
        A dict for each table that either has: ``table``; how many rows are in
        one alone (``only_a``, ``only_b``), have another vector (``changed``)
        or the same; and how far vectors of common ids moved, as L2 norms
        (``mean_move``, ``largest_move``; 0 where no id is common).
    """
    tables = [t.options.name for t in one.manifest.tables]
    theirs = [t.options.name for t in other.manifest.tables]
    every = [*tables, *(name for name in theirs if name not in tables)]
    return [_compared(name, one, other) for name in every]


def _rows(model: ExportedModel, table: str) -> int:
    found = (t for t in model.manifest.tables if t.options.name == table)
    return next((t.rows for t in found), 0)


def _compared(
    table: str, one: ExportedModel, other: ExportedModel
) -> dict[str, Any]:
    counts = _rows(one, table), _rows(other, table)
    common = changed = 0
    total = largest = 0.0
    if all(counts):
        for ids, vectors in one.rows(table):
            wanted = torch.from_numpy(ids)
            there = other.has_rows(table, wanted).numpy()
            now = other.vectors(table, wanted[there]).numpy()
            before = vectors[there]
            if now.shape != before.shape:  # of another dim
                move = np.full(len(now), np.inf)
            else:
                move = np.linalg.norm(now - before, axis=1)
            common += len(now)
            changed += int((move > 0).sum())
            total += float(move.sum())
            largest = max(largest, float(move.max(initial=0)))
    return {
        "table": table,
        "only_a": counts[0] - common,
        "only_b": counts[1] - common,
        "changed": changed,
        "same": common - changed,
        "mean_move": total / common if common else 0.0,
        "largest_move": largest,
    }
