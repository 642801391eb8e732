"""How requests become the inputs of a graph without a tensor for each."""

from __future__ import annotations

import torch
from torch import Tensor

from persia import _core
from persia.serving.form import DATATYPES, Form


class Plan:
    """The inputs of a graph that are copied from requests as they are: each
    has samples, of a fixed shape. Those of one shape and type are one block of
    memory, whatever requests they come from.

    Attributes:
        inputs: what requests are bound to.
    """

    def __init__(self, form: Form) -> None:
        groups: dict[tuple[str, tuple[int, ...]], list[int]] = {}
        for i, one in enumerate(form.inputs):
            kind = (one.datatype, tuple(one.shape[1:]))
            groups.setdefault(kind, []).append(i)
        self._groups = list(groups.items())
        self._count = len(form.inputs)
        every = [form.inputs[i] for _, places in self._groups for i in places]
        self.inputs = _core.InferPlan(
            [(one.name, one.datatype, one.shape) for one in every]
        )

    def gather(
        self, requests: list[_core.InferRequest], samples: int
    ) -> list[Tensor]:
        """The inputs, in their order, of requests that are bound to them and
        have so many samples together."""
        tensors = [torch.empty(0)] * self._count
        first = 0
        for (datatype, sizes), places in self._groups:
            shape = (len(places), samples, *sizes)
            block = torch.empty(shape, dtype=DATATYPES[datatype])
            memory = block.view(torch.uint8).numpy()
            _core.infer_gather(requests, first, len(places), memory)
            for place, tensor in zip(places, block.unbind(0), strict=True):
                tensors[place] = tensor
            first += len(places)
        return tensors


def plan_of(form: Form) -> Plan | None:
    """The plan of a form; None: it has features of several ids, or inputs
    without samples."""
    fixed = all(
        one.samples and one.shape and min(one.shape[1:], default=0) >= 0
        for one in form.inputs
    )
    trees = [*form.args, *form.kwargs.values()]
    jagged = any(
        part is not None
        for tree in trees
        for feature in tree.get("batch", ())
        for part in feature[2:]
    )
    return Plan(form) if fixed and not jagged else None
