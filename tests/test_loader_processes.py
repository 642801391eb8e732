"""A DataLoader and other processes: workers of torch's, forked children."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import persia
from persia import Batch, JaggedBatch
from tests.forks import in_child
from tests.test_loader import Counter, Model

pytestmark = pytest.mark.usefixtures("idle_core")


def collate(items: list[tuple[int, Tensor]]) -> Batch:
    ids = torch.tensor([i for i, _ in items])
    return Batch(
        torch.stack([d for _, d in items]),
        JaggedBatch(["a", "b", "c"], torch.cat([ids, ids + 1, ids + 2])),
    )


def test_torch_dataloader_with_workers() -> None:
    data: Any = [(i, torch.full((2,), float(i))) for i in range(64)]
    source: Any = torch.utils.data.DataLoader(
        data,
        batch_size=4,
        num_workers=2,
        collate_fn=collate,
        multiprocessing_context="fork",
    )
    store = persia.Store(persia.optim.SGD(lr=1.0))
    model = Model(store)
    loader = persia.DataLoader(source, model, 2)
    assert len(loader) == 16
    for epoch in range(2):
        for t, batch in enumerate(loader):
            assert batch.dense[0, 0] == 4 * t
            model(batch.ids).sum().backward()
        assert store.updates == 16 * (epoch + 1)
    assert store.stats()["lookahead"]["prefetched"] == 2 * 32


def test_a_forked_child() -> None:
    c = Counter()
    iterator = iter(c.loader(10, 1))
    next(iterator)
    assert in_child(lambda: iter(c.loader(1, 1))) == ["UsedAfterFork"]
    assert len(list(iterator)) == 9
