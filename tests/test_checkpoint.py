"""Checkpoints: whole or not there, of one moment, and the same bits after."""

from __future__ import annotations

import fcntl
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
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
from persia import _checkpoint_files as files
from persia import checkpoint, errors, optim

OPTIMIZERS: dict[str, Callable[[], optim.SparseOptimizer]] = {
    "sgd": lambda: optim.SGD(lr=0.1),
    "momentum": lambda: optim.SGD(lr=0.1, momentum=0.9, weight_decay=0.01),
    "adagrad": lambda: optim.Adagrad(lr=0.1, initial_accumulator_value=0.5),
    "rowwise_adagrad": lambda: optim.RowWiseAdagrad(lr=0.1),
    "adam": lambda: optim.Adam(lr=0.01, max_norm=2.0),
    "adamw": lambda: optim.AdamW(lr=0.01),
}
DTYPES = ["fp32", "bf16"]


def make_store(
    optimizer: str = "adagrad",
    *tables: tuple[str, int, str],
    seed: int = 7,
    **options: Any,
) -> persia.Store:
    """A store with tables (name, dim, dtype); ("t", 4, "fp32") by default."""
    store = persia.Store(OPTIMIZERS[optimizer](), seed=seed, **options)
    for name, dim, dtype in tables or (("t", 4, "fp32"),):
        store.add_table(persia.EmbeddingBagConfig(name, dim, data_type=dtype))
    return store


def fill(store: persia.Store, table: str, n: int, seed: int = 0) -> None:
    """n rows of random ids (the whole range of int64), vectors and state."""
    rng = np.random.default_rng(seed)
    number = store._tables[table].number
    ids = rng.integers(-(2**63), 2**63, n, dtype=np.int64)
    vectors = rng.normal(size=(n, store.tables[table].embedding_dim))
    state = rng.random((n, store._core.state_floats(number)))
    store.set_rows(
        table, ids, torch.from_numpy(vectors), torch.from_numpy(state)
    )


def contents(store: persia.Store, table: str) -> tuple[torch.Tensor, ...]:
    """All of a table in the order of its ids: ids, vectors, state."""
    ids = store.ids(table).sort().values
    vectors, state, found = store._get(table, ids)
    assert found.all()
    return ids, vectors, state


def assert_same_rows(a: persia.Store, b: persia.Store, table: str) -> None:
    for x, y in zip(contents(a, table), contents(b, table)):
        assert torch.equal(x, y)


# ---- row files against safetensors -----------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_row_files_are_safetensors(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    optimizer: str,
    dtype: str,
) -> None:
    monkeypatch.setattr(checkpoint, "_CHUNK", 16 << 10)
    store = make_store(optimizer, ('odd "name"/ü', 5, dtype))
    fill(store, 'odd "name"/ü', 700)
    folder = store.save(tmp_path)
    paths = sorted(folder.glob("*.safetensors"))
    assert len(paths) > 1
    parts = []
    for path in paths:
        assert path.stat().st_size <= 16 << 10
        with safetensors.safe_open(path, "pt") as f:
            assert f.metadata()["table"] == 'odd "name"/ü'
            parts.append({key: f.get_tensor(key) for key in f.keys()})  # noqa: SIM118
    columns = {key: torch.cat([p[key] for p in parts]) for key in parts[0]}
    ids, vectors, state = contents(store, 'odd "name"/ü')
    assert columns["ids"].dtype == torch.uint64
    found, order = columns["ids"].view(torch.int64).sort()
    assert torch.equal(found, ids)
    kind = torch.bfloat16 if dtype == "bf16" else torch.float32
    assert columns["vectors"].dtype == kind
    assert torch.equal(columns["vectors"][order].float(), vectors)
    if state.shape[1]:
        assert torch.equal(columns["state"][order], state)
    else:
        assert "state" not in columns
    assert columns["clock"].dtype == torch.uint32
    assert len(columns["clock"]) == 700


