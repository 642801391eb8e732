"""The boundary of public calls: errors of other libraries become Persia's."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import pyarrow as pa

from persia import errors
from persia.redaction import clean

P = ParamSpec("P")
R = TypeVar("R")

_STORAGE = re.compile(
    r"AWS Error|GetObject|HDFS|Errno|HTTP|curl|network|connection|timed? ?out"
    r"|access.?denied|expired|credential",
    re.IGNORECASE,
)


def is_of_storage(error: BaseException) -> bool:
    """Whether an error is of the place that a file is in, not of its
    bytes."""
    return isinstance(error, OSError) and bool(_STORAGE.search(str(error)))


@contextlib.contextmanager
def guarding(what: str) -> Iterator[None]:
    """Turns errors of other libraries into Persia's.

    Args:
        what: is done, for messages.

    Raises:
        StorageError: a file cannot be read.
        MalformedData: data cannot be read.
        InvalidArgument: what was passed makes another library fail.
    """
    try:
        yield
    except (errors.PersiaError, MemoryError):
        raise
    except Exception as error:
        name = type(error).__name__
        text = f"{what}: {name}: {(str(error) or name).splitlines()[0]}"
        if isinstance(error, OSError) and not isinstance(
            error, pa.ArrowException
        ):
            raise errors.StorageError(text) from clean(error)
        if isinstance(error, pa.ArrowException | UnicodeError):
            raise errors.MalformedData(text) from clean(error)
        raise errors.InvalidArgument(text) from clean(error)


def guarded(call: Callable[P, R]) -> Callable[P, R]:
    """A function, within :func:`guarding`; calls of wrong arguments are
    TypeErrors as of any function."""
    code = call.__code__

    @wraps(call)
    def guarded_call(*args: Any, **kwargs: Any) -> R:
        try:
            return call(*args, **kwargs)
        except (errors.PersiaError, MemoryError):
            raise
        except Exception as error:
            trace = error.__traceback__
            inner = trace.tb_next if trace is not None else None
            if inner is None or inner.tb_frame.f_code is not code:
                raise  # the call itself is wrong
            with guarding(call.__qualname__):
                raise

    return guarded_call
