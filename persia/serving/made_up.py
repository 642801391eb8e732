"""Rows, parameters and inputs that are made up: those of a model that was
hardly trained could hide what its graph does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from persia.serving.form import DATATYPES, Form
from persia.serving.graph import Lookup

_NEAR = 1e-3  # rounding differs less


def rows_of(
    lookup: Lookup,
    values: Tensor,
    offsets: Tensor | None,
    weights: Tensor | None,
) -> Tensor:
    """What a lookup gives, where an id says what its row is: float32 [bags,
    width], or, not pooled, [n, width]."""
    columns = torch.arange(1, lookup.width + 1)
    rows = torch.sin((values[:, None] + 1.0) * columns)
    if weights is not None:
        rows = rows * weights[:, None]
    if not lookup.pooled:
        return rows
    if offsets is not None:
        ends = torch.cat(
            (rows.new_zeros(1, lookup.width), rows.double().cumsum(0))
        )
        rows = (ends[offsets[1:]] - ends[offsets[:-1]]).float()
    return rows.reshape(lookup.features, -1, lookup.width).sum(0)


def changed(x: Tensor) -> Tensor:
    """A parameter that is not what it was made as, such as 0."""
    if not x.is_floating_point():
        return x
    more = torch.arange(x.numel()).sin().abs() * 0.1
    return x + more.reshape(x.shape).to(x.dtype)


def inputs_of(
    form: Form, shapes: Sequence[Sequence[int]], made: torch.Generator
) -> list[Tensor]:
    """Inputs of these sizes: integers are 0 or 1, and the ids of a feature are
    spread over its samples."""
    of = {lengths: values for values, lengths, _ in features_of(form)}
    found = []
    for i, (one, shape) in enumerate(zip(form.inputs, shapes, strict=True)):
        dtype = DATATYPES[one.datatype]
        if i in of:
            each, left = divmod(shapes[of[i]][0], max(shape[0], 1))
            x = torch.full((shape[0],), each)
            x[:left] += 1
        elif dtype.is_floating_point:
            x = torch.rand(*shape, generator=made)
        else:
            x = torch.randint(0, 2, tuple(shape), generator=made)
        found.append(x.to(dtype))
    return found


def features_of(form: Form) -> Iterator[tuple[int, int | None, int | None]]:
    """The places of values, lengths and weights of all features."""
    for tree in (*form.args, *form.kwargs.values()):
        for _, values, lengths, weights in tree.get("batch", ()):
            yield values, lengths, weights


def near(some: Tensor, other: Tensor) -> bool:
    """Whether tensors [n] differ by rounding alone; what is no number is 0."""
    some, other = some.double().nan_to_num(), other.double().nan_to_num()
    if not len(some):
        return True
    return bool((some - other).abs().max() <= _NEAR * other.abs().max())
