import csv as python_csv
import gzip
import io
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from persia import errors
from persia.data import Schema
from persia.data.formats import read_csv
from persia.datasets import CSV, Criteo
from tests.datasets.reference import data_file, write, xxh64

SCHEMA = Schema.model_validate(
    {
        "label": "y",
        "dense": ["x", {"column": "z", "missing": 2, "log": True, "scale": 3}],
        "categorical": ["c", {"column": "x", "name": "x_id", "hash_salt": 9}],
        "multivalued": [{"column": "m", "separator": "|"}],
    }
)
HEADER = b"c,skipped,m,x,y,z\n"


def line(i: int) -> bytes:
    bag = "|".join(str(j) for j in range(i % 4))
    z = "" if i % 3 == 0 else str(i - 5)
    return f"c{i % 7},?,{bag},{i / 2},{i % 2},{z}\n".encode()


def lines(n: int) -> bytes:
    return b"".join(map(line, range(n)))


def check(batches: list, text: bytes) -> None:
    """The batches hold the rows of the text (without a header) in order."""
    rows = list(python_csv.reader(io.StringIO(text.decode())))
    assert sum(map(len, batches)) == len(rows)
    at = 0
    for b in batches:
        part = rows[at : at + len(b)]
        at += len(b)
        assert b.ids.keys() == ["c", "x_id", "m"]
        assert b.ids["c"][0].tolist() == [xxh64(r[0].encode()) for r in part]
        salted = [xxh64(r[3].encode(), 9) for r in part]
        assert b.ids["x_id"][0].tolist() == salted
        bags = [[v for v in r[2].split("|") if v] for r in part]
        values, lengths = b.ids["m"]
        assert lengths.tolist() == [len(bag) for bag in bags]
        ids = [xxh64(v.encode()) for bag in bags for v in bag]
        assert values.tolist() == ids
        assert b.label.tolist() == [float(r[4]) for r in part]
        x = np.array([float(r[3]) for r in part])
        z = np.array([float(r[5] or 2) for r in part])
        expected = np.stack([x, 3 * np.log1p(np.maximum(z, 0))], 1)
        np.testing.assert_allclose(b.dense, expected, rtol=1e-6)


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz"])
def test_columns(tmp_path: Path, name: str) -> None:
    data = CSV(write(tmp_path / name, HEADER + lines(50)), SCHEMA, 16)
    assert data.keys == ["c", "x_id", "m"]
    assert data.dense_names == ["x", "z"]
    assert data.dense_features == 2
    batches = list(data)
    assert [len(b) for b in batches] == [16, 16, 16, 2]
    check(batches, lines(50))
    assert data.malformed == 0


def test_single_valued_features_have_no_lengths(tmp_path: Path) -> None:
    path = write(tmp_path / "a", b"u,i\n1,2\n3,\n")
    (b,) = CSV(path, Schema(categorical=["u", "i"]))  # type: ignore[list-item]
    assert b.dense is None
    assert b.label is None
    assert b.ids.lengths_or_none() is None
    expected = [xxh64(v) for v in (b"1", b"3", b"2", b"")]
    assert b.ids.values().tolist() == expected


def test_small_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_csv, "CHUNK_BYTES", 100)
    path = write(tmp_path / "a", HEADER + lines(500))
    check(list(CSV(path, SCHEMA, 64)), lines(500))


