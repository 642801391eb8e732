"""How weights from outside become rows: one rule; and what refuses."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import persia
from persia import errors

N, DIM = 6, 4


def weight_of(seed: int) -> Tensor:
    return torch.randn(N, DIM, generator=torch.Generator().manual_seed(seed))


def store_of(**more: Any) -> persia.Store:
    return persia.Store(persia.optim.SGD(lr=1.0), **more)


@contextmanager
def one_warning(count: int) -> Iterator[None]:
    """One, with table and number; or none at all for 0."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    kept = [w for w in caught if "store.clear('t')" in str(w.message)]
    assert len(kept) == (1 if count else 0)
    for one in kept:
        assert f"{count} of" in str(one.message)
        assert one.filename == __file__


# ---- ways of setting the rows 0 to N - 1 of table "t"


def by_convert(store: persia.Store, weight: Tensor) -> None:
    module = nn.Embedding(N, DIM, _weight=weight.clone())
    model = nn.ModuleDict({"t": module})
    persia.convert(model, store=store, share=True)


def by_bag(store: persia.Store, weight: Tensor) -> None:
    module = nn.EmbeddingBag(N, DIM, _weight=weight.clone())
    persia.convert(nn.ModuleDict({"t": module}), store=store, share=True)


def by_from_torch(store: persia.Store, weight: Tensor) -> None:
    module = nn.Embedding(N, DIM, _weight=weight.clone())
    persia.from_torch(module, name="t", store=store, share=True)


def by_from_torch_bag(store: persia.Store, weight: Tensor) -> None:
    module = nn.EmbeddingBag(N, DIM, mode="sum", _weight=weight.clone())
    persia.from_torch(module, name="t", store=store, share=True)


def by_state(store: persia.Store, weight: Tensor) -> None:
    module = persia.nn.Embedding(N, DIM, name="t", store=store, share=True)
    nn.ModuleDict({"a": module}).load_state_dict({"a.weight": weight})


def by_state_of_bags(store: persia.Store, weight: Tensor) -> None:
    config = persia.EmbeddingBagConfig("t", DIM, ["f"])
    bags = persia.EmbeddingBagCollection([config], store=store, share=True)
    state = {"bags.embedding_bags.t.weight": weight}
    nn.ModuleDict({"bags": bags}).load_state_dict(state)


def by_state_of_sequences(store: persia.Store, weight: Tensor) -> None:
    config = persia.EmbeddingConfig("t", DIM, ["f"])
    rows = persia.EmbeddingCollection([config], store=store, share=True)
    rows.load_state_dict({"embeddings.t.weight": weight})


def by_a_way_back(store: persia.Store, weight: Tensor) -> None:
    model = nn.ModuleDict({"t": nn.Embedding(N, DIM, _weight=weight.clone())})
    other = store_of()
    persia.convert(model, store=other)
    persia.export_torch(model)
    persia.convert(model, store=store, share=True)


WAYS = [
    *(by_convert, by_bag, by_from_torch, by_from_torch_bag, by_state),
    *(by_state_of_bags, by_state_of_sequences, by_a_way_back),
]
Way = Callable[[persia.Store, Tensor], None]
every_way = pytest.mark.parametrize("way", WAYS)


def add_table(store: persia.Store) -> None:
    store.add_table(persia.EmbeddingConfig("t", DIM))


@every_way
def test_absent_rows_are_set(way: Way) -> None:
    store, weight = store_of(), weight_of(1)
    with one_warning(0):
        way(store, weight)
    assert torch.equal(store.rows("t", range(N)), weight)
    with one_warning(0):  # of the same values nothing is lost
        way(store, weight)


@every_way
def test_present_rows_stay_with_one_warning(way: Way) -> None:
    store, old, new = store_of(), weight_of(1), weight_of(2)
    add_table(store)
    store.set_rows("t", [1, 4], old[[1, 4]])
    with one_warning(2):
        way(store, new)
    expected = new.clone()
    expected[[1, 4]] = old[[1, 4]]
    assert torch.equal(store.rows("t", range(N)), expected)
    with one_warning(N):
        way(store, weight_of(3))
    assert torch.equal(store.rows("t", range(N)), expected)


@every_way
def test_the_remedy_is_right(way: Way) -> None:
    store, old, new = store_of(), weight_of(1), weight_of(2)
    add_table(store)
    store.set_rows("t", range(N), old)
    store.clear("t")
    with one_warning(0):
        way(store, new)
    assert torch.equal(store.rows("t", range(N)), new)


def test_folds_of_a_cross_validation_do_not_leak_in_silence() -> None:
    store, ids = store_of(), torch.arange(N)
    for fold in range(2):
        torch.manual_seed(fold)
        model = nn.ModuleDict({"t": nn.Embedding(N, DIM)})
        with one_warning(N if fold else 0):
            persia.convert(model, store=store)
        model["t"](ids).sum().backward()
        del model


def test_a_state_of_another_shape_is_refused() -> None:
    store = store_of()
    module = persia.nn.Embedding(N, DIM, name="t", store=store)
    with pytest.raises(errors.ShapeError):
        module.load_state_dict({"weight": torch.ones(N, 3)}, strict=False)
    assert len(store.ids("t")) == 0


