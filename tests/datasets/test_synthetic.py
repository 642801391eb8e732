import math
import pickle

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from persia import errors
from persia.datasets import SyntheticCTR


def rows(data: SyntheticCTR) -> list[tuple]:
    """Each row as plain numbers: (dense, label, bags)."""
    out = []
    for b in data:
        values, offsets = b.ids.values().tolist(), b.ids.offsets().tolist()
        n = len(b)
        for i in range(n):
            bags = [
                tuple(values[offsets[f * n + i] : offsets[f * n + i + 1]])
                for f in range(len(data.keys))
            ]
            dense = tuple(b.dense[i].tolist())
            out.append((dense, b.label[i].item(), tuple(bags)))
    return out


def test_rows_depend_on_seed_and_number_alone() -> None:
    whole = rows(SyntheticCTR(500, 500, 7))
    assert len(whole) == 500
    assert rows(SyntheticCTR(500, 64, 7)) == whole
    assert rows(SyntheticCTR(100, 33, 7, start=200)) == whole[200:300]
    assert rows(pickle.loads(pickle.dumps(SyntheticCTR(500, 64, 7)))) == whole
    other = rows(SyntheticCTR(500, 500, 8))
    assert not set(other) & set(whole)
    ids = {i for r in whole for bag in r[2] for i in bag}
    assert not ids & {i for r in other for bag in r[2] for i in bag}


def test_batches() -> None:
    data = SyntheticCTR(1000, 300)
    assert len(data) == 4
    assert [len(b) for b in data] == [300, 300, 300, 100]
    assert len(SyntheticCTR(1000, 300, drop_last=True)) == 3
    assert len(list(SyntheticCTR(1000, 300, drop_last=True))) == 3
    b = next(iter(data))
    assert b.dense.shape == (300, 13)
    assert b.dense.dtype == b.label.dtype == torch.float32
    assert b.ids.keys() == data.keys
    assert len(data.keys) == 28
    assert set(b.label.tolist()) == {0.0, 1.0}
    assert b.ids.lengths()[: 26 * 300].eq(1).all()
    assert list(SyntheticCTR(0)) == []


def test_single_valued_features_have_no_lengths() -> None:
    (b,) = SyntheticCTR(10, singles=3, multis=0, dense=0)
    assert b.ids.lengths_or_none() is None
    assert b.dense is None
    assert b.ids.stride() == 10


@pytest.mark.slow
def test_shards_and_workers() -> None:
    whole = rows(SyntheticCTR(1000, 64, 3))
    batches = [whole[i : i + 64] for i in range(0, 1000, 64)]
    for r in range(3):
        part = SyntheticCTR(1000, 64, 3, rank=r, world_size=3)
        assert len(part) == len(batches[r::3])
        assert rows(part) == [x for b in batches[r::3] for x in b]
    loader = torch.utils.data.DataLoader(
        SyntheticCTR(1000, 64, 3),
        batch_size=None,
        num_workers=2,
        multiprocessing_context="fork",
    )
    got = [b.ids.values() for b in loader]
    expected = [b.ids.values() for b in SyntheticCTR(1000, 64, 3)]
    assert len(got) == len(expected)
    for a, b in zip(got, expected):
        assert torch.equal(a, b)


def test_test_rows_are_others_and_always_the_same() -> None:
    a = SyntheticCTR(1000, 64, 3)
    b = SyntheticCTR(5000, 32, 3)
    assert rows(a.test(100)) == rows(b.test(100))
    assert not set(rows(a.test(100))) & set(rows(a))


def test_ids_follow_zipf() -> None:
    n, vocabulary = 200_000, 1000
    data = SyntheticCTR(
        n, 50_000, vocabulary=vocabulary, zipf=1.05, singles=3, multis=2
    )
    seen = {key: [] for key in data.keys}
    for b in data:
        for key in data.keys:
            seen[key].append(b.ids[key][0])
    for key in data.keys:
        ids, counts = torch.cat(seen[key]).unique(return_counts=True)
        assert len(ids) == (vocabulary if key[0] == "C" else vocabulary / 10)
        share = np.arange(1, len(ids) + 1) ** -1.05
        share /= share.sum()
        counts = np.sort(counts.numpy())[::-1]
        total = counts.sum()
        # Pearson's statistic over the commoner ranks, where sorting does
        # not mix them up: about normal with mean k and variance 2k.
        k = 20
        expected = total * share[:k]
        chi = ((counts[:k] - expected) ** 2 / expected).sum()
        assert chi < k + 5 * math.sqrt(2 * k)
        # The rest together.
        rest, tail = counts[k:].sum(), share[k:].sum()
        assert abs(rest - total * tail) < 5 * math.sqrt(total * tail)


