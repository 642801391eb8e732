"""What the first bytes of a file say of it."""

from __future__ import annotations

from persia import errors

HEAD_BYTES = 16
CONTAINER_BYTES = 512  # in which a container shows
ARROW_STREAM = b"\xff\xff\xff\xff"

_COMPRESSED = {
    b"\x1f\x8b\x08": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\x04\x22\x4d\x18": "lz4",
}
_READ = {
    b"PAR1": "a Parquet",
    b"ARROW1": "an Arrow",
    ARROW_STREAM: "an Arrow",
}
_DEFLATE = (
    "compressed by zlib (Deflate)",
    "decompress it: pigz -d",
)
_OTHERS = {
    b"PK\x03\x04": "a ZIP or Excel",
    b"ORC": "an ORC",
    b"Obj\x01": "an Avro",
    b"\x80\x04\x95": "a pickle",
    b"\x80\x05\x95": "a pickle",
    b"\x89HDF": "an HDF5",
    b"\x93NUMPY": "a NumPy",
    b"SQLite format 3": "an SQLite",
}
# (place, mark): (what it is, what makes it readable)
_CONTAINERS = {
    (257, b"ustar"): ("a tar archive", "extract it: tar -xf"),
    (0, b"\xfd7zXZ\0"): ("compressed by xz", "decompress it: xz -d"),
    (0, b"\x1f\x9d"): ("compressed by compress (.Z)", "uncompress it"),
    (0, b"7z\xbc\xaf"): ("a 7-Zip archive", "extract it"),
    (0, b"Rar!"): ("a RAR archive", "extract it"),
    (0, b"\xff\x06\0\0sNaPpY"): (
        "compressed by Snappy in frames",
        "decompress it, or write it with zstd",
    ),
    (0, b"x\x01"): _DEFLATE,
    (0, b"x\x9c"): _DEFLATE,
    (0, b"x\xda"): _DEFLATE,
    (8, b"DUCK"): (
        "a DuckDB database",
        "export the table: COPY t TO 't.parquet'",
    ),
}
_SUFFIXES = {
    ".snappy": "compressed by Snappy, in Hadoop's blocks or another form",
    ".deflate": "compressed by Deflate, without a header",
    ".lzo": "compressed by LZO",
    ".br": "compressed by Brotli",
}
_LZ4 = b"\x04\x22\x4d\x18"
_MARKS = {
    b"\xff\xfe\0\0": "utf-32",
    b"\0\0\xfe\xff": "utf-32",
    b"\xff\xfe": "utf-16",
    b"\xfe\xff": "utf-16",
}


def compression_of(head: bytes) -> str | None:
    """The compression of a file whose name does not say it."""
    if head[:3] == b"BZh" and head[4:10] == b"1AY&SY":
        return "bz2"
    return _named(head, _COMPRESSED)


def check_container(name: str, head: bytes) -> None:
    """Raises if a file is in a container that is not opened.

    Args:
        name: of the file.
        head: its first 512 bytes, compressed or not.

    Raises:
        SchemaMismatch: says what it is, and what to do.
    """
    found = None
    for (at, mark), said in _CONTAINERS.items():
        if head[at : at + len(mark)] == mark:
            found = said
    end = "." + name.rpartition(".")[2].lower()
    if found is None and end in _SUFFIXES and not head[:64].isascii():
        found = _SUFFIXES[end], "decompress it, or write it with gzip or zstd"
    if end == ".lz4" and not head.isascii() and not _is_of_lz4(head):
        found = (
            "compressed by LZ4 in Hadoop's blocks, not in frames",
            "write it with gzip or zstd, or with lz4's own tool",
        )
    if found is not None:
        what, remedy = found
        raise errors.SchemaMismatch(
            f"{name!r} is {what}, which cannot be read; {remedy}"
        )


def _is_of_lz4(head: bytes) -> bool:
    """Whether bytes are a frame, or what was in one: text."""
    if head.startswith(_LZ4):
        return True
    return b"\0" not in head[:8]


def check_text(name: str, head: bytes, format: str) -> None:
    """Raises if a file begins as no text in UTF-8 does.

    Args:
        name: of the file.
        head: its first bytes, decompressed and decoded.
        format: that it should have, for the message.

    Raises:
        SchemaMismatch: it has another format.
        MalformedData: it is text of another encoding.
    """
    if kind := _named(head, _READ):
        raise errors.SchemaMismatch(
            f"{name!r} is {kind} file, not {format}; leave out format= "
            "and do not mix formats"
        )
    check_container(name, head[:CONTAINER_BYTES])
    if kind := _named(head, _OTHERS):
        raise errors.SchemaMismatch(
            f"{name!r} is {kind} file, which cannot be read; convert it, "
            "for example to Parquet"
        )
    encoding = _named(head, _MARKS)
    if not encoding and b"\0" in head.partition(b"\n")[0]:
        encoding = "utf-16-le"
    if encoding:
        raise errors.MalformedData(
            f"{name!r}: byte {head.find(0)}: no text in UTF-8; is it "
            f"encoding={encoding!r}?"
        )


def _named(head: bytes, kinds: dict[bytes, str]) -> str | None:
    found = (kind for mark, kind in kinds.items() if head.startswith(mark))
    return next(found, None)
