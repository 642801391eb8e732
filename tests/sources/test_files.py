import gzip
import json
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import csv as pa_csv
from pyarrow import parquet as pq

import persia
from persia import errors, hash_ids
from persia.data import Files, Schema, Table
from persia.data.formats import read_tfrecord as tfrecord
from tests.datasets.reference import data_file
from tests.sources.test_table import same

pandas = pytest.importorskip("pandas")

FORMATS = ["csv", "tsv.gz", "parquet", "jsonl", "jsonl.zst", "arrow"]
SCHEMA = Schema.model_validate(
    {
        "label": "y",
        "weight": "w",
        "dense": ["x", {"column": "k", "log": True}],
        "categorical": ["k", "c"],
        "crosses": [{"columns": ["k", "c"], "name": "kc"}],
        "multivalued": [{"column": "m", "separator": "|"}],
    }
)


def rows(n: int, seed: int = 0) -> dict[str, list]:
    rng = np.random.default_rng(seed)
    return {
        "y": rng.integers(0, 2, n).tolist(),
        "w": (rng.integers(0, 8, n) / 4).tolist(),
        "x": [None if v < 2 else v / 8 for v in rng.integers(0, 40, n)],
        "k": rng.integers(0, 50, n).tolist(),
        "c": [f"c{v}" for v in rng.integers(0, 9, n)],
        "m": [
            "|".join(f"m{j}" for j in range(v)) for v in rng.integers(0, 4, n)
        ],
        "unused": ["?"] * n,
    }


def write(path: Path, data: dict[str, list], group: int = 13) -> Path:
    table = pa.table(data)
    name = path.name
    if name.endswith(".parquet"):
        pq.write_table(table, path, row_group_size=group)
    elif name.endswith(".arrow"):
        with pa.ipc.new_file(path, table.schema) as out:
            out.write_table(table, max_chunksize=group)
    elif ".jsonl" in name:
        dicts = table.to_pylist()
        text = "".join(json.dumps(row) + "\n" for row in dicts)
        with pa.output_stream(path) as out:
            out.write(text.encode())
    else:
        options = pa_csv.WriteOptions(
            delimiter="\t" if ".tsv" in name else ",", quoting_style="needed"
        )
        with pa.output_stream(path) as out:
            pa_csv.write_csv(table, out, options)
    return path


def read(data: Any) -> list[persia.Batch]:
    return list(data)


@pytest.mark.parametrize("suffix", FORMATS)
def test_every_format_gives_the_batches_of_the_table(
    tmp_path: Path, suffix: str
) -> None:
    data = rows(50)
    path = write(tmp_path / f"a.{suffix}", data)
    files = Files(path, SCHEMA, 16)
    for a, b in zip(files, Table(data, SCHEMA, 16), strict=True):
        assert same(a, b)
    assert files.malformed == 0
    assert files.count_lines() == 50
    assert len(files) == 4
    assert len(Files(path, SCHEMA, 16, samples=(0, 0)).files) == 1
    assert suffix.partition(".")[0] in repr(files)


@pytest.mark.slow
@settings(
    max_examples=25,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    values=st.lists(
        st.tuples(
            st.integers(0, 1),
            st.one_of(st.none(), st.integers(-1000, 1000)),
            st.integers(-(2**53), 2**53),
            st.text(
                st.characters(
                    codec="utf-8",
                    exclude_categories=["C"],
                    exclude_characters='"\ufeff\\',
                ),
                max_size=5,
            ),
            st.lists(st.integers(0, 99).map(str), max_size=4).map("|".join),
        ),
        min_size=1,
        max_size=30,
    ),
    size=st.integers(1, 9),
    shuffle=st.integers(0, 20),
    group=st.integers(1, 20),
)
def test_any_rows(
    tmp_path: Path, values: list, size: int, shuffle: int, group: int
) -> None:
    names = ("y", "x", "k", "c", "m")
    data = dict(zip(names, map(list, zip(*values))))
    data["c"] = [v.strip() or "z" for v in data["c"]]
    data["w"] = [1.0] * len(values)
    table = list(Table(data, SCHEMA, size))
    expected = list(
        Files(write(tmp_path / "a.csv", data), SCHEMA, size, shuffle=shuffle)
    )
    for suffix in FORMATS:
        path = write(tmp_path / f"a.{suffix}", data, group)
        for a, b in zip(Files(path, SCHEMA, size), table, strict=True):
            assert same(a, b)
        shuffled = Files(path, SCHEMA, size, shuffle=shuffle)
        for a, b in zip(shuffled, expected, strict=True):
            assert same(a, b)


