"""Checkpoints of many shards, and of the version before."""

from __future__ import annotations

import json
import random
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import persia
from persia import _core, errors, optim
from persia.checkpoint import files
from persia.checkpoint import manifest as manifests
from persia.checkpoint.ledgers import Numbers
from persia.store.engine import engine_of
from tests.checkpoints import assert_same_rows, contents, fill, make_store

QUICK = settings(
    max_examples=25,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
TABLES = (("a", 3, "fp32"), ("b", 2, "bf16"))


def low_bits(ids: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The part of splitmix64's hash that chooses the shard."""
    h = ids.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    h = (h ^ (h >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    h = (h ^ (h >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (h ^ (h >> np.uint64(31))) & np.uint64(0xFFFF)


def shard_of(
    ids: np.ndarray[Any, Any], shards: int, slots: int = 4096
) -> np.ndarray[Any, Any]:
    """Range i of N: [i * slots / N, (i + 1) * slots / N)."""
    slot = low_bits(ids).astype(np.int64) // (65536 // slots)
    return slot * shards // slots


def read_ids(path: Path) -> np.ndarray[Any, Any]:
    with safetensors.safe_open(path, "numpy") as file:
        return np.asarray(file.get_tensor("ids"))


def save_shards(
    root: Path, whole: persia.Store, n: int, slots: int = 4096, **more: Any
) -> Path:
    """A checkpoint of the rows of `whole`, as n shards would write it."""
    folder = root / "step-1"
    parts = []
    for shard in range(n):
        store = make_store("adagrad", *TABLES)
        for table, _, _ in TABLES:
            ids, vectors, state = contents(whole, table)
            mine = torch.from_numpy(shard_of(ids.numpy(), n, slots) == shard)
            store.set_rows(table, ids[mine], vectors[mine], state[mine])
        source = Path(store.save(root / f".{shard}"))
        part = manifests.part_of(
            files.find(files.LocalRoot(source), None).manifest, 0, 1
        )
        folder.mkdir(exist_ok=True)
        for file in part.files:
            (source / file.name).rename(folder / f"s{shard}-{file.name}")
        renamed = [f._replace(name=f"s{shard}-{f.name}") for f in part.files]
        ledger = Numbers(7, 10 + shard, bytes(512))
        parts.append(
            manifests.Part(
                *(100 + shard, 50, 300 + shard),
                *([200 + shard, shard], [ledger], renamed),
            )
        )
    shutil.copy(source / "dense.pt", folder)
    document = json.loads((source / "manifest.json").read_text())
    described = _core.ckpt_tables(engine_of(whole).handle)
    document |= manifests.to_manifest(described, parts) | {"step": 1} | more
    document["slots"] = slots
    (folder / "manifest.json").write_bytes(manifests.encode_manifest(document))
    (root / "LATEST").write_text("step-1\n")
    return folder


@QUICK
@given(
    n=st.integers(1, 5),
    m=st.integers(1, 5),
    rows=st.integers(0, 400),
    slots=st.sampled_from([4096, 65536]),
)
@example(n=3, m=3, rows=4000, slots=65536)
@example(n=3, m=2, rows=4000, slots=65536)
def test_other_numbers_of_shards(
    tmp_path: Path, n: int, m: int, rows: int, slots: int
) -> None:
    root = tmp_path / "root"
    shutil.rmtree(root, ignore_errors=True)
    whole = make_store("adagrad", *TABLES)
    for table, _, _ in TABLES:
        fill(whole, table, rows, seed=rows)
    folder = save_shards(root, whole, n, slots)

    embedded = make_store("adagrad", *TABLES)
    found = embedded.load(root)
    assert found.rows == {"a": rows, "b": rows}
    assert embedded.updates == 100 + n - 1
    stats = embedded.stats()["tables"]
    assert [stats[t]["pushes"] for t in "ab"] == [200 + n - 1, n - 1]
    for table, _, _ in TABLES:
        assert_same_rows(whole, embedded, table)

    ids = [[np.zeros(0, dtype=np.uint64)] for _ in TABLES]
    for shard in range(m):
        where, manifest, part = files.shard_part(root, shard, m)
        assert where == folder
        opened = {file.name for file in part.files}
        for number, table in enumerate(manifest.tables):
            for file in table.files:
                got = read_ids(folder / file.name)
                mine = got[shard_of(got, m) == shard]
                if file.name in opened:
                    ids[number].append(mine)
                else:
                    assert len(mine) == 0
        if n == m and (slots == 4096 or 4096 % n == 0):
            assert len(opened) == sum(
                file.shard == shard
                for t in manifest.tables
                for file in t.files
            )
            assert (part.updates, part.t) == (100 + shard, 300 + shard)
            assert part.pushes == [200 + shard, shard]
            assert part.ledgers == [(7, 10 + shard, bytes(512), 0, 0)]
        elif n == m:
            assert (part.updates, part.t) == (100 + shard, 300 + shard)
            assert 200 + shard <= part.pushes[0] <= 200 + n - 1
            assert part.ledgers == [(7, 10 + shard, bytes(512), 0, 0)]
        else:
            assert (part.updates, part.t) == (100 + n - 1, 300 + n - 1)
            assert part.pushes == [200 + n - 1, n - 1]
            # A number up to the last is missing somewhere, but for 10.
            assert part.ledgers == [(7, 10 + n - 1, bytes(512), n - 1, 0)]
    for number, (table, _, _) in enumerate(TABLES):
        read = np.sort(np.concatenate(ids[number]).view(np.int64))
        assert np.array_equal(read, whole.ids(table).sort().values.numpy())


def test_a_manifest_without_t_has_the_count_of_updates(tmp_path: Path) -> None:
    folder = save_shards(tmp_path, make_store("adagrad", *TABLES), 2)
    path = folder / "manifest.json"
    document = json.loads(path.read_text())
    for shard in document["shards"]:
        del shard["t"]
    path.write_bytes(manifests.encode_manifest(document))
    for shards, expected in (2, [100, 101]), (1, [101]):
        parts = [
            files.shard_part(tmp_path, i, shards)[2] for i in range(shards)
        ]
        assert [part.t for part in parts] == expected


def test_only_files_that_overlap_are_opened() -> None:
    for n in range(1, 8):
        for m in range(1, 8):
            overlap = {
                (int(low) // 16 * n // 4096, int(low) // 16 * m // 4096)
                for low in np.arange(65536)[:: 65536 // 1024]
            }
            for shard in range(m):
                mine = manifests.hash_range(shard, m)
                for i in range(n):
                    theirs = manifests.hash_range(i, n)
                    both = range(
                        max(mine.start, theirs.start),
                        min(mine.stop, theirs.stop),
                    )
                    assert bool(both) >= ((i, shard) in overlap)
            every = [
                low for i in range(n) for low in manifests.hash_range(i, n)
            ]
            assert every == list(range(65536))
            assert all(
                low // 16 * n // 4096 == i
                for i in range(n)
                for low in manifests.hash_range(i, n)
            )


def told(manifest: manifests.Manifest, shards: int) -> int:
    """What a load into so many shards warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lost = manifests.warn_in_part(manifest, "here", shards)
    assert len(caught) == (lost > 0)
    return lost


# Numbers of updates that a shard has, beginning with 1..watermark.
APPLIED = st.builds(
    lambda mark, more: set(range(1, mark + 1)) | {mark + k for k in more},
    st.integers(0, 20),
    st.sets(st.integers(2, 60)),
)


def to_ledger(stream: int, applied: set[int]) -> Numbers:
    mark = 0
    while mark + 1 in applied:
        mark += 1
    window = sum(1 << k - mark - 1 for k in applied if k > mark)
    return Numbers(stream, mark, window.to_bytes(512, "little"))


@settings(max_examples=200)
@given(
    shards=st.lists(st.dictionaries(st.integers(1, 3), APPLIED), min_size=2)
)
def test_an_update_counts_if_all_shards_had_it(
    shards: list[dict[int, set[int]]],
) -> None:
    """Others are not taken again, and counted."""
    parts = [
        manifests.Part(
            0, 0, 0, [], [to_ledger(*item) for item in one.items()], []
        )
        for one in shards
    ]
    document = {
        "format": "persia.checkpoint",
        "version": 2,
        "id": "",
        "lineage": "",
        "step": 0,
        "saved": "",
        "torch": "",
        "dense": {"name": "d", "bytes": 0, "crc32c": "00000000"},
    } | manifests.to_manifest([], parts)
    manifest = manifests.decode_manifest(
        manifests.encode_manifest(document), "here"
    )
    any_has: dict[int, set[int]] = {}
    all_have: dict[int, set[int]] = {}
    for stream in set().union(*shards):
        sets = [one.get(stream, set()) for one in shards]
        any_has[stream] = set().union(*sets)
        all_have[stream] = any_has[stream].intersection(*sets)
    n = len(shards)
    merged = manifests.part_of(manifest, 0, n + 1).ledgers
    assert sorted(each._replace(skipped=0) for each in merged) == sorted(
        to_ledger(*item) for item in any_has.items()
    )
    applied = {each.stream: each.applied() for each in merged}
    assert applied == {name: len(all_have[name]) for name in all_have}
    lost = sum(len(any_has[name] - all_have[name]) for name in all_have)
    assert told(manifest, n + 1) == lost
    assert told(manifest, n) == 0
    own = manifests.part_of(manifest, n - 1, n)
    assert list(own.ledgers) == list(parts[-1].ledgers)


@settings(max_examples=300)
@given(mine=APPLIED, theirs=APPLIED)
def test_ledgers_are_sets_of_updates(mine: set[int], theirs: set[int]) -> None:
    one, other = to_ledger(1, mine), to_ledger(1, theirs)
    assert one.applied() == len(mine)
    assert one.lacks(other) == len(theirs - mine)


@pytest.mark.parametrize(("shard", "shards"), [(2, 2), (-1, 2), (0, 4097)])
def test_shards_that_are_not_there(
    tmp_path: Path, shard: int, shards: int
) -> None:
    make_store().save(tmp_path)
    with pytest.raises(errors.InvalidArgument, match=f"{shard} of {shards}"):
        files.shard_part(tmp_path, shard, shards)


@pytest.mark.parametrize("what", ["file", "clock", "name", "table", "clocks"])
def test_forged_shards(tmp_path: Path, what: str) -> None:
    whole = make_store("adagrad", *TABLES)
    fill(whole, "a", 50)
    folder = save_shards(tmp_path, whole, 2)
    document = json.loads((folder / "manifest.json").read_text())
    table = document["tables"][0]
    if what == "file":
        table["files"][0]["shard"] = 2
    elif what == "clock":
        table["pushes"][0] = -1
    elif what == "clocks":
        table["pushes"].append(1)
    elif what == "name":
        table["files"][1]["name"] = table["files"][0]["name"]
    elif what == "table":
        document["tables"][1]["name"] = "a"
    (folder / "manifest.json").write_bytes(manifests.encode_manifest(document))
    for read in (whole.load, lambda root: files.shard_part(root, 0, 2)):
        with pytest.raises(errors.CorruptFile, match=r"manifest\.json"):
            read(tmp_path)


@pytest.mark.parametrize("shard", ["s0", "s1"])
def test_altered_files_of_any_shard_are_named(
    tmp_path: Path, shard: str
) -> None:
    whole = make_store("adagrad", *TABLES)
    fill(whole, "a", 50)
    folder = save_shards(tmp_path, whole, 2)
    (path,) = folder.glob(f"{shard}-*-table-0-*.safetensors")
    data = path.read_bytes()
    for bad in (data[:-1], data[:-9] + b"x" + data[-8:]):
        path.write_bytes(bad)
        with pytest.raises(errors.CorruptFile, match=path.name):
            make_store("adagrad", *TABLES).load(tmp_path)


def test_options_as_the_core_takes_them(tmp_path: Path) -> None:
    store = make_store("adam", ("x", 4, "bf16"), seed=3, nonfinite="skip")
    store.add_table(
        persia.EmbeddingBagConfig(
            "y",
            5,
            init=("normal", 0.5, 0.25),
            optimizer=optim.SGD(lr=1, momentum=0.5),
            capacity=10,
            eviction="lru",
            admission=0.5,
        )
    )
    store.add_table(
        persia.EmbeddingBagConfig(
            "z",
            6,
            capacity=10,
            eviction=persia.eviction.Score("age / count"),
            admission=persia.admission.Sightings(3),
        )
    )
    store.save(tmp_path)
    core = _core.Store(1, 0)
    for table in files.shard_part(tmp_path, 0, 1).manifest.tables:
        core.declare(**table.native())
    assert _core.ckpt_tables(core.handle) == _core.ckpt_tables(
        engine_of(store).handle
    )


# ---- version 1 -------------------------------------------------------------


def test_version_1_is_read() -> None:
    """As the Persia that wrote it described its content."""
    path = Path(__file__).parent / "data" / "checkpoint-version-1"
    store = persia.Store(optim.Adagrad(lr=0.1), seed=11)
    bags = persia.EmbeddingBagCollection(
        store=store,
        tables=[
            persia.EmbeddingBagConfig("user", 3),
            persia.EmbeddingBagConfig(
                "item", 2, data_type="bf16", optimizer=optim.Adam(lr=0.01)
            ),
        ],
    )
    model = torch.nn.ModuleDict({"bags": bags, "top": torch.nn.Linear(5, 1)})
    optimizer = torch.optim.SGD(model["top"].parameters(), lr=0.25)
    loader: Any = persia.DataLoader([], model, 0)
    found = store.load(path, model=model, optimizer=optimizer, loader=loader)
    assert found.extra == {"note": "version 1"}
    assert found.step == store.updates == 2
    assert found.rows == {"user": 5, "item": 5}
    assert loader.state_dict()["batches"] == 2
    assert optimizer.param_groups[0]["lr"] == 0.5
    user = store.rows("user", [0, 4, 5])
    assert user[0, 0].item() == -0.10778749734163284
    assert user[1, 2].item() == -0.09872160851955414
    item = store.rows("item", [8])
    assert item[0].tolist() == [0.0023193359375, -0.0086669921875]
    assert model["top"].weight[0, 4].item() == -0.017284195870161057
    assert torch.rand(2).tolist() == [0.7718658447265625, 0.7436993718147278]
    assert random.random() == 0.23796462709189137
    stats = store.stats()["tables"]
    assert [stats[t]["pushes"] for t in ("user", "item")] == [2, 2]
    part = files.shard_part(path, 3, 4).part
    assert (part.updates, part.pushes, part.ledgers) == (2, [2, 2], [])
    assert len(part.files) == 2
