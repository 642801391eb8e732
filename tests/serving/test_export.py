"""Exports: what was exported gives what the model gave, and nothing that is
damaged, half written, or refused is taken for one."""

from __future__ import annotations

import contextlib
import copy
import json
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import nn

import persia
from persia import _core, errors
from persia.serving import Publish, exporting
from persia.serving.folder import MANIFEST, LocalVersions, versions_of
from tests.remote import Servers
from tests.serving import conftest, models

pytestmark = pytest.mark.slow


def made(case: str) -> tuple[nn.Module, Any]:
    """A model and what makes a batch of so many samples."""
    if case in models.CLICKS:
        return models.CLICKS[case](models.bags()), models.batch
    if case in models.CONVERTED:
        make, batch = models.CONVERTED[case]
        return persia.convert(make(), store=models.store()), batch
    make, batch = models.OWN[case]
    return make(), batch


OFTEN = {"dlrm", "mmoe", *models.CONVERTED, *models.OWN}


@pytest.mark.parametrize(
    "case",
    [
        case if case in OFTEN else pytest.param(case, marks=pytest.mark.long)
        for case in (*models.CLICKS, *models.CONVERTED, *models.OWN)
    ],
)
def test_an_export_gives_what_the_model_gives(
    case: str, tmp_path: Path
) -> None:
    torch.manual_seed(1)
    model, batch = made(case)
    models.train(model, lambda: batch(16))
    dense = {k: v.clone() for k, v in model.named_parameters()}
    before = [m.training for m in model.modules()]
    done = persia.export(model, tmp_path / "out", example=batch(3))
    assert done is not None and done.version == "v-000001"
    assert before == [m.training for m in model.modules()]
    for name, value in model.named_parameters():
        assert torch.equal(value, dense[name])
    loaded = persia.load_model(tmp_path / "out")
    model.eval()
    for samples in (1, 2, 9):
        call = batch(samples)
        with torch.no_grad():
            want = model(*call)
        torch.testing.assert_close(loaded(*call), want, rtol=1e-6, atol=1e-6)
    assert loaded.joins
    models.train(model, lambda: batch(16))  # it trains on as before
    call = batch(9)
    twin = pickle.loads(pickle.dumps(loaded))
    torch.testing.assert_close(twin(*call), loaded(*call))
    assert copy.deepcopy(loaded) is loaded


def tables_of(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / MANIFEST).read_text())[
        "tables"
    ]
    return found


