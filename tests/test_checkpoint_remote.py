"""Checkpoints on S3, as a local server has it."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pyarrow import fs

import persia
from persia import _core, checkpoint, errors
from persia.checkpoint import files, remote
from persia.distributed.server import ServeConfig, Server
from persia.serving.folder import versions_of
from persia.train.roots import best_root
from tests.checkpoints import (
    Trained,
    assert_same_rows,
    contents,
    fill,
    make_store,
)
from tests.s3 import SECRET


def listing(bucket: fs.FileSystem, path: str) -> list[str]:
    chosen = fs.FileSelector(f"bucket/{path}", recursive=True)
    return sorted(
        info.path.removeprefix(f"bucket/{path}/")
        for info in bucket.get_file_info(chosen)
        if info.type == fs.FileType.File
    )


def test_round_trip(
    uri: Callable[[str], str], bucket: fs.FileSystem, tmp_path: Path
) -> None:
    saved = Trained("adam", "bf16")
    saved.train(0, 3)
    folder = saved.store.save(
        uri("deep/out"), **saved.state(), extra={"epoch": 3}
    )
    assert folder == uri("deep/out/step-3")
    losses = saved.train(3, 6)
    assert checkpoint.read_extra(uri("deep/out")) == {"epoch": 3}
    for path in (uri("deep/out"), uri("deep/out/"), folder):
        resumed = Trained("adam", "bf16")
        found = resumed.store.load(path, **resumed.state())
        assert found.step == 3
        assert found.path in (folder, path)
        assert resumed.train(3, 6) == losses
        for table in ("u", "i"):
            assert_same_rows(saved.store, resumed.store, table)
    # A copy on a local file system is a checkpoint, too.
    (tmp_path / "copy").mkdir()
    fs.copy_files(
        "bucket/deep/out/step-3",
        str(tmp_path / "copy"),
        source_filesystem=bucket,
    )
    copied = Trained("adam", "bf16")
    copied.store.load(tmp_path / "copy", **copied.state())
    assert copied.train(3, 6) == losses


def test_keep_and_steps(
    uri: Callable[[str], str], bucket: fs.FileSystem
) -> None:
    store = make_store()
    for step in (5, 6, 7):
        store.clear()
        fill(store, "t", step)
        store.save(uri("out"), step=step, keep=2)
    root = files.root_of(uri("out"))
    assert root.steps() == [6, 7]
    assert {name.split("/")[0] for name in listing(bucket, "out")} == {
        "LATEST",
        "step-6",
        "step-7",
    }
    other = make_store()
    assert other.load(uri("out")).rows == {"t": 7}
    assert other.load(uri("out"), step=6).rows == {"t": 6}
    with pytest.raises(errors.StorageError, match=r"bucket/out.*6, 7") as e:
        other.load(uri("out"), step=5)
    assert SECRET not in str(e.value)
    with pytest.raises(errors.StorageError, match="no checkpoint"):
        other.load(uri("nothing"))


def test_a_root_within_a_step_of_another(
    uri: Callable[[str], str], bucket: fs.FileSystem
) -> None:
    """It is refused, and one that was there before is not removed."""
    store = make_store()
    store.save(uri("out"), step=1)
    before = listing(bucket, "out")
    for inner in ("out/step-1", "out/step-1/x", "out/step-2"):
        with pytest.raises(errors.StorageError):
            store.save(uri(inner), step=5)
    assert listing(bucket, "out") == before
    store.save(uri("other/step-2"), step=7)
    before = listing(bucket, "other")
    for step in (1, 2):
        with pytest.raises(errors.StorageError):
            store.save(uri("other"), step=step)
    assert listing(bucket, "other") == before


def test_the_same_step_is_replaced(
    uri: Callable[[str], str], bucket: fs.FileSystem
) -> None:
    store = make_store()
    fill(store, "t", 3)
    store.save(uri("out"), step=1)
    before = listing(bucket, "out")
    store.clear()
    fill(store, "t", 5)
    store.save(uri("out"), step=1)
    after = listing(bucket, "out")
    assert set(before) & set(after) == {"LATEST", "step-1/manifest.json"}
    assert len(before) == len(after)
    assert make_store().load(uri("out")).rows == {"t": 5}


@pytest.mark.parametrize("same_step", [False, True])
def test_each_step_of_an_upload_may_fail(
    uri: Callable[[str], str],
    bucket: fs.FileSystem,
    monkeypatch: pytest.MonkeyPatch,
    same_step: bool,
) -> None:
    """Every file in turn: old or new, never a mixture."""
    store = make_store()
    fill(store, "t", 1)
    store.save(uri("out"), step=1)
    calls = fail_at = 0

    class Failing:
        """The file system, but one stream cannot be opened."""

        def __init__(self, real: fs.FileSystem) -> None:
            self._real = real

        def __getattr__(self, name: str) -> Any:
            return getattr(self._real, name)

        def open_output_stream(self, path: str) -> Any:
            nonlocal calls
            calls += 1
            if calls == fail_at:
                raise OSError(5, "injected")
            return self._real.open_output_stream(path)

    init = remote.RemoteRoot.__init__

    def failing(self: Any, text: str) -> None:
        init(self, text)
        self._fs = Failing(self._fs)

    monkeypatch.setattr(remote.RemoteRoot, "__init__", failing)
    rows = {1}
    while True:
        fail_at += 1
        calls = 0
        store.clear()
        fill(store, "t", 10 + fail_at)
        saved = True
        try:
            step = 1 if same_step else 1 + fail_at
            store.save(uri("out"), step=step)
        except errors.StorageError as error:
            text = str(error)
            saved = False
        assert saved or ("injected" in text and SECRET not in text)
        other = make_store()
        (n,) = other.load(uri("out")).rows.values()
        assert n in ({10 + fail_at} if saved else rows | {10 + fail_at})
        rows = {n}
        if saved:
            break
    assert fail_at == 5  # rows, dense, manifest, LATEST
    folders = {name.split("/")[0] for name in listing(bucket, "out")}
    whole = {f"step-{step}" for step in files.root_of(uri("out")).steps()}
    assert folders == whole | {"LATEST"}


def test_altered_files_are_named(
    uri: Callable[[str], str], bucket: fs.FileSystem
) -> None:
    store = make_store()
    fill(store, "t", 30)
    store.save(uri("out"))
    before = contents(store, "t")
    for name in listing(bucket, "out"):
        with bucket.open_input_stream(f"bucket/out/{name}") as file:
            good = file.read()
        bad = good[:-1]
        if name == "LATEST":
            bad = b"step"
        with bucket.open_output_stream(f"bucket/out/{name}") as file:
            file.write(bad)
        with pytest.raises(errors.CorruptFile, match=name.split("/")[-1]):
            store.load(uri("out"))
        with bucket.open_output_stream(f"bucket/out/{name}") as file:
            file.write(good)
        for a, b in zip(contents(store, "t"), before):
            assert torch.equal(a, b)
    store.load(uri("out"))


def test_storage_that_is_not_there(
    uri: Callable[[str], str], endpoint: str
) -> None:
    store = make_store()
    elsewhere = uri("out").replace("://bucket", "://other")
    with pytest.raises(errors.StorageError, match="s3://other/out") as e:
        store.save(elsewhere)
    assert SECRET not in str(e.value)
    with pytest.raises(errors.StorageError, match="s3://other/out"):
        store.load(elsewhere)
    # Before hours of training, or a server without its rows.
    for make in (files.root_of, versions_of):
        with pytest.raises(errors.StorageError, match="s3://other/out"):
            files.check(make(elsewhere))
    server = Server(
        ServeConfig(checkpoints=elsewhere, restore="job", or_empty=True)
    )
    with contextlib.closing(server), pytest.raises(errors.StorageError):
        server.restore()
    for bad in ("s3://bucket", "s3://bucket/"):
        with pytest.raises(errors.InvalidArgument, match="no folder"):
            store.save(f"{bad}?scheme=http&endpoint_override={endpoint}")
    with pytest.raises(errors.StorageError, match="nosuch://x/y"):
        store.save("nosuch://x/y")
    with pytest.raises(errors.InvalidArgument, match="s3:"):
        store.save(Path("s3://bucket/out"))


def test_a_uri_with_a_key_is_refused() -> None:
    store = make_store()
    place = f"s3://me:{SECRET}@bucket/out"
    for use in (store.save, store.load):
        with pytest.raises(errors.InvalidArgument, match="AWS_") as e:
            use(place)
        assert SECRET not in str(e.value)


def test_file_uris_are_paths(tmp_path: Path) -> None:
    store = make_store()
    fill(store, "t", 4)
    root = tmp_path / "a b"
    assert store.save(root.as_uri()) == root / "step-0"
    assert make_store().load(root.as_uri()).rows == {"t": 4}


def test_files_are_made_in_the_folder_of_the_environment(
    uri: Callable[[str], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That is where ranks of several machines can write them."""
    monkeypatch.setenv("PERSIA_CHECKPOINTS", str(tmp_path))
    store = make_store()
    fill(store, "t", 4)
    seen: list[str] = []
    ask = _core.ckpt_snapshot

    def spy(*args: Any) -> Any:
        seen.extend(os.listdir(tmp_path / "out"))
        return ask(*args)

    monkeypatch.setattr(_core, "ckpt_snapshot", spy)
    store.save(uri("deep/out"))
    assert any(name.startswith(".tmp-") for name in seen)
    assert os.listdir(tmp_path / "out") == [".lock"]
    assert persia.Store  # the package was imported without S3 in the way
    assert make_store().load(uri("deep/out")).rows == {"t": 4}
    assert make_store().load(uri("deep/out/step-0")).rows == {"t": 4}
    assert os.listdir(tmp_path) == ["out"]


