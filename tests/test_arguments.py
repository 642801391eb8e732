"""What is said of arguments that are none: an error of Persia with their
name, wherever they come in.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import persia
from persia import JaggedBatch, errors
from persia.base.counts import counted

ONE = torch.tensor([1])
UNSIGNED = np.array([2**63 + 5], dtype=np.uint64)


@pytest.fixture(scope="module")
def bags() -> Any:
    return persia.EmbeddingBagCollection(
        store=persia.Store(),
        tables=[persia.EmbeddingBagConfig("t", 2, ["f"])],
    )


@pytest.mark.parametrize(
    ("ids", "match"),
    [
        ([2**63], r"ids is a list .* u - 2\*\*64"),
        (["x"], "ids is a list .* persia.hash_ids"),
        (None, "ids is a NoneType"),
        ("x", "ids is a str"),
        ([1.5], r"ids has dtype torch.float32.*\.to\(torch\.int64\)"),
        (UNSIGNED, r"uint64, .* t\.view\(torch\.int64\)"),
    ],
)
def test_ids_of_rows(bags: Any, ids: Any, match: str) -> None:
    store = bags.store
    for call in (store.rows, store.contains):
        with pytest.raises(errors.DtypeError, match=match):
            call("t", ids)
    with pytest.raises(errors.DtypeError, match=match):
        store.set_rows("t", ids, [[1.0, 2.0]])


def parts(**one: Any) -> dict[str, Any]:
    return {"keys": ["a", "b"], "values": torch.tensor([3, 4]), **one}


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (parts(keys=None), "keys is None"),
        (parts(keys=[["a"]]), r"a key is \['a'\]"),
        (parts(values=[2**63, 1]), "values is a list .*int64"),
        (parts(values=torch.empty(2, device="meta").long()), "meta device"),
        (
            parts(lengths=torch.tensor([0, 1, 0, 5])),
            "feature 'b', sample 1: .*5.* 2 ids",
        ),
        (parts(lengths=torch.tensor([1, 0])), "1, .* 2"),
        (
            parts(lengths=torch.tensor([2**62] * 4 + [2, 0])),
            "feature 'a', sample 0: .*4611686018427387904",
        ),
        (parts(offsets=torch.tensor([1, 1, 2])), " 1, .* 0"),
        (parts(weights="x"), "weights is a str .* one weight an id"),
        (parts(weights=torch.ones(1)), "1 .*2 ids"),
    ],
)
def test_batches(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(errors.PersiaError, match=match):
        JaggedBatch(**arguments)


@pytest.mark.parametrize(
    ("features", "padding", "match"),
    [
        ([1], None, r"features is \[1\]"),
        ({"a": ONE}, "x", "padding_value is 'x'"),
        ({1: ONE}, None, "a key is 1"),
        (
            {"a": (ONE, torch.tensor([2**62] * 4 + [1]))},
            None,
            "feature 'a', sample 0: ",
        ),
    ],
)
def test_batches_of_dicts(features: Any, padding: Any, match: str) -> None:
    with pytest.raises(errors.PersiaError, match=match):
        JaggedBatch.from_dict(features, padding_value=padding)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda s: s.explain("t", "x"), "id is a list"),
        (lambda s: s.explain("t", 2**63), "id is a list .*int64"),
        (lambda s: s.rows(["t"], ONE), r"no table \['t'\]"),
        (lambda s: s.set_rows("t", ONE, "x"), "values is a str"),
        (lambda s: s.set_rows("t", ONE, None), "values is a NoneType"),
        (lambda s: s.flush(-1), "timeout is -1"),
        (lambda s: s.flush("x"), "timeout is 'x'"),
        (lambda s: s.save(None), "path is None"),
        (lambda s: s.load(None), "path is None"),
        (lambda s: s.save("out", keep="x"), "keep is 'x'"),
        (lambda s: s.save("out", step="x"), "step is 'x'"),
        (lambda s: s.optimizer.load_state_dict({}), "state .*persia"),
        (
            lambda s: s.optimizer.load_state_dict({"param_groups": [{}]}),
            "state .*persia",
        ),
        (
            lambda s: s.add_table(persia.EmbeddingBagConfig("t", 3)),
            "'t': embedding_dim is 3, .* 2;",
        ),
        (
            lambda s: s.add_table(persia.EmbeddingBagConfig("t", 2, init=1.0)),
            "'t': init is 1.0, .* 0.01;",
        ),
        (lambda s: persia.clip_grad_norm_(3, 1.0), "model is 3"),
        (lambda s: persia.Store(servers=3), "servers is 3"),
        (lambda s: persia.Store(servers=[3]), "servers is 3"),
        (lambda s: persia.Store(namespace=3), "namespace is 3"),
        (lambda s: persia.Store(timeout="x"), "timeout is 'x'"),
        (lambda s: persia.Store(grad_division="x"), "grad_division is 'x'"),
        (lambda s: persia.datasets.CSV("a", {"label": "y"}), "schema is {'la"),
        (lambda s: persia.data.Schema(), "categorical.*multivalued"),
        (lambda s: persia.data.Schema(foo=1), "foo: Extra inputs"),
        (lambda s: persia.datasets.SyntheticCTR("x"), "samples is 'x'"),
        (lambda s: persia.datasets.SyntheticCTR(9, zipf="x"), "zipf is 'x'"),
        (lambda s: persia.datasets.value_hash(3), "value is 3"),
    ],
)
def test_calls(
    bags: Any,
    call: Callable[[persia.Store], Any],
    match: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(errors.PersiaError, match=match):
        call(bags.store)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"tables": persia.EmbeddingBagConfig("t", 2)}, "tables is .* a list"),
        ({"store": 3}, "store is 3"),
        ({"padding_value": "x"}, "padding_value is 'x'"),
        ({"output_dtype": "fp16"}, "output_dtype is 'fp16'"),
        ({"output_dtype": torch.int64}, "output_dtype is torch.int64"),
    ],
)
def test_modules(arguments: dict[str, Any], match: str) -> None:
    tables = [persia.EmbeddingBagConfig("t", 2)]
    with pytest.raises(errors.InvalidArgument, match=match):
        persia.EmbeddingBagCollection(**{"tables": tables, **arguments})


@pytest.mark.parametrize("state", [None, 3, {}, {"tables": 3}, {"tables": {}}])
def test_states_of_modules(bags: Any, state: Any) -> None:
    if state == {"tables": {}}:
        state = {"tables": {"t": 3}, "checkpoint": ""}
    with pytest.raises(errors.SchemaMismatch, match=r"embedding_dim.*rows"):
        bags.load_state_dict({"_extra_state": state})


@pytest.mark.parametrize(
    ("state", "match"),
    [
        (None, "None"),
        ({}, "{}"),
        ({"batches": -1, "epoch": None}, "batches is -1"),
        ({"batches": "x", "epoch": None}, "batches is 'x'"),
    ],
)
def test_states_of_loaders(bags: Any, state: Any, match: str) -> None:
    with pytest.raises(errors.InvalidArgument, match=match):
        persia.DataLoader([], bags).load_state_dict(state)


@pytest.mark.parametrize("lr", ["x", None])
def test_learning_rates_of_groups(lr: Any) -> None:
    bags = persia.EmbeddingBagCollection(
        tables=[persia.EmbeddingBagConfig("t", 2, ["f"])]
    )
    bags.store.optimizer.param_groups[0]["lr"] = lr
    with pytest.raises(errors.InvalidArgument, match=f"'t': lr is {lr!r}; ne"):
        bags({"f": ONE}).values().sum().backward()
    bags.store.optimizer.param_groups[0]["lr"] = 0.1
    bags({"f": ONE}).values().sum().backward()
    assert bags.store.updates == 1


class Columns:
    """As a DataFrame has them: ``values`` is no function."""

    values = (1, 2)

    def keys(self) -> list[str]:
        return ["f"]


def test_what_holds_no_ids_is_named() -> None:
    """Not by an error of Python or torch."""
    bags = persia.EmbeddingBagCollection(
        tables=[persia.EmbeddingBagConfig("t", 4, ["f"])]
    )
    with pytest.raises(errors.InvalidArgument, match=r"persia\.data\.Table"):
        bags(Columns())
    strided = torch.nested.nested_tensor([torch.arange(2), torch.arange(3)])
    with pytest.raises(errors.ShapeError, match=r"'f'.*torch\.jagged"):
        bags({"f": strided})
    model = persia.models.DLRM(bags, 3)
    ids = {"f": torch.arange(2)}
    for dense in (None, torch.rand(2, 5), torch.rand(2)):
        with pytest.raises(errors.ShapeError, match=r"\[B, 3\]"):
            model(dense, ids)


def test_a_jagged_tensor_of_torch_is_a_feature() -> None:
    parts = [torch.arange(2), torch.arange(0), torch.arange(3)]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged)
    batch = persia.JaggedBatch.from_dict({"f": nested})
    assert batch.values().tolist() == [0, 1, 0, 1, 2]
    assert batch.lengths().tolist() == [2, 0, 3]


def test_loaders_and_data_say_what_they_are() -> None:
    data = persia.datasets.SyntheticCTR(samples=100, batch_size=10)
    bags = persia.EmbeddingBagCollection(
        tables=[persia.EmbeddingBagConfig(n, 4) for n in ("C1", "C10", "C2")]
    )
    loader = repr(persia.DataLoader(data, bags, staleness=2))
    assert "batch_size=10" in repr(data) and repr(data) in loader
    assert "staleness=2" in loader
    assert "['C1', 'C10', 'C2']" in repr(bags.store)  # as they were made


def test_numbers_of_things() -> None:
    said = [counted(n, "row") for n in (0, 1, 2000)]
    assert said == ["0 rows", "1 row", "2,000 rows"]
    assert counted(2, "batch") == "2 batches"
