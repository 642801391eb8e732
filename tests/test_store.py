"""The Store: rows, state, copies, pickles, forks, signals, threads, leaks."""

from __future__ import annotations

import io
import os
import pickle
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import persia
from persia import errors
from persia.store.engine import engine_of
from tests.forks import in_child
from tests.ready import ended

IDS = torch.arange(5)


def make(**store: Any) -> persia.EmbeddingBagCollection:
    store.setdefault("optimizer", persia.optim.Adagrad(lr=0.1))
    return persia.EmbeddingBagCollection(
        store=persia.Store(**store),
        tables=[persia.EmbeddingBagConfig("t", 4, feature_names=["f"])],
    )


def train(bags: Any, ids: torch.Tensor = IDS) -> None:
    bags(persia.JaggedBatch(["f"], ids)).values().sum().backward()


def test_initial_values_depend_on_seed_table_and_id_alone() -> None:
    ids = torch.tensor([0, 1, 2**62, -1, 12345])
    one = make(seed=7).store.rows("t", ids)
    two = make(seed=7).store.rows("t", ids.flip(0)).flip(0)
    assert torch.equal(one, two)
    assert not torch.equal(one, make(seed=8).store.rows("t", ids))
    assert float(one.abs().max()) <= 0.01
    many = make(seed=7).store.rows("t", torch.arange(100000))
    assert abs(float(many.mean())) < 1e-4
    assert abs(float(many.std()) - 0.02 / 12**0.5) < 1e-4
    bags = make(seed=7)
    train(bags, ids)
    train(make(seed=7), ids)
    assert bags.store.stats()["tables"]["t"]["created"] == 5


def test_inits() -> None:
    store = persia.Store()
    for name, init in {
        "c": ("constant", 0.5),
        "n": ("normal", 1.0, 0.1),
        "u": ("uniform", 2.0, 3.0),
        "r": 0.25,
    }.items():
        store.add_table(persia.EmbeddingBagConfig(name, 8, init=init))
    ids = torch.arange(10000)
    assert torch.equal(store.rows("c", ids), torch.full((10000, 8), 0.5))
    normal = store.rows("n", ids)
    assert abs(float(normal.mean()) - 1.0) < 0.01
    assert abs(float(normal.std()) - 0.1) < 0.01
    uniform = store.rows("u", ids)
    assert 2.0 <= float(uniform.min()) < float(uniform.max()) < 3.0
    assert float(store.rows("r", ids).abs().max()) <= 0.25


def test_missing_zeros() -> None:
    bags = persia.EmbeddingBagCollection(
        tables=[persia.EmbeddingBagConfig("t", 4, ["f"], missing="zeros")],
        optimizer=persia.optim.SGD(lr=1.0),
    )
    out = bags({"f": IDS}).values()
    assert not out.any()
    out.sum().backward()
    rows = bags.store.rows("t", IDS)
    assert float((rows + 1).abs().max()) <= 0.01  # init - 1


def test_rows_and_set_rows() -> None:
    store = make().store
    values = torch.randn(5, 4)
    state = torch.rand(5, 4)
    store.set_rows("t", IDS, values, state)
    assert torch.equal(store.rows("t", IDS), values)
    assert torch.equal(store.rows_and_state("t", IDS)[1], state)
    assert store.contains("t", [0, 4, 5]).tolist() == [True, True, False]
    assert store.ids("t").sort().values.tolist() == IDS.tolist()
    assert torch.equal(store.rows("t", []), torch.zeros(0, 4))
    store.clear("t")
    assert store.stats()["tables"]["t"]["rows"] == 0


def test_set_rows_checks() -> None:
    store = make().store
    with pytest.raises(errors.ShapeError, match=r"\(5, 3\)"):
        store.set_rows("t", IDS, torch.zeros(5, 3))
    with pytest.raises(errors.DtypeError, match="int64"):
        store.set_rows("t", IDS, torch.zeros(5, 4).long())
    with pytest.raises(errors.DtypeError, match="float32"):
        store.rows("t", torch.zeros(3))
    with pytest.raises(errors.ShapeError, match="ids"):
        store.rows("t", torch.zeros(3, 3).long())
    with pytest.raises(errors.InvalidArgument, match=r"'u'.*\['t'\]"):
        store.rows("u", IDS)
    with pytest.raises(errors.PersiaError):
        store.set_rows("t", IDS, torch.full((5, 4), float("nan")))
    assert store.stats()["tables"]["t"]["rows"] == 0


