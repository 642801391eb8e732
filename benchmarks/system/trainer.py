"""What runs in a trainer's process: an ordinary training loop, and calls.

``python -m benchmarks.system.trainer`` answers calls over its pipes: one JSON
line a call, ``{"call": METHOD, "args": {...}}``, one a result.  The call
``open`` makes a :class:`Loop` from its arguments.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

import persia
from benchmarks.common import Ranks, feature_ids
from persia.models.dense import mlp

OPTIMIZERS = {
    "adagrad": persia.optim.Adagrad,
    "rowwise_adagrad": persia.optim.RowWiseAdagrad,
}


class Bags(nn.Module):
    """Embeddings of single-id slots, then linear layers to one logit."""

    def __init__(
        self, bags: persia.EmbeddingBagCollection, widths: list[int], n: int
    ) -> None:
        super().__init__()
        self.bags = bags
        self.dense = mlp(n, [*widths, 1], last_relu=False)

    def forward(self, ids: persia.JaggedBatch) -> torch.Tensor:
        return self.dense(self.bags(ids).values()).squeeze(1)


class Loop:
    """A model with its store, its batches, and the loop over them.

    Args:
        servers: addresses of the parameter servers; None: embedded.
        slots: features of one id a sample, each with a table of its own.
        dim: of the vectors.
        batch: samples.
        optimizer: "adagrad" or "rowwise_adagrad".
        data_type: of the rows, "fp32" or "bf16".
        wire: dtype of vectors and gradients on the wire.
        widths: of the hidden layers; none: one linear layer.
        threads: of torch; None: as many as cores.
        store_threads: of the store; None: as many as torch's.
        capacity: of each table, in rows; None: unbounded.
    """

    def __init__(
        self,
        servers: str | None,
        *,
        slots: int = 26,
        dim: int = 16,
        batch: int = 4096,
        optimizer: str = "adagrad",
        data_type: str = "fp32",
        wire: str = "fp16",
        widths: list[int] | None = None,
        threads: int | None = None,
        store_threads: int | None = None,
        capacity: int | None = None,
        seed: int = 1,
    ) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        torch.manual_seed(seed)
        self.slots, self.dim, self.batch = slots, dim, batch
        self.keys = [f"slot{k}" for k in range(slots)]
        remote: dict[str, Any] = {}
        if servers is not None:
            remote = {"servers": servers, "wire_dtype": wire}
        self.store = persia.Store(
            OPTIMIZERS[optimizer](lr=0.02),
            seed=seed,
            threads=store_threads,
            **remote,
        )
        bags = persia.EmbeddingBagCollection(
            store=self.store,
            tables=[
                persia.EmbeddingBagConfig(
                    key, dim, [key], data_type=data_type, capacity=capacity
                )
                for key in self.keys
            ],
        )
        self.model = Bags(bags, widths or [], slots * dim)
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), lr=0.01, fused=True
        )
        self.label = (torch.rand(batch) < 0.25).float()
        self.batches: list[persia.JaggedBatch] = []
        self._next: Iterator[persia.JaggedBatch] = iter(())
        self._stream: persia.Stream | None = None

    # ---- batches

    def _jagged(self, ids: np.ndarray) -> persia.JaggedBatch:
        """ids: [slots, batch]."""
        return persia.JaggedBatch(
            self.keys, torch.from_numpy(ids.reshape(-1).copy())
        )

    def draw(self, kind: str, rows: int, batches: int, seed: int) -> None:
        """Batches of ids of ``rows`` a slot, "uniform" or "zipf"."""
        shape = (batches, self.slots, self.batch)
        ids = feature_ids(Ranks(kind, rows).draw(shape, seed))
        self.batches = [self._jagged(x) for x in ids]
        self._next = cycle(self.batches)

    def _in_order(self, first: int, stop: int) -> Iterator[persia.JaggedBatch]:
        """The ids of ranks first .. stop - 1, each once."""
        for at in range(first, stop, self.batch):
            ranks = np.minimum(np.arange(at, at + self.batch), stop - 1)
            shape = (1, self.slots, self.batch)
            yield self._jagged(feature_ids(np.broadcast_to(ranks, shape))[0])

    # ---- training

    def _train(
        self, batches: Iterator[persia.JaggedBatch], staleness: int | None
    ) -> dict[str, Any]:
        before = self._staleness()
        start = time.perf_counter()
        for ids in persia.DataLoader(
            batches, self.model, staleness=staleness, ids=lambda x: x
        ):
            self._step(ids, self.label)
        self.store.flush()
        seconds = time.perf_counter() - start
        after = self._staleness()
        return {
            "seconds": seconds,
            "staleness": {
                k: n - before.get(k, 0)
                for k, n in after.items()
                if n > before.get(k, 0)
            },
        }

    def _step(self, ids: persia.JaggedBatch, label: torch.Tensor) -> None:
        loss = binary_cross_entropy_with_logits(self.model(ids), label)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()

    def take(self, workers: str, staleness: int | None) -> dict[str, Any]:
        """Trains an epoch that a data loader sends, from its first batch."""
        if self._stream is None:
            self._stream = persia.Stream(workers)
        start = 0.0
        for batch in persia.DataLoader(
            self._stream, self.model, staleness=staleness
        ):
            start = start or time.perf_counter()
            assert batch.label is not None
            self._step(batch.ids, batch.label)
        self.store.flush()
        return {"seconds": time.perf_counter() - start}

    def _staleness(self) -> dict[int, int]:
        counts: dict[int, int] = self.store.stats()["lookahead"]["staleness"]
        return dict(counts)

    def steps(self, count: int, staleness: int | None) -> dict[str, Any]:
        """Trains the next ``count`` batches, round and round."""
        return self._train(islice(self._next, count), staleness)

    def step_times(self, end: str, staleness: int | None) -> list[float]:
        """When each step ended, of this machine's clock; trains until there
        is a file of this name."""
        times: list[float] = []
        path = Path(end)

        def batches() -> Iterator[persia.JaggedBatch]:
            while not path.exists():
                yield next(self._next)
                times.append(time.time())

        self._train(batches(), staleness)
        return times

    def make_rows(self, first: int, stop: int) -> dict[str, Any]:
        """Trains ranks first .. stop - 1 of each slot once."""
        return self._train(self._in_order(first, stop), 4)

    def first_batch(self) -> float:
        """Trains one batch; the time of this machine when it is done."""
        self.draw("uniform", 1 << 20, 1, 1)
        self.steps(1, 1)
        return time.time()

    def dense_steps(self, count: int) -> float:
        """Seconds of ``count`` steps of the dense part alone: embeddings are
        there, and their gradients are left where they are."""
        values = torch.zeros(self.batch, self.slots * self.dim)
        values.uniform_(-0.01, 0.01).requires_grad_()
        start = time.perf_counter()
        for _ in range(count):
            logits = self.model.dense(values).squeeze(1)
            loss = binary_cross_entropy_with_logits(logits, self.label)
            self.optimizer.zero_grad(set_to_none=True)
            values.grad = None
            loss.backward()
            self.optimizer.step()
        return time.perf_counter() - start

    def widen(self, widths: list[int]) -> None:
        """Another dense part."""
        self.model.dense = mlp(
            self.slots * self.dim, [*widths, 1], last_relu=False
        )
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), lr=0.01, fused=True
        )

    def save(self, path: str) -> None:
        self.store.save(path)

    def load(self, path: str) -> float:
        """Seconds until all rows of a checkpoint are there."""
        start = time.perf_counter()
        self.store.load(path)
        return time.perf_counter() - start

    # ---- what there is

    def rows(self) -> int:
        tables: dict[str, Any] = self.store.stats()["tables"]
        return sum(t["rows"] for t in tables.values())

    def table_bytes(self) -> int:
        """Of rows and index, on all servers."""
        tables: dict[str, Any] = self.store.stats()["tables"]
        return sum(t["bytes"] for t in tables.values())

    def stats(self) -> dict[str, Any]:
        stats: dict[str, Any] = self.store.stats()
        return stats

    def close(self) -> None:
        self.store.close()


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    loops: dict[str, Loop] = {}
    for line in sys.stdin:
        request = json.loads(line)
        name, args = request["call"], request["args"]
        key = args.pop("loop", "")
        answer: dict[str, Any]
        try:
            if name == "open":
                loops[key] = Loop(**args)
                answer = {"result": None}
            else:
                answer = {"result": getattr(loops[key], name)(**args)}
                if name == "close":
                    del loops[key]
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
