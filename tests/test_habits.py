"""What people do to parameters, models and loops: a row of the page each.

``docs/explanation/habits.md`` has the table of these rows: the habit as it
is written there, and whether it works, warns, or raises which error. The
oracle of what works is torch's own model, treated alike.
"""

from __future__ import annotations

import copy
import pickle
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.optim import swa_utils

import persia
from persia import errors
from tests.test_copies import ROWS, Pair, same, store_of, train_on

PAGE = Path(__file__).parents[1] / "docs" / "explanation" / "habits.md"
ROW = re.compile(r"^\| (.+?) \| (works|warns|`\w+`) \| (.+) \|$", re.MULTILINE)

Habit = Callable[[Pair, Path], Any]
#: By the habit as on the page: what happens, how the store updates, and what
#: is done.
HABITS: dict[str, tuple[str, str, Habit]] = {}


def habit(
    text: str, outcome: str = "works", update: str = "backward"
) -> Callable[[Habit], Habit]:
    def note(function: Habit) -> Habit:
        assert text not in HABITS
        HABITS[text] = outcome, update, function
        return function

    return note


def rows_of(model: nn.Module) -> torch.Tensor:
    return store_of(model).rows("one", range(ROWS))


@habit("the same by names (`user.weight`), by `p.dim()` or by modules")
def _(pair: Pair, folder: Path) -> None:
    for model in (pair.ours, pair.theirs):
        for name, p in model.named_parameters():
            p.requires_grad = not (name == "one.weight" or p.dim() == 2)
    before = rows_of(pair.ours)
    pair.train()
    assert torch.equal(rows_of(pair.ours), before)
    same(pair.ours, pair.theirs)


@habit("`p.requires_grad = False` in a loop, `model.requires_grad_(False)`")
def _(pair: Pair, folder: Path) -> None:
    for model in (pair.ours, pair.theirs):
        for p in model.parameters():
            p.requires_grad = False
        model.requires_grad_(False)
        model.get_submodule("top").requires_grad_(True)
    before = rows_of(pair.ours)
    pair.train()
    assert torch.equal(rows_of(pair.ours), before)
    same(pair.ours, pair.theirs)


@habit(
    "`model.zero_grad()`, `optimizer.zero_grad()` to skip a batch",
    update="step",
)
def _(pair: Pair, folder: Path) -> None:
    for model in (pair.ours, pair.theirs):
        model(torch.zeros(8, 2, dtype=torch.long)).sum().backward()
        model.zero_grad()
    assert store_of(pair.ours).stats()["held"] == 0
    pair.train()
    same(pair.ours, pair.theirs)


@habit("`loss.backward(retain_graph=True)`, a backward a task", update="step")
def _(pair: Pair, folder: Path) -> None:
    ids = pair.ids()
    for model in (pair.ours, pair.theirs):
        dense = torch.optim.SGD(
            [p for p in model.parameters() if p.numel()], lr=0.1
        )
        out = model(ids)
        out.square().mean().backward(retain_graph=True)
        out.sin().mean().backward()
        dense.step()
        if model is pair.ours:
            store_of(model).optimizer.step()
    same(pair.ours, pair.theirs)


@habit('the same with `Store(update="backward")`', "TicketError")
def _(pair: Pair, folder: Path) -> None:
    pair.ours(pair.ids()).sum().backward(retain_graph=True)


@habit("`loss.backward(inputs=parameters)`")
def _(pair: Pair, folder: Path) -> None:
    ids = pair.ids()
    for model in (pair.ours, pair.theirs):
        dense = torch.optim.SGD(model.parameters(), lr=0.1)
        model(ids).sin().sum().backward(inputs=list(model.parameters()))
        dense.step()
    same(pair.ours, pair.theirs)


@habit("`torch.autograd.grad(loss, model.parameters())`", "InvalidArgument")
def _(pair: Pair, folder: Path) -> None:
    loss = pair.ours(pair.ids()).sum()
    torch.autograd.grad(loss, list(pair.ours.parameters()))


