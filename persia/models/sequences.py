"""Ragged sequences: padding, and the next item as label."""

from __future__ import annotations

import torch

from persia.models.losses import in_batch_softmax


def pad(
    x: torch.Tensor, lengths: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """([B, longest, dim] with zeros at the ends, present [B, longest]) of
    ragged x [n, dim]; ``padded[present]`` is x again."""
    longest = int(lengths.max()) if len(lengths) else 0
    at = torch.arange(longest, device=lengths.device)
    present = (at < lengths[:, None]).to(x.device)
    padded = x.new_zeros(*present.shape, x.shape[1])
    return padded.index_put((present,), x), present


def last_states(states: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """[B, dim]: the last of each sequence of ragged states [n, dim]; zeros
    for a sequence without ids."""
    some = lengths > 0
    out = states.new_zeros(len(lengths), states.shape[1])
    return out.index_put((some,), states[lengths.cumsum(0)[some] - 1])


def next_item_loss(
    states: torch.Tensor,
    items: torch.Tensor,
    ids: torch.Tensor,
    lengths: torch.Tensor,
    log_q: torch.Tensor | None = None,
) -> torch.Tensor:
    """Mean cross entropy of finding, from the state at each place of a
    sequence, the item of the next place among all items of the batch.

    Args:
        states, items: [n, dim], what a sequence model returns.
        ids: int64 [n], lengths: int64 [B]; ``batch.ids["history"]`` is both.
        log_q: see :func:`persia.models.in_batch_softmax`.
    """
    inner = torch.ones(len(ids), dtype=torch.bool, device=ids.device)
    inner[lengths.cumsum(0)[lengths > 0] - 1] = False
    now = inner.nonzero().squeeze(1)
    at = now.to(states.device)
    return in_batch_softmax(
        states[at],
        items[at + 1],
        ids[now + 1],
        None if log_q is None else log_q[now + 1],
    )
