"""What modules take: kinds of batches, and those that are refused."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import persia
from persia import errors
from tests.modules import KEYS, make_bags
from tests.oracle import random_batch, single_batch


class Duck:
    """A KeyedJaggedTensor's methods, nothing else."""

    def __init__(self, batch: persia.JaggedBatch, dtype: Any = None) -> None:
        self._batch = batch
        self._dtype = dtype or torch.int64

    def keys(self) -> list[str]:
        return self._batch.keys()

    def values(self) -> torch.Tensor:
        return self._batch.values()

    def lengths(self) -> torch.Tensor:
        return self._batch.lengths().to(self._dtype)

    def offsets(self) -> torch.Tensor:
        return self._batch.offsets().to(self._dtype)

    def weights_or_none(self) -> torch.Tensor | None:
        return None


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_a_duck_is_enough(dtype: torch.dtype) -> None:
    bags = make_bags("mean")
    batch = random_batch(np.random.default_rng(10), KEYS, 5)
    want = bags(batch).values()
    assert torch.equal(bags(Duck(batch, dtype)).values(), want)


REAL = """
import torch, torchrec, persia
kjt = torchrec.KeyedJaggedTensor(
    keys=["x", "b", "a"],
    values=torch.tensor([9, 1, 2, 2, 3, 4, 5]),
    lengths=torch.tensor([1, 0, 2, 1, 0, 3]),
)
tables = [
    torchrec.EmbeddingBagConfig(
        name="t", embedding_dim=4, num_embeddings=10,
        feature_names=["a", "b"], pooling=torchrec.PoolingType.MEAN,
    )
]
theirs = torchrec.EmbeddingBagCollection(tables=tables)
store = persia.Store(persia.optim.SGD(lr=0.5))
ours = persia.EmbeddingBagCollection(store=store, tables=tables)
weight = theirs.embedding_bags["t"].weight
store.set_rows("t", torch.arange(10), weight)
got, want = ours(kjt), theirs(kjt)
assert got.keys() == want.keys()
assert got.length_per_key() == want.length_per_key()
torch.testing.assert_close(got.values(), want.values())
torch.testing.assert_close(got["b"], want["b"])
g = torch.randn(2, 8)
got.values().backward(g)
want.values().backward(g)
torch.testing.assert_close(
    store.rows("t", torch.arange(10)), (weight - 0.5 * weight.grad).detach()
)
other = persia.from_torch(theirs, optimizer=persia.optim.SGD(lr=0.5))
torch.testing.assert_close(other(kjt).values(), want.values())
# A data loader looks them up ahead, and their ticket finds what it found.
seen = 0
for batch in persia.DataLoader([kjt] * 3 + [kjt.to("cpu")], ours, 0):
    ours(batch).values().sum().backward()
    seen += 1
stats = store.stats()["lookahead"]
assert (seen, stats["prefetched"], stats["not_prefetched"]) == (4, 4, 0), stats
print("equal")
"""


def torchrec_python() -> str | None:
    """A Python with torchrec: this one, or that of a venv of its own."""
    if importlib.util.find_spec("torchrec"):
        return sys.executable
    root = Path(__file__).parent.parent
    named = os.environ.get("PERSIA_TORCHREC_PYTHON")
    python = Path(named) if named else root / ".venv-peers/bin/python"
    if not python.exists():
        return None
    found = subprocess.run(
        [python, "-c", "import torchrec"], capture_output=True, check=False
    )
    return str(python) if found.returncode == 0 else None


def test_real_keyed_jagged_tensor() -> None:
    python = torchrec_python()
    if python is None:
        pytest.skip("no Python with torchrec (make bench PEERS=1 makes one)")
    done = subprocess.run(
        [python, "-c", REAL],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parent.parent,
    )
    assert done.stdout.strip().endswith("equal"), done.stderr[-2000:]


