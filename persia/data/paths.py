"""Files by path, glob or URL: local ones, and those of object stores."""

from __future__ import annotations

import codecs
import contextlib
import fnmatch
import glob
import io
import os
import re
import urllib.parse
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
from pyarrow import fs

from persia import errors
from persia.base.check import kind
from persia.base.requirements import install
from persia.base.urls import whole
from persia.data.magic import HEAD_BYTES, compression_of
from persia.redaction import Location, clean, shown

__all__ = ["File", "Paths", "find_files", "suffix_of", "unread"]

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

COMPRESSED = {
    ".gz": "gzip",
    ".zst": "zstd",
    ".zstd": "zstd",
    ".bz2": "bz2",
    ".lz4": "lz4",
}
_ARROW_SCHEMES = {"s3", "gs", "gcs", "hdfs", "viewfs", "file", "abfs", "abfss"}
_WEB = {"http", "https"}
_RETRY_S = 20
_LINES_BYTES = 1 << 20  # in which the end of a line is looked for
_DENIED = re.compile(
    r"access.?denied|expired|forbidden|unauthorized|\b40[13]\b|no credentials"
    r"|credentials? (not|could not)",
    re.IGNORECASE,
)
_GLOB = re.compile(r"[*?\[]")


@dataclass(frozen=True)
class File:
    """A file, wherever it is.

    Attributes:
        name: its path or URL, for messages.
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

    @contextlib.contextmanager
    def open(self) -> Iterator[Any]:
        """Its bytes as they are, for reading at any place."""
        with _opening(self.name):
            system = self.system or fs.LocalFileSystem()
            file = system.open_input_file(self.path)
        with file:
            yield file

    @contextlib.contextmanager
    def stream(
        self, encoding: str | None = None, lines: bool = False
    ) -> Iterator[Stream]:
        """Its bytes in order, decompressed, as UTF-8.

        lines: of one that grows, the whole lines that it had when it was
        found.
        """
        with _opening(self.name):
            system = self.system or fs.LocalFileSystem()
            if self.size is None:  # a pipe
                raw = system.open_input_stream(self.path, compression=None)
            else:
                raw = system.open_input_file(self.path)
        with raw:
            if self.size == 0 and self.compression:
                # pyarrow takes it for no data.
                raise errors.CorruptFile(
                    f"cannot read {self.name!r}: it has 0 bytes, which is no "
                    f"{suffix_of(self.path)[1]} file"
                )
            source, compression = raw, self.compression
            if not compression and self.size:
                with _opening(self.name):
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


@contextlib.contextmanager
def _opening(name: str) -> Iterator[None]:
    try:
        yield
    except errors.PersiaError:
        raise
    except (OSError, pa.ArrowException) as error:
        raise errors.StorageError(
            f"cannot open {name!r}: {_remedied(error)}"
        ) from clean(error)
    except ValueError as error:
        raise unread(name, error) from clean(error)


def unread(name: str, error: ValueError) -> errors.StorageError:
    """The error of a server that does not give parts of a file."""
    return errors.StorageError(
        f"cannot read {name!r}: {_remedied(error)}; download the file"
    )


def _remedied(error: BaseException) -> str:
    text = (str(error) or type(error).__name__).splitlines()[0]
    if _DENIED.search(text):
        text += (
            "; give the keys of this storage in the environment, or in the "
            "URL (checkpoints keep none), or renew them"
        )
    return text


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
            raise errors.CorruptFile(
                f"cannot read {self._name!r}: {_remedied(error)}"
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
    ``day_2`` before ``day_10``.
    """
    need = "a path, a glob, or a list of them"
    if not isinstance(paths, Iterable) or isinstance(paths, bytes):
        kind("paths", paths, os.PathLike, need)
    listed = [paths] if isinstance(paths, (str, os.PathLike)) else paths
    found: list[File] = []
    for one in listed:
        path = os.fspath(kind("paths", one, (str, os.PathLike), need))
        found += _remote(path) if "://" in path else _local(path)
    if not found:
        raise errors.InvalidArgument("no path was given")
    return found


def _local(path: str) -> list[File]:
    names = [path]
    if not os.path.exists(path):
        found = filter(_wanted(path), glob.glob(path, recursive=True))
        names = sorted(found, key=_natural)
        if not names:
            raise errors.StorageError(
                f"no file at {path!r} (looked from {os.getcwd()!r})"
            )
    for name in names:
        if os.path.isdir(name):
            raise errors.StorageError(
                f"{name!r} is a directory; pass a glob such as"
                f" {os.path.join(name, '*')!r}"
            )
    # A pipe has no size.
    return [
        File(n, n, os.path.getsize(n) if os.path.isfile(n) else None)
        for n in names
    ]


def _wanted(pattern: str) -> Callable[[str], bool]:
    """Whether a glob means a file: not _SUCCESS and the like, unless it names
    them."""
    hidden = pattern.rpartition("/")[2].startswith(("_", "."))
    return lambda path: (
        hidden or not path.rpartition("/")[2].startswith(("_", "."))
    )


