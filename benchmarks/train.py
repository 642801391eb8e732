"""Whole models in training: ``python -m benchmarks.train``.

Speed: DLRM 13-64-16 / dot / 256-64-1 over Criteo's 26 features, batch 1,024,
one pass from empty tables, parsing outside the clock; against the same dense
part over other embedding layers, and against the dense part alone, in turn in
the same run.  Learning: the AUC on samples held out, against torch's and
against the model that made the data.

The Criteo sample and UCI Adult are read from the folder PERSIA_TEST_DATA
(default ../shared/data); without them their cases are left out.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

import persia
from benchmarks.common import (
    Times,
    alternate,
    arguments,
    print_machine,
    report,
    timed,
)
from benchmarks.peers import client
from benchmarks.peers.dlrm import Config, Dlrm, Pooled
from persia.datasets import Criteo, SyntheticCTR
from persia.metrics import auc
from persia.models import DLRM
from persia.train.config import TrainConfig
from persia.train.run import Run

BENCH = "train"
ROOT = Path(__file__).parents[1]
DATA = Path(os.environ.get("PERSIA_TEST_DATA", ROOT.parent / "shared/data"))
BATCH = 1024
DIM = 16
CRITEO_TEST = 10_000
SAME_RUN = "same run"
# Of both sides of a comparison of what is learned.  An eps far above the
# gradients of one sample keeps rows that were seen a few times near 0.
SYNTHETIC = {"lr": 0.05, "eps": 1e-2}
SYNTHETIC_DENSE_LR = 2e-3
T_95 = {2: 4.303, 4: 2.776}  # of Student's distribution, by freedom


class Sizes:
    """Everything that ``--quick`` makes smaller."""

    def __init__(self, quick: bool) -> None:
        self.rounds = 2 if quick else 15
        self.modes = (False,) if quick else (False, True)
        self.seeds = 3 if quick else 5
        self.synthetic_rows = 20_000 if quick else 2_000_000
        self.synthetic_test = 20_000 if quick else 200_000
        self.adult_epochs = 1 if quick else 3


class Ours:
    """The same DLRM over persia's embeddings; a contestant of Dlrm."""

    def __init__(
        self,
        train: Sequence[persia.Batch],
        test: Sequence[persia.Batch],
        compiled: bool = False,
        seed: int = 1,
    ) -> None:
        torch.manual_seed(seed)
        self.train, self.test = train, test
        self.store = persia.Store(persia.optim.Adagrad(lr=0.05), seed=seed)
        bags = persia.EmbeddingBagCollection(
            store=self.store,
            tables=[
                persia.EmbeddingBagConfig(key, DIM, [key])
                for key in train[0].ids.keys()  # noqa: SIM118
            ],
        )
        self.model = DLRM(bags, 13, standardize=False)
        self.optimizer = torch.optim.Adam(
            self.model.parameters(), lr=3e-3, fused=True
        )
        self.run = torch.compile(self.model) if compiled else self.model

    def one_pass(self, count: int) -> float:
        """Seconds of ``count`` steps from empty tables."""
        self.store.clear()
        return timed(lambda _: self._steps(self.train[:count]))(0)

    def _steps(self, batches: Iterable[persia.Batch]) -> None:
        for batch in persia.DataLoader(batches, self.model, staleness=1):
            logits = self.run(batch.dense, batch.ids)
            loss = binary_cross_entropy_with_logits(logits, batch.label)
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            self.optimizer.step()

    @torch.no_grad()
    def test_auc(self) -> float:
        logits = [self.model(b.dense, b.ids) for b in self.test]
        labels = [b.label for b in self.test]
        return auc(torch.cat(logits), torch.cat(labels))


# --- Criteo -----------------------------------------------------------------


class CriteoSample:
    """The sample as batches, and as the arrays that the peers read."""

    def __init__(self, path: Path, folder: Path) -> None:
        train, test = Criteo(path, BATCH).split(CRITEO_TEST)
        self.train, self.test = list(train), list(test)
        self.arrays = str(folder / "criteo.npz")
        both = [*self.train, *self.test]
        columns = [
            np.unique(
                np.concatenate([b.ids[key][0].numpy() for b in both]),
                return_inverse=True,
            )
            for key in train.keys
        ]
        self.split = sum(len(b) for b in self.train)
        self.full_batches = self.split // BATCH
        self.label = torch.cat([b.label for b in both]).numpy()
        np.savez(
            self.arrays,
            dense=torch.cat([b.dense for b in both]).numpy(),
            ids=np.stack([index for _, index in columns]),
            label=self.label,
            sizes=np.array([len(values) for values, _ in columns]),
        )

    def dlrm(self, peer: str, **more: Any) -> dict[str, Any]:
        """Arguments of Dlrm."""
        threads = torch.get_num_threads()
        arguments = {"peer": peer, "data": self.arrays, "split": self.split}
        return arguments | {"threads": threads} | more


