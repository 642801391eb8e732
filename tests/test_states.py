"""Ways of torch to keep a model that has no rows: all say so."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import persia
from persia import errors
from persia.store import waiting
from tests.remote import Servers

IDS = torch.arange(5)


def make(
    pooling: str = "sum", optimizer: Any = None, **store: Any
) -> torch.nn.Sequential:
    store["optimizer"] = optimizer or persia.optim.Adagrad(lr=0.1)
    return torch.nn.Sequential(
        persia.EmbeddingBagCollection(
            store=persia.Store(**store),
            tables=[persia.EmbeddingBagConfig("t", 4, ["f"], pooling=pooling)],
        )
    )


def train(model: torch.nn.Module, times: int = 1) -> None:
    for _ in range(times):
        model({"f": IDS}).values().sum().backward()


def quietly(model: torch.nn.Module) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model.state_dict()


# ---- what has no rows


def test_torch_save_of_a_model_names_store_save() -> None:
    model = make()
    pickle.dumps(model)  # nothing to lose yet
    train(model)
    with pytest.warns(UserWarning, match=r"no rows.*store\.save") as seen:
        torch.save(model, io.BytesIO())
    assert seen[0].filename == __file__
    with pytest.warns(UserWarning, match=r"no rows.*store\.save"):
        pickle.dumps(model)


@pytest.mark.filterwarnings("error")
def test_a_state_whose_rows_are_not_saved_names_store_save(
    tmp_path: Path,
) -> None:
    model = make()
    store = model[0].store
    model.state_dict()
    train(model)
    with pytest.warns(UserWarning, match=r"'t'.*store\.save") as seen:
        model.state_dict()
    assert seen[0].filename == __file__
    store.save(tmp_path, model=model)
    model.state_dict()
    again = make()
    again[0].store.load(tmp_path, model=again)
    again.state_dict()
    train(model)
    with pytest.warns(UserWarning, match=r"'t'.*store\.save"):
        model.state_dict()


def test_the_best_weights_need_their_rows(tmp_path: Path) -> None:
    model = make()
    store = model[0].store
    train(model, 3)
    store.save(tmp_path, model=model)
    best = copy.deepcopy(model.state_dict())
    rows = store.rows("t", IDS)
    model.load_state_dict(best)
    train(model, 2)
    with pytest.raises(
        errors.RowsMissing, match=r"3 updates.* 5.*store\.load"
    ):
        model.load_state_dict(best)
    store.load(tmp_path, model=model)
    model.load_state_dict(best)
    assert torch.equal(store.rows("t", IDS), rows)


def test_rows_of_another_training_are_not_those_of_the_state(
    tmp_path: Path,
) -> None:
    model, other = make(), make(seed=1)
    train(model)
    train(other)
    model[0].store.save(tmp_path)
    state = model.state_dict()
    train(model)
    with pytest.raises(errors.RowsMissing, match=r"store\.load"):
        other.load_state_dict(state)
    with pytest.raises(errors.RowsMissing, match=r"1 rows|5 rows.*empty"):
        make().load_state_dict(state)
    resumed = make()
    resumed[0].store.load(tmp_path)
    resumed.load_state_dict(state)
    fresh = make()
    empty = quietly(fresh)
    make().load_state_dict(empty)
    train(fresh)
    with pytest.raises(errors.RowsMissing, match=r"store\.load"):
        model.load_state_dict(empty)


def assign(store: persia.Store) -> None:
    store.set_rows("t", IDS, torch.zeros(5, 4))


def erase(store: persia.Store) -> None:
    store.erase("t", IDS[:2])


def drop(store: persia.Store) -> None:
    store.drop("t")
    again = persia.EmbeddingBagCollection(
        store=store, tables=[persia.EmbeddingBagConfig("t", 4, ["f"])]
    )
    train(torch.nn.Sequential(again), 3)


@pytest.mark.parametrize("change", [assign, erase, drop])
def test_rows_that_were_changed_since_are_not_those_of_the_state(
    change: Callable[[persia.Store], None],
) -> None:
    model = make()
    train(model, 3)
    state = quietly(model)
    change(model[0].store)
    with pytest.raises(errors.RowsMissing):
        model.load_state_dict(state)


@pytest.mark.parametrize("remote", [False, True])
def test_two_trainings_from_one_checkpoint_are_told_apart(
    tmp_path: Path, remote: bool
) -> None:
    with contextlib.ExitStack() as stack:
        where = {}
        if remote:
            servers = Servers(2, checkpoints=str(tmp_path))
            stack.enter_context(contextlib.closing(servers))
            where["servers"] = servers.text
        model = make(**where)
        store = stack.enter_context(contextlib.closing(model[0].store))
        train(model, 3)
        store.save(tmp_path / "root", model=model)
        begin = quietly(model)
        train(model, 2)
        first = quietly(model)
        store.load(tmp_path / "root", model=model)
        model.load_state_dict(begin)
        (model({"f": IDS}).values().sum() * 7).backward()
        train(model)
        with pytest.raises(errors.RowsMissing):
            model.load_state_dict(first)
        with pytest.raises(errors.RowsMissing):
            model.load_state_dict(begin)
        model.load_state_dict(quietly(model))


def test_rows_on_servers_are_known_by_the_servers(tmp_path: Path) -> None:
    root = tmp_path / "here"
    with contextlib.closing(Servers(2, checkpoints=str(tmp_path))) as servers:
        model = make(servers=servers.text)
        store = model[0].store
        train(model, 2)
        store.save(root, model=model)
        state = model.state_dict()
        store.close()
        again = make(servers=servers.text)
        store = again[0].store
        again.load_state_dict(state)
        train(again)
        with pytest.raises(errors.RowsMissing, match="2 updates"):
            again.load_state_dict(state)
        store.load(root, model=again)
        again.load_state_dict(state)
        again.load_state_dict(again.state_dict())
        store.close()


def test_states_pass_through_safetensors(tmp_path: Path) -> None:
    model = make()
    train(model)
    model[0].store.save(tmp_path)
    file = str(tmp_path / "model.safetensors")
    safetensors.torch.save_file(model.state_dict(), file)
    model.load_state_dict(safetensors.torch.load_file(file))


def test_states_of_earlier_versions_load() -> None:
    model = make()
    train(model)
    old = {"tables": {"t": {"embedding_dim": 4, "rows": 5}}, "checkpoint": ""}
    model.load_state_dict({"0._extra_state": old})
    with pytest.raises(errors.RowsMissing, match="5 rows"):
        make().load_state_dict({"0._extra_state": old})


# ---- what is frozen


@pytest.mark.parametrize("whole", [True, False])
def test_requires_grad_freezes_tables(whole: bool) -> None:
    model = torch.nn.Sequential(make())
    bags = model[0][0]
    train(model)
    (model if whole else bags).requires_grad_(False)
    out = model({"f": IDS}).values()
    assert not out.requires_grad
    w = torch.ones(4, requires_grad=True)
    (out * w).sum().backward()
    assert bags.store.updates == 1
    with pytest.warns(UserWarning, match="no rows"):
        again = pickle.loads(pickle.dumps(bags.requires_grad_(False)))
    assert not again({"f": IDS}).values().requires_grad
    model.requires_grad_()
    train(model)
    assert bags.store.updates == 2


# ---- what waits, and what does not


def test_update_step_without_a_step_warns_and_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = make(update="step")
    store = model[0].store
    train(model, waiting.BACKWARDS - 1)
    store.optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, waiting.BACKWARDS - 1)
    with pytest.warns(UserWarning, match=r"store\.optimizer\.step\(\)"):
        train(model)
    monkeypatch.setattr(waiting, "_BYTES_MAX", 300 << 10)
    with pytest.raises(errors.LimitReached, match=r"optimizer\.step\(\)"):
        train(model, 1000)
    assert store.stats()["held"] == 0
    train(model)
    store.optimizer.step()
    assert store.updates == 2


def test_accumulation_in_backward_mode_warns() -> None:
    model = make()
    dense = torch.nn.Linear(4, 1)
    adam = torch.optim.Adam(dense.parameters())

    def steps(n: int, backwards: int) -> None:
        for _ in range(n):
            for _ in range(backwards):
                dense(model({"f": IDS}).values()).sum().backward()
            adam.step()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        steps(10, 1)
        steps(2, 4)
        steps(1, 1)
    with pytest.warns(UserWarning, match='update="step"') as seen:
        steps(3, 4)
    assert seen[0].filename == __file__
    step = make(update="step")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(10):
            train(step, 2)
            adam.step()


# ---- what a load changes


def test_a_checkpoint_pooled_otherwise_says_so(tmp_path: Path) -> None:
    model = make()
    train(model)
    model[0].store.save(tmp_path)
    with pytest.warns(UserWarning, match="'mean' .*'sum'"):
        make("mean")[0].store.load(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make()[0].store.load(tmp_path)


def test_a_checkpoint_of_other_constants_says_so(tmp_path: Path) -> None:
    model = make(optimizer=persia.optim.Adagrad(lr=0.1, eps=1e-3))
    train(model)
    model[0].store.save(tmp_path)
    other = make(optimizer=persia.optim.Adagrad(lr=0.2, eps=1e-10))
    store = other[0].store
    with pytest.warns(UserWarning, match=r"eps \(1e-10 here, 0.001") as seen:
        store.load(tmp_path)
    assert [w.filename for w in seen] == [__file__]
    assert "lr" not in str(seen[0].message)
    assert store.optimizer.param_groups[0]["eps"] == 1e-3
