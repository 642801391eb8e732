"""Folders of checkpoints: whole or not there."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import persia
from persia import checkpoint, errors
from persia.checkpoint import files, saving, shards
from persia.checkpoint.dense import Dense
from tests.checkpoints import (
    assert_same,
    contents,
    counting_store,
    fill,
    make_store,
)
from tests.ready import Ready

CHILD = """
import sys, torch, persia
from tests.checkpoints import counting_store
store, push = counting_store()
if sys.argv[2] == "resume":
    store.load(sys.argv[1])
print("ready", flush=True)
while True:
    push()
    store.save(sys.argv[1], keep=2, extra={"pushes": store.updates})
"""


@pytest.mark.slow
def test_killed_while_saving(tmp_path: Path) -> None:
    root = tmp_path / "root"
    repository = Path(persia.__file__).parents[1]
    rng = random.Random(1)
    leftovers = 0
    last = 0
    for turn in range(4):
        child = Ready(
            *("-c", CHILD, str(root), "resume" if turn else "new"),
            cwd=repository,
            stdout=subprocess.PIPE,
        )
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
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
        assert len(files.LocalRoot(root).steps()) <= 2
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


def test_killed_between_the_two_renames_of_a_save(tmp_path: Path) -> None:
    """The folder that was there has another name: it is found, and the next
    save gives it back."""
    store, push = counting_store()
    for _ in range(2):
        push()
        folder = Path(store.save(tmp_path))
    folder.rename(tmp_path / "step-2.previous")
    root = files.LocalRoot(tmp_path)
    assert root.steps() == [1, 2]
    other, _ = counting_store()
    assert other.load(tmp_path).step == 2
    assert other.load(tmp_path, step=2).step == 2
    assert other.updates == 2
    with root.writing():
        pass
    assert folder.is_dir()
    shutil.copytree(folder, tmp_path / "step-2.previous")
    (tmp_path / "notes.previous").mkdir()
    push()
    store.save(tmp_path, step=2)
    assert root.steps() == [1, 2]
    assert other.load(tmp_path).rows == {"a": 2000, "b": 2000}
    assert other.updates == 3
    assert sorted(p.name for p in tmp_path.glob("*.previous")) == [
        "notes.previous"
    ]


def test_a_file_system_that_cannot_exchange_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NFS: only plain renames, onto names that are free."""
    plain = Path.rename

    def rename(path: Path, to: Path) -> Path:
        assert not to.is_dir()
        return plain(path, to)

    monkeypatch.setattr(Path, "rename", rename)
    store, push = counting_store()
    for _ in range(3):
        push()
        store.save(tmp_path, step=1)
    other, _ = counting_store()
    other.load(tmp_path)
    assert other.updates == 3


def test_full_disk(tmp_path: Path) -> None:
    """A write that fails in C: an error, and the checkpoint before stays."""
    store = make_store()
    fill(store, "t", 3)
    first = store.save(tmp_path, step=1)
    fill(store, "t", 5000, seed=1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(errors.StorageError, match=r"\.safetensors"):
            store.save(tmp_path, step=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert files.find(files.LocalRoot(tmp_path), None).folder == first
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        ".lock",
        "LATEST",
        "step-1",
    ]


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
    assert sorted(files.LocalRoot(tmp_path).steps()) == [1, 2, 7]
    assert files.find(files.LocalRoot(tmp_path), None).name == "step-2"
    store.save(tmp_path, step=7, keep=1)
    assert files.LocalRoot(tmp_path).steps() == [7]
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        ".lock",
        "LATEST",
        "step-7",
    ]


def test_to_replace_a_step_of_another_training_warns(tmp_path: Path) -> None:
    first, other, resumed = (make_store() for _ in range(3))

    def warned(store: persia.Store, step: int) -> bool:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            store.save(tmp_path, step=step)
        return bool(found)

    assert not warned(first, 1) and not warned(first, 1)
    resumed.load(tmp_path)
    assert not warned(resumed, 1) and not warned(other, 2)
    assert warned(other, 1)


