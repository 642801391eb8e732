"""Checkpoints: of one moment, and the same bits after."""

from __future__ import annotations

import json
import random
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import persia
from persia import checkpoint, errors, optim
from persia.checkpoint import files
from persia.checkpoint.shards import Staged
from persia.store.engine import engine_of
from tests.checkpoints import (
    DTYPES,
    OPTIMIZERS,
    Trained,
    assert_same,
    assert_same_rows,
    contents,
    counting_store,
    fill,
    make_store,
    resign,
    snapshot,
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_row_files_are_safetensors(
    tmp_path: Path, optimizer: str, dtype: str
) -> None:
    store = make_store(optimizer, ('odd "name"/ü', 5, dtype))
    fill(store, 'odd "name"/ü', 700)
    folder = store.save(tmp_path)
    (path,) = folder.glob("*.safetensors")
    with safetensors.safe_open(path, "pt") as f:
        assert f.metadata()["table"] == 'odd "name"/ü'
        columns = {key: f.get_tensor(key) for key in f.keys()}  # noqa: SIM118
    ids, vectors, state = contents(store, 'odd "name"/ü')
    assert columns["ids"].dtype == torch.uint64
    found, order = columns["ids"].view(torch.int64).sort()
    assert torch.equal(found, ids)
    kept = columns["vectors"][order]
    if dtype == "int8":  # the scale, then the elements
        assert kept.dtype == torch.uint8
        scale = kept[:, :4].contiguous().view(torch.float32)
        kept = kept[:, 4:].view(torch.int8) * scale
    elif dtype == "bf16":
        assert kept.dtype == torch.bfloat16
    else:
        assert kept.dtype == torch.float32
    assert torch.equal(kept.float(), vectors)
    if state.shape[1]:
        assert torch.equal(columns["state"][order], state)
    else:
        assert "state" not in columns
    assert columns["clock"].dtype == torch.uint32
    assert len(columns["clock"]) == 700


@settings(
    max_examples=25,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    tables=st.lists(
        st.tuples(
            st.integers(1, 40), st.sampled_from(DTYPES), st.integers(0, 300)
        ),
        min_size=1,
        max_size=4,
    ),
)
def test_round_trip(
    tmp_path: Path, optimizer: str, tables: list[tuple[int, str, int]]
) -> None:
    root = tmp_path / "root"
    shutil.rmtree(root, ignore_errors=True)
    specs = [(f"t{i}", dim, dt) for i, (dim, dt, _) in enumerate(tables)]
    a = make_store(optimizer, *specs)
    # Declared in another order, and with rows that must vanish.
    b = make_store(optimizer, *reversed(specs))
    for i, (_, _, n) in enumerate(tables):
        fill(a, f"t{i}", n, seed=i)
        fill(b, f"t{i}", 10, seed=100 + i)
    a.save(root)
    loaded = b.load(root)
    assert loaded.rows == {f"t{i}": n for i, (_, _, n) in enumerate(tables)}
    for name, _, _ in specs:
        assert_same_rows(a, b, name)


@pytest.mark.slow
def test_a_large_table_has_several_files(tmp_path: Path) -> None:
    a, b = (make_store("sgd", ("t", 4096, "fp32")) for _ in range(2))
    ids = torch.arange(17_000)
    a.set_rows("t", ids, ids[:, None].float().expand(-1, 4096))
    folder = a.save(tmp_path)
    paths = sorted(folder.glob("*.safetensors"))
    assert len(paths) == 2
    assert all(path.stat().st_size <= 256 << 20 for path in paths)
    found = [safetensors.torch.load_file(path)["ids"] for path in paths]
    assert torch.equal(torch.cat(found).view(torch.int64).sort().values, ids)
    b.load(tmp_path)
    assert torch.equal(b.rows("t", ids)[:, 7], ids.float())


def test_files_that_safetensors_wrote_are_read(tmp_path: Path) -> None:
    a, b = make_store(), make_store()
    fill(a, "t", 50)
    folder = a.save(tmp_path)
    path = next(folder.glob("*.safetensors"))
    # Other order of the tensors, no metadata.
    safetensors.numpy.save_file(safetensors.numpy.load_file(path), path)
    resign(folder)
    b.load(tmp_path)
    assert_same_rows(a, b, "t")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_resumed_training_has_the_same_bits(
    tmp_path: Path, optimizer: str, dtype: str
) -> None:
    whole = Trained(optimizer, dtype)
    whole.train(0, 6)
    whole.store.save(tmp_path, **whole.state(), extra={"epoch": 3})
    losses = whole.train(6, 12)

    resumed = Trained(optimizer, dtype)
    resumed.train(50, 53)  # something else, of which nothing may remain
    assert checkpoint.read_extra(tmp_path) == {"epoch": 3}
    found = resumed.store.load(tmp_path, **resumed.state())
    assert found.extra == {"epoch": 3}
    assert found.step == 6
    assert resumed.store.updates == 6
    assert resumed.train(6, 12) == losses
    for table in ("u", "i"):
        assert_same_rows(whole.store, resumed.store, table)
    for a, b in zip(whole.model.parameters(), resumed.model.parameters()):
        assert torch.equal(a, b)
    groups = zip(
        whole.store.optimizer.param_groups,
        resumed.store.optimizer.param_groups,
    )
    for a, b in groups:
        assert a["lr"] == b["lr"]


class Source:
    """Epochs of 20 batches, another 20 in each."""

    epoch = 0

    def __iter__(self) -> Iterator[persia.Batch]:
        for i in range(20):
            rng = np.random.default_rng((self.epoch, i))
            ids = torch.from_numpy(rng.integers(0, 500, 32))
            label = torch.from_numpy(rng.random(16, dtype=np.float32))
            yield persia.Batch(
                None, persia.JaggedBatch(["u", "i"], ids), label
            )


@pytest.mark.parametrize("staleness", [0, 2])
def test_resuming_in_the_middle_of_an_epoch(
    tmp_path: Path, staleness: int
) -> None:
    def train(trained: Trained, loader: Any, first: int, last: int) -> None:
        """Batches first to last, over as many epochs as that takes."""
        step = first
        while True:
            loader.batches.epoch = step // 20
            for batch in loader:
                out = trained.model["top"](trained.bags(batch.ids).values())
                loss = (out.squeeze(1) - batch.label).square().mean()
                trained.optimizer.zero_grad()
                loss.backward()
                trained.optimizer.step()
                step += 1
                if step == last:
                    return

    def make() -> tuple[Trained, Any]:
        trained = Trained("adagrad", "bf16")
        return trained, persia.DataLoader(Source(), trained.model, staleness)

    whole, loader = make()
    train(whole, loader, 0, 27)  # 7 of the second epoch
    assert loader.state_dict() == {"batches": 7, "epoch": 1}
    whole.store.save(tmp_path, **whole.state(), loader=loader)
    resumed, again = make()
    resumed.store.load(tmp_path, **resumed.state(), loader=again)
    for trained, batches in ((whole, loader), (resumed, again)):
        batches.load_state_dict({"batches": 7, "epoch": 1})
        torch.manual_seed(1)
        train(trained, batches, 27, 44)
    if staleness == 0:
        for table in ("u", "i"):
            assert_same_rows(whole.store, resumed.store, table)
    assert whole.store.updates == resumed.store.updates == 44
    assert loader.state_dict() == again.state_dict()


def test_random_states(tmp_path: Path) -> None:
    def draw() -> list[float]:
        return [torch.rand(1).item(), random.random(), np.random.random()]

    store = make_store()
    store.save(tmp_path)
    expected = draw()
    draw()
    store.load(tmp_path)
    assert draw() == expected
    store.load(tmp_path, random_states=False)
    assert draw() != expected


def test_parallel_and_compiled_models_are_unwrapped(tmp_path: Path) -> None:
    a, b = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    store = make_store()
    store.save(tmp_path, model=torch.compile(a, backend="eager"))
    store.load(tmp_path, model=b)
    assert torch.equal(a.weight, b.weight)


def test_lineage_and_checkpoint_id(tmp_path: Path) -> None:
    a, b = make_store(), make_store()
    fill(a, "t", 3)
    a.save(tmp_path)
    lineage, identity = engine_of(a).lineage, engine_of(a).checkpoint_id
    assert lineage != engine_of(b).lineage
    assert b.load(tmp_path).lineage == lineage
    assert (engine_of(b).loaded, engine_of(b).checkpoint_id) == (
        lineage,
        identity,
    )


def test_state_dict_without_rows_names_store_load(tmp_path: Path) -> None:
    def bags(store: persia.Store) -> torch.nn.Module:
        return persia.EmbeddingBagCollection(
            store=store, tables=[persia.EmbeddingBagConfig("t", 4)]
        )

    a, b = make_store(), make_store()
    fill(a, "t", 5)
    module_a, module_b = bags(a), bags(b)
    a.save(tmp_path, model=module_a)
    state = module_a.state_dict()
    fill(a, "t", 6)
    with pytest.raises(errors.RowsMissing, match=r"store\.load"):
        module_b.load_state_dict(state)
    b.load(tmp_path, model=module_b)
    module_b.load_state_dict(state)


def test_rows_are_of_one_moment_while_others_push(tmp_path: Path) -> None:
    store, push = counting_store()
    push()
    stop = threading.Event()

    def train() -> None:
        while not stop.is_set():
            push()

    thread = threading.Thread(target=train)
    thread.start()
    moved = 0
    try:
        for _ in range(8):
            folder = store.save(tmp_path, keep=1)
            document = json.loads((folder / "manifest.json").read_text())
            updates = document["shards"][0]["updates"]
            moved += store.updates > updates
            for table in document["tables"]:
                assert table["pushes"] == [updates]  # all of one moment
                assert table["rows"] == 2000
                for file in table["files"]:
                    columns = safetensors.numpy.load_file(
                        folder / file["name"]
                    )
                    assert set(columns["vectors"].flat) == {updates}
                    assert set(columns["clock"]) == {updates}
    finally:
        stop.set()
        thread.join()
    assert moved


@pytest.mark.parametrize(
    ("optimizer", "table", "says"),
    [
        ("adagrad", ("t", 5, "fp32"), ["'t'", "embedding_dim", "5", "4"]),
        ("adagrad", ("t", 4, "bf16"), ["'t'", "data_type", "bf16", "fp32"]),
        ("adam", ("t", 4, "fp32"), ["'t'", "optimizer", "adam", "adagrad"]),
        ("adagrad", ("other", 4, "fp32"), ["'t'", "'other'", "strict=False"]),
    ],
)
def test_other_schema(
    tmp_path: Path,
    optimizer: str,
    table: tuple[str, int, str],
    says: list[str],
) -> None:
    a, b = make_store(), make_store(optimizer, table)
    fill(a, "t", 9)
    fill(b, table[0], 4, seed=2)
    before = contents(b, table[0])
    a.save(tmp_path)
    with pytest.raises(errors.SchemaMismatch) as caught:
        b.load(tmp_path)
    for word in says:
        assert word in str(caught.value)
    assert_same(contents(b, table[0]), before)


def test_momentum_is_part_of_the_schema(tmp_path: Path) -> None:
    make_store("sgd").save(tmp_path)
    with pytest.raises(errors.SchemaMismatch, match="momentum"):
        make_store("momentum").load(tmp_path)


def test_another_class_of_dense_optimizer(tmp_path: Path) -> None:
    class Mine(torch.optim.Adam):
        pass

    def stepped(cls: Any) -> Any:
        weight = torch.nn.Parameter(torch.ones(2))
        weight.grad = torch.ones(2)
        optimizer = cls([weight], lr=0.1)
        optimizer.step()
        return optimizer

    store = make_store()
    store.save(tmp_path, optimizer=stepped(torch.optim.Adam))
    fill(store, "t", 3)
    before = contents(store, "t")
    with pytest.raises(errors.SchemaMismatch, match=r"Adam, .* SGD"):
        store.load(tmp_path, optimizer=stepped(torch.optim.SGD))
    with pytest.raises(errors.SchemaMismatch, match=r"Adam, .* Adamax"):
        store.load(tmp_path, optimizer=stepped(torch.optim.Adamax))
    assert_same(contents(store, "t"), before)
    store.load(tmp_path, optimizer=stepped(Mine))  # one with the same states


def test_not_strict(tmp_path: Path) -> None:
    a = make_store("adam", ("x", 4, "fp32"), ("y", 3, "fp32"))
    b = make_store("adam", ("z", 2, "fp32"), ("y", 3, "fp32"))
    for name, store in (("x", a), ("y", a), ("z", b)):
        fill(store, name, 6)
    a.optimizer.param_groups[1]["lr"] = 0.5
    before = contents(b, "z")
    a.save(tmp_path)
    with pytest.raises(errors.SchemaMismatch, match="'x'"):
        b.load(tmp_path)
    assert b.load(tmp_path, strict=False).rows == {"y": 6}
    assert_same_rows(a, b, "y")
    assert_same(contents(b, "z"), before)
    assert [g["lr"] for g in b.optimizer.param_groups] == [0.01, 0.5]


def test_another_seed_is_told(tmp_path: Path) -> None:
    make_store(seed=1).save(tmp_path)
    with pytest.warns(UserWarning, match=r"seed \(2 here, 1 there\)") as seen:
        make_store(seed=2).load(tmp_path)
    assert seen[0].filename == __file__


def test_a_model_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    saved = Trained("adam", "fp32")
    saved.train(0, 3)
    saved.store.save(tmp_path, **saved.state())
    other = Trained("adam", "fp32")
    other.train(10, 12)
    before = snapshot(other)
    state = other.state() | {"scheduler": None}
    wide = torch.optim.Adam([torch.nn.Parameter(torch.zeros(2))])
    for key, value in (
        ("model", torch.nn.Linear(2, 2)),
        ("optimizer", wide),
        ("scheduler", other.schedulers[0]),  # a list was saved
        ("loader", other.schedulers[0]),
    ):
        with pytest.raises(errors.SchemaMismatch, match=key):
            other.store.load(tmp_path, **state | {key: value})
        assert_same(snapshot(other), before)


class OnDevice(torch.Tensor):
    """A tensor that says it is on a device, and counts its copies."""

    copies: list[str] = []  # noqa: RUF012

    @property
    def is_cpu(self) -> bool:
        return False

    def detach(self) -> OnDevice:
        return self

    def cpu(self, *args: Any, **more: Any) -> torch.Tensor:
        self.copies.append("host")
        return self.as_subclass(torch.Tensor).clone()

    def __deepcopy__(self, memo: Any) -> OnDevice:
        self.copies.append("device")
        return self.clone()


def test_a_load_takes_no_memory_of_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For what it sets back if it fails."""

    class Part:
        def __init__(self) -> None:
            values = torch.ones(3).as_subclass(OnDevice)
            self.state: Any = {"w": values, "more": [{"m": values}, 7]}
            self.back: Any = None

        def state_dict(self) -> Any:
            return self.state

        def load_state_dict(self, state: Any) -> None:
            if self.back is None:
                self.back = False
                raise RuntimeError("does not fit")
            self.back = state

    store = persia.Store()
    part = Part()
    part.state = {"w": torch.zeros(3), "more": [{"m": torch.zeros(3)}, 7]}
    store.save(tmp_path, loader=part)
    part = Part()
    monkeypatch.setattr(OnDevice, "copies", [])
    with pytest.raises(errors.PersiaError):
        store.load(tmp_path, loader=part)
    assert OnDevice.copies == ["host"] * 2
    assert type(part.back["w"]) is torch.Tensor
    assert part.back["w"].tolist() == [1.0] * 3
    assert part.back["more"][0]["m"].tolist() == [1.0] * 3
    assert part.back["more"][1] == 7


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_the_memory_of_a_gpu_in_a_load(tmp_path: Path) -> None:
    model = torch.nn.Linear(2048, 2048).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2048, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    store = persia.Store()
    store.save(tmp_path, model=model, optimizer=optimizer)
    size = 3 * sum(p.nbytes for p in model.parameters())
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    store.load(tmp_path, model=model, optimizer=optimizer)
    # The states that an optimizer loads are new tensors: two thirds of it.
    assert torch.cuda.max_memory_allocated() - before < 0.9 * size


def test_too_many_rows_for_the_capacity(tmp_path: Path) -> None:
    a = make_store()
    fill(a, "t", 100)
    a.save(tmp_path)
    for eviction, error in ((None, errors.CapacityReached), ("lru", None)):
        b = persia.Store(optim.Adagrad(initial_accumulator_value=0.5), seed=7)
        b.add_table(
            persia.EmbeddingBagConfig("t", 4, capacity=60, eviction=eviction)
        )
        fill(b, "t", 5, seed=9)
        before = contents(b, "t")
        if error:
            with pytest.raises(error):
                b.load(tmp_path)
            assert_same(contents(b, "t"), before)
        else:
            b.load(tmp_path)
            assert len(b.ids("t")) == 60
            assert b.stats()["tables"]["t"]["evicted"] == 40
            gone = next(i for i in a.ids("t") if not b.contains("t", [i]))
            assert "evicted" in b.explain("t", gone)["why"]
            with pytest.raises(errors.InvalidArgument, match="NUL"):
                b.load(f"{tmp_path}/a\0b")


def test_a_smaller_capacity_of_a_large_table(tmp_path: Path) -> None:
    """Its rows are in several stripes, which come one after the other."""
    a = make_store()
    fill(a, "t", 200_000)
    a.save(tmp_path)
    b = persia.Store(optim.Adagrad(initial_accumulator_value=0.5), seed=7)
    b.add_table(
        persia.EmbeddingBagConfig("t", 4, capacity=70_000, eviction="lru")
    )
    b.load(tmp_path)
    assert 69_990 <= len(b.ids("t")) <= 70_000


def test_memory_limit(tmp_path: Path) -> None:
    a = make_store()
    fill(a, "t", 200_000)
    a.save(tmp_path)
    b = make_store(memory_limit=4 << 20)
    fill(b, "t", 5, seed=9)
    before = contents(b, "t")
    used = b.stats()["memory"]
    with pytest.raises(errors.LimitReached):
        b.load(tmp_path)
    assert_same(contents(b, "t"), before)
    assert b.stats()["memory"] == used


def more_than_half(limit: int) -> persia.Store:
    """A store whose rows take 0.7 of its memory."""
    store = make_store("adagrad", ("t", 16, "fp32"), memory_limit=limit)
    seed = 0
    while store.stats()["memory"] < 0.7 * limit:
        fill(store, "t", limit // 5000, seed=seed)
        seed += 1
    return store


def test_more_than_half_of_the_memory(tmp_path: Path) -> None:
    """There is no room for the rows beside those that are there."""
    limit = 48 << 20
    a = more_than_half(limit)
    a.save(tmp_path)
    saved = contents(a, "t")
    ids = saved[0][:1000]
    a.set_rows("t", ids, torch.zeros(1000, 16))
    a.set_rows("t", torch.arange(1000), torch.zeros(1000, 16))
    a.load(tmp_path)
    assert_same(contents(a, "t"), saved)
    assert 0.6 * limit < a.stats()["memory"] < 0.8 * limit
    a.load(tmp_path)  # once more
    assert_same(contents(a, "t"), saved)


def test_a_load_in_place_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of other rows is never seen: all calls are refused."""
    a = more_than_half(48 << 20)
    whole = Path(a.save(tmp_path / "whole"))
    saved = contents(a, "t")
    torn = Path(a.save(tmp_path / "torn"))
    commit = Staged.commit

    def tear(self: Staged) -> None:
        for file in torn.glob("*.safetensors"):
            file.unlink()
        commit(self)

    with monkeypatch.context() as patch:
        patch.setattr(Staged, "commit", tear)
        with pytest.raises(errors.StorageError):
            a.load(torn.parent)
    for call in (
        lambda: contents(a, "t"),
        lambda: a.rows("t", [1]),
        lambda: a.clear(),
        lambda: a.save(tmp_path / "mixed"),
        lambda: fill(a, "t", 10),
    ):
        with pytest.raises(errors.RestoreIncomplete):
            call()
    assert a.stats()["tables"]["t"]["rows"] == 0
    assert not list((tmp_path / "mixed").glob("step*"))
    a.load(whole.parent)
    assert_same(contents(a, "t"), saved)


def test_no_room_for_a_checkpoint_in_place(tmp_path: Path) -> None:
    a = make_store("adagrad", ("t", 16, "fp32"))
    fill(a, "t", 100_000)
    a.save(tmp_path)
    b = more_than_half(12 << 20)
    before = contents(b, "t")
    with pytest.raises(errors.LimitReached):
        b.load(tmp_path)
    assert_same(contents(b, "t"), before)


@pytest.mark.parametrize("extra", [Path("x"), {"f": print}, [lambda: 0]])
def test_what_cannot_be_read_is_not_saved(tmp_path: Path, extra: Any) -> None:
    store = make_store()
    store.save(tmp_path, extra={"plain": [1, "a", torch.zeros(2)]})
    with pytest.raises(errors.InvalidArgument, match="state of extra"):
        store.save(tmp_path, step=9, extra=extra)
    assert files.LocalRoot(tmp_path).steps() == [0]
    assert not list(tmp_path.glob(".tmp-*"))


@pytest.mark.parametrize("at", range(1, 12))
def test_ctrl_c_in_torchs_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    class Interrupted:
        def __init__(self, file: Any) -> None:
            self.file, self.writes = file, 0

        def write(self, some: bytes) -> int:
            self.writes += 1
            if self.writes == at:
                raise KeyboardInterrupt
            return int(self.file.write(some))

        def flush(self) -> None:
            self.file.flush()

    save = torch.save
    store = make_store()
    store.save(tmp_path)
    monkeypatch.setattr(
        torch, "save", lambda what, file: save(what, Interrupted(file))
    )
    with pytest.raises(KeyboardInterrupt):
        store.save(tmp_path, step=9, extra={"a": torch.zeros(2)})
    assert files.LocalRoot(tmp_path).steps() == [0]
    assert not list(tmp_path.glob(".tmp-*"))


def test_gradients_that_wait_belong_to_the_rows_that_were(
    tmp_path: Path,
) -> None:
    store = persia.Store(optim.SGD(lr=1.0), update="step")
    bags = persia.EmbeddingBagCollection(
        store=store, tables=[persia.EmbeddingBagConfig("t", 2)]
    )
    ids = persia.JaggedBatch(["t"], torch.tensor([1, 2]))
    bags(ids).values().sum().backward()
    store.optimizer.step()
    store.save(tmp_path)
    before = contents(store, "t")
    bags(ids).values().sum().backward()
    store.load(tmp_path)
    store.optimizer.step()
    assert_same(contents(store, "t"), before)
