"""Compiled modules change the same rows as eager ones."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import persia
from persia.store.engine import engine_of
from tests import test_device as device

BACKENDS = ["aot_eager", "inductor"]


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def _no_caches() -> Iterator[None]:
    import torch._functorch.config
    import torch._inductor.config

    inductor: Any = torch._inductor.config
    functorch: Any = torch._functorch.config
    with (
        inductor.patch(force_disable_caches=True),
        functorch.patch(enable_autograd_cache=False),
    ):
        yield


class Model(torch.nn.Module):
    def __init__(self, store: persia.Store, times: int) -> None:
        super().__init__()
        self.bags = persia.EmbeddingBagCollection(
            store=store,
            tables=[
                persia.EmbeddingBagConfig("user", 8, feature_names=["user"]),
                persia.EmbeddingBagConfig(
                    "item",
                    8,
                    feature_names=["item", "history"],
                    pooling="mean",
                ),
            ],
        )
        self.times = times
        self.linear = torch.nn.Linear(24, 1)
        torch.nn.init.constant_(self.linear.weight, 0.1)
        torch.nn.init.constant_(self.linear.bias, 0.1)

    def forward(self, *batches: persia.JaggedBatch) -> torch.Tensor:
        x = self.bags(batches[0]).values()
        for ids in batches[1 : self.times]:
            x = x + self.bags(ids)["user"].repeat(1, 3)
        return self.linear(x)[:, 0]  # type: ignore[no-any-return]


def batch(n: int, shift: int) -> persia.JaggedBatch:
    return persia.JaggedBatch.from_dict(
        {
            "user": torch.arange(n) + shift,
            "item": torch.arange(n) * 7,
            "history": (
                torch.arange(2 * n) + 10 * shift,
                torch.full((n,), 2),
            ),
        }
    )


def train(
    times: int,
    backend: str | None,
    *,
    update: str = "backward",
    **options: Any,
) -> tuple[Any, ...]:
    store = persia.Store(persia.optim.Adagrad(lr=0.1), update=update)
    model = Model(store, times)
    run: Any = model
    if backend is not None:
        run = torch.compile(model, backend=backend, fullgraph=True, **options)
    losses = []
    for i in range(4):
        batches = [batch(8 + i, 100 * i), batch(8 + i, 1000 + i)]
        loss = run(*batches).square().sum()
        loss.backward()
        if update == "step":
            store.optimizer.step()
        losses.append(loss.item())
        with torch.no_grad():
            losses.append(run(*batches).square().sum().item())
    tables = store.stats()["tables"]
    counts = {
        name: [t[k] for k in ("rows", "pushes", "pulled")]
        for name, t in tables.items()
    }
    ids = torch.arange(2000)
    return (
        losses,
        counts,
        store.updates,
        [store.rows(name, ids) for name in tables],
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("times", [1, pytest.param(2, marks=pytest.mark.long)])
@pytest.mark.usefixtures("_no_caches")
def test_same_rows_as_eager(times: int, backend: str) -> None:
    losses, counts, updates, rows = train(times, None)
    assert updates == 4
    got = train(times, backend)
    assert got[1] == counts
    assert got[2] == updates
    torch.testing.assert_close(got[0], losses)
    torch.testing.assert_close(got[3], rows)


def test_same_rows_with_update_step() -> None:
    want = train(2, None, update="step")
    got = train(2, "aot_eager", update="step")
    assert got[1:3] == want[1:3]
    torch.testing.assert_close(got[3], want[3])


WARM = """
import torch
from tests.test_compile import train
want, got = train(2, None), train(2, "inductor")
assert got[1:3] == want[1:3], (got[1:3], want[1:3])
torch.testing.assert_close(got[3], want[3])
hits = torch._dynamo.utils.counters["aot_autograd"]
print("equal", hits.get("autograd_cache_hit", 0))
"""


@pytest.mark.long
def test_same_rows_from_a_warm_cache(tmp_path: Path) -> None:
    """The second process takes the graph from inductor's cache on disk."""
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", WARM],
            capture_output=True,
            text=True,
            check=False,
            cwd=Path(__file__).parent.parent,
            env={
                "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
                "PATH": "/usr/bin:/bin",
                "PYTHONPATH": ".",
            },
        )
        assert done.stdout.startswith("equal"), done.stderr[-3000:]


def test_compiled_code_takes_what_was_looked_up_ahead() -> None:
    """Where values of eager forwards are sent to a device, too."""
    pulled, rows = [], []
    for link in (None, device.host_link()):
        bags = device.make_bags(link)
        run = torch.compile(bags, backend="aot_eager")
        run(device.some_batch(99)).values().sum().backward()
        before = pulled_of(bags)
        for batch in ahead_of(bags, 8):
            run(batch.ids).values().sin().sum().backward()
        bags.store.flush()
        assert bags.store.stats()["lookahead"]["prefetched"] == 8
        pulled.append(pulled_of(bags) - before)
        rows.append(device.rows_of(bags))
    assert pulled[0] == pulled[1] > 0
    device.same(*rows)


