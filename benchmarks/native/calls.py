"""The client of `benchmarks.serve` for gRPC, as a process of its own.

It is C (``infer.c``), over the core's client: a request costs little on
the processors that client and server share, and no lock of an interpreter
delays an answer. ``python -m benchmarks.native.calls ADDRESS SECONDS
VOCABULARY RATE FLIGHT``. With a rate, requests begin at times set before, so
many a second, and a latency counts from that time; without one (0), so many
are in flight. Prints one line of JSON.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from ctypes import POINTER, byref, c_char_p, c_double, c_size_t, c_void_p
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks.native import build, declare
from persia.serving.calls import part, text, varint

DENSE, FEATURES, USER, CANDIDATES = 13, 26, 13, 100
_BODIES = 64
_ROOM = 1 << 22  # requests

_lib = ctypes.CDLL(str(build("infer")))
_open = declare(
    *("bench_load_open", c_char_p, c_size_t, POINTER(c_void_p)), lib=_lib
)
_run = declare(
    *("bench_load_run", c_void_p, c_void_p, c_void_p, c_size_t),
    *(c_double, c_double, c_size_t),
    lib=_lib,
)
_seconds = declare(
    *("bench_load_seconds", c_void_p, POINTER(c_size_t), POINTER(c_size_t)),
    result=POINTER(c_double),
    lib=_lib,
)
_close = declare("bench_load_close", c_void_p, result=None, lib=_lib)


def body_of(rng: np.random.Generator, vocabulary: int) -> bytes:
    """A ModelInferRequest: a user beside its candidates."""
    dense = rng.random((CANDIDATES, DENSE), np.float32)
    arrays = [("dense", "FP32", dense)]
    for i in range(FEATURES):
        n = 1 if i < USER else CANDIDATES
        ids = rng.integers(0, vocabulary, n)
        arrays.append((f"f{i:02d}", "INT64", ids))
    out = [text(1, "m")]
    for name, kind, array in arrays:
        sizes = b"".join(varint(n) for n in array.shape)
        out.append(part(5, text(1, name) + text(2, kind) + part(3, sizes)))
    out += [part(7, array.tobytes()) for _, _, array in arrays]
    return b"".join(out)


class Answers(NamedTuple):
    """What a load has shown: seconds of each request that was answered, how
    many failed, and seconds of all and of this process's processors."""

    times: npt.NDArray[np.float64]
    failed: int
    spent: float
    cpu: float


def load(
    address: str, seconds: float, vocabulary: int, rate: float, flight: int
) -> Answers:
    """Requests for so many seconds, and all of their answers."""
    rng = np.random.default_rng(0)
    bodies = [body_of(rng, vocabulary) for _ in range(_BODIES)]
    pointers = (c_char_p * _BODIES)(*bodies)
    sizes = (c_size_t * _BODIES)(*map(len, bodies))
    one, answered, failed = c_void_p(), c_size_t(), c_size_t()
    assert _open(address.encode(), _ROOM, byref(one)) == 0
    begin, before = time.perf_counter(), time.process_time()
    assert _run(one, pointers, sizes, _BODIES, seconds, rate, flight) == 0
    spent = time.perf_counter() - begin
    cpu = time.process_time() - before
    found = _seconds(one, byref(answered), byref(failed))
    times = np.ctypeslib.as_array(found, (answered.value,)).copy()
    _close(one)
    return Answers(times, failed.value, spent, cpu)


def main() -> None:
    address, seconds, vocabulary, rate, flight = sys.argv[1:]
    found = load(
        address, float(seconds), int(vocabulary), float(rate), int(flight)
    )
    n = len(found.times)
    p50, p99, p999 = np.quantile(found.times, [0.5, 0.99, 0.999]) * 1e3
    figures: dict[str, Any] = {
        "requests": n,
        "requests_s": round(n / found.spent, 1),
        "refused": found.failed,
        "p50_ms": round(p50, 2),
        "p99_ms": round(p99, 2),
        "p999_ms": round(p999, 2),
        "client_cpu_ms": round(found.cpu / n * 1e3, 3),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
