"""Tensors that answer the functions of torch themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from persia.base.torch_private import without_subclasses

_DATA: Any = Tensor.data
_REQUIRES_GRAD: Any = Tensor.requires_grad
#: The functions that torch names where an attribute is read or written.
GET_DATA, SET_DATA = _DATA.__get__, _DATA.__set__
SET_REQUIRES_GRAD = _REQUIRES_GRAD.__set__

Function = Callable[..., Any]
Answer = Callable[[Any, Function, tuple[Any, ...], dict[str, Any]], Any]


def answers(answer: Answer) -> Any:
    """The ``__torch_function__`` of a class: ``answer(cls, func, args,
    kwargs)``."""

    def call(
        cls: Any,
        func: Function,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return answer(cls, func, args, kwargs or {})

    return classmethod(call)


def ordinary(
    func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """What torch makes of tensors, whatever their classes are."""
    with without_subclasses():
        return func(*args, **kwargs)


def reduced(tensor: Tensor, protocol: Any) -> Any:
    """How a pickle keeps a tensor of a class of ours: as an ordinary one."""
    with without_subclasses():
        plain: Any = tensor.detach().as_subclass(Tensor)
        return plain.__reduce_ex__(protocol)
