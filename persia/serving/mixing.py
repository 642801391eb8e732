"""Whether what a graph says of a sample depends on the samples beside it, as a
softmax over all candidates does. Then requests cannot be computed together.

The graph is called with rows and parameters that are made up: those of a model
that was hardly trained could hide it.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn

from persia.serving.form import DATATYPES, Form

_SAMPLES = 4, 7  # of two requests
_NEAR = 1e-3  # rounding differs less


class _MadeUp(torch.fx.Interpreter):
    """Calls a graph with made-up rows and changed parameters."""

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        found = self.fetch_attr(target)
        if not hasattr(found, "lookup"):
            return super().call_module(target, args, kwargs)
        values, offsets, weights = args
        one = found.lookup
        columns = torch.arange(1, one.width + 1)
        rows = torch.sin((values[:, None] + 1.0) * columns)
        if weights is not None:
            rows = rows * weights[:, None]
        if not one.pooled:
            return rows
        if offsets is not None:
            ends = torch.cat((rows[:1] * 0, rows.double().cumsum(0)))
            rows = (ends[offsets[1:]] - ends[offsets[:-1]]).float()
        return rows.reshape(one.features, -1, one.width).sum(0)

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        found = super().get_attr(target, args, kwargs)
        if isinstance(found, Tensor) and found.is_floating_point():
            more = torch.arange(found.numel()).sin().abs() * 0.1
            found = found + more.reshape(found.shape).to(found.dtype)
        return found


@torch.no_grad()
def mixes_samples(graph: nn.Module, form: Form) -> bool:
    """Whether a request gets other outputs where one is computed with it.

    Args:
        graph: of torch.fx, whose modules for rows have the attribute
            ``lookup``.
        form: of its inputs.

    Returns:
        False also where the graph takes no made-up inputs.
    """
    assert isinstance(graph, torch.fx.GraphModule)
    call = _MadeUp(graph).run
    made = torch.Generator().manual_seed(0)
    some, more = (_inputs(form, n, made) for n in _SAMPLES)
    with contextlib.suppress(Exception):  # an index beyond its table
        apart = call(*some), call(*more)
        joined = call(*map(torch.cat, zip(some, more, strict=True)))
        return not all(map(_same, *apart, joined))
    return False


def _inputs(form: Form, samples: int, made: torch.Generator) -> list[Tensor]:
    """Inputs of so many samples; a feature of several ids has two each."""
    several, lengths = set(), {}
    for tree in (*form.args, *form.kwargs.values()):
        for _, values, length, weights in tree.get("batch", ()):
            one_each = length is None or form.inputs[values].samples
            lengths[length] = 1 if one_each else 2
            several |= set() if one_each else {values, weights}
    found = []
    for i, one in enumerate(form.inputs):
        sizes = [2 if size == -1 else size for size in one.shape]
        if one.samples or i in several:
            sizes[0] = samples * (2 if i in several else 1)
        dtype = DATATYPES[one.datatype]
        if i in lengths:
            x = torch.full(sizes, lengths[i])
        elif dtype.is_floating_point:
            x = torch.rand(sizes, generator=made)
        else:
            x = torch.randint(0, 2, sizes, generator=made)
        found.append(x.to(dtype))
    return found


def _same(some: Tensor, more: Tensor, joined: Tensor) -> bool:
    if not some.dim() or len(some) + len(more) != len(joined):
        return False
    apart = torch.cat((some, more)).double().nan_to_num()
    both = joined.double().nan_to_num()
    far = (apart - both).abs().max()
    return bool(far <= _NEAR * both.abs().max())
