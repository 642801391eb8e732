"""Copies of models and stores, and averages of them.

The oracle is torch's own model on torch's embeddings, copied, averaged and
trained by the same lines.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import swa_utils

import persia
from persia import errors
from persia.nn.lookups import stores_of
from tests.remote import Servers

ROWS = 20


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """On busy cores two of torch's take their time to meet, in each call."""
    torch.set_num_threads(1)


def store_of(model: nn.Module) -> persia.Store:
    (store,) = stores_of(model)
    return store


class Net(nn.Module):
    """Two tables, one of them shared by two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Embedding(ROWS, 4)
        self.bag = nn.EmbeddingBag(ROWS, 3, mode="sum")
        self.tied = nn.Embedding(ROWS, 4)
        self.tied.weight = self.one.weight
        self.norm = nn.BatchNorm1d(11)
        self.top = nn.Linear(11, 1)

    def forward(self, ids: Tensor) -> Tensor:
        found = [self.one(ids[:, 0]), self.bag(ids), self.tied(ids[:, 1])]
        out: Tensor = self.top(self.norm(torch.cat(found, 1))).squeeze(1)
        return out


class Untied(Net):
    """To deepcopy a state makes one tensor of a tied one's two."""

    def __init__(self) -> None:
        super().__init__()
        self.tied = nn.Embedding(ROWS, 4)


class Pair:
    """A converted model and torch's own."""

    def __init__(self, update: str = "backward", make: Any = Net) -> None:
        torch.manual_seed(3)
        self.theirs: nn.Module = make()
        self.ours = copy.deepcopy(self.theirs)
        store = persia.Store(persia.optim.SGD(lr=0.1), update=update)
        persia.convert(self.ours, store=store)
        self.generator = torch.Generator().manual_seed(5)

    def ids(self, n: int = 8) -> Tensor:
        return torch.randint(ROWS, (n, 2), generator=self.generator)

    def train(self, *models: nn.Module, steps: int = 2) -> None:
        """Models of a pair, or both of this one, on the same batches."""
        models = models or (self.ours, self.theirs)
        for _ in range(steps):
            ids = self.ids()
            for model in models:
                train_on(model, ids)


def train_on(model: nn.Module, ids: Tensor) -> None:
    parameters = [p for p in model.parameters() if p.numel()]
    dense = torch.optim.SGD(parameters, lr=0.1)
    model.zero_grad()
    (model.train()(ids) - 1).square().mean().backward()
    dense.step()
    if any(isinstance(m, persia.EmbeddingCollection) for m in model.modules()):
        store_of(model).optimizer.step()


def same(ours: nn.Module, theirs: nn.Module) -> None:
    ids = torch.cartesian_prod(torch.arange(ROWS), torch.arange(3))[:, :2]
    with torch.no_grad():
        mine, other = ours.eval()(ids), theirs.eval()(ids)
    torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


