"""Arithmetic with parameters that stand for rows of tables.

An :class:`~persia.nn.anchor.Anchor` has no elements. What loops over
parameters compute with it (averages of models, target networks) is noted
here as a sum of terms, each a factor and the tables of a module. It is
carried out on the rows where the sum is written into an anchor. Another write
raises InvalidArgument: it would reach no row. Optimizers write as they do
with any parameter; rows have their own optimizer.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from persia import errors
from persia.base.functions import (
    GET_DATA,
    SET_DATA,
    answers,
    ordinary,
    reduced,
)
from persia.base.torch_private import without_subclasses
from persia.base.warning import warn
from persia.store.engine import Engine, engine_of

if TYPE_CHECKING:
    from persia.nn.anchor import Anchor
    from persia.nn.lookups import Collection
    from persia.store.store import Store

_ROWS = 1 << 16  # combined in one call
#: What gives the same values: on another device, without a gradient.
_SAME = frozenset(
    "detach detach_ to cpu cuda float double half bfloat16 type contiguous "
    "view_as expand_as alias requires_grad_ share_memory_".split()
)
_TORCHS = ("torch.optim.", "torch._functorch.")
_COPIES = frozenset(("clone", "__deepcopy__"))
#: What is known of sums, by the names of functions and operators.
_KNOWN = {
    **dict.fromkeys(("mul", "multiply", "__mul__", "__rmul__"), "mul"),
    **dict.fromkeys(("div", "divide", "true_divide", "__truediv__"), "div"),
    **dict.fromkeys(("add", "__add__", "__radd__"), "add"),
    **dict.fromkeys(("sub", "subtract", "__sub__"), "sub"),
    **dict.fromkeys(("rsub", "__rsub__"), "rsub"),
    **dict.fromkeys(("neg", "negative", "__neg__"), "neg"),
    **dict.fromkeys(("__imul__",), "mul_"),
    **dict.fromkeys(("__itruediv__", "__idiv__"), "div_"),
    **dict.fromkeys(("__iadd__",), "add_"),
    **dict.fromkeys(("__isub__",), "sub_"),
    "lerp": "lerp",
    "copy_": "copy_",
    "zero_": "zero_",
    "zeros_like": "zeros_like",
}
for _name in ("mul", "multiply", "div", "divide", "true_divide"):
    _KNOWN[f"{_name}_"] = f"{_KNOWN[_name]}_"
for _name in ("add", "sub", "subtract", "neg", "negative", "lerp"):
    _KNOWN[f"{_name}_"] = f"{_KNOWN[_name]}_"


def writes(name: str) -> bool:
    """Whether a function of torch changes its first argument."""
    in_place = name.endswith("_") and not name.startswith("_")
    operator = name.startswith("__i") and name[3:-2] in (
        *("add", "sub", "mul", "matmul", "div", "truediv", "floordiv"),
        *("mod", "pow", "and", "or", "xor", "lshift", "rshift"),
    )
    return name not in _SAME and (
        in_place or operator or name == "__setitem__"
    )


#: Methods of a parameter that end here.
METHODS = tuple(
    sorted(
        {n for n in dir(Tensor) if writes(n)}
        | {n for n in (*_SAME, *_COPIES, *_KNOWN) if hasattr(Tensor, n)}
        - {"requires_grad_", "share_memory_", "__deepcopy__", "expand_as"}
        | set("pow __pow__ square abs norm sum mean dot view reshape".split())
        | set("flatten ravel".split())
    )
)


class Source(NamedTuple):
    """Tables whose rows a parameter stands for, in their order."""

    store: Store
    tables: tuple[str, ...]
    dims: tuple[int, ...]
    module: weakref.ref[Collection] | None

    @classmethod
    def of(cls, module: Collection) -> Source:
        configs = module.tables
        return cls(
            module.store,
            tuple(c.name for c in configs),
            tuple(c.embedding_dim for c in configs),
            weakref.ref(module),
        )

    def same(self, other: Source) -> bool:
        return self.store is other.store and self.tables == other.tables

    def leads(self, table: str) -> bool:
        """Whether it is written through this one, of several modules."""
        module = None if self.module is None else self.module()
        return module is None or engine_of(self.store).leads(module, table)

    def given(self) -> tuple[int, ...]:
        """Other after each ``parameter.data = other``: torch's parameter has
        another memory then, and a ``data`` read before is the old one."""
        engine = engine_of(self.store)
        return tuple(engine.given.get(t, 0) for t in self.tables)

    def give(self) -> None:
        """Notes that the parameter has other data."""
        given = engine_of(self.store).given
        given.update((t, given.get(t, 0) + 1) for t in self.tables)

    def version(self) -> tuple[Any, ...]:
        """Other after each change of the rows: by hand, and by updates."""
        engine = engine_of(self.store)
        if not self.store.remote:
            engine.core.settle()
        writes = tuple(engine.writes.get(t, 0) for t in self.tables)
        return (engine.cleared, *writes), engine.core.updates()


class Term(NamedTuple):
    """A factor of the rows of a moment."""

    source: Source
    version: tuple[Any, ...]
    factor: float


class Named(NamedTuple):
    """The tables of a module, which it does not keep alive, and a moment;
    None: whenever it is asked."""

    module: weakref.ref[Collection]
    version: tuple[Any, ...] | None

    def terms(self) -> tuple[Term, ...] | None:
        """None: they are gone."""
        module = self.module()
        if module is None or module.store.closed:
            return None
        source = Source.of(module)
        return (Term(source, self.version or source.version(), 1.0),)


class Value(Tensor):
    """What is known of a sum of parameters. It has no elements, or, of a
    ``state_dict()``, those that name its rows."""

    _terms: tuple[Term, ...] = ()
    _alias = False  # it is the value of a parameter: to write it, sets rows
    _given: tuple[int, ...] = ()  # of an alias: as Source.given() was
    _state: Named | None = None  # what it is instead, in a state_dict()

    @staticmethod
    def of(
        data: Tensor,
        terms: Sequence[Term],
        alias: bool = False,
        state: Named | None = None,
    ) -> Value:
        with without_subclasses():
            found: Value = data.as_subclass(Value)
        found._terms, found._alias, found._state = tuple(terms), alias, state
        if alias and terms:
            found._given = terms[0].source.given()
        return found

    @answers
    def __torch_function__(
        cls: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        return run(func, args, kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return reduced(self, protocol)


def run(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """A function of torch, of parameters that stand for rows."""
    name = "data" if func in (GET_DATA, SET_DATA) else func.__name__
    if torch.compiler.is_compiling() or in_torch():
        return _plain(func, args, kwargs)
    if name.startswith("_foreach_"):
        return _each(func, name.removeprefix("_foreach_"), args, kwargs)
    first = args[0] if args else kwargs.get("tensor", kwargs.get("input"))
    source = _terms_of(first)
    if name == "stack" and (states := [a for a in _ours(args) if _named(a)]):
        raise _no_rows("stack()", _source_of(states[0]))
    if func == SET_DATA:
        return _set_data(first, args[1])
    if source is not None and (func == GET_DATA or name in _SAME):
        out = _plain(func, args, kwargs)
        if not isinstance(out, Tensor) or (out.numel() and not _named(first)):
            return out
        return Value.of(out, source, _is_alias(first), _named(first))
    if source is not None and name in _COPIES:
        return _copied(first, source)
    known = _KNOWN.get(name)
    terms = None if known is None else _sum(known, args, kwargs)
    if source is not None and writes(name):
        return _write(func, (first, *args[1:], *kwargs.values()), terms)
    if terms is not None and (state := _state_among(args)) is not None:
        return Value.of(_plain(Tensor.clone, (state,), {}), terms)
    out = _plain(func, args, kwargs)
    if terms is not None and known is not None and not known.endswith("_"):
        out = Value.of(out, terms)
    elif name not in _SAME and _has_grad(out):
        for one in _ours(args):
            warn_of_missing(engine_of(_source_of(one).store), "a loss")
    return out


def _plain(func: Any, args: Any, kwargs: Any) -> Any:
    out = ordinary(func, args, kwargs)
    return out.as_subclass(Tensor) if type(out) is Value else out


def in_torch() -> bool:
    """Whether an optimizer writes, itself or by a function beside it, or a
    compiler asks. What a closure of its step does is the user's own."""
    frame = _outside(3)
    if frame is None:
        return False
    name, above = _module(frame), frame.f_back
    if name.startswith(_TORCHS):
        return "swa_utils" not in name
    beside = above is not None and _module(above) == name and _steps(above)
    return _steps(frame) or beside


