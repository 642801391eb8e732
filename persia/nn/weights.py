"""The weight of a module whose rows are in a table: to read, not to write."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from persia import errors
from persia.base.functions import (
    SET_DATA,
    SET_REQUIRES_GRAD,
    answers,
    ordinary,
    reduced,
)
from persia.base.torch_private import makes_parameter, sets_parameter

if TYPE_CHECKING:
    from persia.nn.lookups import Collection

_SETS = (SET_DATA, Tensor.__setitem__)
#: In-place methods that write no element.
_HARMLESS = ("detach_", "share_memory_")
_OPERATORS = frozenset(
    f"__i{name}__"
    for name in (
        *("add", "sub", "mul", "matmul", "div", "truediv", "floordiv"),
        *("mod", "pow", "and", "or", "xor", "lshift", "rshift"),
    )
)


def refuse_write(collection: Collection, table: str) -> errors.PersiaError:
    """The error of a write into a weight."""
    return errors.InvalidArgument(
        f"the weight of table {table!r} is a copy of its rows: to write into "
        "it changes none. Set rows with "
        f"store.set_rows({table!r}, ids, values) of the module's store; "
        "reset_parameters() of an embedding makes all new"
    )


def _refuse_tie(collection: Collection, table: str) -> errors.PersiaError:
    """The error of a parameter that would share its values."""
    return errors.InvalidArgument(
        f"the weight of table {table!r} is a copy of its rows, and another "
        "parameter cannot share them. Tie torch's modules before "
        "persia.convert(model), which keeps them tied; or compute with the "
        "weight itself, as in torch.nn.functional.linear(x, "
        "embedding.weight), which trains its rows; weight.clone() is a "
        "tensor of its own"
    )


class Weight(Tensor):
    """Rows of a table as a tensor. What writes into it, or into a view of it,
    raises InvalidArgument; ``requires_grad`` freezes the module. All else
    takes it for an ordinary tensor, and gives ordinary ones."""

    _of: tuple[Collection, str] | None = None

    @staticmethod
    def of(rows: Tensor, collection: Collection, table: str) -> Tensor:
        """A guard of these rows, without a copy."""
        if torch.compiler.is_compiling():
            return rows
        found: Weight = rows.as_subclass(Weight)
        found._of = collection, table
        return found

    @answers
    def __torch_function__(
        cls: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        # torch.nn.init names its first argument.
        first = [*args[:1], *(kwargs.get(n) for n in ("tensor", "input"))]
        weight = next(_guards(first), None)
        if weight is not None and func in (
            SET_REQUIRES_GRAD,
            Tensor.requires_grad_,
        ):
            if makes_parameter():
                raise _refuse_tie(*weight)
            wanted = [*args[1:], *kwargs.values(), True][0]
            weight[0].anchor.requires_grad_(wanted)
            return args[0]
        if weight is not None and func is Tensor.type and sets_parameter():
            raise _refuse_tie(*weight)
        if weight is not None and _writes(func):
            raise refuse_write(*weight)
        if func == SET_DATA and (shared := next(_guards(args[1:]), None)):
            raise _refuse_tie(*shared)
        for collection, table in _guards([kwargs.get("out")]):
            raise refuse_write(collection, table)
        if func is Tensor.__iter__:
            return iter(args[0].unbind())
        out = ordinary(func, args, kwargs)
        base = next((one for one in first if isinstance(one, cls)), None)
        if isinstance(out, list | tuple) and weight is not None:  # split()
            views = [cls._guarded(one, base, weight) for one in out]
            return type(out)(views) if type(out) in (list, tuple) else out
        return cls._guarded(out, base, weight)

    @classmethod
    def _guarded(
        cls, out: Any, base: Any, weight: tuple[Collection, str] | None
    ) -> Any:
        """A result: a view is guarded as what it is of."""
        if weight is not None and _same_memory(out, base):
            return cls.of(out, *weight)
        return out.as_subclass(Tensor) if isinstance(out, cls) else out

    def set_(self, *args: Any, **kwargs: Any) -> Tensor:
        """As torch's, which does not ask the class."""
        if self._of is not None:
            raise refuse_write(*self._of)
        return super().set_(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return reduced(self, protocol)


def _guards(args: Any) -> Iterator[tuple[Collection, str]]:
    """Whose the weights are among these, and in lists of them."""
    for one in args:
        if isinstance(one, list | tuple):
            yield from _guards(one)
        elif isinstance(one, Weight) and one._of is not None:
            yield one._of


def _writes(func: Callable[..., Any]) -> bool:
    name = getattr(func, "__name__", "")
    if name in _HARMLESS:
        return False
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name in _OPERATORS or func in _SETS


def _same_memory(out: Any, weight: Any) -> bool:
    """Whether one is a view of the other."""
    for one in (out, weight):
        if not isinstance(one, Tensor) or one.is_meta or one.is_sparse:
            return False
    mine, theirs = out.untyped_storage(), weight.untyped_storage()
    return bool(mine.data_ptr() and mine.data_ptr() == theirs.data_ptr())
