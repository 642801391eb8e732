"""The client of `benchmarks.serve` for gRPC, as a process of its own.

It calls the C core's client, so that a request costs little on the processors
that client and server share: ``python -m benchmarks.calls ADDRESS SECONDS
VOCABULARY RATE FLIGHT``. With a rate, requests begin at times set before, so
many a second, and a latency counts from that time; without one (0), so many
are in flight. Prints one line of JSON.
"""

from __future__ import annotations

import ctypes
import json
import sys
import threading
import time
from ctypes import (
    POINTER,
    Structure,
    c_char_p,
    c_int,
    c_size_t,
    c_uint32,
    c_uint64,
    c_void_p,
)
from pathlib import Path
from typing import Any

import numpy as np

import persia
from persia.serving.calls import part, text, varint

DENSE, FEATURES, USER, CANDIDATES = 13, 26, 13, 100
_PATH = b"/inference.GRPCInferenceService/ModelInfer"
_TIMEOUT_NS = 60 * 10**9
_BODIES = 64


class _Security(Structure):
    _fields_ = [
        *((name, c_char_p) for name in ("ca", "cert", "key")),
        ("mutual", c_int),
        *((name, c_char_p) for name in ("token", "admin", "server_name")),
        ("insecure", c_int),
    ]


class _Methods(Structure):
    _fields_ = [
        ("service", c_char_p),
        ("paths", POINTER(c_char_p)),
        ("n", c_uint32),
        ("admin", c_uint32),
    ]


class _Config(Structure):
    _fields_ = [
        ("address", c_char_p),
        ("message_limit", c_uint64),
        ("keepalive_ns", c_uint64),
        ("security", _Security),
        ("methods", POINTER(_Methods)),
    ]


class _Out(Structure):
    _fields_ = [
        ("spans", c_void_p),
        ("spans_n", c_size_t),
        ("bytes", c_size_t),
        ("referred", c_size_t),
        ("chunks", c_void_p),
        ("spans_room", c_size_t),
    ]


_CALLBACK = ctypes.CFUNCTYPE(None, c_void_p, c_int, c_void_p)


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


class Client:
    """A channel to the server, and what its calls have taken."""

    def __init__(self, address: str, vocabulary: int) -> None:
        package = Path(persia.__file__).parent
        self._core = ctypes.CDLL(str(package / "libpersia.so"))
        rng = np.random.default_rng(0)
        self._bodies = [body_of(rng, vocabulary) for _ in range(_BODIES)]
        paths = (c_char_p * 1)(_PATH)
        self._methods = _Methods(b"inference.GRPCInferenceService", paths, 1)
        config = _Config(address.encode(), 1 << 28, 0, _Security())
        config.methods = ctypes.pointer(self._methods)
        self._channel = c_void_p()
        code = self._core.persia_rpc_channel_open(
            ctypes.byref(config), ctypes.byref(self._channel)
        )
        assert code == 0
        self._core.persia_rpc_start.argtypes = [
            *(c_void_p, c_uint32, c_void_p, c_uint64, _CALLBACK, c_void_p)
        ]
        self._core.persia_wire_out_add.argtypes = [
            *(c_void_p, c_char_p, c_size_t)
        ]
        self._core.persia_rpc_reply_free.argtypes = [c_void_p]
        self._callback = _CALLBACK(self._ended)
        self._due: dict[int, float] = {}
        self._free = threading.Semaphore(0)
        self.times: list[float] = []
        self.failed = 0

    def _ended(self, number: int | None, code: int, reply: int) -> None:
        if code:
            self.failed += 1
        else:
            self.times.append(time.perf_counter() - self._due.pop(number or 0))
            self._core.persia_rpc_reply_free(reply)
        self._free.release()

    def start(self, number: int, due: float) -> None:
        """Begins a request."""
        out = _Out()
        at = ctypes.byref(out)
        body = self._bodies[number % _BODIES]
        self._core.persia_wire_out_init(at)
        self._core.persia_wire_out_add(at, body, len(body))
        self._due[number] = due
        code = self._core.persia_rpc_start(
            self._channel, 0, at, _TIMEOUT_NS, self._callback, number
        )
        assert code == 0

    def run(self, seconds: float, rate: float, flight: int) -> None:
        """All requests, and their answers."""
        self.times.clear()
        self.failed = n = 0
        begin = time.perf_counter()
        for _ in range(0 if rate else flight):
            self._free.release()
        while True:
            due = begin + n / rate if rate else time.perf_counter()
            if due > begin + seconds:
                break
            if rate:
                time.sleep(max(0.0, due - time.perf_counter()))
            else:
                self._free.acquire()
                due = time.perf_counter()
            self.start(n, due)
            n += 1
        for _ in range(n if rate else flight):
            self._free.acquire()


def figures(client: Client, spent: float) -> dict[str, Any]:
    """What a run has shown."""
    p50, p99, p999 = np.quantile(client.times, [0.5, 0.99, 0.999]) * 1e3
    return {
        "requests": len(client.times),
        "requests_s": round(len(client.times) / spent, 1),
        "refused": client.failed,
        "p50_ms": round(p50, 2),
        "p99_ms": round(p99, 2),
        "p999_ms": round(p999, 2),
    }


def main() -> None:
    address, seconds, vocabulary, rate, flight = sys.argv[1:]
    client = Client(address, int(vocabulary))
    begin, before = time.perf_counter(), time.process_time()
    client.run(float(seconds), float(rate), int(flight))
    spent = time.perf_counter() - begin
    found = figures(client, spent)
    cpu = (time.process_time() - before) / max(1, found["requests"])
    print(json.dumps(found | {"client_cpu_ms": round(cpu * 1e3, 3)}))


if __name__ == "__main__":
    main()