@habit("`loss.backward(create_graph=True)`", "TicketError")
def _(pair: Pair, folder: Path) -> None:
    pair.ours(pair.ids()).sum().backward(create_graph=True)


@habit("`copy.deepcopy(model)`: folds, teachers, restarts")
def _(pair: Pair, folder: Path) -> None:
    ours, theirs = copy.deepcopy(pair.ours), copy.deepcopy(pair.theirs)
    pair.train(ours, theirs)
    same(ours, theirs)
    same(pair.ours, pair.theirs)


@habit("`AveragedModel(model)`: mean, EMA, own `avg_fn`; `update_bn`")
def _(pair: Pair, folder: Path) -> None:
    ema = swa_utils.get_ema_multi_avg_fn(0.9)
    pairs = [
        (m, swa_utils.AveragedModel(m, multi_avg_fn=ema))
        for m in (pair.ours, pair.theirs)
    ]
    for _ in range(3):
        pair.train()
        for model, average in pairs:
            average.update_parameters(model)
    batches = [pair.ids() for _ in range(2)]
    for _, average in pairs:
        swa_utils.update_bn(batches, average)
    same(pairs[0][1], pairs[1][1])


@habit("`target.data.lerp_(p.data, tau)`, `mul_`, `add_`: target networks")
def _(pair: Pair, folder: Path) -> None:
    targets = copy.deepcopy(pair.ours), copy.deepcopy(pair.theirs)
    pair.train()
    for target, model in zip(targets, (pair.ours, pair.theirs), strict=True):
        for a, b in zip(target.parameters(), model.parameters(), strict=True):
            a.data.mul_(0.9).add_(b.data, alpha=0.1)
    same(*targets)


@habit("`target.load_state_dict(model.state_dict())`")
def _(pair: Pair, folder: Path) -> None:
    targets = copy.deepcopy(pair.ours), copy.deepcopy(pair.theirs)
    pair.train()
    for target, model in zip(targets, (pair.ours, pair.theirs), strict=True):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a state holds no rows
            target.load_state_dict(model.state_dict())
    pair.train(*targets)
    same(*targets)


@habit("`p.data.clone()` by name, and `p.data = values[name]` later")
def _(pair: Pair, folder: Path) -> None:
    values = {n: p.data.clone() for n, p in pair.ours.named_parameters()}
    before = rows_of(pair.ours)
    pair.train()
    for name, p in pair.ours.named_parameters():
        p.data = values[name]
    assert torch.equal(rows_of(pair.ours), before)


@habit(
    "a value of `p.data * c` that is written after the rows changed",
    "InvalidArgument",
)
def _(pair: Pair, folder: Path) -> None:
    anchor = pair.ours.get_submodule("one.rows").anchor
    half = anchor.data * 0.5
    train_on(pair.ours, pair.ids())
    pair.before = rows_of(pair.ours)  # type: ignore[attr-defined]
    anchor.data.copy_(half)


@habit(
    "`old = p.data`, `p.data = x`, and `old` written later",
    "InvalidArgument",
)
def _(pair: Any, folder: Path) -> None:
    p, q = (
        model.get_submodule("one.rows").anchor
        for model in (pair.ours, copy.deepcopy(pair.ours))
    )
    old = p.data
    p.data = q.data
    pair.before = rows_of(pair.ours)
    p.data = old


@habit(
    "`nn.init.normal_(p)`, `p.data.uniform_()`, `clamp_`, noise: other writes",
    "InvalidArgument",
)
def _(pair: Pair, folder: Path) -> None:
    for p in pair.ours.get_submodule("one").parameters():
        nn.init.normal_(p)


