"""Lookups and updates against torch's EmbeddingBag and optimizers."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch

import persia
from persia import errors
from persia.store.engine import engine_of
from tests.modules import KEYS, make_bags
from tests.oracle import VOCABULARY, TorchTables, random_batch, single_batch


def test_sequences_are_rows() -> None:
    store = persia.Store(persia.optim.SGD(lr=0.5))
    seqs = persia.EmbeddingCollection(
        store=store,
        tables=[
            persia.EmbeddingConfig("x", 4, feature_names=["c", "a"]),
            persia.EmbeddingConfig("y", 4, feature_names=["b"]),
        ],
    )
    batch = random_batch(np.random.default_rng(7), KEYS, 5)
    before = store.rows("x", torch.arange(VOCABULARY))
    out = seqs(batch)
    assert list(out) == ["c", "a", "b"]
    for key in out:
        values, lengths = batch[key]
        table = "y" if key == "b" else "x"
        assert torch.equal(out[key].values(), store.rows(table, values))
        assert torch.equal(out[key].lengths(), lengths)
    padded = out["a"].to_padded_dense(3)
    assert padded.shape == (5, 3, 4)
    values, lengths = batch["a"]
    parts = torch.split(out["a"].values(), lengths.tolist())
    for i, part in enumerate(parts):
        assert torch.equal(padded[i, : len(part)], part[:3])
        assert not padded[i, len(part) :].any()
    (out["c"].values().sum() + 2 * out["a"].values().sum()).backward()
    count = torch.bincount(batch["c"][0], minlength=VOCABULARY)
    count = count + 2 * torch.bincount(batch["a"][0], minlength=VOCABULARY)
    want = before - 0.5 * count[:, None]
    torch.testing.assert_close(store.rows("x", torch.arange(VOCABULARY)), want)
    # An id whose gradient is zero occurred all the same: it has a row now.
    values = batch["b"][0]
    assert store.stats()["tables"]["y"]["rows"] == len(values.unique())
    assert torch.equal(store.rows("y", values), out["b"].values())


@pytest.mark.parametrize("pooling", ["sum", "mean", "sqrtn"])
def test_weights_get_a_gradient(pooling: str) -> None:
    bags = make_bags(pooling, persia.optim.SGD(lr=0.1), is_weighted=True)
    theirs = TorchTables(bags, VOCABULARY)
    batch = random_batch(np.random.default_rng(8), KEYS, 6, weighted=True)
    plain = bags(batch).values()
    mine = batch.weights().clone().requires_grad_()
    other = batch.weights().clone().requires_grad_()

    def weighted(weights: torch.Tensor) -> persia.JaggedBatch:
        return persia.JaggedBatch(
            batch.keys(), batch.values(), batch.lengths(), weights=weights
        )

    got = bags(weighted(mine)).values()
    torch.testing.assert_close(got, plain)
    want = theirs(weighted(other))
    g = torch.randn(got.shape)
    got.backward(g)
    want.backward(g)
    torch.testing.assert_close(mine.grad, other.grad, rtol=1e-5, atol=1e-5)
    for name, weight in theirs.weights.items():
        assert weight.grad is not None
        torch.testing.assert_close(
            bags.store.rows(name, torch.arange(VOCABULARY)),
            (weight - 0.1 * weight.grad).detach(),
            rtol=1e-5,
            atol=1e-5,
        )


def test_output_acts_like_a_keyed_tensor() -> None:
    bags = make_bags()
    out = bags(single_batch(np.random.default_rng(9), KEYS, 3))
    assert out.keys() == ["c", "a", "b"]
    assert out.length_per_key() == [8, 16, 16]
    assert out.offset_per_key() == [0, 8, 24, 40]
    assert torch.equal(out["b"], out.values()[:, 24:])
    parts = out.to_dict()
    assert torch.equal(torch.cat(list(parts.values()), 1), out.values())
    with pytest.raises(errors.MissingFeature, match="spare"):
        out["spare"]


def test_a_feature_of_two_tables_is_named_by_table() -> None:
    bags = persia.EmbeddingBagCollection(
        tables=[
            persia.EmbeddingBagConfig("x", 4, feature_names=["f"]),
            persia.EmbeddingBagConfig("y", 2, feature_names=["f", "g"]),
        ],
        optimizer=persia.optim.SGD(lr=1.0),
        is_weighted=True,
    )
    weights = torch.ones(6)
    batch = persia.JaggedBatch(
        ["g", "f"], torch.tensor([1, 2, 3, 4, 5, 6]), weights=weights
    )
    out = bags(batch)
    assert out.keys() == ["f@x", "f@y", "g"]
    want = bags.store.rows("y", torch.tensor([4, 5, 6]))
    assert torch.equal(out["f@y"], want)
    weights.requires_grad_()
    torch.testing.assert_close(bags(batch).values(), out.values())
    bags(batch).values().sum().backward()
    assert bags.store.stats()["tables"]["x"]["rows"] == 3
    assert bags.store.stats()["tables"]["y"]["rows"] == 6


def test_forwards_of_two_threads_while_plans_are_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bags = persia.EmbeddingBagCollection(
        tables=[
            persia.EmbeddingBagConfig("x", 4, feature_names=["f"]),
            persia.EmbeddingBagConfig("y", 2, feature_names=["f"]),
        ],
        optimizer=persia.optim.SGD(lr=1.0),
        is_weighted=True,
    )
    weights = torch.ones(3, requires_grad=True)
    batch = persia.JaggedBatch(["f"], torch.tensor([1, 2, 3]), weights=weights)
    plan, widths = engine_of(bags.store).plan, []

    def forward() -> None:
        widths.append(bags(batch).values().shape[1])

    def slow(*arguments: Any) -> int:
        monkeypatch.setattr(engine_of(bags.store), "plan", plan)
        other = threading.Thread(target=forward)
        other.start()
        other.join()
        return plan(*arguments)

    monkeypatch.setattr(engine_of(bags.store), "plan", slow)
    forward()
    assert widths == [6, 6]


def test_empty_batch_and_empty_bags() -> None:
    bags = make_bags("mean")
    empty = persia.JaggedBatch(["a", "b", "c"], torch.zeros(0).long())
    out = bags(empty).values()
    assert out.shape == (0, 40)
    out.sum().backward()
    assert bags.store.stats()["tables"]["one"]["rows"] == 0
    none = persia.JaggedBatch(
        ["a", "b", "c"], torch.zeros(0).long(), lengths=torch.zeros(6).long()
    )
    out = bags(none).values()
    assert torch.equal(out, torch.zeros(2, 40))
    out.sum().backward()
    assert bags.store.stats()["tables"]["one"]["rows"] == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_gradients_raise(bad: float) -> None:
    bags = make_bags("sum", persia.optim.Adagrad(lr=0.1))
    batch = single_batch(np.random.default_rng(13), KEYS, 4)
    bags(batch).values().sum().backward()
    ids = torch.arange(VOCABULARY)
    before = [bags.store.rows(t, ids) for t in ("one", "two")]
    out = bags(batch).values()
    g = torch.ones_like(out)
    g[1, 30] = bad
    with pytest.raises(errors.NonFiniteGradient, match="two"):
        out.backward(g)
    after = [bags.store.rows(t, ids) for t in ("one", "two")]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert bags.store.stats()["updates_failed"] == 1
    bags(batch).values().sum().backward()  # and the store goes on
    assert bags.store.updates == 2


def test_non_finite_gradients_skip() -> None:
    bags = make_bags("sum", persia.optim.SGD(lr=1.0), nonfinite="skip")
    batch = persia.JaggedBatch(
        ["a", "b", "c"], torch.tensor([1, 2, 3, 4, 5, 6])
    )
    before = bags.store.rows("one", torch.tensor([5, 6]))
    out = bags(batch).values()
    g = torch.ones_like(out)
    g[0, 3] = float("nan")
    out.backward(g)
    after = bags.store.rows("one", torch.tensor([5, 6]))
    assert torch.equal(after[0], before[0])
    torch.testing.assert_close(after[1], before[1] - 1)
    assert bags.store.stats()["tables"]["one"]["nonfinite"] == 1


def test_capacity_raises_or_evicts() -> None:
    def one(eviction: str | None) -> persia.EmbeddingBagCollection:
        return persia.EmbeddingBagCollection(
            optimizer=persia.optim.SGD(lr=1.0),
            tables=[
                persia.EmbeddingBagConfig(
                    "t",
                    4,
                    feature_names=["f"],
                    capacity=100,
                    eviction=eviction,
                )
            ],
        )

    def train(bags: persia.EmbeddingBagCollection, first: int) -> None:
        ids = torch.arange(first, first + 60)
        bags(persia.JaggedBatch(["f"], ids)).values().sum().backward()

    bags = one(None)
    train(bags, 0)
    before = bags.store.rows("t", torch.arange(60))
    with pytest.raises(errors.CapacityReached, match="t"):
        train(bags, 50)
    assert torch.equal(before, bags.store.rows("t", torch.arange(60)))
    bags = one("lru")
    train(bags, 0)
    train(bags, 1000)
    stats = bags.store.stats()["tables"]["t"]
    assert stats["rows"] <= 100
    assert stats["evicted"] >= 20
    assert bool(bags.store.contains("t", torch.arange(1000, 1060)).all())


def test_untrainable_tables_stay() -> None:
    store = persia.Store(persia.optim.SGD(lr=1.0))
    bags = persia.EmbeddingBagCollection(
        store=store,
        tables=[
            persia.EmbeddingBagConfig(
                "still", 4, feature_names=["a"], trainable=False
            ),
            persia.EmbeddingBagConfig("moves", 4, feature_names=["b"]),
        ],
    )
    batch = single_batch(np.random.default_rng(14), ["a", "b"], 5)
    bags(batch).values().sum().backward()
    tables = store.stats()["tables"]
    assert tables["still"]["rows"] == 0
    assert tables["moves"]["rows"] > 0
    only = persia.EmbeddingBagCollection(
        store=store,
        tables=[
            persia.EmbeddingBagConfig(
                "still", 4, feature_names=["a"], trainable=False
            )
        ],
        share=True,
    )
    assert not only(batch).values().requires_grad


def test_no_grad_makes_no_ticket() -> None:
    bags = make_bags()
    batch = single_batch(np.random.default_rng(15), KEYS, 2)
    with torch.no_grad():
        assert not bags(batch).values().requires_grad
    with torch.inference_mode():
        bags(batch)
    bags.eval()
    assert bags(batch).values().requires_grad  # eval() alone changes nothing


def test_output_dtype() -> None:
    bags = persia.EmbeddingBagCollection(
        tables=[persia.EmbeddingBagConfig("t", 4, feature_names=["a"])],
        optimizer=persia.optim.SGD(lr=1.0),
        output_dtype=torch.bfloat16,
    )
    out = bags({"a": torch.tensor([1, 2])}).values()
    assert out.dtype == torch.bfloat16
    before = bags.store.rows("t", [1, 2])
    out.sum().backward()
    torch.testing.assert_close(bags.store.rows("t", [1, 2]), before - 1)
