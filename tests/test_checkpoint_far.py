"""Servers that have a bucket in place of a folder."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyarrow import fs

from persia import _core, errors
from persia.base.urls import Url
from persia.checkpoint import files, saving
from persia.checkpoint.far import Far
from persia.checkpoint.remote import RemoteRoot
from tests.checkpoints import (
    Trained,
    assert_same_rows,
    contents,
    fill,
    make_store,
)
from tests.cli.test_saved import call
from tests.remote import Servers
from tests.test_checkpoint_remote import listing

if not _core.GRPC[0].isdigit():
    pytest.skip("built without gRPC", allow_module_level=True)

Uri = Callable[[str], str]


@pytest.fixture(autouse=True)
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The temporary folder of this process: at the end it is empty."""
    folder = tmp_path / "local"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.delenv("PERSIA_CHECKPOINTS", raising=False)
    yield folder
    left = {path.name for path in folder.iterdir()}
    assert left <= {"torchinductor_root"}


@contextlib.contextmanager
def servers(n: int, url: str) -> Iterator[Servers]:
    far = Far(Url(url))
    with (
        contextlib.closing(far),
        contextlib.closing(Servers(n, far=far)) as made,
    ):
        yield made


def test_round_trip(uri: Uri, bucket: fs.FileSystem) -> None:
    """Any number of servers, and a store of one process, read it."""
    with servers(2, uri("deep")) as two:
        saved = Trained("adam", "bf16", servers=two.addresses)
        saved.train(0, 3)
        folder = saved.store.save(uri("deep/out"), **saved.state())
        assert folder == uri("deep/out/step-3")
        losses = saved.train(3, 6)
        for n in (1, 2, 3):
            with servers(n, uri("deep")) as others:
                again = Trained("adam", "bf16", servers=others.addresses)
                path = uri("deep/out") if n < 3 else folder
                found = again.store.load(path, **again.state())
                assert found.step == 3
                assert again.train(3, 6) == losses
                for table in ("u", "i"):
                    assert_same_rows(saved.store, again.store, table)
                again.store.close()
        alone = Trained("adam", "bf16")
        alone.store.load(uri("deep/out"), **alone.state())
        assert alone.train(3, 6) == losses
        saved.store.close()
    verified = json.loads(
        call("checkpoint", "verify", uri("deep/out"), "--json")
    )
    assert verified["files"] and not verified["damaged"]
    found = listing(bucket, "deep/out")
    assert "step-3/manifest.json" in found
    assert sum("-shard-1-of-2-table-0-00000" in name for name in found) == 1
    assert not any(".proof" in name for name in found)


def test_keep_and_replace(uri: Uri, bucket: fs.FileSystem) -> None:
    with servers(2, uri("deep")) as two:
        store = make_store(servers=two.addresses)
        for step in (5, 6, 7, 7):
            store.clear()
            fill(store, "t", step)
            store.save(uri("deep/out"), step=step, keep=2)
        before = listing(bucket, "deep/out")
        assert {name.split("/")[0] for name in before} == {
            "LATEST",
            "step-6",
            "step-7",
        }
        # Two files of rows, the dense part and the manifest.
        assert sum(name.startswith("step-7/") for name in before) == 4
        store.clear()
        assert store.load(uri("deep/out")).rows == {"t": 7}
        # What was erased is not in what is saved after it.
        ids = store.ids("t")
        store.erase("t", ids[:3])
        store.save(uri("deep/out"), step=8)
        store.clear()
        assert store.load(uri("deep/out")).rows == {"t": 4}
        assert store.ids("t").sort().values.equal(ids[3:].sort().values)
        store.close()


def test_the_step_is_the_number_of_updates(uri: Uri) -> None:
    with servers(2, uri("deep")) as two:
        job = Trained("adam", "fp32", servers=two.addresses)
        job.train(0, 2)
        assert job.store.save(uri("deep/out")) == uri("deep/out/step-2")
        job.store.close()