@habit(
    "`vector_to_parameters(vector, model.parameters())`, `p.data = x`",
    "InvalidArgument",
)
def _(pair: Pair, folder: Path) -> None:
    for p in pair.ours.parameters():  # how torch moves them
        p.data = p.data.cpu()
    vector = nn.utils.parameters_to_vector(pair.theirs.parameters())
    with pytest.raises(errors.InvalidArgument):
        nn.utils.vector_to_parameters(vector, pair.ours.parameters())
    for p in pair.ours.parameters():
        p.data = torch.zeros(p.shape)


CALL = torch.func.functional_call


@habit(
    "`functional_call(model, values)` of `torch.func`: own values, their "
    "clones"
)
def _(pair: Pair, folder: Path) -> None:
    ids = pair.ids()
    changes: list[Callable[[Any], Any]] = [
        lambda p: p,
        lambda p: p.clone(),
        lambda p: p.detach().requires_grad_(),
        lambda p: p.data * 1.0,
    ]
    for change in changes:
        for model in map(copy.deepcopy, (pair.ours, pair.theirs)):
            want = model(ids)
            own = {n: change(p) for n, p in model.named_parameters()}
            torch.testing.assert_close(CALL(model, own, (ids,)), want)
    for model in (pair.ours, pair.theirs):
        own = dict(model.named_parameters())
        dense = torch.optim.SGD(own.values(), lr=0.1)
        CALL(model, own, (ids,)).square().mean().backward()
        dense.step()
    same(pair.ours, pair.theirs)


@habit(
    "the same with other values: MAML's inner step, another model's",
    "InvalidArgument",
)
def _(pair: Pair, folder: Path) -> None:
    ids, model = pair.ids(), copy.deepcopy(pair.ours)
    own = dict(model.named_parameters())
    old = {name: p.clone() for name, p in own.items()}
    train_on(model, pair.ids())
    for values in (
        dict(pair.ours.named_parameters()),
        old,
        {name: 1.5 * p for name, p in own.items()},
        {name: p + torch.ones(p.shape) for name, p in own.items()},
        dict(copy.deepcopy(pair.ours).named_parameters()),  # it is gone
        dict(pair.theirs.named_parameters()),
    ):
        for tie in (True, False):
            with pytest.raises(errors.InvalidArgument):
                CALL(copy.deepcopy(model), values, (ids,), tie_weights=tie)
    fast = {n: p - 0.1 * torch.ones(p.shape) for n, p in own.items()}
    CALL(pair.ours, fast, (ids,))


@habit(
    "`embedding.weight.data.copy_(x)`, `nn.init.*`, `weight[i] = x`",
    "InvalidArgument",
)
def _(pair: Pair, folder: Path) -> None:
    one: Any = pair.ours.get_submodule("one")
    with torch.no_grad():
        one.weight[0] = 1.0


@habit("`head.weight = embedding.weight` after `convert`", "InvalidArgument")
def _(pair: Pair, folder: Path) -> None:
    one: Any = pair.ours.get_submodule("one")
    head = nn.Linear(4, ROWS)
    with pytest.raises(errors.InvalidArgument):
        head.weight = nn.Parameter(one.weight)
    head.weight = one.weight


@habit(
    "`torch.nn.utils.prune`, `parametrize` of an embedding",
    "InvalidArgument",
)
def _(pair: Pair, folder: Path) -> None:
    one = pair.ours.get_submodule("one")
    before = dict(one.named_parameters())
    with pytest.raises(errors.InvalidArgument):
        prune.random_unstructured(one, "weight", amount=0.5)
    assert dict(one.named_parameters()) == before
    with pytest.raises(errors.InvalidArgument):
        nn.utils.parametrizations.spectral_norm(one)
    assert dict(one.named_parameters()) == before
    prune.l1_unstructured(one, "weight", amount=0.5)


@habit("`reset_parameters()` of embeddings and collections")
def _(pair: Pair, folder: Path) -> None:
    before = rows_of(pair.ours)
    for model in (pair.ours, pair.theirs):
        torch.manual_seed(4)
        for name in ("one", "bag"):
            one: Any = model.get_submodule(name)
            one.reset_parameters()
    same(pair.ours, pair.theirs)
    assert not torch.equal(rows_of(pair.ours), before)


