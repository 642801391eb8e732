import datetime
import decimal

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from persia import JaggedBatch, errors, hash_ids
from persia.datasets import value_hash

pandas = pytest.importorskip("pandas")

EMPTY = value_hash("")


def test_containers_agree() -> None:
    values = ["a", "é", "", "a value of more than thirty-two bytes"]
    expected = [value_hash(v) for v in values]
    for held in (
        values,
        tuple(values),
        np.array(values),
        np.array(values, object),
        pa.array(values),
        pa.array(values, pa.large_string()),
        pa.array([v.encode() for v in values]),
        pa.chunked_array([values[:1], values[1:]]),
        pandas.Series(values),
        pandas.Series(values, dtype="category"),
        pa.array(values).dictionary_encode(),
        pa.array(["x", *values]).slice(1),
        (v for v in values),
    ):
        ids = hash_ids(held)
        assert ids.dtype == torch.int64
        assert ids.tolist() == expected
    salted = [value_hash(v, 7) for v in values]
    assert hash_ids(values, 7).tolist() == salted


def test_the_text_of_a_value() -> None:
    day = datetime.date(2026, 1, 2)
    for values, texts in (
        ([7, -3, 2**63 - 1], ["7", "-3", "9223372036854775807"]),
        (np.array([2**64 - 1], np.uint64), ["18446744073709551615"]),
        ([7.0, 0.5, -0.0, float("nan")], ["7", "0.5", "0", ""]),
        (np.array([0.1], np.float32), ["0.1"]),
        ([True, False, None], ["true", "false", ""]),
        ([day], ["2026-01-02"]),
        ([decimal.Decimal("1.50")], ["1.5"]),
        ([7, "7", b"7", 7.0, None], ["7", "7", "7", "7", ""]),
        (torch.tensor([7, 8]), ["7", "8"]),
        (pandas.Series([7, None]), ["7", ""]),
        (pa.array(["a", None]).dictionary_encode(), ["a", ""]),
        ([None, None], ["", ""]),
        ([], []),
    ):
        assert hash_ids(values).tolist() == [value_hash(t) for t in texts]


@settings(max_examples=50)
@given(st.lists(st.one_of(st.none(), st.text(max_size=40))))
def test_any_texts(values: list) -> None:
    expected = [value_hash(v or "") for v in values]
    assert hash_ids(values).tolist() == expected
    assert hash_ids(pandas.Series(values, dtype=object)).tolist() == expected


@settings(max_examples=50)
@given(st.lists(st.integers(-(2**63), 2**63 - 1)))
def test_any_integers(values: list) -> None:
    expected = [value_hash(str(v)) for v in values]
    assert hash_ids(np.array(values, np.int64)).tolist() == expected


def test_what_has_no_text() -> None:
    with pytest.raises(errors.DtypeError):
        hash_ids([[1, 2], [3]])
    with pytest.raises(errors.DtypeError):
        hash_ids([object()])
    with pytest.raises(errors.InvalidArgument):
        hash_ids("text")
    with pytest.raises(errors.InvalidArgument):
        hash_ids(["a"], -1)
    with pytest.raises(errors.ShapeError):
        hash_ids(np.zeros((1, 2, 3)))


def test_jagged_batch_of_a_frame() -> None:
    frame = pandas.DataFrame(
        {"user": [1, 2, None], "tags": [["x", "y"], [], None]}
    )
    batch = JaggedBatch.from_pandas(frame)
    assert batch.keys() == ["user", "tags"]
    assert batch["user"][0].tolist() == hash_ids(["1", "2", None]).tolist()
    assert batch["tags"][0].tolist() == hash_ids(["x", "y"]).tolist()
    assert batch["tags"][1].tolist() == [2, 0, 0]
    table = pa.table({"a": [3, -4], "b": [[1], [2, 3]]})
    batch = JaggedBatch.from_arrow(table, hash=False)
    assert batch.values().tolist() == [3, -4, 1, 2, 3]
    assert JaggedBatch.from_arrow(table, ["b"]).keys() == ["b"]
    with pytest.raises(errors.MissingFeature):
        JaggedBatch.from_arrow(table, ["c"])
    with pytest.raises(errors.DtypeError):
        JaggedBatch.from_pandas(frame, hash=False)
    with pytest.raises(errors.InvalidArgument):
        JaggedBatch.from_arrow(table, "a")