def test_a_sibling_that_is_called_weight_is_no_row() -> None:
    class Model(nn.Module):
        def __init__(self, store: persia.Store) -> None:
            super().__init__()
            config = persia.EmbeddingConfig("t", DIM, ["f"])
            self.rows = persia.EmbeddingCollection([config], store=store)
            self.weight = nn.Parameter(torch.ones(N, DIM))

    store = store_of()
    model = Model(store)
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    assert len(store.ids("t")) == 0


# ---- writes into a weight


def module_of(kind: str) -> tuple[Callable[[], Tensor], persia.Store]:
    store = store_of()
    if kind == "tied":
        model = nn.ModuleDict(
            {"t": nn.Embedding(N, DIM), "head": nn.Linear(DIM, N)}
        )
        model["head"].weight = model["t"].weight
        persia.convert(model, store=store)
        head: Any = model["head"]
        return lambda: head.weight, store
    if kind == "view":
        config = persia.EmbeddingBagConfig("t", DIM, ["f"], N)
        bags = persia.EmbeddingBagCollection([config], store=store)
        return lambda: bags.embedding_bags["t"].weight, store
    if kind == "converted":
        one: Any = nn.ModuleDict({"t": nn.Embedding(N, DIM)})
        persia.convert(one, store=store)
        return lambda: one["t"].weight, store
    made: Any = {
        "embedding": persia.nn.Embedding,
        "bag": persia.nn.EmbeddingBag,
    }[kind](N, DIM, name="t", store=store)
    return lambda: made.weight, store


def assign(w: Tensor) -> None:
    w[1] = 5.0


def assign_mask(w: Tensor) -> None:
    w[torch.zeros(N, dtype=torch.bool)] = 5.0


def assign_data(w: Tensor) -> None:
    w.data = torch.ones(N, DIM)


def add(w: Tensor) -> None:
    w += 1


def multiply(w: Tensor) -> None:
    w *= 2


