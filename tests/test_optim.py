"""persia.optim under schedulers, GradScaler, clipping; per-table settings."""

from __future__ import annotations

import io
import math
import pickle
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

import persia
from persia import errors
from persia.store.engine import engine_of

IDS = torch.arange(6)


def make(
    default: Any, update: str = "backward", **table: Any
) -> persia.EmbeddingBagCollection:
    return persia.EmbeddingBagCollection(
        store=persia.Store(default, update=update),
        tables=[
            persia.EmbeddingBagConfig("a", 4, feature_names=["f"], **table),
            persia.EmbeddingBagConfig("b", 2, feature_names=["g"]),
        ],
    )


def batch() -> persia.JaggedBatch:
    return persia.JaggedBatch(["f", "g"], torch.cat([IDS, IDS]))


def rows(bags: Any, table: str = "a") -> torch.Tensor:
    out: torch.Tensor = bags.store.rows(table, IDS)
    return out


def test_one_group_a_table() -> None:
    bags = make(
        persia.optim.Adagrad(lr=0.1),
        optimizer=persia.optim.Adam(lr=0.5, betas=(0.5, 0.6)),
    )
    groups = bags.store.optimizer.param_groups
    assert [g["table"] for g in groups] == ["a", "b"]
    assert [g["algorithm"] for g in groups] == ["adam", "adagrad"]
    assert groups[0]["betas"] == (0.5, 0.6)
    assert [g["lr"] for g in groups] == [0.5, 0.1]
    assert isinstance(bags.store.optimizer, torch.optim.Optimizer)


@pytest.mark.parametrize("several", [False, True])
def test_dense_parameters_are_refused(several: bool) -> None:
    optimizer = persia.optim.SGD(lr=1.0)
    store = persia.Store(optimizer)
    linear = torch.nn.Linear(4, 1)
    params: Any = linear.parameters() if several else linear.weight
    with pytest.raises(errors.InvalidArgument):
        store.optimizer.add_param_group({"params": params})
    assert not optimizer.param_groups


def test_lr_of_a_table() -> None:
    bags = make(persia.optim.SGD(lr=0.1), lr=1.0)
    a, b = rows(bags), rows(bags, "b")
    bags(batch()).values().sum().backward()
    torch.testing.assert_close(rows(bags), a - 1.0)
    torch.testing.assert_close(rows(bags, "b"), b - 0.1)


@pytest.mark.parametrize("update", ["backward", "step"])
def test_schedulers_work_without_a_warning(update: str) -> None:
    bags = make(persia.optim.SGD(lr=1.0), update)
    optimizer = bags.store.optimizer
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    want = rows(bags)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for k in range(4):
            bags(batch()).values().sum().backward()
            if update == "step":
                optimizer.step()
            scheduler.step()
            want = want - 0.5**k
            torch.testing.assert_close(rows(bags), want)
    assert scheduler.get_last_lr() == [0.0625, 0.0625]


@pytest.mark.parametrize(
    "make_scheduler",
    [
        partial(lr_scheduler.CosineAnnealingLR, T_max=5),
        partial(
            lr_scheduler.OneCycleLR,
            max_lr=2.0,
            total_steps=6,
            cycle_momentum=False,
        ),
    ],
)
def test_schedules_are_those_of_torch(make_scheduler: Any) -> None:
    """Rows move by the rates that the same schedule has over torch's SGD."""
    bags = make(persia.optim.SGD(lr=1.0))
    theirs = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    mine = make_scheduler(bags.store.optimizer)
    other = make_scheduler(theirs)
    for _ in range(5):
        before = rows(bags)
        bags(batch()).values().sum().backward()
        rate = theirs.param_groups[0]["lr"]
        torch.testing.assert_close(rows(bags), before - rate)
        theirs.step()
        mine.step()
        other.step()


