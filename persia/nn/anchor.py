"""The parameter of a module whose weights are tables.

It has no elements. By it torch's habits reach the rows: who sets
``requires_grad = False`` on all parameters freezes the module, who zeroes all
gradients drops those that wait for ``store.optimizer.step()``, an optimizer
has at least one parameter, and DistributedDataParallel one to wait for. What
loops over parameters compute with it reaches the rows, too, see
:mod:`persia.nn.arithmetic`."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from persia.base.functions import GET_DATA, SET_DATA, answers, ordinary
from persia.base.torch_private import (
    amp_unscale_,
    foreach_zero_,
    without_subclasses,
)
from persia.nn.arithmetic import (
    METHODS,
    Source,
    by_torch,
    in_torch,
    run,
    warn_of_missing,
    writes,
)
from persia.store.engine import WATCHED, Engine, engine_of

if TYPE_CHECKING:
    from persia.nn.lookups import Collection

_GRAD: Any = Tensor.grad
#: What makes zeros of gradients in place, and what gives the same gradient.
_ZEROES = (Tensor.zero_, foreach_zero_())
#: What measures or clips a gradient, beside norms.
_MEASURES = (
    *("pow", "__pow__", "square", "abs", "sum", "clamp_", "clamp"),
    *("_foreach_clamp_min_", "_foreach_clamp_max_", "dot"),
)
_SAME = (GET_DATA, Tensor.detach)
_MEASURED = "a norm, or a change, of gradients"
#: What a GradScaler does to the gradients of an optimizer.
_UNSCALES = amp_unscale_()


class Anchor(nn.Parameter):
    """A parameter without elements; its gradient stands for those of rows.

    That of an engine with ``update="step"`` notes that gradients passed
    through it, and drops them when its own is zeroed."""

    _module: weakref.ref[Collection] | None = None
    _noticed = False  # whether it says that gradients passed
    #: The sum that a state has given its rows last, and their version then.
    carried: tuple[Any, Any] | None = None

    def __new__(
        cls, data: Tensor | None = None, requires_grad: bool = True
    ) -> Anchor:
        if data is None:
            data = torch.empty(0, 1, dtype=torch.float32, device="cpu")
        with without_subclasses():
            data = Tensor.detach(data).as_subclass(Tensor)
        return super().__new__(cls, data, requires_grad)

    def bind(self, module: Collection) -> None:
        """Rows of this module's tables are trained through it."""
        self._module = weakref.ref(module)
        engine = engine_of(module.store)
        if engine.backwards < WATCHED:
            self.__class__ = _Watched
            engine.watched.append(weakref.ref(self))
        if module.store.update == "step" and not self._noticed:
            self._noticed = True
            with torch.enable_grad():
                frozen = not self.requires_grad
                self.requires_grad_()  # else torch takes no hook
                hook: Any = self.register_post_accumulate_grad_hook
                hook(_came)
                self.requires_grad_(not frozen)

    @property
    def grad(self) -> Tensor | None:
        grad: Tensor | None = _GRAD.__get__(self)
        if grad is None or _an_optimizer_steps():
            return None
        return _Gradient.of(grad, self)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is None:
            self.zeroed()
        elif self._is_other(value) and not by_torch():
            warn_of_missing(engine_of(self.source().store), _MEASURED)
        _GRAD.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def _is_other(self, value: Tensor) -> bool:
        """Whether it takes the place of a gradient that rows have, too."""
        had: Tensor | None = _GRAD.__get__(self)
        own = isinstance(value, _Gradient) and value._anchor is self
        return had is not None and not own and self.owner() is not None

    @property
    def data(self) -> Tensor:
        found: Tensor = run(GET_DATA, (self,), {})
        return found

    @data.setter
    def data(self, value: Tensor) -> None:
        run(SET_DATA, (self, value), {})

    def owner(self) -> Collection | None:
        """The module whose tables these are; None while it is made."""
        return None if self._module is None else self._module()

    def register_hook(self, hook: Any) -> Any:
        """As torch's; what the hook gives reaches no row."""
        if (engine := self.engine()) is not None:
            warn_of_missing(engine, _MEASURED)
        return super().register_hook(hook)  # type: ignore[no-untyped-call]

    def unwatch(self) -> None:
        """The first backwards are over."""
        self.__class__ = Anchor

    def source(self) -> Source:
        """The tables."""
        owner = self.owner()
        assert owner is not None
        return Source.of(owner)

    def engine(self) -> Engine | None:
        """That of the tables."""
        owner = self.owner()
        return None if owner is None else engine_of(owner.store)

    def zeroed(self) -> None:
        """Its gradient was zeroed, or dropped."""
        engine = self.engine()
        if engine is not None:
            engine.zeroed(self)

    def move(self, fn: Callable[[Tensor], Tensor]) -> None:
        """To where a module moves; a device that is no place is left out. It
        stays the object that others hold."""
        with torch.no_grad():
            there = fn(self.bare())
        if not there.is_meta:
            with without_subclasses():
                SET_DATA(self, there)

    def bare(self) -> Tensor:
        """What torch has of it: a tensor without elements."""
        with without_subclasses():
            return Tensor.detach(self).as_subclass(Tensor)

    def __deepcopy__(self, memo: dict[int, Any]) -> Anchor:
        if id(self) not in memo:
            memo[id(self)] = Anchor(self.bare().clone(), self.requires_grad)
        found: Anchor = memo[id(self)]
        return found

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return Anchor, (self.bare().clone(), self.requires_grad)


