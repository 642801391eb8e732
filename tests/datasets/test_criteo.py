import bz2
import gzip
import logging
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from persia import errors
from persia.data.formats import lines as files
from persia.data.formats.paths import find_files
from persia.datasets import Criteo, value_hash
from tests.datasets.reference import criteo_lines, data_file, write, xxh64


def line(row: int, *, label: bool = True) -> bytes:
    """A well-formed line; some fields are missing."""
    integers = [
        b"" if (row + i) % 5 == 0 else b"%d" % ((row * 31 + i * 7) % 999 - 3)
        for i in range(13)
    ]
    categories = [
        b"" if (row + i) % 7 == 0 else b"%x" % (row * i * 2654435761 % 2**32)
        for i in range(26)
    ]
    fields = [*integers, *categories]
    return b"\t".join([b"%d" % (row % 2), *fields] if label else fields)


def lines(n: int, **options: bool) -> bytes:
    return b"".join(line(i, **options) + b"\n" for i in range(n))


def check(batches: list, text: bytes, columns: int = 40) -> None:
    """All rows of the batches are those of the text, in order."""
    good, _ = criteo_lines(text, columns)
    assert sum(map(len, batches)) == len(good)
    if not good:
        return
    dense = torch.cat([b.dense for b in batches])
    assert dense.dtype == torch.float32
    # All the integers here, as floats: what numpy makes of them.
    expected = np.array([row[1] for row in good], np.int64)
    np.testing.assert_array_equal(dense.numpy(), expected.astype(np.float32))
    for f in range(26):
        ids = torch.cat([b.ids[f"C{f + 1}"][0] for b in batches]).tolist()
        assert ids == [xxh64(row[2][f]) for row in good]
    if columns == 40:
        labels = torch.cat([b.label for b in batches])
        assert labels.tolist() == [row[0] for row in good]
    else:
        assert all(b.label is None for b in batches)


@pytest.mark.parametrize("n", [0, 1, 7, 31, 32, 33, 64, 200])
def test_value_hash_is_xxh64(n: int) -> None:
    data = bytes(range(256))[:n]
    for salt in (0, 1, 2**64 - 1):
        assert value_hash(data, salt) == xxh64(data, salt)
    assert value_hash("é€") == xxh64("é€".encode())


def test_published_hashes() -> None:
    # Of XXH64's own documentation: the oracle is right too.
    assert xxh64(b"") & (2**64 - 1) == 0xEF46DB3751D8E999
    assert xxh64(b"xxhash", 20141025) & (2**64 - 1) == 13067679811253438005
    with pytest.raises(errors.InvalidArgument, match="hash_salt is -1"):
        value_hash("a", -1)


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst", ".bz2", ".lz4"])
def test_every_compression(tmp_path: Path, suffix: str) -> None:
    text = lines(100)
    path = tmp_path / f"day_0.tsv{suffix}"
    if suffix in ("", ".gz"):
        write(path, text)
    elif suffix == ".bz2":
        path.write_bytes(bz2.compress(text))
    else:
        with pa.output_stream(
            path, compression={".zst": "zstd"}.get(suffix, "lz4")
        ) as out:
            out.write(text)
    data = Criteo(path, 32, log_dense=False)
    batches = list(data)
    assert [len(b) for b in batches] == [32, 32, 32, 4]
    check(batches, text)
    assert data.malformed == 0
    assert batches[0].ids.keys() == data.keys
    assert batches[0].ids.offsets_or_none() is None
    check(list(Criteo(path, 32, log_dense=False, drop_last=True)), lines(96))


def test_a_file_of_several_gzip_members(tmp_path: Path) -> None:
    path = tmp_path / "day.gz"
    path.write_bytes(gzip.compress(lines(10)) + gzip.compress(lines(5)))
    check(list(Criteo(path, 4, log_dense=False)), lines(10) + lines(5))


def test_files_follow_each_other(tmp_path: Path) -> None:
    for k, n in ((2, 10), (10, 5), (1, 3)):
        write(tmp_path / f"day_{k}.gz", lines(n))
    write(tmp_path / "day_3.gz", b"")
    pattern = str(tmp_path / "day_*.gz")
    data = Criteo(pattern, 6, log_dense=False)
    assert [Path(f).name for f in data.files] == [
        "day_1.gz",
        "day_2.gz",
        "day_3.gz",
        "day_10.gz",
    ]
    check(list(data), lines(3) + lines(10) + lines(5))
    train, test = data.split()  # the 1TB layout: the last file
    check(list(train), lines(3) + lines(10))
    check(list(test), lines(5))
    with pytest.raises(errors.StorageError, match="no file at"):
        Criteo(str(tmp_path / "night_*"))
    with pytest.raises(errors.StorageError, match=re.escape(str(tmp_path))):
        Criteo(tmp_path)


