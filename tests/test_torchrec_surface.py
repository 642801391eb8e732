"""What torchrec's modules do and its users expect of ours."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import persia
from persia import errors
from persia.nn import KeyedTensor

IDS = {"a": torch.tensor([[1, 2], [3, 4]]), "b": torch.tensor([[5], [6]])}


def bags(**more: object) -> persia.EmbeddingBagCollection:
    return persia.EmbeddingBagCollection(
        [
            persia.EmbeddingBagConfig("t", 3, ["a"], num_embeddings=9),
            persia.EmbeddingBagConfig("u", 4, ["b"], num_embeddings=9),
        ],
        **more,  # type: ignore[arg-type]
    )


def sequences(**more: object) -> persia.EmbeddingCollection:
    return persia.EmbeddingCollection(
        [
            persia.EmbeddingConfig("t", 3, ["a", "b"]),
            persia.EmbeddingConfig("u", 3, ["b"]),
        ],
        optimizer=persia.optim.SGD(lr=1.0),
        **more,  # type: ignore[arg-type]
    )


def test_a_feature_of_sequences_in_two_tables() -> None:
    module = sequences()
    store = module.store
    expected = {
        "a": store.rows("t", [1, 2, 3, 4]),
        "b@t": store.rows("t", [5, 6]),
        "b@u": store.rows("u", [5, 6]),
    }
    out = module(IDS)
    assert list(out) == list(expected)
    for name, rows in expected.items():
        torch.testing.assert_close(out[name].values(), rows)
    loss = (out["a"].values() * 2).sum() + (out["b@u"].values() * 3).sum()
    loss.backward()
    torch.testing.assert_close(
        store.rows("t", [1, 2, 3, 4]), expected["a"] - 2
    )
    torch.testing.assert_close(store.rows("t", [5, 6]), expected["b@t"])
    torch.testing.assert_close(store.rows("u", [5, 6]), expected["b@u"] - 3)


def test_indices_are_the_weights() -> None:
    out = sequences(need_indices=True)(IDS)
    assert out["b@u"].weights().tolist() == [5, 6]
    assert out["a"].weights().tolist() == [1, 2, 3, 4]
    assert sequences()(IDS)["a"].weights_or_none() is None
    with pytest.raises(errors.InvalidArgument):
        sequences()(IDS)["a"].weights()


def test_a_module_on_meta_has_shapes_and_moves() -> None:
    module = bags(device="meta")
    assert module.device == torch.device("meta")
    out = module(IDS).values()
    assert out.is_meta
    assert out.shape == (2, 7)
    assert sequences(device="meta")(IDS)["a"].values().shape == (4, 3)
    assert module.embedding_bags["t"].weight.is_meta
    assert not module.to("cpu")(IDS).values().is_meta
    with torch.device("meta"):
        module = bags()
    assert module.device == torch.device("meta")
    module.to_empty(device="cpu")
    assert not module(IDS).values().is_meta


def test_tables_show_their_weights() -> None:
    module = bags()
    weight = module.embedding_bags["u"].weight
    torch.testing.assert_close(weight, module.store.rows("u", range(9)))
    assert weight.shape == (9, 4)
    assert list(sequences().embeddings) == ["t", "u"]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bags = bags()
        self.items = persia.nn.Embedding(9, 7, name="items")
        self.out = nn.Linear(7, 1)

    def forward(self, ids: dict[str, Tensor], items: Tensor) -> Tensor:
        rows = self.bags(ids)["a"].sum(1, keepdim=True) + self.items(items)
        out: Tensor = self.out(rows)
        return out


def test_a_traced_model_has_one_node_a_module() -> None:
    model, items = Model(), torch.tensor([1, 2])
    traced = torch.fx.symbolic_trace(model)
    called = [n.target for n in traced.graph.nodes if n.op == "call_module"]
    assert called == ["bags", "items", "out"]
    torch.testing.assert_close(traced(IDS, items), model(IDS, items))
    with pytest.raises(errors.InvalidArgument):
        torch.fx.symbolic_trace(bags())


def test_torchscript_leaves_the_forward_to_python() -> None:
    module = bags()
    torch.testing.assert_close(
        torch.jit.script(module)(IDS).values(), module(IDS).values()
    )


def test_columns_by_groups() -> None:
    one = KeyedTensor(["a", "b"], [1, 2], torch.tensor([[1.0, 2, 3]]))
    two = KeyedTensor(["c"], [1], torch.tensor([[4.0]]))
    groups = [["c", "a"], ["b"], ["b", "c"]]
    parts = KeyedTensor.regroup([one, two], groups)
    assert [p.tolist() for p in parts] == [[[4, 1]], [[2, 3]], [[2, 3, 4]]]
    named = KeyedTensor.regroup_as_dict([one, two], groups, ["x", "y", "z"])
    assert list(named) == ["x", "y", "z"]
    with pytest.raises(errors.MissingFeature):
        KeyedTensor.regroup([one, two], [["d"]])
    assert one.device() == torch.device("cpu")
    assert one.to("meta").values().is_meta
