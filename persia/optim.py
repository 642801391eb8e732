"""Optimizers of embedding rows, as ``torch.optim.Optimizer`` objects.

They hold no parameters: their ``param_groups`` are one group per table of the
:class:`persia.Store` that they are given to, with the hyper-parameters of that
table. Learning-rate schedulers, ``torch.amp.GradScaler`` and ``state_dict()``
work as usual.

All are *lazy*: a row changes only when it has a gradient. Weight decay is
coupled (added to the gradient) except in :class:`AdamW` and
:class:`RowWiseAdam`, and touches touched rows only. Where every row is touched
at every step the results of the optimizers that torch has too equal those of
its dense ones.

Every optimizer takes three more keywords, which are entries of its groups:

* ``max_grad_norm``: the gradient of a row is clipped to this L2 norm (0: not);
* ``max_norm``: then the row is scaled down to this L2 norm (0: not);
* ``weight_bound``: then its elements are clamped to [-bound, bound] (0: not).

Both hold before the row is stored: those of a bf16 or int8 table are rounded
then, and may exceed them by one unit in the last place (of bf16 less than 1 %
of the element, of int8 1/127 of the row's largest).
"""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, ClassVar, TypedDict, Unpack

import torch
from torch import Tensor

from persia import errors
from persia.base.check import kind, number

if TYPE_CHECKING:
    from persia.store.engine import Engine
    from persia.store.store import Store

__all__ = [
    "FTRL",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "RowLimits",
    "RowWiseAdagrad",
    "RowWiseAdam",
    "SparseOptimizer",
]


def _probes(
    values: float | list[float], device: torch.device | str = "cpu"
) -> Tensor:
    """float32, whatever torch's defaults are."""
    return torch.tensor(values, dtype=torch.float32, device=device)


def _eps(value: Any, name: str = "eps") -> float:
    """Above 0, as float32 too: elements that have had no gradient are divided
    by it alone."""
    return number(name, value, torch.finfo(torch.float32).tiny)


class RowLimits(TypedDict, total=False):
    """Keywords that every optimizer takes: limits of one row, 0 for none."""

    max_grad_norm: float
    max_norm: float
    weight_bound: float


class _Probe(torch.nn.Parameter):
    """Stands for the gradients of a table: its own is 1, or NaN where one of
    them is not finite. That is found out when one reads it, for it waits for
    gradients that are on their way from a device. The ranks of a job agree on
    it then: so a GradScaler, which all ranks call, finds the same on all.
    """

    _owner: weakref.ref[SparseOptimizer] | None = None
    _gradient: Tensor | None = None

    @property
    def grad(self) -> Tensor | None:
        owner = None if self._owner is None else self._owner()
        if owner is not None:
            owner._agree()
        return self._gradient

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self._gradient = value

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return type(self), (self.data,)  # no owner and no gradient: as a copy


