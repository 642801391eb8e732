"""Paths and URLs: what is given is opened, what is printed can be given."""

from __future__ import annotations

import os
import pickle
import urllib.parse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pyarrow import csv, fs, parquet

from persia import errors
from persia.base.urls import Url, decoded, literal, pattern_of
from persia.data import Files, Schema, Table
from persia.data.formats.paths import find_files
from tests.sources.test_table import same

LETTERS = "ab1= %#\"'&+,;@:äß日\U0001f600?*[]!~$()-._"
NAMES = st.text(LETTERS, min_size=1, max_size=12).filter(
    lambda name: name.strip(".")
)
PATHS = st.lists(NAMES, min_size=1, max_size=3).map("/".join)
QUERIES = st.sampled_from(["", "region=eu", "scheme=http&region=a/b"])

#: Names that libraries read as something else.
ODD = [
    "a b.csv",
    "a%20b.csv",
    "100%.csv",
    "a#b.csv",
    'a"b.csv',
    "it's.csv",
    "ümläut 日本.csv",
    "a+b&c=d.csv",
    "x=1?y=2.csv",
    "a[1].csv",
    "star*.csv",
    "ts=2024-01-01 00%3A00%3A00/p.csv",
]


@given(path=PATHS, query=QUERIES)
@example("dt=2024-01-01/*.parquet", "")
@example("dt=2024-01-0?/hour=0/*.parquet", "")
def test_the_parts_of_a_url(path: str, query: str) -> None:
    path = pattern_of(path)
    asked = f"?{query}" if query else ""
    url = Url(f"s3://key:word@bucket/{path}{asked}")
    assert (url.scheme, url.user, url.host) == ("s3", "key:word", "bucket")
    assert (url.path, url.query) == (f"/{path}", query)
    assert url.at(url.path).whole == url.whole
    assert url.secret and "word" not in str(url) + str.__str__(url.named)
    assert url.named.whole == url.whole == Url(url.named).whole
    plain = f"s3://bucket/{path}"
    assert Url(plain).path == f"/{path}" and not Url(plain).query
    assert not Url(plain).secret
    copied = pickle.loads(pickle.dumps(url.named))
    assert (copied, copied.whole) == (url.named, url.whole)


@given(name=PATHS)
def test_a_pattern_of_a_name_means_it(name: str) -> None:
    assert literal(pattern_of(name)) == name
    assert literal(decoded(pattern_of(name, "file"))) == name
    assert literal(decoded(urllib.parse.quote(name))) == name


def test_globs_stay_globs() -> None:
    for pattern in ("dt=2024-01-0?/hour=0/*.parquet", "day_[0-9].csv"):
        assert literal(pattern) is None
        assert str(Url(f"s3://b/{pattern}")) == f"s3://b/{pattern}"
        assert Url(f"s3://b/{pattern}?region=x").path == f"/{pattern}"


def test_chains_and_hosts() -> None:
    url = Url("zip://in/*.csv::https://me:word@host:80/z.zip?sig=x")
    assert (url.scheme, url.path, url.query) == ("zip", "/*.csv", "")
    assert url.after == "::https://me:word@host:80/z.zip?sig=x"
    assert url.at("/a.csv").whole.startswith("zip://in/a.csv::https://me")
    assert "word" not in str(url) + str.__str__(url.named)
    url = Url("simplecache::https://host/a.csv?sig=x")
    assert (url.before, url.scheme) == ("simplecache::", "https")
    assert Url("/a/b=c?d=e").local == "/a/b=c?d=e"
    assert Url("file:///a%20b").local == "/a b"
    assert Url("s3://KEY:SEC/RET@bucket/a").user == "KEY:SEC/RET"
    assert Url("hdfs://node:8020/a@b/c").host == "node:8020"


