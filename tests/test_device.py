"""Values on a device. The host stands for one where there is no GPU: the same
code runs, but a stream is a thread and its memory is ordinary."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import persia
from persia.data.batches.batch import Batch
from persia.data.batches.jagged import JaggedBatch
from persia.nn.lookups import Collection as _Collection
from persia.store.configs import pooling_of
from persia.store.device import Link
from persia.store.grouped import Columns, Grouped, pooled
from persia.train import model

KEYS = ["a", "b"]
META = torch.device("meta")


def host_link() -> Link:
    return Link("host", torch.device("cpu"))


def make_bags(
    link: Link | None, update: str = "backward", **options: object
) -> persia.EmbeddingBagCollection:
    store = persia.Store(
        optimizer=persia.optim.Adagrad(lr=0.1), update=update, seed=3
    )
    bags = persia.EmbeddingBagCollection(
        store=store,
        tables=[
            persia.EmbeddingBagConfig("one", 8, feature_names=["a"]),
            persia.EmbeddingBagConfig(
                "two", 5, feature_names=["b"], pooling="mean"
            ),
        ],
        **options,  # type: ignore[arg-type]
    )
    bags._link = link
    return bags


def some_batch(seed: int, samples: int = 50) -> JaggedBatch:
    rng = np.random.default_rng(seed)
    lengths = torch.from_numpy(rng.integers(0, 4, len(KEYS) * samples))
    values = torch.from_numpy(rng.integers(0, 40, int(lengths.sum())))
    return JaggedBatch(KEYS, values, lengths=lengths)


def train(
    bags: _Collection, ahead: bool, steps: int = 6, scale: float = 1
) -> list[Tensor]:
    """The outputs of some steps."""
    outputs = []
    batches = [Batch(None, some_batch(i)) for i in range(steps)]
    loader = persia.DataLoader(batches, bags, staleness=0, prefetch=ahead)
    for batch in loader:
        out = bags(batch.ids).values()
        outputs.append(out.detach().clone())
        (out.float().sin().sum() * scale).backward()
        if bags.store.update == "step":
            bags.store.optimizer.step()
    bags.store.flush()
    return outputs


def rows_of(bags: _Collection) -> list[Tensor]:
    ids = torch.arange(40)
    return [bags.store.rows(name, ids) for name in ("one", "two")]


def same(a: list[Tensor], b: list[Tensor]) -> None:
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("update", ["backward", "step"])
def test_a_device_has_the_bits_of_the_host(update: str, ahead: bool) -> None:
    there, here = make_bags(host_link(), update), make_bags(None, update)
    same(train(there, ahead), train(here, False))
    same(rows_of(there), rows_of(here))
    if ahead:
        assert there.store.stats()["lookahead"]["prefetched"] == 6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_values_travel_in_the_dtype_of_the_output(dtype: torch.dtype) -> None:
    there = make_bags(host_link(), output_dtype=dtype)
    here = make_bags(None, output_dtype=dtype)
    got = train(there, True)
    assert got[0].dtype == dtype
    same(got, train(here, False))
    same(rows_of(there), rows_of(here))


def test_an_output_dtype_that_does_not_travel() -> None:
    there = make_bags(host_link(), output_dtype=torch.float64)
    here = make_bags(None, output_dtype=torch.float64)
    same(train(there, True), train(here, False))


def test_sequences_travel_too() -> None:
    def collection(link: Link | None) -> persia.EmbeddingCollection:
        module = persia.EmbeddingCollection(
            store=persia.Store(optimizer=persia.optim.SGD(lr=1.0), seed=1),
            tables=[persia.EmbeddingConfig("one", 4, feature_names=["a"])],
        )
        module._link = link
        return module

    there, here = collection(host_link()), collection(None)
    for module in (there, here):
        for i in range(3):
            module(some_batch(i)).rows().square().sum().backward()
    batch = some_batch(9)
    with torch.no_grad():
        assert torch.equal(
            there(batch)["a"].values(), here(batch)["a"].values()
        )


def test_gradients_that_are_not_wanted_give_their_buffers_back() -> None:
    bags = make_bags(host_link(), "step")
    out = bags(some_batch(0)).values()
    out.sum().backward()
    with pytest.raises(RuntimeError):  # of torch, as for any graph
        out.sum().backward()
    bags.store.optimizer.zero_grad()
    same(rows_of(bags), rows_of(make_bags(None)))  # nothing was applied
    bags(some_batch(1)).values()  # a forward without a backward


def test_batches_ahead_that_are_dropped() -> None:
    bags = make_bags(host_link())
    batches = [Batch(None, some_batch(i)) for i in range(8)]
    for batch in persia.DataLoader(batches, bags, staleness=4, prefetch=True):
        bags(batch.ids).values().sum().backward()
        break
    with torch.no_grad():
        for batch in persia.DataLoader(batches, bags, prefetch=True):
            bags(batch.ids)
    assert bags.store.stats()["lookahead"]["prefetched"] >= 8


def test_a_grad_scaler_and_autocast() -> None:
    bags = make_bags(host_link(), "step")
    here = make_bags(None, "step")
    for module in (bags, here):
        dense = torch.nn.Linear(13, 1)
        torch.manual_seed(0)
        torch.nn.init.uniform_(dense.weight)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for i in range(4):
            with torch.autocast("cpu", torch.bfloat16):
                loss = dense(module(some_batch(i)).values()).mean()
            if i == 2:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.step(module.store.optimizer)
            scaler.update()
        assert scaler.get_scale() < 1024
    same(rows_of(bags), rows_of(here))


def test_threads_share_the_link_of_a_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from persia.store import device

    both = threading.Barrier(2)

    class Slow:
        def __init__(self, kind: str, of: torch.device) -> None:
            with contextlib.suppress(threading.BrokenBarrierError):
                both.wait(1.0)  # until another thread opens one, too

    monkeypatch.setattr(device, "Link", Slow)
    monkeypatch.setattr(device, "open_links", {})
    links = []
    threads = [
        threading.Thread(
            target=lambda: links.append(
                device.link_of(torch.device("cuda", 0))
            )
        )
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert links[0] is links[1] is device.link_of(torch.device("cuda", 0))


# ---- distinct rows that are pooled on the device


@pytest.mark.parametrize("pooling", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize("weighted", [False, True])
def test_distinct_rows_are_pooled_alike(pooling: str, weighted: bool) -> None:
    store = persia.Store(optimizer=persia.optim.SGD(lr=1.0), seed=5)
    bags = persia.EmbeddingBagCollection(
        store=store,
        is_weighted=weighted,
        tables=[
            persia.EmbeddingBagConfig(
                "one", 6, feature_names=KEYS, pooling=pooling
            )
        ],
    )
    batch = some_batch(4)
    if weighted:
        batch = JaggedBatch(
            KEYS,
            batch.values(),
            lengths=batch.lengths(),
            weights=torch.rand(len(batch.values())),
        )
    want = bags(batch).values()
    group = Grouped.of(
        batch.values(),
        batch.offsets(),
        batch.weights_or_none(),
        len(KEYS),
        bags._handle,
        bags._first_plan,
    )
    assert sorted(group.ids.tolist()) == batch.values().unique().tolist()
    assert group.starts.tolist() == [0, len(group.ids)]
    kind = bags.embedding_bag_configs()[0]
    features = torch.tensor(
        [[pooling_of(kind), 6, 0], [pooling_of(kind), 6, 6]], dtype=torch.int32
    )
    out = Columns(features, 12, 6)
    assert group.travels(out, 4) is True
    before = store.rows("one", group.ids)
    rows = before.clone().requires_grad_()
    link = host_link()
    got = pooled(rows, group, features, 12, link)
    assert torch.equal(got, want)

    # The push adds up the same bits: SGD with a rate of 1 shows them.
    grad = torch.rand_like(want)
    want.backward(grad)
    got.backward(grad)
    assert rows.grad is not None
    assert torch.equal(store.rows("one", group.ids), before - rows.grad)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("distinct", [4, 4000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_what_has_fewer_bytes_travels(
    dtype: torch.dtype,
    distinct: int,
    ahead: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pools = []

    def spy(*args: Any) -> Tensor:
        pools.append(args)
        return pooled(*args)

    monkeypatch.setattr("persia.nn.on_device.pooled", spy)
    rng = np.random.default_rng(5)
    batches = [
        JaggedBatch(
            KEYS,
            torch.from_numpy(rng.integers(0, distinct, 400)),
            lengths=torch.full((200,), 2),
        )
        for _ in range(5)
    ]
    outputs = []
    stores = []
    for link in (None, host_link()):
        bags = make_bags(link, output_dtype=dtype)
        loader = persia.DataLoader(
            [Batch(None, ids) for ids in batches],
            bags,
            staleness=0,
            prefetch=ahead,
        )
        got = []
        for batch in loader:
            out = bags(batch.ids).values()
            (out**2).sum().backward()
            got.append(out.detach().clone())
        with torch.no_grad():
            got.append(bags(batches[0]).values().clone())
        outputs.append(got)
        stores.append(bags.store)
    for want, found in zip(*outputs, strict=True):
        assert torch.equal(found, want)
    for table in ("one", "two"):
        ids = range(distinct)
        there, here = (store.rows(table, ids) for store in stores)
        assert torch.equal(there, here)
    assert len(pools) == (6 if distinct == 4 else 0)


# ---- ids stay on the host


def test_ids_stay_on_the_host() -> None:
    batch = some_batch(1)
    batch.ticket = torch.tensor([1, 0])
    there = batch.to("meta")
    assert there.device() == META
    assert there.values().device == META
    assert there.offsets().device == META
    assert there["a"][0].device == META
    assert there.ticket is batch.ticket
    assert there.to("meta") is there
    back = there.to("cpu")
    assert back.values() is batch.values()
    assert copy.deepcopy(there).device() == META
    assert batch.pin_memory() is batch

    bags = make_bags(None)
    with torch.no_grad():
        assert bags(there).values().device == META
    assert bags.store.stats()["cuda_ids_copied"] == 0


def test_distributed_data_parallel_leaves_ids_alone() -> None:
    from torch.distributed.utils import _to_kwargs

    batch = some_batch(2)
    args, _ = _to_kwargs((batch,), {}, META, False)
    assert args[0][0] is batch


def test_weights_that_require_grad_move() -> None:
    batch = JaggedBatch(
        ["a"],
        torch.arange(3),
        weights=torch.ones(3, requires_grad=True),
    )
    there = batch.to("meta")
    assert there.weights().device == META
    assert there.weights().requires_grad


def test_ids_that_were_changed_on_the_device_are_used() -> None:
    batch = some_batch(3)
    there = batch.to("meta")
    there.values().add_(1)  # what it holds is lost on this device
    assert make_bags(None)(there).values().is_meta


def test_exchanges_leave_a_group_without_cpu_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch.distributed as dist

    from persia.distributed import ranks
    from persia.train.run import backends_for

    dist.init_process_group(
        "gloo", store=dist.HashStore(), rank=0, world_size=1
    )
    try:
        assert ranks.side_group(dist) is None
        monkeypatch.setattr(ranks, "backends", lambda _: {"cuda": "nccl"})
        side = ranks.side_group(dist)
        assert side is not None
        assert side is not dist.group.WORLD
        assert ranks.side_group(dist) is side
        assert dist.get_backend(side) == "gloo"
        assert ranks.all_max([3, 1]) == [3, 1]
        assert ranks.swap_pieces([b"abc"]) == [b"abc"]
    finally:
        dist.destroy_process_group()
    assert backends_for("cpu") == "gloo"
    assert backends_for("cuda") == "cpu:gloo,cuda:nccl"


# ---- which device


def example() -> Any:
    """The example's module."""
    path = Path(__file__).parents[1] / "examples" / "criteo_dlrm.py"
    spec = importlib.util.spec_from_file_location("criteo_dlrm", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(params=["persia train", "example"])
def chosen(request: pytest.FixtureRequest) -> Callable[[str], torch.device]:
    """What makes a device of the word of ``--device``."""
    function: Callable[[str], torch.device] = (
        model.device_of if request.param != "example" else example().device_of
    )
    return function


@pytest.mark.parametrize("name", ["auto", "cpu"])
def test_a_machine_without_a_gpu(
    chosen: Callable[[str], torch.device],
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert chosen(name) == torch.device("cpu")


@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_each_rank_has_the_gpu_of_its_number(
    chosen: Callable[[str], torch.device],
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    current = []

    def use(device: torch.device | int) -> None:
        index = device if isinstance(device, int) else device.index
        current.append(index)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", use)
    monkeypatch.setenv("LOCAL_RANK", "1")
    device = chosen(name)
    assert current == [1]
    assert device.type == "cuda" and device.index in (None, 1)
    assert chosen("cpu") == torch.device("cpu")


def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(persia.errors.InvalidArgument):
        model.device_of("cuda")


def test_one_process_has_the_gpu_that_torch_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert model.device_of("auto") == torch.device("cuda")


def test_the_example_moves_batches() -> None:
    batch = Batch(torch.ones(50, 2), some_batch(1), torch.ones(50))
    there = example().moved(batch, META)
    assert there.dense.is_meta and there.label.is_meta
    assert there.ids.device() == META
    assert there.ids._values is batch.ids._values