def test_a_root_within_a_step_of_another_is_refused(tmp_path: Path) -> None:
    """A later save of the other would replace or remove it, as a folder."""
    root, store = tmp_path / "root", make_store()
    store.save(root, step=1)
    (tmp_path / "link").symlink_to(root / "step-1")
    before = sorted(tmp_path.rglob("*"))
    for inner in ("root/step-1", "root/step-1/x", "root/step-2", "link/x"):
        with pytest.raises(errors.StorageError):
            store.save(tmp_path / inner, step=5)
    assert sorted(tmp_path.rglob("*")) == before
    store.save(tmp_path / "step-1", step=5)  # one of no root
    assert store.load(tmp_path / "step-1").step == 5


def test_a_folder_of_a_step_that_is_no_checkpoint_stays(
    tmp_path: Path,
) -> None:
    """Such as the root of another run, made before this one began."""
    store = make_store()
    store.save(tmp_path / "step-2", step=7)
    store.save(tmp_path, step=1)
    with pytest.raises(errors.StorageError):
        store.save(tmp_path, step=2)
    assert store.load(tmp_path).step == 1
    store.save(tmp_path, step=3, keep=1)
    assert files.LocalRoot(tmp_path).steps() == [3]
    assert files.LocalRoot(tmp_path / "step-2").steps() == [7]


def test_a_checkpoint_is_removed_while_it_is_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a save of another process, which keeps one."""
    store, push = counting_store()
    push()
    store.save(tmp_path)
    read = files.LocalRoot.read

    def read_late(root: files.LocalRoot, name: str) -> bytes | None:
        raw = read(root, name)
        if name == files.LATEST:
            monkeypatch.setattr(files.LocalRoot, "read", read)
            store.save(tmp_path, keep=1, step=3)
        return raw

    monkeypatch.setattr(files.LocalRoot, "read", read_late)
    assert files.find(files.LocalRoot(tmp_path), None).name == "step-3"


def test_a_checkpoint_is_removed_while_all_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, push = counting_store()
    for _ in range(3):
        push()
        store.save(tmp_path)
    is_file = Path.is_file

    def is_file_late(path: Path) -> bool:
        there = is_file(path)
        if path.parent.name == "step-1":
            shutil.rmtree(path.parent)
        return there

    folders = sorted(tmp_path.iterdir())
    monkeypatch.setattr(Path, "iterdir", lambda path: iter(folders))
    monkeypatch.setattr(Path, "is_file", is_file_late)
    assert files.LocalRoot(tmp_path).steps() == [2, 3]


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
        with pytest.raises(
            errors.StorageError, match=re.escape(str(tmp_path))
        ):
            store.save(tmp_path)
    store.save(tmp_path)


def test_the_lock_follows_no_link(tmp_path: Path) -> None:
    """Whoever may write into the folder could name any file of the saver."""
    root, other = tmp_path / "root", tmp_path / "other"
    root.mkdir()
    other.write_text("of somebody")
    (root / ".lock").symlink_to(other)
    store = make_store()
    with pytest.raises(errors.StorageError, match=r"\.lock"):
        store.save(root)
    assert other.read_text() == "of somebody"
    (root / ".lock").unlink()
    store.save(root)


def test_each_folder_that_is_made_is_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = []
    real = files.sync_folder

    def sync(folder: Path) -> None:
        synced.append(folder)
        real(folder)

    monkeypatch.setattr(files, "sync_folder", sync)
    root = tmp_path / "a/b/c"
    make_store().save(root)
    assert {tmp_path, tmp_path / "a", tmp_path / "a/b", root} <= set(synced)


def test_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make_store()
    for bad in ({"keep": 0}, {"step": -1}, {"model": 5}):
        with pytest.raises(errors.InvalidArgument, match=next(iter(bad))):
            store.save(tmp_path, **bad)
    monkeypatch.chdir(tmp_path)
    for empty in ("", "file://"):
        for use in (store.save, store.load, checkpoint.read_extra):
            with pytest.raises(errors.InvalidArgument, match=r"path.* empty"):
                use(empty)
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").write_text("")
    with pytest.raises(errors.StorageError):
        store.save(tmp_path / "file")
    store.close()
    with pytest.raises(errors.Closed):
        store.save(tmp_path)


def threads_of_jobs() -> set[str]:
    """Those that write or read row files in this process. Others have the same
    name: a library's thread has that of the thread that began it."""
    found = set()
    for path in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # it has ended
            if path.read_text() == "persia-job\n":
                found.add(path.parent.name)
    return found