@settings(
    max_examples=25,
    deadline=None,
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
    chunk=st.integers(6_000, 100_000),
)
def test_round_trip(
    tmp_path: Path,
    optimizer: str,
    tables: list[tuple[int, str, int]],
    chunk: int,
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
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "_CHUNK", chunk)
        a.save(root)
    loaded = b.load(root)
    assert loaded.rows == {f"t{i}": n for i, (_, _, n) in enumerate(tables)}
    for name, _, _ in specs:
        assert_same_rows(a, b, name)


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


def resign(folder: Path, **changes: Any) -> None:
    """Makes the manifest agree with altered files, as a forger would."""
    document = json.loads((folder / "manifest.json").read_text()) | changes
    entries = [f for t in document["tables"] for f in t["files"]]
    with files.opened(folder) as descriptor:
        for entry in [*entries, document["dense"]]:
            if (folder / entry["name"]).is_file():
                size, crc = checkpoint._core.ckpt_file_crc(
                    descriptor, entry["name"]
                )
                entry |= {"bytes": size, "crc32c": f"{crc:08x}"}
    text = files.encode_manifest(document)
    (folder / "manifest.json").write_bytes(text)


# ---- resuming --------------------------------------------------------------


class Trained:
    """A model that uses all that has a state: dropout, scheduler, Adam."""

    def __init__(self, optimizer: str, dtype: str) -> None:
        torch.manual_seed(0)
        self.store = persia.Store(OPTIMIZERS[optimizer](), seed=5)
        bags = persia.EmbeddingBagCollection(
            store=self.store,
            tables=[
                persia.EmbeddingBagConfig("u", 8, data_type=dtype),
                persia.EmbeddingBagConfig(
                    "i", 6, optimizer=optim.Adam(lr=0.02), data_type=dtype
                ),
            ],
        )
        self.bags = bags
        self.model = torch.nn.ModuleDict(
            {
                "bags": bags,
                "top": torch.nn.Sequential(
                    torch.nn.Dropout(0.3), torch.nn.Linear(14, 1)
                ),
            }
        )
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.schedulers = [
            torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9),
            torch.optim.lr_scheduler.LambdaLR(
                self.store.optimizer, lambda k: 1 / (1 + k)
            ),
        ]

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.schedulers,
        }

    def train(self, first: int, last: int) -> list[float]:
        losses = []
        for step in range(first, last):
            rng = np.random.default_rng(step)
            # Later steps see ids that no step saw before.
            values = rng.integers(0, 40 + 20 * step, 60)
            ids = persia.JaggedBatch(["u", "i"], torch.from_numpy(values))
            out = self.model["top"](self.bags(ids).values())
            loss = (out - torch.rand(30, 1)).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            for scheduler in self.schedulers:
                scheduler.step()
            losses.append(loss.item())
        return losses


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
    lineage, identity = a._lineage, a._checkpoint_id
    assert lineage != b._lineage
    assert b.load(tmp_path).lineage == lineage
    assert (b._lineage, b._checkpoint_id) == (lineage, identity)


def test_state_dict_without_rows_names_store_load(tmp_path: Path) -> None:
    def bags(store: persia.Store) -> torch.nn.Module:
        return persia.EmbeddingBagCollection(
            store=store, tables=[persia.EmbeddingBagConfig("t", 4)]
        )

    a, b = make_store(), make_store()
    fill(a, "t", 5)
    module_a, module_b = bags(a), bags(b)
    a.save(tmp_path, model=module_a)
    with pytest.raises(errors.RowsMissing, match=r"store\.load"):
        module_b.load_state_dict(module_a.state_dict())
    b.load(tmp_path, model=module_b)
    module_b.load_state_dict(module_a.state_dict())


# ---- one moment ------------------------------------------------------------


def counting_store() -> tuple[persia.Store, Callable[[], None]]:
    """A store in which every row holds the number of pushes it has seen."""
    store = persia.Store(optim.SGD(lr=1.0))
    bags = persia.EmbeddingBagCollection(
        store=store,
        tables=[
            persia.EmbeddingBagConfig(
                name, 2, feature_names=[name], init=("constant", 0.0)
            )
            for name in ("a", "b")
        ],
    )
    batch = persia.JaggedBatch(["a", "b"], torch.arange(2000).repeat(2))

    def push() -> None:
        bags(batch).values().sum().neg().backward()

    return store, push


