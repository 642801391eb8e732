"""Batches of named tensors: against slices of numpy and of lists."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils import _pytree

from persia import Batch, JaggedBatch, errors
from persia.data.batches.batch import check_tensors, flat, of_flat, part_of

DTYPES = [torch.float32, torch.float64, torch.int64, torch.bool, torch.uint8]


@st.composite
def made(draw: Any) -> Batch:
    """Any features, and tensors of any names, dtypes and shapes."""
    samples = draw(st.integers(0, 6))
    keys = draw(st.lists(st.text(max_size=3), min_size=1, unique=True))
    lengths = [draw(st.integers(0, 3)) for _ in range(len(keys) * samples)]
    ids = JaggedBatch(
        keys,
        torch.arange(sum(lengths)),
        torch.tensor(lengths, dtype=torch.int64),
    )
    names = st.text(max_size=3).filter(
        lambda n: n != "ids" and not set(n) & set("\0\x1f")
    )
    names |= st.sampled_from(["dense", "label", "weight", "timestamp"])

    def tensor(n: int) -> torch.Tensor:
        shape = (n, *draw(st.lists(st.integers(0, 3), max_size=2)))
        return torch.randint(0, 2, shape).to(draw(st.sampled_from(DTYPES)))

    counts = dict(zip(keys, ids.length_per_key(), strict=True))
    some = draw(st.lists(st.sampled_from(keys), unique=True))
    return Batch(
        None,
        ids,
        tensors={n: tensor(samples) for n in draw(st.sets(names, max_size=4))},
        aligned={
            key: {
                n: tensor(counts[key])
                for n in draw(st.sets(names, min_size=1, max_size=2))
            }
            for key in some
        },
    )


def same(a: Batch, b: Batch) -> bool:
    return (
        a.ids.keys() == b.ids.keys()
        and torch.equal(a.ids.values(), b.ids.values())
        and torch.equal(a.ids.lengths(), b.ids.lengths())
        and list(flat(a)) == list(flat(b))
        and all(
            one.dtype == flat(b)[name].dtype
            and torch.equal(one, flat(b)[name])
            for name, one in flat(a).items()
        )
    )


@settings(max_examples=40)
@given(made())
def test_nothing_is_lost_on_any_way(batch: Batch) -> None:
    check_tensors(batch)
    assert same(of_flat(batch.ids, flat(batch)), batch)
    assert same(batch.to("cpu"), batch)
    assert same(pickle.loads(pickle.dumps(batch)), batch)
    leaves, spec = _pytree.tree_flatten(batch)
    assert same(_pytree.tree_unflatten(leaves, spec), batch)


@settings(max_examples=40)
@given(made(), st.data())
def test_a_part_has_the_samples_of_a_slice(batch: Batch, data: Any) -> None:
    first = data.draw(st.integers(0, len(batch)))
    end = data.draw(st.integers(first, len(batch)))
    part = part_of(batch, first, end)
    check_tensors(part)
    assert len(part) == end - first
    for name, tensor in batch.tensors.items():
        assert torch.equal(part[name], tensor[first:end])
    for key in batch.ids:
        values, lengths = batch.ids[key]
        bounds = np.append(0, np.cumsum(lengths.numpy()))
        ids = slice(bounds[first], bounds[end])
        assert torch.equal(part.ids[key][0], values[ids])
        for name, tensor in batch.aligned.get(key, {}).items():
            assert torch.equal(part.aligned[key][name], tensor[ids])


def test_names_with_a_meaning_are_attributes() -> None:
    ids = JaggedBatch(["a"], torch.arange(3))
    dense, label = torch.zeros(3, 2), torch.ones(3)
    batch = Batch(dense, ids, label, tensors={"session": torch.arange(3)})
    assert batch.dense is dense and batch["dense"] is dense
    assert batch.label is label and batch.weight is None
    assert list(batch.tensors) == ["session", "dense", "label"]
    assert len(batch) == 3
    assert "session" in batch and "weight" not in batch and 0 not in batch
    other: Any = batch
    assert other.session is batch["session"]
    other.query = label  # a tensor of a new name is one of the batch
    assert batch["query"] is label and "query" not in vars(batch)
    del batch.tensors["query"]
    other.note = "no tensor"
    assert other.note == "no tensor" and "note" not in batch
    assert not hasattr(other, "sesion") and not hasattr(other, "query")
    batch.weight, batch.label = label, None
    assert batch["weight"] is label and "label" not in batch
    for name in ("label", 0):
        with pytest.raises(errors.MissingFeature):
            batch[name]  # type: ignore[index]
    for wrong in ("ids", 3, "a\0", "\x1f", "\ud800"):
        with pytest.raises(errors.InvalidArgument):
            Batch(None, ids, tensors={wrong: label})  # type: ignore[dict-item]


def test_a_copy_and_a_replacement_leave_a_batch_alone() -> None:
    ids = JaggedBatch(["a"], torch.arange(3))
    one, two = torch.zeros(3), torch.ones(3)
    batch = Batch(
        None, ids, one, tensors={"x": one}, aligned={"a": {"t": one}}
    )
    other = copy.copy(batch)
    other.label, other.aligned["a"]["t"] = two, two
    assert batch.label is one and batch.aligned["a"]["t"] is one
    other = dataclasses.replace(batch, label=two)
    assert other.label is two and other["x"] is one and other.ids is ids
    assert dataclasses.replace(batch, label=None).label is None
    assert dataclasses.replace(batch, weight=two).label is one
    assert batch.label is one and other.aligned is not batch.aligned
    with pytest.raises(errors.InvalidArgument):
        Batch(one)


def test_libraries_find_the_number_of_samples() -> None:
    """As Lightning does: in the fields of a dataclass that is no iterable."""
    ids = JaggedBatch(["a"], torch.arange(6), torch.tensor([1, 2, 3]))
    batch = Batch(torch.zeros(3, 2), ids, torch.zeros(3))
    assert not isinstance(batch, Iterable)
    fields = [getattr(batch, f.name) for f in dataclasses.fields(batch)]
    named = [one for one in fields if isinstance(one, Mapping)]
    sizes = {len(t) for one in named for t in one.values()}
    assert sizes == {3}


@pytest.mark.parametrize(
    ("tensors", "aligned", "kind"),
    [
        ({"x": torch.zeros(2)}, {}, errors.ShapeError),
        ({"x": torch.zeros(())}, {}, errors.ShapeError),
        ({"x": torch.zeros(3, *[1] * 16)}, {}, errors.ShapeError),
        ({"x": torch.zeros(3).to_sparse()}, {}, errors.DtypeError),
        ({}, {"a": {"x": torch.zeros(3)}}, errors.ShapeError),
        ({}, {"b": {"x": torch.zeros(4)}}, errors.MissingFeature),
    ],
)
def test_tensors_of_other_numbers_of_samples_are_told(
    tensors: Any, aligned: Any, kind: type[Exception]
) -> None:
    ids = JaggedBatch(["a"], torch.arange(4), torch.tensor([3, 0, 1]))
    with pytest.raises(kind):
        check_tensors(Batch(None, ids, tensors=tensors, aligned=aligned))
