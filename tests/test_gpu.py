"""On a GPU, against the path of the CPU. What needs no GPU runs as well with
the host in its place."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

import persia
from persia.data.batches.batch import Batch
from persia.data.batches.jagged import JaggedBatch
from persia.store.grouped import pooled
from tests import test_device as host
from tests.places import Place, gpus, place

__all__ = ["place"]

CPU = torch.device("cpu")
STEPS = 5


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A list that grows with each batch that is pooled on the device."""
    calls = []

    def spy(*args: Any) -> Tensor:
        calls.append(args)
        return pooled(*args)

    monkeypatch.setattr("persia.nn.on_device.pooled", spy)
    return calls


def ids_of(distinct: int, weighted: bool = False) -> Iterator[JaggedBatch]:
    """Of 200 samples with up to three ids a feature."""
    g = torch.Generator().manual_seed(distinct)
    for _ in range(STEPS):
        lengths = torch.randint(0, 4, (400,), generator=g)
        n = int(lengths.sum())
        yield JaggedBatch(
            host.KEYS,
            torch.randint(0, distinct, (n,), generator=g),
            lengths=lengths,
            weights=torch.rand(n, generator=g) if weighted else None,
        )


def train(
    bags: Any, batches: list[JaggedBatch], ahead: bool, device: torch.device
) -> list[Tensor]:
    """The outputs of a step for each batch. Gradients are not rounded: they
    are small whole numbers."""
    outputs = []
    loader = persia.DataLoader(
        [Batch(None, ids) for ids in batches],
        bags,
        staleness=0,
        prefetch=ahead,
    )
    for batch in loader:
        out = bags(batch.to(device).ids).values()
        assert out.device == device
        outputs.append(out.detach().cpu())
        grad = torch.arange(out.numel(), device=device) % 5 - 2
        out.backward(grad.view_as(out).to(out.dtype))
    bags.store.flush()
    return outputs


def check(place: Place, got: list[Tensor], want: list[Tensor]) -> None:
    """Outputs of the same rows have the same bits, on a GPU as well."""
    assert torch.equal(got[0], want[0])
    for a, b in zip(got, want, strict=True):
        place.compare(a, b)


def rows_of(bags: Any) -> Tensor:
    ids = torch.arange(4000)
    tables = (bags.store.rows(name, ids) for name in bags.store.tables)
    return torch.cat(list(tables), 1)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("distinct", [6, 4000])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16]
)
def test_a_device_has_the_rows_of_the_cpu(
    place: Place,
    dtype: torch.dtype,
    distinct: int,
    ahead: bool,
    pools: list[Any],
) -> None:
    batches = list(ids_of(distinct))
    here = host.make_bags(None, output_dtype=dtype)
    want = train(here, batches, False, CPU)
    there = place.put(host.make_bags(None, output_dtype=dtype))
    got = train(there, batches, ahead, place.device)
    check(place, got, want)
    place.compare(rows_of(there), rows_of(here))
    assert len(pools) == (STEPS if distinct == 6 else 0)
    assert there.store.stats()["cuda_ids_copied"] == 0


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("pooling", ["sum", "mean", "sqrtn"])
def test_a_device_pools_as_the_cpu_does(
    place: Place, pooling: str, weighted: bool, pools: list[Any]
) -> None:
    def make() -> persia.EmbeddingBagCollection:
        return persia.EmbeddingBagCollection(
            store=persia.Store(optimizer=persia.optim.SGD(lr=1.0), seed=5),
            is_weighted=weighted,
            tables=[
                persia.EmbeddingBagConfig("one", 7, host.KEYS, pooling=pooling)
            ],
        )

    batches = list(ids_of(6, weighted))
    here, there = make(), place.put(make())
    want = train(here, batches, False, CPU)
    got = train(there, batches, True, place.device)
    check(place, got, want)
    place.compare(rows_of(there), rows_of(here))
    assert len(pools) == STEPS


@pytest.mark.parametrize("distinct", [6, 4000])
def test_a_grad_scaler_and_fp16(place: Place, distinct: int) -> None:
    """A loss that is infinite changes no row."""
    kind = place.device.type
    bags = place.put(host.make_bags(None, "step", output_dtype=torch.float16))
    twin = host.make_bags(None, "step", output_dtype=torch.float16)
    scaler = torch.amp.GradScaler(kind, init_scale=1024.0)
    for i, ids in enumerate(ids_of(distinct)):
        with torch.autocast(kind, torch.float16):
            loss = bags(ids.to(place.device)).values().float().sum()
        before = rows_of(bags)
        factor = float("inf") if i == 2 else 1.0
        scaler.scale(loss * factor).backward()
        scaler.step(bags.store.optimizer)
        scaler.update()
        bags.store.flush()
        assert torch.equal(before, rows_of(bags)) is (i == 2)
        if i != 2:
            twin(ids).values().float().sum().backward()
            twin.store.optimizer.step()
    assert scaler.get_scale() == 512
    twin.store.flush()
    place.compare(rows_of(bags), rows_of(twin))


