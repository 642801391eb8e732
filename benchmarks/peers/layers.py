"""Embedding layers of other systems, behind one small interface.

A layer holds fixed tables of ``rows`` rows for each of ``features`` features
and indexes them with ranks; it is timed here, by its own clock, so that the
messages between processes cost it nothing.  ``TorchBags`` needs only torch;
the others need the peers' virtual environment.
"""

from __future__ import annotations

import gc
import threading
import time
from typing import Any

import torch

from benchmarks.common import FEATURES, feature_batches


class Layer:
    """Timing common to all layers.  Batches: see :meth:`stream`."""

    def __init__(
        self,
        rows: int,
        dim: int,
        optimizer: str,
        threads: int = 1,
        features: int = FEATURES,
    ) -> None:
        self.rows, self.dim, self.features, self.optimizer = (
            rows,
            dim,
            features,
            optimizer,
        )
        self.threads = threads
        self.batches: list[Any] = []
        torch.set_num_threads(threads)
        torch.manual_seed(1)
        self.build()

    def build(self) -> None:
        raise NotImplementedError

    def prepare(self, ranks: torch.Tensor) -> Any:
        """From ranks [features, batch] to what forward takes."""
        raise NotImplementedError

    def forward_batch(self, batch: Any) -> torch.Tensor:
        """Pooled embeddings; any layout of [batch, features * dim]."""
        raise NotImplementedError

    def update(self) -> None:
        """The optimizer step, where it is not fused with the backward."""

    def stream(self, kind: str, batches: int, seed: int, batch: int) -> None:
        """Makes the batches that the next calls use, in turn."""
        ranks = torch.from_numpy(
            feature_batches(
                kind, self.rows, batches, seed, batch, self.features
            )
        )
        self.batches = [self.prepare(r) for r in ranks]
        with torch.no_grad():
            self.grad = (
                torch.randn_like(self.forward_batch(self.batches[0])) * 1e-3
            )

    def train(self, start: int, count: int) -> float:
        """Seconds of ``count`` steps: forward, backward, update."""
        torch.set_num_threads(self.threads)
        begin = time.perf_counter()
        for k in range(start, start + count):
            self.forward_batch(self.batches[k % len(self.batches)]).backward(
                self.grad
            )
            self.update()
        return time.perf_counter() - begin

    def forward(self, start: int, count: int) -> float:
        """Seconds of ``count`` forwards without gradient."""
        torch.set_num_threads(self.threads)
        begin = time.perf_counter()
        with torch.no_grad():
            for k in range(start, start + count):
                self.forward_batch(self.batches[k % len(self.batches)])
        return time.perf_counter() - begin

    def close(self) -> None:
        self.__dict__.clear()
        gc.collect()


class TorchBags(Layer):
    """torch.nn.EmbeddingBag(sparse=True) on one joined table, which is faster
    than one table a feature.  optimizer: adagrad or adam (SparseAdam)."""

    def build(self) -> None:
        self.bag = torch.nn.EmbeddingBag(
            self.rows * self.features, self.dim, mode="sum", sparse=True
        )
        kinds = {
            "adagrad": torch.optim.Adagrad,
            "adam": torch.optim.SparseAdam,
        }
        self.steps = kinds[self.optimizer](self.bag.parameters(), lr=0.01)

    def prepare(self, ranks: torch.Tensor) -> Any:
        base = torch.arange(self.features)[:, None] * self.rows
        # Sample-major, so that the output is [batch, features * dim] as it is.
        ids = (ranks + base).t().reshape(-1).contiguous()
        return ids, torch.arange(ids.numel())

    def forward_batch(self, batch: Any) -> torch.Tensor:
        out: torch.Tensor = self.bag(*batch)
        return out

    def update(self) -> None:
        self.steps.step()
        self.steps.zero_grad(set_to_none=True)


class Fbgemm(Layer):
    """fbgemm's fused CPU tables; optimizer: rowwise_adagrad or adagrad."""

    def build(self) -> None:
        self.tables = fbgemm_tables(
            [self.rows] * self.features, self.dim, self.optimizer, 0.01
        )

    def prepare(self, ranks: torch.Tensor) -> Any:
        ids = ranks.reshape(-1).contiguous()
        return ids, torch.arange(ids.numel() + 1)

    def forward_batch(self, batch: Any) -> torch.Tensor:
        out: torch.Tensor = self.tables(*batch)
        return out


