"""A server that joined saves its shards when the job ends."""

from __future__ import annotations

import signal

import pytest
import torch

import persia
from persia import _core
from tests.system.test_moves import Processes, finish, processes

__all__ = ["processes"]

if not _core.GRPC[0].isdigit():
    pytest.skip("built without gRPC", allow_module_level=True)


def table(store: persia.Store) -> persia.EmbeddingBagCollection:
    config = persia.EmbeddingBagConfig("t", 2, feature_names=["f"], init=0.0)
    return persia.EmbeddingBagCollection(store=store, tables=[config])


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_all_rows_are_saved_on_exit(processes: Processes) -> None:
    """With one command line: the first server has all shards, the next one
    joins, and takes half of them. One server then begins with all."""
    flags = ["--server-count", "1", "--shards", "4", "--save-on-exit", "x"]
    flags += ["--restore", "x", "--or-empty"]
    first, one = processes.server("--shard", "0", *flags)
    second, other = processes.server("--shard", "1", *flags, "--join", one)
    store = persia.Store(persia.optim.SGD(lr=1.0), servers=one)
    ids = torch.arange(200)
    (-table(store)(persia.JaggedBatch(["f"], ids)).values().sum()).backward()
    store.flush()
    assert "no shard" not in finish(processes.scale(2, [one, other]))
    (-table(store)(persia.JaggedBatch(["f"], ids)).values().sum()).backward()
    store.flush()
    store.close()
    for process in (second, first):
        process.send_signal(signal.SIGTERM)
        assert "saved x" in finish(process)
    _, again = processes.server("--shard", "0", *flags)
    store = persia.Store(persia.optim.SGD(lr=1.0), servers=again)
    table(store)
    assert torch.equal(store.rows("t", ids), torch.full((200, 2), 2.0))
    store.close()