def test_a_schedule_of_each_table() -> None:
    bags = make(persia.optim.SGD(lr=1.0))
    optimizer = bags.store.optimizer
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, [lambda t: 1.0 / (1 + t), lambda t: 1.0]
    )
    before = rows(bags)
    for _ in range(2):
        bags(batch()).values().sum().backward()
        scheduler.step()
    torch.testing.assert_close(rows(bags), before - 1.5)


def test_state_dict_of_the_optimizer() -> None:
    bags = make(persia.optim.Adam(lr=0.3))
    state = bags.store.optimizer.state_dict()
    other = make(persia.optim.Adam(lr=0.1))
    other.store.optimizer.load_state_dict(state)
    assert other.store.optimizer.param_groups[0]["lr"] == 0.3
    again = pickle.loads(pickle.dumps(state))
    assert again["param_groups"][1]["table"] == "b"


def test_pickled_with_its_schedulers() -> None:
    bags = make(persia.optim.Adam(lr=0.3), "step")
    bags(batch()).values().sum().backward()
    scheduler = torch.optim.lr_scheduler.StepLR(bags.store.optimizer, 1)
    file = io.BytesIO()
    torch.save(scheduler, file)
    file.seek(0)
    again = torch.load(file, weights_only=False).optimizer
    groups = bags.store.optimizer.param_groups
    for group in groups:
        assert group["params"][0].grad is not None
    for group, other in zip(groups, again.param_groups, strict=True):
        group.pop("params")
        assert other.pop("params")[0].grad is None
        assert group == other
    with pytest.raises(errors.PersiaError):
        again.store.flush()


def test_state_dict_goes_by_the_names_of_tables() -> None:
    bags = make(persia.optim.SGD(lr=0.3))
    groups = bags.store.optimizer.param_groups
    groups[0]["lr"], groups[1]["lr"] = 1.0, 2.0
    store = persia.Store(persia.optim.SGD(lr=0.1))
    for name in ("c", "b", "a"):
        store.add_table(persia.EmbeddingBagConfig(name, 4))
    store.optimizer.load_state_dict(bags.store.optimizer.state_dict())
    got = {g["table"]: g["lr"] for g in store.optimizer.param_groups}
    assert got == {"a": 1.0, "b": 2.0, "c": 0.1}
    with pytest.raises(errors.SchemaMismatch, match="adam"):
        make(persia.optim.Adam()).store.optimizer.load_state_dict(
            bags.store.optimizer.state_dict()
        )


def test_step_of_adam_is_the_updates_of_the_store() -> None:
    bags = make(persia.optim.Adam(lr=0.1))
    one = persia.JaggedBatch(["f", "g"], torch.tensor([1, 9]))
    weight = torch.nn.Parameter(bags.store.rows("a", [5]).clone())
    theirs = torch.optim.Adam([weight], lr=0.1)
    for _ in range(3):  # id 5 is not touched, but torch's step counts
        bags(one).values().sum().backward()
        weight.grad = torch.zeros_like(weight)
        theirs.step()
    last = persia.JaggedBatch(["f", "g"], torch.tensor([5, 9]))
    bags(last).values().sum().backward()
    weight.grad = torch.ones_like(weight)
    theirs.step()
    torch.testing.assert_close(bags.store.rows("a", [5]), weight.detach())


class Both(torch.nn.Module):
    """A dense and a sparse part."""

    def __init__(self, bags: Any) -> None:
        super().__init__()
        self.bags = bags
        self.linear = torch.nn.Linear(6, 1)
        torch.nn.init.constant_(self.linear.weight, 0.1)
        torch.nn.init.constant_(self.linear.bias, 0.1)

    def forward(self, ids: Any) -> torch.Tensor:
        out: torch.Tensor = self.linear(self.bags(ids).values())
        return out