def test_malformed_lines(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(read_csv, "CHUNK_BYTES", 120)
    rows = [line(i) for i in range(60)]
    rows[10] = b"a,b\n"
    rows[20] = b"c,,,1,maybe,\n"
    rows[21] = b"\n"
    rows[30] = b"c,,,1e400,1,\n"
    rows[31] = b"c,,,nan,1,\n"  # a missing number, not a bad one
    rows[40] = b"c,,,1,1,0x7\n"
    rows[50] = b"1,2,3,4,5,6,7\n"
    path = write(tmp_path / "a", HEADER + b"".join(rows))
    data = CSV(path, SCHEMA, 8)
    with caplog.at_level(logging.WARNING):
        batches = list(data)
    assert sum(map(len, batches)) == 54
    at = [int(m.split(":")[1]) for m in data.malformed_lines]
    assert at == [12, 22, 23, 32, 42, 52]
    texts = " ".join(data.malformed_lines)
    assert f"{path}:12: 2 columns, need 6" in texts
    assert f"{path}:22: column 'y': 'maybe'" in texts
    assert f"{path}:42: column 'z': '0x7'" in texts
    assert f"{path}:52: 7 columns, need 6" in caplog.text
    assert f"{path}:23: an empty line" in texts
    assert data.malformed == 6
    with pytest.raises(errors.MalformedData, match="strict"):
        list(CSV(path, SCHEMA, strict=True))
    rows[1] = rows[20]  # in one piece with the lines that pyarrow refuses
    path = write(tmp_path / "b", HEADER + b"".join(rows))
    monkeypatch.undo()
    with pytest.raises(errors.MalformedData, match=":3: column 'y': 'maybe'"):
        list(CSV(path, SCHEMA, strict=True))
    # Ranges count malformed lines too.
    assert data.count_lines() == 60
    check(list(CSV(path, SCHEMA, 8, samples=(51, None))), b"".join(rows[51:]))
    check(
        list(CSV(path, SCHEMA, 8, samples=(8, 20))),
        b"".join(rows[i] for i in range(8, 20) if i != 10),
    )


def test_bytes_that_are_no_utf8_are_hashed_as_they_are(
    tmp_path: Path,
) -> None:
    text = b"c,x\n\xff\xfe,1\nok,\xff\n"
    schema = Schema(categorical=["c"], dense=["x"])  # type: ignore[list-item]
    data = CSV(write(tmp_path / "a", text), schema)
    (b,) = data
    assert b.ids.values().tolist() == [xxh64(b"\xff\xfe")]
    assert data.malformed == 1


value = st.text(
    st.characters(codec="utf-8", exclude_characters='\r\n"\0'), max_size=6
)
bag = st.lists(st.integers(0, 99).map(str), max_size=5).map("|".join)
row = st.tuples(
    value.filter(lambda v: "," not in v and not v.startswith("\ufeff")),
    bag,
    st.integers(-(10**6), 10**6).map(str),
    st.sampled_from(["0", "1"]),
    st.sampled_from(["", "4", "2.5", "-1e3"]),
)


@settings(
    max_examples=40,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    rows=st.lists(row, max_size=20),
    batch=st.integers(1, 7),
    chunk=st.integers(100, 400),  # a line is shorter
    crlf=st.booleans(),
    end=st.booleans(),
)
def test_any_text(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rows: list,
    batch: int,
    chunk: int,
    crlf: bool,
    end: bool,
) -> None:
    monkeypatch.setattr(read_csv, "CHUNK_BYTES", chunk)
    text = "\n".join(f"{c},s,{m},{x},{y},{z}" for c, m, x, y, z in rows)
    whole = HEADER + text.encode() + (b"\n" if end and rows else b"")
    if crlf:
        whole = whole.replace(b"\n", b"\r\n")
    data = CSV(write(tmp_path / "a", whole), SCHEMA, batch)
    check(list(data), text.encode())
    assert data.malformed == 0
    assert data.count_lines() == len(rows)


def test_quotes_and_other_delimiters(tmp_path: Path) -> None:
    text = b"'a b';n\n'1;2';5\n3;6\n"
    schema = Schema(
        categorical=["a b"],  # type: ignore[list-item]
        label={"column": "n", "number": True},  # type: ignore[arg-type]
        delimiter=";",
        quote="'",
    )
    (b,) = CSV(write(tmp_path / "a", text), schema)
    assert b.ids.values().tolist() == [xxh64(b"1;2"), xxh64(b"3")]
    assert b.label.tolist() == [5, 6]


def test_quotes_in_the_header(tmp_path: Path) -> None:
    text = b'"y","z,z","say ""c""",d\r\n1,q,a,b\r\n'
    schema = Schema(categorical=['say "c"', "z,z", "d"], label="y")  # type: ignore[list-item, arg-type]
    data = CSV(write(tmp_path / "a", text), schema)
    (b,) = data
    assert b.ids.values().tolist() == [xxh64(x) for x in (b"a", b"q", b"b")]
    assert data.malformed == 0


def test_line_ends_in_quotes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_csv, "CHUNK_BYTES", 100)
    rows = [b'%d,"a\n%d\r\n\nb"\n' % (i % 2, i) for i in range(300)]
    rows[200] = b"bad\n"
    path = write(tmp_path / "a", b"y,c\n" + b"".join(rows))
    schema = Schema(categorical=["c"], label="y")  # type: ignore[list-item, arg-type]
    data = CSV(path, schema, 64)
    ids = torch.cat([b.ids.values() for b in data])
    good = [i for i in range(300) if i != 200]
    assert ids.tolist() == [xxh64(b"a\n%d\r\n\nb" % i) for i in good]
    # Their lines are those of the table, not of the file.
    assert data.malformed_lines == [f"{path}:202: 1 columns, need 2"]
    assert data.count_lines() == 300