class FbgemmThreads(Fbgemm):
    """fbgemm in one process, its tables divided between Python threads.

    Its wheel has no threads of its own, so this is what a single process can
    do with all cores.  The halves are independent: a barrier a step.
    """

    def build(self) -> None:
        self.workers = 2
        self.counts = [self.features // 2, self.features - self.features // 2]
        self.parts = [
            fbgemm_tables([self.rows] * n, self.dim, self.optimizer, 0.01)
            for n in self.counts
        ]

    def prepare(self, ranks: torch.Tensor) -> Any:
        return [Fbgemm.prepare(self, r) for r in ranks.split(self.counts)]

    def forward_batch(self, batch: Any) -> torch.Tensor:
        return torch.cat(
            [part(*b) for part, b in zip(self.parts, batch, strict=True)], 1
        )

    def train(self, start: int, count: int) -> float:
        grads = self.grad.split([n * self.dim for n in self.counts], 1)
        return self._both(start, count, [g.contiguous() for g in grads])

    def forward(self, start: int, count: int) -> float:
        return self._both(start, count, None)

    def _both(
        self, start: int, count: int, grads: list[torch.Tensor] | None
    ) -> float:
        torch.set_num_threads(1)
        barrier = threading.Barrier(self.workers)

        def work(w: int) -> None:
            torch.set_grad_enabled(grads is not None)
            for k in range(start, start + count):
                out = self.parts[w](*self.batches[k % len(self.batches)][w])
                if grads is not None:
                    out.backward(grads[w])
                barrier.wait()

        threads = [
            threading.Thread(target=work, args=(w,))
            for w in range(self.workers)
        ]
        begin = time.perf_counter()
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        return time.perf_counter() - begin


class Torchrec(Layer):
    """torchrec's EmbeddingBagCollection under DistributedModelParallel, one
    rank; optimizer: rowwise_adagrad or adagrad, fused."""

    def build(self) -> None:
        self.model, self.keys = torchrec_model(
            [self.rows] * self.features, self.dim, self.optimizer, 0.01
        )

    def prepare(self, ranks: torch.Tensor) -> Any:
        from torchrec import KeyedJaggedTensor

        features, batch = ranks.shape
        return KeyedJaggedTensor(
            self.keys,
            ranks.reshape(-1),
            lengths=torch.ones(features * batch, dtype=torch.int64),
        )

    def forward_batch(self, batch: Any) -> torch.Tensor:
        out: torch.Tensor = self.model(batch).values()
        return out


def fbgemm_tables(
    sizes: list[int], dim: int, optimizer: str, lr: float
) -> Any:
    """fbgemm's fused tables on the CPU, as torchrec makes them."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
        EmbeddingLocation,
    )
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    kinds = {
        "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        "adagrad": EmbOptimType.EXACT_ADAGRAD,
    }
    specs = [
        (rows, dim, EmbeddingLocation.HOST, ComputeDevice.CPU)
        for rows in sizes
    ]
    tables = SplitTableBatchedEmbeddingBagsCodegen(
        specs, optimizer=kinds[optimizer], learning_rate=lr
    )
    tables.init_embedding_weights_uniform(-0.01, 0.01)
    return tables


def torchrec_model(
    sizes: list[int],
    dim: int,
    optimizer: str,
    lr: float,
    cached: float | None = None,
) -> tuple[Any, list[str]]:
    """A DistributedModelParallel over one rank, and its feature names; on the
    CPU, or, with the share of rows that a GPU caches, in managed memory."""
    import torch.distributed as dist
    import torchrec
    from torch.distributed.optim import (
        _apply_optimizer_in_backward as in_backward,
    )
    from torchrec.distributed import DistributedModelParallel
    from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

    if not dist.is_initialized():
        backends = "gloo" if cached is None else "cpu:gloo,cuda:nccl"
        dist.init_process_group(
            backends, store=dist.HashStore(), rank=0, world_size=1
        )
    keys = [f"f{k}" for k in range(len(sizes))]
    tables = [
        torchrec.EmbeddingBagConfig(
            name=f"t_{k}",
            num_embeddings=rows,
            embedding_dim=dim,
            feature_names=[k],
        )
        for k, rows in zip(keys, sizes, strict=True)
    ]
    bags = torchrec.EmbeddingBagCollection(
        tables=tables, device=torch.device("meta")
    )
    kind = {"rowwise_adagrad": RowWiseAdagrad, "adagrad": torch.optim.Adagrad}[
        optimizer
    ]
    in_backward(kind, bags.parameters(), {"lr": lr, "eps": 1e-8})
    if cached is None:
        there = DistributedModelParallel(bags, device=torch.device("cpu"))
        return there, keys
    return DistributedModelParallel(
        bags,
        device=torch.device("cuda", torch.cuda.current_device()),
        **_cache_plan(bags, [table.name for table in tables], cached),
    ), keys


def _cache_plan(bags: Any, tables: list[str], share: float) -> dict[str, Any]:
    """Arguments: all tables in managed memory, a share of the rows cached."""
    from torchrec.distributed.embedding_types import EmbeddingComputeKernel
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.distributed.planner.types import ParameterConstraints
    from torchrec.distributed.types import CacheParams, ShardingType

    each = ParameterConstraints(
        sharding_types=[ShardingType.TABLE_WISE.value],
        compute_kernels=[EmbeddingComputeKernel.FUSED_UVM_CACHING.value],
        cache_params=CacheParams(load_factor=share),
    )
    sharders: Any = [EmbeddingBagCollectionSharder()]
    plan = EmbeddingShardingPlanner(
        topology=Topology(world_size=1, compute_device="cuda"),
        constraints=dict.fromkeys(tables, each),
    ).plan(bags, sharders)
    return {"plan": plan, "sharders": sharders}
