"""Steps of a remote store on one server, counted: prints one JSON object.

Run by ``gate.py`` with ``calls.c`` loaded before all other libraries. The
server is a process of its own (``--serve``), so that what is counted is the
client's."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys

import torch

import persia
from persia import JaggedBatch
from tests.remote import Servers

STEPS = 50
SAMPLES = 512


def serve() -> None:
    """Prints the address and serves until stdin ends."""
    servers = Servers(1)
    print(servers.text, flush=True)
    sys.stdin.read()
    servers.close()


def calls() -> list[int]:
    """Allocations, system calls of sockets and instructions so far."""
    out = (ctypes.c_uint64 * 3)()
    ctypes.CDLL(None).calls_read(out)
    return list(out)


def run(address: str) -> dict[str, int]:
    """What STEPS steps with rows that are there took, after as many."""
    store = persia.Store(
        persia.optim.Adam(lr=0.01), servers=address, threads=1
    )
    bags = persia.EmbeddingBagCollection(
        store=store,
        tables=[
            persia.EmbeddingBagConfig("a", 16, feature_names=["x", "y"]),
            persia.EmbeddingBagConfig("b", 16, feature_names=["z"]),
        ],
    )
    values = torch.arange(3 * SAMPLES * 2) * 2654435761 % 10007
    ids = JaggedBatch(["x", "y", "z"], values, torch.full((3 * SAMPLES,), 2))

    def state() -> list[int]:
        store.flush()
        stats = store.stats()["client"]
        return [stats["bytes_out"], stats["bytes_in"], *calls()]

    def steps() -> None:
        for _ in range(STEPS):
            bags(ids).values().sum().backward()

    steps()
    before = state()
    steps()
    names = (
        "bytes_out",
        "bytes_in",
        "allocations",
        "system_calls",
        "instructions",
    )
    after = state()
    return {
        f"remote_step_{name}": (b - a) // STEPS
        for name, a, b in zip(names, before, after, strict=True)
        if b  # else the system does not count it
    }


def main() -> None:
    if sys.argv[1:] == ["--serve"]:
        serve()
        return
    environment = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
    with subprocess.Popen(
        [sys.executable, "-m", "tests.counted.remote_step", "--serve"],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdin is not None and server.stdout is not None
        print(json.dumps(run(server.stdout.readline().strip())))
        server.stdin.close()


if __name__ == "__main__":
    main()
