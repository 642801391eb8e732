"""A model that trains and publishes, for the tests of deltas."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pyarrow import fs
from torch import Tensor, nn

import persia
from persia.serving import ExportedModel, Publisher
from persia.serving.deltas.packet import packet_name
from tests.serving import models

IDS = torch.arange(-60, 60)


def trained(steps: int = 1, **more: Any) -> tuple[persia.Store, nn.Module]:
    """A store, and a model of it after some steps."""
    store = models.store()
    model = model_of(store, **more)
    train(model, steps)
    return store, model


def model_of(where: persia.Store, capacity: int | None = None) -> nn.Module:
    eviction = None if capacity is None else "lru"
    return models.CLICKS["widedeep"](
        persia.EmbeddingBagCollection(
            store=where,
            tables=[
                persia.EmbeddingBagConfig(
                    key, 8, [key], capacity=capacity, eviction=eviction
                )
                for key in models.KEYS
            ],
        )
    )


def train(model: nn.Module, steps: int = 1) -> None:
    models.train(model, lambda: models.batch(16), steps)


def start(model: nn.Module, root: Path | str, **options: Any) -> Publisher:
    example = models.batch(3)
    return Publisher(model, root, example=example, every=1e-3, **options)


def published(publisher: Publisher) -> None:
    publisher.flush()
    assert publisher.publish()
    publisher.flush()


def same(loaded: ExportedModel, model: nn.Module, where: Path) -> None:
    """A loaded model is an export of this moment, bit for bit."""
    shutil.rmtree(where, ignore_errors=True)
    persia.export(
        model,
        where,
        example=models.batch(3),
        row_dtype=loaded.manifest.tables[0].type,
    )
    want = persia.load_model(where)
    for table in (t.options.name for t in want.manifest.tables):
        has = want.has_rows(table, IDS)
        assert torch.equal(loaded.has_rows(table, IDS), has)
        assert torch.equal(
            loaded.vectors(table, IDS), want.vectors(table, IDS)
        )
    call = models.batch(9)
    assert torch.equal(loaded(*call), want(*call))
    model.train()


def answer(model: ExportedModel) -> Tensor:
    torch.manual_seed(9)
    return model(*models.batch(9))


def train_others(store: persia.Store) -> None:
    store.set_rows("b", [1, 2, 3], torch.zeros(3, 8))


class Root(NamedTuple):
    """Where models are published: the path or URL, and the files there."""

    path: str
    files: fs.FileSystem


class Chain:
    """A chain of packets that was published, and its files.

    Args:
        root: where it is published.
        packets: how many.
        options: of the publisher.
    """

    def __init__(self, root: Root, packets: int, **options: Any) -> None:
        self.path = root.path
        self._files = root.files
        store, model = trained()
        with start(model, root.path, **options) as publisher:
            for _ in range(packets):
                train(model)
                published(publisher)
            self.name = publisher.place.chain
        store.close()

    def read(self, number: int) -> bytes:
        """The file of a packet, from 1 on."""
        with self._files.open_input_stream(self._path(number)) as file:
            return bytes(file.read())

    def write(self, number: int, data: bytes) -> None:
        """Another file in its place."""
        with self._files.open_output_stream(self._path(number)) as file:
            file.write(data)

    def remove(self, number: int) -> None:
        """Its file is lost."""
        self._files.delete_file(self._path(number))

    def _path(self, number: int) -> str:
        return packet_name(self.name, number)


class Versioned(nn.Module):
    """Its rows, and one number of its dense part: all are f(version) in all
    elements."""

    def __init__(self, store: persia.Store) -> None:
        super().__init__()
        self.rows = persia.EmbeddingBagCollection(
            store=store, tables=[persia.EmbeddingBagConfig("t", 8, ["t"])]
        )
        self.version = nn.Parameter(torch.zeros(1))

    #: All ids that there are.
    example = (persia.JaggedBatch(["t"], torch.arange(64)),)

    def forward(self, ids: Any) -> Tensor:
        rows = self.rows(ids).values()
        more = self.version.expand(rows.shape[0], 1)
        return torch.cat([rows, more], 1)

    def set(self, version: int) -> None:
        """Makes another version of it."""
        vectors = torch.full((64, 8), float(version))
        self.rows.store.set_rows("t", range(64), vectors)
        with torch.no_grad():
            self.version.fill_(float(version))
