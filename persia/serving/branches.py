"""Whether a graph gives what its model gives, where a size is 0 or 1.

torch.export takes a size that may change for one of 2 or more, and notes
nothing where the forward compares it with 0 or 1. So both are called with such
sizes, and with rows and parameters that are made up.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call

from persia.base.torch_private import constant_sizes, shape_guards
from persia.errors import InvalidArgument
from persia.nn.standins import standing_in
from persia.serving import made_up
from persia.serving.graph import Flat, Graph, Lookups, bind, evaluating
from persia.serving.sizes import Sizes

#: Of an input, by its number, and its dimension.
_Place = tuple[int, int]


class _Rows(nn.Module):
    """Rows of a lookup of the graph."""

    def __init__(self, graph: Graph, name: str) -> None:
        super().__init__()
        self.lookup = graph.lookups[name]

    def forward(
        self, values: Tensor, offsets: Tensor | None, weights: Tensor | None
    ) -> Tensor:
        return made_up.rows_of(self.lookup, values, offsets, weights)


@torch.no_grad()
def check_branches(
    model: nn.Module, graph: Graph, example: Sequence[Tensor]
) -> None:
    """Compares a graph with the model that it was made of.

    What the model refuses, or gives at random, is not compared.

    Raises:
        InvalidArgument: they differ where a size is 0 or 1.
    """
    both = _Both(model, graph)
    base = [list(x.shape) for x in example]
    if not both.agree(base):
        return
    sizes = _sizes_of(graph)
    cases = [([name], n) for name in sizes for n in (0, 1)]
    for names, n in [*cases, (list(sizes), 1)]:
        shapes = [list(shape) for shape in base]
        for i, dim in (place for name in names for place in sizes[name]):
            shapes[i][dim] = n
        if both.agree(shapes) is False:
            raise InvalidArgument(
                f"the graph of {type(model).__name__} does not give what the "
                f"model gives where {' and '.join(names)} is {n}: of a "
                "forward that chooses by a size, torch.export takes the "
                "branch of 2 and more. Compute both, and choose by "
                "torch.where, or choose outside of the model"
            )


def _sizes_of(graph: Graph) -> dict[str, list[_Place]]:
    """The sizes that may change, with all their places."""
    user = set(graph.program.graph_signature.user_inputs)
    inputs = [
        node.meta["val"]
        for node in graph.program.graph.nodes
        if node.op == "placeholder" and node.name in user
    ]
    first = {
        weights: values
        for values, _, weights in made_up.features_of(graph.form)
        if weights is not None
    }
    found: dict[str, list[_Place]] = {}
    names: dict[str, str] = {}
    for i, x in enumerate(inputs):
        for dim, size in enumerate(constant_sizes(x)):
            if size is not None:
                continue
            of = first.get(i, i) if dim == 0 else i
            variable = str(inputs[of].shape[dim])
            shown = f"{graph.form.inputs[of].name}.shape[{dim}]"
            name = names.setdefault(variable, shown)
            found.setdefault(name, []).append((i, dim))
    return found


class _Both:
    """A model and its graph."""

    def __init__(self, model: nn.Module, graph: Graph) -> None:
        self._form = form = graph.form
        self._model = model
        self._flat = Flat(model, form.model_copy(), "output")
        self._graph = bind(graph.program, lambda name: _Rows(graph, name))
        self._sizes = Sizes(shape_guards(graph.program), form.inputs)
        made: dict[object, Tensor] = {}  # what is tied stays so
        self._state = {
            name: made.setdefault((x.data_ptr(), x.shape), made_up.changed(x))
            for name, x in graph.program.state_dict.items()
        }

    def agree(self, shapes: Sequence[Sequence[int]]) -> bool | None:
        """Whether they give the same; None: one gives nothing."""
        made = torch.Generator().manual_seed(0)
        tensors = made_up.inputs_of(self._form, shapes, made)
        lookups = Lookups(lambda _, *ids: made_up.rows_of(*ids))
        found: list[Sequence[Tensor]] = []
        with (
            contextlib.suppress(Exception),  # such as an index out of range
            evaluating(self._model),
            standing_in(lookups),
            torch.random.fork_rng(devices=[]),
        ):
            self._sizes.check(tensors)
            for module in self._flat, self._graph:
                state = _copies(dict(module.named_buffers()) | self._state)
                given = tuple(x.clone() for x in tensors)
                found.append(functional_call(module, state, given))
        if len(found) < 2:
            return None
        return all(
            x.numel() == y.numel() and made_up.near(x.flatten(), y.flatten())
            for x, y in zip(*found, strict=True)
        )


def _copies(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A call may change them."""
    made: dict[int, Tensor] = {}
    return {
        name: made.setdefault(id(x), x.clone()) for name, x in state.items()
    }
