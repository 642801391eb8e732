"""How many threads of torch compute a model of ``persia train``."""

from __future__ import annotations

import pytest
import torch

from persia.train.model import threads_of


@pytest.mark.parametrize(
    ("numbers", "batch_size", "omp", "wanted"),
    [
        (1_000, 256, None, 1),  # not worth a second thread
        (1_000_000, 64, None, 7),
        (10_000_000, 4096, None, 8),  # no more than there are
        (1_000, 256, "8", 8),
    ],
)
def test_threads_follow_the_work(
    numbers: int,
    batch_size: int,
    omp: str | None,
    wanted: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if omp is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", omp)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr("persia.train.model.processors", lambda: 8.0)
    model = torch.nn.Linear(numbers, 1, bias=False)
    assert threads_of(model, batch_size) == wanted
    monkeypatch.setattr("persia.train.model.processors", lambda: 0.5)
    assert threads_of(model, batch_size) == (8 if omp else 1)
