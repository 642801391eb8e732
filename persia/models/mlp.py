"""A multilayer perceptron, the part that all click models share."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn


def mlp(width: int, layers: Sequence[int], last_relu: bool = True) -> nn.Sequential:
    """Linear layers of the widths ``layers`` on [B, width], with a ReLU after each.

    ``last_relu=False`` leaves out the last ReLU, as before a logit.
    """
    modules: list[nn.Module] = []
    for out in layers:
        modules += [nn.Linear(width, out), nn.ReLU()]
        width = out
    return nn.Sequential(*(modules if last_relu else modules[:-1]))
