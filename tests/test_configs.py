"""What a table may be, and what is said of one that it may not be."""

from __future__ import annotations

from enum import Enum
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import persia
from persia import errors
from persia.store.configs import as_config


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"embedding_dim": 0}, "dim"),
        ({"embedding_dim": 5000}, "dim"),
        ({"embedding_dim": 4.0}, "embedding_dim"),
        ({"name": ""}, "name"),
        ({"name": "n" * 300}, "name"),
        ({"feature_names": "user"}, "feature_names.*'user'"),
        ({"pooling": "max"}, "pooling"),
        ({"data_type": "int4"}, "data_type"),
        ({"init": ("uniform", 1.0)}, "init"),
        ({"init": ("normal", 0.0, float("nan"))}, "init"),
        ({"init": None}, "init"),
        ({"init": ("uniform", "x", 1)}, "init"),
        ({"init": ("normal", 0.0, -1.0)}, "init.*std >= 0"),
        ({"capacity": 0}, "capacity"),
        ({"capacity": 1.5}, "'t': capacity is 1.5"),
        ({"capacity": "5"}, "'t': capacity is '5'"),
        ({"capacity": True}, "'t': capacity"),
        ({"capacity": 2**63}, "'t': capacity"),
        ({"eviction": "lru"}, "capacity"),
        ({"eviction": "fifo", "capacity": 9}, "eviction"),
        ({"admission": 0.0}, "admission"),
        ({"admission": 1.5}, "admission"),
        ({"admission": "some"}, "admission"),
        ({"admission": None}, "admission is None"),
        ({"feature_names": [1]}, r"'t': feature_names is \[1\]"),
        ({"feature_names": 1}, "'t': feature_names is 1"),
        (
            {"feature_names": ["a", "b", "a"]},
            r"'t': feature_names has \['a'\]",
        ),
        ({"missing": "error"}, "missing"),
        ({"optimizer": "adam"}, r"persia\.optim"),
        ({"lr": -1.0}, "table 't': lr is -1"),
        ({"lr": float("nan")}, "table 't': lr is nan"),
        ({"lr": "x"}, "table 't': lr is 'x'"),
        ({"num_embeddings": "x"}, "'t': num_embeddings is 'x'"),
        ({"num_embeddings": -1}, "'t': num_embeddings is -1"),
        ({"trainable": None}, "'t': trainable is None"),
    ],
)
def test_wrong_settings_are_named(wrong: dict[str, Any], match: str) -> None:
    settings = {"name": "t", "embedding_dim": 4, **wrong}
    with pytest.raises(errors.InvalidArgument, match=match):
        persia.EmbeddingBagCollection(
            tables=[persia.EmbeddingBagConfig(**settings)]
        )


@pytest.mark.parametrize("dim", [0, -1, 4097])
def test_the_config_knows_the_range_of_embedding_dim(dim: int) -> None:
    with pytest.raises(errors.InvalidArgument, match=f"is {dim}, .*4096"):
        persia.EmbeddingBagConfig("t", dim)


def test_whole_numbers_may_be_floats() -> None:
    assert persia.EmbeddingBagConfig("t", 4, capacity=1e6).capacity == 10**6  # type: ignore[arg-type]
    store = persia.Store(memory_limit=1e9)  # type: ignore[arg-type]
    assert store.stats()["memory_limit"] == 10**9


class Pooling(Enum):
    SUM = "SUM"
    MEAN = "MEAN"


class DataType(Enum):
    FP32 = "FP32"
    FP16 = "FP16"


def test_configs_like_torchrecs() -> None:
    theirs = SimpleNamespace(
        name="t",
        embedding_dim=8,
        num_embeddings=1000,
        feature_names=["a", "b"],
        pooling=Pooling.MEAN,
        data_type=DataType.FP32,
    )
    config = as_config(theirs, persia.EmbeddingBagConfig)
    bags = persia.EmbeddingBagCollection(tables=[theirs])
    ids = {"a": torch.tensor([[1, 2]]), "b": torch.tensor([3])}
    rows = bags.store.rows("t", [1, 2, 3])
    torch.testing.assert_close(bags(ids)["a"][0], rows[:2].mean(0))
    assert config.num_embeddings == 1000
    theirs.data_type = DataType.FP16
    with pytest.raises(errors.InvalidArgument, match="data_type"):
        persia.EmbeddingBagCollection(tables=[theirs])