def test_lines_of_up_to_1_mib(tmp_path: Path) -> None:
    schema = Schema(categorical=["c"], label="y")  # type: ignore[list-item, arg-type]
    before = b"1,a\n" * 200_000
    for text in (b"y,c\n", b"y,c\n" + before):
        path = write(
            tmp_path / "a", text + b"1,%b\n" % (b"a" * ((1 << 20) - 3))
        )
        assert len(list(CSV(path, schema, 300_000))) == 1
    for text in (
        b"y,c\n1,%b\n" % (b"a" * (3 << 20)),
        b"y,c,%b\n1,a\n" % (b"a" * (1 << 20)),
        b'y,c\n1,"a\n' + before * 3,
        b"a" * (3 << 20),
    ):
        path = write(tmp_path / "long", text)
        with pytest.raises(
            errors.MalformedData, match=r"long.*line [12].*1,048,576 bytes"
        ):
            list(CSV(path, schema))


def test_headers(tmp_path: Path) -> None:
    body = b"1,a\n0,b\n"
    with_header = write(tmp_path / "a", b"\xef\xbb\xbfy,c\n" + body)
    without = write(tmp_path / "b", body)
    for header, path in (
        ("auto", with_header),
        ("auto", without),
        (False, without),
    ):
        schema = Schema(
            categorical=["c"],
            label="y",
            columns=["y", "c"],
            header=header,  # type: ignore[list-item, arg-type]
        )
        (b,) = CSV(path, schema)
        assert b.label.tolist() == [1, 0]
        assert b.ids.values().tolist() == [xxh64(b"a"), xxh64(b"b")]
    with pytest.raises(errors.SchemaMismatch, match=r"b.* no column \['c'"):
        list(CSV(without, Schema(categorical=["c"])))  # type: ignore[list-item]
    twice = write(tmp_path / "t", b"c,y,c\n")
    with pytest.raises(errors.SchemaMismatch, match=r"columns \['c'"):
        list(CSV(twice, Schema(categorical=["c"])))  # type: ignore[list-item]


def test_empty_files(tmp_path: Path) -> None:
    for name, text in (("a", b""), ("b", HEADER), ("c", HEADER[:-1])):
        data = CSV(write(tmp_path / name, text), SCHEMA)
        assert list(data) == []
        assert data.count_lines() == 0


@pytest.mark.slow
def test_ranges_shards_and_workers(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{k}", HEADER + lines(30)) for k in range(3)]
    whole = (lines(30) * 3).splitlines(True)
    for rows in ((0, None), (5, 60), (33, 34), (7, 7)):
        data = CSV(paths, SCHEMA, 8, samples=rows)
        check(list(data), b"".join(whole[slice(*rows)]))
        assert data.count_lines() == len(whole[slice(*rows)])
    train, test = CSV(paths, SCHEMA, 8).split(0.2)
    check(list(train), b"".join(whole[:72]))
    check(list(test), b"".join(whole[72:]))
    every = list(CSV(paths, SCHEMA, 8))
    for r in range(3):
        part = list(CSV(paths, SCHEMA, 8, rank=r, world_size=3))
        assert len(part) == len(every[r::3])
        for a, b in zip(part, every[r::3]):
            assert torch.equal(a.ids.values(), b.ids.values())
    loader = torch.utils.data.DataLoader(
        CSV(paths, SCHEMA, 8),
        batch_size=None,
        num_workers=2,
        multiprocessing_context="fork",
    )
    check(list(loader), b"".join(whole))


def test_shuffle(tmp_path: Path) -> None:
    path = write(tmp_path / "a", HEADER + lines(100))
    data = CSV(path, SCHEMA, 8, shuffle=30, seed=3)

    def rows() -> list[tuple]:
        batches = list(data)
        assert [len(b) for b in batches] == [8] * 12 + [4]
        return [
            (d.tolist()[0], y.item(), n)
            for b in batches
            for d, y, n in zip(b.dense, b.label, b.ids["m"][1].tolist())
        ]

    first = rows()
    assert rows() == first
    plain = [(i / 2, float(i % 2), i % 4) for i in range(100)]
    assert first != plain
    for at in range(0, 100, 32):
        assert sorted(first[at : at + 32]) == plain[at : at + 32]
    data.epoch = 1
    assert rows() != first


def test_damaged_file(tmp_path: Path) -> None:
    whole = gzip.compress(HEADER + lines(100_000))
    (tmp_path / "a.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(errors.CorruptFile, match=r"a\.gz"):
        list(CSV(tmp_path / "a.gz", SCHEMA))


def test_damaged_small_files(tmp_path: Path) -> None:
    whole = gzip.compress(HEADER + lines(100))
    for name, content in (
        ("cut.gz", whole[:40]),
        ("cut8.gz", whole[:-8]),
        ("nothing.gz", b""),
        ("nothing.lz4", b""),
        ("plain.gz", HEADER + lines(3)),
        ("plain.zst", HEADER + lines(3)),
    ):
        (tmp_path / name).write_bytes(content)
        data = CSV(tmp_path / name, SCHEMA)
        with pytest.raises(errors.CorruptFile, match=name):
            list(data)
        with pytest.raises(errors.CorruptFile, match=name):
            data.split(0.1)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "at least one"),
        ({"categorical": ["a", "a"]}, r"'a'"),
        ({"categorical": ["a"], "header": False}, "columns"),
        ({"categorical": ["a"], "columns": ["b"]}, "columns"),
        ({"categorical": ["a"], "delimiter": "||"}, "delimiter"),
        ({"categorical": ["a"], "sparse": ["b"]}, "sparse"),
        ({"categorical": ["a"], "delimiter": "\n"}, "delimiter"),
        (
            {"categorical": ["a"], "delimiter": ";", "quote": ";"},
            "';'",
        ),
        (
            {
                "categorical": ["a"],
                "dense": [{"column": "b", "scale": float("nan")}],
            },
            "scale",
        ),
        (
            {
                "categorical": ["a"],
                "dense": [{"column": "b", "missing": float("inf")}],
            },
            "missing",
        ),
        (
            {"categorical": [{"column": "a", "separator": "|"}]},
            "multivalued",
        ),
        (
            {"categorical": [{"column": "a", "hash_salt": -1}]},
            "hash_salt",
        ),
    ],
)
def test_bad_schemas(tmp_path: Path, fields: dict, text: str) -> None:
    import yaml

    path = tmp_path / "s.yaml"
    path.write_text(yaml.safe_dump(fields))
    with pytest.raises(errors.InvalidArgument, match=text) as info:
        Schema.load(path)
    assert "s.yaml" in str(info.value)