def criteo_speed(
    sample: CriteoSample, sizes: Sizes, compiled: bool, peers: Any
) -> None:
    """Samples/s of one pass, eager or compiled."""
    mode = "compiled" if compiled else "eager"
    count = sample.full_batches
    ours = Ours(sample.train, sample.test, compiled)
    contestants: dict[str, Callable[[int], float]] = {
        "persia": lambda k: ours.one_pass(count)
    }
    for peer in ("free", "torch"):
        layer = Dlrm(**sample.dlrm(peer, compiled=compiled))
        contestants[peer] = lambda k, layer=layer: layer.steps(0, count)
    for peer in ("fbgemm", "torchrec") if peers is not None else ():
        there = peers.open(
            f"{peer}-{mode}",
            "dlrm",
            **sample.dlrm(
                peer, compiled=compiled, optimizer="rowwise_adagrad"
            ),
        )
        contestants[peer] = lambda k, there=there: there.call(
            "steps", start=0, count=count
        )
    times = alternate(contestants, sizes.rounds)
    names = {
        "free": "the dense part alone, embeddings free",
        "torch": "torch EmbeddingBag(sparse=True), one joined table, Adagrad",
        "fbgemm": "fbgemm's CPU tables, row-wise Adagrad",
        "torchrec": "torchrec DistributedModelParallel, row-wise Adagrad",
    }
    for peer in contestants.keys() - {"persia"}:
        _report_speed(times, mode, peer, names[peer], count * BATCH)


def _report_speed(
    times: Times, mode: str, peer: str, name: str, samples: int
) -> None:
    report(
        BENCH,
        f"criteo-{mode}-{peer}",
        samples / times.median("persia"),
        "samples/s",
        baseline=name,
        baseline_value=samples / times.median(peer),
        baseline_source=SAME_RUN,
        ratio=times.ratio("persia", peer),
        target=0.9 if peer == "free" else 1.0,
    )


def criteo_auc(sample: CriteoSample, sizes: Sizes) -> None:
    """What is learned in one pass, as a smoke test."""
    ours, theirs = [], []
    for seed in range(1, sizes.seeds + 1):
        mine = Ours(sample.train, sample.test, seed=seed)
        mine.one_pass(len(sample.train))
        ours.append(mine.test_auc())
        other = Dlrm(**sample.dlrm("torch", seed=seed))
        other.steps(0, len(sample.train))
        label = sample.label[sample.split :]
        theirs.append(auc(np.array(other.scores()), label))
    ours_median = statistics.median(ours)
    report(
        BENCH,
        "criteo-auc",
        ours_median,
        "test AUC",
        baseline="torch joined table - 0.01",
        baseline_value=statistics.median(theirs) - 0.01,
        baseline_source=SAME_RUN,
        target=1.0,
        ours=[round(x, 4) for x in ours],
        theirs=[round(x, 4) for x in theirs],
    )


# --- SyntheticCTR -----------------------------------------------------------


class TorchBags(nn.Module):
    """All features in one torch.nn.EmbeddingBag; ids are places in a sorted
    vocabulary that is known beforehand."""

    def __init__(self, keys: list[str], vocabulary: torch.Tensor) -> None:
        super().__init__()
        self.features = len(keys)
        self.vocabulary = vocabulary
        self.bag = nn.EmbeddingBag(
            len(vocabulary),
            DIM,
            mode="sum",
            sparse=True,
            include_last_offset=True,
        )
        nn.init.uniform_(self.bag.weight, -0.01, 0.01)

    def embedding_bag_configs(self) -> list[Config]:
        return [Config(DIM, [str(k)]) for k in range(self.features)]

    def forward(self, ids: persia.JaggedBatch) -> Pooled:
        places = torch.searchsorted(self.vocabulary, ids.values())
        bags = self.bag(places, ids.offsets())
        vectors = bags.view(self.features, -1, DIM).transpose(0, 1)
        return Pooled(vectors.reshape(-1, self.features * DIM))