def theirs(**settings: Any) -> Any:
    plain = {"name": "t", "embedding_dim": 2, "feature_names": ["a"]}
    return as_config(
        SimpleNamespace(**plain | settings), persia.EmbeddingBagConfig
    )


@pytest.mark.parametrize(
    ("function", "init"),
    [
        (partial(nn.init.uniform_, a=-1.0, b=0.5), ("uniform", -1.0, 0.5)),
        (partial(nn.init.normal_, std=0.25), ("normal", 0.0, 0.25)),
        (partial(nn.init.constant_, val=2.0), ("constant", 2.0)),
        (nn.init.zeros_, ("constant", 0.0)),
        (nn.init.uniform_, ("uniform", 0.0, 1.0)),
    ],
)
def test_torchs_initial_values_are_known(
    function: Any, init: tuple[Any, ...]
) -> None:
    assert theirs(init_fn=function).init == init


def test_settings_of_torchrecs_configs_are_kept_or_refused() -> None:
    kept = theirs(weight_init_min=0.5, weight_init_max=1.0)
    assert kept.init == ("uniform", 0.5, 1.0)
    assert theirs(weight_init_min=None, need_pos=False).init == 0.01
    for wrong in ({"init_fn": nn.init.xavier_uniform_}, {"need_pos": True}):
        with pytest.raises(errors.InvalidArgument):
            theirs(**wrong)


def test_arguments_in_torchrecs_order() -> None:
    config = persia.EmbeddingBagConfig(1000, 8, "t", "bf16", ["a", "b"])  # type: ignore[arg-type]
    assert config == persia.EmbeddingBagConfig(
        "t", 8, ["a", "b"], num_embeddings=1000, data_type="bf16"
    )
    assert persia.EmbeddingConfig(9, 8, "t") == persia.EmbeddingConfig(  # type: ignore[arg-type]
        "t", 8, num_embeddings=9
    )
    with pytest.raises(errors.InvalidArgument):
        persia.EmbeddingConfig(9, 8)  # type: ignore[arg-type]


def test_kinds_of_configs_are_not_mixed() -> None:
    with pytest.raises(errors.InvalidArgument, match="EmbeddingBagConfig"):
        persia.EmbeddingBagCollection(tables=[persia.EmbeddingConfig("t", 4)])
    with pytest.raises(errors.InvalidArgument, match="EmbeddingConfig"):
        persia.EmbeddingCollection(tables=[persia.EmbeddingBagConfig("t", 4)])
    with pytest.raises(errors.InvalidArgument, match="one embedding_dim"):
        persia.EmbeddingCollection(
            tables=[
                persia.EmbeddingConfig("t", 4),
                persia.EmbeddingConfig("u", 8),
            ]
        )
    with pytest.raises(errors.InvalidArgument, match=r"\['t'\]"):
        persia.EmbeddingBagCollection(
            tables=[
                persia.EmbeddingBagConfig("t", 4),
                persia.EmbeddingBagConfig("t", 4),
            ]
        )
    with pytest.raises(errors.InvalidArgument, match="tables"):
        persia.EmbeddingBagCollection(tables=[])
    with pytest.raises(errors.InvalidArgument, match="optimizer="):
        persia.EmbeddingBagCollection(
            tables=[persia.EmbeddingBagConfig("t", 4)],
            store=persia.Store(),
            optimizer=persia.optim.SGD(0.1),
        )


def test_a_table_is_named_after_its_feature_by_default() -> None:
    bags = persia.EmbeddingBagCollection(
        tables=[persia.EmbeddingBagConfig("user", 4)]
    )
    assert bags({"user": torch.arange(3)}).keys() == ["user"]
    assert list(bags.store.tables) == ["user"]


@pytest.mark.parametrize("name", ["a\0b", "\ud800"])
def test_names_that_no_server_could_be_told(name: str) -> None:
    for table, feature in ((name, "f"), ("t", name)):
        with pytest.raises(errors.InvalidArgument, match="name"):
            persia.EmbeddingBagConfig(table, 4, [feature])
