"""What a process does with HDFS, for test_hdfs.py.

    hdfs_job.py URL train | read | gone

A process of its own: the client library starts a Java machine in it.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from pyarrow import fs

import persia
from persia import errors
from persia.data import Files, Schema

SCHEMA = Schema(label="label", dense=["x"], categorical=["user"])
ROWS = 100
NAMES = ["dt=2024-01-01/a", "dt=2024-01-02/a", "odd %25 ü = name/b"]


def write(system: fs.FileSystem) -> None:
    for k, name in enumerate(NAMES):
        folder = f"/data/{name}".rpartition("/")[0]
        system.create_dir(folder)
        columns = {
            "label": [i % 2 for i in range(ROWS)],
            "user": [f"u{i * (k + 2) % 17}" for i in range(ROWS)],
            "x": [float(i) for i in range(ROWS)],
        }
        # A DataNode reports to the NameNode some time after both are there.
        deadline = time.monotonic() + 30
        while True:
            try:
                with system.open_output_stream(f"/data/{name}.parquet") as f:
                    pq.write_table(pa.table(columns), f)
                break
            except OSError:
                assert time.monotonic() < deadline
                time.sleep(0.5)


class Job:
    def __init__(self, url: str) -> None:
        self.store = persia.Store(persia.optim.Adam(lr=0.1), seed=3)
        tables = [persia.EmbeddingBagConfig("user", 4, ["user"])]
        bags = persia.EmbeddingBagCollection(store=self.store, tables=tables)
        torch.manual_seed(0)
        self.model = persia.models.DLRM(bags, 1)
        self.dense = torch.optim.SGD(self.model.parameters(), 0.1)
        data = Files(f"{url}/data/dt=*/*.parquet", SCHEMA, 10)
        self.loader = persia.DataLoader(data, self.model, staleness=0)
        self.batches: Iterator[persia.Batch] | None = None
        self.all = {
            "model": self.model,
            "optimizer": self.dense,
            "loader": self.loader,
        }

    def steps(self, n: int) -> None:
        """The next ones of one pass."""
        if self.batches is None:
            self.batches = iter(self.loader)
        for _, one in zip(range(n), self.batches):
            out = self.model(one.dense, one.ids)
            loss = torch.nn.functional.mse_loss(out, one.label)
            self.dense.zero_grad()
            loss.backward()
            self.dense.step()

    def rows(self) -> list[torch.Tensor]:
        ids = self.store.ids("user").sort().values
        return [ids, *self.store.rows_and_state("user", ids)]


def train(url: str) -> None:
    """A restart has the bits of one that goes through; older steps go."""
    write(fs.FileSystem.from_uri(url)[0])
    whole = Job(url)
    whole.steps(16)
    first = Job(url)
    first.steps(6)
    for _ in range(3):
        first.steps(1)
        first.store.save(f"{url}/out", keep=2, **first.all)
    second = Job(url)
    assert second.store.load(f"{url}/out", **second.all).step == 9
    second.steps(7)
    for mine, want in zip(second.rows(), whole.rows(), strict=True):
        assert torch.equal(mine, want)
    persia.keep_rows(second.model, f"{url}/best")
    best = {k: v.clone() for k, v in second.model.state_dict().items()}
    second.store.clear()
    second.model.load_state_dict(best)
    assert torch.equal(second.rows()[1], whole.rows()[1])


def read(url: str) -> None:
    for name in NAMES:
        data = Files(f"{url}/data/{name}.parquet", SCHEMA, 10)
        assert sum(len(one) for one in data) == ROWS


def gone(url: str) -> None:
    store = persia.Store(persia.optim.Adam(lr=0.1))
    for call in (
        lambda: read(url),
        lambda: list(Files(f"{url}/data/*/*.parquet", SCHEMA, 10)),
        lambda: store.load(f"{url}/out"),
        lambda: store.save(f"{url}/out", step=50),
    ):
        with pytest.raises(errors.StorageError) as found:
            call()
        text = str(found.value)
        assert not re.search("no (file|checkpoint)", text)


if __name__ == "__main__":
    globals()[sys.argv[2]](sys.argv[1])
