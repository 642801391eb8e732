"""Models as graphs without a store.

A lookup is one node in them, which names an entry of the export's manifest.
Who loads the graph puts a module in the node's place.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO

import pydantic
import torch
from torch import Tensor, nn

from persia import _core, errors
from persia.base.torch_private import (
    checks_metadata,
    onednn_linear,
    take_for_equal,
)
from persia.data.batches.ids import Ids
from persia.nn.standins import standing_in
from persia.serving.form import Form
from persia.store.configs import TableConfig, pooling_of

_POOLING = {
    _core.POOL_SUM: "sum",
    _core.POOL_MEAN: "mean",
    _core.POOL_SQRTN: "sqrtn",
    _core.POOL_NONE: "none",
}
_EXPORTS = threading.Lock()


class _Entry(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)


class Part(_Entry):
    """A feature of a lookup: its place among the features of the batch, its
    table, how it is pooled, and the first column of its output."""

    feature: int = pydantic.Field(ge=0)
    table: str
    pooling: str = pydantic.Field(pattern="^(sum|mean|sqrtn|none)$")
    column: int = pydantic.Field(ge=0)


class Lookup(_Entry):
    """A lookup: its output has `width` columns, and a row a sample, or, where
    nothing is pooled, a row an id."""

    features: int = pydantic.Field(ge=1)
    width: int = pydantic.Field(ge=1)
    pooled: bool
    parts: list[Part] = pydantic.Field(min_length=1)


@torch.library.custom_op("persia::exported_look_up_v1", mutates_args=())
def _look_up(
    values: Tensor,
    offsets: Tensor | None,
    weights: Tensor | None,
    lookup: str,
    features: int,
    width: int,
    pooled: bool,
) -> Tensor:
    raise errors.InvalidArgument(
        "this graph is a part of an export, and its rows lie beside it: load "
        "it with persia.load_model()"
    )


@_look_up.register_fake
def _(
    values: Tensor,
    offsets: Tensor | None,
    weights: Tensor | None,
    lookup: str,
    features: int,
    width: int,
    pooled: bool,
) -> Tensor:
    height: Any = values.shape[0]
    if pooled:
        bags = height if offsets is None else offsets.shape[0] - 1
        height = bags // features
    return values.new_empty((height, width), dtype=torch.float32)


#: Takes a lookup and its name, values, offsets and weights.
Give = Callable[[str, Lookup, Tensor, Tensor | None, Tensor | None], Tensor]


class Lookups:
    """Stands in for the lookups of a model, and notes them.

    Args:
        give: what one of them gives.

    Attributes:
        found: the lookups, by name.
    """

    def __init__(self, give: Give) -> None:
        self.found: dict[str, Lookup] = {}
        self._give = give

    def __call__(
        self,
        kind: int,
        outputs: Sequence[tuple[str, str, TableConfig]],
        ids: Ids,
        weights: Tensor | None,
    ) -> Tensor:
        keys, values, offsets = ids[:3]
        pooled = kind == _core.PLAN_BAGS
        at = {key: i for i, key in enumerate(keys)}
        parts, column, widest = [], 0, 0
        for _, feature, config in outputs:
            if feature not in at:
                raise errors.MissingFeature(
                    f"the batch has no feature {feature!r} (table "
                    f"{config.name!r}); it has {list(keys)}"
                )
            parts.append(
                Part(
                    feature=at[feature],
                    table=config.name,
                    pooling=_POOLING[pooling_of(config)] if pooled else "none",
                    column=column,
                )
            )
            widest = max(widest, config.embedding_dim)
            column += config.embedding_dim if pooled else 0
        one = Lookup(
            features=len(keys),
            width=column if pooled else widest,
            pooled=pooled,
            parts=parts,
        )
        name = next((k for k, v in self.found.items() if v == one), None)
        if name is None:
            name = f"lookup{len(self.found)}"
            self.found[name] = one
        return self._give(name, one, values, offsets, weights)


def _node(
    name: str,
    one: Lookup,
    values: Tensor,
    offsets: Tensor | None,
    weights: Tensor | None,
) -> Tensor:
    out: Tensor = torch.ops.persia.exported_look_up_v1(
        values, offsets, weights, name, one.features, one.width, one.pooled
    )
    return out


class Flat(nn.Module):
    """A model whose inputs are a list of tensors, as are its outputs."""

    def __init__(self, model: nn.Module, form: Form, output: str) -> None:
        super().__init__()
        self.model = model
        self.form = form
        self.output = output

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        # torch gives each its own variable, though all have one name.
        samples = self.form.samples(tensors)
        for one, x in zip(self.form.inputs, tensors, strict=True):
            if one.samples:
                take_for_equal(x.shape[0], samples)
        args, kwargs = self.form.call(tensors)
        result = self.model(*args, **kwargs)
        return tuple(self.form.note_outputs(self.output, result))


class Graph:
    """A model that was traced.

    Attributes:
        program: torch's.
        form: of its inputs and outputs.
        lookups: that its nodes name.
    """

    def __init__(
        self,
        program: torch.export.ExportedProgram,
        form: Form,
        lookups: Mapping[str, Lookup],
    ) -> None:
        self.program = program
        self.form = form
        self.lookups = lookups

    @property
    def tables(self) -> list[str]:
        """Those of all lookups, each once."""
        every = [p.table for one in self.lookups.values() for p in one.parts]
        return list(dict.fromkeys(every))

    def write(self, file: BinaryIO) -> None:
        """Writes it as ``torch.export.save`` does."""
        with _alone():
            torch.export.save(self.program, file)


def trace(
    model: nn.Module,
    form: Form,
    example: Sequence[Tensor],
    output: str = "output",
) -> Graph:
    """Traces a model in eval mode; it is afterwards as it was.

    Args:
        model: with tables of Persia.
        form: of its inputs.
        example: for these.
        output: the name of what it gives, if that is one tensor.

    Raises:
        InvalidArgument: torch.export cannot make a graph of it.
    """
    lookups = Lookups(_node)
    flat = Flat(model, form, output)
    try:
        with (
            _alone(),
            evaluating(model),
            standing_in(lookups),
            torch.no_grad(),
            torch.random.fork_rng(devices=[]),  # training draws as before
        ):
            program = torch.export.export(
                flat,
                tuple(example),
                dynamic_shapes=(form.dynamic_shapes(example),),
                strict=False,
            )
    except errors.PersiaError:
        raise
    except Exception as error:  # torch raises many kinds
        raise errors.InvalidArgument(
            f"torch.export makes no graph of {type(model).__name__}: "
            f"{_first_lines(error)}. The forward may not depend on the "
            "elements of a tensor, nor take the number of samples for a "
            "constant: x.shape[0] in place of len(x). "
            "torch.export.export(model, example, strict=False) shows where"
        ) from error
    if not lookups.found:
        raise errors.InvalidArgument(
            f"{type(model).__name__} looks up no table of Persia: "
            "torch.export alone exports it"
        )
    user = set(program.graph_signature.user_inputs)
    form.settle(
        [
            node.meta["val"]
            for node in program.graph.nodes
            if node.op == "placeholder" and node.name in user
        ]
    )
    return Graph(program, form, lookups.found)


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Within, all of its modules are in eval mode."""
    training = [m for m in model.modules() if m.training]
    model.eval()
    try:
        yield
    finally:
        for m in training:
            m.training = True


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Within, no other thread makes or reads a graph: torch.export keeps its
    state once for a process. torch says nothing of its own internals."""
    logger = logging.getLogger("torch._export")
    with _EXPORTS:
        before = logger.level
        logger.setLevel(logging.ERROR)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                yield
        finally:
            logger.setLevel(before)


def _first_lines(error: Exception, n: int = 3) -> str:
    lines = [one.strip() for one in str(error).splitlines() if one.strip()]
    return f"{type(error).__name__}: " + " ".join(lines[:n])[:500]


def read_graph(file: BinaryIO) -> torch.export.ExportedProgram:
    """What :meth:`Graph.write` wrote. Only of a file whose checksum is that of
    its manifest.

    Raises:
        SchemaMismatch: this torch cannot read it.
    """
    try:
        with _alone():
            return torch.export.load(file)
    except Exception as error:
        raise errors.SchemaMismatch(
            f"torch {torch.__version__} cannot read the graph of this export: "
            f"{_first_lines(error)}"
        ) from error


def bind(
    program: torch.export.ExportedProgram,
    make: Callable[[str], nn.Module],
) -> nn.Module:
    """The graph as a module, with a module for each of its lookups.

    Args:
        program: of :func:`read_graph`.
        make: gives the module of a lookup's name; it is called with values,
            offsets and weights.
    """
    with _alone():
        module: Any = program.module(check_guards=False)
    graph = module.graph
    made: dict[str, str] = {}
    for node in list(graph.nodes):
        if node.target is not torch.ops.persia.exported_look_up_v1.default:
            continue
        name = node.args[3]
        if name not in made:
            made[name] = f"persia_{name}"
            module.add_submodule(made[name], make(name))
        with graph.inserting_before(node):
            call = graph.call_module(made[name], tuple(node.args[:3]))
        call.meta = dict(node.meta)
        node.replace_all_uses_with(call)
        graph.erase_node(node)
    # Checks of inputs at each call take longer than most models: Form.check()
    # does it.  So do trees of arguments, which are tensors alone here.
    for node in list(graph.nodes):
        if checks_metadata(node):
            graph.erase_node(node)
    _use_onednn(graph)
    graph.set_codegen(torch.fx.graph.CodeGen())
    return torch.fx.GraphModule(module, graph)


def _use_onednn(graph: torch.fx.Graph) -> None:
    """Has linear layers of fp32 computed by oneDNN, with the ReLU behind."""
    operator = onednn_linear()
    aten = torch.ops.aten
    for node in list(graph.nodes):
        if operator is None or node.target is not aten.linear.default:
            continue
        x, weight, *more = node.args
        if any(_dtype(n) != torch.float32 for n in (x, weight, node)):
            continue
        users = list(node.users)
        relu = len(users) == 1 and users[0].target is aten.relu.default
        last = users[0] if relu else node
        bias = more[0] if more else node.kwargs.get("bias")
        kind = "relu" if relu else "none"
        args: tuple[Any, ...] = (x, weight, bias, kind, [], "")
        with graph.inserting_before(last):
            call = graph.call_function(operator, args)
        call.meta = dict(last.meta)
        last.replace_all_uses_with(call)
        graph.erase_node(last)
        if relu:
            graph.erase_node(node)


def _dtype(node: Any) -> Any:
    return getattr(node.meta.get("val"), "dtype", None)
