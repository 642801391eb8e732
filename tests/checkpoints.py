"""Stores and models that the tests of checkpoints share."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import persia
from persia import _core, optim
from persia.checkpoint import files
from persia.checkpoint import manifest as manifests
from persia.store.engine import engine_of

OPTIMIZERS: dict[str, Callable[[], optim.SparseOptimizer]] = {
    "sgd": lambda: optim.SGD(lr=0.1),
    "momentum": lambda: optim.SGD(lr=0.1, momentum=0.9, weight_decay=0.01),
    "adagrad": lambda: optim.Adagrad(lr=0.1, initial_accumulator_value=0.5),
    "rowwise_adagrad": lambda: optim.RowWiseAdagrad(lr=0.1),
    "adam": lambda: optim.Adam(lr=0.01, max_norm=2.0),
    "adamw": lambda: optim.AdamW(lr=0.01),
    "rowwise_adam": lambda: optim.RowWiseAdam(lr=0.01),
    "ftrl": lambda: optim.FTRL(l1=0.1, initial_accumulator_value=0.5),
}


DTYPES = ["fp32", "bf16", "int8"]


def make_store(
    optimizer: str = "adagrad",
    *tables: tuple[str, int, str],
    seed: int = 7,
    **options: Any,
) -> persia.Store:
    """A store with tables (name, dim, dtype); ("t", 4, "fp32") by default."""
    store = persia.Store(OPTIMIZERS[optimizer](), seed=seed, **options)
    for name, dim, dtype in tables or (("t", 4, "fp32"),):
        store.add_table(persia.EmbeddingBagConfig(name, dim, data_type=dtype))
    return store


def fill(store: persia.Store, table: str, n: int, seed: int = 0) -> None:
    """n rows of random ids (the whole range of int64), vectors and state."""
    rng = np.random.default_rng(seed)
    number = engine_of(store).tables[table].number
    ids = rng.integers(-(2**63), 2**63, n, dtype=np.int64)
    vectors = rng.normal(size=(n, store.tables[table].embedding_dim))
    state = rng.random((n, engine_of(store).core.state_floats(number)))
    store.set_rows(
        table, ids, torch.from_numpy(vectors), torch.from_numpy(state)
    )


def contents(store: persia.Store, table: str) -> tuple[torch.Tensor, ...]:
    """All of a table in the order of its ids: ids, vectors, state."""
    ids = store.ids(table).sort().values
    vectors, state, found = store.rows_and_state(table, ids)
    assert found.all()
    return ids, vectors, state


def assert_same_rows(a: persia.Store, b: persia.Store, table: str) -> None:
    for x, y in zip(contents(a, table), contents(b, table)):
        assert torch.equal(x, y)


class Trained:
    """A model that uses all that has a state: dropout, scheduler, Adam."""

    def __init__(self, optimizer: str, dtype: str, **options: Any) -> None:
        torch.manual_seed(0)
        self.store = persia.Store(OPTIMIZERS[optimizer](), seed=5, **options)
        bags = persia.EmbeddingBagCollection(
            store=self.store,
            tables=[
                persia.EmbeddingBagConfig("u", 8, data_type=dtype),
                persia.EmbeddingBagConfig(
                    "i", 6, optimizer=optim.Adam(lr=0.02), data_type=dtype
                ),
            ],
        )
        self.bags = bags
        self.model = torch.nn.ModuleDict(
            {
                "bags": bags,
                "top": torch.nn.Sequential(
                    torch.nn.Dropout(0.3), torch.nn.Linear(14, 1)
                ),
            }
        )
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.schedulers = [
            torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9),
            torch.optim.lr_scheduler.LambdaLR(
                self.store.optimizer, lambda k: 1 / (1 + k)
            ),
        ]

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.schedulers,
        }

    def batch(self, step: int) -> persia.JaggedBatch:
        """Later steps have ids that no step had before."""
        rng = np.random.default_rng(step)
        values = rng.integers(0, 40 + 20 * step, 60)
        return persia.JaggedBatch(["u", "i"], torch.from_numpy(values))

    def step(self, ids: persia.JaggedBatch) -> float:
        out = self.model["top"](self.bags(ids).values())
        loss = (out - torch.rand(30, 1)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        for scheduler in self.schedulers:
            scheduler.step()
        return loss.item()

    def train(self, first: int, last: int) -> list[float]:
        return [self.step(self.batch(step)) for step in range(first, last)]


def counting_store() -> tuple[persia.Store, Callable[[], None]]:
    """A store in which every row holds the number of pushes it has seen."""
    store = persia.Store(optim.SGD(lr=1.0))
    bags = persia.EmbeddingBagCollection(
        store=store,
        tables=[
            persia.EmbeddingBagConfig(
                name, 2, feature_names=[name], init=("constant", 0.0)
            )
            for name in ("a", "b")
        ],
    )
    batch = persia.JaggedBatch(["a", "b"], torch.arange(2000).repeat(2))

    def push() -> None:
        bags(batch).values().sum().neg().backward()

    return store, push


def snapshot(trained: Trained) -> tuple[Any, ...]:
    rows = [contents(trained.store, table) for table in ("u", "i")]
    dense = {
        k: v.clone() for k, v in trained.model["top"].state_dict().items()
    }
    adam = trained.optimizer.state_dict()["state"]
    moments = [s["exp_avg"].clone() for s in adam.values()]
    lr = [g["lr"] for g in trained.store.optimizer.param_groups]
    return rows, dense, moments, lr, trained.store.updates


def assert_same(a: Any, b: Any) -> None:
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        assert_same(list(a.values()), list(b.values()))
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b):
            assert_same(x, y)
    else:
        assert a == b


def resign(folder: Path, **changes: Any) -> None:
    """Makes the manifest agree with altered files, as a forger would."""
    document = json.loads((folder / "manifest.json").read_text()) | changes
    entries = [f for t in document["tables"] for f in t["files"]]
    with files.opened(folder) as descriptor:
        for entry in [*entries, document["dense"]]:
            if (folder / entry["name"]).is_file():
                size, crc = _core.ckpt_file_crc(descriptor, entry["name"])
                entry |= {"bytes": size, "crc32c": f"{crc:08x}"}
    text = manifests.encode_manifest(document)
    (folder / "manifest.json").write_bytes(text)
