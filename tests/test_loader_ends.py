"""A pass over a DataLoader ends with its loop, not with a collection."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

import persia
from persia import JaggedBatch, errors
from persia.distributed import ranks
from persia.loop import loader


@pytest.fixture(autouse=True)
def no_collection() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # with look-ahead
    gc.collect()
    gc.disable()
    yield
    gc.enable()
    torch.set_num_threads(threads)


def bags(update: str = "backward") -> persia.EmbeddingBagCollection:
    return persia.EmbeddingBagCollection(
        store=persia.Store(persia.optim.SGD(lr=0.1), update=update),
        tables=[
            persia.EmbeddingBagConfig(
                "t", embedding_dim=4, feature_names=["f"]
            )
        ],
    )


@pytest.fixture
def open_passes(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Those that would be closed at the exit of the process."""
    found: list[object] = []
    at_exit = SimpleNamespace(register=found.append, unregister=found.remove)
    monkeypatch.setattr(loader, "atexit", at_exit)
    return found


def source(n: int) -> list[JaggedBatch]:
    return [JaggedBatch(["f"], torch.tensor([i])) for i in range(n)]


@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("stop", [0, 2, 3])
def test_break(staleness: int, stop: int, open_passes: list[object]) -> None:
    model = bags()
    for i, ids in enumerate(persia.DataLoader(source(4), model, staleness)):
        model(ids).values().sum().backward()
        if i == stop:
            break
    assert not open_passes


def test_break_before_an_error_of_the_source(
    open_passes: list[object],
) -> None:
    model = bags()

    def read() -> Iterator[JaggedBatch]:
        yield from source(2)
        raise ValueError("line 3 has no ids")

    found = []
    for ids in persia.DataLoader(read(), model, 2):
        model(ids).values().sum().backward()
        found.append(int(ids.values()[0]))
        if found == [0, 1]:
            break
    assert not open_passes
    with pytest.raises(ValueError, match="line 3") as raised:
        list(persia.DataLoader(read(), model, 2))
    assert raised.traceback[-1].name == "read"


@pytest.mark.parametrize("update", ["backward", "step"])
@pytest.mark.parametrize("together", [False, True])
def test_ranks_that_ddp_keeps_together_need_not_meet(
    update: str, together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only optimizer steps exchange anything, and DDP's ranks are in step."""
    asked = []
    monkeypatch.setattr(
        ranks.Passes, "begin", lambda _, meets: asked.append(meets)
    )
    monkeypatch.setattr(ranks.Passes, "end", lambda _: None)
    model = bags(update)
    trained: torch.nn.Module = model
    if together:
        monkeypatch.setattr(
            torch.nn.parallel, "DistributedDataParallel", torch.nn.Sequential
        )
        trained = torch.nn.Sequential(model)
    for ids in persia.DataLoader(source(2), trained, 1):
        model(ids).values().sum().backward()
        model.store.optimizer.step()
    assert asked == [update == "step" and not together]


@pytest.mark.parametrize("first", [1, 4])
def test_a_generator_is_read_once(first: int) -> None:
    model = bags()
    batches = persia.DataLoader((ids for ids in source(4)), model)
    for _, ids in zip(range(first), batches, strict=False):
        model(ids).values().sum().backward()
    with pytest.raises(errors.InvalidArgument):
        iter(batches)
