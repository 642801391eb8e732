"""Loads the native libraries and registers ``torch.ops.persia.*``.

Pull and push are *ordered effects*: a compiler may neither drop, merge nor
reorder them. Their names carry a version, because inductor's cache on disk
knows a graph by the names of its operators alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from persia import _core, errors
from persia.base.torch_private import (
    below_autograd,
    eager_without,
    gives_out,
    graph_is_kept,
    in_backward,
    order_effects,
    runs_node,
    version_of,
)

if TYPE_CHECKING:
    from persia.store.device import Flight, Way

torch.ops.load_library(  # type: ignore[no-untyped-call]
    str(Path(__file__).parents[1] / "_torch.so")
)

Function = TypeVar("Function", bound=Callable[..., Any])

ops = torch.ops.persia
_NAMES = ("ticket_v2", "pull_v1", "push_v1")

# Store handle -> plan number -> (kind, keys of a batch, output columns): what
# the fake kernels need to know. Filled where plans are made.
SHAPES: dict[int, dict[int, tuple[int, int, int]]] = {}


class Held(NamedTuple):
    """A gradient that the C core holds until optimizer.step().

    Attributes:
        tensors: that it consists of.
        version: their versions() at the backward; a user could change one
            before the step.
        ticket: of its forward.
        leaves: ids of the modules' anchors that it passed.
    """

    tensors: tuple[Tensor | None, ...]
    version: int
    ticket: int
    leaves: frozenset[int]


# By the handle of a store; only of stores with update="step".
HELD: dict[int, list[Held]] = {}


#: Whether compiled graphs may hold the operators.
COMPILES = order_effects(getattr(ops, name).default for name in _NAMES)


def in_graphs(forward: Function) -> Function:
    """A forward of a module: in compiled graphs, if this torch allows it."""
    return eager_without(COMPILES, forward)


def _fake_ticket(
    batch: Tensor, process: Tensor, store: int, grad: bool
) -> Tensor:
    return batch.new_empty((2,), dtype=torch.int64)


def _fake_pull(
    values: Tensor,
    offsets: Tensor | None,
    weights: Tensor | None,
    anchor: Tensor,
    ticket: Tensor,
    store: int,
    plan: int,
) -> tuple[Tensor, Tensor]:
    try:
        kind, keys, width = SHAPES[store][plan]
    except KeyError:
        raise errors.InvalidArgument(
            "this graph looks up a store that is closed, or that another "
            "process had; make it again, of a model in this process"
        ) from None
    n = height = values.shape[0]
    if kind == _core.PLAN_BAGS:
        height = (n if offsets is None else offsets.shape[0] - 1) // keys
    return (
        values.new_empty((height, width), dtype=torch.float32),
        values.new_empty((n,), dtype=torch.int32),
    )


def _fake_look_up(
    values: Tensor,
    offsets: Tensor | None,
    weights: Tensor | None,
    batch: Tensor,
    process: Tensor,
    store: int,
    plan: int,
    grad: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    ticket = _fake_ticket(batch, process, store, grad)
    batch_of = values, offsets, weights, batch, ticket, store, plan
    return (*_fake_pull(*batch_of), ticket)


def _fake_push(
    grad: Tensor,
    values: Tensor,
    offsets: Tensor | None,
    weights: Tensor | None,
    rows: Tensor,
    ticket: Tensor,
    store: int,
    plan: int,
    keep: bool,
) -> None:
    return None


torch.library.register_fake("persia::ticket_v2", _fake_ticket)
torch.library.register_fake("persia::pull_v1", _fake_pull)
torch.library.register_fake("persia::look_up_v1", _fake_look_up)
torch.library.register_fake("persia::push_v1", _fake_push)


def _refuse_double_backward() -> None:
    if torch.is_grad_enabled():
        raise errors.TicketError(
            "backward(create_graph=True) through an embedding: the gradients "
            "of embeddings are pushed, not returned, so they have no "
            "gradients; use create_graph=False, or detach() the embeddings"
        )


def _rows_are_contiguous(grad: Tensor) -> bool:
    apart, step = grad.stride()
    return step == 1 and apart >= grad.shape[1]


# Compiled code and direct calls of the op. Compilers reuse the buffers of a
# graph, so the push copies its gradient (keep=False).


def _setup(
    ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]
) -> None:
    values, offsets, weights, anchor, ticket, store, plan = inputs
    ctx.save_for_backward(values, offsets, weights, output[1], ticket)
    ctx.store, ctx.plan = store, plan
    ctx.exported = anchor.numel() == 0  # see pull()


def _backward(
    ctx: Any, grad: Tensor, _rows: Tensor | None
) -> tuple[Tensor | None, ...]:
    _refuse_double_backward()
    if ctx.exported:
        raise errors.InvalidArgument(
            "backward through an exported graph (torch.export): it looks up "
            "rows, and does not train them. Train the model that it was made "
            "of; or export that of persia.export_torch(model), which has the "
            "rows as weights"
        )
    values, offsets, weights, rows, ticket = ctx.saved_tensors
    ops.push_v1(
        grad.contiguous(),
        values,
        offsets,
        weights,
        rows,
        ticket,
        ctx.store,
        ctx.plan,
        False,
    )
    return None, None, None, grad.new_zeros(1), None, None, None


torch.library.register_autograd(
    "persia::pull_v1", _backward, setup_context=_setup
)


def _refuse_several_backwards(pushed: bool) -> None:
    """With update="backward": before the first one changes a row."""
    if not pushed and not graph_is_kept():
        return
    raise errors.TicketError(
        "several backwards through one forward (retain_graph=True) with "
        'Store(update="backward"): each would be an update of its own, and '
        "the later ones of rows that have changed since the forward. Sum the "
        "losses and call backward() once, or make the store with "
        'update="step", which adds them up until store.optimizer.step()'
    )


def _check_inputs(ctx: Any) -> None:
    """Of a backward to some inputs, which leaves out the node after all
    pushes: it is called at the end nevertheless."""
    nodes = ctx.next_functions
    last = nodes[-1 - len(ctx.leaves)][0]
    if runs_node(last):
        return
    leaves = nodes[len(nodes) - len(ctx.leaves) :]
    if any(gives_out(node) for node, _ in leaves if node is not None):
        raise errors.InvalidArgument(
            "torch.autograd.grad() of parameters that stand for rows of "
            "tables: gradients of rows are pushed, not returned. Leave out "
            "the parameters without elements (p.numel() == 0), or take the "
            "gradients of the vectors that the embedding gave; backward() "
            "trains rows"
        )
    if (engine := last.engine()) is not None:
        engine.ends_with_backward()


def _once_more(batch: Tensor) -> Tensor:
    """The ids of a forward for one more gradient, for its own is given."""
    if int(batch[0]) >= TAKEN:
        raise errors.TicketError(
            "several backwards through one forward whose ids are with an "
            "embedding worker: sum the losses and call backward() once"
        )
    return torch.stack((batch[0], _now))


class _Index:
    """The index of a forward in the core, for as long as its graph lives."""

    __slots__ = ("store", "ticket")

    def __init__(self, ticket: Tensor, store: int) -> None:
        self.ticket: Tensor | None = ticket
        self.store = store

    def __del__(self) -> None:
        if self.ticket is not None:
            _drop(self.ticket, self.store)


class _Call(NamedTuple):
    """What a forward has beside tensors that autograd sees: each of these
    costs time, as does every argument."""

    batch: Tensor
    store: int
    plan: int
    way: Way | None
    flight: Flight | None


class _Pull(torch.autograd.Function):
    """The same in eager: no copy, and exceptions keep their types."""

    @staticmethod
    def forward(
        ctx: Any,
        values: Tensor,
        offsets: Tensor | None,
        weights: Tensor | None,
        anchor: Tensor,
        call: _Call,
        *leaves: Tensor,
    ) -> Tensor:
        batch, store, plan, way, flight = call
        ids = values, offsets, weights
        with below_autograd():
            if way is None or flight is None:
                out, rows, ticket = _look_up(
                    *ids, batch, _process, store, plan, True
                )
            else:
                ticket = _ticket(batch, _process, store, True)
                flight.there, rows = way.pull(
                    *ids, anchor, ticket, store, plan
                )
                out = torch.zeros(1, device="cpu")
        ctx.flight, ctx.leaves = flight, leaves
        ctx.save_for_backward(*ids, rows)
        # Not saved as a tensor: a forward that torch.utils.checkpoint repeats
        # keeps the ticket, and with it the place in the sum, of the first one.
        ctx.ticket, ctx.batch = ticket, batch
        ctx.store, ctx.plan = store, plan
        ctx.index = _Index(ticket, store)
        ctx.pushed = False
        ctx.set_materialize_grads(False)
        result: Tensor = out
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        _refuse_double_backward()
        if grad is None:
            return (None,) * (5 + len(ctx.leaves))
        _check_inputs(ctx)
        held = HELD.get(ctx.store)
        if held is None:
            _refuse_several_backwards(ctx.pushed)
        values, offsets, weights, rows = ctx.saved_tensors
        try:
            if ctx.pushed:  # a pull is needed for each gradient
                again = _once_more(ctx.batch), _process, ctx.store, ctx.plan
                with below_autograd():
                    _, rows, ctx.ticket = _look_up(
                        values, offsets, weights, *again, True
                    )
                ctx.index = _Index(ctx.ticket, ctx.store)
        except RuntimeError as error:
            raise typed(error) from None
        # Columns of a wider gradient (torch.cat) stay where they are, unless
        # they wait for a step: a view has the version of the whole.
        if ctx.flight is None and (
            held is not None or not _rows_are_contiguous(grad)
        ):
            grad = grad.contiguous()
        batch = values, offsets, weights, rows, ctx.ticket, ctx.store, ctx.plan
        try:
            if ctx.flight is None:
                _push(grad, *batch, True)
            else:
                _push_from(*batch, *ctx.flight.take())
        except RuntimeError as error:
            raise typed(error) from None
        ctx.pushed = True
        ctx.index.ticket = None  # the update has it
        if held is not None:
            tensors = (grad, values, offsets, weights)
            leaves = frozenset(map(id, ctx.leaves))
            ticket = int(ctx.ticket[0])
            held.append(Held(tensors, versions(*tensors), ticket, leaves))
        of_leaves = [torch.empty_like(leaf) for leaf in ctx.leaves]
        return (None, None, None, _nothing, None, *of_leaves)


class _Arrive(torch.autograd.Function):
    """Values on a device, from the pull that stands for them on the host: it
    pushes on the thread of the backward, whatever the device's thread is."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, flight: Flight) -> Tensor:
        ctx.flight = flight
        ctx.set_materialize_grads(False)
        there, flight.there = flight.there, None
        assert there is not None
        return there

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        _refuse_double_backward()
        if grad is None:
            return None, None
        ctx.flight.start(grad)
        return torch.zeros(1, device="cpu"), None