def test_a_save_leaves_what_another_is_writing(
    uri: Callable[[str], str],
    bucket: fs.FileSystem,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PERSIA_CHECKPOINTS", str(tmp_path))
    store = make_store()
    fill(store, "t", 4)
    with files.root_of(uri("deep/out")).writing():
        with bucket.open_output_stream("bucket/deep/out/step-1/part") as file:
            file.write(b"half")
        with pytest.raises(errors.StorageError, match="/out "):
            store.save(uri("deep/out"), step=2)
        assert listing(bucket, "deep/out") == ["step-1/part"]
    store.save(uri("deep/out"), step=2)
    assert not any("step-1" in name for name in listing(bucket, "deep/out"))


@pytest.mark.parametrize(
    "name", ["dt=1/a b", "a%20b", "100%", "a#b", 'ü"日', "run=1?/x"]
)
def test_roots_of_odd_names(
    uri: Callable[[str], str], bucket: fs.FileSystem, name: str
) -> None:
    store = make_store()
    fill(store, "t", 3)
    folder = store.save(uri(f"{name}/out"), step=1)
    assert "step-1/manifest.json" in listing(bucket, f"{name}/out")
    for given in (uri(f"{name}/out"), folder, str(uri(f"{name}/out/step-1"))):
        assert make_store().load(given).rows == {"t": 3}
    best = best_root(uri(f"{name}/out"))
    make_store().save(best, step=1)
    assert "step-1/manifest.json" in listing(bucket, f"{name}/out-best")


def test_a_root_that_was_saved_by_its_quoted_name(
    uri: Callable[[str], str],
) -> None:
    store = make_store()
    fill(store, "t", 3)
    store.save(uri("my run/out"), step=1)
    assert make_store().load(uri("my%20run/out")).rows == {"t": 3}


class Objects(fs.FSSpecHandler):  # type: ignore[misc]
    """An object store without folders: those that no empty object marks are
    not listed, and their names are refused."""

    refuses = False

    def get_type_name(self) -> str:
        return "gcs"

    def get_file_info_selector(self, selector: fs.FileSelector) -> Any:
        found = super().get_file_info_selector(selector)
        return [info for info in found if info.type == fs.FileType.File]

    def create_dir(self, path: str, recursive: bool) -> None:
        raise OSError("the name of an object has empty segments")

    def delete_file(self, path: str) -> None:
        if self.refuses:
            raise OSError("AWS Error ACCESS_DENIED during DeleteObject")
        super().delete_file(path)


@pytest.fixture
def objects(monkeypatch: pytest.MonkeyPatch) -> str:
    fsspec = pytest.importorskip("fsspec")
    system = fs.PyFileSystem(Objects(fsspec.filesystem("memory")))
    monkeypatch.setattr(
        remote, "system_of", lambda url, path: (system, f"/objects{path}")
    )
    return f"gs://bucket/{uuid.uuid4().hex}"


def test_a_store_without_folders(objects: str) -> None:
    store = make_store()
    fill(store, "t", 3)
    for step in (5, 6, 7):
        store.save(objects, step=step, keep=2)
    assert files.root_of(objects).steps() == [6, 7]
    assert make_store().load(objects, step=6).rows == {"t": 3}


def test_a_store_that_removes_nothing(
    objects: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint is whole, so its saving is a success with a warning."""
    store = make_store()
    fill(store, "t", 3)
    store.save(objects, step=1, keep=1)
    monkeypatch.setattr(Objects, "refuses", True)
    with pytest.warns(UserWarning, match="ACCESS_DENIED"):
        store.save(objects, step=2, keep=1)
    assert files.root_of(objects).steps() == [1, 2]
    assert make_store().load(objects).step == 2
