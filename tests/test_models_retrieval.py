"""Retrieval models train as well as the same on torch's embeddings, and find
more than the most popular items."""

from __future__ import annotations

import csv
import gzip
from collections import defaultdict
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import persia
from persia import JaggedBatch, models
from tests import twins
from tests.datasets.reference import data_file

pytestmark = pytest.mark.slow

USER = ["user", "gender", "occupation", "age"]


@cache
def ratings() -> list[dict[str, str]]:
    path = data_file("ml100k_multivalued.tsv.gz")
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return list(csv.DictReader(file, delimiter="\t"))


def hashed(values: list[str]) -> Tensor:
    return torch.as_tensor(persia.hash_ids(values))


@cache
def sequences(longest: int = 25) -> tuple[list[JaggedBatch], JaggedBatch]:
    """The last films of each user, in batches; all histories, and as label
    ``next`` the last film of each, for a test."""
    films = defaultdict(list)
    for row in ratings():
        films[row["user"]].append(row["item"])
    every = [f[-longest - 1 :] for f in films.values() if len(f) > 5]

    def batch(parts: list[list[str]], name: str) -> dict[str, Any]:
        ids = hashed([film for part in parts for film in part])
        return {name: (ids, torch.tensor([len(part) for part in parts]))}

    train = [
        JaggedBatch.from_dict(batch([f[:-1] for f in every[i::16]], "history"))
        for i in range(16)
    ]
    test = JaggedBatch.from_dict(
        batch([f[:-1] for f in every], "history")
        | batch([f[-1:] for f in every], "next")
    )
    return train, test


def next_loss(model: nn.Module, ids: JaggedBatch) -> Tensor:
    return models.next_item_loss(*model(ids), *ids["history"])


@torch.no_grad()
def ndcg_of(model: Any, test: JaggedBatch, k: int = 20) -> float:
    """NDCG@k of the last film of each user among all films."""
    history, lengths = test["history"]
    every = torch.unique(history)
    shelf = JaggedBatch(["history"], every, torch.ones(len(every)).long())
    rows = model.items(shelf)["history"].values()
    states = models.last_states(model(test)[0], lengths)
    found, _ = models.NearestItems(every, rows).search(states, k)
    metric = persia.metrics.NDCGAtK(k)
    metric.update_ids(found, test["next"][0])
    return metric.compute()


def most_popular(test: JaggedBatch) -> float:
    ids, counts = torch.unique(test["history"][0], return_counts=True)
    found = ids[counts.argsort(descending=True)[:20]]
    metric = persia.metrics.NDCGAtK(20)
    wanted = test["next"][0]
    metric.update_ids(found.repeat(len(wanted), 1), wanted)
    return metric.compute()


@pytest.mark.parametrize(
    "make",
    [
        lambda items: models.SASRec(items, 25, blocks=1),
        lambda items: models.HSTU(items, blocks=1, max_length=25),
    ],
    ids=["SASRec", "HSTU"],
)
def test_a_sequence_model_is_as_good_as_its_twin(make: Any) -> None:
    train, test = sequences()
    config = persia.EmbeddingConfig("item", 32, ["history"], init=0.05)
    items = persia.EmbeddingCollection(store=twins.store(), tables=[config])
    other = twins.TorchItems(items, train)
    torch.manual_seed(1)
    ours = make(items)
    torch.manual_seed(1)
    twin = make(other)
    losses = twins.train(ours, train, next_loss, epochs=4)
    expected = twins.train(twin, train, next_loss, epochs=4)
    np.testing.assert_allclose(losses, expected, rtol=5e-3)
    score = ndcg_of(ours, test)
    assert score >= ndcg_of(twin, test) - 0.002
    assert score > 1.3 * most_popular(test)