def _outside(depth: int) -> FrameType | None:
    """The first of the frames above that is not ours."""
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None and _module(frame).startswith("persia."):
        frame = frame.f_back
    return frame


def _module(frame: FrameType | None) -> str:
    if frame is None:
        return ""
    return str(frame.f_globals.get("__name__", ""))


def _steps(frame: FrameType) -> bool:
    return isinstance(frame.f_locals.get("self"), torch.optim.Optimizer)


def _anchor_of(one: Any) -> Anchor | None:
    from persia.nn.anchor import Anchor

    return one if isinstance(one, Anchor) and one.owner() else None


def _ours(args: Any) -> list[Any]:
    found = []
    for one in args:
        if isinstance(one, list | tuple):
            found += _ours(one)
        elif _terms_of(one):
            found.append(one)
    return found


def _terms_of(one: Any) -> tuple[Term, ...] | None:
    """The sum that a tensor is; None: it is not one of parameters."""
    if isinstance(one, Value):
        if one._state is not None:
            return one._state.terms()
        if not one._alias:
            return one._terms
        source = one._terms[0].source
        if one._given != source.given():  # torch's has the former values
            raise _stale(source)
    elif (anchor := _anchor_of(one)) is not None:
        source = anchor.source()
    else:
        return None
    return (Term(source, source.version(), 1.0),)


