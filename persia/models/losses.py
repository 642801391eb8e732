"""Sampled softmax over the items of a batch."""

from __future__ import annotations

import torch
from torch import nn


def in_batch_softmax(
    queries: torch.Tensor,
    items: torch.Tensor,
    ids: torch.Tensor,
    log_q: torch.Tensor | None = None,
    temperature: float = 1.0,
) -> torch.Tensor:
    """Mean cross entropy of finding each query's item among all distinct
    items of the batch.

    Args:
        queries: [n, dim].
        items: [n, dim], the item that belongs to each query.
        ids: int64 [n], which item that is: equal ids are one candidate.
        log_q: [n], log of the probability of each item to be in a batch, such
            as :class:`Frequencies` gives; it is subtracted from the logits,
            or else frequent items would be punished as candidates (Yi et al.,
            RecSys 2019, doi 10.1145/3298689.3346996).
        temperature: divides the dot products.

    Returns:
        The loss, a scalar.
    """
    distinct, target = torch.unique(ids, return_inverse=True)
    at = torch.arange(len(ids), device=ids.device)
    first = torch.full_like(distinct, len(ids))
    first = first.scatter_reduce(0, target, at, "amin").to(items.device)
    logits = queries @ items[first].T / temperature
    if log_q is not None:
        logits = logits - log_q.to(logits)[first]
    return nn.functional.cross_entropy(logits, target.to(logits.device))


class Frequencies(nn.Module):
    """How probable an item is in a batch, learned from a stream of batches of
    unbounded ids in constant memory (Yi et al., algorithm 2): the mean number
    of batches from one occurrence to the next, at the id's place in an array.

    Args:
        places: of the array; ids that share one count as one item.
        rate: weight of the latest gap in the running mean.
    """

    step: torch.Tensor
    seen: torch.Tensor
    gap: torch.Tensor

    def __init__(self, places: int = 1 << 20, rate: float = 0.05) -> None:
        super().__init__()
        self.rate = rate
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seen", torch.zeros(places, dtype=torch.int64))
        self.register_buffer("gap", torch.zeros(places))

    @torch.no_grad()
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """log probabilities [n] of ids int64 [n]; in training they are first
        counted as a batch."""
        place = torch.remainder(ids, len(self.gap)).to(self.gap.device)
        if self.training:
            self.step += 1
            now = torch.unique(place)
            seen, old = self.seen[now], self.gap[now]
            gap = (self.step - seen).to(old.dtype)
            self.gap[now] = torch.where(
                seen == 0, gap, old + self.rate * (gap - old)
            )
            self.seen[now] = self.step
        # A place that never occurred is as rare as once in all batches.
        never = self.step.clamp(min=1).to(self.gap.dtype)
        gap = self.gap[place]
        return -torch.where(gap > 0, gap, never).log()