class SparseOptimizer(torch.optim.Optimizer):
    """The base of all optimizers of a store; use one of its subclasses."""

    algorithm: ClassVar[str] = ""
    # GradScaler calls step() itself; the probe of each group tells it what is
    # finite.
    _step_supports_amp_scaling = True

    def __init__(self, defaults: dict[str, Any], limits: RowLimits) -> None:
        for name in limits:
            if name not in RowLimits.__annotations__:
                raise TypeError(
                    f"{type(self).__name__}() got an unexpected keyword "
                    f"argument {name!r}"
                )
        settings = {"lr": number("lr", defaults.pop("lr"), 0.0), **defaults}
        for name in RowLimits.__annotations__:
            settings[name] = number(name, limits.get(name, 0.0), 0.0)
        self._store: weakref.ref[Store] | None = None
        self._engine: weakref.ref[Engine] | None = None
        self._probe_grads = _probes([])
        # Where the values of a backward are whose gradients the probes do
        # not show yet.
        self._unread: torch.device | None = None
        self._agreed = False  # with the other ranks, on the probes
        # torch refuses an empty list of parameters, but not a group without
        # any.
        super().__init__([{"params": []}], settings)
        self.param_groups.clear()

    def __repr__(self) -> str:
        settings = ", ".join(f"{k}={v}" for k, v in self.defaults.items())
        return f"persia.optim.{type(self).__name__}({settings})"

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Torch's own, without what is around it: that imports torch._dynamo,
        in processes that compile nothing, too.

        Raises:
            InvalidArgument: it has parameters of torch.
        """
        params = param_group["params"]
        if not isinstance(params, list) or not all(
            isinstance(p, _Probe) for p in params
        ):
            raise errors.InvalidArgument(
                "the optimizer of a store updates rows alone, and would never "
                "update these parameters: give them to one of torch.optim"
            )
        add = inspect.unwrap(torch.optim.Optimizer.add_param_group)
        add(self, param_group)

    def _read(self) -> None:
        """Makes probes of the backwards since it was last called."""
        device, self._unread = self._unread, None
        engine = None if self._engine is None else self._engine()
        if device is None or engine is None:
            return
        finite = engine.core.finite()
        grads = _probes([1.0 if ok else math.nan for ok in finite], device)
        self._probe_grads = grads
        for i, group in enumerate(self.param_groups):
            group["params"][0].grad = grads[i : i + 1]

    def _agree(self) -> None:
        """What is not finite on one rank is so on all."""
        self._read()
        if self._agreed:
            return
        self._agreed = True
        engine = None if self._engine is None else self._engine()
        if engine is None or engine.connection.job.world == 1:
            return
        bad = self._probe_grads.new_zeros(
            len(self.param_groups), dtype=torch.bool
        )
        mine = self._probe_grads
        bad[: len(mine)] = mine.isnan()
        of_all = bad.new_tensor(engine.connection.passes.all_max(bad.tolist()))
        mine[of_all[: len(mine)]] = math.nan

    @property
    def store(self) -> Store:
        """The store that this optimizer was given to."""
        store = None if self._store is None else self._store()
        if store is None:
            raise errors.InvalidArgument(
                "this optimizer has no Store; pass it to "
                "persia.Store(optimizer=...)"
            )
        return store

    def _bound(self) -> Engine:
        """That of :attr:`store`."""
        engine = None if self._engine is None else self._engine()
        if engine is None:
            self.store  # raises  # noqa: B018
        assert engine is not None
        return engine

    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None
    ) -> float | None:
        """Applies the gradients of all backwards since the last step.

        With ``Store(update="backward")`` they were applied at the end of each
        backward already, and there is nothing left to do.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        engine = self._bound()
        self._agreed = False
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        if engine.arguments.update == "backward":
            if found_inf is not None:
                engine.unscaled()
            return loss
        engine.begin_step(found_inf is not None)
        if found_inf is not None:
            self._check_device(found_inf.device)
        if found_inf is not None and float(found_inf) > 0:
            engine.discard()
            return loss
        factors = factors_of(self)
        scale: Tensor | None = getattr(self, "grad_scale", None)
        if scale is not None:
            factors = [f / float(scale) for f in factors]
        engine.apply(factors, all_threads=True)
        return loss

    def _check_device(self, scaler: torch.device) -> None:
        """Raises if a GradScaler is not where the probes are: torch copies
        between them without waiting, and the host would read too early."""
        here = self._probe_grads.device
        if here.type != scaler.type:
            raise errors.InvalidArgument(
                f"the GradScaler is on {scaler}, but the modules of the "
                f"store give values on {here}; move the modules there with "
                ".to(), or make the scaler for that device"
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops gradients that no step has applied."""
        engine = None if self._engine is None else self._engine()
        if engine is not None and engine.arguments.update == "step":
            engine.discard()
        for group in self.param_groups:
            group["params"][0].grad = None
        self._probe_grads = _probes([])
        self._unread = None
        self._agreed = False

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the settings of each table that both have, by its name.

        Raises:
            SchemaMismatch: a table was updated by another algorithm.
        """
        try:
            saved = {g["table"]: g for g in state_dict["param_groups"]}
            for group in saved.values():
                group["algorithm"]
        except (TypeError, LookupError):
            raise errors.SchemaMismatch(
                "the state is not of a persia.optim optimizer: it has no "
                "param_groups with table and algorithm; give what its "
                "state_dict() returned"
            ) from None
        groups = []
        for i, mine in enumerate(self.param_groups):
            group = saved.get(mine["table"], mine)
            if group["algorithm"] != mine["algorithm"]:
                raise errors.SchemaMismatch(
                    f"table {mine['table']!r}: the state is of "
                    f"{group['algorithm']}, the table's optimizer is "
                    f"{mine['algorithm']}"
                )
            groups.append({**group, "params": [i]})
        super().load_state_dict({"state": {}, "param_groups": groups})

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        return {
            **state,
            "_probe_grads": _probes([]),
            "_unread": None,
            "_store": None,
            "_engine": None,
        }


# What the engine of a store does with its optimizer.


def bind(optimizer: SparseOptimizer, store: Store, engine: Engine) -> None:
    """Makes it the optimizer of a store."""
    if optimizer._store is not None:
        raise errors.InvalidArgument(
            "this optimizer belongs to another Store; make one optimizer "
            "a Store"
        )
    optimizer._store = weakref.ref(store)
    optimizer._engine = weakref.ref(engine)


def add_table(
    optimizer: SparseOptimizer,
    name: str,
    template: SparseOptimizer,
    lr: float | None,
) -> None:
    """Adds the group of a table, with the settings of ``template``."""
    probe = _Probe(_probes([0.0]))
    probe._owner = weakref.ref(optimizer)
    group = {**template.defaults, "params": [probe], "table": name}
    group["algorithm"] = template.algorithm
    if lr is not None:
        group["lr"] = float(lr)
    optimizer.add_param_group(group)


def gradients_came(optimizer: SparseOptimizer, device: torch.device) -> None:
    """A backward has pushed its gradients. The probes show them when they are
    read, on the device of the values, as a GradScaler expects."""
    optimizer._unread = device
    optimizer._agreed = False


def factors_of(optimizer: SparseOptimizer) -> list[float]:
    """What unscaling and clipping made of the probes: a factor a table."""
    factors: list[float] = []
    if optimizer._unread is None:
        factors = optimizer._probe_grads.tolist()
    factors += [1.0] * (len(optimizer.param_groups) - len(factors))
    return [1.0 if math.isnan(f) else f for f in factors]


class SGD(SparseOptimizer):
    """``w -= lr * g``, with momentum if wished; the formula of
    ``torch.optim.SGD``.

    Args:
        lr: learning rate; it has no default, as one that suits depends on the
            loss.
        momentum: 0 keeps no state; else one float32 buffer a row.
        weight_decay: coupled.
    """

    algorithm = "sgd"

    def __init__(
        self,
        lr: float,
        *,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        **limits: Unpack[RowLimits],
    ) -> None:
        settings = {
            "lr": lr,
            "momentum": number("momentum", momentum, 0.0, 1.0),
            "weight_decay": number("weight_decay", weight_decay, 0.0),
        }
        super().__init__(settings, limits)


class Adagrad(SparseOptimizer):
    """One accumulator an element; the formula of ``torch.optim.Adagrad``.

    Args:
        lr: learning rate.
        eps: added to the root of the accumulator; above 0.
        initial_accumulator_value: of new rows.
        weight_decay: coupled.
    """

    algorithm = "adagrad"

    def __init__(
        self,
        lr: float = 0.05,
        *,
        eps: float = 1e-10,
        initial_accumulator_value: float = 0.0,
        weight_decay: float = 0.0,
        **limits: Unpack[RowLimits],
    ) -> None:
        settings = {
            "lr": lr,
            "eps": _eps(eps),
            "initial_accumulator_value": number(
                "initial_accumulator_value", initial_accumulator_value, 0.0
            ),
            "weight_decay": number("weight_decay", weight_decay, 0.0),
        }
        super().__init__(settings, limits)


class RowWiseAdagrad(Adagrad):
    """One accumulator a row, of the mean squared gradient (torchrec)."""

    algorithm = "rowwise_adagrad"

    def __init__(
        self,
        lr: float = 0.05,
        *,
        eps: float = 1e-8,
        initial_accumulator_value: float = 0.0,
        weight_decay: float = 0.0,
        **limits: Unpack[RowLimits],
    ) -> None:
        super().__init__(
            lr,
            eps=eps,
            initial_accumulator_value=initial_accumulator_value,
            weight_decay=weight_decay,
            **limits,
        )


class Adam(SparseOptimizer):
    """Adam on touched rows, with dense Adam's bias correction
    (``torch.optim.Adam``).

    Its step t counts the store's updates, not those of each row.

    Args:
        lr: learning rate.
        betas: decay of the two moments.
        eps: added after the bias correction; above 0.
        weight_decay: coupled.
    """

    algorithm = "adam"

    def __init__(
        self,
        lr: float = 0.002,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **limits: Unpack[RowLimits],
    ) -> None:
        if not isinstance(betas, (tuple, list)) or len(betas) != 2:
            raise errors.InvalidArgument(
                f"betas is {betas!r}, need two numbers, such as (0.9, 0.999)"
            )
        settings = {
            "lr": lr,
            "betas": (
                number("betas[0]", betas[0], 0.0, 1.0),
                number("betas[1]", betas[1], 0.0, 1.0),
            ),
            "eps": _eps(eps),
            "weight_decay": number("weight_decay", weight_decay, 0.0),
        }
        super().__init__(settings, limits)


class AdamW(Adam):
    """Adam with decoupled weight decay (``torch.optim.AdamW``)."""

    algorithm = "adamw"

    def __init__(
        self,
        lr: float = 0.002,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        **limits: Unpack[RowLimits],
    ) -> None:
        super().__init__(
            lr, betas=betas, eps=eps, weight_decay=weight_decay, **limits
        )


class RowWiseAdam(Adam):
    """Adam with one second moment a row, of the mean squared gradient: a row
    keeps ``dim + 1`` floats of state instead of ``2 * dim``.

    The formula of torchrec's and fbgemm's ``PARTIAL_ROWWISE_ADAM``, whose
    weight decay is decoupled.
    """

    algorithm = "rowwise_adam"


class FTRL(SparseOptimizer):
    """FTRL-proximal (McMahan et al., *Ad Click Prediction: a View from the
    Trenches*, 2013): per element ``z`` and ``n``, and sparse weights by L1.

    ``n`` is the sum of squared gradients, and after each one ``w`` is 0 where
    ``abs(z) <= l1``, otherwise
    ``-(z - sign(z) * l1) / ((beta + sqrt(n)) / lr + l2)``.
    So a row follows from its gradients: little is left of its initial value
    after the first one. Give tables ``init=0.0`` where they are the weights of
    a linear model.

    Args:
        lr: alpha of the paper.
        beta: of the paper; above 0.
        l1: elements are exactly 0 until their gradients outweigh it.
        l2: shrinks elements towards 0.
        initial_accumulator_value: ``n`` of new rows.
    """

    algorithm = "ftrl"

    def __init__(
        self,
        lr: float = 0.1,
        *,
        beta: float = 1.0,
        l1: float = 0.0,
        l2: float = 0.0,
        initial_accumulator_value: float = 0.0,
        **limits: Unpack[RowLimits],
    ) -> None:
        settings = {
            "lr": lr,
            "beta": _eps(beta, "beta"),
            "l1": number("l1", l1, 0.0),
            "l2": number("l2", l2, 0.0),
            "initial_accumulator_value": number(
                "initial_accumulator_value", initial_accumulator_value, 0.0
            ),
        }
        super().__init__(settings, limits)


#: The classes by the names that command lines and servers use.
ALGORITHMS: dict[str, Callable[..., SparseOptimizer]] = {
    kind.algorithm: kind
    for kind in (
        SGD,
        Adagrad,
        RowWiseAdagrad,
        Adam,
        AdamW,
        RowWiseAdam,
        FTRL,
    )
}


def clip_grad_norm_(
    model: torch.nn.Module | Iterable[torch.nn.Module], max_norm: float
) -> Tensor:
    """Clips the gradients of a model, dense and sparse, to one common L2 norm.

    Call it between ``backward()`` (after ``scaler.unscale_`` of all
    optimizers, if there is a scaler) and the ``step()`` of both optimizers.
    Stores need ``update="step"``. The gradients of equal ids are summed before
    they count, those of other ranks count as well (all ranks call it). Dense
    gradients must be the same on all ranks by then, as under
    DistributedDataParallel: so are the norms.

    Args:
        model: a module, or several.
        max_norm: the largest norm that is left as it is; inf: all are, and
            the norm is only measured. Parameters and tables that several
            modules share count once.

    Returns:
        The norm before clipping, a float32 scalar on the CPU.
    """
    if max_norm != math.inf:
        number("max_norm", max_norm, 0.0)
    models = [model] if isinstance(model, torch.nn.Module) else model
    kind("model", models, Iterable, "a module, or a list of them")
    models = [
        kind("model", one, torch.nn.Module, "a list of modules")
        for one in models
    ]
    engines: list[Engine] = []
    parameters: dict[Tensor, None] = {}  # each once
    for part in models:
        parameters.update(dict.fromkeys(part.parameters()))
        for module in part.modules():
            optimizer = getattr(
                getattr(module, "store", None), "optimizer", None
            )
            if isinstance(optimizer, SparseOptimizer):
                engines.append(optimizer._bound())
    engines = list(dict.fromkeys(engines))
    grads = [p.grad for p in parameters if p.numel() and p.grad is not None]
    squares = sum(engine.grad_norm_squared() for engine in engines)
    if grads:
        dense = float(torch.nn.utils.get_total_norm(grads))
        squares += dense * dense
    norm = math.sqrt(squares)
    if max_norm == math.inf:
        return _probes(norm)
    factor = max_norm / (norm + 1e-6)
    if factor < 1.0 or math.isnan(factor):
        for grad in grads:
            grad.mul_(factor)
        for engine in engines:
            engine.optimizer._read()
            engine.optimizer._probe_grads.mul_(factor)
    return _probes(norm)
