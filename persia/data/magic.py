"""What the first bytes of a file say of it."""

from __future__ import annotations

from persia import errors

__all__ = ["ARROW_STREAM", "HEAD_BYTES", "check_text", "compression_of"]

HEAD_BYTES = 16
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