def _learn(
    data: SyntheticCTR,
    test: SyntheticCTR,
    bags: nn.Module,
    sparse: torch.optim.Optimizer,
    seed: int,
) -> float:
    """Test AUC after one pass with the dense part that the seed decides."""
    torch.manual_seed(seed)
    model = DLRM(bags, data.dense_features)  # type: ignore[arg-type]
    inside = {id(p) for p in bags.parameters()}
    outside = [p for p in model.parameters() if id(p) not in inside]
    dense = torch.optim.Adam(outside, lr=SYNTHETIC_DENSE_LR, fused=True)
    batches: Iterable[persia.Batch] = data
    if isinstance(bags, persia.EmbeddingBagCollection):
        batches = persia.DataLoader(data, model, staleness=1)
    for batch in batches:
        logits = model(batch.dense, batch.ids)
        loss = binary_cross_entropy_with_logits(logits, batch.label)
        dense.zero_grad(set_to_none=True)
        sparse.zero_grad(set_to_none=True)
        loss.backward()
        dense.step()
        sparse.step()
    model.eval()
    with torch.no_grad():
        scored = [(model(b.dense, b.ids), b.label) for b in test]
    logits, labels = (torch.cat(x) for x in zip(*scored, strict=True))
    return auc(logits, labels)


def synthetic(sizes: Sizes) -> None:
    """What is learned, against torch and the planted model."""
    differences, shares = [], []
    for seed in range(1, sizes.seeds + 1):
        data = SyntheticCTR(sizes.synthetic_rows, BATCH, seed=seed)
        test = data.test(sizes.synthetic_test)
        store = persia.Store(persia.optim.Adagrad(**SYNTHETIC), seed=seed)
        bags = persia.EmbeddingBagCollection(
            store=store,
            tables=[
                persia.EmbeddingBagConfig(key, DIM, [key]) for key in data.keys
            ],
        )
        ours = _learn(data, test, bags, store.optimizer, seed)
        known = [b.ids.values().unique() for d in (data, test) for b in d]
        torch.manual_seed(seed)
        table = TorchBags(data.keys, torch.cat(known).unique())
        sparse = torch.optim.Adagrad(table.parameters(), **SYNTHETIC)
        theirs = _learn(data, test, table, sparse, seed)
        planted = test.planted_auc()
        differences.append(ours - theirs)
        shares.append((ours - 0.5) / (planted - 0.5))
        report(
            BENCH,
            f"synthetic-auc-seed-{seed}",
            ours,
            "test AUC",
            baseline="torch EmbeddingBag, same optimizer",
            baseline_value=theirs,
            baseline_source=SAME_RUN,
            planted=round(planted, 5),
            rows=sizes.synthetic_rows,
        )
    n = len(differences)
    mean = statistics.mean(differences)
    half = T_95[n - 1] * statistics.stdev(differences) / n**0.5
    report(
        BENCH,
        "synthetic-auc-difference",
        abs(mean),
        "test AUC",
        target=0.002,
        at_most=True,
        ours_minus_torch=round(mean, 6),
        interval_95=[round(mean - half, 6), round(mean + half, 6)],
        seeds=n,
    )
    report(
        BENCH,
        "synthetic-share-of-planted",
        statistics.mean(shares),
        "(AUC - 0.5) / (planted AUC - 0.5)",
        target=0.97,
        each=[round(x, 4) for x in shares],
    )


# --- Adult ------------------------------------------------------------------


def adult(sizes: Sizes) -> None:
    """``persia train`` on UCI Adult's official split."""
    scores = []
    for seed in range(sizes.seeds):
        run = Run(
            TrainConfig(
                data=str(DATA / "adult.data.gz"),
                schema="adult",
                eval_data=str(DATA / "adult.test.gz"),
                epochs=sizes.adult_epochs,
                batch_size=512,
                seed=seed,
            )
        )
        run.fit(lambda at: None)
        found = run.result().scores
        assert found is not None
        scores.append(found.auc)
    report(
        BENCH,
        "adult-auc",
        statistics.median(scores),
        "test AUC",
        target=0.905,
        each=[round(x, 4) for x in scores],
    )


def main(argv: Sequence[str] | None = None) -> None:
    options = arguments(__doc__.split("\n")[0]).parse_args(argv)
    sizes = Sizes(options.quick)

    def wanted(case: str) -> bool:
        return options.only in case

    with ExitStack() as stack:
        peers = None
        if client.available():
            peers = stack.enter_context(client.Peers())
        versions = peers.versions() if peers is not None else {}
        threads = torch.get_num_threads()
        print_machine(BENCH, threads=threads, peers=versions)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        path = DATA / "criteo_tb_80k.tsv.gz"
        if path.exists():
            sample = CriteoSample(path, folder)
            for compiled in sizes.modes:
                mode = "compiled" if compiled else "eager"
                if wanted(f"criteo-{mode}"):
                    criteo_speed(sample, sizes, compiled, peers)
            if wanted("criteo-auc"):
                criteo_auc(sample, sizes)
        if (DATA / "adult.data.gz").exists() and wanted("adult-auc"):
            adult(sizes)
    if wanted("synthetic"):
        synthetic(sizes)


if __name__ == "__main__":
    main()
