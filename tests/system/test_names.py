"""A server that comes back at another address is found by its name.

A mount namespace has a /etc/hosts of its own.  Needs unshare, and root or
namespaces of users.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from persia import _core
from tests.system.processes import environment
from tests.system.shards import free_port
from tests.system.test_serve import serving

if not _core.GRPC[0].isdigit():
    pytest.skip("built without gRPC", allow_module_level=True)

NAME = "persia-server.test"
WORKER = """
import sys
import persia, torch
from persia.distributed.security import Security

store = persia.Store(
    persia.optim.SGD(lr=1.0),
    servers=sys.argv[1],
    security=Security(insecure=True),
    timeout=60,
)
bags = persia.EmbeddingBagCollection(
    store=store, tables=[persia.EmbeddingBagConfig("user", 4, init=0.0)]
)
ids = persia.JaggedBatch(["user"], torch.arange(10))
for _ in sys.stdin:
    (-bags(ids).values()).sum().backward()
    store.flush()
    print(store.rows("user", range(10)).unique().tolist(), flush=True)
counts = store.stats()["client"]
print("reconnects", counts["reconnects"], "lost", counts["lost"])
"""


@pytest.fixture
def inside(tmp_path: Path) -> tuple[list[str], Path]:
    """What runs a command so that it finds names in a file, and the file."""
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost\n")
    script = f'mount --bind {hosts} /etc/hosts && exec "$@"'
    command = ["unshare", "--user", "--map-root-user", "--mount"]
    command += ["sh", "-c", script, "sh"]
    if shutil.which("unshare") is None:
        pytest.skip("no unshare")
    tried = subprocess.run(
        [*command, "true"], capture_output=True, text=True, check=False
    )
    if tried.returncode:
        pytest.skip(f"no mount namespaces here: {tried.stderr.strip()}")
    return command, hosts


def test_another_address(
    inside: tuple[list[str], Path], tmp_path: Path
) -> None:
    command, hosts = inside
    port = free_port()
    flags = ["--port", str(port), "--checkpoints", str(tmp_path / "c")]
    flags += ["--restore", "job", "--or-empty", "--save-on-exit", "job"]
    command += [sys.executable, "-c", WORKER, f"{NAME}:{port}"]
    hosts.write_text(f"127.0.0.2 {NAME}\n")
    with serving("--host", "127.0.0.2", *flags) as server:
        worker = subprocess.Popen(
            command,
            env=environment(OMP_NUM_THREADS="1"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert worker.stdin is not None and worker.stdout is not None
        try:
            print("go", file=worker.stdin, flush=True)
            assert worker.stdout.readline() == "[1.0]\n", worker.communicate()
            server.stop(signal.SIGTERM)
            hosts.write_text(f"127.0.0.3 {NAME}\n")
            with serving("--host", "127.0.0.3", *flags):
                output, messages = worker.communicate("go\n", timeout=100)
        finally:
            worker.kill()
            worker.communicate()
    assert output == "[2.0]\nreconnects 1 lost 0\n", messages
