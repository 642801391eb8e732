"""What torch's users do to parameters, to modules whose rows are tables."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import persia
from persia import errors

IDS = torch.tensor([1, 3, 3])


def store_of(update: str) -> persia.Store:
    return persia.Store(persia.optim.SGD(lr=1.0), update=update)


class Lookup(nn.Module):
    """The vectors of ids [n], whatever the module within."""

    def __init__(self, inner: nn.Module, store: persia.Store) -> None:
        super().__init__()
        self.inner = inner
        self.store = store

    def forward(self, ids: Tensor) -> Tensor:
        inner: Any = self.inner
        if isinstance(inner, nn.Embedding):
            return inner(ids)
        if isinstance(inner, nn.EmbeddingBag):
            return inner(ids[:, None])
        out = inner({"f": ids})
        if isinstance(inner, persia.EmbeddingCollection):
            return out["f"].values()
        return out.values()

    def rows(self) -> Tensor:
        return self.store.rows("t", range(6))


def bags(store: persia.Store) -> nn.Module:
    config = persia.EmbeddingBagConfig("t", 4, ["f"])
    return persia.EmbeddingBagCollection([config], store=store)


def sequences(store: persia.Store) -> nn.Module:
    config = persia.EmbeddingConfig("t", 4, ["f"])
    return persia.EmbeddingCollection([config], store=store)


def embedding(store: persia.Store) -> nn.Module:
    return persia.nn.Embedding(6, 4, name="t", store=store)


def bag(store: persia.Store) -> nn.Module:
    return persia.nn.EmbeddingBag(6, 4, name="t", store=store)


def converted(store: persia.Store) -> nn.Module:
    model = nn.ModuleDict({"t": nn.Embedding(6, 4)})
    return persia.convert(model, store=store)["t"]


KINDS = [bags, sequences, embedding, bag, converted]
Make = Callable[[persia.Store], nn.Module]
every_kind = pytest.mark.parametrize("make", KINDS)


def lookup(make: Make, update: str = "backward") -> Lookup:
    store = store_of(update)
    return Lookup(make(store), store)


def backward(model: nn.Module) -> None:
    model(IDS).sum().backward()


# ---- freezing


def by_loop(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.requires_grad = False


def by_named_loop(model: nn.Module) -> None:
    for _, parameter in model.named_parameters():
        parameter.requires_grad_(False)


def by_method(model: nn.Module) -> None:
    model.requires_grad_(False)


def by_apply(model: nn.Module) -> None:
    def freeze(one: nn.Module) -> None:
        for parameter in one.parameters(recurse=False):
            parameter.requires_grad = False

    model.apply(freeze)


@every_kind
@pytest.mark.parametrize(
    "freeze", [by_loop, by_named_loop, by_method, by_apply]
)
def test_freezing_parameters_freezes_rows(
    make: Make, freeze: Callable[[nn.Module], None]
) -> None:
    model = nn.Sequential(lookup(make))
    backward(model)
    before = model[0].rows()
    freeze(model)
    assert not model(IDS).requires_grad
    scale = torch.ones(4, requires_grad=True)
    (model(IDS) * scale).sum().backward()
    assert torch.equal(model[0].rows(), before)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert not twin(IDS).requires_grad
    for parameter in model.parameters():
        parameter.requires_grad = True
    backward(model)
    assert not torch.equal(model[0].rows(), before)


def test_torchs_own_method_is_torchs() -> None:
    assert nn.Module.requires_grad_.__module__ == "torch.nn.modules.module"


@every_kind
def test_one_of_two_modules_is_frozen(make: Make) -> None:
    frozen, free = lookup(make), lookup(make)
    by_loop(frozen)
    before = frozen.rows(), free.rows()
    (frozen(IDS) + free(IDS)).sum().backward()
    assert torch.equal(frozen.rows(), before[0])
    assert not torch.equal(free.rows(), before[1])


# ---- optimizers


@every_kind
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
        (torch.optim.Adam, {"foreach": True}),
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.Adagrad, {}),
        (torch.optim.RMSprop, {}),
    ],
)
def test_optimizers_of_models_without_dense_parameters(
    make: Make, kind: Any, options: Any
) -> None:
    model = lookup(make)
    optimizer = kind(model.parameters(), **options)
    assert sum(p.numel() for p in model.parameters()) == 0
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    before = model.rows()

    def closure() -> Any:
        optimizer.zero_grad()
        loss = model(IDS).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    schedule.step()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert not torch.equal(model.rows(), before)
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(state)


def test_a_scaler_unscales_a_model_of_tables_alone() -> None:
    model = lookup(bags, "step")
    dense = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    before = model.rows()
    scaler.scale(model(IDS).sum()).backward()
    scaler.unscale_(dense)
    scaler.step(dense)
    scaler.step(model.store.optimizer)
    scaler.update()
    torch.testing.assert_close(model.rows()[1], before[1] - 1)


@every_kind
@pytest.mark.parametrize("update", ["backward", "step"])
def test_ddp_around_a_model_without_dense_parameters(
    make: Make, update: str
) -> None:
    dist.init_process_group(
        "gloo", store=dist.HashStore(), rank=0, world_size=1
    )
    try:
        plain, inner = lookup(make, update), lookup(make, update)
        inner.store.set_rows("t", range(6), plain.rows())
        plain.store.set_rows("t", range(6), plain.rows())
        wrapped = DistributedDataParallel(inner)
        for _ in range(3):
            for model in (plain, wrapped):
                backward(model)
            for one in (plain, inner):
                one.store.optimizer.step()
        assert torch.equal(plain.rows(), inner.rows())
    finally:
        dist.destroy_process_group()


# ---- its name and its dims are those of the weight


class Two(nn.Module):
    """Modules that convert takes, one of them tied."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Embedding(6, 4, sparse=True)
        self.bag = nn.EmbeddingBag(6, 3, mode="sum")
        self.tied = nn.Embedding(6, 4)
        self.tied.weight = self.one.weight
        self.top = nn.Linear(11, 1)

    def forward(self, ids: Tensor) -> Tensor:
        found = [self.one(ids), self.bag(ids[:, None]), self.tied(ids)]
        out: Tensor = self.top(torch.cat(found, 1))
        return out