@pytest.mark.slow
@pytest.mark.parametrize("distinct", [6, 4000])
def test_compiled_code_has_the_rows_of_the_cpu(
    place: Place, distinct: int
) -> None:
    class Squares(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bags = host.make_bags(None)

        def forward(self, ids: JaggedBatch) -> Tensor:
            return self.bags(ids).values().square().sum(1)

    here, there = Squares(), place.put(Squares())
    torch._dynamo.reset()
    run: Any = torch.compile(there, backend="aot_eager")
    batches = [Batch(None, ids) for ids in ids_of(distinct)]
    for model, call, device in (
        (here, here, CPU),
        (there, run, place.device),
    ):
        loader = persia.DataLoader(batches, model, staleness=0, prefetch=True)
        for batch in loader:
            call(batch.to(device).ids).sum().backward()
        model.bags.store.flush()
    torch._dynamo.reset()
    torch.testing.assert_close(rows_of(there.bags), rows_of(here.bags))


@contextlib.contextmanager
def no_waiting() -> Iterator[None]:
    """What waits for the device raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@gpus(1)
@pytest.mark.parametrize("distinct", [6, 4000])
def test_no_forward_or_backward_waits_for_the_device(distinct: int) -> None:
    bags = host.make_bags(None).to("cuda")
    batches = [Batch(None, ids) for ids in ids_of(distinct)]
    for batch in persia.DataLoader(batches, bags, staleness=2, prefetch=True):
        with no_waiting():
            bags(batch.to("cuda").ids).values().sum().backward()


@gpus(1)
def test_kernels_pool_and_sum_as_the_host_does() -> None:
    from persia.store.device import link_of

    link = link_of(torch.device("cuda"))
    assert link is not None
    rows, ids = torch.randn(30, 8), torch.randint(0, 30, (200,))
    args = (
        ids.int(),
        torch.arange(0, 201, 4, dtype=torch.int32),
        torch.rand(200),
        torch.tensor([[1, 8, 0]], dtype=torch.int32),
    )
    op = torch.ops.persia.pool_v1
    here = op(rows, *args, 50, 8, 0, 0)
    moved = [x.cuda() for x in args]
    there = op(rows.cuda(), *moved, 50, 8, 1, link.stream())
    assert torch.equal(there.cpu(), here)


@gpus(1)
def test_a_graph_is_captured_while_gradients_are_fetched() -> None:
    from persia.store.device import Flight, link_of

    link = link_of(torch.device("cuda"))
    assert link is not None
    grad, x = torch.ones(12345, device="cuda"), torch.zeros(8, device="cuda")
    torch.cuda.synchronize()

    def fetch() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(2):  # pins a buffer, then uses it again
                flight = Flight(link)
                flight.start(grad)
                flight.give_up()

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), ThreadPoolExecutor(1) as pool:
        pool.submit(fetch).result()
        x += 1
    graph.replay()
    assert x.tolist() == [1] * 8


ON_THE_SECOND = """
import torch

import persia
from persia.data.batches.batch import Batch
from tests import test_device as host

bags = host.make_bags(None).to("cuda:1")
batches = [Batch(None, host.some_batch(i)) for i in range(6)]
for batch in persia.DataLoader(batches, bags, staleness=2, prefetch=True):
    bags(batch.ids).values().sum().backward()
bags.store.flush()
print(*(torch._C._cuda_hasPrimaryContext(i) for i in range(2)))
"""


@gpus(2)
def test_no_thread_starts_another_device() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ON_THE_SECOND],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["False", "True"]


class Dense(torch.nn.Module):
    """What is captured: of dense features and pooled values."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.layer = torch.nn.Linear(3 + 13, 1)

    def forward(self, dense: Tensor, pooled: Tensor) -> Tensor:
        return self.layer(torch.cat([dense, pooled], 1)).squeeze(1)


@gpus(1)
@pytest.mark.parametrize("distinct", [6, 4000])
def test_cuda_graphs_of_the_dense_part(distinct: int) -> None:
    """The recipe of docs/howto/gpu.md against the same without a graph."""
    g = torch.Generator().manual_seed(1)
    batches = [
        Batch(torch.randn(200, 3, generator=g), ids)
        for _ in range(4)
        for ids in ids_of(distinct)
    ]
    found = []
    for graphed in (False, True):
        bags, dense = host.make_bags(None).to("cuda"), Dense().to("cuda")
        forward: Any = dense
        if graphed:
            bags.store.flush()
            pooled = torch.zeros(200, 13, device="cuda", requires_grad=True)
            sample = torch.zeros(200, 3, device="cuda"), pooled
            forward = torch.cuda.make_graphed_callables(dense, sample)
        optimizer = torch.optim.SGD(dense.parameters(), 0.01)
        for batch in persia.DataLoader(batches, bags, 0, prefetch=True):
            batch = batch.to("cuda")
            pooled = bags(batch.ids).values()
            pooled.register_hook(torch.clone)
            optimizer.zero_grad()
            forward(batch.dense, pooled).square().mean().backward()
            optimizer.step()
        bags.store.flush()
        found.append((rows_of(bags), dense.layer.weight.detach().cpu()))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)