def test_rows_are_of_one_moment_while_others_push(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "_CHUNK", 8 << 10)
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
            moved += store.updates > document["updates"]
            pushes = {table["pushes"] for table in document["tables"]}
            assert pushes == {document["updates"]}  # all of one moment
            for table in document["tables"]:
                assert table["rows"] == 2000
                for file in table["files"]:
                    columns = safetensors.numpy.load_file(
                        folder / file["name"]
                    )
                    assert set(columns["vectors"].flat) == pushes
                    assert set(columns["clock"]) == pushes
    finally:
        stop.set()
        thread.join()
    assert moved


CHILD = """
import sys, torch, persia
from persia import checkpoint
from tests.test_checkpoint import counting_store
checkpoint._CHUNK = 4 << 10
store, push = counting_store()
if sys.argv[2] == "resume":
    store.load(sys.argv[1])
print("ready", flush=True)
while True:
    push()
    store.save(sys.argv[1], keep=2, extra={"pushes": store.updates})
"""


def test_killed_while_saving(tmp_path: Path) -> None:
    root = tmp_path / "root"
    repository = Path(persia.__file__).parents[1]
    rng = random.Random(1)
    leftovers = 0
    last = 0
    for turn in range(4):
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, root, "resume" if turn else "new"],
            cwd=repository,
            stdout=subprocess.PIPE,
        )
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        while not (root / "LATEST").exists():
            time.sleep(0.01)
        time.sleep(0.05 + rng.random() / 4)
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        leftovers += len(list(root.glob(".tmp-*")))

        store, push = counting_store()
        found = store.load(root)
        assert found.step >= last
        last = found.step
        assert found.extra == {"pushes": found.step}
        for table in ("a", "b"):
            _, vectors, _ = contents(store, table)
            assert vectors.shape == (2000, 2)
            assert (vectors == found.step).all()
        push()
        store.save(root, keep=2, extra={"pushes": store.updates})
        assert not list(root.glob(".tmp-*"))
        assert len(files.steps(root)) <= 2
        last = store.updates
    assert leftovers  # at least one was killed in the middle