def by_exact_name(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if name in ("one.weight", "bag.weight"):
            parameter.requires_grad = False


def by_dims(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.requires_grad = False


def by_kind(model: nn.Module) -> None:
    for one in model.modules():
        if isinstance(one, nn.Embedding | nn.EmbeddingBag):
            for parameter in one.parameters(recurse=False):
                parameter.requires_grad = False


@pytest.mark.parametrize("freeze", [by_exact_name, by_dims, by_kind])
def test_parameters_are_frozen_as_torchs(
    freeze: Callable[[nn.Module], None],
) -> None:
    torch.manual_seed(0)
    theirs = Two()
    ours = persia.convert(copy.deepcopy(theirs), store=store_of("backward"))
    for model in (ours, theirs):
        freeze(model)
        dense = torch.optim.SGD(model.parameters(), lr=0.1)
        backward(model)
        dense.step()
    for name in ("one", "bag"):
        rows: Any = ours.get_submodule(name)
        weight = theirs.get_parameter(f"{name}.weight")
        assert torch.equal(rows.weight, weight)
    torch.testing.assert_close(ours(IDS), theirs(IDS))


def test_parameters_have_the_names_and_dims_of_torchs() -> None:
    theirs = Two()
    names = [name for name, _ in theirs.named_parameters()]
    ours: Any = persia.convert(copy.deepcopy(theirs), store=store_of("step"))
    pickled = warns_nothing_of_rows(lambda: pickle.dumps(ours))
    models = [
        *(ours, copy.deepcopy(ours), pickle.loads(pickled)),
        copy.deepcopy(ours).to(torch.float64).float(),
        copy.deepcopy(ours).to("meta").to_empty(device="cpu"),
    ]
    for model in models:
        assert [name for name, _ in model.named_parameters()] == names
        for one in (model.one, model.bag, model.tied):
            (parameter,) = one.parameters()
            assert parameter is one.rows.anchor
            assert parameter.dim() == 2 and not parameter.numel()
        assert model.tied.rows is model.one.rows
    state = warns_nothing_of_rows(ours.state_dict)
    assert "one.weight" not in state
    for assign in (False, True):
        ours.load_state_dict(state, assign=assign)
        assert ours.one.rows.anchor is next(ours.parameters())
    back = persia.export_torch(ours)
    assert [name for name, _ in back.named_parameters()] == names
    assert back.one.sparse and not back.bag.sparse


def warns_nothing_of_rows(call: Callable[[], Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return call()


def test_all_that_has_dims_is_not_made_anew_in_silence() -> None:
    model = persia.convert(Two(), store=store_of("backward"))
    matrices = [p for p in model.parameters() if p.dim() > 1]
    for parameter in (p for p in matrices if not p.numel()):
        with pytest.raises(errors.InvalidArgument):
            nn.init.xavier_uniform_(parameter)
    assert len(matrices) == 3


# ---- zeroing gradients that wait


def by_module(model: Lookup) -> None:
    model.zero_grad()


def by_module_in_place(model: Lookup) -> None:
    model.zero_grad(set_to_none=False)


def by_optimizer(model: Lookup) -> None:
    torch.optim.SGD(model.parameters(), lr=1.0).zero_grad()


def by_optimizer_in_place(model: Lookup) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer.zero_grad(set_to_none=False)


def by_foreach(model: Lookup) -> None:
    optimizer = torch.optim.Adam(model.parameters(), foreach=True)
    optimizer.zero_grad(set_to_none=False)


def by_none(model: Lookup) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def by_zero(model: Lookup) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.zero_()


def by_data_zero(model: Lookup) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.data.zero_()


def by_detach_and_zero(model: Lookup) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.detach_()
        parameter.grad.zero_()


def by_detached_zero(model: Lookup) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.detach().zero_()


ZEROES = [
    *(by_module, by_module_in_place, by_optimizer, by_optimizer_in_place),
    *(by_foreach, by_none, by_zero, by_data_zero, by_detached_zero),
    by_detach_and_zero,
]


@every_kind
@pytest.mark.parametrize("zero", ZEROES)
def test_zeroed_gradients_are_not_applied(
    make: Make, zero: Callable[[Lookup], None]
) -> None:
    model = lookup(make, "step")
    before = model.rows()
    backward(model)  # a batch that the loop leaves out
    zero(model)
    assert model.store.stats()["held"] == 0
    backward(model)
    model.store.optimizer.step()
    torch.testing.assert_close(model.rows()[1], before[1] - 1)
    zero(model)
    backward(model)
    backward(model)  # two that accumulate
    model.store.optimizer.step()
    torch.testing.assert_close(model.rows()[1], before[1] - 3)


@every_kind
def test_a_skipped_batch_that_is_nan_is_forgotten(make: Make) -> None:
    model = lookup(make, "step")
    before = model.rows()
    (model(IDS) * torch.nan).sum().backward()
    model.zero_grad()
    backward(model)
    model.store.optimizer.step()
    torch.testing.assert_close(model.rows()[1], before[1] - 1)


@pytest.mark.parametrize("zero", ZEROES)
def test_modules_of_one_store_are_zeroed_apart(
    zero: Callable[[Lookup], None],
) -> None:
    store = store_of("step")
    one = Lookup(bags(store), store)
    config = persia.EmbeddingConfig("u", 4, ["f"])
    other = persia.EmbeddingCollection([config], store=store)
    ids = {"f": IDS}
    before = store.rows("t", [1]), store.rows("u", [1])
    backward(one)
    other(ids)["f"].values().sum().backward()
    (one(IDS) + other(ids)["f"].values()).sum().backward()
    zero(one)
    assert store.stats()["held"] == 2
    backward(one)
    store.optimizer.step()
    torch.testing.assert_close(store.rows("t", [1]), before[0] - 1)
    torch.testing.assert_close(store.rows("u", [1]), before[1] - 2)


def test_other_changes_of_gradients_drop_nothing() -> None:
    model = nn.Sequential(lookup(embedding, "step"), nn.Linear(4, 1))
    rows = model[0].rows
    before = rows()
    optimizer = torch.optim.Adam(model.parameters(), foreach=True)
    backward(model)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    nn.utils.clip_grad_value_(model.parameters(), 0.1)
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(0.5).div_(2)
        copy.copy(parameter.grad)
    nn.Linear(2, 1).zero_grad()
    optimizer.step()
    model[0].store.optimizer.step()
    assert not torch.equal(rows(), before)


def test_a_step_behind_zero_grad_says_that_nothing_is_left() -> None:
    model = lookup(bags, "step")
    backward(model)
    model.zero_grad()
    with pytest.warns(UserWarning, match=r"zero_grad"):
        model.store.optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.store.optimizer.step()
        model.zero_grad()
        backward(model)
        model.store.optimizer.step()


def test_zeroing_is_no_matter_where_backwards_update() -> None:
    model = lookup(bags)
    before = model.rows()
    backward(model)
    model.zero_grad()
    torch.testing.assert_close(model.rows()[1], before[1] - 1)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda p: torch.optim.Adam(p, foreach=False),
    "foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "fused": lambda p: torch.optim.Adam(p, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, foreach=True),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("update", ["backward", "step"])
def test_torchs_optimizers_do_no_work_for_it(
    optimizer: str, update: str
) -> None:
    """It has a gradient, as far as loops and zero_grad() are concerned."""
    bag = lookup(bags, update)
    dense = nn.Linear(2, 1)
    both = nn.ModuleList([bag, dense])
    one = OPTIMIZERS[optimizer](both.parameters())
    for _ in range(2):
        backward(bag)
        dense(torch.ones(1, 2)).sum().backward()
        assert all(p.grad is not None for p in both.parameters())
        weight = dense.weight.detach().clone()
        one.step()
        assert not torch.equal(dense.weight, weight)
        if update == "step":
            bag.store.optimizer.step()
        one.zero_grad()
        assert all(p.grad is None for p in both.parameters())
    updated = {p for p, s in one.state.items() if float(s.get("step", 1))}
    assert updated == set(dense.parameters())


def test_an_optimizer_of_sparse_gradients_takes_it() -> None:
    bag = lookup(bags)
    backward(bag)
    torch.optim.SparseAdam(list(bag.parameters())).step()


# ---- states and moves


@every_kind
def test_an_anchor_is_in_no_state(make: Make) -> None:
    model = nn.Sequential(lookup(make), nn.Linear(4, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = model.state_dict()
    assert not [name for name in state if "anchor" in name]
    model.load_state_dict(state, strict=True)
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    model.load_state_dict(torch.load(buffer, weights_only=True))


@every_kind
@pytest.mark.parametrize("update", ["backward", "step"])
def test_a_copy_has_an_anchor_of_its_own(make: Make, update: str) -> None:
    model = lookup(make, update)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for twin in twins:
        assert not {id(p) for p in model.parameters()} & {
            id(p) for p in twin.parameters()
        }
        before = twin.rows()
        backward(twin)
        twin.store.optimizer.step()
        assert not torch.equal(twin.rows(), before)
        backward(twin)
        twin.zero_grad()
        assert twin.store.stats()["held"] == 0


@every_kind
def test_moves_and_casts_keep_what_is_frozen(make: Make) -> None:
    model = lookup(make, "step")
    for frozen in (True, False):
        model.requires_grad_(not frozen)
        model.to("cpu").double().float()
        assert model(IDS).requires_grad is not frozen
    backward(model)
    model.zero_grad()
    assert model.store.stats()["held"] == 0
    model.to("meta")
    model.to("cpu")
    backward(model)
    model.store.optimizer.step()


def test_threads_share_an_anchor() -> None:
    import threading

    model = lookup(bags)
    before = model.rows()
    threads = [
        threading.Thread(target=lambda: [backward(model) for _ in range(50)])
        for _ in range(4)
    ]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    torch.testing.assert_close(model.rows()[1], before[1] - 200)


def test_converted_models_under_a_loader_have_all_anchors() -> None:
    """Their lookups are joined: each module's anchor gets a gradient."""
    torch.manual_seed(0)

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Embedding(6, 4), nn.Embedding(6, 4)

        def forward(self, batch: Tensor) -> Tensor:
            return (self.a(batch[:, 0]) * self.b(batch[:, 1])).sum(1)

    model = persia.convert(Two(), store=store_of("step"))
    data = [torch.randint(6, (8, 2)) for _ in range(6)]
    for batch in persia.DataLoader(data, model, 0):
        model(batch).sum().backward()
        assert all(p.grad is not None for p in model.parameters())
        model.zero_grad()
        assert model.a.rows.store.stats()["held"] == 0


def test_share_is_a_bool() -> None:
    config = persia.EmbeddingBagConfig("t", 4, ["f"])
    with pytest.raises(errors.PersiaError):
        persia.EmbeddingBagCollection([config], share="yes")  # type: ignore[arg-type]