@habit("a penalty over `parameters()` in the loss", "warns")
def _(pair: Pair, folder: Path) -> None:
    loss = pair.ours(pair.ids()).sum()
    (loss + sum(p.pow(2).sum() for p in pair.ours.parameters())).backward()


@habit("`persia.penalty(model, l2=..., l1=...)` in the loss")
def _(pair: Pair, folder: Path) -> None:
    ids = pair.ids()
    theirs: Any = pair.theirs
    (pair.ours(ids).mean() + persia.penalty(pair.ours, l2=0.1)).backward()
    used = theirs.one.weight[ids.unique()], theirs.bag.weight[ids.unique()]
    l2 = sum(rows.square().sum() for rows in used)
    (theirs(ids).mean() + 0.1 * l2).backward()
    torch.optim.SGD([theirs.one.weight, theirs.bag.weight], lr=0.1).step()
    same(pair.ours, pair.theirs)


@habit("`clip_grad_norm_(model.parameters(), c)`, `clip_grad_value_`", "warns")
def _(pair: Pair, folder: Path) -> None:
    pair.ours(pair.ids()).sum().backward()
    nn.utils.clip_grad_norm_(pair.ours.parameters(), 1.0)


@habit(
    "`p.grad.mul_(c)`, `p.grad = x`, `p.grad += noise`, `p.register_hook(f)`",
    "warns",
    update="step",
)
def _(pair: Pair, folder: Path) -> None:
    def scale(p: nn.Parameter) -> None:
        assert p.grad is not None
        p.grad.mul_(0.5)

    def add(p: nn.Parameter) -> None:
        assert p.grad is not None
        p.grad += 1

    def hook(p: nn.Parameter) -> None:
        p.register_hook(lambda gradient: 0.5 * gradient)

    def assign(p: nn.Parameter) -> None:
        p.grad = torch.zeros(p.shape)

    def assign_data(p: nn.Parameter) -> None:
        assert p.grad is not None
        p.grad.data = torch.zeros(p.shape)

    for change in (scale, add, hook, assign, assign_data):
        model = copy.deepcopy(pair.ours)
        model(pair.ids()).sum().backward()
        with pytest.warns(UserWarning, match=r"persia\.penalty|clip_grad"):
            change(next(model.parameters()))
    pair.ours(pair.ids()).sum().backward()
    for p in pair.ours.parameters():
        scale(p)


@habit("`persia.clip_grad_norm_(model, c)`", update="step")
def _(pair: Pair, folder: Path) -> None:
    ids = pair.ids()
    for model in (pair.ours, pair.theirs):
        dense = torch.optim.SGD(
            [p for p in model.parameters() if p.numel()], lr=0.1
        )
        model(ids).sum().backward()
        if model is pair.ours:
            persia.clip_grad_norm_(model, 0.5)
            store_of(model).optimizer.step()
        else:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        dense.step()
    same(pair.ours, pair.theirs)


