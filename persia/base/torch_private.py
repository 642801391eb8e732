"""All that Persia uses of torch beyond its documented interface.

Each function has a fallback. :func:`missing` says which parts a release of
torch lacks; then models run eager where their embeddings are looked up, with
a warning, instead of failing at import.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterable
from types import CodeType, FrameType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from persia import errors
from persia.base.warning import warn

Function = TypeVar("Function", bound=Callable[..., Any])


def _effects() -> tuple[Any, Any]:
    from torch._higher_order_ops.effects import (
        _EffectType,
        _register_effectful_op,
    )

    return _register_effectful_op, _EffectType.ORDERED


_PARTS: dict[str, Callable[[], Any]] = {
    "ordered effects of operators": _effects,
    "_AutoDispatchBelowAutograd": lambda: torch._C._AutoDispatchBelowAutograd,
    "_current_graph_task_id": lambda: torch._C._current_graph_task_id,
}


def missing() -> list[str]:
    """The private parts that this torch lacks, of those that compilation or
    ``torch.utils.checkpoint`` need."""
    found = []
    for name, part in _PARTS.items():
        try:
            part()
        except (ImportError, AttributeError):
            found.append(name)
    return found


def order_effects(operators: Iterable[Any]) -> bool:
    """Registers operators as ordered effects: a compiler may neither drop,
    merge nor reorder them. False, with a warning: this torch cannot."""
    lacks = missing()
    if lacks:
        warn(
            f"torch {torch.__version__} lacks {', '.join(lacks)}, which "
            "Persia uses: torch.compile leaves lookups of embeddings out of "
            "its graphs, and torch.utils.checkpoint around them is not "
            "supported. A newer Persia may know this release of torch"
        )
        return False
    register, ordered = _effects()
    for operator in operators:
        register(operator, ordered)
    return True


def eager_without(supported: bool, function: Function) -> Function:
    """``function``, or, where compilers cannot have it in a graph, the same
    left out of all graphs."""
    if supported:
        return function
    eager: Function = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return eager


def constant_while_tracing(function: Function) -> Function:
    """A compiler calls it while it traces, and keeps the result.

    All that torch._dynamo.assume_constant_result does. To name it would
    import torch._dynamo, which takes as long as the rest of torch.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def without_compiler(kind: type[Any]) -> type[Any]:
    """The same optimizer of torch, for a process that compiles nothing.

    Methods of torch's import torch._dynamo, to keep themselves out of graphs.
    """
    names = ("add_param_group", "load_state_dict", "state_dict", "zero_grad")
    methods = {name: inspect.unwrap(getattr(kind, name)) for name in names}
    step = torch.no_grad()(inspect.unwrap(kind.step))
    return type(kind.__name__, (kind,), {**methods, "step": step})


def below_autograd() -> contextlib.AbstractContextManager[None]:
    """Operators called within record no graph."""
    guard: Any = getattr(torch._C, "_AutoDispatchBelowAutograd", torch.no_grad)
    context: contextlib.AbstractContextManager[None] = guard()
    return context


def without_subclasses() -> contextlib.AbstractContextManager[None]:
    """Within, subclasses of tensors are ordinary tensors to functions."""
    guard: Any = torch._C.DisableTorchFunctionSubclass
    context: contextlib.AbstractContextManager[None] = guard()
    return context


def amp_unscale_() -> Any:
    """What GradScalers unscale gradients with; None: this torch has none."""
    name = "_amp_foreach_non_finite_check_and_unscale_"
    return getattr(torch, name, None)


def foreach_zero_() -> Any:
    """What optimizers zero all gradients with; None: this torch has none."""
    return getattr(torch, "_foreach_zero_", None)


def in_backward() -> bool:
    """Whether this thread is within a backward."""
    return graph_task() != -1


def jit_traces() -> bool:
    """Whether torch.jit.trace records what this thread does."""
    trace: Any = torch.jit
    return bool(trace.is_tracing())


def transforms() -> bool:
    """Whether a transform of torch.func (vmap, grad, jvp) is at work."""
    active = getattr(torch._C, "_are_functorch_transforms_active", None)
    return active is not None and bool(active())


def register_tree(
    kind: type[Any],
    flatten: Callable[[Any], tuple[list[Any], Any]],
    unflatten: Callable[[Any, Any], Any],
) -> None:
    """Makes a class a container of tensors to torch: of inputs and outputs of
    exported graphs, of ``tree_map`` and ``torch.func``.

    ``flatten`` gives what it holds, and a context that JSON can write.
    """
    try:
        from torch.utils._pytree import SequenceKey, register_pytree_node
    except ImportError:
        return  # torch.export then names the class that it does not know

    def flatten_with_keys(one: Any) -> tuple[list[tuple[Any, Any]], Any]:
        parts, context = flatten(one)
        return [(SequenceKey(i), p) for i, p in enumerate(parts)], context

    register_pytree_node(
        kind,
        flatten,
        lambda parts, context: unflatten(list(parts), context),
        serialized_type_name=f"{kind.__module__}.{kind.__qualname__}",
        flatten_with_keys_fn=flatten_with_keys,
    )


