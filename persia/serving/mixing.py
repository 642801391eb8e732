"""Whether what a graph says of a sample depends on the samples beside it, as a
softmax over all candidates does. Then requests cannot be computed together.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn

from persia.serving import made_up
from persia.serving.form import Form

_SAMPLES = 4, 7  # of two requests


class _MadeUp(torch.fx.Interpreter):
    """Calls a graph with made-up rows and changed parameters."""

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        found = self.fetch_attr(target)
        if not hasattr(found, "lookup"):
            return super().call_module(target, args, kwargs)
        return made_up.rows_of(found.lookup, *args)

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        found = super().get_attr(target, args, kwargs)
        return made_up.changed(found) if isinstance(found, Tensor) else found


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
    several = set()
    for values, lengths, weights in made_up.features_of(form):
        if lengths is not None and not form.inputs[values].samples:
            several |= {values, weights}
    shapes = []
    for i, one in enumerate(form.inputs):
        shape = [2 if size == -1 else size for size in one.shape]
        if one.samples or i in several:
            shape[0] = samples * (2 if i in several else 1)
        shapes.append(shape)
    return made_up.inputs_of(form, shapes, made)


def _same(some: Tensor, more: Tensor, joined: Tensor) -> bool:
    if not some.dim() or len(some) + len(more) != len(joined):
        return False
    apart = torch.cat((some, more)).flatten()
    return made_up.near(apart, joined.flatten())