OPTIMIZERS = {
    "sgd": lambda: persia.optim.SGD(lr=0.1, momentum=0.9),
    "adagrad": lambda: persia.optim.Adagrad(lr=0.1),
    "adam": lambda: persia.optim.Adam(lr=0.1),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8"])
def test_a_copy_goes_on_with_the_same_bits(optimizer: str, dtype: str) -> None:
    store = persia.Store(OPTIMIZERS[optimizer](), seed=7, update="step")
    model = persia.EmbeddingBagCollection(
        store=store,
        tables=[
            persia.EmbeddingBagConfig("t", 4, ["f"], data_type=dtype),
            persia.EmbeddingBagConfig("u", 8, ["f"], data_type=dtype),
        ],
    )

    def step(one: nn.Module, *values: int) -> None:
        ids = persia.JaggedBatch(["f"], torch.tensor(values))
        one(ids).values().square().sum().backward()
        store_of(one).optimizer.step()

    step(model, 1, 2, -5)
    store.optimizer.param_groups[1]["lr"] = 0.01
    step(model, 2, 3, 4)
    twin = copy.deepcopy(model)
    other = store_of(twin)
    assert other is not store
    assert other.updates == store.updates
    assert other.optimizer.param_groups[1]["lr"] == 0.01
    for one in (model, twin):
        step(one, 1, 4, 2**60)
    for table in ("t", "u"):
        ids = store.ids(table)
        assert set(ids.tolist()) == set(other.ids(table).tolist())
        for a, b in zip(
            store.rows_and_state(table, ids),
            other.rows_and_state(table, ids),
            strict=True,
        ):
            assert torch.equal(a, b)
    before = other.rows("t", [1, 2])
    step(model, 1, 2)
    assert torch.equal(other.rows("t", [1, 2]), before)


def test_modules_of_one_store_have_one_copy() -> None:
    pair = Pair()
    twin = copy.deepcopy(pair.ours)
    assert isinstance(twin, Net)
    stores = {id(store_of(m)) for m in (twin.one, twin.bag, twin.tied)}
    assert len(stores) == 1
    assert store_of(twin) is not store_of(pair.ours)


@pytest.mark.slow
def test_a_model_on_servers_has_no_copy() -> None:
    with contextlib.closing(Servers(1)) as servers:
        store = persia.Store(servers=servers.text)
        config = persia.EmbeddingConfig("t", 4, ["f"])
        model = nn.Sequential(
            persia.EmbeddingCollection([config], store=store), nn.Linear(4, 1)
        )
        store.set_rows("t", [1], torch.ones(1, 4))
        for copies in (copy.deepcopy, swa_utils.AveragedModel):
            with pytest.raises(errors.InvalidArgument):
                copies(model)
        assert torch.equal(store.rows("t", [1]), torch.ones(1, 4))
        assert list(store.tables) == ["t"]
        store.close()


def test_a_copy_holds_no_gradients_that_wait() -> None:
    pair = Pair("step")
    pair.ours(pair.ids()).sum().backward()
    twin = copy.deepcopy(pair.ours)
    assert store_of(pair.ours).stats()["held"] > 0
    assert store_of(twin).stats()["held"] == 0


def test_a_copy_knows_nothing_of_checkpoints_of_its_own(tmp_path: Any) -> None:
    """Else each of them, with keep=, would remove those of the other."""
    store = store_of(Pair().ours)
    store.save(tmp_path, step=1)
    twin = store.copy()
    twin.save(tmp_path, step=2, keep=1)
    store.save(tmp_path, step=3, keep=1)
    names = {p.name for p in tmp_path.iterdir() if p.is_dir()}
    assert names == {"step-2", "step-3"}


@pytest.mark.parametrize("update", ["backward", "step"])
def test_folds_do_not_leak(update: str) -> None:
    pair = Pair(update)
    for _ in range(3):
        ours, theirs = copy.deepcopy(pair.ours), copy.deepcopy(pair.theirs)
        pair.train(ours, theirs)
        same(ours, theirs)
    same(pair.ours, pair.theirs)


AVERAGES: dict[str, dict[str, Any]] = {
    "mean": {},
    "ema": {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.8)},
    "ema of one": {"avg_fn": swa_utils.get_ema_avg_fn(0.8)},
    "swa of one": {"avg_fn": swa_utils.get_swa_avg_fn()},
    "own": {"avg_fn": lambda a, p, n: 0.3 * p + a * 0.7},
    "buffers": {"use_buffers": True},
}


@pytest.mark.parametrize("kind", AVERAGES)
def test_averaged_models(kind: str) -> None:
    pair = Pair()
    averages = [
        swa_utils.AveragedModel(m, **AVERAGES[kind])
        for m in (pair.ours, pair.theirs)
    ]
    for _ in range(4):
        pair.train()
        averages[0].update_parameters(pair.ours)
        averages[1].update_parameters(pair.theirs)
    same(*averages)
    same(pair.ours, pair.theirs)
    loader = [pair.ids() for _ in range(3)]
    for average in averages:
        swa_utils.update_bn(loader, average)
    same(*averages)


def by_copy(target: Any, p: Any) -> None:
    target.data.copy_(0.1 * p.data + 0.9 * target.data)


def by_factors(target: Any, p: Any) -> None:
    target.data.mul_(0.9)
    target.data.add_(p.data, alpha=0.1)


def by_operators(target: Any, p: Any) -> None:
    target.data *= 0.9
    target.data += 0.1 * p.data


def by_parameter(target: Any, p: Any) -> None:
    with torch.no_grad():
        target.mul_(0.9).add_(p, alpha=0.1)


def by_lerp(target: Any, p: Any) -> None:
    target.data.lerp_(p.data, 0.1)


