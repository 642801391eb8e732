"""The dense part of a model that trains, as its graph has it."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from persia.errors import SchemaMismatch
from persia.serving.graph import Graph


class DenseSource:
    """Copies the parameters and buffers of a model, by the names of a graph.

    Args:
        model: that trains.
        graph: of it.
    """

    def __init__(self, model: nn.Module, graph: Graph) -> None:
        self._model = model
        self._program = program = graph.program
        here = self._parameters()
        self._shapes = {
            name: x.shape
            for name, x in {**program.constants, **program.state_dict}.items()
            # Others are constants of the graph.
            if name in program.state_dict
            or name.removeprefix("model.") in here
        }

    def _parameters(self) -> dict[str, Tensor]:
        here: dict[str, Tensor] = {}
        here |= self._model.named_parameters(remove_duplicate=False)
        here |= self._model.named_buffers(remove_duplicate=False)
        return here

    def copy(self) -> dict[str, Tensor]:
        """Those of this moment, in host memory.

        Raises:
            SchemaMismatch: one is missing, or has another shape.
        """
        here = self._parameters()
        found, missing = {}, []
        for name, shape in self._shapes.items():
            now = here.get(name.removeprefix("model."))
            if now is None or now.shape != shape:
                missing.append(name)
            elif now.numel():
                found[name] = now.detach().to("cpu", copy=True)
        if missing:
            raise SchemaMismatch(
                f"the model has no parameters {missing} as it had: make "
                "another Publisher"
            )
        return found

    def write(self, dense: Mapping[str, Tensor]) -> None:
        """Puts copies into the graph, which is written next."""
        program = self._program
        for name, x in dense.items():
            if name not in program.state_dict:  # a buffer that is not saved
                program.constants[name] = x
            elif isinstance(program.state_dict[name], nn.Parameter):
                program.state_dict[name] = nn.Parameter(x, requires_grad=False)
            else:
                program.state_dict[name] = x
