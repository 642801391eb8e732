"""Files by path, glob or URL: local ones, and those of object stores."""

from __future__ import annotations

import codecs
import contextlib
import io
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
from pyarrow import fs

from persia import errors
from persia.base.check import kind
from persia.base.storage import failed, is_refused, opening
from persia.base.urls import Url
from persia.data.formats.globs import local_files, remote_files
from persia.data.formats.magic import HEAD_BYTES, compression_of
from persia.redaction import clean

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

COMPRESSED = {
    ".gz": "gzip",
    ".zst": "zstd",
    ".zstd": "zstd",
    ".bz2": "bz2",
    ".lz4": "lz4",
}
_LINES_BYTES = 1 << 20  # in which the end of a line is looked for
_NULL = "__HIVE_DEFAULT_PARTITION__"


@dataclass(frozen=True)
class File:
    """A file, wherever it is.

    Attributes:
        name: its path or URL, for messages; it can be opened again.
        path: in its file system.
        size: in bytes; None where that is not known.
        system: where it is; None: this machine.
    """

    name: str
    path: str = field(repr=False)  # it may have a key in it
    size: int | None
    system: Any = field(default=None, repr=False)

    @property
    def suffix(self) -> str:
        """The end of its name in lower case, without compression: ".csv"."""
        return suffix_of(self.path)[0]

    @property
    def compression(self) -> str | None:
        """What its name says of it."""
        return COMPRESSED.get(suffix_of(self.path)[1])

    @property
    def local(self) -> str | None:
        """Its path, where it is on this machine."""
        where = "local" if self.system is None else self.system.type_name
        return self.path if "local" in where else None

    @property
    def partitions(self) -> dict[str, str | None]:
        """What its folders say of all its rows, as Hive and Spark name them:
        {"dt": "2024-01-01"} of dt=2024-01-01/a.parquet; None: null."""
        found: dict[str, str | None] = {}
        for folder in self.path.split("/")[:-1]:
            name, equals, value = folder.partition("=")
            if equals and name:
                text = None if value == _NULL else unquote(value)
                found[unquote(name)] = text
        return found

    @contextlib.contextmanager
    def open(self) -> Iterator[Any]:
        """Its bytes as they are, for reading at any place.

        Raises:
            StorageError: (also of what is read within) storage does not give
                them.
        """
        with opening(self.name):
            system = self.system or fs.LocalFileSystem()
            file = system.open_input_file(self.path)
        with self._reading(), file:
            yield file

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """Errors of storage, which are none of the file's bytes."""
        try:
            yield
        except (OSError, pa.ArrowException, errors.CorruptFile) as error:
            if isinstance(error, errors.StorageError):
                raise
            cause = error.__cause__ or error
            if is_refused(cause) or self._is_away():
                raise failed(self.name, cause) from clean(error)
            raise

    def _is_away(self) -> bool:
        """Whether storage does not give the file's last bytes either."""
        if self.local is not None or not self.size:
            return False
        try:
            with self.system.open_input_file(self.path) as file:
                file.seek(max(0, self.size - HEAD_BYTES))
                file.read(HEAD_BYTES)
        except (OSError, pa.ArrowException, ValueError):
            return True
        return False

    @contextlib.contextmanager
    def stream(
        self, encoding: str | None = None, lines: bool = False
    ) -> Iterator[Stream]:
        """Its bytes in order, decompressed, as UTF-8.

        lines: of one that grows, the whole lines that it had when it was
        found.
        """
        with opening(self.name):
            system = self.system or fs.LocalFileSystem()
            if self.size is None:  # a pipe
                raw = system.open_input_stream(self.path, compression=None)
            else:
                raw = system.open_input_file(self.path)
        with self._reading(), raw:
            if self.size == 0 and self.compression:
                # pyarrow takes it for no data.
                raise errors.CorruptFile(
                    f"cannot read {self.name!r}: it has 0 bytes, which is no "
                    f"{suffix_of(self.path)[1]} file"
                )
            source, compression = raw, self.compression
            if not compression and self.size:
                with opening(self.name):
                    compression = compression_of(raw.read(HEAD_BYTES))
                    raw.seek(0)
            if compression:
                source = pa.CompressedInputStream(raw, compression)
            ends: Iterator[int] | None = None
            if self.system is None and self.size and source is raw:
                ends = self._ends(raw, lines)
            yield Stream(self.name, raw, source, encoding, ends)

    def _ends(self, raw: Any, lines: bool) -> Iterator[int]:
        """Up to where it may be read: once that is, up to where then."""
        assert self.size is not None
        if self._now() < self.size:
            raise errors.CorruptFile(
                f"{self.name!r} had {self.size:,} bytes when it was found, and"
                f" has {self._now():,} now: it was cut or replaced; open the "
                "data again"
            )
        end = self.size
        found = -1
        while lines and end > 0 and found < 0:
            begin = max(0, end - _LINES_BYTES)
            raw.seek(begin)
            found = raw.read(end - begin).rfind(b"\n")
            end = begin + found + 1
        raw.seek(0)
        return self._line_ends(end)

    def _line_ends(self, end: int) -> Iterator[int]:
        assert self.size is not None
        yield end
        if self._now() == self.size:  # its last line has no end
            yield self.size

    def _now(self) -> int:
        return os.path.getsize(self.path)


