"""Frames of HTTP/2 that no client sends: the server serves others meanwhile,
and keeps nothing of those that sent them."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from persia import _core
from tests.system.processes import environment, wait_until

if not _core.GRPC[0].isdigit():
    pytest.skip("built without gRPC", allow_module_level=True)
pytestmark = pytest.mark.slow

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RESET, SETTINGS = range(5)
PUSH, PING, GOAWAY, WINDOW, CONTINUATION = range(5, 10)
END_STREAM, END_HEADERS = 1, 4
HEALTH = "/grpc.health.v1.Health/Check"


def frame(kind: int, flags: int, stream: int, body: bytes = b"") -> bytes:
    """RFC 9113, 4.1."""
    size = struct.pack(">I", len(body))[1:]
    return size + bytes([kind, flags]) + struct.pack(">I", stream) + body


def literal(name: bytes, value: bytes) -> bytes:
    """A field that no table keeps: RFC 7541, 6.2.2."""
    return b"\x00" + length(name) + name + length(value) + value


def length(text: bytes) -> bytes:
    if len(text) < 127:
        return bytes([len(text)])
    left, out = len(text) - 127, bytearray([127])
    while left >= 128:
        out.append(left % 128 + 128)
        left //= 128
    return bytes([*out, left])


def call_of(path: str) -> bytes:
    """The header block of a call."""
    return b"".join(
        literal(name.encode(), value.encode())
        for name, value in (
            (":method", "POST"),
            (":scheme", "http"),
            (":path", path),
            (":authority", "x"),
            ("te", "trailers"),
            ("content-type", "application/grpc"),
        )
    )


PULL = call_of("/persia.v1.ParameterServer/Pull")
OPEN = PREFACE + frame(SETTINGS, 0, 0)
CUT = b"\x00" + struct.pack(">I", 1 << 31) + b"few"  # of a message of 2 GiB


def streams(n: int, each: Callable[[int], bytes]) -> bytes:
    return b"".join(each(2 * i + 1) for i in range(n))


#: What a client sends on one connection.
ATTACKS: dict[str, bytes] = {
    "nothing": b"",
    "half a preface": PREFACE[:10],
    "no preface": b"\xff" * 4096,
    "of HTTP/1": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "of TLS": bytes.fromhex("16030100a5010000a10303") + b"\0" * 160,
    "settings of a wrong size": OPEN + frame(SETTINGS, 0, 0, b"\0" * 7),
    "settings of a stream": OPEN + frame(SETTINGS, 0, 1),
    "a window without end": OPEN
    + frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 1 << 31)),
    "a frame of 16 MiB": OPEN + b"\xff\xff\xff\x00\x00\0\0\0\1" + b"\0" * 99,
    "an unknown kind": OPEN + frame(99, 255, 7, b"\0" * 99),
    "data of no stream": OPEN + frame(DATA, 0, 9, b"\0" * 99),
    "an even stream": OPEN + frame(HEADERS, END_HEADERS, 2, PULL),
    "headers that go on as data": OPEN
    + frame(HEADERS, 0, 1, PULL[:20])
    + frame(DATA, 0, 1, b"\0"),
    "headers that never end": OPEN
    + frame(HEADERS, 0, 1, PULL)
    + b"".join(
        frame(CONTINUATION, 0, 1, literal(b"k%d" % i, b"v" * 900))
        for i in range(4000)
    ),
    "a header of 10 MiB": OPEN
    + frame(HEADERS, 0, 1, b"\x00\x01k" + length(b"v" * (10 << 20)))
    + b"".join(frame(CONTINUATION, 0, 1, b"v" * 16384) for _ in range(640)),
    "a number without end": OPEN
    + frame(HEADERS, END_HEADERS, 1, b"\x00\x7f" + b"\xff" * 9000),
    "an index of nothing": OPEN
    + frame(HEADERS, END_HEADERS, 1, b"\xff\xff\xff\xff\x07"),
    "a table of 4 GiB": OPEN
    + frame(HEADERS, END_HEADERS, 1, b"\x3f\xe1\xff\xff\xff\x0f" + PULL),
    "text that is no Huffman code": OPEN
    + frame(HEADERS, END_HEADERS, 1, b"\x00\x84" + b"\xff" * 4),
    "half a message": OPEN
    + frame(HEADERS, END_HEADERS, 1, PULL)
    + frame(DATA, 0, 1, b"\0\0\0\1\0half"),
    "a message of 2 GiB": OPEN
    + frame(HEADERS, END_HEADERS, 1, PULL)
    + frame(DATA, END_STREAM, 1, CUT),
    "a stream of its own": OPEN
    + frame(PRIORITY, 0, 1, struct.pack(">IB", 1, 16)),
    "a push": OPEN + frame(PUSH, END_HEADERS, 1, b"\0\0\0\2" + PULL),
    "a window of 0": OPEN + frame(WINDOW, 0, 0, b"\0\0\0\0"),
    "windows that overflow": OPEN
    + frame(WINDOW, 0, 0, struct.pack(">I", (1 << 31) - 1)) * 4,
    "a goodbye first": OPEN
    + frame(GOAWAY, 0, 0, b"\0" * 8)
    + frame(HEADERS, END_HEADERS, 1, PULL),
    "many settings": OPEN + frame(SETTINGS, 0, 0) * 50_000,
    "many pings": OPEN + frame(PING, 0, 0, b"12345678") * 50_000,
    "many empty frames": OPEN
    + frame(HEADERS, END_HEADERS, 1, PULL)
    + frame(DATA, 0, 1) * 50_000,
    "many resets": OPEN
    + streams(
        20_000,
        lambda at: (
            frame(HEADERS, END_HEADERS, at, PULL)
            + frame(RESET, 0, at, b"\0\0\0\x08")
        ),
    ),
    "many streams": OPEN
    + streams(20_000, lambda at: frame(HEADERS, END_HEADERS, at, PULL)),
}


class Server:
    """A process."""

    def __init__(self, folder: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "persia", "serve", "ps", "--port", "0"],
            env=environment(),
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.search(r"on (\S+)$", line)
        assert found, line
        self.address = found[1]

    def connect(self) -> socket.socket:
        host, _, port = self.address.rpartition(":")
        return socket.create_connection((host, int(port)), 20)

    @property
    def memory(self) -> int:
        """Bytes."""
        pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    @property
    def sockets(self) -> int:
        found = 0
        for one in Path(f"/proc/{self.process.pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                found += os.readlink(one).startswith("socket:")
        return found

    def serves(self) -> None:
        """Another client gets its answer."""
        with grpc.insecure_channel(self.address) as channel:
            ask = channel.unary_unary(HEALTH)
            assert ask(b"", timeout=20, wait_for_ready=True) == b"\x08\x01"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    made = Server(tmp_path_factory.mktemp("server"))
    try:
        made.serves()
        yield made
        made.process.send_signal(signal.SIGTERM)
        assert made.process.wait(60) == 0
    finally:
        made.process.kill()
        made.process.communicate()


def send(to: socket.socket, data: bytes) -> None:
    """As much as it takes."""
    to.settimeout(5)
    with contextlib.suppress(OSError):
        to.sendall(data)


@pytest.mark.parametrize("name", ATTACKS)
def test_others_are_served_meanwhile(name: str, server: Server) -> None:
    before = server.sockets
    with contextlib.ExitStack() as stack:
        ways = [stack.enter_context(server.connect()) for _ in range(4)]
        threads = [
            threading.Thread(target=send, args=(one, ATTACKS[name]))
            for one in ways
        ]
        for thread in threads:
            thread.start()
        server.serves()
        for thread in threads:
            thread.join()
        server.serves()
    wait_until(lambda: server.sockets <= before)
    server.serves()


def test_what_was_sent_is_not_kept(server: Server) -> None:
    """The same again costs no more memory."""

    def all_of_them() -> int:
        for data in ATTACKS.values():
            with server.connect() as one:
                send(one, data)
        server.serves()
        time.sleep(0.1)
        return server.memory

    for _ in range(2):
        first = all_of_them()
    assert max(all_of_them() for _ in range(3)) < first + (32 << 20)


@pytest.mark.parametrize("seed", range(40))
def test_any_frames_are_survived(seed: int, server: Server) -> None:
    draw = random.Random(seed)
    data = OPEN
    for _ in range(draw.randrange(1, 200)):
        body = draw.choice(
            (
                b"",
                PULL,
                PULL[: draw.randrange(len(PULL))],
                CUT,
                draw.randbytes(draw.randrange(64)),
                draw.randbytes(8),
                draw.randbytes(4),
            )
        )
        kind, flags = draw.randrange(11), draw.choice((0, 1, 4, 5, 255))
        data += frame(kind, flags, draw.randrange(8), body)
    if draw.random() < 0.5:
        at = draw.randrange(len(PREFACE), len(data))
        data = data[:at] + draw.randbytes(1) + data[at + 1 :]
    with server.connect() as one:
        send(one, data)
        server.serves()