def by_difference(target: Any, p: Any) -> None:
    target.data.sub_((target.data - p.data).div(10))


def by_foreach(target: Any, p: Any) -> None:
    torch._foreach_mul_([target.data], 0.9)
    torch._foreach_add_([target.data], [p.data], alpha=0.1)


def by_assignment(target: Any, p: Any) -> None:
    target.data = 0.9 * target.data + p.data * 0.1


def hard(target: Any, p: Any) -> None:
    target.data.copy_(p.data)


WAYS = (
    *(by_copy, by_factors, by_operators, by_parameter, by_lerp),
    *(by_difference, by_foreach, by_assignment, hard),
)


@pytest.mark.parametrize("way", WAYS, ids=lambda w: w.__name__)
def test_target_networks(way: Callable[[Any, Any], None]) -> None:
    pair = Pair()
    ours, theirs = copy.deepcopy(pair.ours), copy.deepcopy(pair.theirs)
    for _ in range(3):
        pair.train()
        for target, model in ((ours, pair.ours), (theirs, pair.theirs)):
            for a, b in zip(
                target.parameters(), model.parameters(), strict=True
            ):
                way(a, b)
    same(ours, theirs)
    same(pair.ours, pair.theirs)


def by_items(model: Any, d: float, other: Any) -> None:
    """As a user's loop over dicts."""
    ema, now = model.state_dict(), other.state_dict()
    for k, v in now.items():
        ema[k] = d * ema[k] + (1 - d) * v
    model.load_state_dict(ema)


def by_kept_floats(model: Any, d: float, other: Any) -> None:
    """As YOLO's: integers are left out."""
    now = other.state_dict()
    for k, v in model.state_dict().items():
        if v.dtype.is_floating_point:
            v *= d
            v += (1 - d) * now[k].detach()


def by_values(model: Any, d: float, other: Any) -> None:
    """As timm's first two."""
    both = zip(
        model.state_dict().values(), other.state_dict().values(), strict=True
    )
    for one, two in both:
        one.copy_(one * d + (1.0 - d) * two.to(device="cpu"))


def by_lists(model: Any, d: float, other: Any) -> None:
    """As timm's third."""
    both: list[Any] = [[], []]
    for one, two in zip(
        model.state_dict().values(), other.state_dict().values(), strict=True
    ):
        if one.is_floating_point():
            both[0].append(one)
            both[1].append(two)
        else:
            one.copy_(two)
    torch._foreach_lerp_(*both, weight=1.0 - d)


STATES = (by_items, by_kept_floats, by_values, by_lists)


@pytest.mark.parametrize("way", STATES, ids=lambda w: w.__name__)
def test_averages_of_states(way: Callable[[Any, float, Any], None]) -> None:
    pair = Pair()
    ours, theirs = copy.deepcopy(pair.ours), copy.deepcopy(pair.theirs)
    for _ in range(3):
        pair.train()
        for target, model in ((ours, pair.ours), (theirs, pair.theirs)):
            way(target, 0.8, model)
    same(ours, theirs)
    same(pair.ours, pair.theirs)


def test_the_mean_of_the_states_of_several_models() -> None:
    pair = Pair(make=Untied)
    for one in (pair.ours, pair.theirs):
        models = [copy.deepcopy(one) for _ in range(3)]
        for i, model in enumerate(models):
            for _ in range(i + 1):
                train_on(model, torch.arange(8).reshape(4, 2) % (i + 4))
        states = [model.state_dict() for model in models]
        mean = copy.deepcopy(states[0])
        for k in mean:
            for state in states[1:]:
                mean[k] += state[k]
            mean[k] = torch.div(mean[k], 3)
        one.load_state_dict(mean)
    same(pair.ours, pair.theirs)


@pytest.mark.parametrize("copied", ["clone", "deepcopy", "detach"])
def test_an_average_of_states_that_outlives_its_rows_is_refused(
    copied: str,
) -> None:
    pair = Pair()
    copies: dict[str, Callable[[Any], Any]] = {
        "clone": lambda v: v.clone(),
        "deepcopy": copy.deepcopy,
        "detach": lambda v: v.detach().float(),
    }
    of = copies[copied]
    ema = {k: of(v) for k, v in pair.ours.state_dict().items()}

    def train() -> None:
        for _ in range(3):
            pair.train(pair.ours)
            for k, v in pair.ours.state_dict().items():
                ema[k] = 0.9 * ema[k] + 0.1 * v

    with pytest.raises(errors.InvalidArgument):
        train()
    rows = store_of(pair.ours).rows("one", range(ROWS))
    with pytest.raises((errors.InvalidArgument, errors.RowsMissing)):
        pair.ours.load_state_dict(ema)
    assert torch.equal(store_of(pair.ours).rows("one", range(ROWS)), rows)