WRITES: list[Callable[[Tensor], object]] = [
    lambda w: w.data.copy_(torch.ones(N, DIM)),
    lambda w: w.detach().fill_(0.0),
    lambda w: w.data[2].fill_(0.0),
    lambda w: w[2].zero_(),
    lambda w: w.data.view(-1)[:3].mul_(2),
    lambda w: w.T.normal_(),
    lambda w: w.uniform_(-1, 1),
    lambda w: w.index_copy_(0, torch.tensor([1]), torch.ones(1, DIM)),
    lambda w: torch.add(w, 1, out=w),
    lambda w: torch._foreach_mul_([w], 2.0),
    lambda w: w.split(2)[1].fill_(0.0),
    lambda w: w.chunk(2)[0].zero_(),
    lambda w: w.unbind(0)[1].div_(2.0),
    lambda w: [row.div_(2.0) for row in w],
    lambda w: w.set_(torch.ones(N, DIM)),
    nn.init.normal_,
    nn.init.xavier_uniform_,
    nn.init.kaiming_normal_,
    nn.init.zeros_,
    nn.init.orthogonal_,
    lambda w: nn.init.trunc_normal_(w.data),
    lambda w: nn.init.constant_(w.data, 1.0),
    *(assign, assign_mask, assign_data, add, multiply),
]
KINDS = ["embedding", "bag", "converted", "tied", "view"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("write", WRITES)
def test_a_write_is_refused(
    kind: str, write: Callable[[Tensor], object]
) -> None:
    weight, store = module_of(kind)
    before = store.rows("t", range(N))
    for grad in (False, True):
        with (
            torch.set_grad_enabled(grad),
            pytest.raises(errors.InvalidArgument),
        ):
            write(weight())
    assert torch.equal(store.rows("t", range(N)), before)


@pytest.mark.parametrize("kind", ["embedding", "bag", "converted"])
@pytest.mark.parametrize("value", [torch.ones(N, DIM), None])
def test_an_assignment_is_refused(kind: str, value: Any) -> None:
    store = store_of()
    module: Any
    if kind == "converted":
        module = persia.convert(nn.Embedding(N, DIM), store=store)
    elif kind == "bag":
        module = persia.nn.EmbeddingBag(N, DIM, name="t", store=store)
    else:
        module = persia.nn.Embedding(N, DIM, name="t", store=store)
    with pytest.raises(errors.InvalidArgument):
        module.weight = value
    with pytest.raises(errors.InvalidArgument):
        module.weight = nn.Parameter(torch.ones(N, DIM))


@pytest.mark.parametrize("kind", KINDS)
def test_reading_a_weight_is_as_ever(kind: str) -> None:
    weight, store = module_of(kind)
    rows = store.rows("t", range(N))
    w = weight()
    assert w.shape == (N, DIM) and w.dtype == torch.float32
    plain = [
        (w * 2, rows * 2),
        (w @ w.T, rows @ rows.T),
        (torch.mul(input=w, other=2), rows * 2),
        (nn.functional.linear(torch.ones(2, DIM), w), None),
        (w.clone().fill_(1.0), torch.ones(N, DIM)),
        (torch.zeros(N, DIM).add_(w.detach()), rows),
        (torch.stack([w.detach()] * 2)[0].zero_(), torch.zeros(N, DIM)),
    ]
    for found, expected in plain:
        assert type(found) is Tensor
        if expected is not None:
            torch.testing.assert_close(found, expected)
    assert torch.equal(w, rows)
    assert (w.detach().numpy() == rows.numpy()).all()
    assert float(w.norm()) == float(rows.norm())
    file = io.BytesIO()
    torch.save(w.detach(), file)
    file.seek(0)
    assert type(torch.load(file, weights_only=True)) is Tensor
    assert f"{w}" and w.tolist() == rows.tolist() and int(w.sum()) is not None


def test_a_loss_of_a_weight_trains_it() -> None:
    weight, store = module_of("embedding")
    before = store.rows("t", range(N))
    weight().sum().backward()
    torch.testing.assert_close(store.rows("t", range(N)), before - 1)


@pytest.mark.parametrize("kind", KINDS)
def test_requires_grad_of_a_weight_freezes_its_rows(kind: str) -> None:
    weight, _ = module_of(kind)
    weight().requires_grad = False
    assert not weight().requires_grad
    if kind != "view":
        weight().requires_grad_()
        assert weight().requires_grad
        weight().requires_grad_(False)
        assert not weight().requires_grad


# ---- parameters that would share its values


def set_parameter(module: Any, weight: Tensor) -> None:
    module.weight = weight


def make_parameter(module: Any, weight: Tensor) -> None:
    module.weight = nn.Parameter(weight)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tie", [set_parameter, make_parameter])
def test_a_tie_is_refused(
    kind: str, tie: Callable[[Any, Tensor], None]
) -> None:
    weight, store = module_of(kind)
    anchors = [p for p in [weight()] if p.requires_grad]
    for other in (nn.Linear(DIM, N, bias=False), nn.Embedding(N, DIM)):
        before = other.weight
        with pytest.raises(errors.InvalidArgument):
            tie(other, weight())
        assert other.weight is before
    assert [p for p in [weight()] if p.requires_grad] or not anchors
    copied = nn.Parameter(weight().detach().clone())
    assert type(copied) is nn.Parameter
    other = nn.Linear(DIM, N, bias=False)
    with torch.no_grad():
        other.weight.copy_(weight())
    assert torch.equal(other.weight, store.rows("t", range(N)))


# ---- all anew


@pytest.mark.parametrize("pools", [False, True])
def test_collections_are_reset(pools: bool) -> None:
    store = store_of()
    module: Any
    if pools:
        bag = persia.EmbeddingBagConfig("t", DIM, ["f"])
        module = persia.EmbeddingBagCollection([bag], store=store)
    else:
        config = persia.EmbeddingConfig("t", DIM, ["f"])
        module = persia.EmbeddingCollection([config], store=store)
    first = store.rows("t", range(N))
    store.set_rows("t", range(N), torch.ones(N, DIM))
    for one in nn.Sequential(module).modules():
        if hasattr(one, "reset_parameters"):
            one.reset_parameters()
    assert torch.equal(store.rows("t", range(N)), first)
    assert len(store.ids("t")) == 0


@pytest.mark.parametrize("kind", ["embedding", "bag", "converted"])
@pytest.mark.parametrize("padding", [None, 2])
def test_reset_parameters_resets(kind: str, padding: int | None) -> None:
    store = store_of()
    options: Any = {"padding_idx": padding}
    module: Any
    if kind == "converted":
        model = nn.ModuleDict({"t": nn.Embedding(N, DIM, **options)})
        module = persia.convert(model, store=store)["t"]
    elif kind == "bag":
        module = persia.nn.EmbeddingBag(
            N, DIM, name="t", store=store, **options
        )
    else:
        module = persia.nn.Embedding(N, DIM, name="t", store=store, **options)
    first = store.rows("t", range(N))
    ids = torch.tensor([1, 3, 1 << 40])
    module(ids if kind != "bag" else ids[:, None]).sum().backward()
    assert store.contains("t", [1 << 40]).all()
    for one in nn.Sequential(module).modules():
        if hasattr(one, "reset_parameters"):
            one.reset_parameters()
    assert not store.contains("t", [1 << 40]).any()
    again = store.rows("t", range(N))
    if kind == "converted":
        assert not torch.equal(again[[1, 3]], first[[1, 3]])
        assert 0.3 < float(again.std()) < 3
    else:
        assert torch.equal(again, first)
    if padding is not None and kind != "bag":
        assert not module.weight[padding].any()


# ---- export


def test_export_counts_what_a_weight_cannot_hold() -> None:
    store = store_of()
    model: Any = nn.ModuleDict({"t": nn.Embedding(N, DIM)})
    persia.convert(model, store=store)
    model["t"](torch.tensor([1, -3, 1 << 40])).sum().backward()
    with pytest.warns(UserWarning, match=r"2 of table 't'.*store\.to_torch"):
        persia.export_torch(model)
    persia.convert(model, store=store_of())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        persia.export_torch(model)