def unread(name: str, error: ValueError) -> errors.StorageError:
    """The error of a server that does not give parts of a file."""
    return failed(name, error, "; download the file")


class Stream(io.RawIOBase):
    """The bytes of a file: decompressed, and text of another encoding as
    UTF-8.

    Attributes:
        position: bytes of the file read so far, compressed ones as such.
    """

    def __init__(
        self,
        name: str,
        raw: Any,
        source: Any,
        encoding: str | None,
        ends: Iterator[int] | None = None,
    ) -> None:
        self._ends = ends
        self._end = 0
        self._name = name
        self._raw = raw
        self._source = source
        self._decoder: Any = None
        self._read = 0
        self._ready = bytearray()
        self._ended = False
        if encoding and not _is_utf8(encoding):
            self._decoder = codecs.getincrementaldecoder(encoding)()

    @property
    def position(self) -> int:
        return int(self._raw.tell()) if self._raw.seekable() else 0

    def readable(self) -> bool:
        return True

    def skip(self, n: int) -> None:
        """Leaves out n bytes: a plain file is not read there."""
        plain = self._decoder is None and self._source is self._raw
        if plain and self._raw.seekable():
            self._raw.seek(self._raw.tell() + n)
            return
        while n > 0 and (part := self.read(min(n, 1 << 20))):
            n -= len(part)

    def read(self, n: int = -1) -> bytes:
        """n bytes; fewer only at the end of the file."""
        try:
            if self._decoder is None:
                return self._bytes(n)
            return self._decoded(n)
        except errors.PersiaError:
            raise
        except (OSError, pa.ArrowException) as error:
            if is_refused(error):
                raise failed(self._name, error) from clean(error)
            raise errors.CorruptFile(
                f"cannot read {self._name!r}: {error}"
            ) from clean(error)
        except ValueError as error:
            raise unread(self._name, error) from clean(error)

    def _bytes(self, n: int) -> bytes:
        if self._ends is None:
            return bytes(self._source.read(None if n < 0 else n))
        parts: list[bytes] = []
        at = self._raw.tell()
        while n:
            while self._end <= at:
                end = next(self._ends, None)
                if end is None:
                    return b"".join(parts)
                self._end = end
            left = self._end - at
            part = self._raw.read(left if n < 0 else min(n, left))
            if not part:
                break
            parts.append(part)
            at += len(part)
            n = n if n < 0 else n - len(part)
        return b"".join(parts)

    def _decoded(self, n: int) -> bytes:
        """n bytes of the file's text in UTF-8."""
        size = n if n >= 0 else 1 << 62
        while len(self._ready) < size and not self._ended:
            chunk = self._bytes(1 << 20)
            before, self._read = self._read, self._read + len(chunk)
            self._ended = not chunk
            try:
                text = self._decoder.decode(chunk, final=self._ended)
            except UnicodeDecodeError as error:
                raise errors.MalformedData(
                    f"{self._name!r}: after byte {before + error.start}: "
                    f"{error.reason}; is that its encoding?"
                ) from None
            self._ready += text.encode()
        out = bytes(self._ready[:size])
        del self._ready[: len(out)]
        return out


def _is_utf8(encoding: str) -> bool:
    try:
        return codecs.lookup(encoding).name in ("utf-8", "utf-8-sig")
    except LookupError:
        raise errors.InvalidArgument(
            f"encoding is {encoding!r}, which Python does not know; need a "
            "name such as 'utf-8' or 'latin-1'"
        ) from None


def suffix_of(path: str) -> tuple[str, str]:
    """(".csv", ".gz") of a.csv.gz, in lower case."""
    name = path.rstrip("/").rpartition("/")[2].lower()
    stem, end = os.path.splitext(name)
    if end in COMPRESSED:
        return os.path.splitext(stem)[1], end
    return end, ""


def find_files(paths: Paths) -> list[File]:
    """The files that a path, a URL, a glob, or a list of them names.

    Those of a glob are in the order of their names, numbers in them by value:
    ``day_2`` before ``day_10``. Their names can be given back.
    """
    need = "a path, a glob, or a list of them"
    if not isinstance(paths, Iterable) or isinstance(paths, bytes):
        kind("paths", paths, os.PathLike, need)
    listed = [paths] if isinstance(paths, (str, os.PathLike)) else paths
    found: list[File] = []
    for one in listed:
        path = kind("paths", one, (str, os.PathLike), need)
        url = Url.to_open(path)
        if not url.scheme:
            found += [
                # A pipe has no size.
                File(n, n, os.path.getsize(n) if os.path.isfile(n) else None)
                for n in local_files(url.whole)
            ]
            continue
        found += [File(*one) for one in remote_files(url)]
    if not found:
        raise errors.InvalidArgument("no path was given")
    return found
