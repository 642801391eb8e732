"""The outputs of modules: where they are, and whose shapes they have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import persia
from persia import errors


class Kjt:
    """A KeyedJaggedTensor with samples that are there once, as torchrec's:
    inverse_indices are (keys, int64 [features, samples])."""

    def __init__(
        self, batch: persia.JaggedBatch, inverse: tuple[list[str], Tensor]
    ) -> None:
        self._inverse = inverse
        self.keys, self.values = batch.keys, batch.values
        self.offsets = batch.offsets
        self.weights_or_none = batch.weights_or_none

    def inverse_indices_or_none(self) -> tuple[list[str], Tensor]:
        return self._inverse


def make() -> persia.EmbeddingBagCollection:
    return persia.EmbeddingBagCollection(
        store=persia.Store(persia.optim.SGD(lr=1.0)),
        tables=[
            persia.EmbeddingBagConfig("t", 2, ["f", "g"], init=0.5),
            persia.EmbeddingBagConfig("u", 3, ["f"], init=0.5),
        ],
    )


def test_inverse_indices_expand_the_output_as_torchrec_does() -> None:
    bags = make()
    batch = persia.JaggedBatch(["f", "g"], torch.tensor([1, 2, 3, 4]))
    index = torch.tensor([[1, 1, 0], [0, 1, 1]])  # of g, then f
    plain = bags(batch)
    out = bags(Kjt(batch, (["g", "f"], index)))
    assert out.values().shape == (3, 7)
    for name in ("f@t", "g", "f@u"):
        at = index[0] if name == "g" else index[1]
        assert torch.equal(out[name], plain[name].index_select(0, at))
    before = bags.store.rows("t", [1, 2, 3, 4])
    out.values().sum().backward()
    change = before - bags.store.rows("t", [1, 2, 3, 4])
    want = torch.tensor([1.0, 2.0, 1.0, 2.0])[:, None].expand(4, 2)
    torch.testing.assert_close(change, want)
    with pytest.raises(errors.MissingFeature, match=r"inverse_indices.*'g'"):
        bags(Kjt(batch, (["f"], index[:1])))


def test_sequences_have_their_offsets_where_their_values_are() -> None:
    rows = persia.EmbeddingCollection(
        store=persia.Store(),
        tables=[persia.EmbeddingConfig("t", 2, ["f", "g"])],
        device="meta",
    )
    lengths = torch.tensor([1, 0, 2, 1])
    for batch in (
        persia.JaggedBatch(["f", "g"], torch.arange(4), lengths=lengths),
        persia.JaggedBatch(["f", "g"], torch.arange(4)),
    ):
        for one in rows(batch).values():
            assert one.values().device.type == "meta"
            assert one.offsets().device.type == "meta"
            assert one.lengths().device.type == "meta"


def test_indices_of_sequences_are_where_the_values_are() -> None:
    module = persia.EmbeddingCollection(
        store=persia.Store(persia.optim.SGD(lr=1.0)),
        tables=[persia.EmbeddingConfig("t", 4, feature_names=["f"])],
        need_indices=True,
    )
    ids = persia.JaggedBatch(
        ["f"], torch.arange(5), lengths=torch.tensor([2, 3])
    )
    assert module(ids)["f"].weights().tolist() == [0, 1, 2, 3, 4]
    for one in (ids.to("meta"), ids):
        there = module(one)["f"]
        assert there.weights().device == there.values().device
        assert there.offsets().device == there.values().device
        module.to("meta")


def test_a_copy_to_a_gpu_is_of_pinned_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from persia.base.tensors import to_device

    here, pinned, gone = torch.arange(3), torch.arange(3), torch.empty(0)
    copies = []

    def to(tensor: Tensor, *args: Any, **options: Any) -> Tensor:
        copies.append((tensor, args, options))
        return gone

    monkeypatch.setattr(Tensor, "pin_memory", lambda _: pinned)
    monkeypatch.setattr(Tensor, "to", to)
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert to_device(here, gpu) is gone
    assert to_device(here, cpu) is gone
    (first, *how), (second, *other) = copies
    assert first is pinned
    assert how == [(gpu,), {"non_blocking": True}]
    assert second is here
    assert other == [(cpu,), {}]


class Shared(torch.nn.Module):
    """A persia module and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.bags = persia.EmbeddingBagCollection(
            store=persia.Store(persia.optim.SGD(lr=1.0), update="step"),
            tables=[persia.EmbeddingBagConfig("t", 4, ["f"])],
        )
        self.linear = torch.nn.Linear(4, 1)

    def forward(self, ids: Any) -> Tensor:
        out: Tensor = self.linear(self.bags(ids).values())
        return out


@pytest.mark.parametrize("largest", [0.5, float("inf")])
def test_clip_counts_what_modules_share_once(largest: float) -> None:
    model = Shared()
    ids = torch.arange(3)
    weight = torch.nn.Parameter(model.bags.store.rows("t", ids).clone())
    theirs = Shared().linear
    (theirs(weight) * 9).sum().backward()
    parameters = [weight, *theirs.parameters()]
    want = torch.nn.utils.clip_grad_norm_(parameters, largest)
    (model({"f": ids}) * 9).sum().backward()
    parts = [model, model.linear, model.bags, model]
    torch.testing.assert_close(persia.clip_grad_norm_(parts, largest), want)
    for mine, other in zip(
        model.linear.parameters(), theirs.parameters(), strict=True
    ):
        torch.testing.assert_close(mine.grad, other.grad)
    before = model.bags.store.rows("t", ids)
    model.bags.store.optimizer.step()
    torch.testing.assert_close(
        before - model.bags.store.rows("t", ids), weight.grad
    )
