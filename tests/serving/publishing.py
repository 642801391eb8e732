"""A model that trains and publishes, for the tests of deltas."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import persia
from persia.serving import ExportedModel, Publisher
from tests.serving import models

IDS = torch.arange(-60, 60)


def trained(steps: int = 1, **more: Any) -> tuple[persia.Store, nn.Module]:
    """A store, and a model of it after some steps."""
    store = models.store()
    model = model_of(store, **more)
    train(model, steps)
    return store, model


def model_of(where: persia.Store, capacity: int | None = None) -> nn.Module:
    eviction = None if capacity is None else "lru"
    return models.CLICKS["widedeep"](
        persia.EmbeddingBagCollection(
            store=where,
            tables=[
                persia.EmbeddingBagConfig(
                    key, 8, [key], capacity=capacity, eviction=eviction
                )
                for key in models.KEYS
            ],
        )
    )


def train(model: nn.Module, steps: int = 1) -> None:
    models.train(model, lambda: models.batch(16), steps)


def start(model: nn.Module, root: Path, **options: Any) -> Publisher:
    example = models.batch(3)
    return Publisher(model, root, example=example, every=1e-3, **options)


def published(publisher: Publisher) -> None:
    publisher.flush()
    assert publisher.publish()
    publisher.flush()


def same(loaded: ExportedModel, model: nn.Module, where: Path) -> None:
    """A loaded model is an export of this moment, bit for bit."""
    shutil.rmtree(where, ignore_errors=True)
    persia.export(
        model,
        where,
        example=models.batch(3),
        row_dtype=loaded.manifest.tables[0].type,
    )
    want = persia.load_model(where)
    for table in (t.options.name for t in want.manifest.tables):
        has = want.has_rows(table, IDS)
        assert torch.equal(loaded.has_rows(table, IDS), has)
        assert torch.equal(
            loaded.vectors(table, IDS), want.vectors(table, IDS)
        )
    call = models.batch(9)
    assert torch.equal(loaded(*call), want(*call))
    model.train()


def answer(model: ExportedModel) -> Tensor:
    torch.manual_seed(9)
    return model(*models.batch(9))


def train_others(store: persia.Store) -> None:
    store.set_rows("b", [1, 2, 3], torch.zeros(3, 8))