@pytest.mark.parametrize("same_step", [False, True])
def test_each_step_of_a_save_may_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same_step: bool
) -> None:
    """Every fsync and every rename in turn: old or new, never a mixture."""
    step = 1 if same_step else None
    store, push = counting_store()
    push()
    store.save(tmp_path, step=step)
    calls = 0
    fail_at = 0

    def failing(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == fail_at:
                raise OSError(5, "injected")
            return real(*args)

        return call

    monkeypatch.setattr(os, "fsync", failing(os.fsync))
    monkeypatch.setattr(Path, "rename", failing(Path.rename))
    failures = 0
    while True:
        calls = 0
        fail_at += 1
        before = store.updates
        push()
        try:
            store.save(tmp_path, step=step)
            saved = True
        except errors.StorageError as error:
            failures += "injected" in str(error)
            saved = False
        other, _ = counting_store()
        try:
            other.load(tmp_path)
        except errors.PersiaError as error:
            pytest.fail(f"nothing whole after failure {fail_at}: {error}")
        assert other.updates in (
            (before + 1,) if saved else (before, before + 1, *range(1, before))
        )
        for table in ("a", "b"):
            assert (contents(other, table)[1] == other.updates).all()
        if saved:
            break
    assert failures >= 6
    assert not list(tmp_path.glob(".tmp-*"))


def test_full_disk(tmp_path: Path) -> None:
    """A write that fails in C: an error, and the checkpoint before stays."""
    store = make_store()
    fill(store, "t", 3)
    first = store.save(tmp_path, step=1)
    fill(store, "t", 5000, seed=1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(errors.StorageError, match="safetensors"):
            store.save(tmp_path, step=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert files.find(tmp_path, None) == first
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        ".lock",
        "LATEST",
        "step-1",
    ]


# ---- altered files ---------------------------------------------------------


def snapshot(trained: Trained) -> tuple[Any, ...]:
    rows = [contents(trained.store, table) for table in ("u", "i")]
    dense = {
        k: v.clone() for k, v in trained.model["top"].state_dict().items()
    }
    adam = trained.optimizer.state_dict()["state"]
    moments = [s["exp_avg"].clone() for s in adam.values()]
    lr = [g["lr"] for g in trained.store.optimizer.param_groups]
    return rows, dense, moments, lr, trained.store.updates


def assert_same(a: Any, b: Any) -> None:
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        assert_same(list(a.values()), list(b.values()))
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b):
            assert_same(x, y)
    else:
        assert a == b


def test_altered_and_truncated_files_change_nothing(tmp_path: Path) -> None:
    saved = Trained("adagrad", "bf16")
    saved.train(0, 2)
    folder = saved.store.save(tmp_path, **saved.state())
    other = Trained("adagrad", "bf16")
    other.train(30, 32)
    before = snapshot(other)
    rng = random.Random(0)
    for path in [*sorted(folder.iterdir()), tmp_path / "LATEST"]:
        good = path.read_bytes()
        places = range(len(good))
        if len(good) > 120:
            places = [*range(60), *rng.sample(places, 60)]  # type: ignore[assignment]
        bad = [
            good[:i] + bytes([good[i] ^ 1 << rng.randrange(8)]) + good[i + 1 :]
            for i in places
        ]
        bad += [good[: rng.randrange(len(good))] for _ in range(10)]
        bad += [good[:-1], b"", good + b"x"]
        for data in bad:
            if data == good or data + b"\n" == good:
                continue  # LATEST without its line end is as good
            path.write_bytes(data)
            with pytest.raises(
                (errors.CorruptFile, errors.SchemaMismatch), match=path.name
            ):
                other.store.load(tmp_path, **other.state())
        path.write_bytes(good)
        path.unlink()
        with pytest.raises((errors.CorruptFile, errors.StorageError)):
            other.store.load(tmp_path, **other.state())
        path.write_bytes(good)
        assert_same(snapshot(other), before)
    other.store.load(tmp_path, **other.state())
    assert_same(snapshot(other), snapshot(saved))


def forge_ids_twice(folder: Path) -> None:
    path = next(folder.glob("*.safetensors"))
    columns = safetensors.numpy.load_file(path)
    columns["ids"][:] = columns["ids"][0]
    safetensors.numpy.save_file(columns, path)


def forge_clock_zero(folder: Path) -> None:
    path = next(folder.glob("*.safetensors"))
    columns = safetensors.numpy.load_file(path)
    columns["clock"][7] = 0
    safetensors.numpy.save_file(columns, path)


def forge_pickle(folder: Path) -> None:
    torch.save({"model": Path}, folder / "dense.pt")


@pytest.mark.parametrize(
    "forge", [forge_ids_twice, forge_clock_zero, forge_pickle]
)
def test_forged_files_change_nothing(
    tmp_path: Path, forge: Callable[[Path], None]
) -> None:
    a, b = make_store(), make_store()
    fill(a, "t", 20)
    fill(b, "t", 10, seed=3)
    before = contents(b, "t")
    folder = a.save(tmp_path)
    forge(folder)
    resign(folder)
    with pytest.raises(errors.CorruptFile):
        b.load(tmp_path)
    assert_same(contents(b, "t"), before)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"version": 2}, errors.SchemaMismatch),
        ({"format": "other"}, errors.SchemaMismatch),
        ({"step": -1}, errors.CorruptFile),
        ({"shards": 2}, errors.CorruptFile),
        ({"surplus": 1}, errors.CorruptFile),
        ({"tables": 5}, errors.CorruptFile),
    ],
)
def test_forged_manifests(
    tmp_path: Path, changes: dict[str, Any], error: type[Exception]
) -> None:
    store = make_store()
    folder = store.save(tmp_path)
    document = json.loads((folder / "manifest.json").read_text()) | changes
    (folder / "manifest.json").write_bytes(files.encode_manifest(document))
    with pytest.raises(error, match=r"manifest\.json"):
        store.load(tmp_path)


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/b", ".x", ""])
def test_names_with_paths_are_refused(tmp_path: Path, name: str) -> None:
    store = make_store()
    fill(store, "t", 3)
    folder = store.save(tmp_path)
    document = json.loads((folder / "manifest.json").read_text())
    document["tables"][0]["files"][0]["name"] = name
    (folder / "manifest.json").write_bytes(files.encode_manifest(document))
    with pytest.raises(errors.CorruptFile, match=r"manifest\.json"):
        store.load(tmp_path)


