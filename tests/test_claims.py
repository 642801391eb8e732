"""A table is that of one module, unless it is shared on purpose."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import persia
from persia import errors
from tests.remote import Servers


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(6, 2)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.emb(ids)
        return out


def pooled(store: persia.Store | None, name: str, **more: Any) -> nn.Module:
    config = persia.EmbeddingBagConfig(name, 2, ["f"])
    return persia.EmbeddingBagCollection([config], store=store, **more)


def sequences(store: persia.Store | None, name: str, **more: Any) -> nn.Module:
    config = persia.EmbeddingConfig(name, 2, ["f"])
    return persia.EmbeddingCollection([config], store=store, **more)


def embedding(store: persia.Store | None, name: str, **more: Any) -> nn.Module:
    return persia.nn.Embedding(6, 2, name=name, store=store, **more)


def bag(store: persia.Store | None, name: str, **more: Any) -> nn.Module:
    return persia.nn.EmbeddingBag(6, 2, name=name, store=store, **more)


def converted(store: persia.Store | None, name: str, **more: Any) -> nn.Module:
    model = nn.ModuleDict({name: nn.Embedding(6, 2)})
    return persia.convert(model, store=store, **more)


def from_torch(
    store: persia.Store | None, name: str, **more: Any
) -> nn.Module:
    module = nn.Embedding(6, 2)
    return persia.from_torch(module, name=name, store=store, **more)


#: Of rows that stay: others than those of the second module.
pytestmark = pytest.mark.filterwarnings("ignore:.*store.clear")

KINDS = [pooled, sequences, embedding, bag, converted, from_torch]
Make = Callable[..., nn.Module]


def store_of(model: nn.Module) -> persia.Store:
    (store,) = {m.store for m in model.modules() if hasattr(m, "tables")}
    return store  # type: ignore[no-any-return]


@pytest.mark.parametrize("first", KINDS)
@pytest.mark.parametrize("second", KINDS)
def test_a_table_is_of_one_module(first: Make, second: Make) -> None:
    store = persia.Store()
    one = first(store, "t")
    with pytest.raises(errors.InvalidArgument):
        second(store, "t")
    other = second(store, "u")
    shared = second(store, "t", share=True)
    assert sorted(store.tables) == ["t", "u"]
    assert all(store_of(m) is store for m in (one, other, shared))


@pytest.mark.parametrize("make", KINDS)
def test_a_refused_conversion_changes_nothing(make: Make) -> None:
    store = persia.Store()
    one = make(store, "b")
    rows = store.rows("b", range(6)).clone()
    model = nn.ModuleDict({k: nn.Embedding(6, 2) for k in ("a", "b")})
    weights = copy.deepcopy(model.state_dict())
    with pytest.raises(errors.InvalidArgument):
        persia.convert(model, store=store)
    assert list(store.tables) == ["b"]
    assert torch.equal(store.rows("b", range(6)), rows)
    assert type(model["a"]) is nn.Embedding
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, weights[name])
    del one


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("cycle", [False, True])
def test_a_module_that_is_gone_has_no_table(make: Make, cycle: bool) -> None:
    store = persia.Store()
    model = make(store, "t")
    if cycle:
        model.myself = [model]  # type: ignore[assignment]
    with pytest.raises(errors.InvalidArgument):
        make(store, "t")
    del model
    make(store, "t")


def test_a_dropped_table_is_free() -> None:
    store = persia.Store()
    old = pooled(store, "t")
    store.drop("t")
    new = pooled(store, "t")
    with pytest.raises(errors.InvalidArgument):
        pooled(store, "t")
    del old, new


def test_a_failed_construction_claims_nothing() -> None:
    store = persia.Store()
    configs = [
        persia.EmbeddingBagConfig("t", 2, ["f"]),
        persia.EmbeddingBagConfig("u", 2, ["f"]),
    ]
    store.add_table(persia.EmbeddingBagConfig("u", 4))
    with pytest.raises(errors.SchemaMismatch) as error:
        persia.EmbeddingBagCollection(configs, store=store)
    pooled(store, "t")  # though the traceback has the failed module
    del error


def test_the_same_config_object_is_shared_on_purpose() -> None:
    store = persia.Store(persia.optim.SGD(lr=1.0))
    config = persia.EmbeddingConfig("t", 2, ["f"])
    one, two = (
        persia.EmbeddingCollection([config], store=store) for _ in range(2)
    )
    ids = persia.JaggedBatch(["f"], torch.tensor([1]))
    before = two(ids)["f"].values().detach()
    one(ids)["f"].values().sum().backward()
    assert torch.equal(two(ids)["f"].values(), before - 1)


def test_copies_and_pickles_need_no_word() -> None:
    model = pooled(persia.Store(), "t")
    twin = copy.deepcopy(model)
    again = pickle.loads(pickle.dumps(model))
    for other in (twin, again):
        with pytest.raises(errors.InvalidArgument):
            pooled(store_of(other), "t")
    store = store_of(model)
    del model
    gc.collect()
    pooled(store, "t")  # the copy trains rows of its own


@pytest.mark.parametrize("make", KINDS)
def test_sharing_needs_a_store(make: Make) -> None:
    with pytest.raises(errors.InvalidArgument):
        make(None, "t", share=True)


def test_tables_have_names_or_those_of_their_places() -> None:
    for kind in (persia.nn.Embedding, persia.nn.EmbeddingBag):
        for store in (None, persia.Store()):
            with pytest.raises(errors.InvalidArgument):
                kind(6, 2, store=store)
    for module in (nn.Embedding(6, 2), nn.EmbeddingBag(6, 2)):
        with pytest.raises(errors.InvalidArgument):
            persia.from_torch(module)
    store = persia.Store()
    persia.convert(nn.Embedding(6, 2), store=store, prefix="user.")
    towers = [
        persia.convert(Tower(), store=store, prefix=f"{name}.")
        for name in ("a", "b")
    ]
    assert list(store.tables) == ["user.Embedding", "a.emb", "b.emb"]
    del towers


# ---- without a store: tables of their own, wherever they are


def trained_apart(make: Make, towers: list[nn.Module]) -> None:
    """Trains the first of two equal modules; the second one stays."""
    ids = torch.tensor([[1, 3]])
    batch: Any = ids
    if make in (pooled, sequences, from_torch):
        feature = "t" if make is from_torch else "f"
        batch = persia.JaggedBatch([feature], ids[0])

    def values(model: nn.Module) -> Tensor:
        if isinstance(model, nn.ModuleDict):
            model = model["t"]
        out: Any = model(batch)
        if isinstance(out, Mapping):
            (out,) = out.values()
        return out if isinstance(out, Tensor) else out.values()

    first, second = towers
    before = values(first).detach().clone(), values(second).detach().clone()
    for _ in range(3):
        values(first).sum().backward()
    store_of(first).flush()
    assert not torch.equal(values(first), before[0])
    assert torch.equal(values(second), before[1])


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("where", ["here", "servers"])
def test_without_a_store_modules_have_tables_of_their_own(
    make: Make, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def towers() -> list[nn.Module]:
        return [
            make(None, "t", optimizer=persia.optim.SGD(lr=1.0))
            for _ in range(2)
        ]

    if where == "here":
        trained_apart(make, towers())
        return
    servers = Servers(2)
    try:
        monkeypatch.setenv("PERSIA_SERVERS", servers.text)
        made = towers()
        trained_apart(make, made)
        again = make(None, "t")  # a cell that runs once more
        assert store_of(again) is store_of(made[0])
        assert len(store_of(again).tables) == 3
        store_of(again).close()
    finally:
        servers.close()
