"""Files on S3, as a local server has it, and through fsspec."""

from collections.abc import Callable
from pathlib import Path

import pytest
from pyarrow import fs

from persia import errors
from persia.data import Files, Table
from tests.sources.test_files import SCHEMA, rows, write
from tests.sources.test_table import same


@pytest.mark.slow
def test_s3(
    uri: Callable[[str], str], bucket: fs.FileSystem, tmp_path: Path
) -> None:
    data = rows(40)
    for suffix in ("parquet", "csv.gz", "jsonl", "arrow"):
        for i in (2, 10):
            local = write(tmp_path / f"day_{i}.{suffix}", data)
            name = f"bucket/logs/day_{i}.{suffix}"
            with bucket.open_output_stream(name, compression=None) as out:
                out.write(local.read_bytes())
        one = Files(uri(f"logs/day_2.{suffix}"), SCHEMA, 16)
        for a, b in zip(one, Table(data, SCHEMA, 16), strict=True):
            assert same(a, b)
        every = Files(uri(f"logs/day_*.{suffix}"), SCHEMA, 16)
        assert [name.rpartition("/")[2] for name in every.files] == [
            f"day_2.{suffix}",
            f"day_10.{suffix}",
        ]
        assert sum(map(len, every)) == 80
    with pytest.raises(errors.StorageError) as info:
        Files(uri("logs/none.csv"), SCHEMA)
    assert "hidden" not in str(info.value)
    with pytest.raises(errors.StorageError):
        Files(uri("logs/none_*.csv"), SCHEMA)
    with pytest.raises(errors.StorageError):
        Files(uri("logs"), SCHEMA)


def test_fsspec(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    data = rows(40)
    memory = fsspec.filesystem("memory")
    for suffix in ("parquet", "csv"):
        local = write(tmp_path / f"a.{suffix}", data)
        memory.pipe_file(f"/logs/a.{suffix}", local.read_bytes())
        files = Files(f"memory://logs/*.{suffix}", SCHEMA, 16)
        for a, b in zip(files, Table(data, SCHEMA, 16), strict=True):
            assert same(a, b)
    with pytest.raises(errors.StorageError, match="unknown://"):
        Files("unknown://a.csv", SCHEMA)