class _Watched(Anchor):
    """An anchor until the second backward: functions of torch, not methods
    alone, show whether a loss has it. That costs too much to keep it on.
    """

    @answers
    def __torch_function__(
        cls: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if func.__name__ in ("__get__", "__set__") or not args:
            return ordinary(func, args, kwargs)
        return run(func, args, kwargs)


def _of_rows(name: str) -> Callable[..., Any]:
    function = getattr(Tensor, name)

    @functools.wraps(function)
    def method(self: Anchor, *args: Any, **kwargs: Any) -> Any:
        if self.owner() is None:
            return function(self, *args, **kwargs)
        return run(function, (self, *args), kwargs)

    return method


for _name in METHODS:
    setattr(Anchor, _name, _of_rows(_name))


class _Gradient(Tensor):
    """That of an anchor; to zero it in place is to drop the gradients of its
    rows."""

    _anchor: Anchor | None = None

    @classmethod
    def of(cls, grad: Tensor, anchor: Anchor) -> _Gradient:
        found: _Gradient = grad.as_subclass(cls)
        found._anchor = anchor
        return found

    @answers
    def __torch_function__(
        cls: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        first = args[0] if args else None
        if func is Tensor.detach_:  # torch detaches no view in place
            return first
        out = ordinary(func, args, kwargs)
        many = first if isinstance(first, list | tuple) else [first]
        mine = [one for one in many if isinstance(one, cls)]
        for anchor in (one._anchor for one in mine):
            engine = None if anchor is None else anchor.engine()
            if anchor is None or engine is None:
                continue
            if func in _ZEROES:
                anchor.zeroed()
            elif func is _UNSCALES:
                engine.unscaled()
            elif (
                "norm" in func.__name__
                or func.__name__ in _MEASURES
                or (_changes(func) and not in_torch())
            ):
                warn_of_missing(engine, _MEASURED)
        anchor = first._anchor if isinstance(first, cls) else None
        if func in _SAME and anchor is not None:
            return cls.of(out, anchor)
        return out


def _changes(func: Any) -> bool:
    name = func.__name__.removeprefix("_foreach_")
    return func == SET_DATA or writes(name)


def _an_optimizer_steps() -> bool:
    """Whether one of torch's collects what it will update: to it, a parameter
    without elements costs as much as one with some."""
    if torch.compiler.is_compiling():
        return False
    frame = sys._getframe(2)
    name = str(frame.f_globals.get("__name__", ""))
    return name.startswith("torch.optim.") and (
        frame.f_code.co_name in ("_init_group", "step")
    )


def _came(anchor: Tensor) -> None:
    """A backward has passed an anchor, compiled ones too."""
    if isinstance(anchor, Anchor) and (engine := anchor.engine()):
        engine.came(anchor)