def test_a_state_keeps_no_rows_alive() -> None:
    pair = Pair()
    store = weakref.ref(store_of(pair.ours))
    state = pair.ours.state_dict()
    twin = copy.deepcopy(state)
    del pair
    gc.collect()
    assert store() is None
    for k, v in twin.items():
        state[k] = 0.5 * (state[k] + v)  # of numbers alone


def test_rows_that_one_of_two_has() -> None:
    """An id without a row has its initial value, in sums, too."""
    config = persia.EmbeddingConfig("t", 4, ["f"])
    models = [
        persia.EmbeddingCollection([config], store=persia.Store(seed=1))
        for _ in range(2)
    ]
    initial = models[0].store.rows("t", [1, 2, 3])
    models[0].store.set_rows("t", [1], torch.ones(1, 4))
    models[1].store.set_rows("t", [2], torch.full((1, 4), 3.0))
    a, b = models[0].anchor, models[1].anchor
    a.data.mul_(0.75)
    a.data.add_(b.data, alpha=0.25)
    expected = initial.clone()
    expected[0] = 0.75 + 0.25 * initial[0]
    expected[1] = 0.75 * initial[1] + 0.25 * 3
    torch.testing.assert_close(models[0].store.rows("t", [1, 2, 3]), expected)


def test_values_by_name_and_back() -> None:
    """Kept by clone(), as of a shadow model or a best one, and swapped."""
    pair = Pair()
    kept = [
        {n: p.data.clone() for n, p in model.named_parameters()}
        for model in (pair.ours, pair.theirs)
    ]
    untrained = [copy.deepcopy(m) for m in (pair.ours, pair.theirs)]
    pair.train()
    trained = [copy.deepcopy(m) for m in (pair.ours, pair.theirs)]
    for model, values in zip((pair.ours, pair.theirs), kept, strict=True):
        for name, p in model.named_parameters():
            now = p.data.clone()
            p.data = values[name]
            values[name] = now
        for name, buffer in model.named_buffers():
            buffer.copy_(dict(untrained[0].named_buffers())[name])
    same(pair.ours, untrained[1])
    for model, values in zip((pair.ours, pair.theirs), kept, strict=True):
        for name, p in model.named_parameters():
            p.detach().copy_(values[name])
        for name, buffer in model.named_buffers():
            buffer.copy_(dict(trained[0].named_buffers())[name])
    same(pair.ours, trained[1])


def test_a_value_of_rows_that_have_changed_is_refused() -> None:
    pair = Pair()
    anchor = pair.ours.get_submodule("one.rows").anchor
    half = anchor.data * 0.5
    pair.train()
    rows = store_of(pair.ours).rows("one", range(ROWS))
    with pytest.raises(errors.InvalidArgument):
        anchor.data.copy_(half)
    with pytest.raises(errors.InvalidArgument):
        (anchor.data * 0.5).clone()
    assert torch.equal(store_of(pair.ours).rows("one", range(ROWS)), rows)


def swap(one: nn.Module, other: nn.Module) -> None:
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        p.data, q.data = q.data, p.data


def back_up(one: nn.Module, other: nn.Module) -> None:
    backup = [p.data for p in one.parameters()]
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        p.data = q.data
    for p, old in zip(one.parameters(), backup, strict=True):
        p.data.copy_(old)


def back_up_for_another(one: nn.Module, other: nn.Module) -> None:
    backup = [p.data for p in one.parameters()]
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        p.data = q.data
    for q, old in zip(other.parameters(), backup, strict=True):
        q.data.mul_(0.5).add_(old)


@pytest.mark.parametrize("change", [swap, back_up, back_up_for_another])
def test_data_that_a_parameter_had_before_is_refused(
    change: Callable[[nn.Module, nn.Module], None],
) -> None:
    """Torch's is the former memory, here it would be the rows of now."""
    pair = Pair()
    with pytest.raises(errors.InvalidArgument):
        change(pair.ours, copy.deepcopy(pair.ours))


