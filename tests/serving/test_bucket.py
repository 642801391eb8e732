"""Exports in a bucket: whole or absent, mapped from a cache."""

from __future__ import annotations

import contextlib
import json
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pyarrow import fs

import persia
from persia import _core, errors
from persia.base.urls import Url
from persia.checkpoint import remote
from persia.checkpoint.far import Far
from persia.checkpoint.remote import RemoteFolder
from persia.serving import Publisher, exporting
from persia.serving import bucket as buckets
from persia.serving.bucket import BucketVersions
from persia.serving.config import named_paths
from persia.serving.folder import find_version, versions_of
from persia.serving.repository import Model, Repository
from tests.remote import Servers
from tests.serving import models
from tests.serving.conftest import call, until

pytestmark = pytest.mark.slow

Uri = Callable[[str], str]


class Killed(BaseException):
    pass


def killed(*_: Any, **__: Any) -> None:
    raise Killed


def refused(*_: Any) -> None:
    raise errors.StorageError("no answer")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache is of this test alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def put(bucket: fs.FileSystem, path: str, data: bytes) -> None:
    with bucket.open_output_stream(f"bucket/{path}") as file:
        file.write(data)


def get(bucket: fs.FileSystem, path: str) -> bytes:
    with bucket.open_input_stream(f"bucket/{path}") as file:
        return bytes(file.read())


def copy(place: Path, bucket: fs.FileSystem, root: str = "ctr") -> None:
    """The exports of a folder, as they are."""
    for path in (place / "out").rglob("*"):
        if path.is_file() and path.name != ".lock":
            name = path.relative_to(place / "out")
            put(bucket, f"{root}/{name}", path.read_bytes())


def test_a_model_is_exported_into_a_bucket(uri: Uri) -> None:
    model = models.CLICKS["widedeep"](models.bags())
    models.train(model, lambda: models.batch(16))
    root = uri("models/own")
    for version in ("v-000001", "v-000002", "v-000003"):
        done = persia.export(model, root, example=models.batch(3), keep=2)
        assert done is not None and done.version == version
    assert versions_of(root).names() == ["v-000002", "v-000003"]
    asked = models.batch(9)
    with torch.no_grad():
        want = model.eval()(*asked)
    assert isinstance(done.path, str)
    for loaded in (
        persia.load_model(root),
        persia.load_model(root, "v-000002"),
        persia.load_model(done.path),  # a version by its own URL
    ):
        torch.testing.assert_close(loaded(*asked), want)
        again = pickle.loads(pickle.dumps(loaded))
        torch.testing.assert_close(again(*asked), want)
        assert again.folder == loaded.folder
    with pytest.raises(errors.StorageError):
        persia.load_model(root, "v-000001")
    with pytest.raises(errors.StorageError):
        persia.load_model(uri("models/nothing"))
    with pytest.raises(errors.InvalidArgument):
        persia.load_model("s3://key:secret@bucket/models")


@pytest.mark.skipif(not _core.GRPC[0].isdigit(), reason="without gRPC")
def test_rows_of_servers_are_exported(uri: Uri) -> None:
    """They pass through a checkpoint in the bucket."""
    with (
        contextlib.closing(Far(Url(uri("")))) as far,
        contextlib.closing(Servers(2, far=far)) as servers,
    ):
        store = persia.Store(
            persia.optim.Adagrad(lr=0.1), servers=servers.text
        )
        model = models.CLICKS["widedeep"](models.bags(store))
        models.train(model, lambda: models.batch(64))
        persia.export(model, uri("own"), example=models.batch(3))
        asked = models.batch(9)
        with torch.no_grad():
            want = model.eval()(*asked)
        store.close()
    torch.testing.assert_close(persia.load_model(uri("own"))(*asked), want)


