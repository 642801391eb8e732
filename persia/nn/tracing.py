"""Modules that other tools trace: torch.fx sees one call, TorchScript a call
of Python."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from persia import errors
from persia.base.torch_private import transforms

Forward = TypeVar("Forward", bound=Callable[..., Any])


def leaf(forward: Forward) -> Forward:
    """A forward that symbolic tracing (torch.fx) records as one call of its
    module, that TorchScript leaves to Python, and that transforms of
    torch.func have not."""

    @functools.wraps(forward)
    def call(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self, torch.jit.ScriptModule):
            self = _scripted(self)
        for one in (*args, *kwargs.values()):
            if isinstance(one, torch.fx.Proxy):
                return _record(one.tracer, self, args, kwargs)
        if transforms() and not torch.compiler.is_compiling():
            raise errors.InvalidArgument(
                f"{type(self).__name__} within a transform of torch.func "
                "(vmap, grad, jvp): rows are no arguments of the function, "
                "and their gradients are pushed. Look the vectors up before "
                "it, and pass them to it; torch.func.functional_call alone "
                "works"
            )
        return forward(self, *args, **kwargs)

    ignored: Forward = torch.jit.ignore(call)  # type: ignore[no-untyped-call]
    return ignored


#: Modules by ``traced_as``, their number; a scripted copy has it, too.
modules: weakref.WeakValueDictionary[int, torch.nn.Module] = (
    weakref.WeakValueDictionary()
)
numbers = itertools.count()


def _scripted(module: torch.nn.Module) -> torch.nn.Module:
    """What ``torch.jit.script`` made this of, which has the rows."""
    try:
        return modules[module.traced_as]  # type: ignore[index]
    except (AttributeError, KeyError):
        raise errors.InvalidArgument(
            "a scripted module has no rows: use the module that "
            "torch.jit.script() was given, for as long as it lives"
        ) from None


def _record(
    tracer: Any,
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> torch.fx.Proxy:
    path = tracer.path_of_module(module)
    if not path:
        raise errors.InvalidArgument(
            f"a {type(module).__name__} is one call in a traced graph: trace "
            "the model that has it"
        )
    proxy: torch.fx.Proxy = tracer.create_proxy(
        "call_module", path, args, kwargs
    )
    return proxy