def test_an_equal_module_is_not_compiled_with_another() -> None:
    bags = device.make_bags(device.host_link())
    same = persia.EmbeddingBagCollection(bags.tables, store=bags.store)
    same._link = bags._link
    torch.compile(bags, backend="aot_eager")(device.some_batch(0))
    cpu = torch.device("cpu")
    assert bags._way(cpu) is None
    assert same._way(cpu) is not None
    bags._link = None  # it cannot be copied
    twin = copy.deepcopy(bags)
    twin._link = same._link
    assert twin._way(cpu) is not None


def ahead_of(bags: Any, n: int) -> Any:
    batches = [persia.Batch(None, device.some_batch(i)) for i in range(n)]
    return persia.DataLoader(batches, bags, staleness=0, prefetch=True)


def pulled_of(bags: Any) -> int:
    tables = bags.store.stats()["tables"]
    return sum(int(t["pulled"]) for t in tables.values())


def test_two_modules_do_not_share_a_plan() -> None:
    """The compiled code of one module is not used for another's tables."""
    store = persia.Store(persia.optim.SGD(lr=1.0))

    @torch.compile(backend="aot_eager", fullgraph=True)
    def run(bags: Any, ids: Any) -> torch.Tensor:
        return bags(ids).values()  # type: ignore[no-any-return]

    ids = persia.JaggedBatch(["g", "f"], torch.arange(4))
    for name in ("x", "y"):
        bags = persia.EmbeddingBagCollection(
            store=store,
            tables=[persia.EmbeddingBagConfig(name, 4, feature_names=["f"])],
        )
        want = store.rows(name, torch.tensor([2, 3]))
        assert torch.equal(run(bags, ids), want)
        run(bags, ids).sum().backward()
        assert store.stats()["tables"][name]["rows"] == 2


def test_compiled_errors_have_the_same_text() -> None:
    bags = persia.EmbeddingBagCollection(
        optimizer=persia.optim.SGD(lr=1.0),
        tables=[persia.EmbeddingBagConfig("t", 4, feature_names=["f"])],
    )
    ids = persia.JaggedBatch(
        ["f"], torch.arange(4), lengths=torch.tensor([1, 3])
    )
    assert ids._offsets is not None
    ids._offsets = torch.tensor([0, 1, 9])
    with pytest.raises(persia.errors.OffsetsError) as eager:
        bags(ids)
    run = torch.compile(bags, backend="aot_eager", fullgraph=True)
    with pytest.raises(RuntimeError) as compiled:
        run(ids)
    assert str(eager.value) in str(compiled.value)


def test_sequences_compile() -> None:
    store = persia.Store(persia.optim.SGD(lr=1.0))
    sequences = persia.EmbeddingCollection(
        store=store,
        tables=[persia.EmbeddingConfig("t", 4, feature_names=["f"])],
    )
    before = store.rows("t", torch.arange(6))
    run = torch.compile(
        lambda ids: sequences(ids).rows().sum(),
        backend="aot_eager",
        fullgraph=True,
    )
    ids = persia.JaggedBatch(
        ["f"], torch.arange(6), lengths=torch.tensor([1, 0, 5])
    )
    run(ids).backward()
    torch.testing.assert_close(store.rows("t", torch.arange(6)), before - 1)


def test_opcheck() -> None:
    store = persia.Store(persia.optim.SGD(lr=1.0))
    bags = persia.EmbeddingBagCollection(
        store=store,
        tables=[
            persia.EmbeddingBagConfig("t", 4, feature_names=["f"]),
            persia.EmbeddingBagConfig("u", 2, feature_names=["g"]),
        ],
    )
    plan = next(iter(bags._plans.values()))
    values = torch.arange(8)
    offsets = torch.tensor([0, 1, 3, 3, 8])
    weights = torch.rand(8)
    handle = engine_of(store).handle
    # A forward without a number: opcheck repeats its backward.
    ticket = torch.zeros(2, dtype=torch.int64)
    pull = torch.ops.persia.pull_v1.default
    for o, w in ((None, None), (offsets, None), (offsets, weights)):
        for anchor in (engine_of(store).anchor, engine_of(store).still):
            torch.library.opcheck(
                pull, (values, o, w, anchor, ticket, handle, plan)
            )
        engine_of(store).core.discard(True)
    out, rows = pull(
        values, offsets, None, engine_of(store).still, ticket, handle, plan
    )
    for keep in (True, False):
        torch.library.opcheck(
            torch.ops.persia.push_v1.default,
            (out, values, offsets, None, rows, ticket, handle, plan, keep),
        )
    engine_of(store).core.discard(True)
