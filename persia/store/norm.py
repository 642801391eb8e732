"""The norm of gradients that wait for ``optimizer.step()``."""

from __future__ import annotations

import math
import struct
from collections import defaultdict
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from persia.distributed.ranks import Passes

# (table, ids [n] int64, summed gradients [n, dim] float32) of a table each.
Sums = list[tuple[int, Tensor, Tensor]]

_HEADER = struct.Struct("<qqq")  # table, rows, dim
_ODD = -7046029254386353131  # 2**64 / golden ratio, as an int64


def squares(
    finite: bool,
    held: Iterable[tuple[int, int, bytes, bytes]],
    factors: list[float],
    passes: Passes | None,
) -> float:
    """The square of their L2 norm; NaN if there are NaN or Inf.

    Args:
        finite, held: what ``sums()`` of the C core's store gave.
        factors: one a table.
        passes: of the ranks over which they are summed; None: of this one.
    """
    sums = [
        (
            table,
            torch.frombuffer(bytearray(ids), dtype=torch.int64),
            torch.frombuffer(bytearray(grads), dtype=torch.float32).view(
                -1, dim
            )
            * factors[table],
        )
        for table, dim, ids, grads in held
        if ids
    ]
    if passes is None:
        tables = defaultdict(list)  # several parts: of several workers
        for table, ids, grads in sums:
            tables[table].append((ids, grads))
        total = sum(map(_squares_of_table, tables.values()))
        return total if finite else math.nan
    total = _squares_of_share(sums, passes)
    return passes.all_sum([total if finite else math.nan])[0]


def _squares_of_share(sums: Sums, passes: Passes) -> float:
    """Of the ids that are this rank's share, summed over all ranks."""

    def cut(ranks: int) -> list[bytes]:
        shares: list[Sums] = [[] for _ in range(ranks)]
        for table, ids, grads in sums:
            of = ((ids * _ODD) >> 33) % ranks
            for rank, share in enumerate(shares):
                there = of == rank
                share.append((table, ids[there], grads[there]))
        return [pack(share) for share in shares]

    tables = defaultdict(list)
    for packed in passes.swap(cut):
        for table, ids, grads in unpack(packed):
            tables[table].append((ids, grads))
    return sum(map(_squares_of_table, tables.values()))


def pack(share: Sums) -> bytes:
    """How many tables, then of each its header, its ids, its gradients."""
    parts = [struct.pack("<q", len(share))]
    for table, ids, grads in share:
        parts.append(_HEADER.pack(table, *grads.shape))
        parts += [ids.numpy().tobytes(), grads.numpy().tobytes()]
    return b"".join(parts)


def unpack(packed: bytes) -> Sums:
    (tables,) = struct.unpack_from("<q", packed)
    at, share = 8, []
    for _ in range(tables):
        table, n, dim = _HEADER.unpack_from(packed, at)
        at += _HEADER.size
        ids = np.frombuffer(packed, np.int64, n, at).copy()
        at += ids.nbytes
        grads = np.frombuffer(packed, np.float32, n * dim, at).copy()
        at += grads.nbytes
        share.append(
            (
                table,
                torch.from_numpy(ids),
                torch.from_numpy(grads.reshape(n, dim)),
            )
        )
    return share


def _squares_of_table(parts: list[tuple[Tensor, Tensor]]) -> float:
    if len(parts) == 1:  # each id once
        return float(parts[0][1].double().square().sum())
    every = torch.cat([ids for ids, _ in parts])
    ids, place = torch.unique(every, return_inverse=True)
    grads = torch.cat([grads for _, grads in parts]).double()
    sums = grads.new_zeros(len(ids), grads.shape[1])
    return float(sums.index_add_(0, place, grads).square().sum())