def test_data_sees_what_is_written_in_place() -> None:
    pair = Pair()
    for model in (pair.ours, pair.theirs):
        for p in model.parameters():
            data = p.data
            data.mul_(0.5)
            p.data.mul_(3.0)
            data.add_(data, alpha=0.25)
    same(pair.ours, pair.theirs)


def test_tables_of_other_dims_are_not_added() -> None:
    a, b = Pair().ours, Pair().ours
    one, bag = a.get_submodule("one.rows"), b.get_submodule("bag.rows")
    with pytest.raises(errors.InvalidArgument):
        one.anchor.data.copy_(bag.anchor.data)


WRITES: list[Callable[[Any], Any]] = [
    nn.init.normal_,
    nn.init.constant_,
    lambda p: p.data.uniform_(-1, 1),
    lambda p: p.data.clamp_(-0.1, 0.1),
    lambda p: p.data.add_(torch.randn_like(p)),
    lambda p: p.data.add_(1.0),
    lambda p: p.detach().__setitem__(slice(None), 1.0),
]
WRITES[1] = lambda p: nn.init.constant_(p, 1.0)


@pytest.mark.parametrize("write", range(len(WRITES)))
def test_other_writes_are_refused(write: int) -> None:
    pair = Pair()
    anchor = pair.ours.get_submodule("one.rows").anchor
    rows = store_of(pair.ours).rows("one", range(ROWS))
    with torch.no_grad(), pytest.raises(errors.InvalidArgument):
        WRITES[write](anchor)
    assert torch.equal(store_of(pair.ours).rows("one", range(ROWS)), rows)


@pytest.mark.parametrize("foreach", [False, True])
def test_optimizers_and_moves_change_no_row(foreach: bool) -> None:
    pair = Pair("step")
    store = store_of(pair.ours)
    rows = store.rows("one", range(ROWS))
    dense = torch.optim.AdamW(
        pair.ours.parameters(), lr=1.0, weight_decay=0.5, foreach=foreach
    )
    pair.ours(pair.ids()).sum().backward()
    dense.step()
    pair.ours.double().float().to("cpu")
    copy.copy(pair.ours)
    assert torch.equal(store.rows("one", range(ROWS)), rows)


class Shrinks(torch.optim.Optimizer):
    """One of a user's own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(0.5)
                shrink(p)


def shrink(p: Tensor) -> None:
    p.data.mul_(0.5)


def test_an_optimizer_of_ones_own_changes_no_row() -> None:
    pair = Pair()
    store = store_of(pair.ours)
    rows = store.rows("one", range(ROWS))
    top: Any = pair.ours.get_submodule("top")
    weight = top.weight.detach().clone()
    Shrinks(pair.ours.parameters()).step()
    assert torch.equal(store.rows("one", range(ROWS)), rows)
    assert torch.equal(top.weight, weight / 4)


def test_averages_within_a_closure_reach_rows() -> None:
    """Lightning trains within the closure of an optimizer's step."""
    pair = Pair()
    targets = copy.deepcopy(pair.ours), copy.deepcopy(pair.theirs)
    pair.train()
    for target, model in zip(targets, (pair.ours, pair.theirs), strict=True):
        optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)])

        def closure(one: nn.Module = target, other: nn.Module = model) -> Any:
            for a, b in zip(one.parameters(), other.parameters(), strict=True):
                by_factors(a, b)
            return torch.zeros(1)

        optimizer.step(closure)
    same(*targets)


