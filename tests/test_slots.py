"""Ids in slots, and what earlier releases saved: they placed ids in ranges of
65,536ths of the hash, which end within slots unless the number of shards is
a power of two."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import persia
from persia import errors
from persia.checkpoint import files
from persia.checkpoint import manifest as manifests
from persia.checkpoint.snapshot import RowsFile, Snapshot
from persia.distributed import server
from tests.checkpoints import assert_same_rows, fill, make_store
from tests.test_checkpoint_shards import TABLES, save_shards


@contextlib.contextmanager
def serving(folder: Path, n: int, **more: Any) -> Iterator[list[str]]:
    """Addresses of n servers."""
    made: list[server.Server] = []
    try:
        for i in range(n):
            config = server.ServeConfig(
                port=0, shard=f"{i}/{n}", checkpoints=folder, threads=1, **more
            )
            made.append(server.Server(config))
            made[-1].restore()
        yield [one.start() for one in made]
    finally:
        for one in made:
            one.stop()
            one.close()


@pytest.fixture
def whole() -> persia.Store:
    store = make_store("adagrad", *TABLES)
    for seed, (table, _, _) in enumerate(TABLES):
        fill(store, table, 20_000, seed)
    return store


def assert_served(whole: persia.Store, addresses: list[str]) -> None:
    with make_store("adagrad", *TABLES, servers=addresses) as store:
        for table, _, _ in TABLES:
            assert_same_rows(whole, store, table)


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("slots", [4096, 65536])
def test_checkpoints_load_by_id(
    whole: persia.Store, tmp_path: Path, n: int, slots: int
) -> None:
    save_shards(tmp_path / "job", whole, 3, slots)
    with serving(tmp_path, n, restore="job") as addresses:
        assert_served(whole, addresses)


def save_own(root: Path, whole: persia.Store) -> None:
    """As three servers of an earlier release did on exit."""
    folder = save_shards(root / "job", whole, 3, 65536)
    manifest = files.find(files.LocalRoot(folder), None).manifest
    for shard in range(3):
        own = root / f"own-{shard}-of-3" / "rows"
        own.mkdir(parents=True)
        rows = []
        for number, table in enumerate(manifest.tables):
            for file in table.files:
                if file.shard != shard:
                    continue
                shutil.copy(folder / file.name, own)
                entry = file.model_dump(exclude={"shard"})
                rows.append(RowsFile(table=number, **entry))
        snapshot = Snapshot(
            saved=manifest.saved,
            shard=shard,
            shards=3,
            lineage=int(manifest.lineage, 16),
            updates=7,
            sync_step=0,
            tables=[
                table.native() | {"momentum": int(table.momentum)}
                for table in manifest.tables
            ],
            pushes=[table.pushes[shard] for table in manifest.tables],
            ledgers=[],
            files=rows,
        )
        document = snapshot.model_dump(mode="json", exclude={"slots", "t"})
        text = manifests.encode_manifest(document)
        (own / "shard.json").write_bytes(text)


def test_own_snapshots_load_by_id(whole: persia.Store, tmp_path: Path) -> None:
    save_own(tmp_path, whole)
    with serving(tmp_path, 3, restore="own") as addresses:
        assert_served(whole, addresses)
    shutil.rmtree(tmp_path / "own-1-of-3")
    with (
        pytest.raises(errors.StorageError, match="own-1-of-3"),
        serving(tmp_path, 3, restore="own"),
    ):
        pass
