"""DLRM whose embeddings are another system's: the peers of benchmarks.train.

The dense part is persia.models.DLRM for everybody, so that only the
embeddings differ.  The data are an .npz file: ``dense`` float32 [n, 13],
``ids`` int64 [26, n], each feature's values numbered from 0 (which suits
arrays of fixed size best), ``label`` float32 [n], ``sizes`` int64 [26].
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import numpy as np
import torch
from torch import nn


@dataclasses.dataclass(frozen=True)
class Config:
    """The two fields of an EmbeddingBagConfig that DLRM reads."""

    embedding_dim: int
    feature_names: list[str]


@dataclasses.dataclass(frozen=True)
class Pooled:
    """[batch, features * dim] behind the method of a KeyedTensor."""

    tensor: torch.Tensor

    def values(self) -> torch.Tensor:
        return self.tensor


class Bags(nn.Module):
    """Single-valued features over tables of fixed sizes."""

    def __init__(
        self, sizes: list[int], dim: int, lr: float, optimizer: str
    ) -> None:
        super().__init__()
        self.sizes, self.dim = sizes, dim
        self.build(lr, optimizer)

    def build(self, lr: float, optimizer: str) -> None:
        raise NotImplementedError

    def prepare(self, ids: torch.Tensor) -> Any:
        """From ids [features, batch] to what forward takes."""
        raise NotImplementedError

    def update(self) -> None:
        """The optimizer step, where it is not fused with the backward."""

    def embedding_bag_configs(self) -> list[Config]:
        return [Config(self.dim, [f"f{k}"]) for k in range(len(self.sizes))]


class FreeBags(Bags):
    """No look-up at all: the dense part's own speed, the ceiling."""

    def build(self, lr: float, optimizer: str) -> None:
        pass

    def prepare(self, ids: torch.Tensor) -> Any:
        return (
            torch.zeros(ids.shape[1], len(self.sizes) * self.dim)
            .uniform_(-0.01, 0.01)
            .requires_grad_()
        )

    def forward(self, ids: Any) -> Pooled:
        ids.grad = None  # of its last pass: nothing adds up there
        return Pooled(ids)


class TorchBags(Bags):
    """One joined torch.nn.EmbeddingBag(sparse=True)."""

    def build(self, lr: float, optimizer: str) -> None:
        self.bag = nn.EmbeddingBag(
            sum(self.sizes), self.dim, mode="sum", sparse=True
        )
        nn.init.uniform_(self.bag.weight, -0.01, 0.01)
        self.steps = {
            "adagrad": torch.optim.Adagrad,
            "adam": torch.optim.SparseAdam,
        }[optimizer](self.bag.parameters(), lr=lr)

    def prepare(self, ids: torch.Tensor) -> Any:
        base = torch.tensor([0, *np.cumsum(self.sizes)[:-1].tolist()])
        joined = (ids + base[:, None]).t().reshape(-1).contiguous()
        return joined, torch.arange(joined.numel())

    @torch.compiler.disable  # inductor has no sparse gradients
    def forward(self, ids: Any) -> Pooled:
        return Pooled(self.bag(*ids).view(-1, len(self.sizes) * self.dim))

    def update(self) -> None:
        self.steps.step()
        self.steps.zero_grad(set_to_none=True)


class FbgemmBags(Bags):
    """fbgemm's fused CPU tables."""

    def build(self, lr: float, optimizer: str) -> None:
        from benchmarks.peers.layers import fbgemm_tables

        self.tables = fbgemm_tables(self.sizes, self.dim, optimizer, lr)

    def prepare(self, ids: torch.Tensor) -> Any:
        return ids.reshape(-1).contiguous(), torch.arange(ids.numel() + 1)

    def forward(self, ids: Any) -> Pooled:
        return Pooled(self.tables(*ids))


class TorchrecBags(Bags):
    """torchrec under DistributedModelParallel, one rank."""

    def build(self, lr: float, optimizer: str) -> None:
        from benchmarks.peers.layers import torchrec_model

        self.model, self.keys = torchrec_model(
            self.sizes, self.dim, optimizer, lr
        )

    def prepare(self, ids: torch.Tensor) -> Any:
        from torchrec import KeyedJaggedTensor

        return KeyedJaggedTensor(
            self.keys,
            ids.reshape(-1),
            lengths=torch.ones(ids.numel(), dtype=torch.int64),
        )

    def forward(self, ids: Any) -> Pooled:
        return Pooled(self.model(ids).values())


BAGS = {
    "free": FreeBags,
    "torch": TorchBags,
    "fbgemm": FbgemmBags,
    "torchrec": TorchrecBags,
}


class Dlrm:
    """A DLRM in training: timed steps over prepared batches, and scores.

    peer: free, torch, fbgemm or torchrec; optimizer: that of the embeddings
    (adagrad, adam, rowwise_adagrad; what the peer has).  The dense part is
    trained by Adam with ``dense_lr``.  Rows before ``split`` train.
    """

    def __init__(
        self,
        peer: str,
        data: str,
        split: int,
        optimizer: str = "adagrad",
        batch: int = 1024,
        dim: int = 16,
        lr: float = 0.05,
        dense_lr: float = 3e-3,
        threads: int = 2,
        compiled: bool = False,
        seed: int = 1,
    ) -> None:
        from persia.models import DLRM

        self.threads = threads
        torch.set_num_threads(threads)
        torch.manual_seed(seed)
        with np.load(data) as arrays:
            dense, ids, label = (
                torch.from_numpy(arrays[k]) for k in ("dense", "ids", "label")
            )
            sizes = arrays["sizes"].tolist()
        self.bags = BAGS[peer](sizes, dim, lr, optimizer)
        self.model = DLRM(
            self.bags,  # type: ignore[arg-type]
            dense.shape[1],
            standardize=False,
        )
        inside = {id(p) for p in self.bags.parameters()}
        outside = [p for p in self.model.parameters() if id(p) not in inside]
        self.dense_optimizer = torch.optim.Adam(
            outside, lr=dense_lr, fused=True
        )
        self.run = torch.compile(self.model) if compiled else self.model

        def batches(start: int, stop: int) -> list[Any]:
            cuts = [
                slice(k, min(k + batch, stop))
                for k in range(start, stop, batch)
            ]
            return [
                (dense[c], self.bags.prepare(ids[:, c]), label[c])
                for c in cuts
            ]

        self.train_batches = batches(0, split)
        self.test_batches = batches(split, len(label))

    def steps(self, start: int, count: int) -> float:
        """Seconds of ``count`` training steps from batch ``start``, cyclic."""
        torch.set_num_threads(self.threads)
        begin = time.perf_counter()
        for k in range(start, start + count):
            dense, ids, label = self.train_batches[k % len(self.train_batches)]
            logits = self.run(dense, ids)
            loss = nn.functional.binary_cross_entropy_with_logits(
                logits, label
            )
            self.dense_optimizer.zero_grad(set_to_none=True)
            loss.backward()
            self.dense_optimizer.step()
            self.bags.update()
        return time.perf_counter() - begin

    def train_batch_count(self) -> int:
        return len(self.train_batches)

    def scores(self) -> list[float]:
        """Logits of the test rows."""
        with torch.no_grad():
            return [
                float(x)
                for dense, ids, _ in self.test_batches
                for x in self.model(dense, ids)
            ]

    def close(self) -> None:
        self.__dict__.clear()
