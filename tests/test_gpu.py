"""On a GPU, against the path of the CPU. Skipped where there is none."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import persia
from persia.data.jagged import Batch
from tests import test_device as host

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device"
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_has_the_rows_of_the_cpu(dtype: torch.dtype) -> None:
    there = host.make_bags(None, output_dtype=dtype).to("cuda")
    here = host.make_bags(None, output_dtype=dtype)
    for module in (there, here):
        batches = [Batch(None, host.some_batch(i)) for i in range(6)]
        for batch in persia.DataLoader(
            batches, module, staleness=0, prefetch=True
        ):
            # Products are rounded alike on both.
            module(batch.ids).values().float().square().sum().backward()
        module.store.flush()
    host.same(host.rows_of(there), host.rows_of(here))
    assert there.store.stats()["cuda_ids_copied"] == 0


def test_no_forward_or_backward_waits_for_the_device() -> None:
    bags = host.make_bags(None).to("cuda")
    batches = [Batch(None, host.some_batch(i)) for i in range(6)]
    for batch in persia.DataLoader(batches, bags, staleness=2, prefetch=True):
        torch.cuda.set_sync_debug_mode("error")
        try:
            bags(batch.to("cuda").ids).values().sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


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
from persia.data.jagged import Batch
from tests import test_device as host

bags = host.make_bags(None).to("cuda:1")
batches = [Batch(None, host.some_batch(i)) for i in range(6)]
for batch in persia.DataLoader(batches, bags, staleness=2, prefetch=True):
    bags(batch.ids).values().sum().backward()
bags.store.flush()
print(*(torch._C._cuda_hasPrimaryContext(i) for i in range(2)))
"""


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_no_thread_starts_another_device() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ON_THE_SECOND],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["False", "True"]