@pytest.mark.parametrize("update", ["backward", "step"])
@pytest.mark.parametrize("loader", [False, True])
def test_a_penalty_is_torchs_of_the_rows_used(
    update: str, loader: bool
) -> None:
    pair = Pair(update)
    ours: Any = pair.ours
    theirs: Any = pair.theirs
    batches = [pair.ids() for _ in range(4)]
    given: Any = batches
    if loader:
        given = persia.DataLoader(batches, ours, staleness=0)
    dense = [
        torch.optim.SGD(m.parameters(), lr=0.1) for m in (ours.top, ours.norm)
    ]
    other = torch.optim.SGD(theirs.parameters(), lr=0.1)
    for batch, ids in zip(given, batches, strict=True):
        ours.zero_grad()
        theirs.zero_grad()
        loss = ours(batch).square().mean()
        mine = persia.penalty(ours, l2=0.3, l1=0.02)
        used = [
            theirs.one.weight[ids.unique()],
            theirs.bag.weight[ids.unique()],
        ]
        expected = sum(
            0.3 * rows.square().sum() + 0.02 * rows.abs().sum()
            for rows in used
        )
        torch.testing.assert_close(mine, expected)
        (loss + mine).backward()
        (theirs(ids).square().mean() + expected).backward()
        for one in (*dense, other):
            one.step()
        store_of(ours).optimizer.step()
    same(ours, theirs)
    assert store_of(ours).updates == len(batches)


def test_a_penalty_needs_a_forward() -> None:
    pair = Pair()
    with pytest.raises(errors.InvalidArgument):
        persia.penalty(pair.ours, l2=1.0)
    with torch.no_grad():
        pair.ours(pair.ids())
    with pytest.raises(errors.InvalidArgument):
        persia.penalty(pair.ours, l2=1.0)
    loss = pair.ours(pair.ids()).sum()
    persia.penalty(pair.ours, l2=1.0)
    loss.backward()
    with pytest.raises(errors.InvalidArgument):
        persia.penalty(pair.ours, l2=1.0)
    with pytest.raises(errors.InvalidArgument):
        persia.penalty(pair.theirs, l2=1.0)


def warns_once(call: Callable[[], object]) -> None:
    with pytest.warns(UserWarning, match="penalty") as found:
        call()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        call()
    assert len(found) == 1


def l2(model: nn.Module) -> Any:
    return sum(p.pow(2).sum() for p in model.parameters())


def l2_of_products(model: nn.Module) -> Any:
    return sum((p * p).sum() for p in model.parameters())


def l1(model: nn.Module) -> Any:
    return sum(p.abs().sum() for p in model.parameters())


def norms(model: nn.Module) -> Any:
    return sum(p.norm(2) for p in model.parameters())


def flat(model: nn.Module) -> Any:
    return torch.cat([p.view(-1) for p in model.parameters()]).norm()


def functions(model: nn.Module) -> Any:
    return sum(torch.norm(p, 2) ** 2 for p in model.parameters())


def sums(model: nn.Module) -> Any:
    return sum(torch.sum(torch.abs(p)) for p in model.parameters())


PENALTIES = (functions, sums, l2, l2_of_products, l1, norms, flat)


@pytest.mark.parametrize("penalty", PENALTIES, ids=lambda p: p.__name__)
def test_a_loss_without_the_rows_warns_once(
    penalty: Callable[[nn.Module], Any],
) -> None:
    pair = Pair()

    def train() -> None:
        loss = pair.ours(pair.ids()).sum() + penalty(pair.ours)
        loss.backward()

    warns_once(train)


def test_a_penalty_after_a_first_backward_warns_too() -> None:
    pair = Pair()
    pair.ours(pair.ids()).sum().backward()
    with pytest.warns(UserWarning, match="penalty"):
        functions(pair.ours).backward()


CLIPS: dict[str, Callable[[Any], Any]] = {
    "norm": lambda m: nn.utils.clip_grad_norm_(m.parameters(), 1.0),
    "one": lambda m: nn.utils.clip_grad_norm_(
        m.parameters(), 1.0, foreach=False
    ),
    "value": lambda m: nn.utils.clip_grad_value_(m.parameters(), 1.0),
    "total": lambda m: nn.utils.get_total_norm(
        [p.grad for p in m.parameters()]
    ),
    "own": lambda m: sum(p.grad.norm() ** 2 for p in m.parameters()),
}


@pytest.mark.parametrize("clip", CLIPS)
def test_a_norm_without_the_rows_warns_once(clip: str) -> None:
    pair = Pair()
    pair.ours(pair.ids()).sum().backward()
    warns_once(lambda: CLIPS[clip](pair.ours))


def test_our_own_clip_does_not_warn(recwarn: Any) -> None:
    pair = Pair("step")
    pair.ours(pair.ids()).sum().backward()
    persia.clip_grad_norm_(pair.ours, 1.0)
    store_of(pair.ours).optimizer.step()
    assert not [w for w in recwarn if w.category is UserWarning]