def contents(batches: list[persia.Batch]) -> list:
    """The rows of batches, without their order."""
    out = []
    for b in batches:
        assert b.dense is not None
        for i in range(len(b)):
            ids = tuple(b.ids[k][0][i].item() for k in ("k", "c", "kc"))
            out.append((*b.dense[i].tolist(), *ids))
    return sorted(out)


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["csv", "parquet", "jsonl"])
def test_shards_and_workers_share_the_rows(
    tmp_path: Path, suffix: str
) -> None:
    parts = [rows(n, n) for n in (30, 0, 41)]
    for i, part in enumerate(parts):
        write(tmp_path / f"part_{i}.{suffix}", part)
    paths = str(tmp_path / "part_*")
    every = contents(list(Files(paths, SCHEMA, 4)))
    assert len(every) == 71
    for options in (
        {},
        {"shuffle": 10},
        {"shuffle": 10, "shuffle_files": True},
    ):
        for world in (1, 2, 3, 5):
            found = []
            for r in range(world):
                data = Files(
                    paths, SCHEMA, 4, rank=r, world_size=world, **options
                )
                batches = list(data)
                data.count_lines()
                assert len(data) == len(batches)
                found += batches
            assert contents(found) == every
    loader = torch.utils.data.DataLoader(
        Files(paths, SCHEMA, 4),
        batch_size=None,
        num_workers=2,
        multiprocessing_context="fork",
    )
    assert contents(list(loader)) == every
    train, test = Files(paths, SCHEMA, 4).split(0.25)
    assert train.count_lines() + test.count_lines() == 71
    assert contents([*train, *test]) == every


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["csv.gz", "parquet", "jsonl", "arrow"])
@pytest.mark.parametrize("shuffle", [0, 12])
def test_resume_in_the_middle(
    tmp_path: Path, suffix: str, shuffle: int
) -> None:
    for i in range(2):
        data = rows(37, i)
        data["y"][5] = 1
        path = write(tmp_path / f"p{i}.{suffix}", data)
        if suffix == "csv.gz":  # a malformed line among them
            lines = gzip.decompress(path.read_bytes()).splitlines(True)
            lines[9] = b"bad\n"
            path.write_bytes(gzip.compress(b"".join(lines)))
    options: dict = {"shuffle": shuffle, "shuffle_files": bool(shuffle)}
    paths = str(tmp_path / "p*")
    for shard in ((0, 1), (1, 2)):
        whole = Files(
            paths, SCHEMA, 4, rank=shard[0], world_size=shard[1], **options
        )
        whole.epoch = 3
        every = list(whole)
        for stop in range(len(every) + 1):
            data = Files(
                paths, SCHEMA, 4, rank=shard[0], world_size=shard[1], **options
            )
            data.epoch = 3
            batches = iter(data)
            for _ in range(stop):
                next(batches)
            state = json.loads(json.dumps(data.state_dict()))
            batches.close()
            for forget in (False, True):
                again = Files(
                    paths,
                    SCHEMA,
                    4,
                    rank=shard[0],
                    world_size=shard[1],
                    **options,
                )
                again.load_state_dict(state | ({"at": None} if forget else {}))
                rest = list(again)
                for a, b in zip(rest, every[stop:], strict=True):
                    assert same(a, b)
            assert again.state_dict()["batches"] == len(every)
    data.load_state_dict({"epoch": 0, "batches": 1, "at": {"place": 3}})
    with pytest.raises(errors.InvalidArgument):
        list(data)


def test_schema_is_inferred(tmp_path: Path) -> None:
    data = rows(300)
    for suffix in FORMATS:
        files = Files(write(tmp_path / f"a.{suffix}", data), batch_size=64)
        schema = files.schema
        assert schema.label is not None
        assert schema.label.column == "y"
        assert [c.column for c in schema.multivalued] == ["m"]
        assert sum(map(len, files)) == 300


