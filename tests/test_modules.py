"""Lookups and updates against torch's EmbeddingBag and optimizers."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import persia
from persia import errors
from tests.oracle import VOCABULARY, TorchTables, random_batch, single_batch

KEYS = ["a", "b", "c", "spare"]


def make_bags(
    pooling: str = "sum",
    optimizer: Any = None,
    dim: int = 8,
    is_weighted: bool = False,
    **store: Any,
) -> persia.EmbeddingBagCollection:
    s = persia.Store(optimizer=optimizer, **store)
    return persia.EmbeddingBagCollection(
        store=s,
        is_weighted=is_weighted,
        tables=[
            persia.EmbeddingBagConfig(
                "one",
                embedding_dim=dim,
                feature_names=["c"],
                pooling=pooling,
                init=0.5,
            ),
            persia.EmbeddingBagConfig(
                "two",
                embedding_dim=2 * dim,
                feature_names=["a", "b"],
                pooling=pooling,
                init=0.5,
            ),
        ],
    )


OPTIMIZERS = {
    "sgd": (
        lambda: persia.optim.SGD(lr=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1),
    ),
    "adagrad": (
        lambda: persia.optim.Adagrad(lr=0.1, initial_accumulator_value=0.2),
        lambda p: torch.optim.Adagrad(
            p, lr=0.1, initial_accumulator_value=0.2
        ),
    ),
}
# These move rows without a gradient too: equal where every row is touched.
DENSE_OPTIMIZERS = {
    "momentum": (
        lambda: persia.optim.SGD(lr=0.1, momentum=0.9, weight_decay=0.01),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    ),
    "adagrad_decay": (
        lambda: persia.optim.Adagrad(lr=0.1, weight_decay=0.05),
        lambda p: torch.optim.Adagrad(p, lr=0.1, weight_decay=0.05),
    ),
    "adam": (
        lambda: persia.optim.Adam(lr=0.02, weight_decay=0.01),
        lambda p: torch.optim.Adam(p, lr=0.02, weight_decay=0.01),
    ),
    "adamw": (
        lambda: persia.optim.AdamW(lr=0.02, betas=(0.8, 0.99)),
        lambda p: torch.optim.AdamW(p, lr=0.02, betas=(0.8, 0.99)),
    ),
}


def compare(
    bags: persia.EmbeddingBagCollection,
    theirs: TorchTables,
    torch_optimizer: Any,
    batches: list[persia.JaggedBatch],
) -> None:
    """Trains both on the same batches and gradients; compares all rows."""
    generator = torch.Generator().manual_seed(1)
    for ids in batches:
        got, want = bags(ids).values(), theirs(ids)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        g = torch.randn(got.shape, generator=generator)
        got.backward(g)
        torch_optimizer.zero_grad()
        want.backward(g)
        torch_optimizer.step()
    for name, weight in theirs.weights.items():
        rows = bags.store.rows(name, torch.arange(VOCABULARY))
        torch.testing.assert_close(rows, weight.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("pooling", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize("name", OPTIMIZERS)
@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    samples=st.integers(0, 9),
    weighted=st.booleans(),
    single=st.booleans(),
)
def test_random_batches_train_as_torch(
    pooling: str,
    name: str,
    seed: int,
    samples: int,
    weighted: bool,
    single: bool,
) -> None:
    ours, torchs = OPTIMIZERS[name]
    bags = make_bags(
        pooling, ours(), is_weighted=weighted and not single, seed=seed
    )
    theirs = TorchTables(bags, VOCABULARY)
    rng = np.random.default_rng(seed)
    batches = [
        single_batch(rng, KEYS, samples)
        if single
        else random_batch(rng, KEYS, samples, weighted=weighted)
        for _ in range(3)
    ]
    compare(bags, theirs, torchs(theirs.parameters()), batches)


@pytest.mark.parametrize("name", DENSE_OPTIMIZERS)
def test_every_row_touched_equals_torch(name: str) -> None:
    ours, torchs = DENSE_OPTIMIZERS[name]
    bags = make_bags("sum", ours())
    theirs = TorchTables(bags, VOCABULARY)
    rng = np.random.default_rng(3)
    batches = []
    for _ in range(5):
        every = [rng.permutation(VOCABULARY) for _ in KEYS]
        batches.append(
            persia.JaggedBatch(KEYS, torch.from_numpy(np.concatenate(every)))
        )
    compare(bags, theirs, torchs(theirs.parameters()), batches)


def test_lazy_adam_is_sparse_adam() -> None:
    # With a tiny eps: SparseAdam adds it before the bias correction.
    bags = make_bags("sum", persia.optim.Adam(lr=0.02, eps=1e-15))
    theirs = torch.nn.EmbeddingBag(VOCABULARY, 8, mode="sum", sparse=True)
    ids = torch.arange(VOCABULARY)
    theirs.weight.data.copy_(bags.store.rows("one", ids))
    optimizer = torch.optim.SparseAdam(theirs.parameters(), 0.02, eps=1e-15)
    rng = np.random.default_rng(4)
    for _ in range(6):
        batch = random_batch(rng, KEYS, 8)
        values, lengths = batch["c"]
        offsets = torch.cumsum(lengths, 0) - lengths
        got, want = bags(batch)["c"], theirs(values, offsets)
        g = torch.randn(got.shape)
        got.backward(g)
        optimizer.zero_grad()
        want.backward(g)
        optimizer.step()
    torch.testing.assert_close(
        bags.store.rows("one", ids),
        theirs.weight.detach(),
        rtol=1e-4,
        atol=1e-5,
    )


def test_row_wise_adagrad_formula() -> None:
    lr, eps = 0.1, 1e-8
    bags = make_bags("sum", persia.optim.RowWiseAdagrad(lr=lr, eps=eps))
    ids = torch.arange(VOCABULARY)
    w = bags.store.rows("one", ids).double().numpy()
    h = np.zeros(VOCABULARY)
    rng = np.random.default_rng(5)
    for _ in range(4):
        batch = single_batch(rng, KEYS, 16)
        g = torch.randn(16, 8)
        bags(batch)["c"].backward(g)
        summed = np.zeros_like(w)
        np.add.at(summed, batch["c"][0].numpy(), g.double().numpy())
        touched = np.unique(batch["c"][0].numpy())
        h[touched] += (summed[touched] ** 2).mean(1)
        step = lr / (np.sqrt(h[touched]) + eps)
        w[touched] -= step[:, None] * summed[touched]
    np.testing.assert_allclose(
        bags.store.rows("one", ids).numpy(), w, rtol=1e-5, atol=1e-6
    )


def summed_gradients(
    rng: np.random.Generator,
) -> tuple[persia.JaggedBatch, torch.Tensor, np.ndarray, np.ndarray]:
    """A batch, gradients of its outputs, the touched rows and their sums."""
    batch = single_batch(rng, KEYS, 16)
    g = torch.from_numpy(rng.normal(size=(16, 8)).astype(np.float32))
    ids = batch["c"][0].numpy()
    sums = np.zeros((VOCABULARY, 8))
    np.add.at(sums, ids, g.double().numpy())
    touched = np.unique(ids)
    return batch, g, touched, sums[touched]


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_row_wise_adam_is_partial_rowwise_adam(decay: float) -> None:
    """The formula of fbgemm: v is one number a row, the decay decoupled."""
    lr, b1, b2, eps = 0.1, 0.8, 0.9, 1e-6
    optimizer = persia.optim.RowWiseAdam(
        lr=lr, betas=(b1, b2), eps=eps, weight_decay=decay
    )
    bags = make_bags("sum", optimizer)
    ids = torch.arange(VOCABULARY)
    w = bags.store.rows("one", ids).double().numpy()
    m, v = np.zeros_like(w), np.zeros(VOCABULARY)
    rng = np.random.default_rng(5)
    for t in range(1, 6):
        batch, g, on, sums = summed_gradients(rng)
        bags(batch)["c"].backward(g)
        m[on] = b1 * m[on] + (1 - b1) * sums
        v[on] = b2 * v[on] + (1 - b2) * (sums**2).mean(1)
        root = np.sqrt(v[on] / (1 - b2**t)) + eps
        w[on] -= lr * (m[on] / (1 - b1**t) / root[:, None] + decay * w[on])
    np.testing.assert_allclose(
        bags.store.rows("one", ids).numpy(), w, rtol=1e-5, atol=1e-6
    )


def test_ftrl_is_that_of_the_paper() -> None:
    """Algorithm 1 of McMahan et al., in float32."""
    f = np.float32
    lr, beta, l1, l2 = f(0.3), f(0.7), f(0.2), f(0.1)
    optimizer = persia.optim.FTRL(
        lr=float(lr), beta=float(beta), l1=float(l1), l2=float(l2)
    )
    bags = make_bags("sum", optimizer)
    ids = torch.arange(VOCABULARY)
    w = bags.store.rows("one", ids).numpy()
    z, n = np.zeros_like(w), np.zeros_like(w)
    rng = np.random.default_rng(5)
    for _ in range(5):
        batch, grads, on, sums = summed_gradients(rng)
        bags(batch)["c"].backward(grads)
        g = sums.astype(f)
        sigma = (np.sqrt(n[on] + g * g) - np.sqrt(n[on])) / lr
        z[on] += g - sigma * w[on]
        n[on] += g * g
        shrunk = -(z[on] - np.sign(z[on]) * l1)
        shrunk /= (beta + np.sqrt(n[on])) / lr + l2
        w[on] = np.where(np.abs(z[on]) <= l1, f(0), shrunk)
    got = bags.store.rows("one", ids).numpy()
    np.testing.assert_allclose(got, w, rtol=1e-4, atol=1e-6)
    assert 0 < (got == 0).sum() < got.size / 2


def test_ftrl_by_hand() -> None:
    store = persia.Store(persia.optim.FTRL(lr=0.5, l1=0.1, l2=0.2))
    bags = persia.EmbeddingBagCollection(
        [persia.EmbeddingBagConfig("t", 1, init=0.0)], store=store
    )
    weights = []
    for g in (1.0, -0.5, -0.55):
        out = bags(persia.JaggedBatch(["t"], torch.tensor([7]))).values()
        out.backward(torch.tensor([[g]]))
        weights.append(store.rows("t", [7]).item())
    # n = 1, z = 1: -0.9 / (2 / 0.5 + 0.2)
    # n = 1.25, z = 1 - 0.5 + 0.2360680 * 0.2142857 = 0.5505860:
    #   -0.4505860 / (2.1180340 / 0.5 + 0.2)
    # n = 1.5525, z = 0.5505860 - 0.55 + 0.2559190 * 0.1015732 = 0.0265805
    assert weights == pytest.approx([-0.2142857, -0.1015732, 0.0], rel=1e-5)


def test_ftrl_follows_a_schedule() -> None:
    """Without L1 and L2 it steps as Adagrad with beta for eps does."""
    bags = make_bags("sum", persia.optim.FTRL(lr=1.0, beta=0.5))
    one = persia.JaggedBatch(KEYS, torch.arange(len(KEYS)))
    group = bags.store.optimizer.param_groups[0]
    squares, w = 0.0, None
    for lr in (1.0, 0.1, 0.0, 0.2):
        group["lr"] = lr
        bags(one)["c"].sum().backward()
        squares += 1.0
        got = bags.store.rows("one", [KEYS.index("c")])
        if w is not None:
            w = w - lr / (0.5 + squares**0.5)
            torch.testing.assert_close(got, w)
        w = got


@pytest.mark.parametrize("name", ["adagrad", "adam", "rowwise"])
def test_same_bits_for_any_number_of_threads(name: str) -> None:
    def train(threads: int) -> list[torch.Tensor]:
        optimizer = {
            "adagrad": persia.optim.Adagrad,
            "adam": persia.optim.Adam,
            "rowwise": persia.optim.RowWiseAdagrad,
        }[name](lr=0.1)
        bags = make_bags("mean", optimizer, threads=threads)
        rng = np.random.default_rng(6)
        generator = torch.Generator().manual_seed(6)
        outs = []
        for _ in range(4):
            batch = random_batch(rng, KEYS, 1500, vocabulary=5000)
            out = bags(batch).values()
            out.backward(torch.randn(out.shape, generator=generator))
            outs.append(out.detach())
        for table in ("one", "two"):
            outs.append(bags.store.rows(table, torch.arange(5000)))
        return outs

    one, two, five = train(1), train(2), train(5)
    for a, b, c in zip(one, two, five, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)


def test_sequences_are_rows() -> None:
    store = persia.Store(persia.optim.SGD(lr=0.5))
    seqs = persia.EmbeddingCollection(
        store=store,
        tables=[
            persia.EmbeddingConfig("x", 4, feature_names=["c", "a"]),
            persia.EmbeddingConfig("y", 4, feature_names=["b"]),
        ],
    )
    batch = random_batch(np.random.default_rng(7), KEYS, 5)
    before = store.rows("x", torch.arange(VOCABULARY))
    out = seqs(batch)
    assert list(out) == ["c", "a", "b"]
    for key in out:
        values, lengths = batch[key]
        table = "y" if key == "b" else "x"
        assert torch.equal(out[key].values(), store.rows(table, values))
        assert torch.equal(out[key].lengths(), lengths)
    padded = out["a"].to_padded_dense(3)
    assert padded.shape == (5, 3, 4)
    values, lengths = batch["a"]
    parts = torch.split(out["a"].values(), lengths.tolist())
    for i, part in enumerate(parts):
        assert torch.equal(padded[i, : len(part)], part[:3])
        assert not padded[i, len(part) :].any()
    (out["c"].values().sum() + 2 * out["a"].values().sum()).backward()
    count = torch.bincount(batch["c"][0], minlength=VOCABULARY)
    count = count + 2 * torch.bincount(batch["a"][0], minlength=VOCABULARY)
    want = before - 0.5 * count[:, None]
    torch.testing.assert_close(store.rows("x", torch.arange(VOCABULARY)), want)
    # An id whose gradient is zero occurred all the same: it has a row now.
    values = batch["b"][0]
    assert store.stats()["tables"]["y"]["rows"] == len(values.unique())
    assert torch.equal(store.rows("y", values), out["b"].values())


@pytest.mark.parametrize("pooling", ["sum", "mean", "sqrtn"])
def test_weights_get_a_gradient(pooling: str) -> None:
    bags = make_bags(pooling, persia.optim.SGD(lr=0.1), is_weighted=True)
    theirs = TorchTables(bags, VOCABULARY)
    batch = random_batch(np.random.default_rng(8), KEYS, 6, weighted=True)
    plain = bags(batch).values()
    mine = batch.weights().clone().requires_grad_()
    other = batch.weights().clone().requires_grad_()
    batch._weights = mine
    got = bags(batch).values()
    torch.testing.assert_close(got, plain)
    batch._weights = other
    want = theirs(batch)
    g = torch.randn(got.shape)
    got.backward(g)
    want.backward(g)
    torch.testing.assert_close(mine.grad, other.grad, rtol=1e-5, atol=1e-5)
    for name, weight in theirs.weights.items():
        assert weight.grad is not None
        torch.testing.assert_close(
            bags.store.rows(name, torch.arange(VOCABULARY)),
            (weight - 0.1 * weight.grad).detach(),
            rtol=1e-5,
            atol=1e-5,
        )


def test_output_acts_like_a_keyed_tensor() -> None:
    bags = make_bags()
    out = bags(single_batch(np.random.default_rng(9), KEYS, 3))
    assert out.keys() == ["c", "a", "b"]
    assert out.length_per_key() == [8, 16, 16]
    assert out.offset_per_key() == [0, 8, 24, 40]
    assert torch.equal(out["b"], out.values()[:, 24:])
    parts = out.to_dict()
    assert torch.equal(torch.cat(list(parts.values()), 1), out.values())
    with pytest.raises(errors.MissingFeature, match="spare"):
        out["spare"]


def test_a_feature_of_two_tables_is_named_by_table() -> None:
    bags = persia.EmbeddingBagCollection(
        tables=[
            persia.EmbeddingBagConfig("x", 4, feature_names=["f"]),
            persia.EmbeddingBagConfig("y", 2, feature_names=["f", "g"]),
        ],
        optimizer=persia.optim.SGD(lr=1.0),
        is_weighted=True,
    )
    weights = torch.ones(6)
    batch = persia.JaggedBatch(
        ["g", "f"], torch.tensor([1, 2, 3, 4, 5, 6]), weights=weights
    )
    out = bags(batch)
    assert out.keys() == ["f@x", "f@y", "g"]
    want = bags.store.rows("y", torch.tensor([4, 5, 6]))
    assert torch.equal(out["f@y"], want)
    weights.requires_grad_()
    torch.testing.assert_close(bags(batch).values(), out.values())
    bags(batch).values().sum().backward()
    assert bags.store.stats()["tables"]["x"]["rows"] == 3
    assert bags.store.stats()["tables"]["y"]["rows"] == 6


def test_forwards_of_two_threads_while_plans_are_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bags = persia.EmbeddingBagCollection(
        tables=[
            persia.EmbeddingBagConfig("x", 4, feature_names=["f"]),
            persia.EmbeddingBagConfig("y", 2, feature_names=["f"]),
        ],
        optimizer=persia.optim.SGD(lr=1.0),
        is_weighted=True,
    )
    weights = torch.ones(3, requires_grad=True)
    batch = persia.JaggedBatch(["f"], torch.tensor([1, 2, 3]), weights=weights)
    plan, widths = bags.store._engine.plan, []

    def forward() -> None:
        widths.append(bags(batch).values().shape[1])

    def slow(*arguments: Any) -> int:
        monkeypatch.setattr(bags.store._engine, "plan", plan)
        other = threading.Thread(target=forward)
        other.start()
        other.join()
        return plan(*arguments)

    monkeypatch.setattr(bags.store._engine, "plan", slow)
    forward()
    assert widths == [6, 6]


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
stats = store.stats()["loader"]
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
    bags._padding_value = 0
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
        assert other(batch).values().dtype == torch.float32


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


def test_empty_batch_and_empty_bags() -> None:
    bags = make_bags("mean")
    empty = persia.JaggedBatch(["a", "b", "c"], torch.zeros(0).long())
    out = bags(empty).values()
    assert out.shape == (0, 40)
    out.sum().backward()
    assert bags.store.stats()["tables"]["one"]["rows"] == 0
    none = persia.JaggedBatch(
        ["a", "b", "c"], torch.zeros(0).long(), lengths=torch.zeros(6).long()
    )
    out = bags(none).values()
    assert torch.equal(out, torch.zeros(2, 40))
    out.sum().backward()
    assert bags.store.stats()["tables"]["one"]["rows"] == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_gradients_raise(bad: float) -> None:
    bags = make_bags("sum", persia.optim.Adagrad(lr=0.1))
    batch = single_batch(np.random.default_rng(13), KEYS, 4)
    bags(batch).values().sum().backward()
    ids = torch.arange(VOCABULARY)
    before = [bags.store.rows(t, ids) for t in ("one", "two")]
    out = bags(batch).values()
    g = torch.ones_like(out)
    g[1, 30] = bad
    with pytest.raises(errors.NonFiniteGradient, match="two"):
        out.backward(g)
    after = [bags.store.rows(t, ids) for t in ("one", "two")]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert bags.store.stats()["updates_failed"] == 1
    bags(batch).values().sum().backward()  # and the store goes on
    assert bags.store.updates == 2


def test_non_finite_gradients_skip() -> None:
    bags = make_bags("sum", persia.optim.SGD(lr=1.0), nonfinite="skip")
    batch = persia.JaggedBatch(
        ["a", "b", "c"], torch.tensor([1, 2, 3, 4, 5, 6])
    )
    before = bags.store.rows("one", torch.tensor([5, 6]))
    out = bags(batch).values()
    g = torch.ones_like(out)
    g[0, 3] = float("nan")
    out.backward(g)
    after = bags.store.rows("one", torch.tensor([5, 6]))
    assert torch.equal(after[0], before[0])
    torch.testing.assert_close(after[1], before[1] - 1)
    assert bags.store.stats()["tables"]["one"]["nonfinite"] == 1


def test_capacity_raises_or_evicts() -> None:
    def one(eviction: str | None) -> persia.EmbeddingBagCollection:
        return persia.EmbeddingBagCollection(
            optimizer=persia.optim.SGD(lr=1.0),
            tables=[
                persia.EmbeddingBagConfig(
                    "t",
                    4,
                    feature_names=["f"],
                    capacity=100,
                    eviction=eviction,
                )
            ],
        )

    def train(bags: persia.EmbeddingBagCollection, first: int) -> None:
        ids = torch.arange(first, first + 60)
        bags(persia.JaggedBatch(["f"], ids)).values().sum().backward()

    bags = one(None)
    train(bags, 0)
    before = bags.store.rows("t", torch.arange(60))
    with pytest.raises(errors.CapacityReached, match="t"):
        train(bags, 50)
    assert torch.equal(before, bags.store.rows("t", torch.arange(60)))
    bags = one("lru")
    train(bags, 0)
    train(bags, 1000)
    stats = bags.store.stats()["tables"]["t"]
    assert stats["rows"] <= 100
    assert stats["evicted"] >= 20
    assert bool(bags.store.contains("t", torch.arange(1000, 1060)).all())


def test_untrainable_tables_stay() -> None:
    store = persia.Store(persia.optim.SGD(lr=1.0))
    bags = persia.EmbeddingBagCollection(
        store=store,
        tables=[
            persia.EmbeddingBagConfig(
                "still", 4, feature_names=["a"], trainable=False
            ),
            persia.EmbeddingBagConfig("moves", 4, feature_names=["b"]),
        ],
    )
    batch = single_batch(np.random.default_rng(14), ["a", "b"], 5)
    bags(batch).values().sum().backward()
    tables = store.stats()["tables"]
    assert tables["still"]["rows"] == 0
    assert tables["moves"]["rows"] > 0
    only = persia.EmbeddingBagCollection(
        store=store,
        tables=[
            persia.EmbeddingBagConfig(
                "still", 4, feature_names=["a"], trainable=False
            )
        ],
    )
    assert not only(batch).values().requires_grad


def test_no_grad_makes_no_ticket() -> None:
    bags = make_bags()
    batch = single_batch(np.random.default_rng(15), KEYS, 2)
    with torch.no_grad():
        assert not bags(batch).values().requires_grad
    with torch.inference_mode():
        bags(batch)
    bags.eval()
    assert bags(batch).values().requires_grad  # eval() alone changes nothing


def test_output_dtype() -> None:
    bags = persia.EmbeddingBagCollection(
        tables=[persia.EmbeddingBagConfig("t", 4, feature_names=["a"])],
        optimizer=persia.optim.SGD(lr=1.0),
        output_dtype=torch.bfloat16,
    )
    out = bags({"a": torch.tensor([1, 2])}).values()
    assert out.dtype == torch.bfloat16
    before = bags.store.rows("t", [1, 2])
    out.sum().backward()
    torch.testing.assert_close(bags.store.rows("t", [1, 2]), before - 1)
