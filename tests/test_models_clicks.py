"""Click models train as well as the same models on torch's embeddings."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

import persia
from persia import Batch, models
from persia.datasets import SyntheticCTR
from tests import twins
from tests.datasets.reference import data_file

pytestmark = pytest.mark.slow

Split = tuple[list[Batch], list[Batch]]
CLICKS = [models.DLRM, models.DeepFM, models.DCNv2, models.WideDeep]
USER = ["user", "gender", "occupation", "zip", "genres"]


@cache
def planted() -> Split:
    data = SyntheticCTR(
        16_000, 256, seed=2, singles=6, multis=1, dense=4, vocabulary=500
    )
    return list(data), list(data.test(8000))


@cache
def movielens() -> Split:
    path = str(data_file("ml100k_multivalued.tsv.gz"))
    train = persia.data.Files(path, "movielens", 256, samples=(0, 16_000))
    test = persia.data.Files(path, "movielens", 256, samples=(16_000, 20_000))
    return list(train), list(test)


def bags(keys: list[str], pooling: str = "sum") -> Any:
    return persia.EmbeddingBagCollection(
        store=twins.store(),
        tables=[
            persia.EmbeddingBagConfig(key, 8, [key], pooling=pooling)
            for key in keys
        ],
    )


def items() -> Any:
    table = persia.EmbeddingConfig("item", 8, ["item", "history"])
    return persia.EmbeddingCollection(store=twins.store(), tables=[table])


def click_loss(model: nn.Module, batch: Batch) -> Tensor:
    out = model(batch.dense, batch.ids)
    return binary_cross_entropy_with_logits(out, batch.label)


@torch.no_grad()
def auc_of(model: nn.Module, batches: list[Batch], task: int = 0) -> float:
    found = persia.metrics.BinaryMetrics()
    for batch in batches:
        out = model(batch.dense, batch.ids)
        label = tasks(batch)[:, task]
        found.update(out if out.dim() == 1 else out[:, task], label)
    return found.compute().auc


def tasks(batch: Batch) -> Tensor:
    """Two labels: the click, and that of every other user or first id."""
    assert batch.label is not None
    odd = batch.ids[batch.ids.keys()[0]][0] % 2
    return torch.stack([batch.label, batch.label * odd], 1)


def both(
    make: Callable[..., nn.Module],
    parts: list[tuple[type[twins.Torch], Any]],
    split: Split,
    loss: Callable[[nn.Module, Any], Tensor] = click_loss,
) -> tuple[nn.Module, nn.Module]:
    """Our model and its twin, trained alike: with the same losses."""
    every = [batch.ids for part in split for batch in part]
    others = [kind(module, every) for kind, module in parts]
    torch.manual_seed(1)
    ours = make(*(module for _, module in parts))
    torch.manual_seed(1)
    twin = make(*others)
    losses = twins.train(ours, split[0], loss)
    expected = twins.train(twin, split[0], loss)
    np.testing.assert_allclose(losses, expected, rtol=2e-3)
    assert np.mean(losses[-10:]) < np.mean(losses[:3])
    return ours, twin


@pytest.mark.parametrize("data", [planted, movielens])
@pytest.mark.parametrize("model", CLICKS)
def test_a_click_model_is_as_good_as_its_twin(
    model: Callable[..., nn.Module], data: Callable[[], Split]
) -> None:
    split = data()
    keys = split[0][0].ids.keys()
    assert split[0][0].dense is not None
    dense = split[0][0].dense.shape[1]
    ours, twin = both(
        lambda bags: model(bags, dense),
        [(twins.TorchBags, bags(keys, "mean"))],
        split,
    )
    score = auc_of(ours, split[1])
    assert score >= auc_of(twin, split[1]) - 0.002
    assert score > (0.66 if data is planted else 0.62)


def test_mmoe_is_as_good_as_its_twin_in_each_task() -> None:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        out = model(batch.dense, batch.ids)
        return binary_cross_entropy_with_logits(out, tasks(batch))

    split = planted()
    ours, twin = both(
        lambda bags: models.MMoE(bags, 4, tasks=2),
        [(twins.TorchBags, bags(split[0][0].ids.keys()))],
        split,
        loss,
    )
    for task in range(2):
        score = auc_of(ours, split[1], task)
        assert score >= auc_of(twin, split[1], task) - 0.002
        assert score > 0.66


def test_din_is_as_good_as_its_twin() -> None:
    split = movielens()
    ours, twin = both(
        lambda items, bags: models.DIN(items, bags, 1),
        [(twins.TorchItems, items()), (twins.TorchBags, bags(USER))],
        split,
    )
    score = auc_of(ours, split[1])
    assert score >= auc_of(twin, split[1]) - 0.002
    assert score > 0.62


def test_din_finds_the_target_in_a_history() -> None:
    """What no model of pooled embeddings does as easily."""
    g = torch.Generator().manual_seed(4)
    batches = []
    for _ in range(160):
        history = torch.randint(0, 60, (256, 5), generator=g) << 40
        target = history[:, 0].clone()
        click = torch.rand(256, generator=g) < 0.5
        other = torch.randint(0, 60, (256,), generator=g) << 40
        target[~click] = other[~click]
        ids = persia.JaggedBatch.from_dict(
            {"item": target, "history": history}
        )
        label = (target[:, None] == history).any(1).float()
        batches.append(Batch(None, ids, label))
    torch.manual_seed(1)
    model = models.DIN(items())
    twins.train(model, batches[:150], click_loss, epochs=2)
    assert auc_of(model, batches[150:]) > 0.9


def test_din_wants_one_target_a_sample() -> None:
    ids = persia.JaggedBatch.from_dict(
        {"item": torch.ones(3, 2).long(), "history": torch.ones(3).long()}
    )
    with pytest.raises(persia.errors.ShapeError, match="6 ids of 'item'"):
        models.DIN(items())(None, ids)
