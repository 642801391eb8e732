"""HDFS: what is not there, and a NameNode that gives no answer."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from typing import Any

import pytest
from pyarrow import fs

from persia import errors
from persia.base.urls import Url
from persia.checkpoint import files, remote
from persia.data.formats import globs
from tests.checkpoints import fill, make_store
from tests.hdfs import Hdfs, hdfs
from tests.sources import hdfs_job

__all__ = ["hdfs"]


class Quiet(fs.FSSpecHandler):  # type: ignore[misc]
    """HDFS as pyarrow has it: a NameNode that gives no answer is a file, or
    a folder, that is not there."""

    asked = 0
    silent = range(0)  # calls

    def get_type_name(self) -> str:
        return "hdfs"

    def _answers(self) -> bool:
        Quiet.asked += 1
        return Quiet.asked - 1 not in Quiet.silent

    def get_file_info(self, paths: Any) -> Any:
        if self._answers():
            return super().get_file_info(paths)
        return [fs.FileInfo(path, fs.FileType.NotFound) for path in paths]

    def get_file_info_selector(self, selector: fs.FileSelector) -> Any:
        if self._answers():
            return super().get_file_info_selector(selector)
        return []


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> str:
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    system = fs.PyFileSystem(Quiet(memory))
    for module in (remote, globs):
        monkeypatch.setattr(
            module, "system_of", lambda url, path: (system, path)
        )
    monkeypatch.setattr(Quiet, "asked", 0)
    monkeypatch.setattr(Quiet, "silent", range(0))
    return f"hdfs://name/{os.getpid()}-{id(system)}"


@pytest.mark.parametrize("calls", [1, 2, 1000])
def test_no_answer_is_no_missing_checkpoint(quiet: str, calls: int) -> None:
    """Else a save would remove all as the remains of one that failed."""
    store = make_store()
    fill(store, "t", 3)
    store.save(quiet, step=1)
    store.save(quiet, step=2)
    for call in (lambda: store.save(quiet, step=2), lambda: load(quiet)):
        Quiet.asked, Quiet.silent = 0, range(0)
        call()
        for first in range(Quiet.asked):
            Quiet.asked, Quiet.silent = 0, range(first, first + calls)
            with contextlib.suppress(errors.StorageError):
                call()
            Quiet.silent = range(0)
            assert files.root_of(quiet).steps() == [1, 2]


def load(root: str) -> None:
    assert make_store().load(root).rows == {"t": 3}


@pytest.mark.parametrize("name", ["a.csv", "*.csv", "dt=*/a.csv", "**"])
def test_no_answer_is_no_missing_file(quiet: str, name: str) -> None:
    Quiet.silent = range(1000)
    with pytest.raises(errors.StorageError, match="no answer"):
        globs.remote_files(Url(f"{quiet}/{name}"))
    Quiet.silent = range(0)
    with pytest.raises(errors.StorageError, match="no file"):
        globs.remote_files(Url(f"{quiet}/{name}"))


def run(cluster: Hdfs, *words: str) -> None:
    done = subprocess.run(
        [sys.executable, hdfs_job.__file__, cluster.url, *words],
        env=cluster.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_files_and_checkpoints(hdfs: Hdfs) -> None:
    run(hdfs, "train")
    run(hdfs, "read")
    hdfs.stop("namenode.NameNode")
    run(hdfs, "gone")
    hdfs.start("namenode.NameNode")
    run(hdfs, "read")
    hdfs.stop("datanode.DataNode")
    with pytest.raises(AssertionError, match="StorageError"):
        run(hdfs, "read")