def moved(ema: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """An exponential average of states."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a state holds no rows
        now = model.state_dict()
    return {k: 0.9 * ema[k] + 0.1 * v for k, v in now.items()}


@habit("`ema = {k: d * ema[k] + (1 - d) * v ...}` of states, loaded each step")
def _(pair: Pair, folder: Path) -> None:
    targets = copy.deepcopy(pair.ours), copy.deepcopy(pair.theirs)
    for _ in range(3):
        pair.train()
        for target, model in zip(
            targets, (pair.ours, pair.theirs), strict=True
        ):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                ema = target.state_dict()
            target.load_state_dict(moved(ema, model))
    same(*targets)


def states_of(model: nn.Module) -> tuple[Any, list[Any]]:
    """Copies that were trained apart, and their states."""
    models = [copy.deepcopy(model) for _ in range(3)]
    generator = torch.Generator().manual_seed(9)
    for one in models:
        train_on(one, torch.randint(20, (8, 2), generator=generator))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a state holds no rows
        return models, [one.state_dict() for one in models]


@habit("`sum(s[k] for s in states) / n`: soups, federated means")
def _(pair: Pair, folder: Path) -> None:
    made = []
    for model in (pair.ours, pair.theirs):
        models, states = states_of(model)
        mean = {k: sum(s[k] for s in states) / 3 for k in states[0]}
        made.append(copy.deepcopy(models[0]))
        made[-1].load_state_dict(mean)
    same(*made)


@habit("`torch.stack([s[k] for s in states]).mean(0)`", "InvalidArgument")
def _(pair: Pair, folder: Path) -> None:
    _, states = states_of(pair.ours)
    for key in states[0]:
        torch.stack([s[key].float() for s in states]).mean(0)


@habit("`ema` as a dict that is kept over steps", "InvalidArgument")
def _(pair: Any, folder: Path) -> None:
    ema = {k: v.clone() for k, v in pair.ours.state_dict().items()}
    pair.train(pair.ours)
    pair.before = rows_of(pair.ours)
    moved(ema, pair.ours)


@habit("`best = copy.deepcopy(model.state_dict())` after `keep_rows`")
def _(pair: Pair, folder: Path) -> None:
    persia.keep_rows(pair.ours, folder)
    best = [copy.deepcopy(m.state_dict()) for m in (pair.ours, pair.theirs)]
    pair.train()
    pair.ours.load_state_dict(best[0])
    pair.theirs.load_state_dict(best[1])
    same(pair.ours, pair.theirs)


@habit("`state_dict()` of trained rows without it", "warns")
def _(pair: Pair, folder: Path) -> None:
    train_on(pair.ours, pair.ids())
    pair.ours.state_dict()


@habit("`load_state_dict()` after the rows changed without it", "RowsMissing")
def _(pair: Pair, folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = pair.ours.state_dict()
    train_on(pair.ours, pair.ids())
    pair.before = rows_of(pair.ours)  # type: ignore[attr-defined]
    pair.ours.load_state_dict(state)


@habit("`pickle`, `torch.save(model)`, a spawned process", "warns")
def _(pair: Pair, folder: Path) -> None:
    pickle.dumps(store_of(pair.ours))


@habit(
    "a checkpoint into a model whose tables are in another order",
    "SchemaMismatch",
)
def _(pair: Pair, folder: Path) -> None:
    def bags(*names: str) -> nn.Module:
        return persia.EmbeddingBagCollection(
            tables=[persia.EmbeddingBagConfig(n, 4, [n]) for n in names]
        )

    one, other = bags("a", "b"), bags("b", "a")
    other.load_state_dict(one.state_dict())


@habit(
    "`persia.convert(model)` into a store that has the rows already", "warns"
)
def _(pair: Pair, folder: Path) -> None:
    torch.manual_seed(9)
    other = type(pair.theirs)()
    persia.convert(other, store=store_of(pair.ours), share=True)


def on_page() -> dict[str, str]:
    found = ROW.findall(PAGE.read_text())
    return {text: outcome.strip("`") for text, outcome, _ in found}


def test_the_page_has_a_row_a_habit() -> None:
    assert on_page() == {
        text: outcome for text, (outcome, _, _) in HABITS.items()
    }


@pytest.mark.parametrize("text", HABITS)
def test_a_habit(text: str, tmp_path: Path) -> None:
    outcome, update, do = HABITS[text]
    pair: Any = Pair(update)
    pair.before = rows_of(pair.ours)
    if outcome == "works":
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="(?s).*persia")
            do(pair, tmp_path)
    elif outcome == "warns":
        with pytest.warns(UserWarning, match=r"persia|store"):
            do(pair, tmp_path)
    else:
        with pytest.raises(getattr(errors, outcome)):
            do(pair, tmp_path)
        assert torch.equal(rows_of(pair.ours), pair.before)