def _source_of(one: Any) -> Source:
    terms = _terms_of(one)
    assert terms
    return terms[0].source


def _is_alias(one: Any) -> bool:
    return one._alias if isinstance(one, Value) else True


def _named(one: Any) -> Named | None:
    return one._state if isinstance(one, Value) else None


def _state_among(args: Sequence[Any]) -> Value | None:
    """What has elements, of any number: those of a sum mean nothing."""
    return next((a for a in args if isinstance(a, Value) and a.numel()), None)


def _has_grad(out: Any) -> bool:
    return isinstance(out, Tensor) and out.requires_grad


def _number(one: Any) -> float | None:
    if isinstance(one, bool):
        return None
    if isinstance(one, int | float):
        return float(one)
    if isinstance(one, Tensor) and one.numel() == 1:
        return float(one)
    return None


def _sum(
    known: str, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Term, ...] | None:
    """The terms of a result; None: it is no sum of parameters."""
    known = known.rstrip("_")
    named = [kwargs[n] for n in ("other", "end", "src") if n in kwargs]
    a, *rest = [*args, *named]
    b = rest[0] if rest else None
    mine, other = _terms_of(a), _terms_of(b)
    if known in ("mul", "div"):
        sum_, by = (mine, _number(b)) if mine is not None else (other, None)
        if mine is None and known == "mul":
            by = _number(a)
        if sum_ is None or by is None or kwargs.get("rounding_mode"):
            return None
        if known == "div":
            by = 1.0 / by if by else math.nan
        return _scaled(sum_, by)
    if known == "zero" or known == "zeros_like":
        return ()
    if mine is None:
        return None
    if known == "neg":
        return _scaled(mine, -1.0)
    if known in ("add", "sub") and isinstance(b, int | float) and b == 0:
        other = ()  # what sum() begins with
    if other is None:
        return None
    if known == "copy":
        return other
    alpha = _number(kwargs.get("alpha", 1))
    if known == "lerp":
        weight = _number(kwargs.get("weight", rest[-1]))
        if weight is None:
            return None
        mine, alpha = _scaled(mine, 1.0 - weight), weight
    if alpha is None:
        return None
    if known == "rsub":
        mine, other = other, mine
    if known in ("sub", "rsub"):
        alpha = -alpha
    found = _added(mine, _scaled(other, alpha))
    if known in ("add", "lerp"):  # else it may be to compare two moments
        _check_fresh(found)
    return found


def _scaled(terms: tuple[Term, ...], by: float) -> tuple[Term, ...]:
    return tuple(t._replace(factor=t.factor * by) for t in terms)


def _added(a: tuple[Term, ...], b: tuple[Term, ...]) -> tuple[Term, ...]:
    """Equal ones together."""
    out = list(a)
    for term in b:
        for i, one in enumerate(out):
            if one.source.same(term.source) and one.version == term.version:
                out[i] = one._replace(factor=one.factor + term.factor)
                break
        else:
            out.append(term)
    return tuple(out)