@pytest.mark.parametrize("unscale", [False, True])
def test_grad_scaler(unscale: bool) -> None:
    plain, scaled = (
        Both(make(persia.optim.Adagrad(lr=0.1), "step")) for _ in range(2)
    )
    sparse = [m.bags.store.optimizer for m in (plain, scaled)]
    dense = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, scaled)]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for _ in range(3):
        dense[0].zero_grad()
        plain(batch()).square().sum().backward()
        dense[0].step()
        sparse[0].step()

        dense[1].zero_grad()
        scaler.scale(scaled(batch()).square().sum()).backward()
        if unscale:
            scaler.unscale_(dense[1])
            scaler.unscale_(sparse[1])
        scaler.step(dense[1])
        scaler.step(sparse[1])
        scaler.update()
        torch.testing.assert_close(rows(scaled.bags), rows(plain.bags))
    assert scaler.get_scale() == 1024.0
    # An overflow: the step is skipped, the scale halved, training goes on.
    before = rows(scaled.bags)
    loss = scaled(batch()).square().sum() * float("inf")
    scaler.scale(loss).backward()
    if unscale:
        scaler.unscale_(dense[1])
        scaler.unscale_(sparse[1])
    scaler.step(dense[1])
    scaler.step(sparse[1])
    scaler.update()
    assert scaler.get_scale() == 512.0
    assert torch.equal(rows(scaled.bags), before)
    assert scaled.bags.store.stats()["held"] == 0
    dense[1].zero_grad()
    scaler.scale(scaled(batch()).sum() * 0 + 1).backward()
    scaler.step(sparse[1])
    scaler.update()