@pytest.mark.parametrize("same_step", [False, True])
def test_each_request_of_a_server_may_fail(
    uri: Uri,
    bucket: fs.FileSystem,
    monkeypatch: pytest.MonkeyPatch,
    same_step: bool,
) -> None:
    """Old or new, never a mixture, and the next save leaves nothing of it."""
    calls = fail_at = 0
    whole = RemoteRoot.send

    def send(self: RemoteRoot, *args: Any, **more: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == fail_at:
            raise OSError("AWS Error SLOW_DOWN during PutObject: 503")
        whole(self, *args, **more)

    monkeypatch.setattr(RemoteRoot, "send", send)
    with servers(2, uri("deep")) as two:
        store = make_store(
            "adagrad",
            ("t", 4, "fp32"),
            ("u", 4, "bf16"),
            servers=two.addresses,
        )
        fill(store, "t", 9)
        fill(store, "u", 9)
        store.save(uri("deep/out"), step=1)
        assert calls == 5  # two tables on two servers, and the dense part
        for fail_at in range(1, 6):
            calls = 0
            fill(store, "t", 1, seed=fail_at)
            with pytest.raises(errors.StorageError, match="SLOW_DOWN"):
                store.save(uri("deep/out"), step=1 if same_step else 2)
            assert files.root_of(uri("deep/out")).steps() == [1]
            again = make_store("adagrad", ("t", 4, "fp32"), ("u", 4, "bf16"))
            assert again.load(uri("deep/out")).rows == {"t": 9, "u": 9}
        fail_at = 0
        store.save(uri("deep/out"), step=1 if same_step else 3)
        step = "step-1" if same_step else "step-3"
        found = listing(bucket, "deep/out")
        assert sum(name.startswith(step) for name in found) == 6
        assert not any(name.startswith("step-2") for name in found)
        store.close()


def test_a_restore_that_fails_changes_nothing(
    uri: Uri, bucket: fs.FileSystem
) -> None:
    with servers(2, uri("deep")) as two:
        store = make_store(servers=two.addresses)
        fill(store, "t", 100)
        store.save(uri("deep/out"), step=1)
        store.clear()
        fill(store, "t", 7, seed=1)
        before = contents(store, "t")
        (name,) = (
            name
            for name in listing(bucket, "deep/out")
            if "shard-1-of-2-table-0" in name
        )
        path = f"bucket/deep/out/{name}"
        with bucket.open_input_stream(path) as file:
            data = bytearray(file.read())
        with bucket.open_output_stream(path) as file:
            file.write(data[:-8] + bytes(8))
        with pytest.raises(errors.CorruptFile, match=r"shard-1-of-2"):
            store.load(uri("deep/out"))
        bucket.delete_file(path)
        with pytest.raises(errors.StorageError, match=r"shard-1-of-2"):
            store.load(uri("deep/out"))
        for x, y in zip(before, contents(store, "t")):
            assert x.equal(y)
        store.close()


def test_servers_of_another_place(
    uri: Uri, bucket: fs.FileSystem, tmp_path: Path
) -> None:
    """It is found out before the training, and the text has the remedy."""
    with servers(1, uri("elsewhere")) as one:
        store = make_store(servers=one.addresses)
        for call_ in (
            lambda: saving.check(store, uri("deep/out")),
            lambda: store.save(uri("deep/out")),
        ):
            with pytest.raises(errors.StorageError) as caught:
                call_()
            assert "checkpoints=s3://bucket/deep" in str(caught.value)
        assert files.root_of(uri("deep/out")).steps() == []
        with pytest.raises(errors.StorageError, match="checkpoints"):
            store.save(tmp_path / "out")
        store.close()
    with contextlib.closing(Servers(1, checkpoints=str(tmp_path))) as folder:
        store = make_store(servers=folder.addresses)
        with pytest.raises(errors.StorageError, match="checkpoints=s3://"):
            store.save(uri("deep/out"))
        store.close()


def test_a_check_leaves_nothing(uri: Uri, bucket: fs.FileSystem) -> None:
    with servers(2, uri("deep")) as two:
        store = make_store(servers=two.addresses)
        fill(store, "t", 100)
        saving.check(store, uri("deep/out"))
        store.save(uri("deep/out"), step=1)
        assert not any(
            name.startswith(".tmp-") for name in listing(bucket, "deep/out")
        )
        store.close()


def test_what_a_killed_process_has_left(uri: Uri, local: Path) -> None:
    """Is removed by the next one, and that of one which lives is not."""
    (local / "persia-files-of-a-dead-one" / ".tmp-x").mkdir(parents=True)
    first = Far(Url(uri("deep")))
    (mine,) = local.glob("persia-files-*")
    assert "dead" not in mine.name
    second = Far(Url(uri("deep")))
    assert mine.exists()
    first.close()
    second.close()