_pulled: Any = _Pull.apply
_arrived: Any = _Arrive.apply
_look_up = ops.look_up_v1.default
_push_from = ops.push_from_v1.default
_push = ops.push_v1.default
_ticket = ops.ticket_v2.default
_drop = ops.drop_v1.default
_nothing = torch.zeros(1, dtype=torch.float32, device="cpu")
_now = torch.tensor(-1, device="cpu")
_again = torch.tensor(-2, device="cpu")  # AGAIN of csrc/torch/ops.cpp
#: This process, int64 [1]: an input of graphs, and so a constant of those that
#: are saved, by which they refuse to run in another.
_process = torch.tensor([ops.process_v1()], device="cpu")

#: Added to the number in the ticket of a batch whose ids are elsewhere.
TAKEN = 1 << 62

#: prefetch(values, offsets, weights, store, plan, number): adds a lookup to
#: a data loader's batch.
prefetch = ops.prefetch_v1.default


def pull(
    values: Tensor,
    offsets: Tensor | None,
    weights: Tensor | None,
    anchor: Tensor,
    batch: Tensor,
    store: int,
    plan: int,
    grad: bool,
    way: Way | None = None,
    leaves: Sequence[Tensor] = (),
) -> Tensor:
    """One forward: the plan's output, float32 on the CPU, or as ``way`` says
    where; its backward pushes if ``grad``.

    ``leaves`` are the anchors of the modules whose rows these are, without
    elements: they get a gradient where the rows do.

    ``anchor`` is the store's: its gradient accumulates after all pushes of a
    backward. ``batch`` is the ticket of the ids, int64 [2]: the number of
    the data loader's batch, 0 for other ids; and the version of the tensors
    when they were looked up, -1 to look up again.

    An exported graph does not know the store's anchor any more, by which a
    backward ends. It has the module's in its place, and refuses backwards.
    """
    if torch.compiler.is_compiling():
        exports = torch.compiler.is_exporting()
        ticket = _ticket(batch, _process, store, grad and not exports)
        if exports and grad and leaves:
            anchor = leaves[0]
        elif grad and leaves:
            anchor = torch.cat(
                (anchor, *(Tensor.to(leaf, anchor)[:, 0] for leaf in leaves))
            )
        out: Tensor = ops.pull_v1(
            values, offsets, weights, anchor, ticket, store, plan
        )[0]
        return out
    if in_backward():
        # Repeated by torch.utils.checkpoint: the first forward stands for it.
        # Only if that had no gradient (use_reentrant=True) this one's follows.
        batch = torch.stack((batch[0], _again))
    try:
        ids = values, offsets, weights
        if grad:
            flight = None if way is None else way.flight()
            call = _Call(batch, store, plan, way, flight)
            out = _pulled(*ids, anchor, call, *leaves)
            if flight is not None:
                out = _arrived(out, flight)
            return out
        with below_autograd():
            if way is None:
                out = _look_up(*ids, batch, _process, store, plan, False)[0]
            else:
                ticket = _ticket(batch, _process, store, False)
                out = way.pull(*ids, anchor, ticket, store, plan)[0]
        return out
    except RuntimeError as error:
        raise typed(error) from None


def versions(*tensors: Tensor | None) -> int:
    """A number that changes with each in-place change of the tensors."""
    return sum(
        version_of(t)
        for t in tensors
        if t is not None and not t.is_inference()
    )


def typed(error: RuntimeError) -> BaseException:
    """The exception that an operator's RuntimeError stands for."""
    name, separator, text = str(error).partition(": ")
    cls = getattr(errors, name, None) if separator else None
    if not (isinstance(cls, type) and issubclass(cls, errors.PersiaError)):
        return error
    if cls is errors.Interrupted:
        return _core.take_raised() or KeyboardInterrupt(text)
    return cls(text.split("\nException raised from")[0])