def _each(
    func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """A function of lists: ours one by one, all others together."""
    lists = [isinstance(a, list | tuple) for a in args]
    n = len(args[0])
    mine = {
        i
        for i in range(n)
        if any(
            _terms_of(a[i]) is not None
            for a, many in zip(args, lists, strict=True)
            if many
        )
    }
    others = [i for i in range(n) if i not in mine]
    out: dict[int, Any] = {}
    if others:
        some = [
            [a[i] for i in others] if many else a
            for a, many in zip(args, lists, strict=True)
        ]
        done = _plain(func, some, kwargs)
        out.update(zip(others, done or [None] * len(others), strict=True))
    method = getattr(Tensor, name, None) or getattr(torch, name)
    for i in sorted(mine):
        one = [
            a[i] if many else a for a, many in zip(args, lists, strict=True)
        ]
        out[i] = run(method, tuple(one), kwargs)
    return None if name.endswith("_") else [out[i] for i in range(n)]


# ---- writing


def _set_data(target: Any, value: Any) -> None:
    """``parameter.data = value``; also how torch moves a parameter."""
    terms = _terms_of(value)
    source = _source_of(target)
    if terms is None and not by_torch():
        raise _no_rows("data = a tensor", source)
    if isinstance(value, Value) and terms is not None:
        if not (value._alias and terms[0].source.same(source)):
            _assign(source, terms)
            source.give()
        elif not value._state and _written_since(value._terms[0], source):
            raise _stale(source)
        if value._state:
            return
    _plain(SET_DATA, (target, value), {})


def _written_since(term: Term, source: Source) -> bool:
    """Other than by updates: torch moves parameters between them."""
    return bool(term.version[0] != source.version()[0])


def _write(
    func: Any, args: tuple[Any, ...], terms: tuple[Term, ...] | None
) -> Any:
    name, target = func.__name__, args[0]
    if terms is None and name == "copy_" and _named(target):
        return _load_state(target, args[1])
    if terms is None:
        raise _no_rows(name, _source_of(target))
    if _is_alias(target):
        _assign(_source_of(target), terms)
        terms = _terms_of(target) or ()
    if isinstance(target, Value) and not (target._alias and target._state):
        target._terms, target._state = terms, None
    return target


def _load_state(target: Value, given: Tensor) -> Tensor:
    """A state that was saved is written into one of a model: what torch loads
    so, it gives the model later."""
    module = None if target._state is None else target._state.module()
    if not by_torch() and module is not None:
        module.set_extra_state(given)
    _plain(Tensor.copy_, (target, given), {})
    target._terms, target._alias, target._state = (), False, None
    target.__class__ = Tensor  # type: ignore[assignment]
    return target


def by_torch() -> bool:
    """Whether torch itself gives a parameter its data, as to move it."""
    name = _module(_outside(3))
    return name.startswith("torch.") and not name.startswith("torch.nn.utils")


def _no_rows(what: str, source: Source) -> errors.PersiaError:
    return errors.InvalidArgument(
        f"{what} of a parameter that stands for rows of tables "
        f"{list(source.tables)} would change none of them. Only sums of "
        "models' parameters reach rows (averages, target networks: mul_, "
        "add_, lerp_, copy_). For other values use store.set_rows(), "
        "reset_parameters() or the init= of the table's config, and leave "
        "this parameter out: it has no elements (parameter.numel() == 0)"
    )


def _stale(source: Source) -> errors.PersiaError:
    return errors.InvalidArgument(
        f"a value of parameters was read before the rows of tables "
        f"{list(source.tables)} changed, and holds no rows: a clone() would. "
        "Compute with parameters and write the result at once, or keep "
        "averages in a torch.optim.swa_utils.AveragedModel"
    )


def _copied(one: Any, terms: tuple[Term, ...]) -> Value:
    """A copy, which later changes do not reach."""
    plain = _plain(Tensor.clone, (one,), {})
    if (state := _named(one)) is not None:
        state = state._replace(version=terms[0].version)
        return Value.of(plain, (), state=state)
    if not terms or terms[0].source.store.remote:
        # To write it later is refused, if rows have changed.
        return Value.of(plain, terms)
    source = terms[0].source
    if len(terms) > 1 or terms[0].factor != 1.0:
        raise errors.InvalidArgument(
            "a copy of an average of parameters that stand for rows of "
            f"tables {list(source.tables)} would hold none of them. Keep the "
            "average in a torch.optim.swa_utils.AveragedModel(model)"
        )
    _check_fresh(terms)
    store = engine_of(source.store).snapshot(source.store)
    copy = Source(store, source.tables, source.dims, None)
    return Value.of(plain, (Term(copy, copy.version(), 1.0),))


def named(module: Collection, state: Tensor) -> Tensor:
    """What a ``state_dict()`` has of a module with tables: averages of it
    reach rows, as those of parameters do. A copy of it holds no rows."""
    if torch.compiler.is_compiling():
        return state
    return Value.of(state, (), True, Named(weakref.ref(module), None))


def carry_out(anchor: Anchor, value: Any) -> bool:
    """Gives the rows the values of a sum, if a state that is loaded has one;
    False: it has rows of one moment, or none."""
    if not isinstance(value, Value) or value._state is not None:
        return False
    terms = value._terms
    target = anchor.source()
    # A module that has two names in a model is loaded twice.
    if anchor.carried != (terms, target.version()):
        _assign(target, terms)
        anchor.carried = terms, target.version()
    return True


def check_in_place(module: Collection, given: Tensor) -> None:
    """Raises if what is in the place of a module's parameter, as by
    ``functional_call``, stands for other values than those of its rows."""
    anchor = _anchor_of(given)
    if anchor is not None:
        good = anchor.owner() is module
    elif type(given) is nn.Parameter and not given.numel():
        return  # of a library that wraps them
    else:
        terms = _terms_of(given)
        good = terms is not None and _is_as_now(terms, Source.of(module))
    if not good:
        raise errors.InvalidArgument(
            "a module with tables "
            f"{[c.name for c in module.tables]} is called with a parameter "
            "of other values (torch.func.functional_call): it would look up "
            "the rows as they are. Call a copy.deepcopy(model) whose "
            "parameters were given these values"
        )


def _is_as_now(terms: Sequence[Term], own: Source) -> bool:
    """Whether a sum has the values of rows as they are now."""
    if len(terms) != 1 or terms[0].factor != 1.0:
        return False
    source, version, _ = terms[0]
    if source.same(own):
        return version == own.version()
    mine = engine_of(own.store).has_snapshot(source.store)
    return mine and source.tables == own.tables


def _check_fresh(terms: Sequence[Term]) -> None:
    for term in terms:
        if term.version != term.source.version():
            raise _stale(term.source)


def _assign(target: Source, terms: tuple[Term, ...]) -> None:
    """Gives the rows of a parameter the values of a sum."""
    _check_fresh(terms)
    for term in terms:
        if term.source.dims != target.dims:
            raise errors.InvalidArgument(
                f"tables {list(term.source.tables)} have embedding_dim "
                f"{list(term.source.dims)}, {list(target.tables)} have "
                f"{list(target.dims)}: their parameters cannot be added"
            )
    itself = len(terms) == 1 and terms[0].source.same(target)
    if itself and terms[0].factor == 1.0:
        return
    engine_of(target.store).check_writable("an average of parameters")
    scales = engine_of(target.store).scales
    for at, table in enumerate(target.tables):
        if target.leads(table):
            parts = [(t.source, t.source.tables[at], t.factor) for t in terms]
            scale = scales.get(table)
            _combine(target, table, parts, scale)
            alone = all(t.source.same(target) for t in terms)
            if alone:  # later rows have a part in what is added later
                factor = sum(t.factor for t in terms)
                before = _valid(target, table, scale)
                key = _moment(target, table)
                scales[table] = key, factor * before
            else:
                scales.pop(table, None)


def _moment(source: Source, table: str) -> tuple[Any, ...]:
    engine = engine_of(source.store)
    return engine.cleared, engine.writes.get(table, 0), engine.core.updates()


def _valid(source: Source, table: str, scale: Any) -> float:
    """What a row that is not there is multiplied with."""
    if scale is None or scale[0] != _moment(source, table):
        return 1.0
    return float(scale[1])


def _combine(
    target: Source,
    table: str,
    parts: Sequence[tuple[Source, str, float]],
    scale: Any,
) -> None:
    """Sets the rows of a table: those of all tables of the sum."""
    scaled = _valid(target, table, scale)
    ids = [target.store.ids(table)]
    ids += [source.store.ids(name) for source, name, _ in parts]
    dim = target.store.tables[table].embedding_dim
    for some in torch.unique(torch.cat(ids)).split(_ROWS):
        values = torch.zeros(len(some), dim, dtype=torch.float32, device="cpu")
        _, state, _ = target.store.rows_and_state(table, some)
        for source, name, factor in parts:
            rows, _, there = source.store.rows_and_state(name, some)
            if scaled != 1.0 and source.store is target.store:
                rows[~there] *= scaled
            values.add_(rows, alpha=factor)
        target.store.set_rows(table, some, values, state)


def warn_of_missing(engine: Engine, what: str) -> None:
    """Once a store: parameters that stand for rows are in a loss or norm."""
    if what in engine.told:
        return
    engine.told.add(what)
    named = ", ".join(map(repr, sorted(engine.tables)))
    warn(
        f"{what} over parameters() does not have the rows of tables {named}: "
        "they are no parameters. For a penalty add persia.penalty(model, "
        "l2=..., l1=...) to the loss, or give the store's optimizer "
        "weight_decay=; to measure or clip gradients use "
        'persia.clip_grad_norm_(model, max_norm) with Store(update="step"), '
        "or max_grad_norm= of persia.optim"
    )