def test_a_number_that_overflows_is_malformed(tmp_path: Path) -> None:
    scaled = Schema(categorical=["c"], dense=[{"column": "x", "scale": 1e30}])
    data = CSV(write(tmp_path / "a", b"c,x\n1,1e30\n2,2\n"), scaled)
    (batch,) = data
    assert batch.dense.tolist() == [[pytest.approx(2e30)]]
    assert data.malformed_lines[0].endswith(
        "column 'x': '1e30' is no finite number, nor one of the schema's "
        "values"
    )


def test_a_folder_does_not_hide_a_preset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "adult").mkdir()
    monkeypatch.chdir(tmp_path)
    assert Schema.load("adult").label is not None


def test_schema_that_is_not_there() -> None:
    with pytest.raises(errors.StorageError, match=r"adult.*avazu.*movielens"):
        Schema.load("movie")


def test_schema_that_is_no_utf8(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(errors.InvalidArgument, match=r"s\.yaml.*UTF-8"):
        Schema.load(tmp_path / "s.yaml")


@pytest.mark.parametrize("test", [-1, float("nan"), float("inf"), "x"])
def test_bad_splits(tmp_path: Path, test: Any) -> None:
    path = write(tmp_path / "a", HEADER)
    for data in (CSV(path, SCHEMA), Criteo(path)):
        with pytest.raises(errors.InvalidArgument, match="test is"):
            data.split(test)


def test_schema_of_a_yaml_file(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text("""
        label: y
        dense: [x, {column: z, missing: 2, log: true, scale: 3}]
        categorical: [c, {column: x, name: x_id, hash_salt: 9}]
        multivalued: [{column: m, separator: "|"}]
    """)
    assert Schema.load(path) == SCHEMA


# rows, positives: counted by hand with zcat, wc and grep.
@pytest.mark.parametrize(
    ("name", "schema", "rows", "positives"),
    [
        ("adult.data.gz", "adult", 32561, 7841),
        ("adult.test.gz", "adult", 16281, 3846),
        ("avazu_8k.train.csv.gz", "avazu", 8087, None),
        ("ml100k_multivalued.tsv.gz", "movielens", 100_000, 55_375),
    ],
)
def test_presets(
    name: str, schema: str, rows: int, positives: int | None
) -> None:
    data = CSV(data_file(name), schema, 1000)
    batches = list(data)
    assert data.malformed == 0
    assert sum(map(len, batches)) == rows
    with gzip.open(data_file(name), "rt") as file:
        spec = Schema.load(schema)
        plain = list(
            python_csv.DictReader(
                file,
                delimiter=spec.delimiter,
                skipinitialspace=spec.strip,
            )
        )
    labels = sum(b.label.sum().item() for b in batches)
    if positives is None:
        positives = sum(int(r["click"]) for r in plain)
    assert labels == positives
    first = batches[0]
    for column in spec.categorical:
        texts = [r[column.column].encode() for r in plain[:1000]]
        assert first.ids[column.feature][0].tolist() == list(map(xxh64, texts))
    for column in spec.multivalued:
        bags = [r[column.column].split(",") for r in plain[:1000]]
        values = [xxh64(v.encode()) for bag in bags for v in bag if v]
        assert first.ids[column.feature][0].tolist() == values
