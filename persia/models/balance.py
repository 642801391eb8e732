"""Shares of a batch that are about as much work for each rank."""

from __future__ import annotations

import heapq

import torch

from persia.data.batches.jagged import JaggedBatch


def balance_by_tokens(lengths: torch.Tensor, ranks: int) -> list[torch.Tensor]:
    """Shares of a batch that are about as much work: the longest sequences
    first, each to the rank with the fewest ids so far.

    Two ranks differ by at most the longest sequence. Every rank that calls it
    with the same lengths finds the same shares; ``take(ids, shares[rank])`` is
    its part. Weigh the loss by samples: ranks may have unlike numbers.

    Args:
        lengths: int64 [B], ids of each sample.
        ranks: how many shares.

    Returns:
        For each rank the numbers of its samples, int64, ascending.
    """
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0, 0, rank) for rank in range(ranks)]
    sizes: list[int] = lengths.tolist()
    for sample in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        tokens, samples, rank = loads[0]
        shares[rank].append(sample)
        heapq.heapreplace(loads, (tokens + sizes[sample], samples + 1, rank))
    return [torch.tensor(sorted(s), dtype=torch.int64) for s in shares]


def take(ids: JaggedBatch, samples: torch.Tensor) -> JaggedBatch:
    """The batch of some samples, given by their numbers, int64 [b]."""
    first = torch.arange(len(ids.keys()))[:, None] * ids.stride()
    bags = (first + samples).flatten()
    lengths, offsets = ids.lengths()[bags], ids.offsets()[bags]
    ends = lengths.cumsum(0)
    at = torch.arange(int(lengths.sum()))
    at += (offsets - ends + lengths).repeat_interleave(lengths)
    weights = ids.weights_or_none()
    return JaggedBatch(
        ids.keys(),
        ids.values()[at],
        lengths,
        weights=None if weights is None else weights[at],
    )
