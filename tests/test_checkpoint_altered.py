"""Files that were altered, truncated or forged change nothing."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch

from persia import errors
from persia.checkpoint import manifest as manifests
from tests.checkpoints import (
    Trained,
    assert_same,
    contents,
    fill,
    make_store,
    resign,
    snapshot,
)


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
        ({"version": 3}, errors.SchemaMismatch),
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
    (folder / "manifest.json").write_bytes(manifests.encode_manifest(document))
    with pytest.raises(error, match=r"manifest\.json"):
        store.load(tmp_path)


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/b", ".x", ""])
def test_names_with_paths_are_refused(tmp_path: Path, name: str) -> None:
    store = make_store()
    fill(store, "t", 3)
    folder = store.save(tmp_path)
    document = json.loads((folder / "manifest.json").read_text())
    document["tables"][0]["files"][0]["name"] = name
    (folder / "manifest.json").write_bytes(manifests.encode_manifest(document))
    with pytest.raises(errors.CorruptFile, match=r"manifest\.json"):
        store.load(tmp_path)
