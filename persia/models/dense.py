"""What click models share: checks, MLPs, dense features."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from persia import errors
from persia.nn.collections import EmbeddingBagCollection


def feature_dims(bags: EmbeddingBagCollection) -> list[int]:
    """The dim of each feature, in the order of the columns of the output."""
    return [
        config.embedding_dim
        for config in bags.embedding_bag_configs()
        for _ in config.feature_names
    ]


def one_dim(
    model: str, bags: EmbeddingBagCollection, least: int = 1
) -> tuple[int, int]:
    """(features, dim) of tables that all have one dim.

    Raises:
        InvalidArgument: they have several, or one below ``least``.
    """
    dims = feature_dims(bags)
    if len(set(dims)) != 1 or dims[0] < least:
        raise errors.InvalidArgument(
            f"{model}: tables of the dims {sorted(set(dims))}; give all one"
            + (f", of at least {least}" if least > 1 else "")
        )
    return len(dims), dims[0]


def mlp(
    width: int, layers: Sequence[int], last_relu: bool = True
) -> nn.Sequential:
    """Linear layers on [B, width] of the widths ``layers``, each with a ReLU.

    ``last_relu=False`` leaves out the last ReLU, as before a logit.
    """
    modules: list[nn.Module] = []
    for out in layers:
        modules += [nn.Linear(width, out), nn.ReLU()]
        width = out
    return nn.Sequential(*(modules if last_relu else modules[:-1]))


class Standardize(nn.Module):
    """Brings each of ``width`` columns to mean 0 and variance 1.

    In training, each batch is first added to the statistics, which are those
    of all samples seen so far: unlike batch normalisation, a sample's result
    does not hang on the size of its batch.  No gradient passes through them.
    """

    count: torch.Tensor
    mean: torch.Tensor
    square: torch.Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1, dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(width, dtype=torch.float64))
        self.register_buffer("square", torch.zeros(width, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, width] in, [B, width] out; unchanged before the first sample.

        Raises:
            ShapeError: it is no tensor of this shape.
        """
        shape = tuple(x.shape) if isinstance(x, torch.Tensor) else x
        width = len(self.mean)
        if not isinstance(shape, tuple) or shape[1:] != (width,):
            what = "None" if x is None else f"of shape {shape}"
            raise errors.ShapeError(
                f"the dense features are {what}, need [B, {width}]: give the "
                "model the number of their columns, 0 if there are none"
            )
        if self.training:
            self._add(x.detach().double())
        variance = self.square / self.count.clamp(min=1)
        scale = torch.where(variance > 0, variance, 1.0).rsqrt()
        return (x - self.mean.to(x.dtype)) * scale.to(x.dtype)

    @torch.no_grad()
    def _add(self, x: torch.Tensor) -> None:
        """Merges a batch's mean and squared distances (Chan et al., 1979)."""
        n = len(x)
        if n == 0:
            return
        mean = x.mean(0)
        far = mean - self.mean
        total = self.count + n
        self.square.add_((x - mean).square().sum(0))
        self.square.add_(far.square() * (self.count * n / total))
        self.mean.add_(far * (n / total))
        self.count.add_(n)