def write(path: Path, **columns: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table({"user": ["u1", "u2"], "click": [0, 1], **columns})
    if path.suffix == ".parquet":
        parquet.write_table(table, path)
    elif path.suffix == ".arrow":
        with pa.ipc.new_file(path, table.schema) as out:
            out.write_table(table)
    elif path.suffix == ".csv":
        csv.write_csv(table, path)
    else:
        lines = [str(row).replace("'", '"') for row in table.to_pylist()]
        path.write_text("\n".join(lines) + "\n")


SCHEMA = Schema(label="click", categorical=["user", "dt"], dense=["hour"])


@pytest.mark.parametrize("end", ["parquet", "arrow", "csv", "jsonl"])
def test_folders_are_columns(tmp_path: Path, end: str) -> None:
    """As if the file had them, as texts."""
    days = ["2024-01-01", "2024-01-02 00%3A00", "__HIVE_DEFAULT_PARTITION__"]
    for day in days:
        write(tmp_path / f"dt={day}" / "hour=7" / f"a.{end}")
    found = Files(f"{tmp_path}/dt=*/hour=7/*.{end}", SCHEMA, 6)
    texts = ["2024-01-01", "2024-01-02 00:00", "" if end == "csv" else None]
    rows = {
        "user": ["u1", "u2"] * 3,
        "click": [0, 1] * 3,
        "dt": [text for text in texts for _ in range(2)],
        "hour": ["7"] * 6,
    }
    (batch,) = found
    (expected,) = Table(rows, SCHEMA, 6)
    assert same(batch, expected)
    assert found.count_lines() == 6
    assert [len(b) for b in Files(found.files, SCHEMA, 4)] == [4, 2]
    with pytest.raises(errors.SchemaMismatch, match="hour"):
        list(Files(f"{tmp_path}/dt=*/hour=7/*.{end}", ABSENT, 6))


ABSENT = Schema(label="click", categorical=["user"], dense=["hours"])


def test_an_empty_line_stays_one(tmp_path: Path) -> None:
    path = tmp_path / "dt=1" / "hour=2" / "a.csv"
    path.parent.mkdir(parents=True)
    path.write_text("user,click\nu,1\n,\nv,0\n")
    files = Files(str(path), SCHEMA, 4)
    assert [len(batch) for batch in files] == [2]
    assert files.malformed == 1


def test_folders_are_not_inferred(tmp_path: Path) -> None:
    write(tmp_path / "dt=1" / "a.parquet")
    assert Files(f"{tmp_path}/dt=1/a.parquet").schema.used_columns == {
        "user",
        "click",
    }


@pytest.mark.parametrize("scheme", ["", "file://", "memory://"])
def test_odd_names_are_given_back(tmp_path: Path, scheme: str) -> None:
    fsspec = pytest.importorskip("fsspec")
    root = f"{scheme}{tmp_path}/odd"
    memory = fsspec.filesystem("memory")
    for name in ODD:
        path = tmp_path / "odd" / name
        write(path)
        if scheme == "memory://":
            memory.pipe_file(str(path), path.read_bytes())
    found = [n for end in ("*.csv", "*/*.csv") for n in names(f"{root}/{end}")]
    assert len(found) == len(ODD) == len(set(found))
    for name in found:
        assert names(str(name)) == [name]
        assert sum(map(len, Files(str(name)))) == 2


def names(paths: str) -> list[str]:
    return [file.name for file in find_files(paths)]


@pytest.mark.slow
def test_odd_names_in_a_bucket(
    uri: Callable[[str], str], bucket: fs.FileSystem, tmp_path: Path
) -> None:
    write(tmp_path / "a.csv")
    for name in ODD:
        with bucket.open_output_stream(
            f"bucket/odd/{name}", compression=None
        ) as out:
            out.write((tmp_path / "a.csv").read_bytes())
        given = name.replace("?", "[?]").replace("*", "[*]")
        (file,) = find_files(uri(f"odd/{given}"))
        assert file.path == f"bucket/odd/{name}"
    found = [
        file
        for end in ("odd/*.csv", "odd/*/*.csv")
        for file in find_files(uri(end))
    ]
    assert sorted(f.path for f in found) == sorted(
        f"bucket/odd/{n}" for n in ODD
    )
    assert sorted(f.path for f in find_files(uri("odd/**/*.csv"))) == sorted(
        f.path for f in found
    )
    for file in found:
        assert "hidden" not in str.__str__(Url(file.name))
        (again,) = find_files(file.name)  # with its options
        assert again.path == file.path
        text = str(file.name).removeprefix("s3://bucket/")
        (again,) = find_files(uri(text))
        assert again.path == file.path
    quoted = urllib.parse.quote("odd/ümläut 日本.csv")
    assert find_files(uri(quoted))[0].path == "bucket/odd/ümläut 日本.csv"
    with pytest.raises(errors.StorageError):
        find_files(uri("odd/c%20d.csv"))


@pytest.mark.slow
def test_a_glob_reads_no_more_of_a_bucket_than_it_says(
    uri: Callable[[str], str],
    bucket: fs.FileSystem,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("dt=1/h=1/x", "dt=1/h=2/x", "dt=2/h=1/x", "other/h=1/x"):
        with bucket.open_output_stream(f"bucket/{name}") as out:
            out.write(b"user\n1\n")
    listed: list[tuple[str, bool]] = []
    real = fs.S3FileSystem.get_file_info

    class Counting:
        def __init__(self, inner: Any) -> None:
            self._inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

        def get_file_info(self, asked: Any) -> Any:
            if isinstance(asked, fs.FileSelector):
                listed.append((asked.base_dir, asked.recursive))
            return real(self._inner, asked)

    from persia.data.formats import globs

    system_of = globs.system_of

    def counted(*given: Any) -> Any:
        system, path = system_of(*given)
        return Counting(system), path

    monkeypatch.setattr(globs, "system_of", counted)
    for pattern, count, most in (
        ("dt=*/h=1/x", 2, {("bucket", False)}),
        ("dt=*/h=*/x", 3, {("bucket", False), *deep("dt=1", "dt=2")}),
        ("dt=1/*/x", 2, {("bucket/dt=1", False)}),
        ("dt=?/**/x", 3, {("bucket", False), *deep("dt=1", "dt=2")}),
    ):
        listed.clear()
        assert len(find_files(uri(pattern))) == count
        assert set(listed) == most, pattern


def deep(*folders: str) -> list[tuple[str, bool]]:
    return [(f"bucket/{folder}", True) for folder in folders]


def test_a_path_of_this_machine_is_taken_as_it_is(tmp_path: Path) -> None:
    write(tmp_path / "a?region=eu.csv")
    (name,) = names(os.fspath(tmp_path / "a?region=eu.csv"))
    assert name.endswith("a?region=eu.csv")


def test_names_of_file_urls(tmp_path: Path) -> None:
    """Decoded as the standard says, or else as they are written."""
    folder = tmp_path / "odd%20key=0"  # as DuckDB writes it
    folder.mkdir()
    path = folder / "a.csv"
    path.write_text("x\n1\n")
    for url in (path.as_uri(), f"file://{path}", f"file://{folder}/*.csv"):
        (found,) = find_files(url)
        assert found.name == f"file://{tmp_path}/odd%2520key=0/a.csv"
        (again,) = find_files(found.name)
        assert again.name == found.name