def graph_is_kept() -> bool:
    """Whether this thread is within a backward(retain_graph=True)."""
    kept = getattr(
        torch._C._autograd, "_get_current_graph_task_keep_graph", None
    )
    return kept is not None and in_backward() and bool(kept())


def runs_node(node: Any) -> bool:
    """Whether the backward of this thread calls a node: it may be one to some
    ``inputs`` alone."""
    asked: Any = getattr(torch._C, "_will_engine_execute_node", None)
    return asked is None or bool(asked(node))


def gives_out(leaf: Any) -> bool:
    """Whether this thread is within a ``torch.autograd.grad`` that gives out
    the gradient of a leaf, by its node."""
    try:
        runs_node(leaf)
    except RuntimeError:  # that is what torch answers then
        return True
    return False


def when_backward_ends(call: Callable[[], None]) -> None:
    """Calls it when the backward of this thread has called all its nodes."""
    autograd: Any = torch.autograd.Variable
    autograd._execution_engine.queue_callback(call)


def graph_task() -> int:
    """The number of the backward of this thread; -1: it is in none."""
    task = getattr(torch._C, "_current_graph_task_id", None)
    return -1 if task is None else int(task())


def makes_parameter() -> bool:
    """Whether ``nn.Parameter(tensor)`` asks something of the tensor."""
    return _calls(nn.Parameter.__new__.__code__)


def sets_parameter() -> bool:
    """Whether ``module.name = tensor`` asks something of the tensor."""
    return _calls(nn.Module.__setattr__.__code__)


def _calls(code: CodeType) -> bool:
    """Whether a function of torch called us, by at most one other."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and _is_ours(frame):
        frame = frame.f_back
    for _ in range(2):
        if frame is None or frame.f_code is code:
            break
        frame = frame.f_back
    return frame is not None and frame.f_code is code


def _is_ours(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).startswith("persia.")


def take_for_equal(one: int, other: int) -> None:
    """Tells a graph that two sizes are equal. They are compared outside."""
    check: Any = getattr(torch, "_check", None)
    if check is not None:
        check(one == other)


def constant_sizes(tensor: Tensor) -> list[int | None]:
    """The sizes of a tensor of a graph; None: one that may change."""
    try:
        from torch.fx.experimental.symbolic_shapes import is_concrete_int
    except ImportError:
        return [s if isinstance(s, int) else None for s in tensor.shape]
    return [int(s) if is_concrete_int(s) else None for s in tensor.shape]


def version_of(tensor: Tensor) -> int:
    """A number that grows with each in-place change of a tensor."""
    return tensor._version


def made_a_step(optimizer: torch.optim.Optimizer) -> None:
    """A scheduler asks whether the optimizer made a step before its own."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def checks_metadata(node: torch.fx.Node) -> bool:
    """Whether a node of a graph compares types and devices, and no more."""
    return str(node.target) == "aten._assert_tensor_metadata.default"


def shape_guards(program: torch.export.ExportedProgram) -> list[str]:
    """What a graph takes for true of the sizes of its inputs."""
    return list(getattr(program, "_guards_code", ()))


def onednn_linear() -> Any:
    """The operator of oneDNN for a linear layer on the CPU, called with
    (x, weight, bias, "relu" or "none", [], ""); None: this torch has none.

    torch itself calls MKL, which leaves half of the width of an AMD
    processor's vectors unused.
    """
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return None
    try:
        found = torch.ops.mkldnn._linear_pointwise.default
        x = torch.ones(1, 1)
        found(x, x, None, "relu", [], "")
    except (AttributeError, RuntimeError, TypeError):
        return None
    return found


def uncompiled(model: nn.Module) -> nn.Module:
    """The module that ``torch.compile(model)`` has wrapped, or the model."""
    inner = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, nn.Module) else model


def default_key_value_store() -> Any:
    """That of torch.distributed's process group.

    Raises:
        Unavailable: this torch has it elsewhere.
    """
    try:
        from torch.distributed.distributed_c10d import _get_default_store
    except ImportError:
        raise errors.Unavailable(
            f"torch {torch.__version__} hides the key-value store by which "
            "ranks find each other: use Store(servers=...) with parameter "
            "servers, or a torch that this Persia knows"
        ) from None
    return _get_default_store()