@pytest.mark.parametrize(
    ("optimizer", "signs"),
    [
        (persia.optim.SGD(lr=0.1, momentum=0.9), [-1.0]),
        (persia.optim.Adagrad(), []),
        (persia.optim.RowWiseAdagrad(), []),
        (persia.optim.Adam(), [-1.0, 1.0]),  # only the second moment's
    ],
)
def test_a_state_with_no_root_is_refused(optimizer: Any, signs: Any) -> None:
    store = persia.Store(optimizer)
    store.add_table(persia.EmbeddingBagConfig("t", 2))
    floats = store.rows_and_state("t", [1])[1].shape[1]
    bad = torch.full((1, floats), -1.0)
    if signs:
        good = torch.tensor(signs).repeat_interleave(2)[None]
        store.set_rows("t", [1], torch.ones(1, 2), good)
        assert torch.equal(store.rows_and_state("t", [1])[1], good)
    if len(signs) != 1:
        with pytest.raises(errors.PersiaError, match=r"id 2 .* negative"):
            store.set_rows("t", [2], torch.ones(1, 2), bad)
    assert not store.contains("t", [2]).any()


def test_explain() -> None:
    bags = make()
    train(bags)
    there = bags.store.explain("t", 3)
    assert there["present"]
    assert there["norm"] == float(bags.store.rows("t", [3]).norm())
    gone = bags.store.explain("t", 99)
    assert not gone["present"]
    assert "no update" in gone["why"]


def test_to_torch_and_from_torch() -> None:
    bags = make()
    train(bags)
    ids, module = bags.store.to_torch("t")
    assert torch.equal(ids, IDS)
    back = persia.from_torch(
        module,
        ids * 1000,
        name="t",
        feature_names=["f"],
        optimizer=persia.optim.SGD(0.1),
    )
    with torch.no_grad():
        want = bags({"f": IDS}).values()
        assert torch.equal(back({"f": IDS * 1000}).values(), want)
        assert torch.equal(module(torch.arange(5)[:, None]), want)
    with pytest.raises(errors.ShapeError, match="3 ids"):
        persia.from_torch(module, IDS[:3], name="t")
    with pytest.raises(errors.InvalidArgument, match="Linear"):
        persia.from_torch(torch.nn.Linear(1, 1))
    for lost in ({"padding_idx": 0}, {"scale_grad_by_freq": True}):
        with pytest.raises(errors.InvalidArgument, match=next(iter(lost))):
            persia.from_torch(torch.nn.EmbeddingBag(3, 2, **lost), name="t")
    bags.store.add_table(persia.EmbeddingBagConfig("s", 2, pooling="sqrtn"))
    with pytest.raises(
        errors.InvalidArgument, match="'s' has pooling 'sqrtn'"
    ):
        bags.store.to_torch("s")


def test_memory_limit() -> None:
    limit = 48 << 20
    bags = make(memory_limit=limit)

    def fill() -> None:
        for k in range(100):
            train(bags, torch.arange(k * 20000, (k + 1) * 20000))

    with pytest.raises(errors.LimitReached, match="memory"):
        fill()
    stats = bags.store.stats()
    assert stats["memory"] <= limit
    rows = stats["tables"]["t"]["rows"]
    assert rows % 20000 == 0  # the update that failed left nothing
    assert rows * stats["tables"]["t"]["row_bytes"] > limit / 4
    before = bags.store.rows("t", IDS)
    train(bags)  # rows that are there go on learning
    assert not torch.equal(bags.store.rows("t", IDS), before)