@pytest.mark.parametrize("rows_first", [False, True])
@pytest.mark.parametrize("by_scaler", [False, True])
def test_a_scaler_of_the_dense_optimizer_alone(
    by_scaler: bool, rows_first: bool
) -> None:
    bags = make(persia.optim.SGD(lr=0.1), "step")
    dense = torch.optim.SGD(bags.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    sparse = bags.store.optimizer

    def step() -> None:
        scaler.scale(bags(batch()).values().sum()).backward()
        steps = [lambda: scaler.step(dense), sparse.step]
        if by_scaler:
            steps[1] = lambda: scaler.step(sparse)
        for one in reversed(steps) if rows_first else steps:
            one()
        scaler.update()
        dense.zero_grad()

    if by_scaler:
        for _ in range(3):
            step()
        # Later steps may be without it.
        bags(batch()).values().sum().backward()
        sparse.step()
        return
    if rows_first:
        step()  # it shows in the next one
    before = rows(bags)
    with pytest.raises(errors.InvalidArgument):
        step()
    assert torch.equal(rows(bags), before)


def test_a_scaler_of_the_dense_optimizer_needs_update_step() -> None:
    bags = make(persia.optim.SGD(lr=0.1))
    dense = torch.optim.SGD(bags.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(bags(batch()).values().sum()).backward()
    with pytest.raises(errors.InvalidArgument):
        scaler.step(dense)


def test_grad_scaler_sees_overflow_of_the_embeddings_alone() -> None:
    bags = make(persia.optim.SGD(lr=1.0), "step")
    before = rows(bags)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    out = bags(batch()).values()
    g = torch.ones_like(out)
    g[2, 5] = float("nan")  # a column of table b
    out.backward(g)
    assert torch.isnan(bags.store.optimizer.param_groups[1]["params"][0].grad)
    scaler.scale(torch.ones(1))  # sets the scale up
    scaler.step(bags.store.optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0
    assert torch.equal(rows(bags), before)


def test_probes_are_where_the_values_are() -> None:
    bags = make(persia.optim.SGD(lr=1.0), "step")
    optimizer = bags.store.optimizer
    probe = optimizer.param_groups[0]["params"][0]
    out = bags(batch()).values()
    out.sum().backward()
    assert probe.grad.device == torch.device("cpu")
    out = bags(batch()).values()
    bags._placed(torch.zeros(1, requires_grad=True), torch.device("meta"))
    out.sum().backward()
    assert probe.grad.device == torch.device("meta")


class Spy:
    """A core that counts what waits for gradients."""

    def __init__(self, core: Any) -> None:
        self._core = core
        self.calls = 0

    def finite(self) -> bytes:
        self.calls += 1
        found: bytes = self._core.finite()
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)


def test_a_backward_waits_for_no_gradient() -> None:
    bags = make(persia.optim.SGD(lr=1.0), "step")
    engine = engine_of(bags.store)
    spy = engine.core = Spy(engine.core)  # type: ignore[assignment]
    for _ in range(2):
        bags(batch()).values().sum().backward()
        bags.store.optimizer.step()
    bags(batch()).values().sum().backward()
    persia.optim.clip_grad_norm_(bags, math.inf)
    bags.store.optimizer.zero_grad()
    assert spy.calls == 0
    for group in bags.store.optimizer.param_groups:
        assert group["params"][0].grad is None
    # Read once, whatever asks.
    for _ in range(2):
        bags(batch()).values().sum().backward()
    for group in bags.store.optimizer.param_groups:
        assert group["params"][0].grad.tolist() == [1.0]
    assert spy.calls == 1


@pytest.mark.parametrize("how", ["argument", "moved"])
def test_probes_of_compiled_code_are_there_too(how: str) -> None:
    # Its forward is a graph, which tells nothing of its device.
    store = persia.Store(optimizer=persia.optim.SGD(lr=1.0), update="step")
    bags = persia.EmbeddingBagCollection(
        [persia.EmbeddingBagConfig("t", 4)],
        store=store,
        device="meta" if how == "argument" else None,
    )
    if how == "moved":
        bags.to("meta")
    engine_of(store).backward_done()
    (group,) = store.optimizer.param_groups
    assert group["params"][0].grad.device == torch.device("meta")


def test_a_scaler_on_another_device_is_an_error() -> None:
    bags = make(persia.optim.SGD(lr=1.0), "step")
    before = rows(bags)
    bags(batch()).values().sum().backward()
    optimizer = bags.store.optimizer
    # As GradScaler hands it over.
    optimizer.found_inf = torch.zeros(1, device="meta")
    with pytest.raises(errors.InvalidArgument):
        optimizer.step()
    assert torch.equal(rows(bags), before)


def test_scaler_and_fp16_need_update_step() -> None:
    bags = make(persia.optim.SGD(lr=1.0))
    with (
        torch.autocast("cpu", dtype=torch.float16),
        pytest.raises(errors.InvalidArgument, match='update="step"'),
    ):
        bags(batch())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        bags(batch())
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(bags(batch()).values().sum()).backward()
    cpu = torch.device("cpu")
    persia.optim.gradients_came(bags.store.optimizer, cpu)
    with pytest.raises(errors.InvalidArgument, match='update="step"'):
        scaler.step(bags.store.optimizer)


@pytest.mark.parametrize("needs_grad", [False, True])
def test_fp16_with_weights_needs_update_step(needs_grad: bool) -> None:
    bags = persia.EmbeddingBagCollection(
        [persia.EmbeddingBagConfig("t", 4)], is_weighted=True
    )
    one = torch.ones(1).long()
    weights = torch.ones(1, requires_grad=needs_grad)
    with (
        torch.autocast("cpu", dtype=torch.float16),
        pytest.raises(errors.InvalidArgument, match='update="step"'),
    ):
        bags({"t": (one, one, weights)})


def test_clip_grad_norm() -> None:
    model = Both(make(persia.optim.SGD(lr=1.0), "step"))
    theirs = Both(make(persia.optim.SGD(lr=1.0), "step"))
    tables = {t: torch.nn.Parameter(rows(model.bags, t).clone()) for t in "ab"}
    ids = torch.tensor([0, 1, 1, 1, 4, 5])  # duplicates are summed first
    out = torch.cat([tables["a"][ids], tables["b"][ids]], 1)
    (theirs.linear(out) * 50).sum().backward()
    every = [*theirs.linear.parameters(), *tables.values()]
    want = torch.nn.utils.clip_grad_norm_(every, 2.0)

    (
        model(persia.JaggedBatch(["f", "g"], torch.cat([ids, ids]))) * 50
    ).sum().backward()
    got = persia.clip_grad_norm_(model, 2.0)
    torch.testing.assert_close(got, want)
    for mine, other in zip(
        model.linear.parameters(), theirs.linear.parameters(), strict=True
    ):
        torch.testing.assert_close(mine.grad, other.grad)
    model.bags.store.optimizer.step()
    for t, weight in tables.items():
        assert weight.grad is not None
        torch.testing.assert_close(
            rows(model.bags, t), (weight - weight.grad).detach()
        )
    with pytest.raises(errors.InvalidArgument, match='update="step"'):
        persia.clip_grad_norm_(Both(make(persia.optim.SGD(lr=1.0))), 1.0)


def test_clip_leaves_small_gradients() -> None:
    bags = make(persia.optim.SGD(lr=1.0), "step")
    before = rows(bags)
    bags(batch()).values().sum().backward()
    norm = persia.clip_grad_norm_(bags, 100.0)
    torch.testing.assert_close(norm, torch.tensor(36.0).sqrt())
    bags.store.optimizer.step()
    torch.testing.assert_close(rows(bags), before - 1)


def test_norms_and_bounds_of_rows() -> None:
    ones = torch.ones(6, 4)
    bags = make(persia.optim.SGD(lr=1.0, max_grad_norm=0.5))
    before = rows(bags)
    bags(batch())["f"].sum().backward()
    torch.testing.assert_close(rows(bags), before - 0.25 * ones)

    bags = make(persia.optim.SGD(lr=1.0, max_norm=0.5))
    bags(batch())["f"].sum().backward()
    torch.testing.assert_close(rows(bags).norm(dim=1), torch.full((6,), 0.5))

    bags = make(persia.optim.SGD(lr=1.0, weight_bound=0.75))
    bags(batch())["f"].sum().backward()
    torch.testing.assert_close(rows(bags), -0.75 * ones)


def test_bf16_rows_follow_fp32_rows() -> None:
    """Stochastic rounding is right in the mean."""
    wide = make(persia.optim.SGD(lr=1.0))
    narrow = make(persia.optim.SGD(lr=1.0), data_type="bf16")
    ids = torch.arange(4096)
    both = persia.JaggedBatch(["f", "g"], torch.cat([ids, ids]))
    for _ in range(20):
        for bags in (wide, narrow):
            bags(both).values().backward(torch.full((4096, 6), -0.01))
    a, b = (x.store.rows("a", ids) for x in (wide, narrow))
    assert torch.equal(b, b.bfloat16().float())
    assert abs(float((a - b).mean())) < 2e-4
    assert float((a - b).abs().max()) < 0.02


def test_admission_by_probability() -> None:
    bags = make(persia.optim.SGD(lr=1.0), admission=0.25)
    ids = torch.arange(20000)
    bags(
        persia.JaggedBatch(["f", "g"], torch.cat([ids, ids]))
    ).values().sum().backward()
    stats = bags.store.stats()["tables"]["a"]
    assert 4700 < stats["rows"] < 5300
    assert stats["refused"] == 20000 - stats["rows"]
    assert bags.store.stats()["tables"]["b"]["rows"] == 20000


def test_bad_settings_are_named() -> None:
    with pytest.raises(errors.InvalidArgument, match="lr is -1"):
        persia.optim.Adam(lr=-1)
    with pytest.raises(errors.InvalidArgument, match=r"betas\[1\]"):
        persia.optim.Adam(betas=(0.9, 1.0))
    for betas in ((0.9,), (0.9, 0.99, 0.999), 0.9):
        with pytest.raises(errors.InvalidArgument, match="betas is"):
            persia.optim.Adam(betas=betas)  # type: ignore[arg-type]
    for lr in ("x", None, [0.1], torch.ones(2)):
        with pytest.raises(errors.InvalidArgument, match="lr is"):
            persia.optim.SGD(lr=lr)  # type: ignore[arg-type]
    for eps in (float("nan"), 0.0, 1e-42):
        with pytest.raises(errors.InvalidArgument, match="eps"):
            persia.optim.Adagrad(eps=eps)
    with pytest.raises(TypeError, match="rho"):
        persia.optim.SGD(0.1, rho=1.0)
    with pytest.raises(errors.InvalidArgument, match=r"persia\.optim"):
        persia.Store(torch.optim.SGD([torch.zeros(1)]))  # type: ignore[arg-type]
    optimizer = persia.optim.SGD(0.1)
    persia.Store(optimizer)
    with pytest.raises(errors.InvalidArgument, match="Store"):
        persia.Store(optimizer)
    with pytest.raises(errors.InvalidArgument, match="no Store"):
        persia.optim.SGD(0.1).step()


def test_an_element_without_a_gradient_stays() -> None:
    """0 / (0 + eps)."""
    tiny = torch.finfo(torch.float32).tiny
    for kind in (persia.optim.Adagrad, persia.optim.RowWiseAdagrad):
        bags = make(kind(lr=1.0, eps=tiny))
        before = rows(bags)
        (bags(batch()).values().sum() * 0.0).backward()
        assert torch.equal(rows(bags), before)


def test_a_bad_setting_of_an_update_changes_nothing() -> None:
    bags = make(persia.optim.SGD(lr=1.0))
    before = rows(bags)
    bags.store.optimizer.param_groups[0]["lr"] = float("nan")
    with pytest.raises(errors.InvalidArgument, match=r"table a: .*lr"):
        bags(batch()).values().sum().backward()
    assert torch.equal(rows(bags), before)


@pytest.mark.parametrize("update", ["backward", "step"])
def test_a_group_without_lr_is_named(update: str) -> None:
    bags = make(persia.optim.SGD(lr=1.0), update)
    before = rows(bags)
    group = bags.store.optimizer.param_groups[1]
    del group["lr"]

    def step() -> None:
        bags(batch()).values().sum().backward()
        bags.store.optimizer.step()

    with pytest.raises(errors.InvalidArgument, match=r"table 'b': .*lr"):
        step()
    assert torch.equal(rows(bags), before)
    group["lr"] = 1.0
    bags.store.optimizer.zero_grad()
    step()
    assert not torch.equal(rows(bags), before)


def test_a_table_has_one_optimizer() -> None:
    SGD = persia.optim.SGD

    def config(**settings: Any) -> persia.EmbeddingBagConfig:
        return persia.EmbeddingBagConfig("t", 4, **settings)

    store = persia.Store(SGD(lr=1.0))
    store.add_table(config())
    store.add_table(config(optimizer=SGD(lr=1.0)))  # the same, said twice
    with pytest.raises(
        errors.SchemaMismatch, match=r"'t': .*lr is 99.*weight_decay is 0\.1"
    ):
        store.add_table(config(optimizer=SGD(lr=99, weight_decay=0.1)))
    with pytest.raises(errors.SchemaMismatch, match=r"optimizer.*adam"):
        store.add_table(config(optimizer=persia.optim.Adam(lr=1.0)))
    assert store.optimizer.param_groups[0]["lr"] == 1.0
    store = persia.Store(persia.optim.Adam())
    store.add_table(config(optimizer=SGD(lr=0.5), lr=2.0))
    store.add_table(config(optimizer=SGD(lr=0.1), lr=2.0))
    with pytest.raises(errors.SchemaMismatch, match=r"lr is 0\.5"):
        store.add_table(config(optimizer=SGD(lr=0.5)))
