"""What probes are answered by processes: before they serve, and while."""

from __future__ import annotations

import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from persia import _core
from persia.base.health import LIVE, READY, STARTUP
from tests.system.processes import environment, wait_until
from tests.system.shards import free_port

if not _core.GRPC[0].isdigit():
    pytest.skip("built without gRPC", allow_module_level=True)


@contextmanager
def process(*command: str) -> Iterator[str]:
    """One that has a page; its address."""
    with subprocess.Popen(
        [sys.executable, "-m", "persia", *command, "--metrics-port", "0"],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as made:
        try:
            assert made.stdout is not None
            for line in made.stdout:
                if found := re.match(r"metrics on (http://.*)/metrics", line):
                    yield found[1]
                    return
            raise AssertionError(f"{command} ended without a page")
        finally:
            made.kill()


def answers(page: str) -> tuple[int, int, int]:
    """To the probes of life, readiness and start."""
    found = []
    for path in (LIVE, READY, STARTUP):
        try:
            answer = urllib.request.urlopen(page + path)
        except urllib.error.HTTPError as error:
            answer = error
        with closing(answer):
            found.append(answer.status)
    return found[0], found[1], found[2]


def test_a_worker_is_alive_but_not_ready_until_its_servers_answer() -> None:
    port = free_port()
    worker = ("serve", "worker", "--port", "0", "--timeout", "300")
    with process(*worker, "--servers", f"127.0.0.1:{port}") as page:
        assert answers(page) == (200, 503, 503)
        with process("serve", "ps", "--port", str(port)) as server:
            wait_until(lambda: answers(server) == (200, 200, 200))
            wait_until(lambda: answers(page) == (200, 200, 200))
        # Its servers are away: it is ready to wait for them.
        assert answers(page) == (200, 200, 200)