def test_the_encoding_does_not_change_an_id(tmp_path: Path) -> None:
    text = "c,y\né,1\nÖl,0\n"
    schema = Schema(label="y", categorical=["c"])
    for encoding in ("utf-8", "utf-8-sig", "latin-1", "utf-16", "utf-16-le"):
        path = tmp_path / f"{encoding}.csv"
        path.write_bytes(text.encode(encoding))
        (b,) = Files(path, schema, encoding=encoding)
        assert torch.equal(b.ids.values(), hash_ids(["é", "Öl"]))
    line = json.dumps({"c": "é", "y": 1}, ensure_ascii=False)
    (tmp_path / "a.jsonl").write_bytes(line.encode("latin-1"))
    (b,) = Files(tmp_path / "a.jsonl", schema, encoding="latin-1")
    assert torch.equal(b.ids.values(), hash_ids(["é"]))
    data = Files(tmp_path / "latin-1.csv", schema)
    assert list(data) == []
    assert data.malformed == 2
    assert "latin-1.csv:2: column 'c'" in data.malformed_lines[0]
    with pytest.raises(errors.MalformedData, match=r"latin-1\.csv"):
        list(Files(tmp_path / "latin-1.csv", schema, encoding="ascii"))
    with pytest.raises(errors.InvalidArgument, match="ebcdic"):
        list(Files(tmp_path / "latin-1.csv", schema, encoding="ebcdic"))


def test_json_lines_that_are_malformed(tmp_path: Path) -> None:
    lines = [
        '{"y": 1, "c": "a", "x": 1}',
        '{"y": 1, "c": ',
        "",
        "[1]",
        '{"y": 0, "c": 7, "x": "2.5"}',  # other types than above
        '{"y": 0, "c": null}',
        '{"y": 2.5e300000, "c": "a"}',
        '{"y": "maybe", "c": "a"}',
    ]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(lines))
    schema = Schema(label="y", dense=["x"], categorical=["c"])
    data = Files(path, schema)
    (b,) = data
    assert b.label.tolist() == [1, 0, 0]
    assert b.dense[:, 0].tolist() == [1, 2.5, 0]
    assert torch.equal(b.ids.values(), hash_ids(["a", "7", None]))
    at = [int(line.split(":")[1]) for line in data.malformed_lines]
    assert at == [2, 4, 7, 8]
    with pytest.raises(errors.MalformedData, match=r"a\.jsonl:2"):
        list(Files(path, schema, strict=True))
    with pytest.raises(errors.SchemaMismatch, match="nowhere"):
        list(Files(path, Schema(label="y", categorical=["nowhere"])))


@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.parametrize("blank", ["", "\r", " \t "])
def test_blank_json_lines_are_no_samples(
    tmp_path: Path, blank: str, bad: bool
) -> None:
    """As pandas has it; lines are counted with them."""
    lines = [json.dumps({"y": i % 2, "x": i, "c": f"c{i}"}) for i in range(60)]
    text = "".join(f"{line}\n{blank}\n" for line in lines)
    path = tmp_path / "a.jsonl"
    path.write_text(text, newline="")
    expected = pandas.read_json(path, lines=True)
    if bad:
        path.write_text(f"{text}{{\n{lines[0]}", newline="")
    schema = Schema(label="y", dense=["x"], categorical=["c"])
    data = Files(path, schema, 10, malformed_limit=0.5)
    dense = torch.cat([b.dense[:, 0] for b in data]).tolist()
    assert dense == expected["x"].tolist() + [0.0] * bad
    at = [int(line.split(":")[1]) for line in data.malformed_lines]
    assert at == [121] * bad


def masked(data: bytes) -> bytes:
    return struct.pack("<I", tfrecord.masked(data))


def record(data: bytes) -> bytes:
    size = struct.pack("<Q", len(data))
    return size + masked(size) + data + masked(data)


def message(number: int, data: bytes) -> bytes:
    out, size = bytes([number << 3 | 2]), len(data)
    while size > 127:
        out, size = out + bytes([size & 127 | 128]), size >> 7
    return out + bytes([size]) + data


def example(**features: list) -> bytes:
    """A tf.train.Example, written by hand."""
    out = b""
    for name, values in features.items():
        if all(isinstance(v, bytes) for v in values):
            held = message(1, b"".join(message(1, v) for v in values))
        elif any(isinstance(v, float) for v in values):
            held = message(
                2, message(1, struct.pack(f"<{len(values)}f", *values))
            )
        else:
            packed = b""
            for v in values:
                v %= 1 << 64
                while v > 127:
                    packed, v = packed + bytes([v & 127 | 128]), v >> 7
                packed += bytes([v])
            held = message(3, message(1, packed))
        out += message(1, message(1, name.encode()) + message(2, held))
    return message(1, out)