def _remote(url: str) -> list[File]:
    url = whole(url)
    scheme = urllib.parse.urlsplit(url).scheme
    name = str(Location(url)).partition("?")[0]
    with _opening(name):
        system, path = _system(url, scheme)
        return _found(url, scheme, name, system, path)


def _found(
    url: str, scheme: str, name: str, system: Any, path: str
) -> list[File]:
    """The files of a file system that a URL names."""
    # What follows the path of http:// is no pattern: a signature.
    plain = path.partition("?")[0] if scheme in _WEB else path
    mark = _GLOB.search(plain)
    if not mark:
        info = system.get_file_info(path)
        if info.type == fs.FileType.Directory:
            raise errors.StorageError(
                f"{name!r} is a folder; pass a glob such as {name}/*"
            )
        if info.type == fs.FileType.NotFound:
            silent = ", or no answer" if scheme in _WEB else ""
            raise errors.StorageError(f"no file at {name!r}{silent}")
        return [File(name, path, info.size, system)]
    base = path[: mark.start()].rpartition("/")[0]
    select = fs.FileSelector(base, recursive="/" in path[mark.start() :])
    infos = [
        info
        for info in system.get_file_info(select)
        if info.is_file and _matches(info.path, path)
    ]
    infos = [info for info in infos if _wanted(path)(info.path)]
    if not infos:
        raise errors.StorageError(f"no file at {name!r}")
    infos.sort(key=lambda info: _natural(info.path))
    root = f"{scheme}://" + "/" * (scheme == "file")
    return [
        File(
            str(Location(root + info.path.lstrip("/"))),
            info.path,
            info.size,
            system,
        )
        for info in infos
    ]


def _matches(path: str, pattern: str) -> bool:
    """As glob does: * and ? stay within a folder, ** does not."""
    if "**" in pattern:
        return fnmatch.fnmatchcase(path, pattern.replace("**/", "*"))
    have, want = path.split("/"), pattern.split("/")
    return len(have) == len(want) and all(
        fnmatch.fnmatchcase(a, b) for a, b in zip(have, want, strict=True)
    )


def _system(url: str, scheme: str) -> tuple[Any, str]:
    """(file system, path in it) of a URL."""
    if scheme in _ARROW_SCHEMES:
        head, query = url.replace("gcs://", "gs://", 1), ""
        if "=" in head.rpartition("?")[2]:
            head, _, query = head.rpartition("?")
        if head.startswith("gs:") and "retry_limit_seconds=" not in query:
            # Else 15 minutes pass before an error.
            query += f"{'&' if query else ''}retry_limit_seconds={_RETRY_S}"
        options = f"?{query}" if query else ""
        mark = _GLOB.search(head)  # "?" and "[" are no part of a path there
        if not mark:
            system, path = fs.FileSystem.from_uri(head + options)
            return system, path
        base = head[: mark.start()].rpartition("/")[0]
        system, path = fs.FileSystem.from_uri(base + options)
        return system, path.rstrip("/") + head[len(base) :]
    try:
        import fsspec
    except ImportError:
        raise errors.StorageError(
            f"{scheme}:// needs fsspec, which is not installed: "
            f"{install(extra='remote')}"
        ) from None
    try:
        system, path = fsspec.core.url_to_fs(url)
    except Exception as error:  # whatever the library of the scheme raises
        remedy = ""
        if isinstance(error, ImportError):  # of what fsspec needs itself
            remedy = f": {install(extra='remote')}"
        raise errors.StorageError(
            f"cannot read {scheme}://: {_remedied(error)}{remedy}"
        ) from None
    return fs.PyFileSystem(_Handler(system)), path


class _Handler(fs.FSSpecHandler):  # type: ignore[misc]
    """A file system of fsspec. Those raise anything, with whole URLs in it:
    here they raise OSError, or ValueError while they read."""

    def get_file_info(self, paths: list[str]) -> Any:
        with _as(OSError):
            return super().get_file_info(paths)

    def get_file_info_selector(self, selector: fs.FileSelector) -> Any:
        with _as(OSError):
            return super().get_file_info_selector(selector)

    def open_input_file(self, path: str) -> Any:
        with _as(OSError):
            if not self.fs.isfile(path):
                raise FileNotFoundError(path)
            file = self.fs.open(path, mode="rb")
        return pa.PythonFile(_Reading(file), mode="r")

    open_input_stream = open_input_file


class _Reading:
    """A file of fsspec."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._file, name)

        def call(*args: Any) -> Any:
            with _as(OSError, ValueError):
                return found(*args)

        return call if callable(found) else found


@contextlib.contextmanager
def _as(*kinds: type[Exception]) -> Iterator[None]:
    """Errors as one of these, without the secrets of URLs."""
    try:
        yield
    except Exception as error:
        kind_of = next((k for k in kinds if isinstance(error, k)), kinds[0])
        text = str(error) or type(error).__name__
        raise kind_of(shown(text)) from clean(error)


def _natural(name: str) -> list[tuple[int, int | str]]:
    parts: list[tuple[int, int | str]] = []
    digits = ""
    for c in name + "\0":
        if c in "0123456789":
            digits += c
            continue
        if digits:
            parts.append((0, int(digits)))
            digits = ""
        parts.append((1, c))
    return parts
