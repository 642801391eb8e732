"""Lookups in graphs of torch: compiled, exported, traced, transformed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import persia
from persia import errors
from tests.ready import ended

ROOT = Path(__file__).parents[1]
FLAT = torch.tensor([1, 2, 0, 5, 0])
WIDE = torch.tensor([[1, 2, 0], [5, 0, 0]])
NONE = torch.zeros(2, 3, dtype=torch.int64)  # padding alone
STARTS = torch.tensor([0, 2])


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def sgd() -> persia.optim.SGD:
    return persia.optim.SGD(lr=0.5)


#: Modules of torch, which are the oracle of the converted ones, and inputs.
TORCH: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, ...]]] = {
    "1-D": (lambda: nn.Embedding(9, 4), (FLAT,)),
    "2-D": (lambda: nn.Embedding(9, 4), (WIDE,)),
    "padding": (lambda: nn.Embedding(9, 4, padding_idx=0), (WIDE,)),
    "all padding": (lambda: nn.Embedding(9, 4, padding_idx=0), (NONE,)),
    "bag": (lambda: nn.EmbeddingBag(9, 4), (WIDE,)),
    "bag, offsets": (lambda: nn.EmbeddingBag(9, 4), (FLAT, STARTS)),
    "bag, padding": (
        lambda: nn.EmbeddingBag(9, 4, padding_idx=0, mode="sum"),
        (WIDE,),
    ),
}


def compiled(module: nn.Module, args: tuple[Any, ...]) -> Any:
    return torch.compile(module, backend="aot_eager", fullgraph=True)


def exported(module: nn.Module, args: tuple[Any, ...]) -> Any:
    return torch.export.export(module, args).module()


@pytest.mark.parametrize("case", TORCH)
def test_converted_modules_train_as_torchs(case: str) -> None:
    make, args = TORCH[case]
    theirs = make()
    ours = persia.convert(copy.deepcopy(theirs), optimizer=sgd())
    run, fixed = compiled(ours, args), exported(ours, args)
    step = torch.optim.SGD(theirs.parameters(), lr=0.5)
    for _ in range(2):
        want, got = theirs(*args), run(*args)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(fixed(*args), want)
        want.sin().sum().backward()
        got.sin().sum().backward()
        step.step()
        step.zero_grad()
    with pytest.raises(errors.InvalidArgument):  # rather than in silence
        fixed(*args).sum().backward()
    torch.testing.assert_close(ours.weight.detach(), theirs.weight.detach())


def test_padding_in_a_graph_makes_no_row() -> None:
    module = persia.nn.EmbeddingBag(
        9, 4, padding_idx=0, name="t", optimizer=sgd()
    )
    run = compiled(module, ())
    run(WIDE).sum().backward()
    assert sorted(module.rows.store.ids("t").tolist()) == [1, 2, 5]


class Pooled(nn.Module):
    """Lookups of a collection of two tables, one for two features."""

    def __init__(self, weighted: bool = False) -> None:
        super().__init__()
        self.bags = persia.EmbeddingBagCollection(
            [
                persia.EmbeddingBagConfig("t", 4, ["a", "b"], 9),
                persia.EmbeddingBagConfig("u.v", 3, ["a"], 9, pooling="mean"),
            ],
            optimizer=sgd(),
            padding_value=0,
            is_weighted=weighted,
        )

    def forward(self, ids: Any) -> Any:
        return self.bags(ids)


class Ragged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = persia.EmbeddingCollection(
            [
                persia.EmbeddingConfig("t", 4, ["a", "b"], 9),
                persia.EmbeddingConfig("u", 4, ["a"], 9),
            ],
            optimizer=sgd(),
            padding_value=0,
            need_indices=True,
        )

    def forward(self, ids: Any) -> Any:
        return self.rows(ids)


class Padded(Ragged):
    def forward(self, ids: Any) -> Any:
        out = self.rows(ids)
        return [out[name].to_padded_dense(3) for name in out]


def jagged(*, extra: bool = True) -> persia.JaggedBatch:
    """Ids of a and b, and of a feature between that no table has."""
    lengths = torch.tensor([0, 3])
    features = {
        "a": (torch.tensor([1, 2, 3]), lengths),
        "x": (torch.tensor([70]), torch.tensor([1, 0])),
        "b": (torch.tensor([4, 7]), torch.tensor([1, 1])),
    }
    if not extra:
        del features["x"]
    return persia.JaggedBatch.from_dict(features)


#: Inputs of the collections.
INPUTS: dict[str, Any] = {
    "1-D": {"a": torch.tensor([1, 2, 3]), "b": torch.tensor([4, 5, 4])},
    "2-D": {"a": torch.tensor([[1, 2], [3, 3]]), "b": torch.tensor([1, 4])},
    "padding": {"a": WIDE, "b": torch.tensor([[4, 0], [0, 0]])},
    "pairs": {
        "a": (torch.tensor([1, 2, 3]), torch.tensor([0, 3])),
        "b": (torch.tensor([4, 7]), torch.tensor([1, 1])),
    },
    "jagged": jagged(),
}


ALWAYS = {
    (Pooled, "padding"),
    (Pooled, "jagged"),
    (Ragged, "padding"),
    (Padded, "pairs"),
}


def tensors_of(out: Any) -> list[Tensor]:
    """What users read of an output."""
    if isinstance(out, persia.nn.KeyedTensor):
        return [out.values(), *out.to_dict().values()]
    if isinstance(out, list):
        return out
    parts = []
    for one in out.values():
        parts += [one.values(), one.lengths(), one.offsets(), one.weights()]
    return parts


PAIRS = [
    pytest.param(
        kind,
        given,
        marks=() if (kind, given) in ALWAYS else pytest.mark.long,
    )
    for kind in (Pooled, Ragged, Padded)
    for given in INPUTS
]


@pytest.mark.parametrize("graph", [compiled, exported])
@pytest.mark.parametrize(("kind", "given"), PAIRS)
def test_collections_in_graphs_are_as_eager(
    kind: Any, given: str, graph: Any
) -> None:
    module, ids = kind(), INPUTS[given]
    run = graph(module, (ids,))
    for _ in range(2):  # the second one with trained rows
        want, got = tensors_of(module(ids)), tensors_of(run(ids))
        torch.testing.assert_close(got, want)
        by = want if graph is exported else got
        sum(t.sin().sum() for t in by if t.requires_grad).backward()


def test_exported_graphs_take_batches_of_other_sizes(tmp_path: Path) -> None:
    batch = torch.export.Dim("batch")
    pooled, word = (
        Pooled(),
        persia.nn.Embedding(9, 4, padding_idx=0, name="w", optimizer=sgd()),
    )
    more = torch.cat([WIDE, WIDE])
    shapes: Any = {"a": {0: batch}, "b": {0: batch}}
    graph = torch.export.export(
        pooled, ({"a": WIDE, "b": WIDE},), dynamic_shapes=(shapes,)
    )
    torch.export.save(graph, tmp_path / "graph.pt2")
    graph = torch.export.load(tmp_path / "graph.pt2")
    out = graph.module()({"a": more, "b": more})
    torch.testing.assert_close(
        tensors_of(out), tensors_of(pooled({"a": more, "b": more}))
    )
    graph = torch.export.export(word, (WIDE,), dynamic_shapes=({0: batch},))
    torch.testing.assert_close(graph.module()(more), word(more))


def test_a_traced_graph_has_no_elements_of_its_example() -> None:
    module = persia.nn.Embedding(
        9, 4, padding_idx=0, name="t", optimizer=sgd()
    )
    with torch.no_grad():
        graph = torch.jit.trace(module, (WIDE,))  # type: ignore[no-untyped-call]
        for ids in (WIDE, WIDE + 1, NONE):
            torch.testing.assert_close(graph(ids), module(ids))
    with pytest.raises(errors.InvalidArgument):
        torch.jit.trace(module, (WIDE,))  # type: ignore[no-untyped-call]


OTHER = """
import sys
import torch
import persia

