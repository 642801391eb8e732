"""Best weights: rows beside the states that loops and libraries keep."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import persia
from persia import errors
from persia.nn.lookups import stores_of
from tests.remote import Servers
from tests.test_copies import Net, Pair, same, store_of


def in_memory(model: nn.Module, folder: Path) -> Callable[[], Any]:
    state = copy.deepcopy(model.state_dict())
    return lambda: state


def by_file(model: nn.Module, folder: Path) -> Callable[[], Any]:
    file = folder / f"{id(model)}.pt"
    torch.save(model.state_dict(), file)
    return lambda: torch.load(file, weights_only=True)


def beside_others(model: nn.Module, folder: Path) -> Callable[[], Any]:
    file = folder / f"{id(model)}.pt"
    torch.save({"state": model.state_dict(), "epoch": 1}, file)
    return lambda: torch.load(file, weights_only=False)["state"]


def in_place(model: nn.Module, folder: Path) -> Callable[[], Any]:
    """How torch.distributed.checkpoint loads: into a state of now."""
    path = folder / f"{id(model)}.dcp"
    dcp.save({"model": model.state_dict()}, checkpoint_id=path)

    def load() -> Any:
        state = {"model": model.state_dict()}
        dcp.load(state, checkpoint_id=path)
        return state["model"]

    return load


SAVES = (in_memory, by_file, beside_others, in_place)


@pytest.mark.parametrize("update", ["backward", "step"])
@pytest.mark.parametrize("save", SAVES, ids=lambda s: s.__name__)
def test_best_weights_come_back_with_their_rows(
    save: Callable[[nn.Module, Path], Callable[[], Any]],
    update: str,
    tmp_path: Path,
) -> None:
    pair = Pair(update)
    persia.keep_rows(pair.ours, tmp_path / "rows")
    models = pair.ours, pair.theirs
    kept = []
    for _ in range(3):
        kept.append([save(model, tmp_path) for model in models])
        if save is not in_memory:  # one file
            kept = kept[-1:]
        pair.train()
    for states in kept:
        for model, state in zip(models, states, strict=True):
            model.load_state_dict(state())
        same(*models)
    pair.train()
    same(*models)


def test_a_state_written_in_place_is_loaded_or_refused() -> None:
    pair = Pair()
    state = quiet(pair.ours.state_dict)
    saved = {k: torch.as_tensor(v.clone().numpy()) for k, v in state.items()}
    for name, value in quiet(pair.ours.state_dict).items():
        value.copy_(saved[name])
    pair.train()
    before = store_of(pair.ours).rows("one", range(20))
    name, value = next(iter(quiet(pair.ours.state_dict).items()))
    with pytest.raises(errors.RowsMissing):
        value.copy_(saved[name])
    assert torch.equal(store_of(pair.ours).rows("one", range(20)), before)


def quiet(call: Callable[[], Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a state holds no rows
        return call()


def test_settings_of_the_optimizer_stay_as_they_are() -> None:
    pair = Pair()
    persia.keep_rows(pair.ours)
    state = pair.ours.state_dict()
    group = store_of(pair.ours).optimizer.param_groups[0]
    group["lr"] = 0.01
    pair.train()
    pair.ours.load_state_dict(state)
    assert group["lr"] == 0.01


def test_another_process_finds_the_rows_in_the_folder(tmp_path: Path) -> None:
    pair = Pair()
    persia.keep_rows(pair.ours, tmp_path)
    pair.train()
    buffer = io.BytesIO()
    torch.save(pair.ours.state_dict(), buffer)
    theirs = copy.deepcopy(pair.theirs)
    pair.train()
    store_of(pair.ours).close()
    other = Pair().ours
    buffer.seek(0)
    state = torch.load(buffer, weights_only=True)
    with pytest.raises(errors.RowsMissing):
        other.load_state_dict(state)
    persia.keep_rows(other, tmp_path)
    other.load_state_dict(state)
    same(other, theirs)


def test_rows_that_have_not_changed_are_saved_once(tmp_path: Path) -> None:
    pair = Pair()
    persia.keep_rows(pair.ours, tmp_path)
    for _ in range(3):
        pair.ours.state_dict()
    assert len(list(tmp_path.glob("step-*"))) == 1
    pair.train()
    pair.ours.state_dict()
    assert len(list(tmp_path.glob("step-*"))) == 2


def test_so_many_are_kept_and_no_more(tmp_path: Path) -> None:
    pair = Pair()
    persia.keep_rows(pair.ours, tmp_path, keep=2)
    states = []
    for _ in range(3):
        states.append(pair.ours.state_dict())
        pair.train()
    assert len(list(tmp_path.glob("step-*"))) == 2
    with pytest.raises(errors.RowsMissing):
        pair.ours.load_state_dict(states[0])
    pair.ours.load_state_dict(states[1])


def test_it_ends_with_its_block(tmp_path: Path) -> None:
    pair = Pair()
    with persia.keep_rows(pair.ours, tmp_path):
        pair.ours.state_dict()
    pair.train()
    with pytest.warns(UserWarning, match="keep_rows"):
        state = pair.ours.state_dict()
    assert len(list(tmp_path.glob("step-*"))) == 1
    pair.train()
    with pytest.raises(errors.RowsMissing):
        pair.ours.load_state_dict(state)


def test_a_model_of_several_stores(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.ModuleList([Pair().ours, Pair().ours])
    persia.keep_rows(model, tmp_path)
    rows = [s.rows("one", range(5)) for s in stores_of(model)]
    state = model.state_dict()
    ids = torch.arange(6).reshape(3, 2)
    sum(one(ids).sum() for one in model).backward()  # type: ignore[misc]
    model.load_state_dict(state)
    for store, before in zip(stores_of(model), rows, strict=True):
        assert torch.equal(store.rows("one", range(5)), before)


def test_a_model_without_tables_is_refused() -> None:
    with pytest.raises(errors.InvalidArgument):
        persia.keep_rows(nn.Linear(1, 1))


def test_several_ranks_need_a_path(tmp_path: Path) -> None:
    servers = Servers(1)
    store = persia.Store(servers=servers.text, rank=0, world_size=2)
    model = persia.convert(nn.Embedding(10, 4), store=store)
    with pytest.raises(errors.InvalidArgument, match="path"):
        persia.keep_rows(model)
    persia.keep_rows(model, tmp_path).close()
    store.close()
    servers.close()


def test_a_state_warns_once_a_model() -> None:
    model = nn.ModuleList([Pair().ours for _ in range(2)])
    with pytest.warns(UserWarning, match="keep_rows") as found:
        state = model.state_dict()
    assert len(found) == 1
    assert "'one'" in str(found[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model.load_state_dict(state)


def test_a_load_of_weights_warns_once_a_model() -> None:
    pair = Pair()
    pair.train(pair.ours)
    with pytest.warns(UserWarning, match="load_state_dict") as found:
        pair.ours.load_state_dict(pair.theirs.state_dict(), strict=False)
    assert len(found) == 1
    assert all(f"table {t!r}" in str(found[0].message) for t in ("one", "bag"))
    with pytest.warns(UserWarning, match="load_state_dict") as found:
        pair.ours.load_state_dict(pair.theirs.state_dict(), strict=False)
    assert len(found) == 1


@pytest.mark.parametrize("update", ["backward", "step"])
def test_a_state_of_another_live_model_brings_its_rows(update: str) -> None:
    """Target networks, and models set back to a first one."""
    pair, other = Pair(update), Pair(update)
    pair.train()
    ours, theirs = copy.deepcopy(pair.ours), copy.deepcopy(pair.theirs)
    pair.train()
    for target, model in (
        *((ours, pair.ours), (theirs, pair.theirs)),
        (other.ours, pair.ours),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            target.load_state_dict(model.state_dict())
    same(ours, theirs)
    same(other.ours, theirs)
    same(pair.ours, pair.theirs)
    assert isinstance(ours, Net)


def test_a_state_of_a_live_model_that_has_gone_on_is_refused() -> None:
    pair, other = Pair(), Pair()
    pair.train()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = pair.ours.state_dict()
    pair.train()
    with pytest.raises(errors.RowsMissing):
        other.ours.load_state_dict(state)