def test_dense_is_the_logarithm_by_default(tmp_path: Path) -> None:
    path = write(tmp_path / "a", lines(50))
    (raw,) = Criteo(path, 64, log_dense=False)
    (logs,) = Criteo(path, 64)
    torch.testing.assert_close(
        logs.dense, torch.log1p(raw.dense.clamp(min=0)), rtol=1e-6, atol=1e-7
    )


def test_hash_salts(tmp_path: Path) -> None:
    path = write(tmp_path / "a", lines(20))
    (b,) = Criteo(path, 32, hash_salts={"C3": 5})
    values = [row[2] for row in criteo_lines(lines(20))[0]]
    assert b.ids["C3"][0].tolist() == [xxh64(v[2], 5) for v in values]
    assert b.ids["C4"][0].tolist() == [xxh64(v[3]) for v in values]
    with pytest.raises(errors.InvalidArgument, match="C27"):
        Criteo(path, hash_salts={"C27": 5})


def test_files_without_labels(tmp_path: Path) -> None:
    text = lines(20, label=False)
    path = write(tmp_path / "test.txt", text)
    check(list(Criteo(path, 8, log_dense=False)), text, 39)
    wrong = write(tmp_path / "wrong.txt", text + b"1\t2\n")
    data = Criteo(wrong)
    list(data)
    assert data.malformed_lines[0].endswith(":21: 2 columns, need 39")
    with pytest.raises(errors.SchemaMismatch, match="39 columns, need 40"):
        list(Criteo(path, layout="1tb"))
    both = [path, write(tmp_path / "train.txt", lines(3))]
    with pytest.raises(errors.SchemaMismatch, match=r"train\.txt"):
        list(Criteo(both, layout="kaggle"))


def test_a_byte_order_mark_is_no_part_of_a_line(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tsv", b"\xef\xbb\xbf" + lines(3))
    data = Criteo(path, log_dense=False)
    check(list(data), lines(3))
    assert data.malformed == 0
    empty = Criteo(write(tmp_path / "b.tsv", b"\xef\xbb\xbf"))
    assert list(empty) == []
    assert empty.count_lines() == 0


def test_another_format_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", b"a,b,c\n1,2,3\n")
    with pytest.raises(
        errors.SchemaMismatch, match=r"a.csv.* first line has 1 columns"
    ):
        list(Criteo(path))


def test_malformed_lines_are_counted_and_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [line(i) for i in range(8)]
    rows[2] = b"1\t2"
    rows[4] = b"2" + rows[4][1:]
    rows[5] = rows[5].replace(b"\t", b"\tx", 1)
    path = write(tmp_path / "a", b"\n".join(rows))
    data = Criteo(path, 3, log_dense=False)
    with caplog.at_level(logging.WARNING):
        batches = list(data)
    assert [len(b) for b in batches] == [3, 2]
    check(batches, b"\n".join(rows))
    assert data.malformed == 3
    assert data.malformed_lines == [
        f"{path}:3: 2 columns, need 40",
        f"{path}:5: column 1: the label is neither 0 nor 1",
        f"{path}:6: column 2: not an integer of up to 18 digits",
    ]
    assert f"{path}:3: 2 columns" in caplog.text
    with pytest.raises(errors.MalformedData, match=r"a:3: 2 columns.*strict"):
        list(Criteo(path, strict=True))


def test_more_malformed_lines_than_are_kept(tmp_path: Path) -> None:
    path = write(tmp_path / "a", line(0) + b"\n" + b"no\n" * 1000 + line(1))
    data = Criteo(path, 3, log_dense=False)
    data.malformed_limit = 1
    (b,) = data
    assert len(b) == 2
    assert data.malformed == 1000
    assert 0 < len(data.malformed_lines) <= 100


field = st.one_of(
    st.sampled_from([b"", b"0", b"1", b"-7", b"12345678", b"x", b"\r", b"-"]),
    st.integers(-(10**19), 10**19).map(lambda i: b"%d" % i),
    st.binary(max_size=40).map(
        lambda b: b.replace(b"\t", b"").replace(b"\n", b"")
    ),
)
good = st.integers(0, 10**6).map(line)
odd = st.lists(field, max_size=42).map(b"\t".join)
mended = st.tuples(good, field, st.integers(0, 39)).map(
    lambda t: b"\t".join(
        t[1] if i == t[2] else f for i, f in enumerate(t[0].split(b"\t"))
    )
)


@settings(
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    rows=st.lists(
        st.tuples(
            st.one_of(good, good, mended, odd),
            st.sampled_from([b"\n", b"\r\n"]),
        ),
        max_size=30,
    ),
    end=st.booleans(),
    chunk=st.integers(1, 3000),
    batch=st.integers(1, 9),
)
def test_any_text(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rows: list,
    end: bool,
    chunk: int,
    batch: int,
) -> None:
    """Odd fields, line ends and chunk borders, against a plain parser."""
    monkeypatch.setattr(files, "CHUNK_BYTES", chunk)
    text = line(0) + b"\n" + b"".join(a + b for a, b in rows)
    text = text if end else text.rstrip(b"\n")
    data = Criteo(write(tmp_path / "a", text), batch, log_dense=False)
    batches = list(data)
    check(batches, text)
    assert all(len(b) == batch for b in batches[:-1])
    _, bad = criteo_lines(text)
    assert data.malformed == len(bad)
    assert [int(m.split(":")[1]) for m in data.malformed_lines] == bad
    assert data.count_lines() == len(bad) + sum(map(len, batches))


def test_a_line_without_end_takes_bounded_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "CHUNK_BYTES", 1000)
    monkeypatch.setattr(files, "LINE_BYTES", 5000)
    long = line(1) + b"z" * 50_000
    text = b"\n".join([line(0), long, line(2)])
    pieces = list(files.read_lines(find_files(write(tmp_path / "a", text))[0]))
    assert max(map(len, pieces)) < 8000
    data = Criteo(tmp_path / "a", log_dense=False)
    check(list(data), line(0) + b"\n" + line(2))
    assert data.malformed == 1
    assert data.malformed_lines[0].startswith(f"{tmp_path / 'a'}:2:")


