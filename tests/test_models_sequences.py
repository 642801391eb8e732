"""What retrieval models are made of, against plain loops."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import persia
from persia import JaggedBatch, errors, models
from persia.models.sequences import pad

LENGTHS = torch.tensor([3, 0, 5, 1])


def items(**options: Any) -> persia.EmbeddingCollection:
    table = persia.EmbeddingConfig("item", 8, ["history"], init=0.5, **options)
    return persia.EmbeddingCollection(tables=[table])


def histories(lengths: torch.Tensor, seed: int = 1) -> JaggedBatch:
    g = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 20, (int(lengths.sum()),), generator=g)
    return JaggedBatch(["history"], values << 40, lengths)


def softmax_by_loop(
    queries: np.ndarray, items: np.ndarray, ids: list[int], log_q: np.ndarray
) -> float:
    first = {i: ids.index(i) for i in ids}
    losses = []
    for i, query in enumerate(queries):
        scores = {k: query @ items[j] - log_q[j] for k, j in first.items()}
        whole = math.log(sum(math.exp(s) for s in scores.values()))
        losses.append(whole - scores[ids[i]])
    return float(np.mean(losses))


def test_in_batch_softmax_is_its_formula() -> None:
    rng = np.random.default_rng(1)
    queries, rows = rng.normal(size=(6, 4)), rng.normal(size=(3, 4))
    which = [2, 0, 2, 1, 0, 2]
    ids = [[5, -7, 2**60][i] for i in which]
    log_q = rng.normal(size=3)[which]
    args = [torch.from_numpy(a) for a in (queries, rows[which])]
    loss = models.in_batch_softmax(*args, torch.tensor(ids))
    right = softmax_by_loop(queries, rows[which], ids, np.zeros(6))
    assert float(loss) == pytest.approx(right)
    loss = models.in_batch_softmax(
        *args, torch.tensor(ids), torch.from_numpy(log_q), temperature=0.5
    )
    right = softmax_by_loop(queries / 0.5, rows[which], ids, log_q)
    assert float(loss) == pytest.approx(right)


def test_next_item_loss_is_its_formula() -> None:
    rng = np.random.default_rng(2)
    lengths, ids = [3, 0, 4, 1], [1, 2, 3, 3, 1, 2, 4, 9]
    states, rows = rng.normal(size=(8, 4)), rng.normal(size=(10, 4))[ids]
    log_q = rng.normal(size=10)[ids]
    now, then = [0, 1, 3, 4, 5], [1, 2, 4, 5, 6]
    right = softmax_by_loop(
        states[now], rows[then], [ids[i] for i in then], log_q[then]
    )
    loss = models.next_item_loss(
        torch.from_numpy(states),
        torch.from_numpy(rows),
        torch.tensor(ids),
        torch.tensor(lengths),
        torch.from_numpy(log_q),
    )
    assert float(loss) == pytest.approx(right)


def test_frequencies_follow_those_of_the_batches() -> None:
    rng = np.random.default_rng(3)
    share = np.array([1.0, 0.5, 0.1, 0.02])
    ids = torch.tensor([7, -(2**62), 2**61 + 3, 12])
    found = models.Frequencies(places=1009, rate=0.02)
    for _ in range(4000):
        found(ids[torch.from_numpy(rng.random(4) < share)].repeat(2))
    found.eval()
    np.testing.assert_allclose(found(ids).exp(), share, rtol=0.4)
    # An id that never came is as rare as once.
    assert float(found(torch.tensor([5])).exp()) == pytest.approx(1 / 4000)


@settings(max_examples=60)
@given(st.lists(st.integers(0, 50), max_size=30), st.integers(1, 5))
def test_shares_of_ranks_have_about_as_many_ids(
    lengths: list[int], ranks: int
) -> None:
    shares = models.balance_by_tokens(torch.tensor(lengths).long(), ranks)
    assert len(shares) == ranks
    assert sorted(torch.cat(shares).tolist()) == list(range(len(lengths)))
    loads = [sum(lengths[i] for i in s.tolist()) for s in shares]
    assert max(loads) - min(loads) <= max(lengths, default=0)


def test_shares_together_have_the_gradient_of_the_batch() -> None:
    lengths = torch.tensor([9, 1, 4, 4, 0, 7, 2])
    ids = histories(lengths)
    torch.manual_seed(1)
    model = models.HSTU(items(trainable=False), dropout=0.0)
    weight = model.blocks[0].f1.weight
    model(ids)[0].square().sum().backward()
    whole, weight.grad = weight.grad, None
    for share in models.balance_by_tokens(lengths, 2):
        part = models.take(ids, share)
        assert int(part.lengths().sum()) in (13, 14)
        model(part)[0].square().sum().backward()
    torch.testing.assert_close(weight.grad, whole)


def test_take_keeps_features_and_weights() -> None:
    lengths = torch.tensor([2, 0, 1, 1, 3, 0])
    values = torch.arange(7) << 33
    ids = JaggedBatch(["a", "b"], values, lengths, weights=torch.arange(7.0))
    part = models.take(ids, torch.tensor([2, 0]))
    assert part.keys() == ["a", "b"]
    assert part.lengths().tolist() == [1, 2, 0, 1]
    assert (part.values() >> 33).tolist() == [2, 0, 1, 3]
    assert part.weights().tolist() == [2.0, 0.0, 1.0, 3.0]
    single = JaggedBatch(["a", "b"], torch.arange(6))
    part = models.take(single, torch.tensor([1]))
    assert part.values().tolist() == [1, 4]


def test_nearest_items_are_those_of_a_sort() -> None:
    rng = np.random.default_rng(4)
    rows, queries = rng.normal(size=(40, 6)), rng.normal(size=(11, 6))
    ids = rng.permutation(40) - 2**62
    nearest = models.NearestItems(
        torch.from_numpy(ids), torch.from_numpy(rows), block=4
    )
    found, scores = nearest.search(torch.from_numpy(queries), 5)
    order = np.argsort(-queries @ rows.T, 1)[:, :5]
    np.testing.assert_array_equal(found, ids[order])
    np.testing.assert_allclose(
        scores, np.take_along_axis(queries @ rows.T, order, 1)
    )
    for k in (0, 41):
        with pytest.raises(errors.InvalidArgument, match="40"):
            nearest.search(torch.from_numpy(queries), k)
    with pytest.raises(errors.ShapeError, match=r"\[n\] .*\[n, dim\]"):
        models.NearestItems(torch.arange(3), torch.zeros(2, 4))


def test_padding_and_the_last_states() -> None:
    x = torch.arange(9.0)[:, None].requires_grad_()
    padded, present = pad(x, LENGTHS)
    assert padded.shape == (4, 5, 1)
    assert padded.squeeze(2)[2].tolist() == [3, 4, 5, 6, 7]
    assert torch.equal(padded[present], x)
    last = models.last_states(x, LENGTHS)
    assert last.squeeze(1).tolist() == [2, 0, 7, 8]
    last.sum().backward()
    assert x.grad is not None and x.grad.sum() == 3


def hstu_by_loop(
    block: models.HSTUBlock, x: np.ndarray, times: np.ndarray | None
) -> np.ndarray:
    """One sequence, place by place."""

    def norm(v: np.ndarray) -> np.ndarray:
        return (v - v.mean()) / math.sqrt(v.var() + 1e-5)

    def silu(v: Any) -> Any:
        return v / (1 + np.exp(-v))

    weights = {
        k: p.detach().double().numpy() for k, p in block.named_parameters()
    }
    mixed = [
        silu(weights["f1.weight"] @ norm(v) + weights["f1.bias"]) for v in x
    ]
    heads, width, keys = block.heads, 3, 5
    ends = np.cumsum([heads * width] * 2 + [heads * keys])
    out = []
    for i in range(len(x)):
        gate = mixed[i][: ends[0]]
        read = []
        for h in range(heads):
            total = np.zeros(width)
            for j in range(i + 1):
                v = mixed[j][ends[0] : ends[1]][h * width : (h + 1) * width]
                q = mixed[i][ends[1] : ends[2]][h * keys : (h + 1) * keys]
                k = mixed[j][ends[2] :][h * keys : (h + 1) * keys]
                bias = weights["by_place"][min(i - j, block.max_length - 1)]
                if times is not None:
                    gap = max(abs(times[i] - times[j]), 1)
                    bias = (
                        bias + weights["by_time"][int(math.log(gap) / 0.301)]
                    )
                total += silu(q @ k + bias) * v / block.max_length
            read.append(total)
        new = weights["f2.weight"] @ (norm(np.concatenate(read)) * gate)
        out.append(x[i] + new + weights["f2.bias"])
    return np.array(out)


@pytest.mark.parametrize("timed", [False, True])
def test_an_hstu_block_is_its_formula(timed: bool) -> None:
    torch.manual_seed(1)
    block = models.HSTUBlock(6, 2, 3, 5, max_length=4, dropout=0.0)
    with torch.no_grad():
        block.by_place.normal_()
        block.by_time.normal_()
    x = torch.randn(9, 6)
    times = torch.rand(9, dtype=torch.float64) * 1e6 + 1.7e9
    out = block(x, LENGTHS, times if timed else None)
    parts = zip(x.split(LENGTHS.tolist()), times.split(LENGTHS.tolist()))
    expected = np.concatenate(
        [
            hstu_by_loop(
                block, part.double().numpy(), at.numpy() if timed else None
            )
            for part, at in parts
            if len(part)
        ]
    )
    np.testing.assert_allclose(out.detach(), expected, atol=1e-4)


@pytest.mark.parametrize(
    "make",
    [
        lambda: models.SASRec(items(), 6, heads=2),
        lambda: models.HSTU(items(), heads=2),
    ],
)
def test_a_state_depends_on_nothing_but_what_is_before(make: Any) -> None:
    torch.manual_seed(1)
    model = make().eval()
    ids = histories(LENGTHS)
    states, rows = model(ids)
    assert states.shape == rows.shape == (9, 8)
    # Each history alone, cut after each place.
    values = ids["history"][0].split(LENGTHS.tolist())
    at = 0
    for history in values:
        for i in range(len(history)):
            cut = JaggedBatch(
                ["history"], history[: i + 1], torch.tensor([i + 1])
            )
            alone, _ = model(cut)
            torch.testing.assert_close(
                alone[-1], states[at], atol=1e-5, rtol=1e-5
            )
            at += 1
    assert at == 9
    none = JaggedBatch(["history"], values[1], torch.zeros(2).long())
    assert model(none)[0].shape == (0, 8)


def test_a_history_that_is_too_long_is_named() -> None:
    with pytest.raises(errors.ShapeError, match="5 ids, max_length is 4"):
        models.SASRec(items(), 4)(histories(LENGTHS))