def test_tfrecord(tmp_path: Path) -> None:
    data = rows(40)
    records = []
    for y, w, x, k, c, m in zip(
        *(data[n] for n in ("y", "w", "x", "k", "c", "m"))
    ):
        held: dict = {"y": [y], "w": [w], "k": [k], "c": [c.encode()]}
        held["m"] = [v.encode() for v in m.split("|") if v]
        if x is not None:
            held["x"] = [x]
        records.append(record(example(**held)))
    whole = b"".join(records)
    path = tmp_path / "a.tfrecord"
    path.write_bytes(whole)
    for a, b in zip(
        Files(path, SCHEMA, 16), Table(data, SCHEMA, 16), strict=True
    ):
        assert same(a, b)
    (tmp_path / "a.tfrecord.gz").write_bytes(gzip.compress(whole))
    assert sum(map(len, Files(tmp_path / "a.tfrecord.gz", SCHEMA, 16))) == 40
    inferred = Files(path, batch_size=16)
    assert sum(map(len, inferred)) == 40
    # Of the specification of CRC-32C: "123456789".
    assert tfrecord.masked(b"123456789") == (
        ((0xE3069283 >> 15 | 0xE3069283 << 17) + 0xA282EAD8) & 0xFFFFFFFF
    )
    negative = record(example(y=[1], w=[1], k=[-3], c=[b"a"], m=[], x=[]))
    path.write_bytes(negative)
    (b,) = Files(path, SCHEMA)
    assert torch.equal(b.ids["k"][0], hash_ids([-3]))
    for damaged in (
        whole[:-3],
        whole[:100] + bytes([whole[100] ^ 1]) + whole[101:],
        b"\xff" * 40,
    ):
        path.write_bytes(damaged)
        with pytest.raises(errors.CorruptFile, match=r"a\.tfrecord"):
            list(Files(path, SCHEMA))
    path.write_bytes(record(b"\xff\xff") + whole)
    data2 = Files(path, SCHEMA)
    assert sum(map(len, data2)) == 40
    assert data2.malformed == 1


def test_damaged_files(tmp_path: Path) -> None:
    whole = write(tmp_path / "a.parquet", rows(500)).read_bytes()
    half = tmp_path / "half.parquet"
    half.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(errors.CorruptFile, match=r"half\.parquet"):
        list(Files(half, SCHEMA))
    with pytest.raises(errors.CorruptFile, match=r"half\.parquet"):
        Files(half)
    text = tmp_path / "text.parquet"
    text.write_bytes(b"y,x\n1,2\n")
    with pytest.raises(errors.CorruptFile, match=r"text\.parquet"):
        Files(text, SCHEMA)
    altered = bytearray(whole)
    altered[40:80] = b"\xff" * 40
    half.write_bytes(bytes(altered))
    with pytest.raises(errors.PersiaError, match=r"half\.parquet"):
        list(Files(half, SCHEMA))
    # The first bytes say what a file is, whatever its name.
    named = tmp_path / "named.csv"
    named.write_bytes(whole)
    assert sum(map(len, Files(named, SCHEMA))) == 500
    with pytest.raises(errors.SchemaMismatch, match="is a Parquet file"):
        list(Files(named, SCHEMA, format="csv"))
    for name in ("cut.csv.gz", "cut.jsonl.gz"):
        cut = write(tmp_path / name, rows(500))
        cut.write_bytes(cut.read_bytes()[:300])
        with pytest.raises(errors.CorruptFile, match=name):
            list(Files(cut, SCHEMA))


def test_a_file_that_grows(tmp_path: Path) -> None:
    """Its last line may be torn, or have been when it was found."""
    path, line = tmp_path / "log.csv", "1,{}\n"
    path.write_text("y,k\n" + "".join(line.format(i) for i in range(50_000)))
    with path.open("a") as log:
        log.write("1,7")  # of 1,77
        log.flush()
        schema = Schema.model_validate(
            {"label": "y", "categorical": [{"column": "k", "hash": False}]}
        )
        data = Files(path, schema, batch_size=100)
        seen = []
        log.write("7\n")
        log.flush()
        for batch in data:
            seen += batch.ids.values().tolist()
            log.write(line.format(5))
            log.flush()
        assert seen == [*range(50_000)]
        again = sum(len(batch) for batch in data)
        assert again == 50_000
        log.write("1,88")
        log.flush()
        new = Files(path, schema, batch_size=100)
        log.write("8\n")
    assert sum(len(batch) for batch in new) == 50_000 + 501


