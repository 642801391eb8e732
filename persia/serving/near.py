"""The rows of a table that are nearest to one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from persia.errors import InvalidArgument

By = Literal["cosine", "dot"]
#: Ids int64 [n] and vectors float32 [n, dim], piece by piece.
Rows = Iterable[tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]]


def nearest(
    rows: Callable[[], Rows], id: int, count: int, by: By
) -> list[tuple[int, float]]:
    """Compares a row with all others of its table.

    Args:
        rows: all rows of the table; they are read twice.
        id: of the row, as tables have it, with a sign.
        count: neighbours at most.
        by: "cosine" of the angle (0 where a vector is zero), or "dot", the
            product of two vectors.

    Returns:
        The ids of the nearest rows with their scores, the nearest first; of
        equal scores the smaller id.

    Raises:
        InvalidArgument: the id has no row.
    """
    vector = _vector(rows(), id)
    best, scores = np.zeros(0, np.int64), np.zeros(0)
    for ids, vectors in rows():
        others = ids != id
        best = np.concatenate([best, ids[others]])
        found = _scores(vectors[others].astype(np.float64), vector, by)
        scores = np.concatenate([scores, found])
        order = np.lexsort((best, -scores))[:count]
        best, scores = best[order], scores[order]
    return list(zip(best.tolist(), scores.tolist(), strict=True))


def _vector(rows: Rows, id: int) -> npt.NDArray[np.float64]:
    for ids, vectors in rows:
        at = np.flatnonzero(ids == id)
        if len(at):
            found: npt.NDArray[np.float64] = vectors[at[0]].astype(np.float64)
            return found
    raise InvalidArgument(f"id {id} has no row, so it has no neighbours")


def _scores(
    vectors: npt.NDArray[np.float64], vector: npt.NDArray[Any], by: By
) -> npt.NDArray[np.float64]:
    dots: npt.NDArray[np.float64] = vectors @ vector
    if by == "dot":
        return dots
    norms = np.linalg.norm(vectors, axis=1) * np.linalg.norm(vector)
    return np.where(norms > 0, dots / np.where(norms > 0, norms, 1), 0)
