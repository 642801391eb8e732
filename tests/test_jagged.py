import copy
import pickle

import numpy as np
import pytest
import torch

from persia import Batch, JaggedBatch, errors


def example() -> JaggedBatch:
    # user: [1], [2, 3]; item: [], [4]
    return JaggedBatch(
        ["user", "item"],
        torch.tensor([1, 2, 3, 4]),
        torch.tensor([1, 2, 0, 1]),
    )


def same(a: JaggedBatch, b: JaggedBatch) -> None:
    assert a.keys() == b.keys()
    assert a.stride() == b.stride()
    assert torch.equal(a.values(), b.values())
    assert torch.equal(a.lengths(), b.lengths())
    assert torch.equal(a.offsets(), b.offsets())
    assert (a.weights_or_none() is None) == (b.weights_or_none() is None)
    if a.weights_or_none() is not None:
        assert torch.equal(a.weights(), b.weights())


def test_surface_of_a_keyed_jagged_tensor() -> None:
    b = example()
    assert b.keys() == ["user", "item"]
    assert b.stride() == 2
    assert b.stride_per_key() == [2, 2]
    assert b.offsets().tolist() == [0, 1, 3, 3, 4]
    assert b.offset_per_key() == [0, 3, 4]
    assert b.length_per_key() == [3, 1]
    assert b.weights_or_none() is None
    assert not b.variable_stride_per_key()
    values, lengths = b["item"]
    assert values.tolist() == [4]
    assert lengths.tolist() == [0, 1]
    same(b, JaggedBatch(["user", "item"], b.values(), offsets=b.offsets()))
    same(
        b, JaggedBatch(["user", "item"], b.values(), b.lengths(), b.offsets())
    )
    same(b, JaggedBatch.from_dict(b.to_dict()))


def test_one_id_a_sample() -> None:
    b = JaggedBatch(["a", "b"], torch.arange(6))
    assert b.stride() == 3
    assert b.lengths_or_none() is None
    assert b.offsets_or_none() is None
    assert b.lengths().tolist() == [1] * 6
    assert b.offsets().tolist() == list(range(7))
    assert b.offset_per_key() == [0, 3, 6]
    assert b["b"][0].tolist() == [3, 4, 5]
    assert b["b"][1].tolist() == [1, 1, 1]


def test_weights() -> None:
    w = torch.tensor([0.5, 1, 2, 3])
    b = JaggedBatch(
        ["user", "item"],
        torch.arange(4),
        torch.tensor([1, 2, 0, 1]),
        weights=w,
    )
    assert b.to_dict()["user"][2].tolist() == [0.5, 1, 2]
    same(b, JaggedBatch.from_dict(b.to_dict()))
    mixed = JaggedBatch.from_dict(
        {"a": torch.tensor([7, 8]), "b": b.to_dict()["user"]}
    )
    assert mixed.weights().tolist() == [1, 1, 0.5, 1, 2]
    with pytest.raises(errors.ShapeError, match="one weight an id"):
        JaggedBatch(["a"], torch.arange(4), weights=w[:3])
    with pytest.raises(errors.DtypeError, match="weights"):
        JaggedBatch(["a"], torch.arange(4), weights=torch.arange(4))
    with pytest.raises(errors.MissingFeature, match="no weights"):
        example().weights()


def test_from_dict_with_padding() -> None:
    padded = torch.tensor([[1, 2, 0], [0, 0, 0], [3, 0, 4]])
    b = JaggedBatch.from_dict(
        {"u": torch.tensor([7, 8, 9]), "h": padded}, padding_value=0
    )
    assert b["u"][0].tolist() == [7, 8, 9]
    assert b["h"][0].tolist() == [1, 2, 3, 4]
    assert b["h"][1].tolist() == [
        2,
        0,
        2,
    ]
    whole = JaggedBatch.from_dict({"h": padded})
    assert whole.lengths().tolist() == [3, 3, 3]
    assert whole.values().tolist() == padded.flatten().tolist()
    assert (
        JaggedBatch.from_dict({"u": np.array([1, 2], dtype=np.int32)})
        .values()
        .dtype
        == torch.int64
    )


def test_random_batches_against_plain_lists() -> None:
    rng = np.random.default_rng(3)
    for _ in range(20):
        features, samples = rng.integers(1, 5), rng.integers(0, 7)
        bags = [
            [
                rng.integers(-(2**62), 2**62, rng.integers(0, 4)).tolist()
                for _ in range(samples)
            ]
            for _ in range(features)
        ]
        entries = {
            f"f{f}": (
                torch.tensor(
                    [i for bag in bags[f] for i in bag], dtype=torch.int64
                ),
                torch.tensor([len(bag) for bag in bags[f]], dtype=torch.int64),
            )
            for f in range(features)
        }
        b = JaggedBatch.from_dict(entries)
        assert b.stride() == samples
        values, offsets = b.values().tolist(), b.offsets().tolist()
        for f in range(features):
            got = [
                values[offsets[f * samples + s] : offsets[f * samples + s + 1]]
                for s in range(samples)
            ]
            assert got == bags[f]
        same(b, JaggedBatch.from_dict(b.to_dict()))


