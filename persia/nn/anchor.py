"""The parameter of a module whose weights are tables.

It has no elements. By it torch's habits reach the rows: whoever sets
``requires_grad = False`` on all parameters freezes the module, whoever zeroes
all gradients drops those that wait for ``store.optimizer.step()``, an
optimizer has at least one parameter, and DistributedDataParallel one to wait
for.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from persia.base.torch_private import foreach_zero_, without_subclasses
from persia.store.engine import Engine

__all__ = ["Anchor"]

_GRAD: Any = Tensor.grad
#: What makes zeros of gradients in place, and what gives the same gradient.
_ZEROES = (Tensor.zero_, foreach_zero_())
_SAME: tuple[Callable[..., Any], ...] = (
    Tensor.data.__get__,  # type: ignore[attr-defined]
    Tensor.detach,
)


class Anchor(nn.Parameter):
    """A parameter without elements; its gradient stands for those of rows.

    That of an engine with ``update="step"`` notes that gradients came through
    it, and drops them when its own is zeroed.
    """

    _engine: weakref.ref[Engine] | None = None
    _noticed = False  # whether it says that gradients came

    def __new__(
        cls, data: Tensor | None = None, requires_grad: bool = True
    ) -> Anchor:
        if data is None:
            data = torch.empty(0, dtype=torch.float32, device="cpu")
        return super().__new__(cls, data.detach(), requires_grad)

    def bind(self, engine: Engine) -> None:
        """Rows of this engine's tables are trained through it."""
        self._engine = weakref.ref(engine)
        if engine.arguments.update == "step" and not self._noticed:
            self._noticed = True
            with torch.enable_grad():
                frozen = not self.requires_grad
                self.requires_grad_()  # else torch takes no hook
                self.register_post_accumulate_grad_hook(_came)  # type: ignore[no-untyped-call]
                self.requires_grad_(not frozen)

    @property
    def grad(self) -> Tensor | None:
        grad: Tensor | None = _GRAD.__get__(self)
        return None if grad is None else _Gradient.of(grad, self)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is None:
            self.zeroed()
        _GRAD.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def zeroed(self) -> None:
        """Its gradient was zeroed, or dropped."""
        engine = None if self._engine is None else self._engine()
        if engine is not None:
            engine.zeroed(self)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return Anchor, (self.detach().clone(), self.requires_grad)


class _Gradient(Tensor):
    """That of an anchor; to zero it in place is to drop the gradients of its
    rows."""

    _anchor: Anchor | None = None

    @classmethod
    def of(cls, grad: Tensor, anchor: Anchor) -> _Gradient:
        found: _Gradient = grad.as_subclass(cls)
        found._anchor = anchor
        return found

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        with without_subclasses():
            out = func(*args, **(kwargs or {}))
        first = args[0] if args else None
        if func in _ZEROES:
            for one in first if isinstance(first, list | tuple) else [first]:
                if isinstance(one, cls) and one._anchor is not None:
                    one._anchor.zeroed()
        anchor = first._anchor if isinstance(first, cls) else None
        if func in _SAME and anchor is not None:
            return cls.of(out, anchor)
        return out


def _came(anchor: Tensor) -> None:
    """A backward has come through an anchor, compiled ones too."""
    if isinstance(anchor, Anchor):
        engine = None if anchor._engine is None else anchor._engine()
        if engine is not None:
            engine.came(anchor)