# ---- what does not fit -----------------------------------------------------


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


# ---- folders ---------------------------------------------------------------


def test_folders(tmp_path: Path) -> None:
    store = make_store()
    root = tmp_path / "deep" / "root"
    for step in (10, 20, 30):
        store.clear()
        fill(store, "t", step)
        assert store.save(root, step=step) == root / f"step-{step}"
    assert (root / "LATEST").read_text() == "step-30\n"
    assert store.load(root).rows == {"t": 30}
    assert store.load(root, step=10).step == 10
    assert store.load(str(root / "step-20")).rows == {"t": 20}
    shutil.copytree(root / "step-10", tmp_path / "best")
    assert store.load(tmp_path / "best").rows == {"t": 10}
    for path, step in ((root, 11), (tmp_path, None), (tmp_path / "no", None)):
        with pytest.raises(errors.StorageError, match=path.name):
            store.load(path, step=step)
    (root / "LATEST").unlink()
    with pytest.raises(errors.StorageError, match="10, 20, 30"):
        store.load(root)


def test_keep(tmp_path: Path) -> None:
    store = make_store()
    for step in (5, 6, 7, 1, 2):  # training began again at 1
        store.save(tmp_path, step=step, keep=3)
    assert sorted(files.steps(tmp_path)) == [1, 2, 7]
    assert files.find(tmp_path, None).name == "step-2"
    store.save(tmp_path, step=7, keep=1)
    assert files.steps(tmp_path) == [7]
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        ".lock",
        "LATEST",
        "step-7",
    ]


def test_the_same_step_is_replaced(tmp_path: Path) -> None:
    store = make_store()
    store.save(tmp_path, step=1)
    fill(store, "t", 3)
    store.save(tmp_path, step=1)
    other = make_store()
    assert other.load(tmp_path).rows == {"t": 3}
    assert not list(tmp_path.glob(".tmp-*"))


def test_two_saves_at_once(tmp_path: Path) -> None:
    store = make_store()
    store.save(tmp_path)
    with (tmp_path / ".lock").open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(errors.StorageError, match="another save"):
            store.save(tmp_path)
    store.save(tmp_path)


@pytest.mark.parametrize("extra", [Path("x"), {"f": print}, [lambda: 0]])
def test_what_cannot_be_read_is_not_saved(tmp_path: Path, extra: Any) -> None:
    store = make_store()
    store.save(tmp_path, extra={"plain": [1, "a", torch.zeros(2)]})
    with pytest.raises(errors.InvalidArgument, match="state of extra"):
        store.save(tmp_path, step=9, extra=extra)
    assert files.steps(tmp_path) == [0]
    assert not list(tmp_path.glob(".tmp-*"))


def test_arguments(tmp_path: Path) -> None:
    store = make_store()
    for bad in ({"keep": 0}, {"step": -1}, {"model": 5}):
        with pytest.raises(errors.InvalidArgument, match=next(iter(bad))):
            store.save(tmp_path, **bad)
    (tmp_path / "file").write_text("")
    with pytest.raises(errors.StorageError):
        store.save(tmp_path / "file")
    store.close()
    with pytest.raises(errors.Closed):
        store.save(tmp_path)


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
