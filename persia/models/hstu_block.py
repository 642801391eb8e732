"""HSTU (Zhai et al., arXiv 2402.17152): attention without a softmax."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import layer_norm, silu

from persia.models.sequences import pad

_BUCKETS = 128  # of time between two places, each e ** 0.301 times the last


class HSTUBlock(nn.Module):
    """U, V, Q, K = split(SiLU(f1(norm(x)))); A = SiLU(Q K^T + bias) / n;
    x + f2(norm(A V) * U), where n is ``max_length``.

    Sequences are ragged: the linear layers see the n rows alone. A place
    attends to itself and those before it; the bias depends on the distance of
    the two, and on the logarithm of the time between them if times are given.

    Args:
        dim: of the input and the output.
        heads: of the attention.
        width: of U and V, of a head.
        key_width: of Q and K, of a head.
        max_length: distances beyond it count as it.
        dropout: before f2.
    """

    def __init__(
        self,
        dim: int,
        heads: int = 1,
        width: int = 32,
        key_width: int = 32,
        max_length: int = 256,
        dropout: float = 0.2,
    ) -> None:
        super().__init__()
        self.heads, self.max_length = heads, max_length
        self.widths = [heads * w for w in (width, key_width, key_width)]
        self.sizes = [heads * width, sum(self.widths)]
        self.f1 = nn.Linear(dim, sum(self.sizes))
        self.f2 = nn.Linear(heads * width, dim)
        self.dropout = nn.Dropout(dropout)
        self.by_place = nn.Parameter(0.02 * torch.randn(max_length))
        self.by_time = nn.Parameter(0.02 * torch.randn(_BUCKETS))

    def forward(
        self,
        x: torch.Tensor,
        lengths: torch.Tensor,
        times: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[n, dim] of ragged x [n, dim], lengths int64 [B] and times [n] in
        seconds."""
        mixed = silu(self.f1(layer_norm(x, x.shape[1:])))
        gate, rest = torch.split(mixed, self.sizes, 1)
        padded, present = pad(rest, lengths)
        # [B, length, heads, width of a head]
        values, queries, keys = (
            part.view(*present.shape, self.heads, width // self.heads)
            for part, width in zip(
                torch.split(padded, self.widths, 2), self.widths, strict=True
            )
        )
        place = torch.arange(present.shape[1], device=x.device)
        back = place[:, None] - place
        bias = self.by_place[back.clamp(0, self.max_length - 1)]
        if times is not None:
            at = pad(times.to(x.device)[:, None], lengths)[0].squeeze(2)
            gap = (at[:, :, None] - at[:, None, :]).abs().clamp(min=1).log()
            bucket = (gap / 0.301).long().clamp(max=_BUCKETS - 1)
            bias = bias + self.by_time[bucket][:, None]
        scores = torch.einsum("bqhd,bkhd->bhqk", queries, keys)
        weights = silu(scores + bias).masked_fill(back < 0, 0)
        out = torch.einsum("bhqk,bkhd->bqhd", weights, values)
        out = out.flatten(2)[present] / self.max_length
        out = layer_norm(out, out.shape[1:]) * gate
        new: torch.Tensor = self.f2(self.dropout(out))
        return x + new