@pytest.mark.parametrize("rows", [(0, None), (5, 60), (33, 34), (7, 7)])
def test_ranges_of_lines(tmp_path: Path, rows: tuple) -> None:
    text = lines(30)
    paths = [write(tmp_path / f"{k}", text) for k in range(3)]
    whole = (text * 3).split(b"\n")
    data = Criteo(paths, 8, samples=rows, log_dense=False)
    check(list(data), b"\n".join(whole[slice(*rows)]))
    assert data.count_lines() == sum(map(len, data))
    with pytest.raises(errors.InvalidArgument, match="samples is"):
        Criteo(paths, samples=(5, 4))


def test_split(tmp_path: Path) -> None:
    path = write(tmp_path / "a", lines(70))
    data = Criteo(path, 8, log_dense=False)
    for test, at in ((None, 60), (0.5, 35), (20, 50), (1000, 0), (0, 70)):
        train, rest = data.split(test)
        check(list(train), lines(at))
        check(list(rest), b"".join(lines(70).splitlines(True)[at:]))
    again, _ = train.split(0.5)
    check(list(again), lines(35))
    with pytest.raises(errors.InvalidArgument, match="test is -1"):
        data.split(-1)


def test_shards_have_each_row_once(tmp_path: Path) -> None:
    text = lines(101)
    paths = [write(tmp_path / "a", text), write(tmp_path / "b", text)]
    whole = list(Criteo(paths, 8, log_dense=False))
    shards = [
        list(Criteo(paths, 8, log_dense=False, rank=r, world_size=3))
        for r in range(3)
    ]
    for i, batch in enumerate(whole):
        same = shards[i % 3][i // 3]
        assert torch.equal(same.ids.values(), batch.ids.values())
    assert sum(map(len, shards)) == len(whole)
    with pytest.raises(errors.InvalidArgument, match="rank"):
        Criteo(paths, rank=3, world_size=3)


def test_shards_with_malformed_lines(tmp_path: Path) -> None:
    rows = [b"bad" if i % 7 == 3 else line(i) for i in range(90)]
    path = write(tmp_path / "a", b"\n".join(rows))
    seen: list[float] = []
    for r in range(2):
        data = Criteo(path, 8, log_dense=False, rank=r, world_size=2)
        seen += [tuple(row) for b in data for row in b.dense.tolist()]
    expected = [
        tuple(map(float, r[1])) for r in criteo_lines(b"\n".join(rows))[0]
    ]
    assert sorted(seen) == sorted(expected)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_forked_workers_share_the_batches(
    tmp_path: Path, workers: int
) -> None:
    text = lines(100)
    data = Criteo(write(tmp_path / "a.gz", text), 8, log_dense=False)
    list(data)  # threads of pyarrow exist before the fork
    loader = torch.utils.data.DataLoader(
        data,
        batch_size=None,
        num_workers=workers,
        multiprocessing_context="fork",
    )
    check(list(loader), text)


def test_shuffle(tmp_path: Path) -> None:
    text = lines(100)
    data = Criteo(
        write(tmp_path / "a", text), 8, log_dense=False, shuffle=30, seed=3
    )

    def rows() -> list:
        batches = list(data)
        assert [len(b) for b in batches] == [8] * 12 + [4]
        return [
            (tuple(d.tolist()), label.item(), c.item())
            for b in batches
            for d, label, c in zip(b.dense, b.label, b.ids["C9"][0])
        ]

    first = rows()
    assert rows() == first
    plain = [
        (tuple(map(float, r[1])), r[0], xxh64(r[2][8]))
        for r in criteo_lines(text)[0]
    ]
    assert first != plain
    # Rows move within blocks of 32.
    for at in range(0, 100, 32):
        assert sorted(first[at : at + 32]) == sorted(plain[at : at + 32])
    data.epoch = 1
    assert rows() != first


def test_breaking_off_and_reading_again(tmp_path: Path) -> None:
    import threading

    data = Criteo(write(tmp_path / "a", lines(1000)), 8)
    for _ in range(3):
        for i, _batch in enumerate(data):
            if i == 2:
                break
    assert sum(map(len, data)) == 1000
    for thread in threading.enumerate():
        if thread.name == "persia-read-ahead":
            thread.join(60)
            assert not thread.is_alive()


def test_damaged_files(tmp_path: Path) -> None:
    whole = gzip.compress(lines(5000))
    cut = tmp_path / "cut.gz"
    cut.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(errors.CorruptFile, match=r"cut\.gz"):
        list(Criteo(cut))
    altered = tmp_path / "altered.gz"
    altered.write_bytes(whole[:-3] + bytes([whole[-3] ^ 1]) + whole[-2:])
    with pytest.raises(errors.CorruptFile, match=r"altered\.gz"):
        list(Criteo(altered))
    none = tmp_path / "none.gz"
    for content in (b"this is not gzip", b""):
        none.write_bytes(content)
        with pytest.raises(errors.CorruptFile, match=r"none\.gz"):
            list(Criteo(none))


def test_an_empty_file(tmp_path: Path) -> None:
    for name in ("a", "a.gz"):
        data = Criteo(write(tmp_path / name, b""))
        assert list(data) == []
        assert data.count_lines() == 0


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"batch_size": 0}, "batch_size is 0"),
        ({"batch_size": 1.5}, "batch_size is 1.5, need an integer"),
        ({"layout": "2tb"}, "layout"),
        ({"shuffle": -1}, "shuffle"),
        ({"shuffle": "x"}, "shuffle is 'x'"),
        ({"samples": 3}, "samples is 3"),
        ({"rank": "x"}, "rank is 'x'"),
        ({"seed": "x"}, "seed is 'x'"),
        ({"hash_salts": {"C1": "x"}}, "C1: hash_salt is 'x'"),
        ({"paths": None}, "paths is None"),
        ({"paths": [3]}, "paths is 3"),
        ({"paths": b"/x"}, "paths is b'/x'"),
    ],
)
def test_bad_options(tmp_path: Path, options: dict, text: str) -> None:
    with pytest.raises(errors.InvalidArgument, match=text):
        Criteo(**{"paths": write(tmp_path / "a", b""), **options})


@pytest.mark.slow
def test_real_lines() -> None:
    path = data_file("criteo_tb_80k.tsv.gz")
    data = Criteo(path, 4096, log_dense=False)
    batches = list(data)
    assert data.malformed == 0
    with gzip.open(path) as file:
        text = b"".join(file.readlines()[: 2 * 4096])
    check(batches[:2], text)
    assert sum(map(len, batches)) == 80_000
    ids = {
        (f, i)
        for f in data.keys
        for b in batches
        for i in b.ids[f][0].tolist()
    }
    # 183,569 distinct values, and the missing one of most columns.
    assert 183_569 <= len(ids) <= 183_569 + 26


def test_hashes_in_the_documentation() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "data.md"
    rows = re.findall(
        r"^\| (?:`(.*)`|\(empty\)) \| (\d+) \| (-?\d+) \|$",
        page.read_text(),
        re.MULTILINE,
    )
    assert len(rows) == 6
    for value, salt, expected in rows:
        assert value_hash(value, int(salt)) == int(expected)
        assert xxh64(value.encode(), int(salt)) == int(expected)