def test_dicts_of_tensors() -> None:
    bags = make_bags("sum")
    bags.padding_value = 0
    ids = {
        "a": torch.tensor([1, 2]),
        "b": torch.tensor([[3, 0], [4, 5]]),
        "c": torch.tensor([6, 7]),
    }
    out = bags(ids)
    rows = bags.store.rows("two", torch.tensor([3, 4, 5]))
    torch.testing.assert_close(
        out["b"], torch.stack([rows[0], rows[1] + rows[2]])
    )


def test_keys_in_another_order_and_extra_keys() -> None:
    bags = make_bags("sum")
    batch = single_batch(
        np.random.default_rng(12), ["spare", "b", "c", "a"], 4
    )
    out = bags(batch)
    for key, table in (("a", "two"), ("b", "two"), ("c", "one")):
        rows = bags.store.rows(table, batch[key][0])
        assert torch.equal(out[key], rows)


def test_strided_ids_and_offsets() -> None:
    bags = make_bags("sum")
    batch = random_batch(np.random.default_rng(16), KEYS, 5)
    strided = persia.JaggedBatch(
        KEYS,
        torch.stack([batch.values(), batch.values()], 1)[:, 0],
        offsets=torch.stack([batch.offsets(), batch.offsets()], 1)[:, 1],
    )
    want = bags(batch).values()
    assert torch.equal(bags(strided).values(), want)
    bags(strided).values().sum().backward()


def test_where_the_output_goes() -> None:
    bags = make_bags()
    batch = single_batch(np.random.default_rng(17), KEYS, 3)
    assert bags.device.type == "cpu"
    with torch.no_grad():
        torch.nn.Sequential(bags).to("meta")
        assert bags(batch).values().device.type == "meta"
        other = make_bags()
        other.to("cpu", torch.float64)
        assert other(batch).values().device.type == "cpu"
        assert other(batch).values().dtype == torch.float64


def test_missing_feature_is_named() -> None:
    bags = make_bags()
    with pytest.raises(errors.MissingFeature, match=r"'b'.*'two'"):
        bags(single_batch(np.random.default_rng(0), ["a", "c"], 2))


def bad_offsets(offsets: list[int], n: int = 8) -> SimpleNamespace:
    return SimpleNamespace(
        keys=lambda: ["a", "b", "c"],
        values=lambda: torch.arange(n),
        offsets=lambda: torch.tensor(offsets, dtype=torch.int64),
        weights_or_none=lambda: None,
    )


@pytest.mark.parametrize(
    ("offsets", "match"),
    [
        ([0, 1, 2, 3, 4, 5, 9], "9"),
        ([0, 1, 2, 3, 4, 5, 7], "7"),
        ([-1, 1, 2, 3, 4, 5, 8], "-1"),
        ([0, 3, 2, 3, 4, 5, 8], "c|a|b"),
        ([0, 1, 2, 3, -4, 5, 8], "-4"),
        ([0, 1, 2, 30, 4, 5, 8], "30"),
        ([0, 1, 2, 3, 4, 5], "offsets"),
        ([], "offsets"),
    ],
)
def test_bad_offsets(offsets: list[int], match: str) -> None:
    bags = make_bags()
    with pytest.raises(errors.OffsetsError, match=match):
        bags(bad_offsets(offsets))
    assert bags.store.stats()["tables"]["one"]["pulled"] == 0


@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize(
    ("offsets", "weights", "error"),
    [
        ([0, -1, 1, 2], (2,), errors.OffsetsError),
        ([0, 5000, 1, 2], (2,), errors.OffsetsError),
        ([0, 1, 1, 3], (2,), errors.OffsetsError),
        ([0, 1, 1, 100_000], (2,), errors.OffsetsError),
        ([1, 1, 1, 2], (2,), errors.OffsetsError),
        ([0, 1, 1, 1], (2,), errors.OffsetsError),
        ([0, 1, 1, 2], (1,), errors.ShapeError),
        ([0, 1, 1, 2], (3,), errors.ShapeError),
        ([0, 1, 1, 2], (2, 1), errors.ShapeError),
        ([0, 1, 1, 2], (2, 2), errors.ShapeError),
        ([0, 1, 1, 2], (), errors.ShapeError),
    ],
)
def test_bad_batches_with_weights(
    offsets: list[int],
    weights: tuple[int, ...],
    error: type[Exception],
    needs_grad: bool,
) -> None:
    bags = make_bags(is_weighted=True)
    batch = bad_offsets(offsets, n=2)
    weight = torch.ones(weights, requires_grad=needs_grad)
    batch.weights_or_none = lambda: weight
    with pytest.raises(error):
        bags(batch)
    assert weight.grad is None
    stats = bags.store.stats()
    assert stats["held"] == stats["tables"]["one"]["rows"] == 0