def test_packets_go_through_a_bucket(uri: Uri, bucket: fs.FileSystem) -> None:
    store = models.store()
    model = models.CLICKS["widedeep"](models.bags(store))
    models.train(model, lambda: models.batch(16))
    root = uri("models/fresh")
    chains = set()
    for _ in range(2):
        with Publisher(
            model, root, example=models.batch(3), every=1e-3
        ) as publisher:
            loaded = persia.load_model(root)
            for _ in range(2):
                models.train(model, lambda: models.batch(16), 1)
                store.erase("a", [1])
                publisher.flush()
                assert publisher.publish()
            publisher.flush()
            assert loaded.catch_up() == 2
            chains.add(publisher.place.chain)
        asked = models.batch(9)
        with torch.no_grad():
            want = model.eval()(*asked)
        torch.testing.assert_close(loaded(*asked), want)
        old = persia.load_model(root, "v-000001")
        assert not bool(old.has_rows("a", torch.tensor([1])))
    chosen = fs.FileSelector("bucket/models/fresh/deltas", recursive=True)
    files = [i for i in bucket.get_file_info(chosen) if i.is_file]
    assert len(chains) == 2 and len(files) == 2  # those of the last one


def test_commands_take_a_bucket(
    place: Path, tmp_path: Path, uri: Uri, bucket: fs.FileSystem
) -> None:
    root = uri("ctr")
    call("export", place / "ck", root, "--dry-run")
    assert versions_of(root).names() == []
    for dtype in ("fp32", "int8"):
        found = json.loads(
            call("export", place / "ck", root, "--row-dtype", dtype, "--json")
        )
    assert found["version"] == "v-000002"
    data = place / "clicks.csv"
    for path in (root, uri("ctr/v-000002")):
        assert call("evaluate", path, data, "--json") == call(
            "evaluate", place / "out", data, "--json"
        )
    about = json.loads(call("model", "inspect", root, "--json"))
    assert about["version"] == "v-000002"
    call("model", "verify", root)
    call("model", "diff", root, "v-000001", "v-000002")
    call("model", "use", root, "v-000001")
    with pytest.raises(errors.StorageError):
        call("model", "use", root, "v-000003")
    assert persia.load_model(root).version == "v-000001"
    rows = "ctr/v-000002/rows-0000.safetensors"
    damaged = bytearray(get(bucket, rows))
    damaged[-30] ^= 1
    put(bucket, rows, bytes(damaged))
    with pytest.raises(errors.CorruptFile):  # not what the cache has
        call("model", "verify", uri("ctr/v-000002"))
    call("model", "verify", root)
    put(bucket, rows, bytes(damaged[:-1]))
    listed = json.loads(call("model", "ls", root, "--json"))
    assert [one["current"] for one in listed] == [True, False]
    assert ["damaged" in one for one in listed] == [False, True]


