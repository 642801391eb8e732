"""Data as a first user has it: what earlier versions raised at, or misread."""

import datetime
import gzip
import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from pyarrow import orc

from persia import errors, hash_ids
from persia.data import Files, Schema, Table, infer
from persia.data.formats.paths import find_files
from persia.data.formats.read_arrow import open_units
from persia.data.formats.read_json import read_objects
from tests.sources.test_files import SCHEMA, rows, write
from tests.sources.test_table import same

pandas = pytest.importorskip("pandas")

U = Schema(label="y", categorical=["u"])


def test_integers_of_any_size_have_ids(tmp_path: Path) -> None:
    big = [2**53 + 1, 2**63, 2**64 - 1, -(2**70), 2**130]
    expected = hash_ids([str(v) for v in big])
    assert torch.equal(hash_ids(big), expected)
    (b,) = Table({"u": big, "y": [0, 1, 0, 1, 0]}, U)
    assert torch.equal(b.ids.values(), expected)
    for n in (4, 5):  # 2**130 has more digits than a decimal of Arrow
        lines = [{"u": v, "y": 0, "m": [v]} for v in big[:n]]
        path = tmp_path / "a.jsonl"
        path.write_text("".join(json.dumps(one) + "\n" for one in lines))
        (b,) = Files(path, U)
        assert torch.equal(b.ids.values(), expected[:n])
        (b,) = Files(path, Schema(label="y", multivalued=["m"]))
        assert torch.equal(b.ids.values(), expected[:n])
    given = Schema(label="y", categorical=[{"column": "u", "hash": False}])
    data = Files(path, given)
    (b,) = data
    assert b.ids.values().tolist() == [2**53 + 1, -(2**63), -1]
    assert data.malformed == 2


TEXTS = [
    *("2024-01-01", "2024-01-01 10:00:00", "2024-01-01T10:00:00Z"),
    *("2024-01-01 10:00", "2024-01-01T10:00:00+02:00", "1999-12-31"),
]


