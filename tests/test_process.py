"""What Persia changes of the process that it runs in."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import closing

import pytest

from persia import _core
from tests.remote import Servers

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not _core.GRPC[0].isdigit(), reason="without gRPC"),
]

# What a child prints: its file limits, and whether malloc maps a block of
# 31 MiB, which glibc does unless it was set otherwise. The block is never
# given back: that alone would change what glibc does.
_SETTINGS = """
import ctypes, resource, sys

class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks",
        "fsmblks", "uordblks", "fordblks", "keepcost")]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Info
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))

def settings():
    before = libc.mallinfo2().hblks
    assert libc.malloc(31 << 20)
    maps = libc.mallinfo2().hblks - before
    print(maps, *resource.getrlimit(resource.RLIMIT_NOFILE))

settings()
"""

_TRAINER = """
import persia, torch

for where in ({}, {"servers": sys.argv[1]}):
    with persia.Store(optimizer=persia.optim.SGD(lr=0.1), **where) as store:
        bags = persia.EmbeddingBagCollection(
            store=store,
            tables=[persia.EmbeddingBagConfig("t", 4, feature_names=["f"])],
        )
        batch = persia.JaggedBatch(["f"], torch.arange(5))
        bags(batch).values().sum().backward()
        store.flush()
    settings()
"""

_SERVER = """
from tests.remote import Servers

servers = Servers(1)
settings()
servers.close()
"""


def _child(code: str, *arguments: str) -> list[str]:
    """The settings that it printed, each time."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("MALLOC_") and name != "GLIBC_TUNABLES"
    }
    done = subprocess.run(
        [sys.executable, "-c", _SETTINGS + code, *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=120,
    )
    first, *later = done.stdout.splitlines()
    if not first.startswith("1 512 "):
        pytest.skip(f"malloc or the limits are not the usual: {first}")
    return [first, *later]


def test_a_trainer_keeps_the_settings_of_its_process() -> None:
    with closing(Servers(1)) as servers:
        before, embedded, remote = _child(_TRAINER, servers.text)
    assert embedded == before
    assert remote == before


def test_a_server_takes_what_it_needs() -> None:
    """Without this the test above would see nothing."""
    before, listening = _child(_SERVER)
    maps, soft, hard = listening.split()
    assert maps == "0"
    assert int(soft) > 512 or before.split()[2] == "512"
    assert hard == before.split()[2]
