"""Updates against torch's optimizers, and formulas by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import persia
from tests.modules import KEYS, make_bags
from tests.oracle import VOCABULARY, TorchTables, random_batch, single_batch

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
@settings(max_examples=12)
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