def test_offsets_changed_in_place_with_weights() -> None:
    bags = make_bags(is_weighted=True)
    weights = torch.ones(8, requires_grad=True)
    # No table has the feature "spare", so no lookup looks at its offsets.
    for at, feature in ((1, "a"), (3, "spare")):
        batch = persia.JaggedBatch(
            ["a", "spare", "b", "c"],
            torch.arange(8),
            lengths=torch.ones(8).long(),
            weights=weights,
        )
        batch.offsets()[at] = -100
        with pytest.raises(errors.OffsetsError, match=f"{feature}: .*-100"):
            bags(batch)


@pytest.mark.parametrize("kind", [torch.nn.Embedding, torch.nn.EmbeddingBag])
def test_wrong_ids_of_converted_modules(kind: Any) -> None:
    """Those that torch's own refuses; any integers are ids."""
    theirs = kind(6, 4)
    model = torch.nn.ModuleDict({"t": kind(6, 4, _weight=theirs.weight.data)})
    persia.convert(model, optimizer=persia.optim.SGD(lr=1.0))
    ids = torch.tensor([[1, 2], [0, 5]])
    for dtype in (torch.float32, torch.bool, torch.complex64):
        with pytest.raises(RuntimeError):
            theirs(ids.to(dtype))
        with pytest.raises(errors.DtypeError):
            model["t"](ids.to(dtype))
    with pytest.raises(errors.DtypeError):
        model["t"](None)
    for dtype in (torch.int32, torch.int8, torch.uint8):
        assert torch.equal(model["t"](ids.to(dtype)), theirs(ids))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int16, torch.bool])
def test_wrong_dtype_of_ids(dtype: torch.dtype) -> None:
    bags = make_bags()
    batch = bad_offsets([0, 1, 2, 3, 4, 5, 8])
    batch.values = lambda: torch.arange(8).to(dtype)
    with pytest.raises(errors.DtypeError, match=str(dtype)):
        bags(batch)


def test_wrong_rank_and_wrong_type() -> None:
    bags = make_bags()
    batch = bad_offsets([0, 1, 2, 3, 4, 5, 8])
    batch.values = lambda: torch.arange(8).reshape(2, 4)
    with pytest.raises(errors.ShapeError, match=r"\(2, 4\)"):
        bags(batch)
    with pytest.raises(errors.InvalidArgument, match="Tensor"):
        bags(torch.arange(6))
    batch = bad_offsets([0, 1, 2, 3, 4, 5, 8])
    batch.variable_stride_per_key = lambda: True
    with pytest.raises(errors.ShapeError, match="variable stride"):
        bags(batch)


@pytest.mark.parametrize(
    ("method", "value", "match"),
    [
        ("keys", [], "no keys"),
        ("offsets", None, "offsets .*NoneType"),
        ("offsets", [0, 2], "offsets .*list"),
        ("values", [1, 2], "values .*list"),
        ("weights_or_none", [1.0], "weights .*list"),
    ],
)
def test_a_duck_without_tensors(method: str, value: Any, match: str) -> None:
    batch = bad_offsets([0, 1, 2, 3, 4, 5, 8])
    setattr(batch, method, lambda: value)
    with pytest.raises(errors.InvalidArgument, match=match):
        make_bags()(batch)
