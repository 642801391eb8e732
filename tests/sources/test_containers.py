"""Containers that are not opened are named, with what to do."""

from __future__ import annotations

import gzip
import io
import lzma
import struct
import tarfile
import zlib
from pathlib import Path

import pyarrow as pa
import pytest

from persia import errors
from persia.data import Files, Schema

TEXT = b"x,y\n" + b"".join(b"%d,%d\n" % (i % 9, i % 2) for i in range(999))
S = Schema(categorical=["x"], label="y")


def tar(mode: str) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode) as archive:  # type: ignore[call-overload]
        info = tarfile.TarInfo("a.csv")
        info.size = len(TEXT)
        archive.addfile(info, io.BytesIO(TEXT))
    return out.getvalue()


def blocks(codec: str) -> bytes:
    """As Hadoop's codecs write: lengths, then the block."""
    body = pa.compress(TEXT, codec, asbytes=True)
    return struct.pack(">II", len(TEXT), len(body)) + body


DUCKDB = b"\1" * 8 + b"DUCK" + b"\0" * 999
CASES = {
    "a.tar": tar("w"),
    "a.tar.gz": tar("w:gz"),
    "a.tgz": tar("w:gz"),
    "a.csv.xz": lzma.compress(TEXT),
    "a.csv.Z": b"\x1f\x9d\x90" + TEXT,
    "a.csv.snappy": blocks("snappy"),
    "b.csv.snappy": b"\xff\x06\0\0sNaPpY" + blocks("snappy"),
    "a.csv.lz4": blocks("lz4_raw"),
    "a.csv.deflate": zlib.compress(TEXT),
    "b.csv.deflate": zlib.compress(TEXT)[2:-4],
    "a.duckdb": DUCKDB,
    "a.db": DUCKDB,
    "a.7z": b"7z\xbc\xaf\x27\x1c" + bytes(99),
}


@pytest.mark.parametrize("name", CASES)
def test_a_container_is_named(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(CASES[name])
    for schema in (None, S):
        with pytest.raises(errors.SchemaMismatch) as caught:
            list(Files(path, schema))
        assert "encoding" not in str(caught.value)
        words = ("ress", "xtract", "export")
        assert any(word in str(caught.value) for word in words)
    (tmp_path / "first.csv").write_bytes(TEXT)
    with pytest.raises(errors.PersiaError):
        list(Files([tmp_path / "first.csv", path], S))


def test_what_is_read(tmp_path: Path) -> None:
    for name, data in (
        ("a.csv", TEXT),
        ("a.csv.gz", gzip.compress(TEXT)),
        ("a.snappy", TEXT),
        ("a.csv.lz4", pa.compress(TEXT, "lz4", asbytes=True)),
    ):
        (tmp_path / name).write_bytes(data)
        assert sum(len(b) for b in Files(tmp_path / name, S)) == 999
