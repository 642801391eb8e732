"""Storage by URL: pyarrow's file systems, and those of fsspec."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import pyarrow as pa
from pyarrow import fs

from persia import errors
from persia.base.requirements import install
from persia.base.urls import Url
from persia.redaction import clean, shown

WEB = {"http", "https"}

_ARROW = {"s3", "gs", "gcs", "hdfs", "viewfs", "file", "abfs", "abfss"}
_SLASH = {"hdfs", "viewfs", "file"}  # whose names begin with one
_RETRY_S = 20
_DENIED = re.compile(
    r"access.?denied|expired|forbidden|unauthorized|\b40[13]\b|no credentials"
    r"|credentials? (not|could not)",
    re.IGNORECASE,
)
_REGION = re.compile(
    r"PermanentRedirect|AuthorizationHeaderMalformed|http status 301"
    r"|region .* is wrong|IllegalLocationConstraint",
    re.IGNORECASE,
)
# How libraries begin the text of an answer, or of none.
_ANSWER = re.compile(
    r"AWS Error|google::cloud|GoogleCloud|Azure|HDFS|\[Errno|HTTP|curl"
)


class _Failure(OSError):
    """An error of a file system."""


def system_of(url: Url, path: str) -> tuple[Any, str]:
    """(file system, a path in it) of a path that a URL may have.

    Raises:
        StorageError: there is no library for it.
        OSError, pa.ArrowException: the library refuses it.
    """
    plain = not url.before and not url.after
    if not plain or url.scheme not in _ARROW:
        return _of_fsspec(url.at(path))
    scheme = "gs" if url.scheme == "gcs" else url.scheme
    query = url.query
    if scheme == "gs" and "retry_limit_seconds=" not in query:
        # Else 15 minutes pass before an error.
        query += f"{'&' if query else ''}retry_limit_seconds={_RETRY_S}"
    user = quote(url.user, safe=":%!$&'()*+,;=~")
    root = f"{scheme}://{user}{'@' if user else ''}{url.host}"
    root += "/" if scheme in _SLASH else ""
    system, base = fs.FileSystem.from_uri(
        root + (f"?{query}" if query else "")
    )
    path = base.rstrip("/") + path
    return system, path if scheme in _SLASH else path.lstrip("/")


def infos_of(system: Any, chosen: Any) -> Any:
    """``system.get_file_info(chosen)``, where what is not there is not.

    pyarrow gives the same for a NameNode of HDFS that does not answer.

    Raises:
        OSError: there is no answer, or an error of the library.
    """
    found = system.get_file_info(chosen)
    if _kind(system) != "hdfs" or not _lacks(found):
        return found
    if system.get_file_info("/").type != fs.FileType.Directory:
        raise _Failure("HDFS gives no answer; check the name and the port")
    return system.get_file_info(chosen)


def _lacks(found: Any) -> bool:
    infos = found if isinstance(found, list) else [found]
    missing = fs.FileType.NotFound
    return not infos or any(info.type == missing for info in infos)


def has_folders(system: Any) -> bool:
    """Whether a file needs a folder; object stores have names alone."""
    return _kind(system) not in {"s3", "gcs", "abfs"}


def lists_folders(system: Any) -> bool:
    """Whether a list of a folder has the folders in it; Google's store has
    those that an empty object marks."""
    return _kind(system) != "gcs"


def _kind(system: Any) -> str:
    return str(system.type_name).removeprefix("py::")


def _of_fsspec(url: Url) -> tuple[Any, str]:
    try:
        import fsspec
    except ImportError:
        raise errors.StorageError(
            f"{url.scheme}:// needs fsspec, which is not installed: "
            f"{install(extra='remote')}"
        ) from None
    try:
        system, path = fsspec.core.url_to_fs(url.whole)
    except Exception as error:  # whatever the library of the scheme raises
        remedy = ""
        if isinstance(error, ImportError):  # of what fsspec needs itself
            remedy = f": {install(extra='remote')}"
        raise errors.StorageError(
            f"cannot open {url.named!r}: {why(error)}{remedy}"
        ) from None
    return fs.PyFileSystem(_Handler(system)), path


class _Handler(fs.FSSpecHandler):  # type: ignore[misc]
    """A file system of fsspec. Those raise anything, with whole URLs in it:
    here they raise OSError, or ValueError while they read."""

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name.startswith("_") or name == "fs" or not callable(found):
            return found
        return _guarded(found, OSError)

    def open_input_file(self, path: str) -> Any:
        if not self.fs.isfile(path):
            raise FileNotFoundError(path)
        file = self.fs.open(path, mode="rb")
        return pa.PythonFile(_Open(file), mode="r")

    open_input_stream = open_input_file

    def open_output_stream(self, path: str, metadata: Any) -> Any:
        file = self.fs.open(path, mode="wb")
        return pa.PythonFile(_Open(file), mode="w")


class _Open:
    """A file of fsspec."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._file, name)
        return (
            _guarded(found, OSError, ValueError) if callable(found) else found
        )


def _guarded(call: Any, *kinds: type[Exception]) -> Any:
    """A call whose errors are one of these, without the secrets of URLs."""

    def guarded(*args: Any, **options: Any) -> Any:
        try:
            return call(*args, **options)
        except Exception as error:
            text = shown(str(error) or type(error).__name__)
            kind = next((k for k in kinds if isinstance(error, k)), kinds[0])
            if not issubclass(kind, OSError):
                raise kind(text) from clean(error)
            missing = isinstance(error, FileNotFoundError)
            kind = FileNotFoundError if missing else _Failure
            raise kind(text) from clean(error)

    return guarded


@contextlib.contextmanager
def opening(name: str) -> Iterator[None]:
    """Errors of opening a file as those of storage."""
    try:
        yield
    except errors.PersiaError:
        raise
    except (OSError, pa.ArrowException) as error:
        raise errors.StorageError(
            f"cannot open {name!r}: {why(error)}"
        ) from clean(error)
    except ValueError as error:
        raise failed(name, error, "; download the file") from clean(error)


def failed(
    name: str, error: BaseException, remedy: str = ""
) -> errors.StorageError:
    """The error of storage that gives a file, or a part of it, not."""
    return errors.StorageError(f"cannot read {name!r}: {why(error)}{remedy}")


def is_refused(error: BaseException) -> bool:
    """Whether an error of a read is one of its storage: an answer, or none.
    Else the bytes of the file are wrong."""
    if isinstance(error, _Failure):
        return True
    if getattr(error, "errno", None) is not None:
        return True
    return bool(_ANSWER.search(str(error)))


def why(error: BaseException) -> str:
    """The first line of an error, with a remedy."""
    text = (str(error) or type(error).__name__).splitlines()[0]
    if _REGION.search(text):
        return text + "; name the bucket's region in the URL: ?region=NAME"
    if _DENIED.search(text):
        text += (
            "; give the keys of this storage in the environment, or in the "
            "URL (checkpoints keep none), or renew them"
        )
    return text