I = torch.tensor  # noqa: E741


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((["a"], torch.ones(2)), errors.DtypeError, "torch.int64"),
        (
            (["a"], torch.ones(2, dtype=torch.bool)),
            errors.DtypeError,
            "torch.int64",
        ),
        (
            (["a"], torch.ones(2, dtype=torch.uint64)),
            errors.DtypeError,
            "int64",
        ),
        ((["a"], I([[1, 2]])), errors.ShapeError, "values"),
        ((["a"], I([1, 2]), torch.ones(2)), errors.DtypeError, "lengths"),
        ((["a"], I([1, 2]), I([[1, 1]])), errors.ShapeError, "lengths"),
        (
            (["a", "b"], I([1, 2]), I([1, 2, -1, 0])),
            errors.OffsetsError,
            "'b', sample 0: .*-1",
        ),
        (
            (["a"], I([1, 2]), I([1, 2])),
            errors.OffsetsError,
            "add up to 3.* 2 ids",
        ),
        (
            (["a", "b"], I([1, 2]), I([1, 1, 0])),
            errors.OffsetsError,
            "3 bags .* 2 features",
        ),
        (
            (["a", "b"], I([1, 2, 3])),
            errors.OffsetsError,
            "3 ids",
        ),
        (
            (["a"], I([1, 2]), None, I([0, 3, 2])),
            errors.OffsetsError,
            "offsets",
        ),
        (
            (["a"], I([1, 2]), None, I([1, 2])),
            errors.OffsetsError,
            " 1,",
        ),
        (
            (["a"], I([1, 2]), None, I([0, 1])),
            errors.OffsetsError,
            "add up to 1",
        ),
        (
            (["a"], I([1, 2]), None, I([], dtype=torch.int64)),
            errors.OffsetsError,
            "offsets",
        ),
        (
            (["a"], I([1, 2]), I([1, 1]), I([0, 2, 2])),
            errors.OffsetsError,
            "running sums",
        ),
        (([], I([1])), errors.InvalidArgument, "keys"),
        ((["a", "a"], I([1, 2])), errors.InvalidArgument, "'a'"),
        (("ab", I([1, 2])), errors.InvalidArgument, "list of names"),
    ],
)
def test_bad_arguments(arguments: tuple, error: type, text: str) -> None:
    with pytest.raises(error, match=text):
        JaggedBatch(*arguments)


@pytest.mark.parametrize(
    ("features", "error", "text"),
    [
        ({}, errors.InvalidArgument, "JaggedBatch"),
        (
            {"a": I([1]), "b": I([1, 2])},
            errors.ShapeError,
            "'b' has 2 samples.*'a' has 1",
        ),
        ({"a": I([[[1]]])}, errors.ShapeError, "'a' has shape"),
        ({"a": I([1.5])}, errors.DtypeError, "'a'"),
        ({"a": (I([1]),)}, errors.ShapeError, "tuple of 1"),
        # The surplus of one and the lack of the other cancel in the sum.
        (
            {"a": (I([1]), I([2])), "b": (I([1]), I([0]))},
            errors.OffsetsError,
            "'a'.* 2.* 1 ids",
        ),
        ({"a": (I([1]), I([2, -1]))}, errors.OffsetsError, "-1"),
        ({"a": [[1, 2], [3]]}, errors.ShapeError, "'a' .* 1 to 2 .*lengths"),
        ({"a": "one"}, errors.DtypeError, "'a' is a str.*hash"),
        ({"a": ["one"]}, errors.DtypeError, "'a' is a list.*hash"),
        ({"a": None}, errors.DtypeError, "'a' is a NoneType"),
        ({"a": [2**64]}, errors.DtypeError, "'a'.* int64"),
        ({"a": ([1], [1], ["x"])}, errors.DtypeError, "'a': weights"),
    ],
)
def test_bad_dicts(features: dict, error: type, text: str) -> None:
    with pytest.raises(error, match=text):
        JaggedBatch.from_dict(features)


def test_missing_feature_names_those_there_are() -> None:
    with pytest.raises(
        errors.MissingFeature, match=r"'zip'.*\['user', 'item'\]"
    ):
        example()["zip"]
    with pytest.raises(KeyError):
        example()["zip"]
    assert "zip" not in example()
    assert "item" in example()
    assert list(example()) == ["user", "item"]


def test_ticket_is_kept_by_to_and_left_out_by_pickle() -> None:
    b = example()
    assert b.ticket is None
    b.ticket = torch.tensor([5])
    assert b.to("cpu").ticket is b.ticket
    moved = b.to("meta")
    assert moved.ticket is b.ticket
    assert moved.values().device.type == "meta"
    back = pickle.loads(pickle.dumps(b))
    assert back.ticket is None
    assert b.ticket is not None
    same(b, back)
    assert copy.deepcopy(b).ticket is None


def test_batch() -> None:
    b = Batch(torch.zeros(2, 3), example(), torch.ones(2))
    assert len(b) == 2
    assert b.to("cpu").ids is b.ids
    there = Batch(None, example()).to("meta")
    assert there.dense is None
    assert there.label is None
    assert there.ids.values().device.type == "meta"
    assert len(pickle.loads(pickle.dumps(b))) == 2


def test_empty_batch() -> None:
    b = JaggedBatch(["a", "b"], torch.zeros(0, dtype=torch.int64))
    assert b.stride() == 0
    assert b.offset_per_key() == [0, 0, 0]
    b = JaggedBatch.from_dict(
        {"a": (torch.tensor([], dtype=torch.int64),) * 2}
    )
    assert b.stride() == 0
    assert b.length_per_key() == [0]


def whole_batch(b: JaggedBatch) -> list[JaggedBatch]:
    return [example()]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_crosses_from_worker_processes(method: str) -> None:
    loader = torch.utils.data.DataLoader(
        [0, 1],
        batch_size=None,
        num_workers=1,
        collate_fn=whole_batch,
        multiprocessing_context=method,
    )
    for (got,) in loader:
        same(got, example())
