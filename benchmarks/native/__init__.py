"""Builds C files against libpersia and wraps ``bench.c`` for Python."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from ctypes import (
    POINTER,
    byref,
    c_char_p,
    c_int,
    c_size_t,
    c_uint32,
    c_uint64,
    c_void_p,
)
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = ROOT / "persia" / "libpersia.so"

FP32, BF16 = 0, 1
ADAGRAD, ROWWISE_ADAGRAD = 1, 2
RAISE, LRU = 0, 1
STATE_FLOATS = {ADAGRAD: lambda dim: dim, ROWWISE_ADAGRAD: lambda dim: 1}


def build(name: str) -> Path:
    """Compiles NAME.c, if it is newer than the library made of it."""
    source = Path(__file__).with_name(f"{name}.c")
    out = ROOT / "build" / "benchmarks" / f"{name}.so"
    sources = [source, LIBRARY, *ROOT.glob("csrc/*/*.h")]
    if not LIBRARY.exists():
        raise SystemExit(f"{LIBRARY} is missing: run `make setup` first")
    if out.exists() and out.stat().st_mtime > max(
        s.stat().st_mtime for s in sources
    ):
        return out
    out.parent.mkdir(parents=True, exist_ok=True)
    cc = os.environ.get("CC") or shutil.which("cc") or "gcc"
    scratch = out.with_suffix(f".{os.getpid()}")
    flags = (
        "-std=c11 -D_GNU_SOURCE -O3 -march=native -ffp-contract=off"
        " -fno-math-errno -Wall -Wextra -fPIC -shared -fvisibility=hidden"
    )
    command = [
        cc,
        *flags.split(),
        f"-I{ROOT / 'csrc'}",
        str(source),
        "-o",
        str(scratch),
    ]
    command += [str(LIBRARY), f"-Wl,-rpath,{LIBRARY.parent}", "-lm"]
    subprocess.run(command, check=True)
    scratch.replace(out)
    return out


_lib = ctypes.CDLL(str(build("bench")))
_core = ctypes.CDLL(str(LIBRARY))


def declare(
    name: str,
    *types: type,
    result: type | None = c_int,
    lib: ctypes.CDLL = _lib,
):  # type: ignore[no-untyped-def]
    function = getattr(lib, name)
    function.argtypes = types
    function.restype = result
    return function


_create = declare(
    "bench_create",
    *[c_uint32] * 3,
    c_uint64,
    c_uint32,
    POINTER(c_void_p),
)
_pull = declare(
    "bench_pull", c_void_p, c_void_p, c_size_t, c_void_p, c_void_p, c_void_p
)
_push = declare(
    "bench_push", c_void_p, c_void_p, c_size_t, c_void_p, c_void_p, c_void_p
)
_stats = declare(
    "bench_stats", c_void_p, *[POINTER(c_uint64)] * 5, result=None
)
_rows_new = declare("bench_rows_new", c_size_t, result=c_void_p)
_rows_free = declare("bench_rows_free", c_void_p, c_size_t, result=None)
_rows_fill = declare(
    "bench_rows_fill", c_void_p, *[c_size_t] * 4, c_uint32, result=None
)
_gather = declare(
    "bench_gather",
    c_void_p,
    c_size_t,
    c_size_t,
    c_void_p,
    c_size_t,
    c_uint32,
    c_void_p,
    result=None,
)
_adagrad = declare(
    "bench_adagrad",
    c_void_p,
    c_size_t,
    c_size_t,
    c_void_p,
    c_size_t,
    c_uint32,
    c_void_p,
    result=None,
)
_sched_create = declare(
    "persia_sched_create", ctypes.c_uint, POINTER(c_void_p), lib=_core
)
_sched_destroy = declare(
    "persia_sched_destroy", c_void_p, result=None, lib=_core
)
_table_destroy = declare(
    "persia_table_destroy", c_void_p, result=None, lib=_core
)
_list = declare(
    "persia_table_list",
    c_void_p,
    POINTER(c_uint64),
    c_size_t,
    c_void_p,
    POINTER(c_size_t),
    lib=_core,
)
_err_text = declare("persia_err_text", result=c_char_p, lib=_core)


def check(code: int) -> None:
    """Raises what a function of the library has failed with."""
    if code:
        raise RuntimeError(f"error {code}: {_err_text().decode()}")


class Sched:
    """A thread pool; with one thread all runs on the caller."""

    def __init__(self, threads: int) -> None:
        self.handle = c_void_p()
        check(_sched_create(threads, byref(self.handle)))

    def close(self) -> None:
        _sched_destroy(self.handle)


class Table:
    """One table.  ids: uint64 or int64 [n]; vectors: float32 [n, dim]."""

    def __init__(
        self,
        dim: int,
        dtype: int = FP32,
        optimizer: int = ADAGRAD,
        capacity: int = 0,
        full: int = RAISE,
    ) -> None:
        self.dim, self.dtype = dim, dtype
        self.state_floats = STATE_FLOATS[optimizer](dim)
        self.handle = c_void_p()
        check(
            _create(dim, dtype, optimizer, capacity, full, byref(self.handle))
        )

    def close(self) -> None:
        _table_destroy(self.handle)

    def pull(self, s: Sched, out: np.ndarray, ids: np.ndarray) -> None:
        check(
            _pull(
                s.handle,
                self.handle,
                len(ids),
                ids.ctypes.data,
                out.ctypes.data,
                None,
            )
        )

    def push(self, s: Sched, grad: np.ndarray, ids: np.ndarray) -> None:
        check(
            _push(
                s.handle,
                self.handle,
                len(ids),
                ids.ctypes.data,
                None,
                grad.ctypes.data,
            )
        )

    def stats(self) -> tuple[int, int, int]:
        """Rows; bytes of rows, index and slack; bytes of one row."""
        rows, total, row, _, _ = self._stats()
        return rows, total, row

    def evicted(self) -> tuple[int, int]:
        """Rows evicted; slots that the table looked at for it."""
        _, _, _, evicted, candidates = self._stats()
        return evicted, candidates

    def _stats(self) -> tuple[int, ...]:
        out = [c_uint64() for _ in range(5)]
        _stats(self.handle, *map(byref, out))
        return tuple(x.value for x in out)

    def ids(self) -> np.ndarray:
        """The ids that have rows, uint64, in no order."""
        out = np.empty(self.stats()[0], np.uint64)
        n = c_size_t()
        check(
            _list(
                self.handle,
                byref(c_uint64()),
                len(out),
                out.ctypes.data,
                byref(n),
            )
        )
        return out[: n.value]


class KnownRows:
    """The baseline: an array of rows of ``stride`` bytes, found by number."""

    def __init__(
        self, rows: int, stride: int, offset: int, dim: int, state_floats: int
    ) -> None:
        self.stride, self.offset, self.dim, self.floats = (
            stride,
            offset,
            dim,
            dim + state_floats,
        )
        self.bytes = rows * stride + 4096
        self.base = _rows_new(self.bytes)
        if not self.base:
            raise MemoryError(f"{self.bytes} bytes of baseline rows")
        self.filled = 0

    def close(self) -> None:
        _rows_free(self.base, self.bytes)

    def fill(self, rows: int) -> None:
        _rows_fill(
            self.base, self.stride, self.offset, self.filled, rows, self.floats
        )
        self.filled = rows

    def gather(self, out: np.ndarray, rows: np.ndarray) -> None:
        _gather(
            self.base,
            self.stride,
            self.offset,
            rows.ctypes.data,
            len(rows),
            self.dim,
            out.ctypes.data,
        )

    def adagrad(self, grad: np.ndarray, rows: np.ndarray) -> None:
        _adagrad(
            self.base,
            self.stride,
            self.offset,
            rows.ctypes.data,
            len(rows),
            self.dim,
            grad.ctypes.data,
        )