@pytest.mark.parametrize("step", ["file", "manifest", "current"])
def test_an_upload_that_breaks_off_is_not_there(
    step: str, uri: Uri, bucket: fs.FileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a process that is killed at each step leaves it."""
    root = uri("models/own")
    model = models.CLICKS["widedeep"](models.bags())
    graph = exporting.trace_model(model, models.batch(3))
    monkeypatch.setattr(exporting, "trace_model", lambda *_: graph)
    persia.export(model, root, example=models.batch(3))
    with monkeypatch.context() as patch:
        if step == "file":
            send, done = RemoteFolder.send, []

            def some(*args: Any) -> None:
                done.append(send(*args))
                if len(done) == 3:
                    raise Killed

            patch.setattr(remote, "TRANSFERS", 1)
            patch.setattr(RemoteFolder, "send", some)
        elif step == "manifest":
            patch.setattr(buckets, "encode_manifest", killed)
        else:
            patch.setattr(BucketVersions, "point", killed)
        with pytest.raises(Killed):
            persia.export(model, root, example=models.batch(3))
    left = bucket.get_file_info(fs.FileSelector("bucket/models/own"))
    assert "v-000002" in [one.base_name for one in left]
    names = versions_of(root).names()
    assert names == ["v-000001"] + ["v-000002"] * (step == "current")
    assert persia.load_model(root).version == "v-000001"
    put(bucket, "models/own/v-000002/left.safetensors", b"of the killed one")
    done = persia.export(model, root, example=models.batch(3))
    assert done is not None and done.version not in names
    assert persia.load_model(root).version == done.version
    if step != "current":  # what was left is removed
        with pytest.raises(FileNotFoundError):
            get(bucket, "models/own/v-000002/left.safetensors")


def test_a_damaged_file_is_found_before_it_is_mapped(
    place: Path, uri: Uri, bucket: fs.FileSystem
) -> None:
    copy(place, bucket)
    manifest = find_version(uri("ctr")).manifest
    for name in [*(one.name for one in manifest.files), "manifest.json"]:
        path = f"ctr/v-000002/{name}"
        whole = get(bucket, path)
        for damaged in (
            whole[:-1],
            whole[:-1] + bytes([whole[-1] ^ 1]),
            whole + b"x",
            b"",
        ):
            put(bucket, path, damaged)
            with pytest.raises(errors.CorruptFile):
                persia.load_model(uri("ctr"))
        put(bucket, path, whole)
    persia.load_model(uri("ctr"))
    for text in (b"v-000009\n", b"../v-000001\n", b""):
        put(bucket, "ctr/CURRENT", text)
        with pytest.raises(errors.CorruptFile):
            persia.load_model(uri("ctr"))


def test_the_version_before_answers_on(
    place: Path, tmp_path: Path, uri: Uri, bucket: fs.FileSystem
) -> None:
    copy(place, bucket)
    versions = versions_of(uri("ctr"))
    versions.use("v-000001")
    assert named_paths((uri("ctr"),)) == {"ctr": uri("ctr")}
    model = Model("ctr", uri("ctr"), 2, tmp_path / "kept")
    assert model.load() == "v-000001"
    rows = get(bucket, "ctr/v-000002/rows-0001.safetensors")
    put(bucket, "ctr/v-000002/rows-0001.safetensors", rows[:-8])
    versions.use("v-000002")
    with pytest.raises(errors.CorruptFile):
        model.follow()
    assert model.current.version == "v-000001"
    put(bucket, "ctr/v-000002/rows-0001.safetensors", rows)
    assert model.follow() == "v-000002"
    assert model.follow() is None
    assert model.load("v-000001", pin=True) == "v-000001"
    for left in ("kept", "cache"):
        assert not list((tmp_path / left).rglob(".tmp*"))
    assert not (tmp_path / "cache").exists()


def test_a_copy_that_is_damaged_is_fetched_again(
    place: Path, tmp_path: Path, uri: Uri, bucket: fs.FileSystem
) -> None:
    """The version before answers until the process starts again."""
    copy(place, bucket)
    model = Model("ctr", uri("ctr"), 2, tmp_path / "kept")
    assert model.load() == "v-000002"
    rows = model.current.folder / "rows-0000.safetensors"
    data = bytearray(rows.read_bytes())
    data[-30] ^= 1
    rows.write_bytes(data)
    with pytest.raises(errors.CorruptFile):
        model.check_files()
    assert model.current.version == "v-000001"
    again = Model("ctr", uri("ctr"), 2, tmp_path / "kept")
    assert again.load() == "v-000002"
    again.check_files()
    assert again.current.version == "v-000002"


def test_the_bucket_is_away_and_comes_back(
    place: Path,
    tmp_path: Path,
    uri: Uri,
    bucket: fs.FileSystem,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A process that serves needs it for new versions alone."""
    copy(place, bucket)
    one = Repository({"m": uri("ctr")}, 2, 0.05, tmp_path)
    try:
        current = get(bucket, "ctr/CURRENT")
        bucket.delete_file("bucket/ctr/CURRENT")
        model, tries = one.models["m"], threading.Event()
        follow = model.follow

        def watched() -> str | None:
            try:
                return follow()
            except errors.StorageError:
                tries.set()
                raise

        model.follow = watched  # type: ignore[method-assign]
        assert tries.wait(60)
        assert model.current.version == "v-000002"
        assert model.names() == ["v-000001", "v-000002"]
        with monkeypatch.context() as patch:
            patch.setattr(BucketVersions, "names", refused)
            assert model.names() == ["v-000002"]
        put(bucket, "ctr/CURRENT", current.replace(b"2", b"1"))
        while model.current.version != "v-000001":
            threading.Event().wait(0.02)
    finally:
        one.close()


def test_a_model_waits_for_its_first_version(
    place: Path, tmp_path: Path, uri: Uri, bucket: fs.FileSystem
) -> None:
    one = Repository({"m": uri("ctr")}, 2, 0.05, tmp_path)
    try:
        assert not one.is_ready
        put(bucket, "ctr/deltas/chain/1", b"")
        assert versions_of(uri("ctr")).is_to_come
        call("export", place / "ck", uri("ctr"))
        until(lambda: one.is_ready)
        assert one.model("m").current.version == "v-000001"
    finally:
        one.close()
    put(bucket, "ck/LATEST", b"step-1")
    with pytest.raises(errors.StorageError):
        Repository({"m": uri("ck")}, 2, 0.05, tmp_path)


def test_the_cache_keeps_what_was_asked_for_last(
    place: Path, tmp_path: Path, uri: Uri, bucket: fs.FileSystem
) -> None:
    call("export", place / "ck", uri("ctr"))
    call("export", place / "ck", uri("ctr"))
    copy(place, bucket, "other")
    kept = tmp_path / "kept"
    folders = [
        persia.load_model(uri("ctr"), name, cache=kept).folder
        for name in ("v-000001", "v-000002", "v-000001")
    ]
    assert folders[0] == folders[2]
    rows = folders[0] / "rows-0000.safetensors"
    time = rows.stat().st_mtime_ns
    left = folders[0].parent / ".tmp-0123"  # of a killed process
    left.mkdir()
    call("export", place / "ck", uri("ctr"))
    third = persia.load_model(uri("ctr"), cache=kept)
    assert rows.stat().st_mtime_ns == time
    assert not folders[1].exists() and not left.exists()
    assert third.folder.exists()
    persia.load_model(uri("other"), cache=kept)
    persia.load_model(uri("other/v-000002"), cache=kept)
    assert third.folder.exists() and folders[0].exists()
    assert len([p for p in kept.rglob("v-*") if p.is_dir()]) == 3
    # A version is known by what it holds, not by its name.
    bucket.delete_dir("bucket/ctr/v-000003")
    call("export", place / "ck", uri("ctr"), "--row-dtype", "int8")
    other = persia.load_model(uri("ctr"), cache=kept)
    assert other.version == "v-000003" and other.folder != third.folder
    # A file that was cut off in the cache is fetched again.
    rows = other.folder / "rows-0000.safetensors"
    rows.write_bytes(rows.read_bytes()[:-8])
    again = persia.load_model(uri("ctr"), cache=kept)
    again.check_rows()
    (tmp_path / "file").write_text("")
    with pytest.raises(errors.StorageError):
        persia.load_model(uri("ctr"), cache=tmp_path / "file")


def test_the_end_breaks_a_fetch_off(
    place: Path, uri: Uri, bucket: fs.FileSystem, cache: Path
) -> None:
    """A process that ends waits for no download, and leaves no half one."""
    copy(place, bucket)
    one = Repository({"m": uri("ctr")}, 1, 0)
    kept = [p for p in cache.rglob("*") if p.is_dir()]
    versions_of(uri("ctr")).use("v-000001")
    one.end()
    with pytest.raises(errors.Closed):
        one.models["m"].load()
    assert one.models["m"].current.version == "v-000002"
    assert [p for p in cache.rglob("*") if p.is_dir()] == kept
    one.close()


def test_a_process_serves_a_bucket(
    place: Path, tmp_path: Path, uri: Uri, bucket: fs.FileSystem
) -> None:
    pytest.importorskip("uvicorn", reason="persia[serve] is not installed")
    copy(place, bucket)
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "persia", "serve", "model"),
            *(f"ctr={uri('ctr')}", "--port", "0", "--threads", "1"),
            *("--poll", "0.05", "--cache", str(tmp_path / "kept")),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    try:
        lines = iter(process.stdout)
        assert any("version v-000002 answers" in line for line in lines)
        assert any("serving 1 model" in line for line in lines)
        versions_of(uri("ctr")).use("v-000001")
        assert any("version v-000001 answers" in line for line in lines)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
