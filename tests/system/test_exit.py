"""A script that ends without close(): its updates are applied."""

from __future__ import annotations

import pytest
import torch

import persia
from tests.ready import ended
from tests.remote import Servers
from tests.system.processes import environment

SCRIPT = """
import sys, torch, persia
store = persia.Store(persia.optim.SGD(lr=1.0))
bags = persia.EmbeddingBagCollection(store=store, tables=[
    persia.EmbeddingBagConfig("t", 4, feature_names=["f"], init=0.0)])
for i in range(40):
    (-bags({"f": torch.tensor([7])}).values().sum()).backward()
print("ready", flush=True)
END
"""


@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("", 0),
        ("del store, bags", 0),
        ("sys.exit(3)", 3),
        ("raise ZeroDivisionError", 1),
        ("store.close()", 0),
    ],
)
def test_updates_are_applied_at_the_end(end: str, status: int) -> None:
    servers = Servers(2)
    done = ended(
        *("-c", SCRIPT.replace("END", end)),
        env=environment(PERSIA_SERVERS=servers.text),
        timeout=60,
    )
    assert done.returncode == status, done.stderr
    store = persia.Store(persia.optim.SGD(lr=1.0), servers=servers.text)
    store.add_table(
        persia.EmbeddingBagConfig("t", 4, feature_names=["f"], init=0.0)
    )
    assert store.rows("t", [7]).tolist() == [[40.0] * 4]
    assert torch.equal(store.ids("t"), torch.tensor([7]))
    store.close()
    servers.close()


LARGE = """
import sys, time, torch, persia
ids = {"f": torch.arange(1_000_000)}
for _ in range(4):
    store = persia.Store(persia.optim.SGD(lr=1.0))
    bags = persia.EmbeddingBagCollection(store=store, tables=[
        persia.EmbeddingBagConfig("t", 2, feature_names=["f"], init=0.0)])
    for _ in range(2):
        (-bags(ids).values().sum()).backward()
    store.flush()
    begin = time.monotonic()
    store.close()
    print(time.monotonic() - begin)
"""


def test_close_does_not_wait_behind_large_updates() -> None:
    servers = Servers(2)
    done = ended(
        *("-c", LARGE),
        env=environment(PERSIA_SERVERS=servers.text, OMP_NUM_THREADS="1"),
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    seconds = [float(one) for one in done.stdout.split()]
    # gRPC took 10 s, where it did.
    assert len(seconds) == 4 and max(seconds) < 9, seconds
    servers.close()