def interrupted(
    monkeypatch: pytest.MonkeyPatch, call: Callable[[], Any]
) -> None:
    """Ctrl-C once the threads of a job are at work."""
    poll, before = shards.poll, threads_of_jobs()

    def late(n: int, ask: Callable[[int], Any], *_: Any) -> None:
        monkeypatch.setattr(shards, "poll", poll)
        for shard in range(n):
            ask(shard)
        raise KeyboardInterrupt

    monkeypatch.setattr(shards, "poll", late)
    with pytest.raises(KeyboardInterrupt):
        call()
    assert threads_of_jobs() <= before


def test_ctrl_c_while_rows_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store()
    fill(store, "t", 200_000)
    interrupted(monkeypatch, lambda: store.save(tmp_path))
    assert os.listdir(tmp_path) == [".lock"]
    store.save(tmp_path)
    assert make_store().load(tmp_path).rows == {"t": 200_000}


def test_ctrl_c_while_rows_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store()
    fill(store, "t", 200_000)
    store.save(tmp_path)
    other = make_store()
    fill(other, "t", 5, seed=9)
    before, used = contents(other, "t"), other.stats()["memory"]
    interrupted(monkeypatch, lambda: other.load(tmp_path))
    assert_same(contents(other, "t"), before)
    assert other.stats()["memory"] == used
    assert other.load(tmp_path).rows == {"t": 200_000}


def test_close_in_the_middle_of_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store()
    fill(store, "t", 200_000)
    write, before = saving.write_dense, threads_of_jobs()

    def late(*args: Any) -> Any:
        store.close()
        return write(*args)

    monkeypatch.setattr(saving, "write_dense", late)
    with pytest.raises(errors.Closed):
        store.save(tmp_path)
    assert os.listdir(tmp_path) == [".lock"]
    assert threads_of_jobs() <= before


def test_saves_of_two_threads_into_two_roots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One waits for the other."""
    store = make_store()
    fill(store, "t", 3)
    other = threading.Thread(target=store.save, args=(tmp_path / "b",))
    write = saving.write_dense

    def first(*args: Any) -> Any:
        monkeypatch.setattr(saving, "write_dense", write)
        other.start()
        time.sleep(0.2)  # it finds the first one under way, or follows it
        return write(*args)

    monkeypatch.setattr(saving, "write_dense", first)
    store.save(tmp_path / "a")
    other.join()
    for root in "ab":
        assert make_store().load(tmp_path / root).rows == {"t": 3}


def test_a_root_may_have_any_name(tmp_path: Path) -> None:
    store = make_store()
    fill(store, "t", 3)
    root = tmp_path / 'a "b"' / ("ü" + 250 * "x")
    store.save(root)
    assert make_store().load(root).rows == {"t": 3}


def test_a_save_that_is_given_up_is_not_published(tmp_path: Path) -> None:
    store = make_store()
    fill(store, "t", 3)
    stop = threading.Event()
    stop.set()
    states = Dense({}, [{}], None)
    root = files.LocalRoot(tmp_path)
    with pytest.raises(errors.Interrupted):
        saving.save_into(store, root, states, None, None, stop)
    assert os.listdir(tmp_path) == [".lock"]