def test_lines_of_json_that_grow(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"y": 1, "k": 5}\n{"y": 1, "k')
    schema = Schema.model_validate(
        {"label": "y", "categorical": [{"column": "k", "hash": False}]}
    )
    data = Files(path, schema, batch_size=100)
    with path.open("a") as log:
        log.write('": 6}\n')
    assert [b.ids.values().tolist() for b in data] == [[5]]
    new = Files(path, schema, batch_size=100)
    assert [b.ids.values().tolist() for b in new] == [[5, 6]]
    path.write_text('{"y": 1, "k": 5}\n')
    with pytest.raises(errors.CorruptFile):
        next(iter(new))


@pytest.mark.parametrize("suffix", ["csv", "parquet", "jsonl", "arrow"])
def test_wrong_schemas(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"a.{suffix}", rows(30))
    with pytest.raises(errors.SchemaMismatch, match=rf"a\.{suffix}.*'gone'"):
        list(Files(path, Schema(categorical=["gone"])))
    data = rows(30)
    data["y"][20] = 5
    write(path, data)
    with pytest.raises(
        errors.SchemaMismatch, match=rf"a\.{suffix}.*2[0-2].*'y'"
    ):
        list(Files(path, SCHEMA))
    rare = rows(500)
    rare["y"][20] = 5
    files = Files(write(path, rare, 500), SCHEMA)
    assert sum(map(len, files)) == 499
    assert re.search(r"2[0-2].*'y': '?5", files.malformed_lines[0])
    data["y"] = ["maybe"] * 30
    write(path, data)
    files = Files(path, SCHEMA)
    assert list(files) == []
    assert files.malformed == 30
    with pytest.raises(errors.MalformedData, match=rf"a\.{suffix}.*'maybe'"):
        list(Files(path, SCHEMA, strict=True))


def test_the_same_warning_is_logged_three_times(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "a.csv"
    path.write_text("y,c\n" + "bad\n" * 500 + "maybe,a\n" * 500 + "1,a\n")
    schema = Schema(label="y", categorical=["c"])
    data = Files(path, schema, malformed_limit=1)
    assert len(list(data)) == 1
    assert data.malformed == 1000
    assert len(data.malformed_lines) == 100
    assert len(caplog.records) == 6


def test_booleans_and_words_are_the_same_in_text(tmp_path: Path) -> None:
    data = {
        "y": [True, False, True],
        "x": [False, True, True],
        "c": ["a", "b", "c"],
    }
    schema = Schema(label="y", dense=["x"], categorical=["c"])
    (expected,) = Table(data, schema)
    pandas.DataFrame(data).to_csv(tmp_path / "pandas.csv", index=False)
    for path in (
        tmp_path / "pandas.csv",
        *(write(tmp_path / f"a.{suffix}", data) for suffix in FORMATS),
    ):
        (b,) = Files(path, schema)
        assert same(b, expected)


def test_options(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", rows(3))
    with pytest.raises(errors.InvalidArgument, match="format"):
        Files(path, SCHEMA, format="xml")
    with pytest.raises(errors.StorageError, match="no file"):
        Files(tmp_path / "none.csv", SCHEMA)
    with pytest.raises(errors.StorageError, match=re.escape(str(tmp_path))):
        Files(tmp_path, SCHEMA)
    with pytest.raises(TypeError):
        len(Files(path, SCHEMA))
    with pytest.raises(errors.InvalidArgument, match="shuffle_files"):
        list(Files(path, SCHEMA, shuffle_files=True, samples=(1, 2)))
    data = Files(path, SCHEMA)
    assert len(list(data)) == 1
    assert data.progress == 1.0
    url = f"file://{path}"
    assert sum(map(len, Files(url, SCHEMA))) == 3
    assert sum(map(len, Files(f"file://{tmp_path}/*.csv", SCHEMA))) == 3
    with pytest.raises(errors.StorageError, match="no file"):
        Files(f"file://{tmp_path}/none", SCHEMA)


@pytest.mark.slow
def test_real_files(tmp_path: Path) -> None:
    adult = data_file("adult.data.gz")
    data = Files(adult, "adult", 4096)
    labels = torch.cat([b.label for b in data])
    frame = pandas.read_csv(adult)
    assert len(labels) == len(frame)
    assert labels.sum() == frame[" Y"].str.contains(">50K").sum()
    inferred = Files(adult, batch_size=4096)
    assert inferred.schema.label is not None
    assert inferred.schema.label.values == {"<=50K": 0, ">50K": 1}
    assert torch.equal(torch.cat([b.label for b in inferred]), labels)
    assert sum(map(len, Files(data_file("avazu_8k.train.csv.gz")))) == 8087
    with pytest.raises(errors.SchemaMismatch, match="header"):
        Files(data_file("avazu_8k.test.csv.gz"))  # it has none
    movies = Files(data_file("ml100k_multivalued.tsv.gz"), batch_size=4096)
    assert sum(map(len, movies)) == 100_000