words = persia.nn.Embedding(9, 4, name="w", optimizer=persia.optim.SGD(lr=1.0))
assert words.rows._handle == int(sys.argv[3])
ids = torch.tensor([[1, 2, 0], [5, 0, 0]])
exported = torch.export.load(sys.argv[1]).module()
for graph in (exported, torch.jit.load(sys.argv[2])):
    try:
        graph(ids)
    except RuntimeError as error:
        assert "InvalidArgument: this graph" in str(error), error
    else:
        raise AssertionError("it ran")
words.rows.store.close()
"""


@pytest.mark.slow
def test_a_saved_graph_refuses_in_another_process(tmp_path: Path) -> None:
    """There a store has the number of the one that it looked up here."""
    source = """
import sys, torch, persia
words = persia.nn.Embedding(9, 4, name="w", optimizer=persia.optim.SGD(lr=1.0))
ids = torch.tensor([[1, 2, 0], [5, 0, 0]])
with torch.no_grad():
    torch.export.save(torch.export.export(words, (ids,)), sys.argv[1])
    torch.jit.trace(words, (ids,)).save(sys.argv[2])
print(words.rows._handle)
"""
    files = [str(tmp_path / "graph.pt2"), str(tmp_path / "graph.pt")]
    handle = ""
    for code in (source, OTHER):
        words = ("-c", code, *files, handle)
        done = ended(*words, cwd=ROOT, timeout=120)
        assert done.returncode == 0, done.stderr[-3000:]
        handle = done.stdout.strip()


def test_outputs_and_batches_are_trees_of_tensors() -> None:
    ids = jagged()
    batch = persia.Batch(torch.ones(2, 1), ids, torch.ones(2))
    ragged = Ragged()(ids)
    for tree in (ids, batch, Pooled()(ids), ragged, ragged["b"]):
        leaves, spec = pytree.tree_flatten(tree)
        assert all(leaf is None or isinstance(leaf, Tensor) for leaf in leaves)
        spec = pytree.treespec_loads(pytree.treespec_dumps(spec))
        again = pytree.tree_unflatten(leaves, spec)
        assert type(again) is type(tree)
        seen, _ = pytree.tree_flatten(again)
        assert [id(leaf) for leaf in seen] == [id(leaf) for leaf in leaves]
        doubled = pytree.tree_map_only(Tensor, lambda t: t * 2, tree)
        assert type(doubled) is type(tree)
    again = pytree.tree_map(lambda t: t, ids)
    assert again.to_dict().keys() == ids.to_dict().keys()
    assert again.stride() == ids.stride()
    torch.testing.assert_close(again.to_dict(), ids.to_dict())
    doubled = pytree.tree_map_only(Tensor, lambda t: t * 2, ragged["b"])
    torch.testing.assert_close(doubled._values, ragged["b"]._values * 2)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float64]
)
def test_modules_change_their_dtype_as_torchs(dtype: torch.dtype) -> None:
    for make in (
        lambda: nn.Embedding(9, 4, padding_idx=0),
        lambda: nn.EmbeddingBag(9, 4, padding_idx=0, mode="sum"),
    ):
        theirs = nn.Sequential(make(), nn.Linear(4, 1))
        before = copy.deepcopy(theirs).to(dtype)
        ours = persia.convert(copy.deepcopy(theirs), optimizer=sgd()).to(dtype)
        late = persia.convert(copy.deepcopy(before), optimizer=sgd())
        for one in (ours, late):
            out = one(WIDE)
            assert out.dtype == dtype
            torch.testing.assert_close(out, before(WIDE))
            out.sum().backward()
            assert one[0].weight.dtype == dtype
            assert one.to(torch.float32)(WIDE).dtype == torch.float32
    word = persia.nn.Embedding(
        9, 4, name="w", optimizer=sgd(), output_dtype=dtype
    )
    assert word(WIDE).dtype == word.weight.dtype == dtype
    assert Pooled().to(dtype)(jagged()).values().dtype == dtype
    assert Ragged().to(dtype)(jagged())["b"].values().dtype == dtype


def test_autocast_computes_the_dense_part_in_bfloat16() -> None:
    theirs = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 1))
    ours = persia.convert(copy.deepcopy(theirs), optimizer=sgd())
    step = torch.optim.SGD(theirs[0].parameters(), lr=0.5)
    with torch.autocast("cpu", torch.bfloat16):
        assert ours[0](WIDE).dtype == theirs[0](WIDE).dtype
        want, got = theirs(WIDE), ours(WIDE)
    torch.testing.assert_close(got, want)
    want.sum().backward()
    got.sum().backward()
    step.step()
    torch.testing.assert_close(
        ours[0].weight.detach(), theirs[0].weight.detach()
    )


def test_functional_call_looks_up_and_transforms_refuse() -> None:
    word = persia.nn.Embedding(9, 4, padding_idx=0, name="t", optimizer=sgd())
    model = nn.Sequential(word, nn.Linear(4, 1))
    parameters = dict(model.named_parameters())
    want = model(WIDE)
    call = torch.func.functional_call

    def loss(p: Any, ids: Tensor = WIDE) -> Any:
        return call(model, p, (ids,)).sum()

    torch.testing.assert_close(call(model, parameters, (WIDE,)), want)
    before = word.weight.detach().clone()
    loss(parameters).backward()
    assert not torch.equal(word.weight.detach(), before)
    per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))
    for refused in (
        lambda: torch.func.grad(loss)(parameters),
        lambda: torch.func.vmap(model)(WIDE),
        lambda: per_sample(parameters, WIDE),
        lambda: torch.func.jvp(loss, (parameters,), (parameters,)),
    ):
        with pytest.raises(errors.InvalidArgument, match=r"torch\.func"):
            refused()
    for tables in (Pooled(), Ragged()):
        with pytest.raises(errors.InvalidArgument, match=r"torch\.func"):
            torch.func.vmap(tables)({"a": WIDE, "b": WIDE})


@pytest.mark.parametrize("kind", [Pooled, Ragged])
def test_exported_collections_are_as_they_were(kind: Any) -> None:
    model = kind()
    for ids in INPUTS.values():
        out = tensors_of(model(ids))
        sum(t.sin().sum() for t in out if t.requires_grad).backward()
    ours = [tensors_of(model(ids)) for ids in INPUTS.values()]
    (name,) = (name for name, _ in model.named_children())
    tables = getattr(model, name)
    weights = [
        tables.store.rows(c.name, torch.arange(9)) for c in tables.tables
    ]
    assert persia.export_torch(model) is model
    assert {type(m).__module__.split(".")[0] for m in model.modules()} <= {
        "torch",
        "persia",
        __name__.split(".")[0],
    }
    assert not persia.nn.lookups.collections_of(model)
    for got, want in zip(model.parameters(), weights, strict=True):
        assert torch.equal(got, want)
    for want, ids in zip(ours, INPUTS.values(), strict=True):
        torch.testing.assert_close(tensors_of(model(ids)), want)
    graph = exported(model, (INPUTS["pairs"],))
    got = graph(INPUTS["pairs"])
    torch.testing.assert_close(
        tensors_of(got), tensors_of(model(INPUTS["pairs"]))
    )


def test_exported_collections_take_weights_of_ids() -> None:
    model = Pooled(weighted=True)
    ids = jagged(extra=False).with_weights({"a": torch.rand(3)})
    want = model(ids).values()
    persia.export_torch(model)
    torch.testing.assert_close(model(ids).values(), want)
    with pytest.raises(errors.InvalidArgument):
        model(jagged())
    plain = persia.export_torch(Pooled())
    with pytest.raises(errors.MissingFeature):
        plain({"a": FLAT})


def test_export_counts_what_a_weight_cannot_hold() -> None:
    model = nn.ModuleDict(
        {
            "pooled": Pooled(),
            "word": persia.nn.Embedding(9, 4, name="w", optimizer=sgd()),
        }
    )
    far = torch.tensor([3, 10**12, -1])
    model["pooled"]({"a": far, "b": far}).values().sum().backward()
    model["word"](far).sum().backward()
    kept = model["word"].weight.detach().clone()
    with pytest.warns(UserWarning, match=r"6 rows.*2 of table 't'"):
        persia.export_torch(model)
    assert type(model["word"]) is nn.Embedding
    assert torch.equal(model["word"].weight, kept)
    bags = persia.EmbeddingBagCollection(
        [persia.EmbeddingBagConfig("t", 4, ["a"])], optimizer=sgd()
    )
    both = nn.Sequential(persia.convert(nn.Embedding(9, 4)), bags)
    with pytest.raises(errors.InvalidArgument, match="num_embeddings"):
        persia.export_torch(both)
    assert persia.nn.lookups.collections_of(both)[-1] is bags