def test_bad_arguments_of_a_store() -> None:
    for wrong, match in (
        ({"update": "sometimes"}, "update"),
        ({"nonfinite": "ignore"}, "nonfinite"),
        ({"seed": -1}, "seed"),
        ({"memory_limit": 0}, "memory_limit"),
        ({"threads": 0}, "threads"),
        ({"threads": -1}, "threads is -1"),
        ({"threads": "2"}, "threads is '2'"),
        ({"seed": 1.5}, "seed is 1.5"),
        ({"seed": 2**64}, "seed"),
        ({"memory_limit": 1.5}, "memory_limit is 1.5"),
    ):
        with pytest.raises(errors.InvalidArgument, match=match):
            persia.Store(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("lr", [-1.0, "x"])
def test_a_rejected_lr_declares_nothing(lr: Any) -> None:
    store = persia.Store(persia.optim.SGD(lr=1.0))
    config = persia.EmbeddingBagConfig("t", 4, ["f"])
    config.lr = lr  # after the checks of the config
    with pytest.raises(errors.InvalidArgument, match="table 't': lr"):
        persia.EmbeddingBagCollection([config], store=store)
    assert not store.tables
    assert not store.optimizer.param_groups
    config.lr = 0.5
    bags = persia.EmbeddingBagCollection([config], store=store)
    before = store.rows("t", IDS)
    train(bags)
    torch.testing.assert_close(store.rows("t", IDS), before - 0.5)


def test_closed_store() -> None:
    bags = make()
    bags.store.close()
    with pytest.raises(errors.Closed, match="closed"):
        bags({"f": IDS})
    with pytest.raises(errors.Closed):
        bags.store.stats()
    with persia.Store() as store:
        store.add_table(persia.EmbeddingBagConfig("t", 4))
    with pytest.raises(errors.Closed):
        store.rows("t", IDS)


def test_a_handle_of_a_closed_store_is_not_used_again() -> None:
    bags = make()
    handle = engine_of(bags.store).handle
    bags.store.close()
    assert engine_of(make().store).handle != handle
    with pytest.raises(errors.Closed):
        bags({"f": IDS})


def test_pickle_keeps_the_configuration_only() -> None:
    bags = make(optimizer=persia.optim.Adam(lr=0.3), seed=5, update="step")
    bags.store.add_table(
        persia.EmbeddingBagConfig("u", 4, optimizer=persia.optim.SGD(lr=9.0))
    )
    train(bags)
    bags.store.optimizer.step()
    again = pickle.loads(pickle.dumps(bags))
    store = again.store
    assert store.seed == 5
    assert store.update == "step"
    assert isinstance(store.optimizer, persia.optim.Adam)
    assert [g["lr"] for g in store.optimizer.param_groups] == [0.3, 9.0]
    assert store.optimizer.param_groups[1]["algorithm"] == "sgd"
    assert store.stats()["tables"]["t"]["rows"] == 0
    train(again)
    store.optimizer.step()
    assert store.stats()["tables"]["t"]["rows"] == 5


def test_state_dict_holds_no_rows() -> None:
    bags = make()
    train(bags)
    model = torch.nn.Sequential(bags)
    state = model.state_dict()
    assert [k for k in state if "extra_state" not in k] == []
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    model.load_state_dict(state)
    train(model[0])
    empty = torch.nn.Sequential(make())
    with pytest.raises(errors.RowsMissing, match=r"store\.load"):
        empty.load_state_dict(state)
    other = torch.nn.Sequential(
        persia.EmbeddingBagCollection(
            tables=[persia.EmbeddingBagConfig("t", 8, feature_names=["f"])]
        )
    )
    with pytest.raises(errors.SchemaMismatch, match="embedding_dim"):
        other.load_state_dict(state)


def test_moving_a_module_leaves_its_rows() -> None:
    model = torch.nn.Sequential(make())
    model.to("cpu").double().float()
    train(model[0])
    assert model[0].store.updates == 1
    leaf = (
        engine_of(model[0].store).anchor.grad_fn.next_functions[0][0].variable
    )
    assert leaf.grad is None


def test_distributed_data_parallel() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bags = make()
            self.linear = torch.nn.Linear(4, 1)

        def forward(self, ids: Any) -> torch.Tensor:
            out: torch.Tensor = self.linear(self.bags(ids).values())
            return out

    store = torch.distributed.HashStore()
    torch.distributed.init_process_group(
        "gloo", store=store, rank=0, world_size=1
    )
    try:
        model = DistributedDataParallel(Model())
        for _ in range(3):
            model(persia.JaggedBatch(["f"], IDS)).sum().backward()
        assert model.module.bags.store.updates == 3
        run = torch.compile(model, backend="aot_eager")
        run(persia.JaggedBatch(["f"], IDS)).sum().backward()
        assert model.module.bags.store.updates == 4
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_use_after_fork() -> None:
    bags = make()
    train(bags)
    assert in_child(
        lambda: persia.JaggedBatch.from_dict({"f": IDS}),
        lambda: bags(persia.JaggedBatch.from_dict({"f": IDS})),
        lambda: bags.store.rows("t", IDS),
        bags.store.stats,
        persia.Store,
        bags.store.close,
    ) == ["nothing", *["UsedAfterFork"] * 4, "nothing"]
    train(bags)  # the parent goes on
    assert bags.store.updates == 2


def test_ctrl_c_leaves_the_store_usable() -> None:
    bags = make()
    big = torch.arange(200_000)
    timer = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()

    def forever() -> None:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            train(bags, big)

    with pytest.raises(KeyboardInterrupt):
        forever()
    timer.join()
    bags.store.flush()
    train(bags)
    assert bags.store.stats()["held"] == 0


def test_lookups_from_many_threads() -> None:
    bags = make()
    train(bags, torch.arange(1000))
    want = bags.store.rows("t", torch.arange(1000))
    wrong = []

    def look() -> None:
        for _ in range(30):
            with torch.no_grad():
                ids = persia.JaggedBatch(["f"], torch.arange(1000))
                if not torch.equal(bags(ids).values(), want):
                    wrong.append(1)

    threads = [threading.Thread(target=look) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


LEAK = """
import gc, os, psutil, torch, persia
def rss():
    gc.collect()
    return psutil.Process().memory_info().rss
def steps(bags, n):
    for _ in range(n):
        ids = persia.JaggedBatch.from_dict(
            {"f": (torch.arange(2000), torch.full((1000,), 2))})
        bags(ids).values().sum().backward()
def store(threads=2):
    return persia.EmbeddingBagCollection(
        store=persia.Store(threads=threads),
        tables=[persia.EmbeddingBagConfig("t", 16, ["f"], pooling="mean")])
bags = store(threads=1)  # quick on a busy machine too
steps(bags, 200)
before = rss()
steps(bags, 1500)
print((rss() - before) // 1024)
for _ in range(20):
    steps(store(), 2)
before = rss()
threads = len(os.listdir("/proc/self/task"))
for _ in range(150):
    steps(store(), 2)
print((rss() - before) // 1024, len(os.listdir("/proc/self/task")) - threads)
"""


@pytest.mark.slow
def test_nothing_leaks() -> None:
    pytest.importorskip("psutil")
    done = ended("-c", LEAK, cwd=Path(__file__).parent.parent, timeout=150)
    assert done.returncode == 0, done.stderr
    steps, stores, threads = map(int, done.stdout.split())
    assert steps < 4000, "KiB in 1,500 steps"
    assert stores < 6000, "KiB in 150 stores"
    assert threads == 0


def test_errors_are_those_of_the_core() -> None:
    names = set(persia._core.error_names()) - {"Ok"}
    for name in names:
        cls = getattr(errors, name)
        assert issubclass(cls, errors.PersiaError)
    assert names <= set(errors.__all__)


@pytest.mark.parametrize(
    "default", ["cpu", "meta", torch.float64, torch.float16, torch.bfloat16]
)
def test_defaults_of_torch_change_nothing(default: Any) -> None:
    """Rows are float32 on the CPU, and their optimizer's settings, too."""
    batch = persia.JaggedBatch(["f"], torch.tensor([5, 6]))
    ids = torch.tensor([5, 6, 7])
    dtype = torch.get_default_dtype()
    try:
        if isinstance(default, str):
            torch.set_default_device(default)
        else:
            torch.set_default_dtype(default)
        store = persia.Store(persia.optim.SGD(lr=1.0), update="step")
        module = persia.EmbeddingBagCollection(
            store=store,
            tables=[persia.EmbeddingBagConfig("t", 2, ["f"], init=0.0)],
            device="cpu",  # where its output goes; else to the default
        )
        for one in persia.DataLoader([persia.Batch(None, batch)], module, 0):
            (1e6 * module(one.ids).values().sum()).backward()
        norm = persia.clip_grad_norm_(module, 0.001)
        store.optimizer.step()
        rows = store.rows("t", ids)
        assert store.explain("t", 5)["present"]
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(dtype)
    assert norm.dtype == rows.dtype == torch.float32
    assert float(norm) == pytest.approx(2e6)
    change = -0.001 / 2
    assert torch.allclose(
        rows, torch.tensor([[change] * 2, [change] * 2, [0.0] * 2])
    )


@pytest.mark.parametrize(
    "name", ["update", "seed", "nonfinite", "memory_limit", "grad_division"]
)
def test_arguments_cannot_be_assigned(name: str) -> None:
    """It had no effect."""
    store = persia.Store()
    value = getattr(store, name)
    with pytest.raises(AttributeError):
        setattr(store, name, value)
