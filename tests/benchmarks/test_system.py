"""The processes that the benchmarks of the distributed part start."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from benchmarks.system.processes import ROOT, Processes, program
from tests.system.processes import is_there, wait_until


class Answering:
    """A TCP server that sends back what it gets, until that ends."""

    def __init__(self):
        self.listener = socket.create_server(("127.0.0.1", 0))
        port = self.listener.getsockname()[1]
        self.address = f"127.0.0.1:{port}"
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.serve, daemon=True)
        self.thread.start()

    def serve(self):
        connection, _ = self.listener.accept()
        with connection:
            while data := connection.recv(1 << 16):
                connection.sendall(data)
        self.ended.set()


def receive(connection, n):
    parts = []
    while n > 0:
        part = connection.recv(min(n, 1 << 16))
        assert part, "the connection ended early"
        parts.append(part)
        n -= len(part)
    return b"".join(parts)


def connect(address):
    host, port = address.split(":")
    return socket.create_connection((host, int(port)), timeout=30)


def test_relay_delays_and_keeps_every_byte():
    answering = Answering()
    with Processes() as processes:
        relay = processes.relay(answering.address)
        relay.delay(0)
        with connect(relay.address) as c:
            c.sendall(b"x")
            assert receive(c, 1) == b"x"
            assert relay.delay(40)[0] == 2
            start = time.monotonic()
            c.sendall(b"y")
            assert receive(c, 1) == b"y"
            # Two ways of 40 ms; how much later decides nothing.
            assert time.monotonic() - start >= 0.080
            data = os.urandom(5 << 20)
            sender = threading.Thread(target=c.sendall, args=(data,))
            sender.start()
            assert receive(c, len(data)) == data
            sender.join()
            relayed, cpu = relay.delay(0)
            assert relayed == 2 * (len(data) + 2)
            assert cpu > 0
            # A half-closed connection is passed on, both ways.
            c.shutdown(socket.SHUT_WR)
            assert c.recv(1) == b""
        assert answering.ended.wait(30)


def test_relay_to_nobody_closes_the_connection():
    with socket.create_server(("127.0.0.1", 0)) as s:
        port = s.getsockname()[1]
    with Processes() as processes:
        relay = processes.relay(f"127.0.0.1:{port}")
        with connect(relay.address) as c, contextlib.suppress(OSError):
            assert c.recv(1) == b""
        relay.delay(0)  # it lives


def test_processes_are_gone_after_the_block():
    with Processes() as processes:
        one = processes.start("sleep", ["sleep", "1000"])
        shell = "trap '' TERM; sleep 1000 & echo $!; wait"
        two = processes.start("stubborn", ["sh", "-c", shell])
        child = int(two.line(30))
        two.popen.send_signal(signal.SIGKILL)
        assert one.cpu() >= 0
        assert one.resident() > 0
    wait_until(lambda: not any(map(is_there, (one.pid, two.pid, child))))


def test_a_killed_benchmark_leaves_nothing_behind():
    code = (
        "from benchmarks.system.processes import Processes\n"
        "import time\n"
        "with Processes() as p:\n"
        "    print(p.start('sleep', ['sleep', '1000']).pid, flush=True)\n"
        "    time.sleep(1000)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    ) as benchmark:
        pid = int(benchmark.stdout.readline())
        benchmark.kill()
    wait_until(lambda: not is_there(pid))


def test_a_process_that_fails_says_why():
    with Processes() as processes:
        bad = processes.start("bad", ["sh", "-c", "echo broken >&2; exit 3"])
        with pytest.raises(RuntimeError, match=r"status 3(.|\n)*broken"):
            bad.line(30)


@pytest.mark.skipif(
    not Path("/usr/include/grpc/grpc.h").exists(),
    reason="no headers of gRPC",
)
def test_echo_moves_what_it_is_told():
    with Processes() as processes:
        echo = program("echo", "grpc", "gpr")
        server = processes.start("echo-server", [echo, "serve", "2"])
        client = processes.start("echo-client", [echo, "call", server.line()])
        for line in ("10 1 100 100000 50000 8", "10 4 1000000 1000000"):
            assert float(client.ask(line)) > 0