@pytest.mark.parametrize("model", [models.SASRec, models.HSTU])
def test_a_sequence_model_learns_a_planted_walk(model: Any) -> None:
    """The next film is decided by the two before."""
    g = torch.Generator().manual_seed(5)

    def walks(n: int) -> Tensor:
        films = torch.randint(0, 12, (n, 12), generator=g)
        for i in range(2, 12):
            films[:, i] = (films[:, i - 1] + films[:, i - 2]) % 12
        return films << 40

    train = [JaggedBatch.from_dict({"history": walks(64)}) for _ in range(150)]
    held = walks(200)
    test = JaggedBatch.from_dict(
        {"history": held[:, :-1], "next": held[:, -1]}
    )
    config = persia.EmbeddingConfig("item", 32, ["history"], init=0.1)
    items = persia.EmbeddingCollection(store=twins.store(), tables=[config])
    torch.manual_seed(1)
    ours = model(items, max_length=12, dropout=0.0)
    twins.train(ours, train, next_loss, epochs=2)
    assert ndcg_of(ours, test, 1) > 0.8


@cache
def likes() -> tuple[list[JaggedBatch], JaggedBatch, JaggedBatch]:
    """Batches of films that users liked, later ones, and all films."""
    rows = [row for row in ratings() if row["label"] == "1"]
    genres = {row["item"]: row["genres"].split(",") for row in ratings()}

    def batch(part: list[dict[str, str]]) -> JaggedBatch:
        features: dict[str, Any] = {
            key: hashed([row[key] for row in part]) for key in [*USER, "item"]
        }
        for key, lists in [
            ("genres", [genres[row["item"]] for row in part]),
            ("history", [row["history"].split(",") for row in part]),
        ]:
            lengths = torch.tensor([len(one) for one in lists])
            flat = hashed([value for one in lists for value in one])
            features[key] = (flat, lengths)
        return JaggedBatch.from_dict(features)

    films = {row["item"]: row for row in rows}
    train = [batch(rows[i : i + 512]) for i in range(0, 30_000, 512)]
    return train, batch(rows[30_720:34_000]), batch(list(films.values()))


def bags(store: persia.Store, keys: list[str]) -> Any:
    tables = [
        persia.EmbeddingBagConfig(key, 16, [key], pooling="mean", init=0.1)
        for key in keys
    ]
    return persia.EmbeddingBagCollection(store=store, tables=tables)


@torch.no_grad()
def recall_of(model: Any, test: JaggedBatch, films: JaggedBatch) -> float:
    shelf = models.NearestItems(films["item"][0], model.item(films))
    metric = persia.metrics.RecallAtK(50)
    metric.update_ids(shelf.search(model.user(test), 50)[0], test["item"][0])
    return metric.compute()


def test_two_towers_are_as_good_as_their_twin() -> None:
    train, test, films = likes()
    store = twins.store()
    parts = [bags(store, [*USER, "history"]), bags(store, ["item", "genres"])]
    others = [twins.TorchBags(p, [*train, test, films]) for p in parts]
    scores, losses = [], []
    for users, items in (parts, others):
        torch.manual_seed(1)
        model = models.TwoTower(users, items)
        share = models.Frequencies()

        def loss(
            model: nn.Module, ids: JaggedBatch, share: Any = share
        ) -> Any:
            item = ids["item"][0]
            return models.in_batch_softmax(
                *model(ids), item, share(item), temperature=0.1
            )

        losses.append(twins.train(model, train, loss, epochs=2))
        scores.append(recall_of(model, test, films))
    np.testing.assert_allclose(*losses, rtol=5e-3)
    assert scores[0] >= scores[1] - 0.005
    counts = torch.cat([ids["item"][0] for ids in train]).unique(
        return_counts=True
    )
    popular = counts[0][counts[1].argsort(descending=True)[:50]]
    metric = persia.metrics.RecallAtK(50)
    wanted = test["item"][0]
    metric.update_ids(popular.repeat(len(wanted), 1), wanted)
    assert scores[0] > 1.1 * metric.compute()