def as_strangers_do(path: Path) -> dict[int, np.ndarray[Any, Any]]:
    """The rows of a file by their ids, by the page of the format alone."""
    with safe_open(path, "np") as file:
        about = file.metadata()
        raw = file.get_tensor("rows")
    dim = int(about["dim"])
    ids = raw[:, :8].copy().view("<i8")[:, 0]
    if about["type"] == "fp32":
        vectors = raw[:, 8 : 8 + 4 * dim].copy().view("<f4")
    elif about["type"] == "fp16":
        vectors = raw[:, 8 : 8 + 2 * dim].copy().view("<f2").astype("<f4")
    else:
        scale = raw[:, 8:12].copy().view("<f4")
        if about["type"] == "int8":
            q = raw[:, 12 : 12 + dim].view(np.int8).astype(np.int32)
        else:
            packed = raw[:, 12 : 12 + (dim + 1) // 2]
            halves = np.stack([packed & 15, packed >> 4], 2)
            q = halves.reshape(len(raw), -1)[:, :dim].astype(np.int32)
            q = np.where(q > 7, q - 16, q)
        vectors = scale * q.astype(np.float32)
    return dict(zip(ids.tolist(), vectors, strict=True))


_MASK = 2**64 - 1


def hashed(x: int) -> int:
    h = (x + 0x9E3779B97F4A7C15) & _MASK
    h = ((h ^ (h >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    h = ((h ^ (h >> 27)) * 0x94D049BB133111EB) & _MASK
    return h ^ (h >> 31)


def row_of(path: Path, id: int) -> int | None:
    """The number of the row of an id, by the page of the format alone."""
    with safe_open(path, "np") as file:
        key = int(file.metadata()["key"])
        index, rows = file.get_tensor("index"), file.get_tensor("rows")
    p = (hashed(id % 2**64) * key) & _MASK
    p = ((p ^ (p >> 32)) * (hashed(key) | 1)) & _MASK
    at, tag = ((p >> 32) * len(index)) >> 32, (p >> 24) & 255 or 1
    for _ in range(len(index)):
        slots = index[at][16:].view("<u4")
        for entry in np.flatnonzero(index[at][:12] == tag):
            row = int(slots[entry])
            if rows[row][:8].view("<i8")[0] == id:
                return row
        if not index[at][12]:
            return None
        at = (at + 1) % len(index)
    return None


@pytest.mark.parametrize("kind", ["fp32", "fp16", "int8", "int4"])
def test_rows_are_those_of_the_store(kind: Any, tmp_path: Path) -> None:
    model = models.CLICKS["widedeep"](models.bags())
    models.train(model, lambda: models.batch(64))
    done = persia.export(
        model, tmp_path, example=models.batch(3), row_dtype=kind
    )
    assert done is not None
    store = model.bags.store
    loaded = persia.load_model(tmp_path)
    for table in tables_of(done.path):
        name = table["options"]["name"]
        found = as_strangers_do(done.path / table["file"]["name"])
        ids = store.ids(name)
        assert sorted(found) == sorted(ids.tolist())
        want = store.rows(name, ids).numpy()
        got = np.stack([found[i] for i in ids.tolist()])
        most = np.abs(want).max(1, keepdims=True)
        part = {"fp32": 0, "fp16": 1 / 2048, "int8": 0.501 / 127}
        bound = most * part.get(kind, 0.501 / 7) + 1e-30
        assert (np.abs(got - want) <= bound).all()
        mine = {
            i: v
            for some, vs in loaded.rows(name)
            for i, v in zip(some.tolist(), vs, strict=True)
        }
        for i in found:
            assert np.array_equal(mine[i], found[i])
        path = done.path / table["file"]["name"]
        for row, i in enumerate(list(found)[:20]):  # in the file's order
            assert row_of(path, i) == row
        assert row_of(path, 1000) is None
        others = torch.arange(1000, 1100)
        assert not loaded.has_rows(name, others).any()
        assert loaded.has_rows(name, ids).all()
    loaded.check_rows()


def test_ids_without_a_row_are_as_the_table_says(tmp_path: Path) -> None:
    for missing in ("init", "zeros"):
        bags = persia.EmbeddingBagCollection(
            store=models.store(),
            tables=[persia.EmbeddingBagConfig("t", 8, ["t"], missing=missing)],
        )
        ids = {"t": torch.arange(5)}
        bags(ids).values().sum().backward()
        other = {"t": torch.arange(3, 9)}

        class Model(nn.Module):
            def __init__(self, bags: Any) -> None:
                super().__init__()
                self.bags = bags

            def forward(self, ids: Any) -> Any:
                return self.bags(ids).values()

        model = Model(bags).eval()
        root = tmp_path / missing
        persia.export(
            model, root, example=(persia.JaggedBatch.from_dict(ids),)
        )
        loaded = persia.load_model(root)
        assert torch.equal(loaded(other), model(other))
        assert loaded.unknown() == (6, 4)


def test_publish_leaves_rows_out(tmp_path: Path) -> None:
    store = models.store()
    bags = persia.EmbeddingBagCollection(
        store=store,
        tables=[
            persia.EmbeddingBagConfig(
                "t",
                8,
                ["t"],
                eviction=persia.eviction.LFU(half_life=10**6),
                capacity=1000,
            )
        ],
    )
    for n in (9, 6, 3):  # ids 0 to 2 have three updates, 6 to 8 one
        bags({"t": torch.arange(n)}).values().sum().backward()
    example = (persia.JaggedBatch.from_dict({"t": torch.arange(3)}),)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bags = bags

        def forward(self, ids: Any) -> Any:
            return self.bags(ids).values()

    def published(**options: Any) -> list[int]:
        done = persia.export(
            Model(), tmp_path, example=example, publish=Publish(**options)
        )
        assert done is not None
        found = persia.load_model(done.path)
        kept = [i for ids, _ in found.rows("t") for i in ids.tolist()]
        assert done.rows["t"] + done.left_out["t"] == 9
        assert done.rows["t"] == len(kept)
        return sorted(kept)

    assert published() == list(range(9))
    # A count halves in half_life updates.
    assert published(min_count=1.5) == list(range(6))
    assert published(last_updates=1) == list(range(3))
    best = published(most_rows=2)
    assert len(best) == 2 and set(best) <= {0, 1, 2}
    assert published(min_count=1.5, last_updates=2) == list(range(6))
    for wrong in (
        {"last_seconds": 5},
        {"min_count": -1},
        {"most_rows": 0},
        {"age": 1},
    ):
        with pytest.raises(errors.InvalidArgument):
            published(**wrong)


def test_versions_follow_each_other(tmp_path: Path) -> None:
    model = models.CLICKS["widedeep"](models.bags())
    call = models.batch(5)
    outs = []
    for _ in range(4):
        models.train(model, lambda: models.batch(16), 1)
        persia.export(model, tmp_path, example=models.batch(3), keep=3)
        model.eval()
        outs.append(model(*call).detach())
    names = sorted(p.name for p in tmp_path.glob("v-*"))
    assert names == ["v-000002", "v-000003", "v-000004"]
    assert not list(tmp_path.glob(".tmp*"))
    for name, out in zip(names, outs[1:], strict=True):
        torch.testing.assert_close(
            persia.load_model(tmp_path, name)(*call), out
        )
    torch.testing.assert_close(persia.load_model(tmp_path)(*call), outs[-1])
    with pytest.raises(errors.StorageError):
        persia.load_model(tmp_path, "v-000001")


def test_threads_export_and_load_at_once(tmp_path: Path) -> None:
    model = models.CLICKS["widedeep"](models.bags())
    call = models.batch(5)
    persia.export(model, tmp_path / "first", example=models.batch(3))
    want = persia.load_model(tmp_path / "first")(*call)

    def load(_: int) -> bool:
        got = persia.load_model(tmp_path / "first")(*call)
        return torch.equal(got, want)

    with ThreadPoolExecutor(5) as pool:
        loads = pool.map(load, range(12))
        for i in range(2):
            out = tmp_path / f"out{i}"
            persia.export(model, out, example=models.batch(3))
            assert torch.equal(persia.load_model(out)(*call), want)
        assert all(loads)


def test_damage_is_refused(tmp_path: Path) -> None:
    model = models.CLICKS["widedeep"](models.bags())
    models.train(model, lambda: models.batch(16), 1)
    done = persia.export(model, tmp_path, example=models.batch(3))
    assert done is not None
    for name in sorted(p.name for p in done.path.iterdir()):
        path = done.path / name
        whole = path.read_bytes()
        path.write_bytes(whole[:-1])
        with pytest.raises(errors.CorruptFile):
            persia.load_model(tmp_path)
        if not name.startswith("rows"):  # whose bytes are read by verify
            flipped = bytearray(whole)
            flipped[len(whole) // 2] ^= 1
            path.write_bytes(flipped)
            with pytest.raises(errors.CorruptFile):
                persia.load_model(tmp_path)
        path.unlink()
        with pytest.raises((errors.CorruptFile, errors.StorageError)):
            persia.load_model(tmp_path)
        path.write_bytes(whole)
    persia.load_model(tmp_path)
    with pytest.raises(errors.StorageError):
        persia.load_model(tmp_path / "nothing")


@pytest.mark.parametrize("step", ["write", "manifest", "rename", "current"])
def test_an_export_that_breaks_off_is_not_there(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a process that is killed at each step leaves it."""
    model = models.CLICKS["widedeep"](models.bags())
    graph = exporting.trace_model(model, models.batch(3))
    monkeypatch.setattr(exporting, "trace_model", lambda *_: graph)
    persia.export(model, tmp_path, example=models.batch(3))

    class Killed(BaseException):
        pass

    def killed(*_: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", lambda *_, **__: None)
        if step == "write":
            patch.setattr(exporting, "write_rows", killed)
        elif step == "manifest":
            patch.setattr("persia.serving.folder.encode_manifest", killed)
        elif step == "rename":
            patch.setattr(LocalVersions, "replace", killed)
        else:
            patch.setattr(LocalVersions, "point", killed)
        with pytest.raises(Killed):
            persia.export(model, tmp_path, example=models.batch(3))
    assert persia.load_model(tmp_path).version == "v-000001"
    names = versions_of(tmp_path).names()
    assert names == ["v-000001"] + ["v-000002"] * (step == "current")
    done = persia.export(model, tmp_path, example=models.batch(3))
    assert done is not None and done.version not in names
    assert persia.load_model(tmp_path).version == done.version
    assert not list(tmp_path.glob(".tmp*"))  # what was left is removed


def test_a_place_without_room_is_an_error_with_a_name(tmp_path: Path) -> None:
    model = models.CLICKS["widedeep"](models.bags())
    (tmp_path / "file").touch()
    with pytest.raises(errors.StorageError):
        persia.export(
            model, tmp_path / "file" / "out", example=models.batch(3)
        )


class Chooses(nn.Module):
    """A forward that depends on the elements of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = models.bags()

    def forward(self, dense: Any, ids: Any) -> Any:
        out = self.bags(ids).values()
        return out if bool(out.sum() > 0) else -out


def test_what_has_no_graph_is_refused_and_changes_nothing(
    tmp_path: Path,
) -> None:
    model = Chooses()
    with pytest.raises(errors.InvalidArgument, match="Chooses"):
        persia.export(model, tmp_path / "out", example=models.batch(3))
    assert not (tmp_path / "out").exists()
    model(*models.batch(5)).sum().backward()  # as before


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"row_dtype": "int3"}, errors.InvalidArgument),
        ({"keep": 0}, errors.InvalidArgument),
        ({"example": models.batch(1)}, errors.InvalidArgument),
        ({"example": ()}, errors.InvalidArgument),
        ({"example": (torch.zeros(2, 3), object())}, errors.InvalidArgument),
    ],
)
def test_bad_arguments_are_refused(
    options: Any, error: Any, tmp_path: Path
) -> None:
    model = models.CLICKS["widedeep"](models.bags())
    given = {"example": models.batch(3)} | options
    with pytest.raises(error):
        persia.export(model, tmp_path / "out", **given)
    assert not (tmp_path / "out").exists()


def test_a_module_without_tables_is_refused(tmp_path: Path) -> None:
    with pytest.raises(errors.InvalidArgument):
        persia.export(nn.Linear(2, 2), tmp_path, example=(torch.zeros(2, 2),))


def test_a_row_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    model = models.CLICKS["widedeep"](models.bags())
    store = model.bags.store
    store.set_rows("a", torch.tensor([7]), torch.full((1, 8), 70000.0))
    persia.export(model, tmp_path, example=models.batch(3))
    with pytest.raises(errors.InvalidArgument, match="7"):
        persia.export(
            model, tmp_path, example=models.batch(3), row_dtype="fp16"
        )
    assert [p.name for p in tmp_path.glob("v-*")] == ["v-000001"]
    assert persia.load_model(tmp_path).version == "v-000001"


def test_calls_of_another_form_are_refused(tmp_path: Path) -> None:
    model = models.CLICKS["dlrm"](models.bags())
    persia.export(model, tmp_path, example=models.batch(3))
    loaded = persia.load_model(tmp_path)
    dense, ids = models.batch(4)
    for call, error in [
        ((dense,), errors.InvalidArgument),
        ((None, ids), errors.InvalidArgument),
        ((dense[:3], ids), errors.ShapeError),
        ((dense[:, :2], ids), errors.ShapeError),
        ((dense.double(), ids), errors.DtypeError),
        ((dense, {"a": torch.zeros(4).long()}), errors.MissingFeature),
    ]:
        with pytest.raises(error):
            loaded(*call)
    loaded(dense, ids)


def test_a_feature_that_needs_one_id_a_sample_has_one(tmp_path: Path) -> None:
    model = models.din()
    persia.export(model, tmp_path, example=models.history(3))
    loaded = persia.load_model(tmp_path)
    dense, ids = models.history(2)
    loaded(dense, ids)
    items, history = ids["item"][0], ids["history"]
    for lengths in [2, 0], [0, 2]:
        two = {"item": (items, torch.tensor(lengths)), "history": history[:2]}
        for call in model, loaded:
            with pytest.raises(errors.ShapeError):
                call(dense, persia.JaggedBatch.from_dict(two))


class Cuts(nn.Module):
    """Keeps the end of a history that is too long."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 4)

    def forward(self, words: Any) -> Any:
        if words.shape[1] > 10:
            words = words[:, -10:]
        return self.words(words).sum((1, 2))


@pytest.mark.parametrize(("width", "other"), [(5, 15), (15, 5)])
def test_sizes_of_another_branch_are_refused(
    width: int, other: int, tmp_path: Path
) -> None:
    model = persia.convert(Cuts(), store=models.store())

    def words(samples: int, columns: int) -> Any:
        return torch.randint(0, 20, (samples, columns))

    models.train(model, lambda: (words(9, 7),))
    persia.export(model, tmp_path, example=words(3, width))
    loaded, near = persia.load_model(tmp_path), (10 if width < 10 else 11)
    for call in words(4, width), words(1, width), words(2, near):
        torch.testing.assert_close(loaded(call), model(call).detach())
    for samples in 1, 4:
        with pytest.raises(errors.ShapeError):
            loaded(words(samples, other))


@pytest.mark.skipif(not _core.GRPC[0].isdigit(), reason="without gRPC")
def test_rows_of_servers_are_exported(tmp_path: Path) -> None:
    """They pass through a checkpoint that servers and this process see."""
    with contextlib.closing(Servers(2, checkpoints=str(tmp_path))) as servers:
        store = persia.Store(
            persia.optim.Adagrad(lr=0.1), servers=servers.text
        )
        model = models.CLICKS["widedeep"](models.bags(store))
        models.train(model, lambda: models.batch(64))
        done = persia.export(model, tmp_path / "out", example=models.batch(3))
        assert done is not None
        call = models.batch(9)
        with torch.no_grad():
            want = model.eval()(*call)
        store.close()
    torch.testing.assert_close(
        persia.load_model(tmp_path / "out")(*call), want
    )


def test_a_root_of_checkpoints_is_no_place(place: Path) -> None:
    """Neither for an export nor for a training that is published."""
    root = place / "ck"
    before = sorted(root.rglob("*"))
    data = (place / "clicks.csv", "--schema", place / "schema.yaml")
    for words in (
        ("export", root, root),
        ("train", *data, "--publish-to", root),
        ("train", *data, "--publish-to", root, "--dry-run"),
        ("train", *data, "--export-to", root),
    ):
        with pytest.raises(errors.InvalidArgument):
            conftest.call(*words)
    assert sorted(root.rglob("*")) == before