@pytest.mark.parametrize("other", [None, "a", "2024-1-1", "12:30"])
def test_texts_that_look_like_times_are_texts(
    other: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In lists, too, whatever else is read with them, in all formats."""
    lists = [TEXTS[i : i + 1 + i % 3] for i in range(len(TEXTS))] + [[]]
    if other is not None:
        lists[1] = [*lists[1], other]
    singles = [part[0] if part else "x" for part in lists]
    expected = hash_ids([value for part in lists for value in part])
    schema = Schema(label="y", categorical=["u"], multivalued=["m"])
    split = Schema(
        label="y",
        categorical=["u"],
        multivalued=[{"column": "m", "separator": "|"}],
    )
    data = {"u": singles, "m": lists, "y": [i % 2 for i in range(len(lists))]}
    lines = [dict(zip(data, row)) for row in zip(*data.values())]
    text = "".join(json.dumps(one) + "\n" for one in lines)
    (tmp_path / "a.jsonl").write_text(text)
    frame = pandas.DataFrame(data)
    frame.to_parquet(tmp_path / "a.parquet")
    flat = frame.assign(m=["|".join(part) for part in lists])
    flat.to_csv(tmp_path / "a.csv", index=False)
    found = [
        Files(tmp_path / "a.jsonl", schema),
        Files(tmp_path / "a.parquet", schema),
        Files(tmp_path / "a.csv", split),
        Table(data, schema),
        Table(frame, schema),
    ]
    for source in found:
        (batch,) = source
        assert torch.equal(batch.ids["m"][0], expected)
        assert batch.ids["m"][1].tolist() == list(map(len, lists))
        assert torch.equal(batch.ids["u"][0], hash_ids(singles))
    # A line at a time, so that each is inferred by itself.
    monkeypatch.setattr("persia.data.formats.read_json.CHUNK_BYTES", 40)
    (batch,) = Files(tmp_path / "a.jsonl", schema)
    assert torch.equal(batch.ids["m"][0], expected)
    # What is inferred is the same, too.
    assert infer(read_objects(text.encode(), set())) == infer(frame)


def test_objects_keep_their_texts() -> None:
    line = '{"a": {"b": "2024-01-01"}, "c": [[{"d": "2024-01-01 10:00"}]]}'
    table = read_objects(line.encode(), set())
    assert table is not None
    assert table.to_pylist() == [json.loads(line)]


def test_missing_values_among_others() -> None:
    values = pandas.Series([1, "a", pandas.NA, None, b"b"], dtype=object)
    assert torch.equal(hash_ids(values), hash_ids(["1", "a", "", "", "b"]))


def test_columns_of_rare_types() -> None:
    view = pa.array([[1, 2], [], None, [3]], pa.list_view(pa.int64()))
    table = pa.table({"m": view, "y": [0, 1, 0, 1]})
    (b,) = Table(table, Schema(label="y", multivalued=["m"]))
    assert torch.equal(b.ids.values(), hash_ids([1, 2, 3]))
    maps = pa.array([[("a", 1)]] * 4, pa.map_(pa.string(), pa.int64()))
    times = pa.array([datetime.time(i) for i in range(4)])
    u = ["a", "b", "a", "c"]
    table = pa.table({"s": maps, "t": times, "u": u, "y": [0, 1, 0, 1]})
    assert sum(map(len, Table(table))) == 4
    assert infer(table).used_columns == {"u", "y"}


def test_inference_of_what_people_have(tmp_path: Path) -> None:
    frame = pandas.DataFrame(
        {"u": list("abac"), "y": ["Yes", "No", "YES", "no"]}
    )
    schema = infer(frame)
    assert schema.label is not None
    assert schema.label.column == "y"
    frame.to_csv(tmp_path / "index.csv")
    assert Files(tmp_path / "index.csv").schema.used_columns == {"u", "y"}
    path = tmp_path / "none.csv"
    path.write_text("85,24.5,a,1\n17,2.5,b,0\n3,9.5,a,1\n")
    with pytest.raises(errors.SchemaMismatch, match=r"none\.csv.*header"):
        Files(path)
    numbered = pandas.DataFrame([[1, "a"], [0, "b"], [1, "a"]])
    numbered.to_csv(path, index=False)
    assert Files(path).schema.used_columns == {"0", "1"}


def test_what_is_no_table() -> None:
    for data in (pandas.Series([1, 2]), pa.array([1, 2]), 7):
        with pytest.raises(errors.InvalidArgument):
            Table(data)


def test_compression_that_no_name_tells(tmp_path: Path) -> None:
    data = rows(40)
    expected = list(Table(data, SCHEMA, 16))
    for end in ("csv.gz", "csv.zst", "jsonl.bz2", "csv.lz4"):
        packed = write(tmp_path / f"a.{end}", data).read_bytes()
        path = tmp_path / f"named.{end.partition('.')[0]}"
        path.write_bytes(packed)
        for a, b in zip(Files(path, SCHEMA, 16), expected, strict=True):
            assert same(a, b)
    parquet = write(tmp_path / "a.parquet", data).read_bytes()
    (tmp_path / "a.parquet.gz").write_bytes(gzip.compress(parquet))
    with pytest.raises(errors.InvalidArgument, match=r"a\.parquet\.gz"):
        list(Files(tmp_path / "a.parquet.gz", SCHEMA))


def test_texts_that_repeat_in_parquet(tmp_path: Path) -> None:
    data = rows(3000)
    data["x"] = [None if v is None else str(v) for v in data["x"]]
    data["y"] = ["yes" if v else "no" for v in data["y"]]
    data["c"][5] = None
    path = write(tmp_path / "a.parquet", data, 2000)
    with open_units(find_files(path)[0], "parquet", True) as opened:
        (table,) = opened.tables(0, ["c", "m", "k"], 0)
    kinds = [pa.types.is_dictionary(f.type) for f in table.schema]
    assert kinds == [True, True, False]
    for a, b in zip(
        Files(path, SCHEMA, 700), Table(data, SCHEMA, 700), strict=True
    ):
        assert same(a, b)


def test_lists_that_repeat() -> None:
    """Each list of a dictionary stands for itself."""
    lists = pa.array([["1", "2"], None, ["x"], [], ["7", "1", "3"]])
    at = pa.array([0, 4, None, 1, 2, 3, 0, 2], pa.int8())
    column = pa.DictionaryArray.from_arrays(at, lists)
    for options in ({}, {"max_length": 2}, {"hash": False}):
        many = {"column": "m", **options}
        schema = Schema(label="y", multivalued=[many])
        found, want = (
            Table({"m": x, "y": [0, 1] * 4}, schema, malformed_limit=1)
            for x in (column, lists.take(at))
        )
        assert found.malformed == want.malformed == 2 * ("hash" in options)
        assert found.malformed_lines == want.malformed_lines
        assert all(map(same, found, want))


@pytest.mark.parametrize("name", ["a.arrow", "a.arrows", "a"])
def test_arrow_streams(tmp_path: Path, name: str) -> None:
    data = rows(40)
    table, path = pa.table(data), tmp_path / name
    with pa.ipc.new_stream(path, table.schema) as out:
        out.write_table(table, max_chunksize=13)
    files = Files(path, SCHEMA, 16)
    for a, b in zip(files, Table(data, SCHEMA, 16), strict=True):
        assert same(a, b)
    assert sum(map(len, Files(path))) == 40
    half = Files(path, SCHEMA, 16, rank=1, world_size=2)
    assert sum(map(len, half)) == 16
    with pytest.raises(errors.SchemaMismatch, match="nowhere"):
        list(Files(path, Schema(categorical=["nowhere"])))
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(errors.CorruptFile):
        list(Files(path, SCHEMA, 16))


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "utf-16-le"])
@pytest.mark.parametrize("schema", [None, SCHEMA])
@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_text_of_two_bytes_a_character(
    tmp_path: Path, encoding: str, schema: Any, suffix: str
) -> None:
    path = write(tmp_path / f"a.{suffix}", rows(40))
    path.write_bytes(path.read_text().encode(encoding))
    with pytest.raises(errors.PersiaError, match=rf"a\.{suffix}.*encoding="):
        list(Files(path, schema, format="json" if "j" in suffix else "csv"))
    files = Files(path, schema, encoding=encoding)
    assert sum(map(len, files)) == 40


def test_files_of_other_kinds(tmp_path: Path) -> None:
    table = pa.table(rows(40))
    orc.write_table(table, tmp_path / "a.orc")
    (tmp_path / "a.xlsx").write_bytes(b"PK\3\4" + bytes(range(256)))
    table.to_pandas().to_pickle(tmp_path / "a.pkl")
    for name in ("a.orc", "a.xlsx", "a.pkl"):
        for schema in (None, SCHEMA):
            with pytest.raises(errors.SchemaMismatch, match=name):
                list(Files(tmp_path / name, schema))
    parquet = write(tmp_path / "a.parquet", rows(40))
    for format in ("csv", "json"):
        for schema in (None, SCHEMA):
            with pytest.raises(errors.SchemaMismatch, match="a Parquet file"):
                list(Files(parquet, schema, format=format))
    array = tmp_path / "a.json"
    for indent in (None, 1):
        text = io.StringIO()
        json.dump(table.to_pylist(), text, indent=indent)
        array.write_text(text.getvalue())
        for schema in (None, SCHEMA):
            with pytest.raises(errors.SchemaMismatch, match="JSON array"):
                list(Files(array, schema))


def test_a_glob_leaves_out_marks_of_spark(tmp_path: Path) -> None:
    write(tmp_path / "part-0.parquet", rows(40))
    (tmp_path / "_SUCCESS").write_bytes(b"")
    (tmp_path / ".part-0.parquet.crc").write_bytes(b"crc")
    for paths in (str(tmp_path / "*"), f"file://{tmp_path}/*"):
        assert sum(map(len, Files(paths, SCHEMA))) == 40


def test_lines_that_are_neither_text_nor_complete(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    good, bad = b"a,1,\xff\n" * 3000, b"b,\xfe\n"
    quoted = b'"a\n,",1,\xff\n'
    pad = b"a,1," + b"x" * 997 + b"\n"
    for fill in (b"", pad * 1047, pad * 1048, pad * 3000):
        path.write_bytes(b"u,y,z\n" + fill + good + bad + quoted + bad + good)
        data, n = Files(path, U), fill.count(b"\n")
        assert sum(map(len, data)) == n + 6001
        lines = [int(w.split(":")[1]) for w in data.malformed_lines]
        assert lines == [n + 3002, n + 3004]
        assert Files(path).schema.used_columns >= {"u"}
    path.write_bytes(b"u,y\n" + b"\xff,1\n" + b"\xfe,\xff,\xff\n" + b"a,0\n")
    data = Files(path, U)
    assert sum(map(len, data)) == 1
    assert data.malformed == 2


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_a_split_without_positives(tmp_path: Path, suffix: str) -> None:
    data = rows(1000)
    data["y"] = [1] * 800 + [0] * 200
    files = Files(write(tmp_path / f"a.{suffix}", data, 90), SCHEMA)
    for share in (0.1, 0.5):
        with pytest.raises(errors.InvalidArgument, match=rf"a\.{suffix}.*'y'"):
            files.split(share)
    data["y"] = [0, 1] * 500
    files = Files(write(tmp_path / f"a.{suffix}", data, 90), SCHEMA)
    assert [p.count_lines() for p in files.split(0.3)] == [700, 300]