def test_ids_are_scattered_over_64_bits() -> None:
    (b,) = SyntheticCTR(20_000, 20_000)
    ids = b.ids.values().unique().numpy().view(np.uint64)
    for bit in range(64):
        ones = (ids >> np.uint64(bit) & np.uint64(1)).mean()
        assert abs(ones - 0.5) < 5 * 0.5 / math.sqrt(len(ids))
    # Features have vocabularies of their own.
    sets = [set(b.ids[key][0].tolist()) for key in b.ids]
    assert sum(map(len, sets)) == len(set().union(*sets))


def test_lengths_and_dense() -> None:
    (b,) = SyntheticCTR(50_000, 50_000, max_length=4, multis=1)
    counts = torch.bincount(b.ids["M1"][1], minlength=5).numpy()
    assert (np.abs(counts - 10_000) < 5 * math.sqrt(8000)).all()
    x = b.dense.numpy()
    assert np.abs(x.mean(0)).max() < 5 / math.sqrt(50_000)
    assert np.abs(x.std(0) - 1).max() < 0.02
    correlations = np.corrcoef(x.T) - np.eye(13)
    assert np.abs(correlations).max() < 5 / math.sqrt(50_000)


@pytest.mark.parametrize("seed", [1, 2, 3, 2**64 - 1])
def test_planted_model(seed: int) -> None:
    data = SyntheticCTR(200_000, seed=seed).test(200_000)
    logits = data.planted_logits().numpy().astype(np.float64)
    labels = torch.cat([b.label for b in data]).numpy()
    auc = data.planted_auc()
    assert auc == pytest.approx(roc_auc_score(labels, logits), abs=1e-9)
    assert abs(auc - 0.80) < 0.01
    assert abs(labels.mean() - 0.25) < 0.02
    # The clicks are drawn with these very probabilities.
    p = 1 / (1 + np.exp(-logits))
    for part in np.array_split(np.argsort(p), 10):
        error = math.sqrt((p[part] * (1 - p[part])).sum())
        assert abs(labels[part].sum() - p[part].sum()) < 5 * error


def test_signal_sets_the_auc() -> None:
    aucs = [
        SyntheticCTR(50_000, signal=s).planted_auc() for s in (0, 0.5, 1, 3)
    ]
    assert aucs[0] == 0.5
    assert aucs == sorted(aucs)
    assert aucs[-1] > 0.88


def test_the_planted_effects_can_be_read_off_the_ids() -> None:
    """The commonest id of a feature shifts the planted logit by a constant."""
    data = SyntheticCTR(
        50_000, 50_000, singles=2, multis=0, dense=0, vocabulary=5
    )
    (b,) = data
    logits = data.planted_logits()
    cells: dict[tuple, set] = {}
    for a, c, z in zip(
        b.ids["C1"][0].tolist(), b.ids["C2"][0].tolist(), logits.tolist()
    ):
        cells.setdefault((a, c), set()).add(z)
    assert len(cells) == 25
    assert all(len(values) == 1 for values in cells.values())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"samples": -1}, "samples is -1"),
        ({"seed": -1}, "seed is -1"),
        ({"vocabulary": 0}, "vocabulary is 0"),
        ({"vocabulary": 2**40}, "vocabulary"),
        ({"singles": 0, "multis": 0}, "at least one"),
        ({"ctr": 1.5}, "ctr is 1.5"),
        ({"zipf": float("nan")}, "zipf is nan"),
        ({"batch_size": 0}, "batch_size is 0"),
    ],
)
def test_bad_options(options: dict, text: str) -> None:
    with pytest.raises(errors.InvalidArgument, match=text):
        SyntheticCTR(**{"samples": 10} | options)
