"""The models against formulas written out in numpy."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import persia
from persia import JaggedBatch, errors
from persia.models import DIN, DLRM, DCNv2, DeepFM, MMoE, WideDeep
from persia.models.dense import Standardize
from persia.train import Trainer

KEYS = ["a", "b", "c"]


def bags(dim: int, keys: list[str] = KEYS) -> persia.EmbeddingBagCollection:
    return persia.EmbeddingBagCollection(
        tables=[persia.EmbeddingBagConfig(k, dim, [k], init=0.5) for k in keys]
    )


def ids(samples: int, keys: list[str] = KEYS) -> JaggedBatch:
    g = torch.Generator().manual_seed(5)
    lengths = torch.randint(0, 3, (len(keys) * samples,), generator=g)
    values = torch.randint(0, 50, (int(lengths.sum()),), generator=g)
    return JaggedBatch(keys, values, lengths=lengths)


def by_hand(module: nn.Sequential, x: np.ndarray) -> np.ndarray:
    for layer in module:
        if isinstance(layer, nn.Linear):
            weight = layer.weight.detach().double().numpy()
            x = x @ weight.T
            if layer.bias is not None:
                x = x + layer.bias.detach().double().numpy()
        else:
            assert isinstance(layer, nn.ReLU)
            x = np.maximum(x, 0)
    return x


def inputs(features: int) -> tuple[torch.Tensor | None, JaggedBatch]:
    return torch.randn(6, features) if features else None, ids(6)


def numbers(x: torch.Tensor, dense: torch.Tensor | None = None) -> np.ndarray:
    """As float64; the dense features are the first columns."""
    if dense is not None:
        x = torch.cat([dense, x], 1)
    return x.detach().double().numpy()


@pytest.mark.parametrize("features", [0, 4])
def test_dlrm_is_its_formula(features: int) -> None:
    torch.manual_seed(1)
    model = DLRM(bags(8), features, (5,), (7, 3), standardize=False)
    dense = torch.randn(6, features) if features else None
    batch = ids(6)
    vectors = model.bags(batch).values().detach().double().numpy()
    rows = []
    for i in range(6):
        sample = list(vectors[i].reshape(3, 8))
        if dense is not None:
            assert model.bottom is not None
            sample.insert(0, by_hand(model.bottom, dense[i].double().numpy()))
        # All pairs (i, j < i), in that order.
        pairs = [
            sample[j] @ sample[k] for j in range(len(sample)) for k in range(j)
        ]
        rows.append(np.concatenate([sample[0], pairs]))
    expected = by_hand(model.top, np.array(rows))[:, 0]
    logits = model(dense, batch)
    assert logits.shape == (6,)
    np.testing.assert_allclose(logits.detach(), expected, atol=1e-5)


@pytest.mark.parametrize("features", [0, 4])
def test_deepfm_is_its_formula(features: int) -> None:
    torch.manual_seed(1)
    model = DeepFM(bags(8), features, (7, 3), standardize=False)
    dense = torch.randn(6, features) if features else None
    batch = ids(6)
    vectors = model.bags(batch).values().detach().double().numpy()
    expected = []
    for i in range(6):
        sample = vectors[i].reshape(3, 8)
        logit = sample[:, 0].sum()
        factors = sample[:, 1:]
        for one, other in itertools.combinations(factors, 2):
            logit += one @ other
        deep = factors.reshape(-1)
        if dense is not None:
            x = dense[i].double().numpy()
            assert model.linear is not None
            logit += by_hand(nn.Sequential(model.linear), x)[0]
            deep = np.concatenate([x, deep])
        expected.append(logit + by_hand(model.deep, deep)[0])
    logits = model(dense, batch)
    assert logits.shape == (6,)
    np.testing.assert_allclose(logits.detach(), expected, atol=1e-5)


@pytest.mark.parametrize("rank", [None, 2])
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("features", [0, 4])
def test_dcn_is_its_formula(
    features: int, stacked: bool, rank: int | None
) -> None:
    torch.manual_seed(1)
    model = DCNv2(bags(3), features, 2, rank, (7, 5), stacked, False)
    dense, batch = inputs(features)
    first = numbers(model.bags(batch).values(), dense)
    x = first
    for layer in model.cross.layers:
        module = layer if rank is not None else nn.Sequential(layer)
        x = first * by_hand(module, x) + x
    if stacked:
        top = by_hand(model.deep, x)
    else:
        top = np.concatenate([x, by_hand(model.deep, first)], 1)
    expected = by_hand(nn.Sequential(model.top), top)[:, 0]
    logits = model(dense, batch)
    assert logits.shape == (6,)
    np.testing.assert_allclose(logits.detach(), expected, atol=1e-5)


@pytest.mark.parametrize("features", [0, 4])
def test_wide_and_deep_is_its_formula(features: int) -> None:
    torch.manual_seed(1)
    model = WideDeep(bags(8), features, (7, 3), standardize=False)
    dense, batch = inputs(features)
    vectors = numbers(model.bags(batch).values()).reshape(6, 3, 8)
    deep = vectors[:, :, 1:].reshape(6, -1)
    expected = vectors[:, :, 0].sum(1)
    if dense is not None:
        assert model.wide is not None
        x = numbers(dense)
        expected = expected + by_hand(nn.Sequential(model.wide), x)[:, 0]
        deep = np.concatenate([x, deep], 1)
    expected = expected + by_hand(model.deep, deep)[:, 0]
    logits = model(dense, batch)
    assert logits.shape == (6,)
    np.testing.assert_allclose(logits.detach(), expected, atol=1e-5)


@pytest.mark.parametrize("features", [0, 4])
def test_mmoe_is_its_formula(features: int) -> None:
    torch.manual_seed(1)
    model = MMoE(bags(3), features, 2, 3, (7, 5), (4,), standardize=False)
    dense, batch = inputs(features)
    x = numbers(model.bags(batch).values(), dense)
    logits = model(dense, batch)
    assert logits.shape == (6, 2)
    for task in range(2):
        share = np.exp(by_hand(nn.Sequential(model.gates[task]), x))
        share /= share.sum(1, keepdims=True)
        mixed = sum(
            share[:, i, None] * by_hand(expert, x)
            for i, expert in enumerate(model.experts)
        )
        expected = by_hand(model.towers[task], mixed)[:, 0]
        np.testing.assert_allclose(
            logits[:, task].detach(), expected, atol=1e-5
        )


@pytest.mark.parametrize("features", [0, 4])
def test_din_is_its_formula(features: int) -> None:
    torch.manual_seed(1)
    config = persia.EmbeddingConfig("item", 3, ["a", "b"], init=0.5)
    items = persia.EmbeddingCollection(tables=[config])
    model = DIN(items, bags(2, ["c"]), features, "a", "b", (4,), (7,), False)
    lengths = torch.tensor([1] * 6 + [2, 0, 3, 1, 0, 4] + [1] * 6)
    values = torch.arange(int(lengths.sum())) << 33
    batch = JaggedBatch(KEYS, values, lengths)
    dense, _ = inputs(features)
    found = items(batch)
    target = numbers(found["a"].values())
    rows = []
    for i, history in enumerate(found["b"].to_dense()):
        interest = np.zeros(3)
        for key in numbers(history):
            q = target[i]
            both = np.concatenate([q, key, q - key, q * key])
            interest += by_hand(model.weigh, both)[0] * key
        rows.append(np.concatenate([target[i], interest]))
    assert model.bags is not None
    x = np.concatenate([rows, numbers(model.bags(batch).values())], 1)
    if dense is not None:
        x = np.concatenate([x, numbers(dense)], 1)
    logits = model(dense, batch)
    assert logits.shape == (6,)
    np.testing.assert_allclose(
        logits.detach(), by_hand(model.deep, x)[:, 0], atol=1e-5
    )


@pytest.mark.parametrize("model", [DLRM, DeepFM, DCNv2, WideDeep])
def test_all_parts_are_trained(model: Callable[..., Any]) -> None:
    torch.manual_seed(1)
    net = model(bags(4), 2)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    before = [p.detach().clone() for p in net.parameters()]
    batch, dense, label = ids(64), torch.randn(64, 2), torch.rand(64).round()
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(
            net(dense, batch), label
        )
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]  # the labels are learned by heart
    for old, new in zip(before, net.parameters(), strict=True):
        assert not new.numel() or not torch.equal(old, new)
    tables = net.bags.store.stats()["tables"]
    assert all(tables[key]["rows"] > 0 for key in KEYS)


def test_dims_that_do_not_fit_are_named() -> None:
    mixed = persia.EmbeddingBagCollection(
        tables=[
            persia.EmbeddingBagConfig("a", 4, ["a"]),
            persia.EmbeddingBagConfig("b", 8, ["b"]),
        ]
    )
    for model in (DLRM, DeepFM, WideDeep):
        with pytest.raises(errors.InvalidArgument, match=r"\[4, 8\]"):
            model(mixed, 3)
    for model in (DeepFM, WideDeep):
        with pytest.raises(errors.InvalidArgument, match="at least 2"):
            model(bags(1), 3)
    assert DCNv2(mixed, 3)(torch.zeros(2, 3), ids(2, ["a", "b"])).shape == (2,)


def test_standardize_uses_all_samples_seen() -> None:
    g = torch.Generator().manual_seed(2)
    x = torch.randn(1000, 3, generator=g) * torch.tensor([1e-3, 1.0, 1e4])
    x += torch.tensor([5.0, -2.0, 3e4])
    module = Standardize(3)
    assert torch.equal(module.eval()(x[:5]), x[:5])  # nothing is known yet
    module.train()
    for part in x.split([1, 500, 0, 99, 400]):
        module(part)
    module.eval()
    expected = (x - x.mean(0)) / x.std(0, correction=0)
    torch.testing.assert_close(module(x), expected, atol=2e-3, rtol=1e-3)
    assert float(module.count) == 1000
    fresh = Standardize(3)
    fresh.load_state_dict(module.state_dict())
    assert torch.equal(fresh.eval()(x), module(x))


def test_standardize_of_a_constant_column_is_finite() -> None:
    module = Standardize(2)
    out = module(torch.tensor([[3.0, 1.0], [3.0, 2.0]]))
    assert torch.equal(out[:, 0], torch.zeros(2))
    assert out.isfinite().all()


def test_standardize_compiled_keeps_its_statistics() -> None:
    plain, other = Standardize(3), Standardize(3)
    compiled = torch.compile(other, backend="aot_eager")
    for seed in range(3):
        g = torch.Generator().manual_seed(seed)
        x = torch.randn(32, 3, generator=g) + 4
        torch.testing.assert_close(compiled(x), plain(x))
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(other.state_dict()[name], value)


def test_an_evaluation_within_training_changes_no_mode() -> None:
    data = persia.datasets.SyntheticCTR(samples=600, batch_size=100)
    model = DLRM(bags(4, data.keys), data.dense_features)
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    modes: list[bool] = []

    def look(progress: object) -> None:
        trainer.evaluate(data)
        modes.append(model.training)

    trainer.fit(data, on_progress=look, every=0.0)
    assert modes and all(modes)
    model.eval()
    trainer.evaluate(data)
    assert not model.training
