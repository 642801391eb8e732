"""Loads into a model that has changed: refused by name, or in parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import persia
from persia import errors
from persia.nn.lookups import stores_of

FEATURES = ["user", "item", "city"]


class Model(nn.Module):
    """Pooled features beside a number, into two layers."""

    def __init__(
        self,
        features: list[str] = FEATURES,
        dims: dict[str, int] | None = None,
    ) -> None:
        super().__init__()
        torch.manual_seed(len(features))
        tables = [
            persia.EmbeddingBagConfig(f"t-{f}", (dims or {}).get(f, 4), [f])
            for f in features
        ]
        store = persia.Store(persia.optim.Adagrad(lr=0.1))
        self.bags = persia.EmbeddingBagCollection(tables=tables, store=store)
        width = sum(c.embedding_dim for c in tables)
        self.first = nn.Linear(width, 5)
        self.last = nn.Linear(5, 1)
        self.optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        self.features = features

    @property
    def store(self) -> persia.Store:
        (store,) = stores_of(self)
        return store

    def forward(self, ids: Any) -> Any:
        return self.last(torch.relu(self.first(self.bags(ids).values())))

    def train_once(self) -> None:
        ids = {f: torch.arange(4) for f in self.features}
        self.optimizer.zero_grad()
        (self(ids) - 1).square().mean().backward()
        self.optimizer.step()

    def save(self, path: Path) -> None:
        self.store.save(path, model=self, optimizer=self.optimizer)

    def load(self, path: Path, **more: Any) -> Any:
        return self.store.load(
            path, model=self, optimizer=self.optimizer, **more
        )


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Model, Path]:
    model = Model()
    for _ in range(3):
        model.train_once()
    model.save(tmp_path)
    return model, tmp_path


def unchanged(model: Model) -> Any:
    state = [p.detach().clone() for p in model.parameters() if p.numel()]
    rows = [model.store.rows(t, range(4)) for t in sorted(model.store.tables)]
    return [*state, *rows]


def test_swapped_tables_are_refused(saved: tuple[Model, Path]) -> None:
    other = Model(["item", "user", "city"])
    before = unchanged(other)
    for strict in (True, False):
        with pytest.raises(errors.SchemaMismatch, match=r"item.*user"):
            other.load(saved[1], strict=strict)
    with pytest.raises(errors.SchemaMismatch):
        other.load_state_dict(saved[0].state_dict())
    for a, b in zip(before, unchanged(other), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("features", "named"),
    [(FEATURES[:2], "city"), ([*FEATURES, "shop"], "shop")],
)
def test_a_feature_less_or_more_is_named(
    saved: tuple[Model, Path], features: list[str], named: str
) -> None:
    other = Model(features)
    before = unchanged(other)
    with pytest.raises(errors.SchemaMismatch, match=named):
        other.load(saved[1])
    with pytest.raises(errors.SchemaMismatch, match=named):
        other.load_state_dict(saved[0].state_dict(), strict=False)
    for a, b in zip(before, unchanged(other), strict=True):
        assert torch.equal(a, b)


def test_another_dim_is_named(saved: tuple[Model, Path]) -> None:
    other = Model(dims={"item": 6})
    with pytest.raises(errors.SchemaMismatch, match="t-item"):
        other.load(saved[1])


@pytest.mark.parametrize(
    ("features", "dims", "kept"),
    [
        (FEATURES[:2], {}, ["t-user", "t-item"]),
        ([*FEATURES, "shop"], {}, ["t-user", "t-item", "t-city"]),
        (FEATURES, {"item": 6}, ["t-user", "t-city"]),
    ],
)
def test_a_part_keeps_rows_states_and_optimizers(
    saved: tuple[Model, Path],
    features: list[str],
    dims: dict[str, int],
    kept: list[str],
) -> None:
    model, path = saved
    other = Model(features, dims)
    first = other.first.weight.detach().clone()
    with pytest.warns(UserWarning, match=r"first\.weight") as found:
        other.load(path, strict=False)
    assert len(found) == 1
    for table in kept:
        for a, b in zip(
            model.store.rows_and_state(table, range(4)),
            other.store.rows_and_state(table, range(4)),
            strict=True,
        ):
            assert torch.equal(a, b)
        assert table not in str(found[0].message)
    for table in (set(other.store.tables) | set(model.store.tables)) - set(
        kept
    ):
        assert table in str(found[0].message)
    assert torch.equal(other.first.weight, first)
    assert torch.equal(other.last.weight, model.last.weight)
    mine, theirs = other.optimizer.state, model.optimizer.state
    assert not mine[other.first.weight]
    for a, b in (
        (other.last.weight, model.last.weight),
        (other.first.bias, model.first.bias),
    ):
        assert torch.equal(mine[a]["exp_avg"], theirs[b]["exp_avg"])
        assert mine[a]["step"] == theirs[b]["step"] == 3
    other.train_once()


def test_what_fits_wholly_says_nothing(
    saved: tuple[Model, Path], recwarn: pytest.WarningsRecorder
) -> None:
    other = Model()
    other.load(saved[1], strict=False)
    assert not list(recwarn)
    for a, b in zip(unchanged(saved[0]), unchanged(other), strict=True):
        assert torch.equal(a, b)
    for model in (saved[0], other):
        model.train_once()
    for a, b in zip(unchanged(saved[0]), unchanged(other), strict=True):
        assert torch.equal(a, b)
