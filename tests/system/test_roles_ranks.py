"""Four roles with several ranks in step (staleness 0): the same bits wherever
the work is done.

The oracles: ranks that have the batches and the tables' servers, or the tables
themselves; and one process that makes one update of the batches of all ranks.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import persia
from persia import _core
from tests.remote import Servers
from tests.roles import Workers
from tests.system import roles_ranks
from tests.system.processes import ranks, wait_until
from tests.system.test_ranks import close, same
from tests.test_roles import in_thread

if not _core.GRPC[0].isdigit():
    pytest.skip("built without gRPC", allow_module_level=True)

GRID = [(shards, workers) for shards in (1, 2, 3) for workers in (1, 2)]


def launch(folder: Path, world: int, *scenarios: str) -> dict[str, list[Any]]:
    """The results of each scenario, by rank."""
    words = (roles_ranks.__file__, str(folder), *scenarios)
    status, text = ranks(world, *words, timeout=240)
    assert status == 0, text
    return {
        name: [torch.load(folder / f"{name}.{r}.pt") for r in range(world)]
        for name in (s.partition("=")[0] for s in scenarios)
    }


def feed(workers: Workers, kind: str) -> None:
    """All epochs of a loader in this process."""
    roles_ranks.feed(kind, ",".join(workers.addresses))


@contextlib.contextmanager
def four_roles(kind: str, shards: int, count: int) -> Iterator[str]:
    """Servers, workers and a loader for a scenario; its text."""
    with contextlib.ExitStack() as stack:
        servers = stack.enter_context(contextlib.closing(Servers(shards)))
        workers = stack.enter_context(
            contextlib.closing(Workers(servers.addresses, count))
        )
        join = in_thread(lambda: feed(workers, kind))
        yield f"{kind}|{servers.text}|{','.join(workers.addresses)}"
        join()
        sent = sum(map(len, roles_ranks.epochs(kind)))
        skipped = 4 if kind == "clipped" else 0
        assert workers.stats("trained") == sent - skipped
        assert workers.stats("skipped") == skipped
        assert workers.stats("bytes") == workers.stats("given_up") == 0


def run(
    folder: Path, world: int, kinds: dict[str, list[tuple[int, int]]]
) -> dict[str, list[Any]]:
    """By "KIND-SHARDS-WORKERS", "KIND-direct" and "KIND-ranks"."""
    with contextlib.ExitStack() as stack:
        scenarios = []
        for kind, grid in kinds.items():
            direct = stack.enter_context(contextlib.closing(Servers(2)))
            scenarios.append(f"{kind}-direct={kind}|{direct.text}|")
            if kind in ("pooled", "rows") and world > 1:
                scenarios.append(f"{kind}-ranks={kind}|ranks|")
            for shards, count in grid:
                text = stack.enter_context(four_roles(kind, shards, count))
                scenarios.append(f"{kind}-{shards}-{count}={text}")
        return launch(folder, world, *scenarios)


def one_process(kind: str, world: int) -> dict[str, Any]:
    """Each step is the mean of the gradients of so many batches."""
    store = persia.Store(persia.optim.Adam(lr=0.05), update="step")
    model = roles_ranks.MODELS[kind](store)
    dense = torch.optim.SGD(model.parameters(), 0.1)
    for epoch in roles_ranks.epochs(kind):
        for first in range(0, len(epoch), world):
            dense.zero_grad()
            for batch in epoch[first : first + world]:
                logits = model(batch.dense, batch.ids)
                loss = torch.nn.functional.binary_cross_entropy_with_logits(
                    logits, batch.label
                )
                (loss / world).backward()
            dense.step()
            store.optimizer.step()
    return roles_ranks.everything(store, model)


def check(results: dict[str, list[Any]], kind: str, world: int) -> None:
    """The bits of direct mode on every rank, which are those of one process
    within rounding."""
    want = results[f"{kind}-direct"]
    expected = one_process(kind, world) if kind != "odd" else {}
    for name, got in results.items():
        if not name.startswith(f"{kind}-"):
            continue
        for mine, theirs in zip(got, want, strict=True):
            assert len(mine["losses"]) == len(theirs["losses"]) > 0
            assert same(mine, theirs), name
    for key, value in expected.items():
        assert close(want[0][key], value), key


@pytest.mark.timeout(300)
@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.long)])
def test_the_same_bits_over_several_ranks(tmp_path: Path, world: int) -> None:
    """Direct, on the ranks, and four roles with 1 to 3 servers and 1 or 2
    workers; features that travel as rows; batches that ranks do not
    divide."""
    kinds = {"pooled": GRID, "rows": [(2, 2)], "odd": [(2, 2)]}
    results = run(tmp_path, world, kinds)
    for kind in kinds:
        check(results, kind, world)


@pytest.mark.timeout(300)
def test_clipping_scaling_and_accumulation(tmp_path: Path) -> None:
    """Under DDP, against ranks that have the batches themselves; and counts
    of what hybrid updates of two batches apply."""
    kinds = {"clipped": [(2, 1), (2, 2)], "counted": [(1, 1), (2, 2)]}
    results = run(tmp_path, 2, kinds)
    for shards, count in kinds["clipped"]:
        want = results["clipped-direct"]
        got = results[f"clipped-{shards}-{count}"]
        for mine, theirs in zip(got, want, strict=True):
            assert sum(map(math.isfinite, mine["losses"])) == 10
            assert mine.pop("losses") == pytest.approx(
                theirs["losses"], rel=1e-4, nan_ok=True
            )
            for key, value in mine.items():
                assert close(value, theirs[key]), key
    ids = torch.cat(
        [b.ids.values() for e in roles_ranks.epochs("") for b in e]
    )
    want = torch.bincount(ids + 20, minlength=40).float()
    for shards, count in kinds["counted"]:
        got = results[f"counted-{shards}-{count}"]
        assert sum(one["seen"] for one in got) == 2 * roles_ranks.BATCHES
        for one in got:
            assert torch.equal(one["rows"], want[:, None].expand(-1, 2))
            assert one["seen"] > 0
            assert one["stalest"] <= 4


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_worker_is_replaced_within_a_step(tmp_path: Path) -> None:
    """Its batches go on in their places: the bits do not change."""
    with contextlib.ExitStack() as stack:
        direct = stack.enter_context(contextlib.closing(Servers(2)))
        servers = stack.enter_context(contextlib.closing(Servers(2)))
        workers = stack.enter_context(
            contextlib.closing(Workers(servers.addresses, 2))
        )

        def after(trained: int) -> None:
            wait_until(lambda: workers.stats("trained") >= trained, 120)
            workers.restart(1)  # and its counters begin again

        def replace() -> None:
            for trained in 20, 80:
                after(trained)

        joins = [in_thread(lambda: feed(workers, "many")), in_thread(replace)]
        to = f"{servers.text}|{','.join(workers.addresses)}"
        results = launch(
            tmp_path,
            2,
            f"many-direct=many|{direct.text}|",
            f"many-2-2=many|{to}",
        )
        for join in joins:
            join()
    check(results, "many", 2)
