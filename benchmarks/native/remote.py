"""Wraps ``remote.c``: tables behind a server, as a trainer reaches them."""

from __future__ import annotations

import ctypes
from ctypes import (
    POINTER,
    byref,
    c_char_p,
    c_size_t,
    c_uint,
    c_uint32,
    c_uint64,
    c_void_p,
)

import numpy as np

from benchmarks.native import build, check, declare

FP32, FP16, BF16 = 0, 1, 2  # on the wire

_lib = ctypes.CDLL(str(build("remote")))
_open = declare(
    "bench_remote_open",
    c_char_p,
    c_char_p,
    c_uint32,
    c_uint32,
    c_uint32,
    c_uint,
    c_uint64,
    POINTER(c_void_p),
    lib=_lib,
)
_close = declare("bench_remote_close", c_void_p, result=None, lib=_lib)
_pull = declare(
    "bench_remote_pull",
    c_void_p,
    c_uint32,
    c_size_t,
    c_void_p,
    c_void_p,
    c_void_p,
    lib=_lib,
)
_push = declare(
    "bench_remote_push",
    c_void_p,
    c_uint64,
    c_uint32,
    c_size_t,
    c_void_p,
    c_void_p,
    c_void_p,
    lib=_lib,
)
_rows = declare("bench_remote_rows", c_void_p, result=c_uint64, lib=_lib)
_bytes = declare(
    "bench_remote_bytes",
    c_void_p,
    POINTER(c_uint64),
    POINTER(c_uint64),
    result=None,
    lib=_lib,
)


class Remote:
    """Tables with Adagrad on one server (address None: in this process);
    calls may come from any thread.

    ids: uint64 or int64 [tables, n]; vectors: float32 [tables, n, dim];
    rows: uint32 [tables, n], hints from a pull.
    """

    def __init__(
        self,
        address: str | None,
        name: str,
        tables: int,
        dim: int,
        *,
        dtype: int = FP32,
        threads: int = 2,
        stream: int = 1,
    ) -> None:
        self.tables, self.dim = tables, dim
        self._handle = c_void_p()
        check(
            _open(
                None if address is None else address.encode(),
                name.encode(),
                tables,
                dim,
                dtype,
                threads,
                stream,
                byref(self._handle),
            )
        )

    def close(self) -> None:
        _close(self._handle)

    def pull(self, ids: np.ndarray, out: np.ndarray, rows: np.ndarray) -> None:
        check(
            _pull(
                self._handle,
                *ids.shape,
                ids.ctypes.data,
                out.ctypes.data,
                rows.ctypes.data,
            )
        )

    def push(
        self,
        number: int,
        ids: np.ndarray,
        grad: np.ndarray,
        rows: np.ndarray | None = None,
    ) -> None:
        check(
            _push(
                self._handle,
                number,
                *ids.shape,
                ids.ctypes.data,
                None if rows is None else rows.ctypes.data,
                grad.ctypes.data,
            )
        )

    def rows(self) -> int:
        return int(_rows(self._handle))

    def bytes(self) -> tuple[int, int]:
        """Of all requests and of all replies so far."""
        sent, received = c_uint64(), c_uint64()
        _bytes(self._handle, byref(sent), byref(received))
        return sent.value, received.value
