"""The sizes of inputs that a graph was made for.

Where a forward chooses by a size, the graph has the branch of the example, and
a guard says for which sizes that is the one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from torch import Tensor

from persia.errors import ShapeError
from persia.serving.form import TensorForm

_SIZE = re.compile(r"L\['\w+'\](?:\[\d+\])*?\[(\d+)\]\.size\(\)\[(\d+)\]")
_ARITHMETIC = re.compile(r"(?:[-+*/%()<>=!,\d\s]|size|and|or|not|max|min)*")


class Sizes:
    """Guards of a graph.

    Args:
        guards: as torch writes them. Those of the number of samples do not
            count: it may be any, which torch.export has checked.
        inputs: of the graph.
    """

    def __init__(
        self, guards: Iterable[str], inputs: Sequence[TensorForm]
    ) -> None:
        self._guards = []
        for guard in guards:
            text = _SIZE.sub(r"size(\1, \2)", guard)
            samples = any(
                inputs[int(i)].samples and dim == "0"
                for i, dim in _SIZE.findall(guard)
            )
            if samples or not _ARITHMETIC.fullmatch(text):
                continue
            shown = _SIZE.sub(
                lambda m: f"{inputs[int(m[1])].name}.shape[{m[2]}]", guard
            )
            self._guards.append((compile(text, "<guard>", "eval"), shown))

    def check(self, tensors: Sequence[Tensor]) -> None:
        """Raises ShapeError where the graph is another one than the forward.

        Torch takes a size of 0 or 1 for one that a graph need not have, so
        these count as 2."""

        def size(tensor: int, dim: int) -> int:
            return max(tensors[tensor].shape[dim], 2)

        known = {"size": size, "max": max, "min": min, "__builtins__": {}}
        for guard, shown in self._guards:
            if not eval(guard, known):
                raise ShapeError(
                    f"the model was exported for sizes with {shown}, and this "
                    "call has others: its forward chooses by them, and the "
                    "graph has the branch of the example"
                )
